"""Privacy-loss distributions on a grid: pessimistic discretisation, composition, epsilon.

Connect-the-dots: the mass of every interval of losses is split between the interval's two ends
so that both P and Q keep their mass, which gives the exact hockey-stick at every grid point and
an upper bound between them, with an error of O(h^2) for each composition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.special import ndtri

from lightning_modules.components.privacy.mixture import TAIL, Mixture

Array = NDArray[np.float64]
_REACH = float(-ndtri(TAIL))
MAX_POINTS = 2**23


@dataclass(frozen=True)
class DiscreteLoss:
    """Law of the privacy loss in one direction.

    Attributes:
        step: grid spacing h in nats.
        offset: the first loss is ``offset * step``.
        mass: probabilities of the losses, shape (m,).
        infinite: probability of an infinite loss.
    """

    step: float
    offset: int
    mass: Array
    infinite: float = 0.0

    @property
    def losses(self) -> Array:
        """Losses in nats, shape (m,)."""
        return np.asarray(self.step * (self.offset + np.arange(self.mass.size)), dtype=np.float64)

    @property
    def complete(self) -> bool:
        """False for a tilted composition, which holds only the upper losses."""
        return float(self.mass.sum()) + self.infinite > 1.0 - 1e-6

    def delta(self, epsilon: float) -> float:
        """Hockey-stick divergence at ``epsilon``, an upper bound on the true one."""
        if epsilon < self.offset * self.step and not self.complete:
            raise ValueError(
                f"epsilon must be at least {self.offset * self.step:.6g} in a tilted "
                f"composition, got {epsilon}"
            )
        losses = self.losses
        start = int(np.searchsorted(losses, epsilon, side="right"))
        gaps = -np.expm1(epsilon - losses[start:])
        return min(1.0, self.infinite + float(self.mass[start:] @ gaps))

    def epsilon(self, delta: float) -> float:
        """Smallest ``epsilon >= 0`` with ``delta(epsilon) <= delta``; inf if there is none."""
        if self.infinite > delta:
            return math.inf
        first = max(0, 1 - self.offset)  # losses above zero are the ones that can matter
        if first >= self.mass.size:
            return 0.0
        losses, mass = self.losses[first:], self.mass[first:]
        shift = losses[-1]
        above = np.cumsum(mass[::-1])[::-1]
        # Scaled by e^shift so that large losses do not underflow.
        scaled = np.cumsum((mass * np.exp(np.minimum(shift - losses, 700.0)))[::-1])[::-1]
        at_points = self.infinite + above - np.exp(losses - shift) * scaled
        # delta at losses[i - 1] counts the losses from i on; find where it falls below delta.
        inside = np.nonzero(at_points <= delta)[0]
        k = int(inside[0]) if inside.size else losses.size - 1
        if k == 0 and not self.complete:
            return float(max(0.0, losses[0]))
        excess = self.infinite + above[k] - delta
        if excess <= 0 or scaled[k] <= 0:
            return float(max(0.0, losses[k - 1])) if k else 0.0
        return float(max(0.0, shift + math.log(excess) - math.log(scaled[k])))

    def log_moments(self, orders: Array) -> Array:
        """``log E[exp(order * loss)]`` of the finite part, shape of ``orders``."""
        losses = self.losses
        with np.errstate(divide="ignore"):
            log_mass = np.log(self.mass)
        keep = np.isfinite(log_mass)
        losses, log_mass = losses[keep], log_mass[keep]
        out = np.empty(orders.shape)
        for i, order in enumerate(orders):
            terms = log_mass + order * losses
            top = terms.max()
            out[i] = top + math.log(np.exp(terms - top).sum())
        return out


@dataclass(frozen=True)
class PrivacyLoss:
    """Both directions of one mechanism, composed separately."""

    remove: DiscreteLoss
    add: DiscreteLoss

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon that holds for adding and for removing the example."""
        return max(self.remove.epsilon(delta), self.add.epsilon(delta))

    def delta(self, epsilon: float) -> float:
        """Smallest delta that holds for adding and for removing the example."""
        return max(self.remove.delta(epsilon), self.add.delta(epsilon))

    def compose(self, *others: PrivacyLoss, tilt: float = 0.0) -> PrivacyLoss:
        """Adaptive composition with other mechanisms on the same grid."""
        return compose([(part, 1) for part in (self, *others)], tilt=tilt)

    def self_compose(self, count: int, tilt: float = 0.0) -> PrivacyLoss:
        """``count`` adaptive runs of the same mechanism."""
        return compose([(self, count)], tilt=tilt)


def discretise(mixture: Mixture, step: float) -> PrivacyLoss:
    """Pessimistic privacy-loss distributions of a mixture of Gaussians on the grid ``step * Z``.

    Raises:
        ValueError: ``step`` is not positive, or the losses span too many grid points.
    """
    if not step > 0:
        raise ValueError(f"the grid step must be positive, got {step}")
    if mixture.sensitivities[-1] == 0.0:
        one = np.ones(1)
        return PrivacyLoss(DiscreteLoss(step, 0, one, mixture.lost), DiscreteLoss(step, 0, one))
    reach = _REACH * mixture.sigma
    ends, _ = mixture.log_ratio(np.array([-reach, mixture.sensitivities[-1] + reach]))
    lowest, highest = math.floor(ends[0] / step), math.ceil(ends[1] / step)
    highest = max(highest, lowest + 1)
    if highest - lowest > MAX_POINTS:
        raise ValueError(
            f"the privacy loss of one step spans {highest - lowest} grid points (allowed: "
            f"{MAX_POINTS}); raise sigma (got {mixture.sigma:.4g}) or the grid step (got {step})"
        )
    grid = np.arange(lowest, highest + 1)
    x = mixture.solve(step * grid)
    pivot = int(np.searchsorted(x, 0.0))
    p_low, q_low = mixture.tails(x[: pivot + 1], upper=False)
    p_high, q_high = mixture.tails(x[pivot:], upper=True)
    p = np.concatenate([np.diff(p_low), -np.diff(p_high)])
    q = np.concatenate([np.diff(q_low), -np.diff(q_high)])
    if pivot >= x.size:  # every edge lies below zero
        p, q = np.diff(p_low), np.diff(q_low)
    p, q = np.maximum(p, 0.0), np.maximum(q, 0.0)
    below_p, below_q = (float(v[0]) for v in mixture.tails(x[:1], upper=False))
    above_p, above_q = (float(v[0]) for v in mixture.tails(x[-1:], upper=True))
    share = -math.expm1(-step)
    eps = step * grid
    with np.errstate(over="ignore", invalid="ignore"):
        up = np.nan_to_num((p - np.exp(eps[:-1]) * q) / share, nan=np.inf, neginf=0.0)
        down = np.nan_to_num((q - np.exp(-eps[1:]) * p) / share, nan=np.inf, neginf=0.0)
    up = np.clip(up, 0.0, p)
    down = np.clip(down, 0.0, q)
    remove = np.zeros(grid.size)
    remove[:-1] += p - up
    remove[1:] += up
    remove[0] += below_p
    add = np.zeros(grid.size)
    add[:-1] += down
    add[1:] += q - down
    add[-1] += above_q
    return PrivacyLoss(
        DiscreteLoss(step, lowest, remove, above_p + mixture.lost),
        DiscreteLoss(step, -highest, add[::-1].copy(), below_q),
    )


def compose(
    parts: Sequence[tuple[PrivacyLoss, int]], tilt: float = 0.0, tail: float = 1e-16
) -> PrivacyLoss:
    """Composition of mechanisms with multiplicities, each direction on its own.

    Args:
        parts: (mechanism, how often) pairs on one grid.
        tilt: exponential tilting order; needed for delta below about 1e-10, where the round-off
            of the Fourier transform (about 1e-16 a bin) would show.
        tail: probability outside the window that may wrap around; it is added to infinity.
    """
    parts = [(loss, count) for loss, count in parts if count > 0]
    if not parts:
        raise ValueError("nothing to compose: give at least one mechanism with a count above 0")
    sides: list[DiscreteLoss] = []
    for side in ("remove", "add"):
        sides.append(_compose([(getattr(loss, side), n) for loss, n in parts], tilt, tail))
    return PrivacyLoss(*sides)


def _compose(parts: list[tuple[DiscreteLoss, int]], tilt: float, tail: float) -> DiscreteLoss:
    step = parts[0][0].step
    if any(loss.step != step for loss, _ in parts):
        raise ValueError("all mechanisms must share one grid step")
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    low, high, outside = window(parts, tilt, tail)
    size = fft.next_fast_len(high - low + 1, real=True)
    if size > MAX_POINTS:
        raise ValueError(
            f"the composed privacy loss needs a window of {size} points (allowed: {MAX_POINTS}); "
            "raise sigma or the grid step h"
        )
    transform = np.ones(size // 2 + 1, dtype=np.complex128)
    log_scale, log_finite = 0.0, 0.0
    for loss, count in parts:
        mass, scale = loss.mass, 0.0
        if tilt:
            scale = float(loss.log_moments(np.array([tilt]))[0])
            mass = mass * np.exp(tilt * loss.losses - scale)
        transform *= _spectrum(mass, loss.offset, size) ** count
        log_scale += count * scale
        log_finite += count * math.log1p(-loss.infinite)
    composed = np.roll(fft.irfft(transform, size), -(low % size))
    composed = np.maximum(composed, 0.0)  # negative round-off would count in our favour
    if tilt:
        composed = composed * np.exp(log_scale - tilt * step * (low + np.arange(size)))
    infinite = -math.expm1(log_finite)
    if not tilt:
        infinite += max(0.0, 1.0 - infinite - float(composed.sum()))
    return DiscreteLoss(step, low, composed, min(1.0, infinite + outside))


def _spectrum(mass: Array, offset: int, size: int) -> NDArray[np.complex128]:
    """Transform of a mass function placed at its index modulo ``size`` (folded if longer)."""
    start = offset % size
    rows = -(-(start + mass.size) // size)
    folded = np.zeros(rows * size)
    folded[start : start + mass.size] = mass
    return cast(NDArray[np.complex128], fft.rfft(folded.reshape(rows, size).sum(axis=0)))


def window(
    parts: list[tuple[DiscreteLoss, int]], tilt: float, tail: float
) -> tuple[int, int, float]:
    """Grid window that holds all of the (tilted) sum of losses but ``tail`` on either side.

    Chernoff: ``Pr[S >= t] <= exp(K(l) - l t)`` with ``K`` the log moment function of the sum.

    Returns:
        Lowest and highest grid index, and a bound on the true (untilted) mass above the window.
    """
    step = parts[0][0].step
    at_tilt = 0.0
    variance = 0.0
    for loss, count in parts:
        log_scale = float(loss.log_moments(np.array([tilt]))[0])
        weight = loss.mass * np.exp(np.minimum(tilt * loss.losses - log_scale, 700.0))
        mean = float(weight @ loss.losses)
        variance += count * float(weight @ (loss.losses - mean) ** 2)
        at_tilt += count * log_scale
    spread = max(math.sqrt(variance), step)
    orders = np.geomspace(0.7, 100.0, 12) / spread
    span = -math.log(tail)
    up, down = np.zeros(orders.size), np.zeros(orders.size)
    for loss, count in parts:
        up += count * loss.log_moments(tilt + orders)
        down += count * loss.log_moments(tilt - orders)
    high = math.ceil(float(np.min((up - at_tilt + span) / orders)) / step) + 1
    low = math.floor(float(np.max(-(down - at_tilt + span) / orders)) / step) - 1
    largest = sum(count * (loss.offset + loss.mass.size - 1) for loss, count in parts)
    smallest = sum(count * loss.offset for loss, count in parts)
    high, low = min(high, largest), max(low, smallest)
    outside = 0.0
    if high < largest:
        outside = math.exp(min(0.0, float(np.min(up - (tilt + orders) * high * step))))
    return low, max(high, low), outside
