"""Mixture-of-Gaussians mechanism: P = sum_k w_k N(s_k, sigma^2) against Q = N(0, sigma^2).

The example is in P ("remove" compares P with Q, "add" compares Q with P).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr, ndtr, ndtri

Array = NDArray[np.float64]
Direction = Literal["remove", "add"]

TAIL = 1e-20
"""Probability beyond which a tail is moved to an infinite privacy loss (never dropped)."""
_REACH = float(-ndtri(TAIL))


@dataclass(frozen=True)
class Mixture:
    """Law of the sensitivity, and the noise.

    Attributes:
        sensitivities: s_k >= 0, strictly increasing, first one 0 if it has mass, shape (K,).
        weights: w_k > 0, shape (K,); they sum to 1 - ``lost``.
        sigma: standard deviation of the noise.
        lost: weight of the components that were cut off; counted as infinite loss.
    """

    sensitivities: Array
    weights: Array
    sigma: float
    lost: float = 0.0

    @classmethod
    def build(cls, sensitivities: ArrayLike, weights: ArrayLike, sigma: float) -> Mixture:
        """Sorts, merges equal sensitivities, drops weights of zero and checks the rest."""
        s = np.atleast_1d(np.asarray(sensitivities, dtype=np.float64))
        w = np.atleast_1d(np.asarray(weights, dtype=np.float64))
        if s.shape != w.shape or s.ndim != 1:
            raise ValueError(
                f"sensitivities {s.shape} and weights {w.shape} must be two equal rows"
            )
        if not np.all(np.isfinite(s)) or np.any(s < 0):
            raise ValueError("sensitivities must be finite and >= 0")
        if not np.all(np.isfinite(w)) or np.any(w < 0) or abs(w.sum() - 1.0) > 1e-9:
            raise ValueError(f"weights must be >= 0 and sum to 1, got sum {w.sum()}")
        if not (np.isfinite(sigma) and sigma > 0):
            raise ValueError(f"sigma must be positive, got {sigma}")
        points, place = np.unique(s, return_inverse=True)
        mass = np.zeros(points.size)
        np.add.at(mass, place, w)
        return cls(points[mass > 0], mass[mass > 0], float(sigma))

    @property
    def loss_floor(self) -> float:
        """Infimum ``log w_0`` of the log ratio ``log P/Q``; -inf without a zero sensitivity."""
        return float(np.log(self.weights[0])) if self.sensitivities[0] == 0.0 else -np.inf

    def log_ratio(self, x: Array) -> tuple[Array, Array]:
        """``L(x) = log P(x)/Q(x)`` and its derivative, by log-sum-exp; x of shape (m,)."""
        value, slope = np.empty_like(x), np.empty_like(x)
        variance = self.sigma**2
        gain = self.sensitivities / variance
        start = np.log(self.weights) - self.sensitivities**2 / (2 * variance)
        block = max(1, 2**20 // self.sensitivities.size)
        for i in range(0, x.size, block):
            terms = np.multiply.outer(x[i : i + block], gain)
            terms += start
            top = terms.max(axis=1)
            terms -= top[:, None]
            np.exp(terms, out=terms)
            total = terms.sum(axis=1)
            value[i : i + block] = top + np.log(total)
            slope[i : i + block] = (terms @ gain) / total
        return value, slope

    def solve(self, losses: Array) -> Array:
        """``x`` with ``L(x) = losses`` for sorted losses above the floor; -inf at or below it.

        Safeguarded Newton started from the inverse interpolation of a table of 1025 points.
        """
        x = np.full(losses.shape, -np.inf)
        above = losses > self.loss_floor
        if self.sensitivities[-1] == 0.0:  # no dependence on the example at all
            x[above] = np.inf
            return x
        target = losses[above]
        if target.size == 0:
            return x
        variance, top = self.sigma**2, self.sensitivities[-1]
        # L lies between log w_K + tangent of the largest component and the tangent itself.
        high = (target[-1] - np.log(self.weights[-1])) * variance / top + top / 2
        if self.sensitivities[0] == 0.0:
            gap = np.log(-np.expm1(self.loss_floor - target[0])) + target[0]
            small = self.sensitivities[min(1, self.sensitivities.size - 1)]
            low = min((gap - np.log(2.0)) * variance / top, gap * variance / small, 0.0)
            low -= 2 * self.sigma
        else:
            small = self.sensitivities[0]
            low = min(target[0] * variance / small, target[0] * variance / top) - self.sigma
        while self.log_ratio(np.array([low]))[0][0] > target[0]:
            low -= 2 * max(abs(low), self.sigma)
        table = np.linspace(low, high, 1025)
        values, slopes = self.log_ratio(table)
        values = np.maximum.accumulate(values)
        place = np.clip(np.searchsorted(values, target) - 1, 0, table.size - 2)
        left, right = table[place].copy(), table[place + 1].copy()
        rise = values[place + 1] - values[place]
        part = np.where(rise > 0, (target - values[place]) / np.where(rise > 0, rise, 1.0), 0.5)
        guess = left + np.clip(part, 0.0, 1.0) * (right - left)
        guess = _hermite(
            left,
            right,
            values[place],
            values[place + 1],
            slopes[place],
            slopes[place + 1],
            target,
            guess,
        )
        active = np.arange(target.size)
        for _ in range(60):
            value, slope = self.log_ratio(guess[active])
            miss = value - target[active]
            lower = miss < 0
            left[active] = np.where(lower, guess[active], left[active])
            right[active] = np.where(lower, right[active], guess[active])
            with np.errstate(divide="ignore", invalid="ignore"):
                step = guess[active] - miss / slope
            bad = ~((step >= left[active]) & (step <= right[active]))
            step = np.where(bad, 0.5 * (left[active] + right[active]), step)
            moved = np.abs(step - guess[active])
            guess[active] = step
            # Newton's next error is below the square of this move, so 1e-8 leaves about 1e-15.
            active = active[bad | (moved > 1e-8 * np.maximum(1.0, np.abs(step)))]
            active = active[(right[active] - left[active]) > 1e-15 * np.abs(right[active])]
            if active.size == 0:
                break
        x[above] = guess
        return x

    def tails(self, x: Array, upper: bool) -> tuple[Array, Array]:
        """``P`` and ``Q`` of {> x} (``upper``) or {< x}, each accurate relative to its size."""
        sign = -1.0 if upper else 1.0
        scaled = sign * x / self.sigma
        shift = sign * self.sensitivities / self.sigma
        p = np.empty_like(scaled)
        block = max(1, 2**20 // self.sensitivities.size)
        for i in range(0, x.size, block):
            p[i : i + block] = ndtr(np.subtract.outer(scaled[i : i + block], shift)) @ self.weights
        return p, ndtr(scaled)

    def hockey_stick(self, epsilon: ArrayLike, direction: Direction) -> Array:
        """Exact ``sup_S P(S) - e^eps Q(S)`` ("remove"; "add" swaps P and Q), shape of epsilon."""
        eps = np.atleast_1d(np.asarray(epsilon, dtype=np.float64))
        order = np.argsort(eps if direction == "remove" else -eps)
        ordered = eps[order]
        x = self.solve(ordered if direction == "remove" else -ordered)
        log_w = np.log(self.weights)
        upper = x >= 0
        side = np.where(upper, -1.0, 1.0)
        with np.errstate(invalid="ignore"):
            arguments = side[:, None] * (x[:, None] - self.sensitivities) / self.sigma
            log_p = _logsumexp(log_w + log_ndtr(arguments))
            log_q = log_ndtr(side * x / self.sigma)
        everything = -np.expm1(ordered)
        if direction == "remove":
            gap = np.exp(log_p) - np.exp(ordered + log_q)
            delta = np.where(upper, gap, everything - gap) + self.lost
        else:
            gap = np.exp(log_q) - np.exp(ordered + log_p)
            delta = np.where(upper, everything - gap, gap)
        out = np.empty_like(delta)
        out[order] = np.clip(delta, 0.0, 1.0)
        return np.asarray(out.reshape(np.shape(epsilon)), dtype=np.float64)


def _logsumexp(terms: Array) -> Array:
    top = terms.max(axis=1)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(top + np.log(np.exp(terms - top[:, None]).sum(axis=1)))


def _hermite(
    left: Array,
    right: Array,
    low: Array,
    high: Array,
    low_slope: Array,
    high_slope: Array,
    target: Array,
    guess: Array,
) -> Array:
    """One cubic inverse-interpolation step; falls back on ``guess`` outside the cell."""
    rise = high - low
    with np.errstate(divide="ignore", invalid="ignore"):
        t = (target - low) / rise
        a, b = rise / low_slope, rise / high_slope  # slopes of x(value) on the unit interval
        width = right - left
        cubic = left + width * t * t * (3 - 2 * t) + a * t * (1 - t) ** 2 - b * t * t * (1 - t)
    inside = (cubic >= left) & (cubic <= right)
    return np.where(inside, cubic, guess)


def bernoulli_sum(
    values: ArrayLike,
    probabilities: ArrayLike,
    *,
    exact_terms: int = 10,
    step: float = 1e-3,
    relative: float = 1e-2,
) -> tuple[Array, Array, float]:
    """Law of ``sum_j values_j Bern(probabilities_j)`` with the values rounded up if need be.

    Args:
        values: >= 0, shape (m,).
        probabilities: in [0, 1], shape (m,).
        exact_terms: up to so many non-zero terms the support is enumerated.
        step: beyond that, values are rounded up to multiples of ``step * max(values)``,
        relative: and the sum is rounded up once more by at most this part of itself.

    Returns:
        Support (increasing), weights, and the weight of the far upper tail (at most 1e-20) that
        was cut off and must be counted as an infinite loss.
    """
    v = np.asarray(values, dtype=np.float64)
    q = np.asarray(probabilities, dtype=np.float64)
    keep = (v > 0) & (q > 0)
    v, q = v[keep], q[keep]
    if v.size == 0:
        return np.zeros(1), np.ones(1), 0.0
    if v.size <= exact_terms:
        points: Array = np.zeros(1)
        mass: Array = np.ones(1)
        for value, prob in zip(v, q, strict=True):
            points = np.concatenate([points, points + value])
            mass = np.concatenate([mass * (1 - prob), mass * prob])
        points, place = np.unique(points, return_inverse=True)
        merged = np.zeros(points.size)
        np.add.at(merged, place, mass)
        mass = merged
    else:
        points, mass, lost = _grid_law(v, q, step * float(v.max()), relative)
        return points, mass, lost
    cut, lost = _upper_tail(mass, TAIL)
    points, mass = points[:cut], mass[:cut]
    return points[mass > 0], mass[mass > 0], lost


def _upper_tail(mass: Array, allowed: float) -> tuple[int, float]:
    """How many entries to keep so that at most ``allowed`` is cut off, and what is."""
    above = np.cumsum(mass[::-1])[::-1]
    cut = max(1, int(np.searchsorted(-above, -allowed, side="left")))
    return cut, float(above[cut]) if cut < above.size else 0.0


def _grid_law(v: Array, q: Array, unit: float, relative: float) -> tuple[Array, Array, float]:
    """Law of the sum on multiples of ``unit``, its support then thinned out upwards."""
    shifts = np.ceil(v / unit - 1e-12).astype(int)
    order = np.argsort(shifts)
    mass, lost = np.ones(1), 0.0
    for done, k in enumerate(order):
        shift, prob = int(shifts[k]), float(q[k])
        longer = np.zeros(mass.size + shift)
        longer[: mass.size] = mass * (1 - prob)
        longer[shift:] += mass * prob
        mass = longer
        if done % 8 == 7 or done == order.size - 1:
            # what is cut off now could only have grown: all of it counts as infinite
            cut, tail = _upper_tail(mass, TAIL / v.size)
            mass, lost = mass[:cut], lost + tail
    ends = [0]
    while ends[-1] < mass.size - 1:
        ends.append(min(mass.size - 1, ends[-1] + max(1, int(ends[-1] * relative))))
    index = np.array(ends)
    thin = np.zeros(index.size)
    np.add.at(thin, np.searchsorted(index, np.arange(mass.size)), mass)
    keep = thin > 0
    return np.asarray(unit * index[keep], dtype=np.float64), thin[keep], lost
