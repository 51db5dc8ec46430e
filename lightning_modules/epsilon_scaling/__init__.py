"""Epsilon Scaling: divide the predicted noise while sampling, against exposure bias."""

from lightning_modules.epsilon_scaling.baselines import (
    analytic_log_variances,
    noise_energy,
    time_shift,
)
from lightning_modules.epsilon_scaling.closed_form import GaussianTrace, gaussian_trace
from lightning_modules.epsilon_scaling.diffusers_bridge import ScaledScheduler, scale_pipeline
from lightning_modules.epsilon_scaling.exposure_bias import (
    ExposureBias,
    matched_schedule,
    measure_exposure_bias,
)
from lightning_modules.epsilon_scaling.generation import PositionNoise, SamplerSettings, generate
from lightning_modules.epsilon_scaling.lambda_search import (
    SearchResult,
    golden_section_search,
    grid_search,
)
from lightning_modules.epsilon_scaling.module import EpsilonScaling
from lightning_modules.epsilon_scaling.noisy_classifier import NoisyClassifier
from lightning_modules.epsilon_scaling.pictures import image_grid, to_uint8
from lightning_modules.epsilon_scaling.scaled_model import ScaledModel
from lightning_modules.epsilon_scaling.schedule import EpsilonSchedule

__all__ = [
    "EpsilonScaling",
    "EpsilonSchedule",
    "ExposureBias",
    "GaussianTrace",
    "NoisyClassifier",
    "PositionNoise",
    "SamplerSettings",
    "ScaledModel",
    "ScaledScheduler",
    "SearchResult",
    "analytic_log_variances",
    "gaussian_trace",
    "generate",
    "golden_section_search",
    "grid_search",
    "image_grid",
    "matched_schedule",
    "measure_exposure_bias",
    "noise_energy",
    "scale_pipeline",
    "time_shift",
    "to_uint8",
]
