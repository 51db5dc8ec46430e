"""Training-free rivals: Analytic-DPM variances and the time-shift sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lightning_modules.components.diffusion import GaussianDiffusion

Model = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def noise_energy(
    model: Model, diffusion: GaussianDiffusion, batches: Iterable[tuple[Tensor, Tensor]]
) -> Tensor:
    """Mean of |eps(x_t, t)|^2 / d at true noised data, ``(T',)`` float64.

    Args:
        model: Called with (x, original timesteps).
        diffusion: Respaced process.
        batches: Pairs of data and noise ``(n, c, ...)``.
    """
    total, count = torch.zeros(diffusion.steps, dtype=torch.float64), 0
    for x0, noise in batches:
        for index in range(diffusion.steps):
            x = diffusion.q_sample(x0, index, noise)
            output, _ = diffusion.split(model(x, diffusion.model_timesteps(index, x)), x.shape[1])
            epsilon = diffusion.to_epsilon(output, x, index)
            total[index] += (epsilon.double() ** 2).flatten(1).mean(1).sum().cpu()
        count += len(x0)
    if count == 0:
        raise ValueError("noise_energy needs at least one batch")
    return total / count


def analytic_log_variances(diffusion: GaussianDiffusion, energy: Tensor) -> Tensor:
    """Logarithm of the optimal reverse variances ``(T',)`` of Analytic-DPM.

    sigma^2 = beta~ + (sqrt((1 - abar) / alpha) - sqrt(1 - abar' - beta~))^2 (1 - E|eps|^2 / d),
    exact for isotropic Gaussian data.

    Args:
        diffusion: Respaced process.
        energy: `noise_energy` of the model.
    """
    table = diffusion.tables
    signal, previous = table["alphas_cumprod"], table["alphas_cumprod_prev"]
    small = table["posterior_variance"]
    spread = ((1 - signal) * previous / signal).sqrt() - (1 - previous - small).clamp(min=0).sqrt()
    variance = small + spread**2 * (1 - energy).clamp(min=0)
    # The last step's variance is 0 and adds no noise; its logarithm has to be finite.
    return variance.clamp(min=float(small[1:].min()) if len(small) > 1 else 1e-20).log()


def time_shift(diffusion: GaussianDiffusion, window: int) -> Callable[[int, Tensor], Tensor]:
    """Timesteps for `run_sampler(model_index=...)` that fit the sample's spread.

    The network is called with the original index within `window` around the planned one whose
    1 - abar is nearest to the variance over the pixels of each sample.

    Args:
        diffusion: Respaced process.
        window: Width in original steps; 0 changes nothing.

    Raises:
        ValueError: If window is negative.
    """
    if window < 0:
        raise ValueError(f"window must be at least 0, got {window}")
    noise = 1 - diffusion.training_signal

    def choose(index: int, x: Tensor) -> Tensor:
        planned = int(diffusion.timestep_map[index])
        if index == diffusion.steps - 1 or window == 0:
            return diffusion.model_timesteps(index, x)
        low = max(0, planned - window // 2)
        high = min(diffusion.original_steps - 1, planned + window // 2)
        wanted = noise[low : high + 1].to(x)
        variance = x.flatten(1).var(1)
        return low + (variance[:, None] - wanted[None]).abs().argmin(1)

    return choose
