"""Ancestral and DDIM samplers: objects without state and with one `step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_modules.components.diffusion.gaussian import GaussianDiffusion, Prediction
from lightning_modules.components.diffusion.losses import Model

Noise = Callable[[int], Tensor]
Gradient = Callable[[Tensor, Tensor], Tensor]


class SamplerStep(NamedTuple):
    """One reverse step.

    Attributes:
        x: ``(n, c, ...)`` next, less noisy sample.
        x0: Predicted clean sample (clipped if asked).
        epsilon: Noise that was used, after scaling.
        raw_epsilon: Noise as the network predicted it.
    """

    x: Tensor
    x0: Tensor
    epsilon: Tensor
    raw_epsilon: Tensor


class Sampler(Protocol):
    """What `run_sampler` drives."""

    diffusion: GaussianDiffusion

    def step(
        self,
        output: Tensor,
        index: int,
        x: Tensor,
        noise: Tensor | None,
        scale: Tensor | None = None,
        gradient: Tensor | None = None,
    ) -> SamplerStep:
        """One reverse step."""
        ...


class AncestralSampler:
    """x_(t-1) = posterior mean at the predicted x_0 + sigma_t z (DDPM, ADM).

    Args:
        diffusion: The (respaced) process.
        clip: x_0 is clamped to [-clip, clip]; None leaves it.
        log_variances: ``(T',)`` own variances instead of the process's (for example Analytic-DPM).
    """

    def __init__(
        self,
        diffusion: GaussianDiffusion,
        clip: float | None = 1.0,
        log_variances: Tensor | None = None,
    ) -> None:
        if log_variances is not None and log_variances.shape != (diffusion.steps,):
            raise ValueError(
                f"log_variances must have one entry for each of the {diffusion.steps} steps, "
                f"got shape {tuple(log_variances.shape)}"
            )
        self.diffusion, self.clip, self.log_variances = diffusion, clip, log_variances

    def step(
        self,
        output: Tensor,
        index: int,
        x: Tensor,
        noise: Tensor | None,
        scale: Tensor | None = None,
        gradient: Tensor | None = None,
    ) -> SamplerStep:
        """One step from index to index - 1.

        Args:
            output: Network output at x.
            index: Step of the respaced process, 0 = last.
            x: Noisy sample.
            noise: z, like x; not used at index 0.
            scale: lambda_t, divides the predicted noise before x_0 is formed and clipped.
            gradient: d log p(y | x) / dx; shifts the mean by variance times gradient.
        """
        predicted = self.diffusion.predict(output, x, index, scale, self.clip)
        log_variance = predicted.log_variance
        if self.log_variances is not None:
            log_variance = self.log_variances[index].to(x)
        mean = self.diffusion.posterior_mean(predicted.x0, x, index)
        if gradient is not None:
            mean = mean + log_variance.exp() * gradient
        if index > 0:
            if noise is None:
                raise ValueError(f"the ancestral step {index} needs noise")
            mean = mean + torch.exp(0.5 * log_variance) * noise
        return SamplerStep(mean, predicted.x0, predicted.epsilon, predicted.raw_epsilon)


class DDIMSampler:
    """x_(t-1) = sqrt(abar') x_0 + sqrt(1 - abar' - sigma^2) eps + sigma z.

    Args:
        diffusion: The (respaced) process.
        eta: 0 is deterministic, 1 has the ancestral variance.
        clip: x_0 is clamped to [-clip, clip]; None leaves it.
        scale_direction: True (ADM): the direction uses the noise re-derived from the scaled and
            clipped x_0. False (latent diffusion): it keeps the network's own noise, and the best
            lambda - 1 is three to five times smaller.
    """

    def __init__(
        self,
        diffusion: GaussianDiffusion,
        eta: float = 0.0,
        clip: float | None = 1.0,
        scale_direction: bool = True,
    ) -> None:
        if eta < 0:
            raise ValueError(f"eta must be at least 0, got {eta}")
        self.diffusion, self.eta, self.clip = diffusion, eta, clip
        self.scale_direction = scale_direction

    def _guided(self, predicted: Prediction, x: Tensor, index: int, gradient: Tensor) -> Prediction:
        # The noise was divided by lambda once, when x_0 was formed: dividing the re-derived
        # noise again would scale twice.
        noise = self.diffusion.gather("sqrt_one_minus_alphas_cumprod", index, x)
        epsilon = self.diffusion.epsilon_from_x0(x, index, predicted.x0) - noise * gradient
        x0 = self.diffusion.x0_from_epsilon(x, index, epsilon)
        raw = predicted.raw_epsilon - noise * gradient
        return predicted._replace(x0=x0, epsilon=epsilon, raw_epsilon=raw)

    def step(
        self,
        output: Tensor,
        index: int,
        x: Tensor,
        noise: Tensor | None,
        scale: Tensor | None = None,
        gradient: Tensor | None = None,
    ) -> SamplerStep:
        """One step from index to index - 1; arguments as in `AncestralSampler.step`.

        A classifier's gradient shifts the noise by -sqrt(1 - abar) gradient.
        """
        diffusion = self.diffusion
        predicted = diffusion.predict(output, x, index, scale, self.clip)
        if gradient is not None:
            predicted = self._guided(predicted, x, index, gradient)
        if self.scale_direction:
            direction = diffusion.epsilon_from_x0(x, index, predicted.x0)
        else:
            direction = predicted.raw_epsilon
        signal = diffusion.tables["alphas_cumprod"][index]
        previous = diffusion.tables["alphas_cumprod_prev"][index]
        sigma = self.eta * ((1 - previous) / (1 - signal)).sqrt() * (1 - signal / previous).sqrt()
        spread = (1 - previous - sigma**2).clamp(min=0).sqrt()
        mean = predicted.x0 * previous.sqrt().to(x) + spread.to(x) * direction
        if index > 0 and self.eta > 0:
            if noise is None:
                raise ValueError(f"eta = {self.eta} needs noise at step {index}")
            mean = mean + sigma.to(x) * noise
        return SamplerStep(mean, predicted.x0, predicted.epsilon, predicted.raw_epsilon)


def require_finite(x: Tensor, step: int, scale: Tensor | float | None) -> None:
    """Stop a diverged sampler.

    Raises:
        FloatingPointError: If x has a non-finite entry; names the step and lambda.
    """
    if not bool(torch.isfinite(x).all()):
        factor = 1.0 if scale is None else float(scale)
        raise FloatingPointError(
            f"non-finite samples at step index {step} with epsilon scale {factor:g}; clip x_0, "
            "skip scaling at the first step (skip_first: 1), or use a scale closer to 1"
        )


@torch.no_grad()
def run_sampler(
    model: Model,
    sampler: Sampler,
    x: Tensor,
    noise: Noise | None = None,
    scales: Tensor | None = None,
    gradient: Gradient | None = None,
    observe: Callable[[int, SamplerStep], None] | None = None,
    model_index: Callable[[int, Tensor], Tensor] | None = None,
) -> Tensor:
    """Run a sampler from x_T down to x_0.

    Args:
        model: Called with (x, original timesteps ``(n,)``).
        sampler: `AncestralSampler` or `DDIMSampler`.
        x: ``(n, c, ...)`` start, standard normal.
        noise: Called with 0, 1, ... (count of the step) and gives noise like x.
        scales: ``(T',)`` lambda by respaced index, 0 = cleanest; None for no scaling.
        gradient: Classifier gradient, called with (x, original timesteps).
        observe: Called with (index, step) after each step.
        model_index: Own choice of the network's timesteps ``(n,)`` from (index, x).

    Returns:
        ``(n, c, ...)`` samples.

    Raises:
        ValueError: If `scales` does not have one entry per step.
        FloatingPointError: If samples become non-finite.
    """
    steps = sampler.diffusion.steps
    if scales is not None and scales.shape != (steps,):
        raise ValueError(
            f"scales must have one entry for each of the {steps} steps, "
            f"got shape {tuple(scales.shape)}"
        )
    on_device = None if scales is None else scales.to(x)
    # a step of lambda 1 is the plain step, also where noise is undefined (zero terminal SNR)
    scaled = [False] * steps if scales is None else (scales != 1).tolist()
    for count, index in enumerate(reversed(range(steps))):
        scale = on_device[index] if on_device is not None and scaled[index] else None
        if model_index is None:
            timesteps = sampler.diffusion.model_timesteps(index, x)
        else:
            timesteps = model_index(index, x)
        output = model(x, timesteps)
        slope = None if gradient is None else gradient(x, timesteps)
        drawn = None if noise is None else noise(count)
        step = sampler.step(output, index, x, drawn, scale, slope)
        require_finite(step.x, index, scale)
        if observe is not None:
            observe(index, step)
        x = step.x
    return x
