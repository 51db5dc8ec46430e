"""A module for sweeps: says on every rank what it was given, and fails when told to."""

import json
from pathlib import Path

from toy import Toy


class Swept(Toy):
    """`Toy` with a learning rate, a switch and a list, the three kinds of swept values."""

    def __init__(
        self,
        lr: float = 0.02,
        fail: bool = False,
        widths: list[int] | None = None,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.lr = lr
        self.fail = fail
        self.widths = widths

    def on_train_start(self) -> None:
        super().on_train_start()
        report = {
            "lr": self.lr,
            "fail": self.fail,
            "widths": self.widths,
            "world_size": self.trainer.world_size,
        }
        folder = Path(self.trainer.default_root_dir)
        (folder / f"rank{self.global_rank}.json").write_text(json.dumps(report))

    def training_step(self, batch, batch_idx):
        if self.fail and batch_idx == 1:
            raise ArithmeticError(f"diverged with lr={self.lr}")
        return super().training_step(batch, batch_idx)
