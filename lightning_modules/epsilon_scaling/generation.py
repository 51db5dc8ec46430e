"""Draw samples: the choice of sampler, guidance and paired, position-bound noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_modules.components.diffusion import (
    AncestralSampler,
    DDIMSampler,
    EDMSampler,
    GaussianDiffusion,
    as_denoiser,
    counter_normal,
    karras_sigmas,
    run_edm_sampler,
    run_sampler,
)
from lightning_modules.components.diffusion.edm import Denoiser
from lightning_modules.components.randomness import seed_from
from lightning_modules.epsilon_scaling.baselines import time_shift
from lightning_modules.epsilon_scaling.schedule import EpsilonSchedule

SAMPLERS = ("ancestral", "ddim", "heun", "euler")

Model = Callable[[Tensor, Tensor], Tensor]
Gradient = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class SamplerSettings:
    """How samples are drawn.

    Attributes:
        sampler: "ancestral", "ddim", or EDM's "heun" or "euler".
        respacing: Steps of the discrete samplers, as in `spaced_timesteps`.
        eta: Noise of DDIM.
        clip: Clamp of the predicted x_0; None for none.
        scale_direction: Whether DDIM's direction is scaled (ADM) or not (latent diffusion).
        scale_correction: Whether Heun's second evaluation is scaled.
        edm_steps: Noise levels of the EDM samplers.
        sigma_min: Smallest noise level.
        sigma_max: Largest noise level.
        churn: S_churn of the EDM samplers; 0 is deterministic.
        churn_min: S_min, the smallest noise level that is churned.
        churn_max: S_max, the largest.
        churn_noise: S_noise, factor of the added noise.
        time_shift_window: Window of the time-shift rival, in original steps; 0 is off.

    Raises:
        ValueError: If a value is out of range.
    """

    sampler: str = "ddim"
    respacing: str = "20"
    eta: float = 0.0
    clip: float | None = 1.0
    scale_direction: bool = True
    scale_correction: bool = True
    edm_steps: int = 18
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    churn: float = 0.0
    churn_min: float = 0.0
    churn_max: float = math.inf
    churn_noise: float = 1.0
    time_shift_window: int = 0

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise ValueError(f"sampler must be one of {SAMPLERS}, got {self.sampler!r}")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"clip must be positive or null, got {self.clip}")
        if self.eta < 0:
            raise ValueError(f"eta must be at least 0, got {self.eta}")
        if self.time_shift_window < 0:
            raise ValueError(f"time_shift_window must be at least 0, got {self.time_shift_window}")
        if self.churn and not self.is_edm:
            raise ValueError(
                f"churn needs sampler 'heun' or 'euler', got {self.sampler!r}: "
                "the noise of 'ddim' is eta"
            )
        self.edm_sampler()

    @property
    def is_edm(self) -> bool:
        """Whether the sampler works on noise levels rather than timesteps."""
        return self.sampler in ("heun", "euler")

    def edm_sampler(self, sigma_max: float = math.inf) -> EDMSampler:
        """EDM sampler of these settings, from noise no larger than `sigma_max`."""
        return EDMSampler(
            karras_sigmas(self.edm_steps, self.sigma_min, min(self.sigma_max, sigma_max)),
            "euler" if self.sampler == "euler" else "heun",
            self.scale_correction,
            self.churn,
            self.churn_min,
            self.churn_max,
            self.churn_noise,
        )

    def steps(self, diffusion: GaussianDiffusion) -> int:
        """Number of steps, each with its own lambda."""
        return self.edm_steps if self.is_edm else diffusion.respace(self.respacing).steps


@dataclass(frozen=True)
class PositionNoise:
    """Noise that belongs to the position of a sample, whoever draws it.

    The same positions give the same noise for every lambda (a paired comparison) and for every
    number of ranks.

    Attributes:
        seed: Of the whole set of samples.
        positions: ``(n,)`` int64 on the device of the samples.
        shape: Of one sample.
    """

    seed: int
    positions: Tensor
    shape: tuple[int, ...]

    def __call__(self, step: int) -> Tensor:
        """Noise ``(n, *shape)`` of a step; step -1 is the start."""
        return counter_normal(seed_from(self.seed, "sample", step), self.positions, self.shape)


@torch.no_grad()
def generate(
    model: Model,
    diffusion: GaussianDiffusion,
    settings: SamplerSettings,
    schedule: EpsilonSchedule,
    noise: PositionNoise,
    gradient: Gradient | None = None,
    denoiser: Denoiser | None = None,
    log_variances: Tensor | None = None,
) -> Tensor:
    """Samples ``(n, c, ...)``.

    Args:
        model: Called with (x, original timesteps).
        diffusion: The training process.
        settings: The sampler.
        schedule: Divisors of the noise.
        noise: Start and step noise.
        gradient: Classifier gradient (discrete samplers only).
        denoiser: D(x, sigma) for the EDM samplers; by default made of the discrete model.
        log_variances: Own variances of the ancestral sampler.

    Raises:
        ValueError: If a classifier is asked to guide an EDM sampler.
    """
    start = noise(-1)
    if settings.is_edm:
        if gradient is not None:
            raise ValueError("classifier guidance needs sampler 'ancestral' or 'ddim'")
        largest = math.inf
        if denoiser is None:
            # A discrete model knows no more noise than its last step has.
            largest = float(diffusion.tables["sqrt_recipm1_alphas_cumprod"][-1])
            denoiser = as_denoiser(model, diffusion)
        edm = settings.edm_sampler(largest)
        churn_noise = noise if settings.churn > 0 else None
        scales = schedule.scales_or_none(edm.steps)
        return run_edm_sampler(denoiser, edm, start, churn_noise, scales).to(start.dtype)
    process = diffusion.respace(settings.respacing)
    if settings.sampler == "ddim":
        sampler: DDIMSampler | AncestralSampler = DDIMSampler(
            process, settings.eta, settings.clip, settings.scale_direction
        )
        step_noise = noise if settings.eta > 0 else None
    else:
        sampler = AncestralSampler(process, settings.clip, log_variances)
        step_noise = noise
    shift = time_shift(process, settings.time_shift_window) if settings.time_shift_window else None
    return run_sampler(
        model,
        sampler,
        start,
        step_noise,
        schedule.scales_or_none(process.steps),
        gradient,
        model_index=shift,
    )
