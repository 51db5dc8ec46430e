"""Draws from a mixture of Gaussians in the plane, whose centres and width are known."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from datamodules.base import Rows, SuiteDataModule
from datamodules.images import ImageBatch
from lightning_modules.components.randomness import generator_from

__all__ = ["GaussianMixture", "Mixture"]

WIDTHS = 5
"""Widths of a component that must fit between its centre and the edge of [-1, 1]."""


class Mixture(NamedTuple):
    """Equally likely Gaussians of one width.

    Attributes:
        centres: float32 `(k, 2, 1, 1)`.
        std: Standard deviation of every component in each coordinate.
    """

    centres: Tensor
    std: float


def _ring() -> Tensor:
    angles = torch.arange(8) * (math.pi / 4)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def _grid() -> Tensor:
    ticks = torch.linspace(-1, 1, 5)
    return torch.cartesian_prod(ticks, ticks)


SHAPES = {"ring": _ring, "grid": _grid}


class GaussianMixture(SuiteDataModule):
    """Points of the plane as images of two channels and one pixel, labelled by component.

    | source | centres |
    | --- | --- |
    | `ring` | 8 on a circle of radius `spread` |
    | `grid` | 5 x 5 on the square of half side `spread` |

    Generated from `seed`, nothing is read. `mixture` says what the points are drawn from, so that
    a method can compare with the truth.

    Args:
        source: One of the sources above.
        size: Training points; a quarter as many for validation and for testing each.
        spread: Largest distance of a centre from 0 (`ring`), or along an axis (`grid`).
        std: Width of each component.
        batch_size: Points per batch and device.
        seed: Seed of points and orders.
        num_workers: Worker processes of each loader.
        sampling: How training batches are drawn.

    Raises:
        ValueError: If an argument is out of range or points would leave [-1, 1].
    """

    sources = ("ring", "grid")

    def __init__(
        self,
        source: str = "ring",
        size: int = 4000,
        spread: float = 0.6,
        std: float = 0.08,
        batch_size: int = 100,
        seed: int = 0,
        num_workers: int = 0,
        sampling: str = "shuffle",
    ) -> None:
        super().__init__(source, batch_size, seed, num_workers, None, sampling)
        if size < 4:
            raise ValueError(f"size must be at least 4, got {size}")
        if spread <= 0 or std <= 0:
            raise ValueError(f"spread and std must be positive, got {spread} and {std}")
        if spread + WIDTHS * std > 1 + 1e-9:
            raise ValueError(
                f"spread + {WIDTHS} std must be at most 1, got {spread} and {std}: "
                "points would leave [-1, 1]"
            )
        self.size, self.spread, self.std = size, spread, std
        centres = spread * SHAPES[source]()
        self.mixture = Mixture(centres[:, :, None, None], std)
        self.n_classes = len(centres)

    def setup(self, stage: str | None = None) -> None:
        """Draw the points; the same on every rank."""
        if self.train_set is None:
            self.train_set = self._draw("train", self.size)
            self.val_set = self._draw("val", self.size // 4)
            self.test_set = self._draw("test", self.size // 4)

    def _draw(self, part: str, count: int) -> Rows[ImageBatch]:
        generator = generator_from(self.seed, "mixture", part)
        y = torch.randint(self.n_classes, (count,), generator=generator)
        noise = torch.randn((count, 2, 1, 1), generator=generator)
        return Rows(ImageBatch, self.mixture.centres[y] + self.std * noise, y)
