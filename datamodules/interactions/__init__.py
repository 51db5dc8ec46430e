"""Who interacted with what, and when: implicit feedback that lies with the users."""

from datamodules.interactions.batches import ClientRound, EvaluationBatch
from datamodules.interactions.datamodule import Interactions

__all__ = ["ClientRound", "EvaluationBatch", "Interactions"]
