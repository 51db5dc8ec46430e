"""Early stopping on the metric that the module names."""

from typing import Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from callbacks.checkpoint import check_monitor


class EarlyStop(EarlyStopping):
    """`EarlyStopping` that watches the module's own metric; off unless `patience` is given.

    Args:
        patience: Validations without improvement after which training ends; `None` never ends it.
        min_delta: Least change that counts as an improvement.
        monitor: Metric to watch; `None` takes the module's `monitor` and `mode`.
        mode: Whether less or more is better; goes with `monitor`.

    Raises:
        ValueError: If one of `monitor` and `mode` is given without the other.
    """

    def __init__(
        self,
        patience: int | None = None,
        min_delta: float = 0.0,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        check_monitor(monitor, mode)
        self._wanted = monitor, mode
        self.enabled = patience is not None
        super().__init__(
            monitor=monitor or "",
            mode=mode or "min",
            patience=patience or 0,
            min_delta=abs(min_delta),
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take metric and direction from the module where the user gave none."""
        monitor, mode = self._wanted
        self.monitor = str(monitor or getattr(pl_module, "monitor", "val/loss"))
        self.mode = str(mode or getattr(pl_module, "mode", "min"))
        sign = 1 if self.mode == "max" else -1
        self.min_delta = sign * abs(self.min_delta)
        self.best_score = torch.tensor(-sign * torch.inf)
        super().setup(trainer, pl_module, stage)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the metric, if enabled."""
        if self.enabled:
            super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the metric, if enabled."""
        if self.enabled:
            super().on_train_epoch_end(trainer, pl_module)
