"""The exact (epsilon, delta) curve of the Gaussian mechanism."""

from __future__ import annotations

import math

from scipy.optimize import brentq
from scipy.special import log_ndtr


def gaussian_delta(epsilon: float, mu: float) -> float:
    """``Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)`` for ``mu = sensitivity / sigma``."""
    if mu <= 0.0:
        return max(0.0, -math.expm1(epsilon))
    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    if first <= second:
        return 0.0
    return math.exp(first) * -math.expm1(second - first)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Smallest ``epsilon >= 0`` at which the Gaussian mechanism is (epsilon, delta)-DP."""
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must be in (0, 1), got {delta}")
    if mu < 0.0 or not math.isfinite(mu):
        raise ValueError(f"mu = sensitivity / sigma must be finite and >= 0, got {mu}")
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    high = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1.0
    return float(brentq(lambda e: gaussian_delta(e, mu) - delta, 0.0, high, xtol=1e-14, rtol=1e-14))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Largest ``mu`` whose Gaussian mechanism is (epsilon, delta)-DP."""
    if epsilon <= 0.0:
        raise ValueError(f"epsilon must be positive, got {epsilon}")
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must be in (0, 1), got {delta}")
    low, high = 1e-12, 1.0
    while gaussian_delta(epsilon, high) < delta:
        high *= 2.0
    return float(brentq(lambda m: gaussian_delta(epsilon, m) - delta, low, high, xtol=1e-15))


def zcdp_epsilon(rho: float, delta: float) -> float:
    """``rho + 2 sqrt(rho log(1/delta))``: the theory's conversion, looser than the exact curve."""
    return rho + 2.0 * math.sqrt(rho * math.log(1.0 / delta))
