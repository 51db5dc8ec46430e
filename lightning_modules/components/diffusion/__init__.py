"""Diffusion: schedules, respacing, the Gaussian process, losses, samplers, guidance, networks."""

from lightning_modules.components.diffusion.checkpoints import (
    PUBLISHED,
    load_adm_checkpoint,
    load_adm_state,
    unet_config,
)
from lightning_modules.components.diffusion.edm import (
    EDMPreconditioning,
    EDMSampler,
    as_denoiser,
    edm_loss,
    run_edm_sampler,
)
from lightning_modules.components.diffusion.exact_score import ExactScore
from lightning_modules.components.diffusion.gaussian import GaussianDiffusion, Prediction
from lightning_modules.components.diffusion.guidance import (
    classifier_free,
    classifier_gradient,
    combine,
)
from lightning_modules.components.diffusion.losses import (
    LossTerms,
    VariationalBound,
    min_snr_weight,
    training_loss,
    variational_bound,
)
from lightning_modules.components.diffusion.noise import (
    counter_normal,
    counter_uniform,
)
from lightning_modules.components.diffusion.respacing import respaced_betas, spaced_timesteps
from lightning_modules.components.diffusion.samplers import (
    AncestralSampler,
    DDIMSampler,
    SamplerStep,
    require_finite,
    run_sampler,
)
from lightning_modules.components.diffusion.schedules import (
    VPSDE,
    cosine_betas,
    karras_sigmas,
    linear_betas,
    named_betas,
    scaled_linear_betas,
    zero_terminal_snr,
)
from lightning_modules.components.diffusion.unet import ADMClassifier, ADMUNet

__all__ = [
    "PUBLISHED",
    "VPSDE",
    "ADMClassifier",
    "ADMUNet",
    "AncestralSampler",
    "DDIMSampler",
    "EDMPreconditioning",
    "EDMSampler",
    "ExactScore",
    "GaussianDiffusion",
    "LossTerms",
    "Prediction",
    "SamplerStep",
    "VariationalBound",
    "as_denoiser",
    "classifier_free",
    "classifier_gradient",
    "combine",
    "cosine_betas",
    "counter_normal",
    "counter_uniform",
    "edm_loss",
    "karras_sigmas",
    "linear_betas",
    "load_adm_checkpoint",
    "load_adm_state",
    "min_snr_weight",
    "named_betas",
    "require_finite",
    "respaced_betas",
    "run_edm_sampler",
    "run_sampler",
    "scaled_linear_betas",
    "spaced_timesteps",
    "training_loss",
    "unet_config",
    "variational_bound",
    "zero_terminal_snr",
]
