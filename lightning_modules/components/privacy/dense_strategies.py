"""Strategies that are given by a matrix: any C, the dense optimum, the binary tree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import solve_triangular

from lightning_modules.components.privacy.correlation import (
    BandedCorrelator,
    Correlator,
    DenseCorrelator,
)
from lightning_modules.components.privacy.optimise import lower_factor, optimise_dense, tree_gram
from lightning_modules.components.privacy.strategy import Strategy, check_dense, check_momentum

Array = NDArray[np.float64]


class Dense(Strategy):
    """Any lower-triangular C for a fixed number of steps.

    Args:
        matrix: rows of C, or the path of a ``.npy`` file.
    """

    def __init__(self, matrix: list[list[float]] | str) -> None:
        if isinstance(matrix, str):
            if not Path(matrix).is_file():
                raise ValueError(f"matrix: there is no file {matrix}")
            matrix = np.load(matrix, allow_pickle=False)
        c: Array = np.asarray(matrix, dtype=np.float64)
        if c.ndim != 2 or c.shape[0] != c.shape[1] or c.size == 0:
            raise ValueError(f"matrix must be square, got shape {c.shape}")
        if not np.all(np.isfinite(c)):
            i, j = np.argwhere(~np.isfinite(c))[0]
            raise ValueError(f"matrix entry ({i}, {j}) is not finite: {c[i, j]}")
        if np.any(np.triu(c, 1) != 0):
            i, j = np.argwhere(np.triu(c, 1) != 0)[0]
            raise ValueError(f"matrix must be lower triangular; entry ({i}, {j}) is {c[i, j]}")
        if np.any(np.diag(c) == 0):
            i = int(np.nonzero(np.diag(c) == 0)[0][0])
            raise ValueError(f"matrix must have a non-zero diagonal; entry ({i}, {i}) is zero")
        self.values = c

    def matrix(self, n: int) -> Array:
        """C itself; the first n rows and columns of it for a prefix of the run."""
        if n > self.values.shape[0]:
            raise ValueError(
                f"the strategy was made for {self.values.shape[0]} steps, the run has {n}: "
                "set trainer.max_steps, or make the matrix anew"
            )
        return self.values[:n, :n]

    def correlator(self, n: int) -> Correlator:
        """Recursion if the bands are few, else rows of C^-1."""
        return matrix_correlator(self.matrix(n))


class OptimisedDense(Strategy):
    """Dense C with the least mean error for one participation; at most 512 steps."""

    def __init__(self, momentum: float = 0.0) -> None:
        check_momentum(momentum)
        self.momentum = momentum

    def matrix(self, n: int) -> Array:
        """Optimum for exactly ``n`` steps."""
        return optimise_dense(n, self.momentum)

    def correlator(self, n: int) -> Correlator:
        """Rows of C^-1."""
        return matrix_correlator(self.matrix(n))


class BinaryTree(Strategy):
    """Dyadic tree aggregation, as the square C with the tree's Gram matrix.

    The tree releases all dyadic partial sums; the lower-triangular square root of the same Gram
    matrix gives the same Gaussian pair up to a rotation, and makes the noise of the best linear
    estimator from the nodes seen so far.
    """

    def matrix(self, n: int) -> Array:
        """C as a dense array, (n, n)."""
        check_dense(n)
        c = lower_factor(tree_gram(n))
        return np.where(np.abs(c) < 1e-12, 0.0, c)

    def correlator(self, n: int) -> Correlator:
        """Rows of C^-1."""
        return matrix_correlator(self.matrix(n))


def matrix_correlator(matrix: ArrayLike) -> Correlator:
    """Recursion over bands if that keeps fewer than a quarter of the steps, else rows of C^-1."""
    c = np.asarray(matrix, dtype=np.float64)
    n = c.shape[0]
    rows, columns = np.nonzero(c)
    width = int((rows - columns).max()) + 1
    if width <= max(1, n // 4):
        band = np.zeros((n, width))
        for s in range(width):
            band[s:, s] = np.diag(c, -s)
        return BandedCorrelator(n, band)
    return DenseCorrelator(solve_triangular(c, np.eye(n), lower=True))
