"""Random and fixed batch orders whose privacy amplification is known.

Every order is a pure function of (seed, epoch), the same global batch on all ranks; rank r takes
the positions r, r + world, ... of it. Batches of random sampling vary in size and may be empty: a
data set must then give tensors whose first dimension is zero.

Whoever knows the seed of a random order knows who took part, so amplification needs a secret one:
`callbacks.PrivateGradients` mixes the run's secret into Poisson orders.
"""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from lightning_modules.components.randomness import generator_from, secret_generator

__all__ = ["BallsInBinsOrder", "CyclicPoissonOrder", "FixedOrder", "PoissonOrder"]


class _PrivateOrder:
    """What all orders share.

    Attributes:
        scheme: name of the sampling scheme, by which an accountant chooses its theorem.
        size: number of examples.
        expected: expected examples of a global batch; what gradients are divided by.
        epoch: epoch whose batches are given.
        secret: second seed of random sampling, for what must not follow from ``seed`` alone.
    """

    scheme = ""
    secret: int | None = None

    def __init__(
        self, size: int, batch_size: int, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        if size < 1:
            raise ValueError(f"{self.scheme} sampling needs at least one example, got {size}")
        self.size, self.seed = size, seed
        self.rank, self.world_size = rank, world_size
        self.expected = batch_size * world_size
        if self.expected > size:
            raise ValueError(
                f"data.batch_size={batch_size} on {world_size} device(s) makes batches of "
                f"{self.expected}, more than the {size} examples: choose at most "
                f"{max(1, size // world_size)}"
            )
        self.epoch = 0

    @property
    def probability(self) -> float:
        """Chance of one example to be in one step, averaged over steps."""
        return self.expected / self.size

    def __len__(self) -> int:
        return self.size // self.expected

    def global_batch(self, position: int) -> Tensor:
        """Indices of the whole batch at a position of the present epoch, int64."""
        raise NotImplementedError

    def batches(self) -> Iterator[list[int]]:
        """Index lists of this rank, from the beginning of the epoch."""
        for position in range(len(self)):
            yield self.global_batch(position)[self.rank :: self.world_size].tolist()

    def _chosen(self, position: int) -> Tensor:
        key = (self.seed, self.scheme, self.epoch, position)
        generator = (
            generator_from(*key) if self.secret is None else secret_generator(*key, self.secret)
        )
        # float64: float32 has steps of 6e-8, which would change a small probability
        return torch.rand(self.size, generator=generator, dtype=torch.float64)


class PoissonOrder(_PrivateOrder):
    """Every example is in every batch independently with probability ``expected / size``."""

    scheme = "poisson"

    def global_batch(self, position: int) -> Tensor:
        """Indices of the whole batch, in increasing order."""
        return torch.nonzero(self._chosen(position) < self.probability).flatten()


class CyclicPoissonOrder(_PrivateOrder):
    """Examples belong to ``groups`` fixed groups; step t samples group ``t mod groups``.

    Within its group's step an example is taken with probability ``groups * expected / size``, so
    batches have the same expected size as under Poisson sampling, and two participations are a
    multiple of ``groups`` steps apart. Steps count across epochs.

    Attributes:
        groups: number of groups; an accountant sets it to the bands of its strategy.
    """

    scheme = "cyclic_poisson"
    groups: int = 1

    @cached_property
    def _places(self) -> Tensor:
        return torch.randperm(self.size, generator=generator_from(self.seed, "groups"))

    def global_batch(self, position: int) -> Tensor:
        """Indices of the whole batch, in increasing order."""
        if not 1 <= self.groups <= self.size // self.expected:
            raise ValueError(
                f"cyclic Poisson sampling of batches of {self.expected} from {self.size} examples "
                f"takes 1 to {self.size // self.expected} groups, got {self.groups}"
            )
        step = self.epoch * len(self) + position
        members = self._places % self.groups == step % self.groups
        chosen = self._chosen(position) < self.groups * self.probability
        return torch.nonzero(members & chosen).flatten()


class FixedOrder(_PrivateOrder):
    """One order for all epochs: participations are exactly one epoch apart.

    The last batch of an epoch is short if the batch size does not divide the data: gradients are
    divided by the expected size all the same, as if it were filled up with masked examples.
    """

    scheme = "fixed_order"

    def __len__(self) -> int:
        return -(-self.size // self.expected)

    def global_batch(self, position: int) -> Tensor:
        """Indices of the whole batch."""
        return self._order[position * self.expected : (position + 1) * self.expected]

    @cached_property
    def _order(self) -> Tensor:
        return torch.randperm(self.size, generator=generator_from(self.seed, "fixed order"))


class BallsInBinsOrder(_PrivateOrder):
    """Every example falls once into one of the epoch's batches and stays there in all epochs."""

    scheme = "balls_in_bins"

    def global_batch(self, position: int) -> Tensor:
        """Indices of the whole batch, in increasing order."""
        generator = generator_from(self.seed, "balls in bins")
        bins = torch.randint(len(self), (self.size,), generator=generator)
        return torch.nonzero(bins == position).flatten()
