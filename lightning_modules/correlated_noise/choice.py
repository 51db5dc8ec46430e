"""Choosing nu without training: the error of a workload at equal privacy."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_modules.components.privacy.optimise import rms_error
from lightning_modules.components.privacy.participation import Participation
from lightning_modules.components.privacy.power_series import prefix_workload
from lightning_modules.components.privacy.strategies import NuToeplitz
from lightning_modules.components.privacy.strategy import Strategy

NU_GRID = (0.0, 1e-4, 1e-3, 1e-2, 5e-2, 1e-1)


def proxy_error(
    strategy: Strategy,
    n: int,
    participation: Participation | None = None,
    momentum: float = 0.0,
    rates: Sequence[float] | None = None,
) -> float:
    """``sens * sqrt(mean_t ||(A C^-1)_t||^2)``: error of the iterates per unit of noise.

    Args:
        strategy: strategy matrix.
        n: steps (dense arrays of this size are built).
        participation: how often an example takes part; default once.
        momentum: heavy-ball momentum in the workload A.
        rates: relative learning rates of the steps.
    """
    workload = prefix_workload(n, momentum, rates)
    return strategy.sensitivity(n, participation) * rms_error(strategy.inverse(n), workload)


def choose_nu(
    n: int,
    participation: Participation | None = None,
    momentum: float = 0.0,
    rates: Sequence[float] | None = None,
    grid: Sequence[float] = NU_GRID,
    bands: int | None = None,
) -> float:
    """The nu of the grid with the least proxy error; costs no privacy, as no data are read."""
    return min(
        grid,
        key=lambda nu: proxy_error(NuToeplitz(nu, bands), n, participation, momentum, rates),
    )
