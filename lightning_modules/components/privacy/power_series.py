"""Power series of lower-triangular Toeplitz matrices: inverses and the nu family."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ellipk

Array = NDArray[np.float64]


def series_inverse(coefficients: ArrayLike, n: int) -> Array:
    """First ``n`` coefficients of ``1 / sum_t coefficients[t] x^t``, shape (n,), float64.

    Raises:
        ValueError: the constant term is zero, or ``n`` is below 1.
    """
    series = np.asarray(coefficients, dtype=np.float64)
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if series.ndim != 1 or series.size == 0 or series[0] == 0.0:
        raise ValueError("coefficients must be one row of numbers that starts with a non-zero one")
    series = series[:n]
    inverse = np.zeros(n)
    inverse[0] = 1.0 / series[0]
    for t in range(1, n):
        reach = min(t, series.size - 1)
        past = inverse[t - reach : t][::-1]
        inverse[t] = -(series[1 : reach + 1] @ past) / series[0]
    return inverse


def _check_nu(nu: float) -> None:
    if not 0.0 <= nu < 1.0:
        raise ValueError(f"nu must be in [0, 1), got {nu}; nu = 0 is the prefix-sum square root")


def nu_noise_coefficients(nu: float, n: int) -> Array:
    """``beta_t = (-1)^t binom(1/2, t) (1 - nu)^t``: the noising matrix B = C^-1, shape (n,).

    By recursion: the gamma functions of the closed form overflow and lose the sign.
    """
    _check_nu(nu)
    t = np.arange(1, n, dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod((1.0 - nu) * (t - 1.5) / t)])[:n]


def nu_strategy_coefficients(nu: float, n: int) -> Array:
    """``c_t = (1 - nu)^t binom(2t, t) / 4^t``: the strategy matrix C = B^-1, shape (n,)."""
    _check_nu(nu)
    t = np.arange(1, n, dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod((1.0 - nu) * (t - 0.5) / t)])[:n]


def nu_sensitivity(nu: float, n: int) -> float:
    """``gamma_n``: largest column norm of C for the nu family, one participation, ``n`` steps."""
    return float(np.linalg.norm(nu_strategy_coefficients(nu, n)))


def nu_sensitivity_limit(nu: float) -> float:
    """``gamma_inf = sqrt(2/pi K(m=(1-nu)^2))``; infinite at nu = 0 (K takes m = k^2 here)."""
    _check_nu(nu)
    return float(np.sqrt(2.0 / np.pi * ellipk((1.0 - nu) ** 2))) if nu > 0.0 else float("inf")


def toeplitz(coefficients: ArrayLike, n: int) -> Array:
    """Lower-triangular Toeplitz matrix (n, n) with first column ``coefficients``, zero padded."""
    column = np.zeros(n)
    given = np.asarray(coefficients, dtype=np.float64)[:n]
    column[: given.size] = given
    lag = np.subtract.outer(np.arange(n), np.arange(n))
    return np.where(lag >= 0, column[np.maximum(lag, 0)], 0.0)


def prefix_workload(n: int, momentum: float = 0.0, rates: ArrayLike | None = None) -> Array:
    """Workload A (n, n): iterates of SGD as a linear map of the gradients.

    Args:
        n: steps.
        momentum: heavy-ball coefficient; 0 gives prefix sums.
        rates: relative learning rate of every step, shape (n,), e.g. with a cooldown.
    """
    scale = np.ones(n) if rates is None else np.asarray(rates, dtype=np.float64)
    if scale.shape != (n,):
        raise ValueError(f"rates must have one entry per step ({n}), got shape {scale.shape}")
    velocity = toeplitz(momentum ** np.arange(n), n)  # momentum buffer after every step
    return np.cumsum(scale[:, None] * velocity, axis=0)
