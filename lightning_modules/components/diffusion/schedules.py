"""Noise schedules: discrete betas, the EDM noise grid and the continuous VP-SDE."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Betas = NDArray[np.float64]

MAX_BETA = 0.999


def linear_betas(steps: int = 1000) -> Betas:
    """Linear schedule from 1e-4 to 2e-2 at 1000 steps, rescaled for any other number.

    Args:
        steps: Length T of the diffusion.

    Returns:
        ``(T,)`` float64 variances beta_t.
    """
    scale = 1000 / steps
    return np.linspace(scale * 1e-4, scale * 2e-2, steps, dtype=np.float64)


def scaled_linear_betas(steps: int = 1000, first: float = 0.00085, last: float = 0.012) -> Betas:
    """Linear in the square root of beta, the schedule of Stable Diffusion."""
    return np.linspace(first**0.5, last**0.5, steps, dtype=np.float64) ** 2


def cosine_betas(steps: int = 1000) -> Betas:
    """Cosine schedule: alphas_cumprod(u) = cos^2((u + 0.008) / 1.008 * pi / 2), betas capped.

    Note:
        alphas_cumprod of the last step is about 2e-9 at 1000 steps. A prediction of x_0 divides
        by its root, so that samplers must clip x_0 (or skip scaling) at the first step.
    """

    def signal(u: float) -> float:
        return math.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = [1 - signal((t + 1) / steps) / signal(t / steps) for t in range(steps)]
    return np.minimum(np.array(betas, dtype=np.float64), MAX_BETA)


def zero_terminal_snr(betas: Betas) -> Betas:
    """Shift and scale sqrt(alphas_cumprod) so that the last step is pure noise.

    The first value is kept. Noise is undefined at the last step of such a schedule: use prediction
    "sample" or "v", and leave that step unscaled (`skip_first: 1`).
    """
    root = np.sqrt(np.cumprod(1 - betas))
    first, last = root[0], root[-1]
    signal = ((root - last) * first / (first - last)) ** 2
    betas = 1 - signal / np.concatenate([[1.0], signal[:-1]])
    return np.asarray(betas, dtype=np.float64)


SCHEDULES: dict[str, Callable[[int], Betas]] = {
    "linear": linear_betas,
    "scaled_linear": scaled_linear_betas,
    "cosine": cosine_betas,
}


def named_betas(name: str, steps: int = 1000) -> Betas:
    """Betas of a named schedule.

    Raises:
        ValueError: If the name is unknown or steps < 1.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule must be one of {sorted(SCHEDULES)}, got {name!r}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    return SCHEDULES[name](steps)


def karras_sigmas(
    steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0
) -> Tensor:
    """The EDM grid: sigma^(1/rho) equidistant from sigma_max to sigma_min, then 0.

    Args:
        steps: Number N of noise levels; a Heun sampler spends 2 N - 1 network calls.
        sigma_min: Smallest positive level.
        sigma_max: Largest level.
        rho: Larger puts more levels near sigma_min.

    Returns:
        ``(N + 1,)`` float64, decreasing, the last entry 0.

    Raises:
        ValueError: If steps < 1 or the levels are not 0 < sigma_min < sigma_max.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if not 0 < sigma_min < sigma_max:
        raise ValueError(f"need 0 < sigma_min < sigma_max, got {sigma_min} and {sigma_max}")
    ramp = torch.arange(steps, dtype=torch.float64) / max(steps - 1, 1)
    low, high = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
    return torch.cat([(high + ramp * (low - high)) ** rho, torch.zeros(1, dtype=torch.float64)])


@dataclass(frozen=True)
class VPSDE:
    """Continuous variance-preserving diffusion x_t = alpha(t) x_0 + sigma(t) z, t in [0, 1].

    The drift rate is linear, rate(t) = rate_min + (rate_max - rate_min) t, and
    log alpha(t) = -(rate_max - rate_min) t^2 / 4 - rate_min t / 2.

    Attributes:
        rate_min: Drift rate at t = 0.
        rate_max: Drift rate at t = 1.
    """

    rate_min: float = 0.1
    rate_max: float = 20.0

    def log_alpha(self, t: Tensor) -> Tensor:
        """Logarithm of the signal's factor."""
        return -0.25 * (self.rate_max - self.rate_min) * t**2 - 0.5 * self.rate_min * t

    def alpha(self, t: Tensor) -> Tensor:
        """Factor of the signal."""
        return self.log_alpha(t).exp()

    def sigma(self, t: Tensor) -> Tensor:
        """Factor of the noise, accurate near t = 0."""
        # 1 - exp(2 log alpha) would lose four digits near t = 0 in float32.
        return (-torch.expm1(2 * self.log_alpha(t))).sqrt()

    def rate(self, t: Tensor) -> Tensor:
        """Drift rate."""
        return self.rate_min + (self.rate_max - self.rate_min) * t

    def time(self, log_snr_half: Tensor) -> Tensor:
        """Inverse of log(alpha / sigma), for solvers that step evenly in it."""
        log_alpha = -0.5 * torch.nn.functional.softplus(-2 * log_snr_half)
        slope = self.rate_max - self.rate_min
        inside = self.rate_min**2 - 4 * slope * log_alpha
        return -4 * log_alpha / (self.rate_min + inside.sqrt())
