"""Find the best lambda with few runs of the sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class SearchResult(NamedTuple):
    """Outcome of a search.

    Attributes:
        best: The lambda with the smallest value.
        value: That value.
        tried: Every (lambda, value) in the order of evaluation.
    """

    best: float
    value: float
    tried: list[tuple[float, float]]


def grid_search(objective: Callable[[float], float], candidates: Sequence[float]) -> SearchResult:
    """Evaluate all candidates.

    Raises:
        ValueError: If there are none or one is not positive.
    """
    if not candidates or min(candidates) <= 0:
        raise ValueError(f"candidates must be positive epsilon scales, got {list(candidates)}")
    tried = [(float(scale), objective(float(scale))) for scale in candidates]
    best, value = min(tried, key=lambda pair: pair[1])
    return SearchResult(best, value, tried)


def golden_section_search(
    objective: Callable[[float], float], low: float, high: float, evaluations: int = 10
) -> SearchResult:
    """Shrink [low, high] around the minimum of a unimodal objective.

    Use one set of noise for all evaluations: the comparison is then paired and the objective
    smooth. Both ends count as candidates.

    Raises:
        ValueError: If the interval is empty or not positive, or evaluations < 4.
    """
    if not 0 < low < high:
        raise ValueError(f"need 0 < low < high, got {low} and {high}")
    if evaluations < 4:
        raise ValueError(
            f"evaluations must be at least 4 (two ends, two inside), got {evaluations}"
        )
    ratio = (5**0.5 - 1) / 2
    tried: list[tuple[float, float]] = []

    def value_at(scale: float) -> float:
        value = objective(scale)
        tried.append((scale, value))
        return value

    value_at(low)
    value_at(high)
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = value_at(left), value_at(right)
    for _ in range(evaluations - 4):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = value_at(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = value_at(right)
    best, value = min(tried, key=lambda pair: pair[1])
    return SearchResult(best, value, tried)
