"""Logs the privacy spent while training, and can stop before a budget is exceeded."""

import math
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

__all__ = ["PrivacyBudget", "SpendsPrivacy"]


@runtime_checkable
class SpendsPrivacy(Protocol):
    """A callback or module that knows what was spent so far."""

    def privacy_spent(self, ahead: int = 0) -> Any:
        """Object with ``epsilon``, ``delta``, ``step`` and planned ``steps``.

        With ``ahead`` the value after so many further steps.
        """
        ...


class PrivacyBudget(Callback):
    """Logs ``privacy/epsilon`` (at fixed delta) as training goes on; only watches.

    The value at step t is the guarantee of the first t steps of the planned run.

    Args:
        points: how often in the planned run epsilon is computed, besides every validation.
        stop_at: stop after the last step at which epsilon is at most this value; ``None`` never
            stops.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, points: int = 20, stop_at: float | None = None) -> None:
        super().__init__()
        if points < 1:
            raise ValueError(f"points must be at least 1, got {points}")
        if stop_at is not None and not stop_at > 0:
            raise ValueError(f"stop_at must be positive, got {stop_at}")
        self.points, self.stop_at = points, stop_at
        self._last_step: int | None = None

    def _source(self, trainer: Trainer) -> SpendsPrivacy:
        for candidate in (*trainer.callbacks, trainer.lightning_module):  # type: ignore[attr-defined]
            if candidate is not self and isinstance(candidate, SpendsPrivacy):
                return candidate
        raise MisconfigurationException(
            "PrivacyBudget found nothing that spends privacy: add callbacks.PrivateGradients to "
            "trainer.callbacks"
        )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fail early if there is nothing to watch."""
        self._source(trainer)
        self._last_step = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Find the last step that the budget allows, once the source is ready."""
        if self._last_step is not None and trainer.global_step >= self._last_step:
            raise MisconfigurationException(
                f"stop_at={self.stop_at:g} ends training after step {self._last_step}, but the "
                "trainer goes on: leave out trainer.min_epochs and min_steps"
            )
        if self.stop_at is None or self._last_step is not None:
            return
        source = self._source(trainer)
        spent = source.privacy_spent()
        if spent.step + 1 <= spent.steps and source.privacy_spent(ahead=1).epsilon > self.stop_at:
            raise MisconfigurationException(
                f"stop_at={self.stop_at:g} does not allow step {spent.step + 1}, which costs "
                f"epsilon {source.privacy_spent(ahead=1).epsilon:.4g}: raise it or add noise"
            )
        allowed, forbidden = 0, spent.steps - spent.step + 1
        while forbidden - allowed > 1:
            middle = (allowed + forbidden) // 2
            fits = source.privacy_spent(ahead=middle).epsilon <= self.stop_at
            allowed, forbidden = (middle, forbidden) if fits else (allowed, middle)
        self._last_step = spent.step + allowed
        if self._last_step < spent.steps:
            rank_zero_info(
                f"training will stop after step {self._last_step} of {spent.steps}, the last one "
                f"with epsilon at most stop_at={self.stop_at:g}"
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log at evenly spaced steps, the last one included."""
        step = trainer.global_step
        if self._last_step is not None and step >= self._last_step:
            trainer.should_stop = True
        steps = int(trainer.estimated_stepping_batches)
        every = max(1, math.ceil(steps / self.points))
        if step % every and step != steps and not (trainer.is_last_batch or trainer.should_stop):
            return
        spent = self._source(trainer).privacy_spent()
        pl_module.log("privacy/epsilon", spent.epsilon, logger=False, batch_size=1)
        # straight to the loggers: Trainer.log_every_n_steps would drop most of the few points
        for logger in trainer.loggers:
            logger.log_metrics({"privacy/epsilon": spent.epsilon}, step=step - 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what the run cost."""
        spent = self._source(trainer).privacy_spent()
        rank_zero_info(
            f"privacy spent: epsilon {spent.epsilon:.4g} at delta {spent.delta:.3g} after "
            f"{spent.step} of {spent.steps} steps"
        )
