"""The protocols through which a callback talks to a method.

A callback never asks which method it watches (``isinstance(module, FedRAP)``); it asks whether the
method offers what the callback needs. Every ``lightning_modules.base.PaperModule`` offers all of
these, and so does any other ``LightningModule`` that has the named members.

The protocols are runtime-checkable: ``isinstance(module, HasFigures)`` looks for the members and
not for a base class.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

__all__ = ["HasFigures", "HasIteration", "HasLossWeights", "HasMonitor", "HasPenalties"]


@runtime_checkable
class HasLossWeights(Protocol):
    """Names the coefficients of the terms of its objective, so that they can be moved.

    Attributes:
        loss_weights: term of the objective -> coefficient, read anew in every training step.
    """

    loss_weights: dict[str, float]


@runtime_checkable
class HasIteration(Protocol):
    """Counts its own training batches.

    ``Trainer.global_step`` counts the steps of every optimiser and therefore runs at twice the
    speed for a method with two of them. This clock counts batches and is stored in the checkpoint.
    """

    @property
    def iteration(self) -> int:
        """Training batches that were finished before the current one."""
        ...


@runtime_checkable
class HasPenalties(Protocol):
    """Adds terms that were registered from outside to its objective."""

    def register_penalty(
        self, name: str, penalty: "Callable[[Any], Tensor]", weight: float = 1.0
    ) -> None:
        """Add ``weight * penalty(self)`` to the objective under ``name``.

        Args:
            name: name of the term, logged as ``train/<name>``; the same name replaces the term.
            penalty: picklable callable that takes the module and returns a 0-d tensor.
            weight: coefficient of the term.
        """
        ...


@runtime_checkable
class HasFigures(Protocol):
    """Draws its own figures."""

    def figures(self) -> "Mapping[str, Figure]":
        """Return the figures of the present state, by a name that serves as file name."""
        ...


@runtime_checkable
class HasMonitor(Protocol):
    """Names the metric by which its checkpoints are compared.

    Attributes:
        monitor: logged name of the metric, such as ``val/loss``.
        mode: ``"min"`` if smaller is better, else ``"max"``.
    """

    monitor: str
    mode: str
