"""The smallest module and data that keep the contract, for tests of the shared parts."""

from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from datamodules.base import Rows, SuiteDataModule, split
from lightning_modules.base import PaperModule
from lightning_modules.components.sharding import shard_blocks


class ToyBatch(NamedTuple):
    """Inputs float32 (n, 4) and targets float32 (n, 1)."""

    x: Tensor
    y: Tensor


class Toy(PaperModule):
    """Regression by a small network with dropout."""

    monitor = "val/loss"
    mode = "min"
    default_loss_weights = MappingProxyType({"mse": 1.0})

    def __init__(self, width: int = 8, dropout: float = 0.0, **kwargs) -> None:
        super().__init__(**kwargs)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.net = nn.Sequential(
            nn.Linear(4, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 1)
        )
        self.val_loss = MeanMetric()

    def default_optimizer(self, parameters):
        return torch.optim.Adam(parameters, lr=0.02)

    def training_step(self, batch: ToyBatch, batch_idx: int) -> Tensor:
        return self.objective(mse=nn.functional.mse_loss(self.net(batch.x), batch.y))

    def validation_step(self, batch: ToyBatch, batch_idx: int) -> None:
        error = nn.functional.mse_loss(self.net(batch.x), batch.y)
        self.val_loss.update(error, weight=len(batch.x))
        self.log("val/loss", self.val_loss)

    def test_step(self, batch: ToyBatch, batch_idx: int) -> None:
        self.val_loss.update(nn.functional.mse_loss(self.net(batch.x), batch.y))
        self.log("test/loss", self.val_loss)

    def predict_step(self, batch: ToyBatch, batch_idx: int) -> Tensor:
        return self.net(batch.x)


class ToyData(SuiteDataModule):
    """Linear targets with noise."""

    sources = ("generated",)

    def __init__(self, source: str = "generated", rows: int = 100, **kwargs) -> None:
        super().__init__(source, **kwargs)
        self.rows = rows

    def setup(self, stage: str | None = None) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.rows, 4, generator=generator)
        y = x.sum(1, keepdim=True) + 0.1 * torch.randn(self.rows, 1, generator=generator)
        train, held = split(self.rows, [0.7], self.seed)
        self.train_set = Rows(ToyBatch, x[train], y[train])
        self.val_set = self.test_set = Rows(ToyBatch, x[held], y[held])


class ShardedToy(Toy):
    """The toy with its layers split over ranks where the strategy is FSDP2."""

    def configure_model(self) -> None:
        shard_blocks(self.net, self.device_mesh, ["0", "3"])
