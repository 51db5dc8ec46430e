"""A classifier like any other: nothing in it knows about privacy."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_modules.base import PaperModule
from lightning_modules.components.privacy.networks import DPVGG, MLP


class Labelled(Protocol):
    """Fields read of a batch: inputs ``x`` (batch, ...) float and labels ``y`` (batch,) int64."""

    x: Tensor
    y: Tensor


class Prediction(NamedTuple):
    """Output of ``predict``.

    Attributes:
        label: int64 (batch,).
        probability: (batch, classes).
    """

    label: Tensor
    probability: Tensor


class Cooldown:
    """Factor of the learning rate: 1, then linear to ``final`` over the last ``fraction``.

    Attributes:
        steps: planned steps; 0 while they aren't known, which is before the first one.
    """

    def __init__(self, fraction: float, final: float) -> None:
        self.steps, self.fraction, self.final = 0, fraction, final

    def __call__(self, step: int) -> float:
        """Factor at a step."""
        start = self.steps * (1.0 - self.fraction)
        if step <= start or self.fraction == 0.0 or not self.steps:
            return 1.0
        part = min(1.0, (step - start) / (self.steps - start))
        return 1.0 + part * (self.final - 1.0)


class Classifier(PaperModule):
    """Cross-entropy classifier trained by momentum SGD with a learning-rate cooldown.

    Metrics: ``val/acc`` (micro average), ``val/loss`` (mean over examples), the same for test.

    Args:
        network: ``mlp`` or ``vgg`` (tanh VGG without normalisation).
        hidden: widths of the perceptron's hidden layers; for ``vgg`` the block widths followed by
            the width of the dense layer.
        activation: ``tanh``, ``relu``, ``elu`` or ``silu``.
        lr: learning rate of the default optimiser.
        momentum: of the default optimiser.
        cooldown: last part of training in which the rate falls linearly to ``final_lr``.
        final_lr: learning rate at the end, relative to ``lr``.
        shift: subtracted from the inputs (a constant, so that no data moments are released).
        sample_shape: shape of one input; ``None`` takes the datamodule's.
        n_classes: number of classes; ``None`` takes the datamodule's.
        optimizer: replaces SGD.
        lr_scheduler: replaces the cooldown.

    Raises:
        ValueError: an argument is out of range.
    """

    monitor = "val/acc"
    mode = "max"

    def __init__(
        self,
        network: Literal["mlp", "vgg"] = "mlp",
        hidden: list[int] | None = None,
        activation: str = "tanh",
        lr: float = 0.1,
        momentum: float = 0.9,
        cooldown: float = 0.25,
        final_lr: float = 0.05,
        shift: float = 0.0,
        sample_shape: list[int] | None = None,
        n_classes: int | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["step", "epoch"] = "step",
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        if network not in ("mlp", "vgg"):
            raise ValueError(f"network must be mlp or vgg, got {network!r}")
        if not lr > 0:
            raise ValueError(f"lr must be positive, got {lr}")
        for name, value in (("momentum", momentum), ("cooldown", cooldown)):
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {value}")
        if not 0.0 <= final_lr <= 1.0:
            raise ValueError(f"final_lr must be in [0, 1], got {final_lr}")
        if n_classes is not None and n_classes < 2:
            raise ValueError(f"n_classes must be at least 2, got {n_classes}")
        self.network, self.hidden, self.activation = network, hidden, activation
        self.lr, self.momentum = lr, momentum
        self.cooldown, self.final_lr, self.shift = cooldown, final_lr, shift
        self.sample_shape, self.n_classes = sample_shape, n_classes
        self.net: nn.Module | None = None
        self._cooldown: Cooldown | None = None
        if sample_shape is not None and n_classes is not None:
            self._build()

    def configure_model(self) -> None:
        """Build the network once the data are known."""
        if self.net is not None:
            return
        data = getattr(self.trainer, "datamodule", None)
        for name in ("sample_shape", "n_classes"):
            if getattr(self, name) is None:
                value = getattr(data, name, None)
                if value is None:
                    raise ValueError(f"{name}: the data do not say it, give model.{name}")
                self.set_hparam(name, list(value) if name == "sample_shape" else int(value))
        self._build()

    def _build(self) -> None:
        assert self.sample_shape is not None
        assert self.n_classes is not None
        shape, classes = list(self.sample_shape), self.n_classes
        if self.network == "vgg":
            widths = self.hidden if self.hidden is not None else [32, 64, 128, 128]
            if len(shape) != 3 or len(widths) < 2:
                raise ValueError(
                    "network=vgg takes inputs (channels, height, width) and at least two widths, "
                    f"got sample_shape={shape} and hidden={widths}"
                )
            image = (shape[0], shape[1], shape[2])
            self.net = DPVGG(image, classes, widths[:-1], widths[-1], self.activation)
        else:
            features = int(torch.Size(shape).numel())
            widths = self.hidden if self.hidden is not None else [32]
            self.net = MLP(features, widths, classes, self.activation)
        for part in ("val", "test"):
            setattr(self, f"{part}_acc", MulticlassAccuracy(classes, average="micro"))
            setattr(self, f"{part}_loss", MeanMetric())

    def default_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Momentum SGD: post-processing of the private gradient."""
        return SGD(parameters, lr=self.lr, momentum=self.momentum)

    def configure_optimizers(self) -> Any:
        """Default or given optimiser; the cooldown unless a scheduler is given."""
        configured = super().configure_optimizers()
        if self.lr_scheduler is not None or self.cooldown == 0.0:
            return configured
        self._cooldown = Cooldown(self.cooldown, self.final_lr)
        schedule = LambdaLR(configured, self._cooldown)
        return {
            "optimizer": configured,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def on_train_start(self) -> None:
        """Tell the cooldown how long training is.

        Not in ``configure_optimizers``: asking for the number of steps there makes Lightning build
        the loaders before it restores their position from a checkpoint.
        """
        super().on_train_start()
        if self._cooldown is None:
            return
        steps = self.trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise ValueError(
                "cooldown needs the number of steps: set trainer.max_epochs or max_steps, or "
                "cooldown=0"
            )
        self._cooldown.steps = int(steps)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes)."""
        assert self.net is not None
        logits: Tensor = self.net(x - self.shift)
        return logits

    def example_losses(self, batch: Labelled) -> Tensor:
        """Cross-entropy of every example, (batch,)."""
        return F.cross_entropy(self(batch.x), batch.y, reduction="none")

    def training_step(self, batch: Labelled, batch_idx: int) -> Tensor:
        """Mean loss; zero for the empty batches of random sampling."""
        losses = self.example_losses(batch)
        return self.objective(cross_entropy=losses.sum() / max(1, len(losses)))

    def _evaluate(self, batch: Labelled, part: str) -> None:
        logits = self(batch.x)
        losses = F.cross_entropy(logits, batch.y, reduction="none")
        accuracy, loss = getattr(self, f"{part}_acc"), getattr(self, f"{part}_loss")
        accuracy(logits, batch.y)
        loss(losses)
        self.log(f"{part}/acc", accuracy, prog_bar=True)
        self.log(f"{part}/loss", loss)

    def validation_step(self, batch: Labelled, batch_idx: int) -> None:
        """Accuracy and loss."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Labelled, batch_idx: int) -> None:
        """Accuracy and loss."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Labelled, batch_idx: int) -> Prediction:
        """Labels and probabilities."""
        probability = self(batch.x).softmax(-1)
        return Prediction(probability.argmax(-1), probability)
