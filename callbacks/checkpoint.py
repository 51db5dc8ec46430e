"""Checkpoints: chosen by the module's own metric, written whole or not at all."""

import os
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


class Checkpoint(ModelCheckpoint):
    """`ModelCheckpoint` that watches the metric the module names, and saves when interrupted.

    Args:
        monitor: Metric to choose by; `None` takes the module's `monitor` and `mode`.
        mode: Whether less or more is better; goes with `monitor`.
        save_top_k: How many best checkpoints to keep.
        save_last: Also keep `last.ckpt`.
        every_n_train_steps: Save each so many optimiser steps; 0 saves after validations.
        every_n_epochs: Save each so many epochs, where steps are not given.
        dirpath: Folder, default `checkpoints` in the run's folder.
        filename: Pattern of the name without its ending.
        save_on_exception: Save when the run is stopped by an error, SIGTERM or Ctrl-C.

    Raises:
        ValueError: If one of `monitor` and `mode` is given without the other.
    """

    def __init__(
        self,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        save_top_k: int = 1,
        save_last: bool = True,
        every_n_train_steps: int = 0,
        every_n_epochs: int | None = None,
        dirpath: str | None = None,
        filename: str = "{epoch}-{step}",
        save_on_exception: bool = True,
    ) -> None:
        check_monitor(monitor, mode)
        self._of_module = monitor is None
        super().__init__(
            monitor=monitor,
            mode=mode or "min",
            # without a metric, which is known only in `setup`, at most one may be kept
            save_top_k=save_top_k if monitor is not None else min(save_top_k, 1),
            save_last=save_last,
            every_n_train_steps=every_n_train_steps or None,
            every_n_epochs=every_n_epochs,
            dirpath=dirpath,
            filename=filename,
            save_on_exception=save_on_exception,
        )
        self.save_top_k = save_top_k

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take metric and direction from the module if the user gave none."""
        if self._of_module:
            self.monitor = getattr(pl_module, "monitor", None)
            mode = str(getattr(pl_module, "mode", "min"))
            self.kth_value, self.mode = {
                "min": (torch.tensor(torch.inf), "min"),
                "max": (torch.tensor(-torch.inf), "max"),
            }[mode]
            if self._every_n_train_steps:
                # a metric of the validation is not there in the middle of an epoch
                self.monitor = None
                self.save_top_k = min(self.save_top_k, 1)
        super().setup(trainer, pl_module, stage)


def check_monitor(monitor: str | None, mode: str | None) -> None:
    """Refuse a metric without its direction, which would keep the worst instead of the best.

    Raises:
        ValueError: If one is given without the other.
    """
    if (monitor is None) != (mode is None):
        given, missing = ("monitor", "mode") if mode is None else ("mode", "monitor")
        value = monitor if mode is None else mode
        raise ValueError(f"{given}='{value}' needs {missing}= as well (mode is min or max)")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the destination and renames: a kill leaves the old file or the new one."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the checkpoint; see the class."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        with partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
