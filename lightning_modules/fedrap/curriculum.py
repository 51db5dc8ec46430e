"""The paper's growth of the coefficients over the rounds, as plain functions.

In training the shared curriculum callback drives them, with a delay of one epoch and zero before
it; these functions say what it has to give.
"""

from __future__ import annotations

import math
from collections.abc import Callable

SHAPES: dict[str, Callable[[int], float]] = {
    "tanh": lambda a: math.tanh(a / 10),
    "sin": lambda a: (math.sin(a / 10) + 1) / 2,
    "square": lambda a: 1.0 if (a // 5) % 2 == 0 else 0.0,
    "frac": lambda a: 1 / (a + 1),
    "fixed": lambda a: 1.0,
    "const": lambda a: 1.0,
}


def coefficient_after(shape: str, index: int, maximum: float) -> float:
    """Coefficient as set after round ``index``, for the next one.

    Raises:
        ValueError: For an unknown shape.
    """
    if shape not in SHAPES:
        raise ValueError(f"curriculum must be one of {', '.join(SHAPES)}, got '{shape}'")
    return maximum * SHAPES[shape](index)


def coefficient_in(shape: str, index: int, maximum: float) -> float:
    """Coefficient in force during round ``index``: that of the round before, 0 in the first."""
    if index == 0:
        constant = shape in ("fixed", "const")
        return coefficient_after(shape, 0, maximum) if constant else 0.0
    return coefficient_after(shape, index - 1, maximum)
