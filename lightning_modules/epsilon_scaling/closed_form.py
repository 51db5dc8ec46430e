"""Exposure bias of Gaussian data in closed form: every sampler is linear in x."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_modules.components.diffusion import GaussianDiffusion

Array = NDArray[np.float64]


class GaussianTrace(NamedTuple):
    """Variances along a sampler started from N(0, 1), for data N(0, s^2) and the exact noise.

    Attributes:
        variance: ``(T' + 1,)`` of x_T, ..., x_0.
        residual_variance: ``(T',)`` Var[x - sqrt(abar) x_0] after each step, when the sampler is
            started from a noised x_0.
        delta: ``(T',)`` (sqrt(residual_variance) - sqrt(1 - abar))^2.
        frechet: (sqrt(variance of x_0) - s)^2.
    """

    variance: Array
    residual_variance: Array
    delta: Array
    frechet: float


def gaussian_trace(
    diffusion: GaussianDiffusion,
    data_variance: float,
    scales: Tensor | None = None,
    kind: str = "ancestral",
    scale_direction: bool = True,
) -> GaussianTrace:
    """Propagate the variance through all steps, without clipping.

    With eps(x) = sqrt(1 - abar) x / (abar s^2 + 1 - abar), a step is x' = m x + sigma z, where
    x_0 = c x, c = (1 - (1 - abar) / (lambda (abar s^2 + 1 - abar))) / sqrt(abar).

    Args:
        diffusion: Respaced process, variance "fixed_small" or "fixed_large".
        data_variance: s^2.
        scales: ``(T',)`` lambda by index; None for 1.
        kind: "ancestral" or "ddim" (eta 0).
        scale_direction: Whether DDIM's direction is scaled too.

    Raises:
        ValueError: If kind is unknown or the variance is learned.
    """
    if kind not in ("ancestral", "ddim"):
        raise ValueError(f"kind must be 'ancestral' or 'ddim', got {kind!r}")
    if kind == "ancestral" and diffusion.variance == "learned_range":
        raise ValueError("the closed form needs variance 'fixed_small' or 'fixed_large'")
    # From the training process, not from the respaced tables: at the noisiest step of the cosine
    # schedule the variance is ill-conditioned in abar.
    signal = diffusion.training_signal[diffusion.timestep_map].numpy()
    previous = np.concatenate([[1.0], signal[:-1]])
    beta, alpha = 1 - signal / previous, signal / previous
    small = beta * (1 - previous) / (1 - signal)
    step_variance = beta if diffusion.variance == "fixed_large" else small
    coef1 = beta * np.sqrt(previous) / (1 - signal)
    coef2 = (1 - previous) * np.sqrt(alpha) / (1 - signal)
    steps = diffusion.steps
    divisor = np.ones(steps) if scales is None else scales.double().numpy()
    variances, residuals, deltas = [1.0], [], []
    variance, carried = 1.0, np.sqrt(signal[-1])
    noise = 1 - signal[-1]
    for t in reversed(range(steps)):
        total = signal[t] * data_variance + 1 - signal[t]
        clean = (1 - (1 - signal[t]) / (divisor[t] * total)) / np.sqrt(signal[t])
        if kind == "ancestral":
            factor = coef1[t] * clean + coef2[t]
            added = step_variance[t] if t > 0 else 0.0
        else:
            scaled = divisor[t] if scale_direction else 1.0
            epsilon = np.sqrt(1 - signal[t]) / (scaled * total)
            factor = np.sqrt(previous[t]) * clean + np.sqrt(1 - previous[t]) * epsilon
            added = 0.0
        variance = factor**2 * variance + added
        carried, noise = factor * carried, factor**2 * noise + added
        residual = (carried - np.sqrt(previous[t])) ** 2 * data_variance + noise
        variances.append(variance)
        residuals.append(residual)
        deltas.append((np.sqrt(residual) - np.sqrt(1 - previous[t])) ** 2)
    frechet = (np.sqrt(variance) - np.sqrt(data_variance)) ** 2
    return GaussianTrace(np.array(variances), np.array(residuals), np.array(deltas), float(frechet))


def single_step_variance(diffusion: GaussianDiffusion, index: int, error: float) -> float:
    """Variance of x_t after one step from a true x_(t+1) with an x_0 off by error * N(0, 1).

    1 - abar_t + (sqrt(abar_t) beta_(t+1) / (1 - abar_(t+1)) * error)^2, the paper's account of
    exposure bias.

    Args:
        diffusion: The process.
        index: t, from 0 to T' - 2.
        error: Standard deviation e_(t+1) of the prediction's error.
    """
    signal = float(diffusion.tables["alphas_cumprod"][index])
    excess = float(diffusion.tables["posterior_mean_coef1"][index + 1]) * error
    return 1 - signal + excess**2
