"""Saves and logs the figures that a method draws of itself."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from callbacks.base import HasFigures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Figures"]


class Figures(Callback):
    """Saves ``module.figures()`` under ``<run>/figures`` after validation and after testing.

    Every logger that takes images (W&B, TensorBoard) gets them too, as ``figures/<name>``. A module
    without ``figures`` is left alone, as is one that returns none.

    ``figures()`` is called on every rank, so that it may gather sharded weights or metrics; only
    the first rank writes.

    Args:
        every_n_epochs: draw after the validation of each n-th epoch; testing always draws.
        format: file format of the figures on disk, any that matplotlib writes. Loggers get PNG.
        dpi: dots per inch.
        keep_all: keep one file per epoch (``<name>-epoch=3.png``) instead of the newest alone.

    Raises:
        ValueError: for ``every_n_epochs`` or ``dpi`` below 1.
    """

    def __init__(
        self, every_n_epochs: int = 1, format: str = "png", dpi: int = 120, keep_all: bool = False
    ) -> None:
        super().__init__()
        if every_n_epochs < 1:
            raise ValueError(f"every_n_epochs must be at least 1, got {every_n_epochs}")
        if dpi < 1:
            raise ValueError(f"dpi must be at least 1, got {dpi}")
        self.every_n_epochs = every_n_epochs
        self.format = format
        self.dpi = dpi
        self.keep_all = keep_all

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw after validation."""
        in_fit = trainer.state.fn == "fit"
        if not in_fit or (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._draw(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw after testing."""
        self._draw(trainer, pl_module)

    def _draw(self, trainer: Trainer, pl_module: LightningModule) -> None:
        fast_dev_run: bool = trainer.fast_dev_run  # type: ignore[attr-defined]
        if trainer.sanity_checking or fast_dev_run or not isinstance(pl_module, HasFigures):
            return
        import matplotlib

        if "matplotlib.pyplot" not in sys.modules:
            # A run must not open windows; who has imported pyplot has chosen a backend already.
            matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        log_dir = trainer.log_dir  # collective: every rank has to ask
        figures = pl_module.figures()
        try:
            if trainer.is_global_zero and figures:
                self._save(trainer, figures, Path(log_dir or trainer.default_root_dir) / "figures")
        finally:
            for figure in figures.values():
                plt.close(figure)

    def _save(self, trainer: Trainer, figures: "Mapping[str, Figure]", folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            stem = re.sub(r"[^\w.=+-]+", "_", name)
            if self.keep_all:
                stem += f"-epoch={trainer.current_epoch}"
            path = folder / f"{stem}.{self.format}"
            figure.savefig(path, dpi=self.dpi, bbox_inches="tight")
            for logger in trainer.loggers:
                try:
                    self._log(logger, f"figures/{name}", figure, path, trainer.global_step)
                except Exception as error:  # a lost upload must not end a run of many hours
                    rank_zero_warn(f"figure {name!r} is saved but was not logged: {error}")

    def _log(self, logger: Any, key: str, figure: "Figure", path: Path, step: int) -> None:
        if hasattr(logger, "log_image"):
            if path.suffix != ".png":
                path = path.with_suffix(".png")
                figure.savefig(path, dpi=self.dpi, bbox_inches="tight")
            logger.log_image(key, [str(path)])
        elif hasattr(getattr(logger, "experiment", None), "add_figure"):
            logger.experiment.add_figure(key, figure, global_step=step, close=False)
