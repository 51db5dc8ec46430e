"""Every wrong input is answered by one line that names it."""

import numpy as np
import pytest

from lightning_modules.components.privacy import (
    CyclicPoissonAccountant,
    Mixture,
    SquareRoot,
    calibrate,
    discretise,
    mmcc,
)

GOOD = np.array([[1.0, 0.0], [0.5, 1.0]])


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.ones((2, 3)), "square"),
        (np.array([[1.0, 0.2], [0.5, 1.0]]), r"\(0, 1\).*above the diagonal"),
        (np.array([[1.0, 0.0], [-0.5, 1.0]]), r"\(1, 0\).*negative"),
        (np.array([[1.0, 0.0], [0.5, 0.0]]), r"\(1, 1\).*zero"),
        (np.array([[1.0, 0.0], [np.nan, 1.0]]), r"\(1, 0\).*not finite"),
        (np.ones((0, 0)), "not empty"),
    ],
)
def test_matrix(matrix: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mmcc(matrix, max(1, len(matrix)), 0.1, 1.0, 1e-5)


def test_dense_matrix_too_large() -> None:
    wide = np.broadcast_to(np.float64(1.0), (5001, 5001))
    with pytest.raises(ValueError, match="at most 5000 steps, got 5001"):
        mmcc(wide, 5001, 0.1, 1.0, 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": 0.0}, "sampling probability"),
        ({"p": 1.1}, "sampling probability"),
        ({"sigma": 0.0}, "sigma"),
        ({"sigma": float("inf")}, "sigma"),
        ({"delta": 0.0}, "delta must be"),
        ({"delta": 1.0}, "delta must be"),
        ({"delta1": 1e-5}, "delta1"),
        ({"n": 0}, "number of steps"),
        ({"n": 3}, "2 steps, the run 3"),
        ({"tail": "loose"}, "tail"),
        ({"step": 0.0}, "grid step"),
    ],
)
def test_parameters(change: dict, message: str) -> None:
    arguments = {"n": 2, "p": 0.1, "sigma": 1.0, "delta": 1e-5, **change}
    with pytest.raises(ValueError, match=message):
        mmcc(GOOD, **arguments)


def test_window_overflow_names_the_points() -> None:
    with pytest.raises(ValueError, match=r"points \(allowed: 8388608\).*raise"):
        discretise(Mixture.build([0.0, 1.0], [0.5, 0.5], 1e-3), 1e-4)


def test_unreachable_targets() -> None:
    with pytest.raises(ValueError, match="target_epsilon must be positive"):
        calibrate(-1.0, 1e-5, lambda s, h: 1.0)
    with pytest.raises(ValueError, match=r"unreachable: epsilon stays at 0\.7"):
        calibrate(0.5, 1e-5, lambda s, h: 0.7)


def test_cyclic_sampling_needs_room_for_the_bands() -> None:
    with pytest.raises(
        ValueError, match="3 groups needs at most as many bands, the strategy has 4"
    ):
        CyclicPoissonAccountant(SquareRoot(4), 20, 0.1, 1.0, 1e-5, groups=3)
    with pytest.raises(ValueError, match=r"4 groups times the sampling probability 0\.5 exceed 1"):
        CyclicPoissonAccountant(SquareRoot(4), 20, 0.5, 1.0, 1e-5)


def test_mixture() -> None:
    with pytest.raises(ValueError, match="sum to 1"):
        Mixture.build([0.0, 1.0], [0.5, 0.4], 1.0)
    with pytest.raises(ValueError, match=">= 0"):
        Mixture.build([0.0, -1.0], [0.5, 0.5], 1.0)
    with pytest.raises(ValueError, match="sigma"):
        Mixture.build([0.0], [1.0], 0.0)
