"""Linear regression by noisy gradient descent on a stream: many repeats and noises at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import fft

from lightning_modules.components.privacy.power_series import series_inverse

Array = NDArray[np.float64]


def correlate(taps: ArrayLike, white: Array) -> Array:
    """``w~_t = sum_s taps_s white_{t-s}`` along the first axis, same shape as ``white``."""
    n = white.shape[0]
    beta = np.asarray(taps, dtype=np.float64)[:n]
    if beta.size == 1:
        return np.asarray(white * beta[0])
    size = fft.next_fast_len(2 * n - 1, real=True)
    shape = (-1, *[1] * (white.ndim - 1))
    spectrum = fft.rfft(beta, size).reshape(shape) * fft.rfft(white, size, axis=0)
    return np.asarray(fft.irfft(spectrum, size, axis=0)[:n])


def trajectory(
    x: Array, residual: Array, noise: Array, learning_rate: float, start: Array | None = None
) -> Array:
    """Iterates of ``delta <- delta - eta (x <x, delta> - xi x + noise)``.

    Args:
        x: inputs, (steps, ..., d).
        residual: label noise xi, (steps, ...).
        noise: correlated noise of every step, (steps, ..., d), scaled already.
        learning_rate: eta.
        start: delta_0 (..., d), default zero.

    Returns:
        All iterates with the first, (steps + 1, ..., d).
    """
    shape = np.broadcast_shapes(x.shape[1:], noise.shape[1:])
    delta = np.zeros(shape) if start is None else np.broadcast_to(start, shape).copy()
    out = np.empty((x.shape[0] + 1, *shape))
    out[0] = delta
    for t in range(x.shape[0]):
        error = np.sum(x[t] * delta, axis=-1) - residual[t]
        delta = delta - learning_rate * (x[t] * error[..., None] + noise[t])
        out[t + 1] = delta
    return out


class RiskTable(NamedTuple):
    """Excess risk of one problem.

    Attributes:
        mean: noise name -> excess risk averaged over the last half of the steps and repeats.
        spread: noise name -> standard deviation over repeats.
    """

    mean: dict[str, float]
    spread: dict[str, float]


def excess_risk(
    eigenvalues: ArrayLike,
    taps: Mapping[str, ArrayLike],
    *,
    learning_rate: float,
    steps: int,
    sensitivity: float = 1.0,
    rho: float = 1.0,
    label_noise: float = 0.0,
    repeats: int = 4,
    seed: int = 0,
) -> RiskTable:
    """Run every noise on the same stream of data and the same white noise.

    The white noise has deviation ``G gamma_T / sqrt(2 rho)``, so each run is rho-zCDP.

    Args:
        eigenvalues: spectrum of the inputs' covariance, (d,).
        taps: name -> coefficients beta of the noising filter; (1,) is independent noise.
        learning_rate: eta.
        steps: T.
        sensitivity: G.
        rho: privacy of the whole run.
        label_noise: deviation of the labels around the linear model.
        repeats: independent runs.
        seed: seed of data and noise.
    """
    scale = np.sqrt(np.asarray(eigenvalues, dtype=np.float64))
    generator = np.random.default_rng(seed)
    shape = (steps, repeats, scale.size)
    x = generator.standard_normal(shape) * scale
    residual = label_noise * generator.standard_normal(shape[:2])
    white = generator.standard_normal(shape)
    names = list(taps)
    noise = np.empty((steps, len(names), *shape[1:]))
    for i, name in enumerate(names):
        beta = np.asarray(taps[name], dtype=np.float64)
        gamma = float(np.linalg.norm(series_inverse(beta, steps)))
        noise[:, i] = correlate(beta, white) * (sensitivity * gamma / np.sqrt(2 * rho))
    delta = np.zeros((len(names), *shape[1:]))
    half = steps // 2
    total = np.zeros(delta.shape[:2])
    for t in range(steps):
        error = np.einsum("rd,srd->sr", x[t], delta) - residual[t]
        delta -= learning_rate * (x[t] * error[..., None] + noise[t])
        if t >= half:
            total += np.square(delta * scale).sum(axis=-1) / 2
    risks = total / (steps - half)
    return RiskTable(
        {name: float(risks[i].mean()) for i, name in enumerate(names)},
        {name: float(risks[i].std()) for i, name in enumerate(names)},
    )
