"""The paper's choice of checkpoint: the highest proxy win rate."""

from lightning.pytorch import LightningModule, Trainer

from callbacks.checkpoint import Checkpoint

__all__ = ["RewardModelSelection"]


class RewardModelSelection(Checkpoint):
    """Keeps the checkpoint at which the reward model prefers the policy most often.

    It stands beside the default checkpoint callback and writes `proxy-...ckpt`.

    Args:
        monitor: `val/proxy_win_rate`, or another value that grows as responses get better.
        save_top_k: How many to keep.
        dirpath: Folder, default `checkpoints` in the run's folder.
    """

    def __init__(
        self,
        monitor: str = "val/proxy_win_rate",
        save_top_k: int = 1,
        dirpath: str | None = None,
    ) -> None:
        super().__init__(
            monitor=monitor,
            mode="max",
            save_top_k=save_top_k,
            save_last=False,
            dirpath=dirpath,
            filename="proxy-{epoch}-{step}",
            save_on_exception=False,
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a module that never evaluates responses.

        Raises:
            ValueError: Its `evaluate_every` is 0.
        """
        if getattr(pl_module, "evaluate_every", None) == 0:
            raise ValueError(
                f"RewardModelSelection needs {self.monitor}: set model.evaluate_every >= 1"
            )
        super().setup(trainer, pl_module, stage)
