"""Measure exposure bias: delta_t, the marginal variance gap and the curves of the noise's norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_modules.components.diffusion import (
    AncestralSampler,
    DDIMSampler,
    GaussianDiffusion,
    SamplerStep,
    run_sampler,
)
from lightning_modules.epsilon_scaling.schedule import EpsilonSchedule

Model = Callable[[Tensor, Tensor], Tensor]
Sampler = AncestralSampler | DDIMSampler


class ExposureBias(NamedTuple):
    """Curves over the sampler's steps; entry i belongs to the level reached after step index i.

    Attributes:
        delta: ``(T',)`` (mean pixel std of x_t - sqrt(abar_t) x_0 minus sqrt(1 - abar_t))^2 in a
            whole run from a noised x_0. A perfect sampler does not give 0 near the end, where its
            image is independent of x_0.
        single_step_delta: ``(T',)`` the same after one step from a true x_(t+1).
        marginal_gap: ``(T',)`` mean over pixels of Var[x_t] - (abar_t Var[x_0] + 1 - abar_t);
            0 for an exact sampler.
        sampling_norm: ``(T',)`` mean norm of the noise used while sampling (after scaling), by
            the index at which it was predicted.
        training_norm: ``(T',)`` the same at true noised data.
        noise_norm: sqrt of the number of pixels times the true noise's spread: its mean norm.
    """

    delta: Tensor
    single_step_delta: Tensor
    marginal_gap: Tensor
    sampling_norm: Tensor
    training_norm: Tensor
    noise_norm: float


def _delta(residual: Tensor, noise_std: float) -> Tensor:
    spread: Tensor = residual.double().std(0, correction=0).mean()
    return (spread - noise_std) ** 2


def _norm(epsilon: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(epsilon.flatten(1).double(), dim=1)
    return norms.mean()


@torch.no_grad()
def measure_exposure_bias(
    model: Model,
    sampler: Sampler,
    x0: Tensor,
    noise: Callable[[int], Tensor],
    scales: Tensor | None = None,
) -> ExposureBias:
    """Run the sampler down from noised data and record what exposure bias does.

    Args:
        model: Called with (x, original timesteps).
        sampler: Ancestral or DDIM.
        x0: ``(n, c, ...)`` data; n large (50 000 in the paper), since stds are estimated.
        noise: Called with the step count 0 .. T' - 1 for the sampler's noise, with -1 for the
            noise of x_T and with T' + index for the true x_t of the single steps.
        scales: ``(T',)`` lambda.

    Returns:
        Curves in float64.
    """
    diffusion: GaussianDiffusion = sampler.diffusion
    steps, variance = diffusion.steps, x0.double().var(0, correction=0).mean()
    previous = diffusion.tables["alphas_cumprod_prev"]
    delta, single, gap, sampling, training = (
        torch.zeros(steps, dtype=torch.float64) for _ in range(5)
    )

    def observe(index: int, step: SamplerStep) -> None:
        signal = float(previous[index])
        delta[index] = _delta(step.x - signal**0.5 * x0, (1 - signal) ** 0.5)
        spread = step.x.double().var(0, correction=0).mean()
        gap[index] = spread - (signal * variance + 1 - signal)
        sampling[index] = _norm(step.epsilon)

    start = diffusion.q_sample(x0, steps - 1, noise(-1))
    run_sampler(model, sampler, start, noise, scales, observe=observe)
    for count, index in enumerate(reversed(range(steps))):
        x = diffusion.q_sample(x0, index, noise(steps + index))
        output = model(x, diffusion.model_timesteps(index, x))
        training[index] = _norm(diffusion.predict(output, x, index, clip=None).epsilon)
        scale = None if scales is None else scales[index].to(x)
        step = sampler.step(output, index, x, noise(count), scale)
        signal = float(previous[index])
        single[index] = _delta(step.x - signal**0.5 * x0, (1 - signal) ** 0.5)
    true_norm = _norm(noise(-1))
    return ExposureBias(delta, single, gap, sampling, training, float(true_norm))


def matched_schedule(
    bias: ExposureBias, limits: tuple[float, float] = (0.9, 1.2)
) -> EpsilonSchedule:
    """lambda_t = E|eps| in sampling / E|eps| in training, measured without scaling.

    An extension of the paper: one run gives a divisor per step, clamped to `limits`.
    """
    ratio = (bias.sampling_norm / bias.training_norm).clamp(*limits)
    return EpsilonSchedule(values=tuple(ratio.tolist()))
