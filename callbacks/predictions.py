"""Predictions on disk."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_info


class PredictionFiles(BasePredictionWriter):
    """Writes what `predict_step` returned to `predictions.pt` in the run's folder.

    The file holds a list with one entry per batch. With several ranks each writes its own,
    `predictions.rank1.pt` and so on: rank r holds the samples r, r + world, r + 2 world, ...
    A module's `write_predictions` adds the formats of its field.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        """Write after the last batch."""
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        rank = trainer.global_rank
        path = folder / ("predictions.pt" if rank == 0 else f"predictions.rank{rank}.pt")
        torch.save(list(predictions), path)
        written = [path]
        write = getattr(pl_module, "write_predictions", None)
        if callable(write) and trainer.is_global_zero:
            written += write(list(predictions), folder)
        rank_zero_info(f"predictions: {', '.join(str(p) for p in written)}")
