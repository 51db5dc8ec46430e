"""Watches how far a diffusion model's samples drift from its training distribution."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ExposureBiasMonitor", "HasExposureBias"]

CURVES = ("delta", "single_step_delta", "marginal_gap", "sampling_norm", "training_norm")


@runtime_checkable
class HasExposureBias(Protocol):
    """Measures the exposure bias of its own sampler."""

    def exposure_bias(self, x0: Tensor, labels: Tensor | None = None) -> Any:
        """Curves over the sampling steps.

        Args:
            x0: Images ``(n, c, h, w)``.
            labels: Their labels ``(n,)`` where the batches have them.

        Returns:
            Object with the attributes `CURVES`, each a tensor ``(steps,)`` whose first entry is the
            cleanest step, and ``noise_norm``, a number.
        """
        ...


class ExposureBiasMonitor(Callback):
    """Logs exposure bias after validation, measured on the first validation images.

    ``exposure/delta`` and ``exposure/marginal_gap`` at the last step, ``exposure/norm_ratio`` (mean
    norm of the noise predicted while sampling over that at true inputs, averaged over the steps;
    above 1 is what a scale above 1 corrects). The curves are kept in `curves`, and drawn by
    `figure()`.

    Args:
        samples: Images used on each rank.
        every_n_epochs: Measure after each n-th validation epoch.

    Raises:
        ValueError: If an argument is below its minimum.
        TypeError: If the module cannot measure exposure bias.
    """

    def __init__(self, samples: int = 256, every_n_epochs: int = 1) -> None:
        super().__init__()
        if samples < 2:
            raise ValueError(f"samples must be at least 2, got {samples}")
        if every_n_epochs < 1:
            raise ValueError(f"every_n_epochs must be at least 1, got {every_n_epochs}")
        self.samples, self.every_n_epochs = samples, every_n_epochs
        self.curves: dict[str, Tensor] = {}
        self._images: list[Tensor] = []
        self._labels: list[Tensor] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the module."""
        if not isinstance(pl_module, HasExposureBias):
            raise TypeError(
                f"ExposureBiasMonitor needs a module with exposure_bias(x0), "
                f"{type(pl_module).__name__} has none"
            )

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the images of the last epoch."""
        self._images, self._labels = [], []

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep images until there are enough."""
        if sum(map(len, self._images)) < self.samples:
            self._images.append(batch.x)
            labels = getattr(batch, "y", None)
            if labels is not None:
                self._labels.append(labels)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure and log."""
        in_fit = trainer.state.fn == "fit"
        if trainer.sanity_checking or (
            in_fit and (trainer.current_epoch + 1) % self.every_n_epochs
        ):
            return
        assert isinstance(pl_module, HasExposureBias)
        images = torch.cat(self._images)[: self.samples]
        labels = torch.cat(self._labels)[: self.samples] if self._labels else None
        self._images, self._labels = [], []
        bias = pl_module.exposure_bias(images, labels)
        # The ranks have different images: mean over all, weighted by their number.
        curves = torch.stack([getattr(bias, name).float() for name in CURVES])
        sums = torch.cat([curves.flatten() * len(images), torch.tensor([float(len(images))])])
        sums = trainer.strategy.reduce(sums.to(pl_module.device), reduce_op="sum").cpu()
        means = (sums[:-1] / sums[-1]).reshape(curves.shape)
        self.curves.update(zip(CURVES, means, strict=True))
        self.curves["noise_norm"] = torch.as_tensor(bias.noise_norm)
        ratio = (self.curves["sampling_norm"] / self.curves["training_norm"]).mean()
        pl_module.log("exposure/delta", self.curves["delta"][0])
        pl_module.log("exposure/marginal_gap", self.curves["marginal_gap"][0])
        pl_module.log("exposure/norm_ratio", ratio)

    def figure(self, names: Sequence[str] = ("sampling_norm", "training_norm")) -> "Figure":
        """Curves of the last measurement over the sampling steps."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 3.5))
        axes = figure.add_subplot()
        for name in names:
            axes.plot(self.curves[name].numpy(), marker=".", label=name.replace("_", " "))
        if "norm" in names[0]:
            axes.axhline(
                float(self.curves["noise_norm"]), linestyle=":", color="grey", label="true noise"
            )
        axes.set_xlabel("step (0 = last, cleanest)")
        axes.legend()
        return figure
