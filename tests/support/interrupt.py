"""Callbacks that end a run at a chosen batch, in the ways that runs end."""

import os
import signal
from pathlib import Path

from lightning.pytorch import Callback


class InterruptedRunError(Exception):
    """The run was stopped on purpose."""


class Interrupt(Callback):
    """Saves a checkpoint after so many batches and stops the run."""

    def __init__(self, after: int, path: str) -> None:
        self.after = after
        self.path = path
        self.seen = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.seen += 1
        if self.seen == self.after:
            trainer.save_checkpoint(self.path)
            raise InterruptedRunError


class FailInStep(Callback):
    """Raises in the middle of a step, before the weights change."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.seen = 0

    def on_before_backward(self, trainer, pl_module, loss) -> None:
        if self.seen == self.after:
            raise InterruptedRunError
        self.seen += 1


class Kill(Callback):
    """Sends this process a signal when a batch begins."""

    def __init__(self, after: int, signal_name: str = "SIGKILL") -> None:
        self.after = after
        self.signal = signal.Signals[signal_name]
        self.seen = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if self.seen == self.after:
            os.kill(os.getpid(), self.signal)
        self.seen += 1


class WriteRank(Callback):
    """Writes the rank and the number of processes, to prove which processes ran."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_start(self, trainer, pl_module) -> None:
        path = Path(self.folder) / f"rank{trainer.global_rank}"
        path.write_text(str(trainer.world_size))
