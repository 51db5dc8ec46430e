"""Modules trained with correlated noise: a classifier, and the regression the theory is about."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torchmetrics import MeanMetric

from lightning_modules.base import PaperModule
from lightning_modules.components.privacy.classifier import Classifier
from lightning_modules.components.sharding import full

__all__ = ["CorrelatedNoiseClassifier", "LinearRegressionBench"]


class CorrelatedNoiseClassifier(Classifier):
    """Image classifier for private training; ``callbacks.PrivateGradients`` correlates the noise.

    Arguments as for the base class; nothing in it knows about privacy.
    """


class Regression(Protocol):
    """Fields read of a batch: inputs ``x`` (batch, d) and values ``y`` (batch,)."""

    x: Tensor
    y: Tensor


class RegressionPrediction(NamedTuple):
    """Predicted values, (batch,)."""

    y: Tensor


class LinearRegressionBench(PaperModule):
    """Least squares by plain SGD, with the exact excess risk ``delta^T H delta / 2`` as metric.

    Metrics: ``val/excess_risk`` of the present iterate, ``val/tail_risk`` its mean over the second
    half of the steps so far planned; both exact, from the H and theta* that the data state.

    Args:
        lr: learning rate eta.
        n_features: d; ``None`` takes the datamodule's.
        optimizer: replaces SGD.
        lr_scheduler: called with the optimiser.

    Raises:
        ValueError: an argument is out of range.
    """

    monitor = "val/excess_risk"
    mode = "min"
    hessian: Tensor
    solution: Tensor
    tail_sum: Tensor
    tail_count: Tensor

    def __init__(
        self,
        lr: float = 0.05,
        n_features: int | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["step", "epoch"] = "step",
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        if not lr > 0:
            raise ValueError(f"lr must be positive, got {lr}")
        if n_features is not None and n_features < 1:
            raise ValueError(f"n_features must be at least 1, got {n_features}")
        self.lr, self.n_features = lr, n_features
        self.linear: nn.Linear | None = None
        if n_features is not None:
            self._build(n_features)

    def _build(self, size: int) -> None:
        self.linear = nn.Linear(size, 1, bias=False)
        nn.init.zeros_(self.linear.weight)
        self.register_buffer("hessian", torch.eye(size))
        self.register_buffer("solution", torch.zeros(size))
        self.register_buffer("tail_sum", torch.zeros((), dtype=torch.float64))
        self.register_buffer("tail_count", torch.zeros((), dtype=torch.int64))
        self.val_excess_risk, self.val_loss = MeanMetric(), MeanMetric()
        self.test_excess_risk, self.test_loss = MeanMetric(), MeanMetric()

    def configure_model(self) -> None:
        """Size and exact solution from the data."""
        data = getattr(self.trainer, "datamodule", None)
        if self.n_features is None:
            size = getattr(data, "n_features", None)
            if not size:
                raise ValueError("n_features: the data do not say it, give model.n_features")
            self.set_hparam("n_features", int(size))
        if self.linear is None:
            assert self.n_features is not None
            self._build(self.n_features)
        for name in ("hessian", "solution"):
            value = getattr(data, name, None)
            if value is not None:
                getattr(self, name).copy_(value)

    def default_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Plain SGD, as in the theory."""
        return SGD(parameters, lr=self.lr)

    def forward(self, x: Tensor) -> Tensor:
        """Predicted values (batch,)."""
        assert self.linear is not None
        out: Tensor = self.linear(x)
        return out[:, 0]

    def example_losses(self, batch: Regression) -> Tensor:
        """Half squared residual of every example, (batch,)."""
        losses: Tensor = (self(batch.x) - batch.y).square() / 2
        return losses

    def training_step(self, batch: Regression, batch_idx: int) -> Tensor:
        """Mean loss; zero for an empty batch."""
        losses = self.example_losses(batch)
        return self.objective(squared_error=losses.sum() / max(1, len(losses)))

    def excess_risk(self) -> Tensor:
        """``delta^T H delta / 2`` of the present iterate, 0-d."""
        assert self.linear is not None
        delta = full(self.linear.weight.detach())[0] - self.solution
        return delta @ self.hessian @ delta / 2

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Add the risk of the second half of the run to its mean."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        if 2 * self.trainer.global_step > self.trainer.estimated_stepping_batches:
            self.tail_sum += self.excess_risk().double()
            self.tail_count += 1

    def _evaluate(self, batch: Regression, part: str) -> None:
        risk, loss = getattr(self, f"{part}_excess_risk"), getattr(self, f"{part}_loss")
        risk(self.excess_risk())
        loss(self.example_losses(batch))
        self.log(f"{part}/excess_risk", risk, prog_bar=True)
        self.log(f"{part}/loss", loss)

    def validation_step(self, batch: Regression, batch_idx: int) -> None:
        """Exact excess risk, and the loss on held-out data."""
        self._evaluate(batch, "val")

    def on_validation_epoch_end(self) -> None:
        """Mean risk of the second half, once there is one."""
        if int(self.tail_count):
            self.log("val/tail_risk", (self.tail_sum / self.tail_count).float())

    def test_step(self, batch: Regression, batch_idx: int) -> None:
        """Exact excess risk, and the loss on test data."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Regression, batch_idx: int) -> RegressionPrediction:
        """Predicted values."""
        return RegressionPrediction(self(batch.x))
