"""Synthetic input matrices with a known isometry gap, for looking at signal propagation."""

from typing import Literal

import torch
from torch import Tensor

from datamodules.base import Rows, SuiteDataModule
from datamodules.images import ImageBatch
from lightning_modules.components.randomness import generator_from

__all__ = ["IsometryInputs", "isometry_input"]

Source = Literal["near_identity", "gaussian", "duplicated"]


def isometry_input(
    source: str, width: int, generator: torch.Generator, perturbation: float = 0.005
) -> Tensor:
    """Draw one square input matrix.

    Args:
        source: `near_identity`: `(1 - f) I + f u v^T` with u, v uniform on [0, 1]^width, the input
            of the isometry figure; `gaussian`: independent standard normal entries; `duplicated`:
            Gaussian with the second half of the rows a copy of the first, so rank-deficient.
        width: Number of rows and of columns.
        generator: Source of randomness.
        perturbation: The `f` of `near_identity`, in [0, 1].

    Returns:
        float64 `(width, width)`.
    """
    if source == "near_identity":
        u, v = torch.rand(2, width, dtype=torch.float64, generator=generator)
        eye = torch.eye(width, dtype=torch.float64)
        return (1 - perturbation) * eye + perturbation * torch.outer(u, v)
    x = torch.randn(width, width, dtype=torch.float64, generator=generator)
    if source == "duplicated":
        x[width - width // 2 :] = x[: width // 2]
    return x


class IsometryInputs(SuiteDataModule):
    """Square input matrices with random labels; every batch of `width` rows is one matrix.

    Batches keep the rows of a matrix together (`sampling: sequential`), on one device.

    Args:
        source: `near_identity`, `gaussian` or `duplicated`, see `isometry_input`.
        width: Rows and columns of a matrix; also the batch size.
        matrices: Number of matrices in each of the training, validation and test sets.
        n_classes: Labels are drawn uniformly from this many classes.
        perturbation: The `f` of `near_identity`.
        seed: Seed of the draws.
        num_workers: Worker processes of each loader.

    Raises:
        ValueError: If an argument is out of range.
    """

    sources = ("near_identity", "gaussian", "duplicated")

    def __init__(
        self,
        source: str = "near_identity",
        width: int = 64,
        matrices: int = 8,
        n_classes: int = 10,
        perturbation: float = 0.005,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        if width < 2:
            raise ValueError(f"width must be at least 2, got {width}")
        super().__init__(source, width, seed, num_workers, sampling="sequential")
        if matrices < 1:
            raise ValueError(f"matrices must be at least 1, got {matrices}")
        if n_classes < 2:
            raise ValueError(f"n_classes must be at least 2, got {n_classes}")
        if not 0 <= perturbation <= 1:
            raise ValueError(f"perturbation must be in [0, 1], got {perturbation}")
        self.width = width
        self.matrices = matrices
        self.n_classes = n_classes
        self.perturbation = perturbation
        self.n_features = width
        self.sample_shape = (width,)

    def setup(self, stage: str | None = None) -> None:
        """Draw the matrices; pure in the seed, so the same on every rank."""
        self.train_set, self.val_set, self.test_set = (
            self._draw(part) for part in ("train", "val", "test")
        )

    def _draw(self, part: str) -> Rows[ImageBatch]:
        generator = generator_from(self.seed, "isometry", self.source, part)
        x = torch.cat(
            [
                isometry_input(self.source, self.width, generator, self.perturbation)
                for _ in range(self.matrices)
            ]
        )
        y = torch.randint(self.n_classes, (len(x),), generator=generator)
        return Rows(ImageBatch, x.to(torch.float32), y)
