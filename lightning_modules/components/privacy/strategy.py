"""What every strategy matrix C of the matrix mechanism offers.

The trainer releases ``G + sigma S C^-1 Z``; C decides how the noise of different steps is
correlated. Every sensitivity is computed from the coefficients really in use.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from lightning_modules.components.privacy.amplification import MAX_DENSE
from lightning_modules.components.privacy.correlation import (
    BandedCorrelator,
    Correlator,
    IdentityCorrelator,
)
from lightning_modules.components.privacy.participation import (
    Participation,
    matrix_sensitivity,
    toeplitz_sensitivity,
)
from lightning_modules.components.privacy.power_series import series_inverse, toeplitz

Array = NDArray[np.float64]


class Strategy(ABC):
    """A lower-triangular strategy matrix for any number of steps."""

    def coefficients(self, n: int) -> Array | None:
        """First column (n,) if C is Toeplitz, else ``None``."""
        return None

    @abstractmethod
    def matrix(self, n: int) -> Array:
        """C as a dense array, (n, n)."""

    @abstractmethod
    def correlator(self, n: int) -> Correlator:
        """Streaming multiplication by C^-1."""

    def bands(self, n: int) -> int:
        """Number of non-zero diagonals."""
        column = self.coefficients(n)
        if column is not None:
            return max(1, int(np.trim_zeros(column, "b").size))
        rows, columns = np.nonzero(self.matrix(n))
        return int((rows - columns).max()) + 1

    def accounted(self, n: int) -> Array:
        """What the accountants take: the first column of a Toeplitz C, else the matrix."""
        column = self.coefficients(n)
        return self.matrix(n) if column is None else column

    def column_norms(self, n: int) -> Array:
        """L2 norms of the columns of C, (n,)."""
        column = self.coefficients(n)
        if column is None:
            return np.asarray(np.linalg.norm(self.matrix(n), axis=0), dtype=np.float64)
        return np.asarray(np.sqrt(np.cumsum(np.square(column)))[::-1], dtype=np.float64)

    def sensitivity(self, n: int, participation: Participation | None = None) -> float:
        """L2 sensitivity of ``C G`` for rows of norm at most 1 (default: one participation)."""
        schema = participation or Participation()
        column = self.coefficients(n)
        if column is not None:
            return toeplitz_sensitivity(column, n, schema)
        return matrix_sensitivity(self.matrix(n), schema)

    def inverse(self, n: int) -> Array:
        """C^-1 as a dense array, (n, n); row t makes the noise of step t."""
        column = self.coefficients(n)
        if column is not None:
            return toeplitz(series_inverse(column, n), n)
        return np.asarray(solve_triangular(self.matrix(n), np.eye(n), lower=True))

    def describe(self) -> str:
        """Name and arguments, equal for equal strategies; kept in checkpoints."""
        arguments = ", ".join(
            f"{k}={_brief(v)}" for k, v in sorted(vars(self).items()) if not k.startswith("_")
        )
        return f"{type(self).__name__}({arguments})"


class ToeplitzStrategy(Strategy):
    """Toeplitz strategies share everything but their coefficients."""

    @abstractmethod
    def coefficients(self, n: int) -> Array:
        """First column, (n,)."""

    def matrix(self, n: int) -> Array:
        """C as a dense array, (n, n)."""
        check_dense(n)
        return toeplitz(self.coefficients(n), n)

    def correlator(self, n: int) -> Correlator:
        """Recursion over the bands."""
        column = np.trim_zeros(self.coefficients(n), "b")
        if column.size == 1 and column[0] == 1.0:
            return IdentityCorrelator(n)
        return BandedCorrelator(n, column)


def _brief(value: object) -> str:
    if isinstance(value, np.ndarray):
        if value.size <= 32:
            return repr(value.tolist())
        return f"array{value.shape}:{hashlib.sha256(value.tobytes()).hexdigest()[:16]}"
    return repr(value)


def check_dense(n: int) -> None:
    """Refuse dense matrices that would not fit."""
    if n > MAX_DENSE:
        raise ValueError(
            f"a dense strategy matrix takes at most {MAX_DENSE} steps, got {n}: "
            "use a Toeplitz strategy"
        )


def check_momentum(momentum: float) -> None:
    """Refuse a heavy-ball momentum outside [0, 1)."""
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
