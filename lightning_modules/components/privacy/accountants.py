"""One interface for the guarantees of all samplers, and the noise for a target epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from lightning_modules.components.privacy.amplification import (
    PoissonAccountant,
    Tail,
    check_parameters,
    tilt_for,
)
from lightning_modules.components.privacy.gaussian import gaussian_epsilon, gaussian_mu
from lightning_modules.components.privacy.mixture import Mixture
from lightning_modules.components.privacy.participation import (
    Participation,
    matrix_sensitivity,
    toeplitz_sensitivity,
)
from lightning_modules.components.privacy.pld import compose, discretise
from lightning_modules.components.privacy.strategy import Strategy

FINE, COARSE = 1e-4, 1e-3
"""Grid steps (nats): of what is reported, and of what is used while calibrating."""


class Accountant(Protocol):
    """Guarantee of a run and of every prefix of it."""

    n: int
    delta: float

    def epsilon(self, steps: int | None = None) -> float:
        """Epsilon at ``delta`` of the first ``steps`` steps; default the whole run."""
        ...


class GaussianAccountant:
    """No amplification: a Gaussian mechanism of the strategy's sensitivity, exact curve.

    Args:
        strategy: strategy matrix, any signs.
        n: number of steps.
        participation: how often and how far apart one example may take part.
        sigma: noise multiplier in units of the clip norm, before C^-1.
        delta: failure probability.
    """

    def __init__(
        self, strategy: Strategy, n: int, participation: Participation, sigma: float, delta: float
    ) -> None:
        check_parameters(n, 1.0, sigma, delta, None)
        participation.check(n)
        self.strategy, self.n, self.participation = strategy, n, participation
        self.sigma, self.delta = sigma, delta

    def epsilon(self, steps: int | None = None) -> float:
        """Epsilon of the first ``steps`` steps (their block of C and their participations)."""
        steps = self.n if steps is None else steps
        if not 0 <= steps <= self.n:
            raise ValueError(f"steps must be in [0, {self.n}], got {steps}")
        if steps == 0:
            return 0.0
        column = self.strategy.coefficients(self.n)
        if column is not None:
            sens = toeplitz_sensitivity(column[:steps], steps, self.participation.limited(steps))
        else:
            block = self.strategy.matrix(self.n)[:steps, :steps]
            sens = matrix_sensitivity(block, self.participation.limited(steps))
        return gaussian_epsilon(sens / self.sigma, self.delta)


class CyclicPoissonAccountant:
    """Banded C with groups that take turns: ``n / b`` rounds of a subsampled Gaussian.

    Every example belongs to one of ``groups`` groups and can only appear in steps congruent to its
    group, with probability ``groups * p``; with at most ``groups`` bands its columns never overlap.

    Args:
        strategy: strategy with at most ``groups`` bands, any signs.
        n: number of steps.
        p: expected batch size over the number of examples.
        sigma: noise multiplier in units of the clip norm, before C^-1.
        delta: failure probability.
        groups: number of groups; default the number of bands.
        step: grid spacing of privacy losses, in nats.
    """

    def __init__(
        self,
        strategy: Strategy,
        n: int,
        p: float,
        sigma: float,
        delta: float,
        groups: int | None = None,
        step: float = FINE,
    ) -> None:
        check_parameters(n, p, sigma, delta, None)
        bands = strategy.bands(n)
        self.groups = bands if groups is None else groups
        if self.groups < bands:
            raise ValueError(
                f"cyclic Poisson sampling with {self.groups} groups needs at most as many bands, "
                f"the strategy has {bands}"
            )
        rate = self.groups * p
        if rate > 1.0 + 1e-12:
            raise ValueError(
                f"{self.groups} groups times the sampling probability {p} exceed 1: "
                "use fewer bands or smaller batches"
            )
        self.n, self.delta, self.sigma, self.rate = n, delta, sigma, min(1.0, rate)
        norm = float(np.max(strategy.column_norms(n)))
        self._gaussian = norm / sigma if self.rate == 1.0 else None
        self._round = discretise(
            Mixture.build([0.0, norm], [1 - self.rate, self.rate], sigma), step
        )

    def epsilon(self, steps: int | None = None) -> float:
        """Epsilon of the first ``steps`` steps."""
        steps = self.n if steps is None else steps
        if not 0 <= steps <= self.n:
            raise ValueError(f"steps must be in [0, {self.n}], got {steps}")
        rounds = math.ceil(steps / self.groups)
        if rounds == 0:
            return 0.0
        if self._gaussian is not None:
            return gaussian_epsilon(self._gaussian * math.sqrt(rounds), self.delta)
        parts = [(self._round, rounds)]
        return compose(parts, tilt=tilt_for(parts, self.delta)).epsilon(self.delta)


def poisson(
    strategy: Strategy,
    n: int,
    p: float,
    sigma: float,
    delta: float,
    delta1: float | None = None,
    tail: Tail = "paper",
    step: float = FINE,
) -> PoissonAccountant:
    """Conditional composition (MMCC) for a strategy object."""
    return PoissonAccountant(
        strategy.accounted(n), n, p, sigma, delta, delta1, tail=tail, step=step
    )


def calibrate(
    target_epsilon: float,
    delta: float,
    epsilon_of: Callable[[float, float], float],
    *,
    start: float = 1.0,
    tolerance: float = 4e-4,
    fine: float = FINE,
    coarse: float = COARSE,
) -> float:
    """Smallest noise multiplier that reaches a target, to a relative ``tolerance``, never below.

    Args:
        target_epsilon: epsilon to reach.
        delta: its failure probability.
        epsilon_of: ``(sigma, grid step) -> epsilon``, decreasing in sigma.
        start: first guess of sigma.
        tolerance: relative width of the final bracket.
        fine: grid step of the final verification.
        coarse: grid step of the search.

    Returns:
        sigma with ``epsilon_of(sigma, fine) <= target_epsilon``.

    Raises:
        ValueError: a target that no amount of noise reaches.
    """
    if not (target_epsilon > 0 and math.isfinite(target_epsilon)):
        raise ValueError(f"target_epsilon must be positive and finite, got {target_epsilon}")
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must be in (0, 1), got {delta}")

    def miss(log_sigma: float, step: float) -> float:
        try:
            found = epsilon_of(math.exp(log_sigma), step)
        except ValueError as error:
            if "grid points" in str(error) or "window" in str(error):
                return 30.0  # the loss left the grid: far too little noise
            raise
        if not math.isfinite(found):
            return 30.0
        return math.log(max(found, 1e-12) / target_epsilon)

    low = high = math.log(start)
    at_low = at_high = miss(low, coarse)
    while at_high > 0:
        low, at_low = high, at_high
        high += math.log(2)
        at_high = miss(high, coarse)
        if high > math.log(1e9):
            raise ValueError(
                f"target_epsilon={target_epsilon} is unreachable: epsilon stays at "
                f"{target_epsilon * math.exp(at_high):.4g} for sigma up to 1e9; the failure "
                f"probability left after the tail bounds is spent at delta={delta}"
            )
    while at_low <= 0:
        high, at_high = low, at_low
        low -= math.log(2)
        if low < math.log(1e-4):
            return math.exp(high)  # next to no noise satisfies the target already
        at_low = miss(low, coarse)
    width = math.log1p(tolerance)
    high = _close_in(lambda x: miss(x, coarse), low, at_low, high, at_high, width)[1]
    # A coarse grid is pessimistic by up to a percent where single steps hardly leak: start again
    # on the fine one, a little below.
    at_high = miss(high, fine)
    while at_high > 0:
        high += width / 4
        at_high = miss(high, fine)
    reach = width
    low, at_low = high - reach, miss(high - reach, fine)
    while at_low <= 0:
        high, at_high = low, at_low
        reach *= 4
        low -= reach
        at_low = miss(low, fine)
    return math.exp(_close_in(lambda x: miss(x, fine), low, at_low, high, at_high, width)[1])


def _close_in(
    miss: Callable[[float], float],
    low: float,
    at_low: float,
    high: float,
    at_high: float,
    width: float,
) -> tuple[float, float]:
    """Shrink a bracket ``miss(low) > 0 >= miss(high)`` to ``width`` (false position)."""
    side = 0
    while high - low > width * 1.0001:
        cut = low + (high - low) * at_low / (at_low - at_high) if at_low < 20 else (low + high) / 2
        if abs(side) >= 2:  # one end has not moved twice: bisect
            cut, side = (low + high) / 2, 0
        # Lands just on the other side of the root, so that both ends close in.
        cut += 0.25 * width if side <= 0 else -0.25 * width
        cut = min(max(cut, low + 0.25 * width), high - 0.25 * width)
        value = miss(cut)
        if value > 0:
            low, at_low, side = cut, value, min(side, 0) - 1
        else:
            high, at_high, side = cut, value, max(side, 0) + 1
    return low, high


def grid_step(strategy: Strategy, n: int, sigma: float) -> float:
    """Grid step that resolves one step's privacy loss: a 4000th of its reach, at most 1e-3 nats."""
    largest = float(np.max(np.abs(strategy.accounted(n))))
    return min(COARSE, 2.5e-3 * largest / sigma)


def _first_guess(strategy: Strategy, n: int, target_epsilon: float, delta: float) -> float:
    """Twice the noise of one participation: from above, where privacy losses are short."""
    norm = float(np.max(strategy.column_norms(n)))
    return 2.0 * norm / gaussian_mu(target_epsilon, delta)


def calibrate_poisson(
    strategy: Strategy,
    n: int,
    p: float,
    target_epsilon: float,
    delta: float,
    delta1: float | None = None,
    tail: Tail = "paper",
) -> float:
    """Noise multiplier under Poisson sampling, on a grid that follows sigma."""
    return calibrate(
        target_epsilon,
        delta,
        lambda sigma, factor: poisson(
            strategy, n, p, sigma, delta, delta1, tail, factor * grid_step(strategy, n, sigma)
        ).epsilon(),
        start=_first_guess(strategy, n, target_epsilon, delta),
        fine=1.0,
        coarse=8.0,
    )


def calibrate_cyclic(
    strategy: Strategy,
    n: int,
    p: float,
    target_epsilon: float,
    delta: float,
    groups: int | None = None,
) -> float:
    """Noise multiplier under cyclic Poisson sampling, on a grid that follows sigma."""
    return calibrate(
        target_epsilon,
        delta,
        lambda sigma, factor: CyclicPoissonAccountant(
            strategy, n, p, sigma, delta, groups, factor * grid_step(strategy, n, sigma)
        ).epsilon(),
        start=_first_guess(strategy, n, target_epsilon, delta),
        fine=1.0,
        coarse=8.0,
    )


def calibrate_gaussian(target_epsilon: float, delta: float, sensitivity: float) -> float:
    """Noise multiplier of a Gaussian mechanism of this sensitivity, from the exact curve."""
    sigma = sensitivity / gaussian_mu(target_epsilon, delta)
    while gaussian_epsilon(sensitivity / sigma, delta) > target_epsilon:
        sigma *= 1.0 + 1e-12
    return sigma
