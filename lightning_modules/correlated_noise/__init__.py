"""Correlated noise for private learning: nu-DP-FTRL, its baselines and its theory."""

from lightning_modules.components.privacy import AntiPGD, NuToeplitz, SquareRoot
from lightning_modules.components.privacy.theory import (
    effective_dimension,
    gradient_risk,
    mean_estimation_optimum,
    mean_estimation_sgd,
    nu_spectrum,
    predicted_excess_risk,
    privacy_risk,
    sensitivity_limit,
    taps_spectrum,
)
from lightning_modules.correlated_noise.choice import choose_nu, proxy_error
from lightning_modules.correlated_noise.module import (
    CorrelatedNoiseClassifier,
    LinearRegressionBench,
)
from lightning_modules.correlated_noise.regression import excess_risk, trajectory

__all__ = [
    "AntiPGD",
    "CorrelatedNoiseClassifier",
    "LinearRegressionBench",
    "NuToeplitz",
    "SquareRoot",
    "choose_nu",
    "effective_dimension",
    "excess_risk",
    "gradient_risk",
    "mean_estimation_optimum",
    "mean_estimation_sgd",
    "nu_spectrum",
    "predicted_excess_risk",
    "privacy_risk",
    "proxy_error",
    "sensitivity_limit",
    "taps_spectrum",
    "trajectory",
]
