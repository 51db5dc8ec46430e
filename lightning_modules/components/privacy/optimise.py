"""Numerically optimised strategies: banded Toeplitz, buffered linear Toeplitz and dense."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import sqrtm
from scipy.optimize import minimize, nnls
from scipy.signal import fftconvolve, lfilter

from lightning_modules.components.privacy.power_series import (
    nu_strategy_coefficients,
    prefix_workload,
    series_inverse,
)

Array = NDArray[np.float64]


def workload_errors(coefficients: ArrayLike, n: int, momentum: float = 0.0) -> Array:
    """``||B_t||^2`` for every step, B = A C^-1, A prefix sums of momentum SGD; shape (n,)."""
    inverse = series_inverse(coefficients, n)
    workload = np.cumsum(momentum ** np.arange(n))
    row = fftconvolve(workload, inverse)[:n]
    return np.cumsum(np.square(row))


def mean_loss(coefficients: ArrayLike, n: int, momentum: float = 0.0) -> float:
    """``mean_t ||B_t||^2`` times the squared column norm: error at unit privacy."""
    c = np.asarray(coefficients, dtype=np.float64)[:n]
    return float(workload_errors(c, n, momentum).mean() * (c @ c))


def max_loss(coefficients: ArrayLike, n: int, momentum: float = 0.0) -> float:
    """``max_t ||B_t||^2`` times the squared column norm."""
    c = np.asarray(coefficients, dtype=np.float64)[:n]
    return float(workload_errors(c, n, momentum).max() * (c @ c))


def rms_error(inverse: ArrayLike, workload: ArrayLike) -> float:
    """``sqrt(mean_t ||(A C^-1)_t||^2)``: error of the iterates at unit sigma."""
    b = np.asarray(workload) @ np.asarray(inverse)
    return float(np.sqrt(np.square(b).sum(axis=1).mean()))


def _log_loss(c: Array, n: int, workload: Array, shifts: tuple[int, ...]) -> tuple[float, Array]:
    """Log of mean error times squared sensitivity, and its gradient in all n coefficients.

    ``d(1/c) = -(1/c)^2 dc`` as power series, so one more convolution gives the gradient.
    """
    impulse = np.zeros(n)
    impulse[0] = 1.0
    inverse = lfilter([1.0], np.trim_zeros(c, "b"), impulse)
    row = fftconvolve(workload, inverse)[:n]
    share = (n - np.arange(n)) / n
    error = float(share @ np.square(row))
    from_row = 2 * share * row
    from_inverse = fftconvolve(from_row[::-1], workload)[:n][::-1]  # correlation with the workload
    square = fftconvolve(inverse, inverse)[:n]
    gradient = -fftconvolve(from_inverse[::-1], square)[:n][::-1]
    total = np.zeros(n)
    for shift in shifts:
        total[shift:] += c[: n - shift]
    sens = float(total @ total)
    from_sens = np.zeros(n)
    for shift in shifts:
        from_sens[: n - shift] += 2 * total[shift:]
    return float(np.log(error) + np.log(sens)), gradient / error + from_sens / sens


def _shifts(n: int, participations: int, separation: int) -> tuple[int, ...]:
    return tuple(range(0, n, separation))[:participations]


@lru_cache(maxsize=32)
def _banded(n: int, bands: int, momentum: float, shifts: tuple[int, ...]) -> tuple[float, ...]:
    workload = np.cumsum(momentum ** np.arange(n))
    start = nu_strategy_coefficients(0.0, bands)

    def value(tail: Array) -> tuple[float, Array]:
        c = np.zeros(n)
        c[0], c[1:bands] = 1.0, tail
        loss, gradient = _log_loss(c, n, workload, shifts)
        return (loss, gradient[1:bands]) if np.isfinite(loss) else (1e6, np.zeros(bands - 1))

    if bands == 1:
        return (1.0,)
    # C >= 0 keeps the strategy open to amplification; the optimum lies inside for these workloads.
    found = minimize(
        value,
        start[1:],
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, None)] * (bands - 1),
        options={"maxiter": 500, "maxfun": 2000, "ftol": 1e-13},
    )
    c = np.concatenate([[1.0], found.x])
    return tuple((c / np.linalg.norm(c)).tolist())


def optimise_banded(
    n: int, bands: int, momentum: float = 0.0, participations: int = 1, separation: int = 1
) -> Array:
    """Banded Toeplitz coefficients of unit norm that minimise mean error at equal privacy.

    L-BFGS from the banded square root, with the analytic gradient; shape (bands,).

    Raises:
        ValueError: bands outside [1, n].
    """
    if not 1 <= bands <= n:
        raise ValueError(f"bands must be in [1, n={n}], got {bands}")
    return np.array(_banded(n, bands, momentum, _shifts(n, participations, separation)))


def buffered_coefficients(decay: ArrayLike, scale: ArrayLike, n: int) -> Array:
    """``c_0 = 1, c_t = sum_i scale_i decay_i^(t-1)``, shape (n,)."""
    powers = np.asarray(decay, dtype=np.float64)[None, :] ** np.arange(max(n - 1, 0))[:, None]
    return np.concatenate([[1.0], powers @ np.asarray(scale, dtype=np.float64)])[:n]


def buffered_inverse(decay: ArrayLike, scale: ArrayLike) -> tuple[Array, Array]:
    """Decay and scale of C^-1, again of the buffered form, decays in decreasing order.

    C^-1 has the state matrix ``diag(decay) - 1 scale^T``; its eigenvalues are the decays.
    """
    lam, a = np.asarray(decay, dtype=np.float64), np.asarray(scale, dtype=np.float64)
    ones = np.ones(lam.size)
    values, vectors = np.linalg.eig(np.diag(lam) - np.outer(ones, a))
    if np.abs(values.imag).max() > 1e-9:
        raise ValueError("the inverse of these buffers oscillates: scales must be positive")
    weights = np.linalg.solve(vectors, ones)
    out = -(a @ vectors) * weights
    order = np.argsort(-values.real)
    return values.real[order], out.real[order]


@lru_cache(maxsize=32)
def _buffers(
    n: int, buffers: int, momentum: float, shifts: tuple[int, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    workload = np.cumsum(momentum ** np.arange(n))
    target = nu_strategy_coefficients(0.0, n)[1:]
    # Decays spaced evenly in log(1 - decay) between the horizon and one half.
    decay = 1.0 - np.geomspace(0.5 / n, 0.6, buffers)
    powers = decay[None, :] ** np.arange(n - 1)[:, None]
    weight = 1.0 / np.sqrt(1.0 + np.arange(n - 1))
    scale, _ = nnls(powers * weight[:, None], target * weight)
    scale = np.maximum(scale, 1e-4)
    lags = np.arange(n - 1)

    def value(theta: Array) -> tuple[float, Array]:
        gap, a = np.exp(theta[:buffers]), np.exp(theta[buffers:])
        lam = 1.0 - gap
        powers = lam[None, :] ** lags[:, None]
        c = np.concatenate([[1.0], powers @ a])
        loss, gradient = _log_loss(c, n, workload, shifts)
        if not np.isfinite(loss):
            return 1e6, np.zeros_like(theta)
        from_lam = a * (gradient[2:] @ (lags[1:, None] * powers[:-1])) if n > 2 else 0 * a
        return loss, np.concatenate([-from_lam * gap, (gradient[1:] @ powers) * a])

    start = np.log(np.concatenate([1.0 - decay, scale]))
    found = minimize(
        value,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(np.log(1e-9), np.log(0.999))] * buffers + [(-20.0, 2.0)] * buffers,
        options={"maxiter": 500, "maxfun": 2000, "ftol": 1e-13},
    )
    lam, a = 1.0 - np.exp(found.x[:buffers]), np.exp(found.x[buffers:])
    order = np.argsort(-lam)
    return tuple(lam[order].tolist()), tuple(a[order].tolist())


def optimise_buffers(
    n: int, buffers: int, momentum: float = 0.0, participations: int = 1, separation: int = 1
) -> tuple[Array, Array]:
    """Decay and scale of a buffered linear Toeplitz C that minimise mean error at equal privacy.

    Raises:
        ValueError: fewer than 1 buffer, or more than 10 (the fit is ill-conditioned beyond).
    """
    if not 1 <= buffers <= 10:
        raise ValueError(f"buffers must be in [1, 10], got {buffers}")
    if n < 2:
        raise ValueError(f"a buffered strategy needs at least 2 steps, got {n}")
    decay, scale = _buffers(n, buffers, momentum, _shifts(n, participations, separation))
    return np.array(decay), np.array(scale)


@lru_cache(maxsize=8)
def _dense(n: int, momentum: float, iterations: int) -> bytes:
    workload = prefix_workload(n, momentum)
    gram = workload.T @ workload
    dual = np.sqrt(np.diag(gram))
    for _ in range(iterations):
        root = np.sqrt(dual)
        inner = np.real(sqrtm(root[:, None] * gram * root[None, :]))
        update = np.diag(inner).copy()
        done = np.max(np.abs(update / dual - 1.0)) < 1e-10
        dual = update
        if done:
            break
    root = np.sqrt(dual)
    inner = np.real(sqrtm(root[:, None] * gram * root[None, :]))
    x = inner / np.outer(root, root)
    x /= np.diag(x).max()
    return lower_factor(x).tobytes()


def optimise_dense(n: int, momentum: float = 0.0, iterations: int = 100) -> Array:
    """Optimal dense C (n, n) for one participation: least ``tr(A^T A X^-1)``, ``diag X <= 1``.

    Fixed point ``v <- diag((D A^T A D)^(1/2))`` with ``D = diag(v)^(1/2)``.

    Raises:
        ValueError: n above 512 (cubic cost).
    """
    if not 1 <= n <= 512:
        raise ValueError(f"the dense optimum is for 1 to 512 steps, got {n}; use bands")
    return np.frombuffer(_dense(n, momentum, iterations)).reshape(n, n).copy()


def lower_factor(gram: ArrayLike) -> Array:
    """Lower-triangular C with ``C^T C = gram`` (Cholesky in reversed time order)."""
    x = np.asarray(gram, dtype=np.float64)
    factor = np.linalg.cholesky(x[::-1, ::-1])
    return np.ascontiguousarray(factor.T[::-1, ::-1])


def tree_gram(n: int) -> Array:
    """``C^T C`` of the dyadic tree over ``n`` leaves: number of common ancestors, (n, n)."""
    levels = max(1, (n - 1).bit_length() + 1)
    leaves = np.arange(n)
    gram = np.zeros((n, n))
    for level in range(levels):
        block = leaves >> level
        gram += block[:, None] == block[None, :]
    return gram
