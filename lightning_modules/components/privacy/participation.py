"""How often one example may take part, and the sensitivity of a strategy matrix under it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Participation:
    """Participation schema of one example over the steps of a run.

    Attributes:
        max_participations: at most so many steps use the example.
        min_separation: consecutive uses are at least so many steps apart.
        fixed_order: the uses are exactly ``min_separation`` apart (same order in every epoch).
    """

    max_participations: int = 1
    min_separation: int = 1
    fixed_order: bool = False

    def __post_init__(self) -> None:
        for name in ("max_participations", "min_separation"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def check(self, n: int) -> None:
        """Refuse a schema that ``n`` steps cannot hold."""
        if n < 1:
            raise ValueError(f"the number of steps must be at least 1, got {n}")
        allowed = math.ceil(n / self.min_separation)
        if self.max_participations > allowed:
            raise ValueError(
                f"{self.max_participations} participations at least {self.min_separation} steps "
                f"apart do not fit into {n} steps: at most {allowed}"
            )

    def limited(self, n: int) -> Participation:
        """The schema of the first ``n`` steps."""
        most = min(self.max_participations, math.ceil(n / self.min_separation))
        return Participation(max(1, most), self.min_separation, self.fixed_order)


def toeplitz_sensitivity(coefficients: ArrayLike, n: int, participation: Participation) -> float:
    """L2 sensitivity of the lower-triangular Toeplitz C with first column ``coefficients``.

    Exact for non-negative non-increasing coefficients (the worst case is to start at step 0 and to
    come back as early as allowed); otherwise of the reverse running maximum of their absolute
    values, an upper bound.
    """
    participation.check(n)
    c = np.abs(np.asarray(coefficients, dtype=np.float64))[:n]
    c = np.pad(c, (0, n - c.size))
    c = np.maximum.accumulate(c[::-1])[::-1]
    total = np.zeros(n)
    for m in range(participation.max_participations):
        start = m * participation.min_separation
        total[start:] += c[: n - start]
    return float(np.linalg.norm(total))


def matrix_sensitivity(matrix: ArrayLike, participation: Participation) -> float:
    """L2 sensitivity of a square strategy matrix C.

    Fixed order: the largest ``sqrt(sum |X_ij|)`` over the patterns, ``X = C^T C`` (exact for
    X >= 0). Otherwise exact if columns ``min_separation`` apart are orthogonal (bands no wider
    than the separation), and else the upper bound of a two-stage dynamic programme.
    """
    c = np.asarray(matrix, dtype=np.float64)
    n = c.shape[1]
    participation.check(n)
    gram = np.abs(c.T @ c)
    gap, most = participation.min_separation, participation.max_participations
    if participation.fixed_order:
        squares = []
        for start in range(min(gap, n)):
            steps = np.arange(start, n, gap)[:most]
            squares.append(gram[np.ix_(steps, steps)].sum())
        return math.sqrt(max(squares))
    apart = np.abs(np.subtract.outer(np.arange(n), np.arange(n))) >= gap
    if most == 1 or not np.any(gram[apart] > 0):
        return math.sqrt(float(_best_pattern(np.diag(gram)[None, :], gap, most)[0]))
    rows = _best_pattern(gram, gap, most)
    return math.sqrt(float(_best_pattern(rows[None, :], gap, most)[0]))


def _best_pattern(values: Array, gap: int, most: int) -> Array:
    """Largest sum of at most ``most`` entries at least ``gap`` apart, for every row of values."""
    rows, n = values.shape
    best = np.zeros((most + 1, rows, n + gap + 1))
    for m in range(1, most + 1):
        for i in range(n - 1, -1, -1):
            take = values[:, i] + best[m - 1, :, i + gap]
            best[m, :, i] = np.maximum(take, best[m, :, i + 1])
    return best[most, :, 0]
