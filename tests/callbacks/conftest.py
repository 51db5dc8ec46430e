"""A small trainer and module for the callbacks."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from toy import Toy, ToyData


class MemoryLogger(Logger):
    """Keeps the rows that it is given."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics, step=None) -> None:
        self.rows.append({**metrics, "step": step})

    def log_hyperparams(self, *args, **kwargs) -> None:
        pass

    def column(self, key: str) -> list[float]:
        return [row[key] for row in self.rows if key in row]


def _extra_weight(module: "Watched") -> float:
    return module.loss_weights["extra"]


class Watched(Toy):
    """Records what a curriculum set, in every training step."""

    default_loss_weights: ClassVar[dict[str, float]] = {"mse": 1.0, "extra": 0.5}

    def __init__(self, gain: float = 3.0, blocks: int = 4, **kwargs) -> None:
        torch.manual_seed(0)
        super().__init__(**kwargs)
        self.gain = gain
        self.blocks = blocks
        self.register_buffer("temperature", torch.tensor(2.0))
        self.seen: list[float] = []
        self.watch: Callable[[Watched], float] = _extra_weight

    def training_step(self, batch, batch_idx):
        self.seen.append(float(self.watch(self)))
        error = torch.nn.functional.mse_loss(self.net(batch.x), batch.y)
        return self.objective(mse=error, extra=error.detach())


@pytest.fixture
def memory() -> MemoryLogger:
    return MemoryLogger()


@pytest.fixture
def watched() -> type[Watched]:
    return Watched


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Trainer]:
    """Return ``fit(module, *callbacks, rows=, batch_size=, ckpt_path=, **trainer_arguments)``.

    With the defaults an epoch has 70 training rows in 7 batches of 10.
    """

    def run(module, *callbacks, rows=100, batch_size=10, ckpt_path=None, **arguments) -> Trainer:
        seed_everything(0, verbose=False)
        defaults = {
            "max_epochs": 2,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "default_root_dir": tmp_path,
        }
        trainer = Trainer(**{**defaults, **arguments}, callbacks=list(callbacks))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, ToyData(rows=rows, batch_size=batch_size), ckpt_path=ckpt_path)
        return trainer

    return run
