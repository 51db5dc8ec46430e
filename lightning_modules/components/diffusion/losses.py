"""Training losses per sample: noise regression, variational bound and their hybrid."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_modules.components.diffusion.gaussian import GaussianDiffusion, Index

LOSSES = ("mse", "rescaled_mse", "kl", "rescaled_kl")

Model = Callable[[Tensor, Tensor], Tensor]


class LossTerms(NamedTuple):
    """Loss per sample ``(n,)`` and its named parts (``mse``, ``vb``)."""

    loss: Tensor
    parts: dict[str, Tensor]


class VariationalBound(NamedTuple):
    """Full bound in bits per dimension.

    Attributes:
        total: ``(n,)``.
        prior: ``(n,)`` KL of q(x_T | x_0) to the standard normal.
        vb: ``(n, T)`` terms, noisiest step first.
        x0_mse: ``(n, T)`` squared error of the predicted x_0.
        mse: ``(n, T)`` squared error of the noise.
    """

    total: Tensor
    prior: Tensor
    vb: Tensor
    x0_mse: Tensor
    mse: Tensor


def mean_over_pixels(x: Tensor) -> Tensor:
    """Mean of ``(n, ...)`` over all but the first axis."""
    return x.flatten(1).mean(1)


def normal_kl(mean1: Tensor, log_var1: Tensor, mean2: Tensor, log_var2: Tensor) -> Tensor:
    """KL(N1 || N2) in nats, elementwise."""
    return 0.5 * (
        -1.0
        + log_var2
        - log_var1
        + torch.exp(log_var1 - log_var2)
        + (mean1 - mean2) ** 2 * torch.exp(-log_var2)
    )


def _normal_cdf(x: Tensor) -> Tensor:
    # The tanh approximation that the published models were trained with, not erf.
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def discretized_gaussian_log_likelihood(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """Log-likelihood of 8-bit values x in [-1, 1] under a Gaussian cut into bins, elementwise."""
    centred = x - mean
    inverse = torch.exp(-log_scale)
    upper = _normal_cdf(inverse * (centred + 1 / 255))
    lower = _normal_cdf(inverse * (centred - 1 / 255))
    log_upper = upper.clamp(min=1e-12).log()
    log_rest = (1 - lower).clamp(min=1e-12).log()
    log_bin = (upper - lower).clamp(min=1e-12).log()
    return torch.where(x < -0.999, log_upper, torch.where(x > 0.999, log_rest, log_bin))


def bound_terms(
    diffusion: GaussianDiffusion,
    output: Tensor,
    x0: Tensor,
    x: Tensor,
    index: Index,
    clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One term of the bound per sample, in bits per dimension, and the predicted x_0.

    KL(q(x_(t-1) | x_t, x_0) || p) for t > 0, the discretised likelihood of x_0 at t = 0.
    """
    predicted = diffusion.predict(output, x, index, clip=clip)
    true_mean = diffusion.posterior_mean(x0, x, index)
    true_log_variance = diffusion.gather("posterior_log_variance_clipped", index, x)
    mean = diffusion.posterior_mean(predicted.x0, x, index)
    log_variance = predicted.log_variance.expand_as(x)
    kl = mean_over_pixels(normal_kl(true_mean, true_log_variance, mean, log_variance))
    likelihood = discretized_gaussian_log_likelihood(x0, mean, 0.5 * log_variance)
    last = torch.as_tensor(index, device=x.device) == 0
    terms = torch.where(last, -mean_over_pixels(likelihood), kl) / math.log(2.0)
    return terms, predicted.x0


def training_loss(
    diffusion: GaussianDiffusion,
    model: Model,
    x0: Tensor,
    index: Tensor,
    noise: Tensor,
    kind: str = "mse",
    input_perturbation: float = 0.0,
    perturbation_noise: Tensor | None = None,
) -> LossTerms:
    """Loss per sample. Nothing here is divided by lambda: scaling belongs to the sampler alone.

    Args:
        diffusion: The process; a learned variance adds the bound with the mean part detached.
        model: Called with (x_t, original timesteps).
        x0: ``(n, c, ...)`` data.
        index: ``(n,)`` int64 steps.
        noise: Like x0.
        kind: "mse" (bound weighted 1), "rescaled_mse" (bound weighted T / 1000, equal to "mse"
            at T = 1000), "kl" (bound only) or "rescaled_kl" (bound times T).
        input_perturbation: gamma of DDPM-IP: x_t is formed from noise + gamma * extra noise,
            the target stays the noise.
        perturbation_noise: Like x0; needed with input_perturbation.

    Raises:
        ValueError: If the kind is unknown or the perturbation has no noise.
    """
    if kind not in LOSSES:
        raise ValueError(f"loss must be one of {LOSSES}, got {kind!r}")
    used = noise
    if input_perturbation:
        if perturbation_noise is None:
            raise ValueError("input_perturbation needs perturbation_noise")
        used = noise + input_perturbation * perturbation_noise
    x = diffusion.q_sample(x0, index, used)
    output = model(x, diffusion.model_timesteps(index, x))
    if kind in ("kl", "rescaled_kl"):
        vb, _ = bound_terms(diffusion, output, x0, x, index)
        return LossTerms(vb * diffusion.steps if kind == "rescaled_kl" else vb, {})
    mean_part, fraction = diffusion.split(output, x0.shape[1])
    mse = mean_over_pixels((diffusion.target(x0, noise, index) - mean_part) ** 2)
    if fraction is None:
        return LossTerms(mse, {"mse": mse})
    frozen = torch.cat([mean_part.detach(), fraction], dim=1)
    vb, _ = bound_terms(diffusion, frozen, x0, x, index)
    if kind == "rescaled_mse":
        vb = vb * (diffusion.steps / 1000.0)
    return LossTerms(mse + vb, {"mse": mse, "vb": vb})


def prior_bits(diffusion: GaussianDiffusion, x0: Tensor) -> Tensor:
    """KL of q(x_T | x_0) to the standard normal, ``(n,)`` bits per dimension."""
    last = diffusion.steps - 1
    mean = diffusion.gather("sqrt_alphas_cumprod", last, x0) * x0
    log_variance = torch.log(1 - diffusion.tables["alphas_cumprod"][last]).to(x0)
    zero = torch.zeros((), dtype=x0.dtype, device=x0.device)
    return mean_over_pixels(normal_kl(mean, log_variance, zero, zero)) / math.log(2.0)


@torch.no_grad()
def variational_bound(
    diffusion: GaussianDiffusion,
    model: Model,
    x0: Tensor,
    noise: Callable[[int], Tensor],
    clip: float | None = 1.0,
) -> VariationalBound:
    """The whole bound, one network call per step.

    Args:
        diffusion: The (respaced) process.
        model: Called with (x_t, original timesteps).
        x0: ``(n, c, ...)`` data.
        noise: Called with 0, 1, ... from the noisiest step on; gives noise like x0.
        clip: Predicted x_0 is clamped to [-clip, clip]; None leaves it.
    """
    vb, x0_mse, mse = [], [], []
    for count, index in enumerate(reversed(range(diffusion.steps))):
        drawn = noise(count)
        x = diffusion.q_sample(x0, index, drawn)
        output = model(x, diffusion.model_timesteps(index, x))
        terms, predicted = bound_terms(diffusion, output, x0, x, index, clip)
        epsilon = diffusion.epsilon_from_x0(x, index, predicted)
        vb.append(terms)
        x0_mse.append(mean_over_pixels((predicted - x0) ** 2))
        mse.append(mean_over_pixels((epsilon - drawn) ** 2))
    stacked = torch.stack(vb, dim=1)
    prior = prior_bits(diffusion, x0)
    return VariationalBound(
        stacked.sum(1) + prior, prior, stacked, torch.stack(x0_mse, 1), torch.stack(mse, 1)
    )


def min_snr_weight(diffusion: GaussianDiffusion, index: Tensor, gamma: float = 5.0) -> Tensor:
    """min(SNR, gamma) weight of the noise loss, ``(n,)`` float32; SNR = abar / (1 - abar)."""
    signal = diffusion.tables["alphas_cumprod"].to(index.device)[index]
    snr = signal / (1 - signal)
    floor = {"epsilon": snr, "sample": torch.ones_like(snr), "v": snr + 1}[diffusion.prediction]
    return (snr.clamp(max=gamma) / floor).float()
