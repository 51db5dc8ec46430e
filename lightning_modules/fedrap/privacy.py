"""Differential privacy of clipped and noised uploads.

Client ``i`` uploads ``clip(C_i - C) + N(0, (noise * clip)^2)`` per entry. Two views of it:

- *local*: an adversary sees single uploads and knows who took part. Every round that a client takes
  part in is one Gaussian mechanism. A client's upload may change by up to ``2 clip`` when its data
  do, so the noise multiplier that counts is ``noise / 2``; sampling does not help.
- *central*: uploads are summed before anyone sees them (secure aggregation) and participants stay
  secret. ``P`` uploads carry the noise ``noise sqrt(P)`` relative to one client's ``clip``, and
  sampling amplifies.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaln, logsumexp
from scipy.stats import norm

ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 384, 512)


def gaussian_epsilon(noise_multiplier: float, rounds: int, delta: float) -> float:
    """Exact epsilon of ``rounds`` Gaussian mechanisms of sensitivity 1 (Balle and Wang 2018).

    Args:
        noise_multiplier: Standard deviation over sensitivity.
        rounds: Compositions.
        delta: Target delta.
    """
    if rounds == 0:
        return 0.0
    if noise_multiplier <= 0:
        return math.inf
    mu = math.sqrt(rounds) / noise_multiplier

    def excess(epsilon: float) -> float:
        first = norm.cdf(mu / 2 - epsilon / mu)
        second = math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
        return float(first - second - delta)

    if excess(0.0) <= 0:
        return 0.0
    upper = 1.0
    while excess(upper) > 0:
        upper *= 2
        if upper > 1e6:
            return math.inf
    return float(brentq(excess, 0.0, upper, xtol=1e-10))


def rdp_gaussian(noise_multiplier: float, order: float) -> float:
    """Renyi divergence of order ``order`` of one Gaussian mechanism: ``order / (2 sigma^2)``."""
    return order / (2 * noise_multiplier**2)


def rdp_poisson(noise_multiplier: float, ratio: float, order: int) -> float:
    """Same after Poisson sampling with probability ``ratio`` (Mironov, Talwar, Zhang 2019).

    Neighbours differ by one client more or less.
    """
    if ratio >= 1:
        return rdp_gaussian(noise_multiplier, order)
    j = np.arange(order + 1)
    binomial = gammaln(order + 1) - gammaln(j + 1) - gammaln(order - j + 1)
    terms = binomial + j * math.log(ratio) + (order - j) * math.log1p(-ratio)
    terms = terms + (j * j - j) / (2 * noise_multiplier**2)
    return float(logsumexp(terms) / (order - 1))


def rdp_fixed_size(noise_multiplier: float, ratio: float, order: int) -> float:
    """Same for a fixed number of clients drawn without replacement (Wang et al. 2019, theorem 9).

    Neighbours differ in one client's data, so the sensitivity is twice the clip: that factor is in
    here and ``noise_multiplier`` is relative to the clip as in the other functions.
    """
    sigma = noise_multiplier / 2
    if ratio >= 1:
        return rdp_gaussian(sigma, order)

    def scaled(j: int) -> float:
        return (j - 1) * rdp_gaussian(sigma, j)

    def choose(j: int) -> float:
        return float(gammaln(order + 1) - gammaln(j + 1) - gammaln(order - j + 1))

    two = scaled(2)
    first = min(math.log(4) + (math.log(math.expm1(two)) if two < 700 else two), two + math.log(2))
    terms = [0.0, 2 * math.log(ratio) + choose(2) + first]
    terms += [
        j * math.log(ratio) + choose(j) + math.log(2) + scaled(j) for j in range(3, order + 1)
    ]
    return float(min(logsumexp(terms) / (order - 1), rdp_gaussian(sigma, order)))


def epsilon_from_rdp(divergences: dict[int, float], delta: float) -> float:
    """Best epsilon over the orders (Canonne, Kamath, Steinke 2020, proposition 12)."""
    best = math.inf
    for order, value in divergences.items():
        epsilon = value + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        best = min(best, epsilon)
    return max(best, 0.0)


def spent_epsilon(
    noise_multiplier: float,
    ratio: float,
    rounds: int,
    delta: float,
    sampling: str = "poisson",
) -> float:
    """Epsilon after ``rounds`` rounds of noised sums.

    Args:
        noise_multiplier: Standard deviation of the noise on the sum over the clip.
        ratio: Sampling ratio.
        rounds: Rounds so far.
        delta: Target delta.
        sampling: ``poisson`` (one client more or less) or ``fixed`` (one client's data changed).
    """
    if rounds == 0:
        return 0.0
    if noise_multiplier <= 0:
        return math.inf
    if sampling not in ("poisson", "fixed"):
        raise ValueError(f"sampling must be 'poisson' or 'fixed', got {sampling!r}")
    if ratio >= 1:
        sigma = noise_multiplier if sampling == "poisson" else noise_multiplier / 2
        return gaussian_epsilon(sigma, rounds, delta)
    one = rdp_poisson if sampling == "poisson" else rdp_fixed_size
    return epsilon_from_rdp(
        {order: rounds * one(noise_multiplier, ratio, order) for order in ORDERS}, delta
    )
