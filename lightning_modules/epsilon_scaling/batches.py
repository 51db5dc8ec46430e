"""The fields of a batch that are read, and batches of whole data sets."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Images(Protocol):
    """The fields of a batch that this module reads.

    Attributes:
        x: float32 ``(n, c, h, w)`` in [-1, 1].
        y: int64 ``(n,)`` class numbers; read by class-conditional models only.
    """

    x: Tensor
    y: Tensor


class ImagesInMemory:
    """Images in memory as a data set of batches."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, indices: list[int]) -> ImagesInMemory:
        return ImagesInMemory(self.x[indices])


def rows_of(dataset: Any, indices: list[int] | None = None) -> Any:
    """Batch of some or all samples of a data set."""
    return dataset[list(range(len(dataset))) if indices is None else indices]


class KnownMixture(Protocol):
    """What data may say of themselves, in an attribute `mixture`.

    Attributes:
        centres: ``(k, c, h, w)`` of equally likely Gaussians.
        std: Their standard deviation.
    """

    centres: Tensor
    std: float


def known_mixture(data: Any) -> KnownMixture | None:
    """Mixture that a datamodule says its samples are drawn from, if it does."""
    mixture: KnownMixture | None = getattr(data, "mixture", None)
    return mixture
