"""Asymptotic excess risk of noisy gradient descent with correlated noise, in closed form."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.integrate import quad
from scipy.special import ellipk

from lightning_modules.components.privacy.power_series import series_inverse

Array = NDArray[np.float64]
_BREAKS = [1e-4, 1e-3, 1e-2, 1e-1]
PowerSpectrum = Callable[[float], float]
"""``omega -> |B(omega)|^2`` of the noising filter, even in omega."""


def nu_spectrum(nu: float) -> PowerSpectrum:
    """``|1 - (1 - nu) e^{-i omega}|``, the squared modulus of the nu filter."""
    return lambda omega: _distance(1.0 - nu, omega)


def taps_spectrum(taps: ArrayLike) -> PowerSpectrum:
    """``|sum_t beta_t e^{-i omega t}|^2`` of a finite filter."""
    beta = np.asarray(taps, dtype=np.float64)
    t = np.arange(beta.size)
    return lambda omega: float(abs(np.exp(-1j * omega * t) @ beta) ** 2)


def _distance(radius: float, omega: float) -> float:
    """``|1 - radius e^{-i omega}|`` without cancellation near omega = 0."""
    return float(np.sqrt((1.0 - radius) ** 2 + 4.0 * radius * np.sin(omega / 2) ** 2))


def _mean(function: Callable[[float], float]) -> float:
    """``1/(2 pi)`` times the integral of an even function over [-pi, pi]."""
    value, _ = quad(function, 0.0, np.pi, points=_BREAKS, epsrel=1e-12, epsabs=0.0, limit=500)
    return float(value / np.pi)


def sensitivity_limit(spectrum: PowerSpectrum) -> float:
    """``gamma_inf``: column norm of B^-1 for infinitely many steps."""
    return float(np.sqrt(_mean(lambda omega: 1.0 / spectrum(omega))))


def _check(learning_rate: float, curvature: float, rho: float) -> None:
    if not learning_rate > 0 or not curvature > 0:
        raise ValueError(
            f"learning_rate and curvature must be positive, got {learning_rate} and {curvature}"
        )
    if not learning_rate * curvature < 2:
        raise ValueError(
            f"learning_rate * curvature must be below 2, got {learning_rate * curvature}: diverges"
        )
    if not rho > 0:
        raise ValueError(f"rho must be positive, got {rho}")


def privacy_risk(
    learning_rate: float,
    curvature: float,
    spectrum: PowerSpectrum | None = None,
    clip_norm: float = 1.0,
    rho: float = 1.0,
) -> float:
    """Stationary excess risk of a quadratic due to privacy noise; ``None`` is DP-SGD.

    ``(lambda/2) (G^2 gamma_inf^2 / (2 rho)) eta^2/(2 pi) int |B|^2 / |1 - (1 - eta lambda)
    e^{-i omega}|^2``.
    """
    _check(learning_rate, curvature, rho)
    decay = 1.0 - learning_rate * curvature
    variance = clip_norm**2 / (2 * rho)
    if spectrum is None:
        return curvature / 2 * variance * learning_rate**2 / (1 - decay**2)
    gain = _mean(lambda omega: spectrum(omega) / _distance(decay, omega) ** 2)
    gamma = sensitivity_limit(spectrum)
    return float(curvature / 2 * variance * gamma**2 * learning_rate**2 * gain)


def gradient_risk(learning_rate: float, curvature: float, variance: float = 1.0) -> float:
    """Stationary excess risk due to independent gradient noise of the given variance."""
    _check(learning_rate, curvature, 1.0)
    decay = 1.0 - learning_rate * curvature
    return curvature / 2 * learning_rate**2 * variance / (1 - decay**2)


def mean_estimation_optimum(
    learning_rate: float, clip_norm: float = 1.0, rho: float = 1.0
) -> float:
    """``eta^2 G^2/(4 rho) ((2/pi) K((1-eta)^2))^2``: the least risk, reached by nu = eta."""
    _check(learning_rate, 1.0, rho)
    if learning_rate > 1:
        raise ValueError(f"learning_rate must be at most 1 here, got {learning_rate}")
    elliptic = 2 / np.pi * ellipk((1.0 - learning_rate) ** 2)
    return float(learning_rate**2 * clip_norm**2 / (4 * rho) * elliptic**2)


def mean_estimation_sgd(learning_rate: float, clip_norm: float = 1.0, rho: float = 1.0) -> float:
    """``(G^2 / (4 rho)) eta / (2 - eta)``: independent noise, linear in the learning rate."""
    return privacy_risk(learning_rate, 1.0, None, clip_norm, rho)


def predicted_excess_risk(
    eigenvalues: ArrayLike,
    learning_rate: float,
    clip_norm: float = 1.0,
    rho: float = 1.0,
    nu: float | None = None,
    taps: ArrayLike | None = None,
) -> float:
    """Quadratic prediction for linear regression: the formula summed over the Hessian's spectrum.

    Args:
        eigenvalues: of the covariance H of the inputs, shape (d,).
        learning_rate: eta; the prediction needs eta of the order of 1/(Tr H log T) or less.
        clip_norm: G, the sensitivity of one step.
        rho: zero-concentrated privacy of the run.
        nu: damping of the nu family; with neither ``nu`` nor ``taps`` independent noise.
        taps: coefficients beta of a finite filter.
    """
    if nu is not None and taps is not None:
        raise ValueError("give nu or taps, not both")
    spectrum = (
        nu_spectrum(nu) if nu is not None else taps_spectrum(taps) if taps is not None else None
    )
    values = np.asarray(eigenvalues, dtype=np.float64)
    return float(
        sum(privacy_risk(learning_rate, float(v), spectrum, clip_norm, rho) for v in values)
    )


def effective_dimension(eigenvalues: ArrayLike) -> float:
    """``Tr(H) / ||H||_2``."""
    values = np.asarray(eigenvalues, dtype=np.float64)
    return float(values.sum() / values.max())


def finite_sensitivity(taps: ArrayLike, n: int) -> float:
    """``gamma_n``: largest column norm of B^-1 over ``n`` steps, one participation."""
    return float(np.linalg.norm(series_inverse(taps, n)))
