"""Watches, layer by layer, whether the signal of a network stays healthy while it trains."""

import csv
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from callbacks.signal_figure import log_or_nan, signal_figure
from lightning_modules.components.propagation import ROLES, LayerSignals, Roles, measure_signals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["HasProbeLoss", "SignalPropagation"]

COLUMNS = (
    "step", "epoch", "layer", "weight_gap", "fc_gap", "norm_gap", "act_gap", "grad_norm",
)  # fmt: skip


@runtime_checkable
class HasProbeLoss(Protocol):
    """Computes its loss on a batch without logging or any other effect."""

    def probe_loss(self, batch: Any) -> Tensor:
        """Return the scalar loss."""
        ...


class SignalPropagation(Callback):
    r"""Measures isometry gaps and gradient norms of every layer on one fixed batch.

    Works on any module: layers are found by name. The measurement runs the module forward and
    backward once and leaves nothing behind: running statistics and other buffers, metrics,
    ``.grad``, random generators and the data's position are as before.

    The probe is the first training batch, the same on every rank. The loss is
    ``module.probe_loss(batch)`` if there is one, else ``training_step`` with logging silenced.

    Writes ``signal_propagation.csv`` to the run's folder, with one row per layer and measurement
    (``step, epoch, layer, weight_gap, fc_gap, norm_gap, act_gap, grad_norm``; the further columns
    that are asked for follow), sends each measurement to W&B as a table, and draws
    ``figures/signal_propagation.png``. A gap is ``inf`` where rows are linearly dependent.

    Logs, with ``<role>`` one of weight, fc, norm and act: ``gap/<role>/{max,min,mean}`` over the
    finite gaps and ``grad_log_norm/{max,min,mean,spread}``.

    Args:
        linear: Regular expression for the full names of linear maps; a group that matches a number
            names the layer. ``None`` takes every linear map and convolution.
        norm: The same for norms; ``None`` takes every common norm.
        activation: The same for activations; ``None`` takes every activation of PyTorch.
        every_n_epochs: Measure after each n-th epoch; 0 for not.
        every_n_steps: Measure after each n-th optimiser step as well; 0 for not.
        probe_size: Samples of the probe; ``None`` takes as many as keep gaps finite, at most the
            features of the narrowest norm or activation.
        nonzero_gaps: Whether the spread of the non-zero spectrum is measured too, as
            ``<role>_gap_nonzero``: it is finite behind norms that subtract the batch mean.
        predict: Whether ``predicted_gap`` is measured, the exact mean of ``norm_gap`` behind a
            Haar-orthogonal map, where maps are square and have as many samples as features.
        per_layer: ``scalars`` logs ``gap/<role>/layer_003`` and ``grad_log_norm/layer_003`` too,
            ``series`` draws all layers as one W&B line plot instead, ``none`` does neither.

    Raises:
        ValueError: For an argument out of range; in ``fit`` for a pattern that matches nothing, a
            ``probe_size`` above the features of a measured layer, and a module with manual
            optimisation and no ``probe_loss``.
    """

    def __init__(
        self,
        linear: str | None = None,
        norm: str | None = None,
        activation: str | None = None,
        every_n_epochs: int = 1,
        every_n_steps: int = 0,
        probe_size: int | None = None,
        nonzero_gaps: bool = False,
        predict: bool = False,
        per_layer: Literal["scalars", "series", "none"] = "scalars",
    ) -> None:
        super().__init__()
        if every_n_epochs < 0 or every_n_steps < 0:
            raise ValueError(
                f"every_n_epochs and every_n_steps must be at least 0, got {every_n_epochs} and "
                f"{every_n_steps}"
            )
        if probe_size is not None and probe_size < 2:
            raise ValueError(f"probe_size must be at least 2, got {probe_size}")
        if per_layer not in ("scalars", "series", "none"):
            raise ValueError(f"per_layer must be scalars, series or none, got {per_layer!r}")
        self.roles = Roles(linear, norm, activation)
        self.every_n_epochs, self.every_n_steps = every_n_epochs, every_n_steps
        self.probe_size = probe_size
        self.nonzero_gaps, self.predict = nonzero_gaps, predict
        self.per_layer = per_layer
        self.columns = list(COLUMNS)
        if nonzero_gaps:
            self.columns += [f"{role}_gap_nonzero" for role in ("weight", *ROLES)]
        if predict:
            self.columns.append("predicted_gap")
        self.rows: list[dict[str, float]] = []
        self._probe: Any = None
        self._measured_step = -1
        self._noted = False

    # ------------------------------------------------------------------ when

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the probe and measure before the first step."""
        self.rows, self._measured_step = [], -1
        self._probe = self._draw_probe(trainer, pl_module)
        self._measure(trainer, pl_module, trainer.current_epoch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure after every n-th step."""
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self._measure(trainer, pl_module, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure after every n-th epoch."""
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._measure(trainer, pl_module, trainer.current_epoch + 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the figure."""
        folder = trainer.log_dir or trainer.default_root_dir
        if not trainer.is_global_zero or not self.rows:
            return
        import matplotlib

        if "matplotlib.pyplot" not in sys.modules:
            matplotlib.use("Agg")  # a run must not open windows
        path = Path(folder) / "figures" / "signal_propagation.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.figure().savefig(path, dpi=150, bbox_inches="tight")
        for logger in trainer.loggers:
            if hasattr(logger, "log_image"):
                logger.log_image("figures/signal_propagation", [str(path)])

    # ------------------------------------------------------------------ measurement

    def _draw_probe(self, trainer: Trainer, pl_module: LightningModule) -> Any:
        """First training batch of rank 0, cut to the probe's size, on this rank's device."""
        batch = None
        if trainer.is_global_zero:
            data = getattr(trainer, "datamodule", None)
            with torch.random.fork_rng(devices=[]):
                loader = data.train_dataloader() if data is not None else trainer.train_dataloader
                batch = next(iter(loader))  # type: ignore[arg-type]
        batch = trainer.strategy.broadcast(batch)
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.strategy.batch_to_device(batch, pl_module.device)
        if self.probe_size is not None:
            batch = _head(batch, self.probe_size)
        signals, narrowest = self._signals(pl_module, batch)
        if signals.samples <= narrowest:
            return batch
        if self.probe_size is not None:
            raise ValueError(
                f"probe_size={self.probe_size} samples in a layer of {narrowest} features have an "
                f"infinite isometry gap: choose at most {narrowest}"
            )
        return _head(batch, narrowest)

    def _signals(self, pl_module: LightningModule, batch: Any) -> tuple[LayerSignals, int]:
        """Signals of a batch, and the features of the narrowest layer behind a norm."""
        widths: list[int] = []
        hooks = []

        def note(module: Any, arguments: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.ndim > 1:
                widths.append(math.prod(output.shape[1:]))

        modules = dict(pl_module.named_modules())
        kinds = [self.roles.select(modules, role) for role in ("norm", "act")]
        # the last map is the output, whose few features say nothing of the network's width
        watched = {**kinds[0], **kinds[1]} or dict(
            list(self.roles.select(modules, "fc").items())[:-1]
        )
        for submodule, _ in watched.values():
            hooks.append(submodule.register_forward_hook(note))
        try:
            signals = self._measured(pl_module, batch)
        finally:
            for hook in hooks:
                hook.remove()
        return signals, min(widths, default=signals.samples)

    def _measured(self, pl_module: LightningModule, batch: Any) -> LayerSignals:
        return measure_signals(
            pl_module, lambda: _loss(pl_module, batch), self.roles, self.nonzero_gaps, self.predict
        )

    def _measure(self, trainer: Trainer, pl_module: LightningModule, epoch: int) -> None:
        step = trainer.global_step
        if step == self._measured_step:
            return
        self._measured_step = step
        signals = self._measured(pl_module, self._probe)
        folder = trainer.log_dir or trainer.default_root_dir  # collective: every rank asks
        if not trainer.is_global_zero:
            return
        rows = [
            {"step": step, "epoch": epoch, "layer": layer}
            | {name: values[i] for name, values in signals.columns.items()}
            for i, layer in enumerate(signals.layers)
        ]
        self._note_dependence(rows)
        first = not self.rows
        self.rows += rows
        self._write(Path(folder) / "signal_propagation.csv", rows, first)
        self._log(trainer, rows, step)

    def _note_dependence(self, rows: list[dict[str, float]]) -> None:
        if self._noted or self.nonzero_gaps:
            return
        # without the last layer, the output: it is narrower than the probe anyway
        for row in rows[:-1]:
            for role in ROLES:
                if math.isinf(row[f"{role}_gap"]):
                    self._noted = True
                    rank_zero_warn(
                        f"the {role} gap of layer {row['layer']} is inf: its rows are linearly "
                        "dependent (duplicate samples, a norm that subtracts the batch mean, or an "
                        "output narrower than the probe); nonzero_gaps=true measures the others"
                    )
                    return

    def _write(self, path: Path, rows: list[dict[str, float]], first: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w" if first else "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns)
            if first:
                writer.writeheader()
            writer.writerows(rows)

    # ------------------------------------------------------------------ logging

    def _log(self, trainer: Trainer, rows: list[dict[str, float]], step: int) -> None:
        scalars = summary(rows)
        if self.per_layer == "scalars":
            for row in rows:
                for role in ("weight", *ROLES):
                    scalars[f"gap/{role}/layer_{row['layer']:03d}"] = row[f"{role}_gap"]
                scalars[f"grad_log_norm/layer_{row['layer']:03d}"] = log_or_nan(row["grad_norm"])
        for logger in trainer.loggers:
            logger.log_metrics(
                {name: value for name, value in scalars.items() if not math.isnan(value)}, step
            )
            if hasattr(logger, "log_table"):
                data = [[row[name] for name in self.columns] for row in rows]
                logger.log_table("signal_propagation", columns=self.columns, data=data)
                if self.per_layer == "series":
                    self._log_series(logger, rows)

    def _log_series(self, logger: Any, rows: list[dict[str, float]]) -> None:
        import wandb

        layers = [row["layer"] for row in rows]
        for name in ("fc_gap", "norm_gap", "act_gap", "weight_gap", "grad_norm"):
            values = [row[name] for row in rows]
            if name == "grad_norm":
                values = [log_or_nan(v) for v in values]
            kept = [(x, y) for x, y in zip(layers, values, strict=True) if math.isfinite(y)]
            if not kept:
                continue
            xs, ys = [x for x, _ in kept], [y for _, y in kept]
            title = "grad_log_norm" if name == "grad_norm" else name
            plot = wandb.plot.line_series(xs=xs, ys=[ys], keys=[title], title=title, xname="layer")
            logger.experiment.log({f"layers/{title}": plot})

    # ------------------------------------------------------------------ results

    @property
    def table(self) -> Any:
        """All measurements of this fit as a pandas ``DataFrame``, on rank 0."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=self.columns)

    def figure(self) -> "Figure":
        """Draw gap and gradient of every layer, a line per measurement."""
        return signal_figure(self.rows)


def _head(batch: Any, size: int) -> Any:
    """The first ``size`` samples of every tensor of a batch (which all have the samples first)."""
    return apply_to_collection(batch, Tensor, lambda t: t[:size] if t.ndim else t)


def _loss(pl_module: LightningModule, batch: Any) -> Tensor:
    if isinstance(pl_module, HasProbeLoss):
        return pl_module.probe_loss(batch)
    if not pl_module.automatic_optimization:
        raise ValueError(
            f"{type(pl_module).__name__} optimises by hand, so its training_step would take a "
            "step: give it a method probe_loss(batch) that returns the loss"
        )
    silent = ("log", "log_dict")
    for name in silent:
        pl_module.__dict__[name] = lambda *args, **kwargs: None
    try:
        output = pl_module.training_step(batch, 0)
    finally:
        for name in silent:
            del pl_module.__dict__[name]
    loss = output["loss"] if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise ValueError(f"training_step returned {type(loss).__name__}, a loss is needed")
    return loss


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Largest, smallest and mean value over the layers of one measurement.

    Args:
        rows: One per layer; values that are not finite are left out.

    Returns:
        ``gap/<role>/<which>`` and ``grad_log_norm/<which>``, with ``spread`` for max - min.
    """
    series = {f"gap/{role}": [row[f"{role}_gap"] for row in rows] for role in ("weight", *ROLES)}
    series["grad_log_norm"] = [log_or_nan(row["grad_norm"]) for row in rows]
    result: dict[str, float] = {}
    for name, values in series.items():
        finite = [v for v in values if math.isfinite(v)]
        if finite:
            result[f"{name}/max"], result[f"{name}/min"] = max(finite), min(finite)
            result[f"{name}/mean"] = sum(finite) / len(finite)
    if "grad_log_norm/max" in result:
        result["grad_log_norm/spread"] = result["grad_log_norm/max"] - result["grad_log_norm/min"]
    return result
