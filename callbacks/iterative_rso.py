"""Iterative RSO: new pairs from the current policy every round."""

from typing import Literal, Protocol, runtime_checkable

from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["HasResampling", "IterativeRSO"]


@runtime_checkable
class HasResampling(Protocol):
    """Makes its own training data and can make them anew from its present weights."""

    def resample_every(self, epochs: int, move_reference: bool, replay: bool) -> None:
        """Begin a round every so many epochs; see `IterativeRSO`."""
        ...


class IterativeRSO(Callback):
    """Samples candidates from the current policy and makes new pairs at the start of every round.

    Round 0 is plain RSO. The pairs of the present round are in the checkpoint, so a resume in the
    middle of a round goes on with them.

    Args:
        every_n_epochs: Length of a round.
        reference: `keep` the SFT policy as reference, or `move` it to the policy at the start of
            the round (then the module needs `reference=copy`).
        replay: Keep the pairs of earlier rounds beside the new ones.

    Raises:
        ValueError: An argument is out of range, or at the start of `fit` the module makes no pairs.
    """

    def __init__(
        self,
        every_n_epochs: int = 1,
        reference: Literal["keep", "move"] = "keep",
        replay: bool = False,
    ) -> None:
        super().__init__()
        if every_n_epochs < 1:
            raise ValueError(f"every_n_epochs must be >= 1, got {every_n_epochs}")
        if reference not in ("keep", "move"):
            raise ValueError(f"reference must be keep or move, got '{reference}'")
        self.every_n_epochs = every_n_epochs
        self.reference = reference
        self.replay = replay

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Tell the module, and have the loader of pairs built again every epoch."""
        if stage != "fit":
            return
        if not isinstance(pl_module, HasResampling):
            raise ValueError(f"IterativeRSO: {type(pl_module).__name__} makes no pairs of its own")
        pl_module.resample_every(self.every_n_epochs, self.reference == "move", self.replay)
        # every epoch, whatever the length of a round: after a resume Lightning counts epochs
        # from the resumed one, the module counts rounds from the first
        trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
