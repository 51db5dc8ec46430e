"""Reference files and small models of the Epsilon Scaling tests."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_modules.components.diffusion import ExactScore, GaussianDiffusion


@pytest.fixture(scope="session")
def reference():
    return lambda name: np.load(Path(__file__).parent / "reference" / name)


@pytest.fixture(scope="session")
def draw():
    def normal(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    return normal


@pytest.fixture(scope="session")
def gaussian_model():
    """Exact noise of N(0, 0.25) data under the linear schedule."""
    return ExactScore(torch.zeros(1, 1, 8, 8), 0.5, GaussianDiffusion.from_name("linear"))
