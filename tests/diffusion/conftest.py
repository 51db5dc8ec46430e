"""The weight recipe and the reference files of the diffusion tests."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

REFERENCE = Path(__file__).parent / "reference"


def seeded_state(module: torch.nn.Module, base_seed: int = 1000) -> None:
    """Fill a module by the recipe of the references: one stream per alphabetical name."""
    state = module.state_dict()
    for rank, name in enumerate(sorted(state)):
        shape = tuple(state[name].shape)
        drawn = np.random.RandomState(base_seed + rank).standard_normal(shape)
        if len(shape) >= 2:
            drawn = drawn / np.sqrt(np.prod(shape[1:]))
        else:
            drawn = 1 + 0.1 * drawn if name.endswith("weight") else 0.05 * drawn
        state[name].copy_(torch.from_numpy(drawn.astype(np.float32)))


def normal(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    drawn = np.random.RandomState(seed).standard_normal(shape)
    return torch.from_numpy(drawn.astype(np.float32))


@pytest.fixture(scope="session")
def reference():
    """Reads reference/<name>.npz or .json."""

    def read(name: str):
        path = REFERENCE / name
        return json.loads(path.read_text()) if path.suffix == ".json" else np.load(path)

    return read


@pytest.fixture(scope="session")
def recipe():
    return seeded_state


@pytest.fixture(scope="session")
def draw():
    return normal
