"""Upper quantiles of weighted sums of Bernoulli variables, never rounded down."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

Array = NDArray[np.float64]
Method = Literal["auto", "exact", "grid", "chernoff"]
EXACT_TERMS = 12


def law(
    values: Array, p: float, method: Method = "auto", step: float = 1e-3
) -> tuple[Array, Array]:
    """Support (increasing) and weights of ``sum_j values_j Bern(p)``.

    "exact" enumerates; "grid" rounds values up to multiples of ``step * max(values)``; "auto"
    enumerates up to 12 terms. The support of a grid law dominates the exact one.
    """
    v = values[values > 0]
    if v.size == 0:
        return np.zeros(1), np.ones(1)
    if method == "exact" or (method == "auto" and v.size <= EXACT_TERMS):
        if v.size > 22:
            raise ValueError(f"exact enumeration takes at most 22 terms, got {v.size}; use 'grid'")
        points: Array = np.zeros(1)
        mass: Array = np.ones(1)
        for value in v:
            points = np.concatenate([points, points + value])
            mass = np.concatenate([mass * (1 - p), mass * p])
        order = np.argsort(points, kind="stable")
        return points[order], mass[order]
    unit = step * float(v.max())
    shifts = np.ceil(v / unit - 1e-12).astype(int)
    mass = np.zeros(int(shifts.sum()) + 1, dtype=np.float64)
    mass[0], reach = 1.0, 0
    for shift in np.sort(shifts):
        moved = mass[: reach + 1] * p
        mass[: reach + 1] *= 1 - p
        mass[shift : shift + reach + 1] += moved
        reach += int(shift)
    return np.asarray(unit * np.arange(mass.size), dtype=np.float64), mass


def quantile(values: Array, p: float, failure: float, method: Method = "auto") -> float:
    """Smallest ``s`` (or an upper bound) with ``Pr[sum_j values_j Bern(p) > s] <= failure``."""
    if method == "chernoff":
        return float(chernoff(values[None, :], p, failure)[0])
    points, mass = law(values, p, method)
    above = np.concatenate([np.cumsum(mass[::-1])[::-1][1:], [0.0]])  # Pr[> points[i]]
    # Equal points may be split by round-off; a relative 1e-12 keeps that from lowering s.
    return float(points[int(np.nonzero(above <= failure * (1 - 1e-12))[0][0])])


def chernoff(values: Array, p: float, failure: float) -> Array:
    """Chernoff bound on the quantile for many sums at once.

    ``s = min_l [sum_j log(1 + p (e^{l v_j} - 1)) + log(1/failure)] / l``.

    Args:
        values: one sum a row, shape (rows, terms); zeros are padding.
        p: success probability.
        failure: tail probability.

    Returns:
        Upper bounds, shape (rows,), at most the sum of all values.
    """
    total = values.sum(axis=1)
    top = values.max(axis=1, initial=0.0)
    unit = np.where(top > 0, top, 1.0)
    scaled = values / unit[:, None]
    span = -math.log(failure)
    best = np.full(values.shape[0], np.inf)
    for order in np.geomspace(0.25, 64.0, 25):
        moment = np.log1p(p * np.expm1(order * scaled)).sum(axis=1)
        best = np.minimum(best, (moment + span) / order)
    return np.asarray(np.minimum(best * unit, total), dtype=np.float64)


def joint_quantile(
    values: Array, p: float, noise: float, failure: float, method: Method = "auto"
) -> float:
    """Smallest ``t`` with ``Pr[sum_j values_j Bern(p) + noise N(0,1) > t] <= failure``."""
    if method == "chernoff":
        return _joint_chernoff(values, p, noise, failure)
    points, mass = law(values, p, method)
    low = noise * float(-ndtri(failure))
    high = float(points[-1]) + low
    for _ in range(80):
        middle = 0.5 * (low + high)
        tail = float(mass @ ndtr((points - middle) / noise))
        low, high = (middle, high) if tail > failure else (low, middle)
    return high


def _joint_chernoff(values: Array, p: float, noise: float, failure: float) -> float:
    orders = np.geomspace(0.05, 50.0, 200) / max(noise, 1e-300)
    orders = orders[orders * float(values.max(initial=0.0)) < 600]
    moments = np.log1p(p * np.expm1(np.multiply.outer(orders, values))).sum(axis=1)
    bounds = (moments + 0.5 * (orders * noise) ** 2 - math.log(failure)) / orders
    return float(bounds.min())
