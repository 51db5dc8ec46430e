"""Strategy matrices C of the matrix mechanism, all behind one interface.

The trainer releases ``G + sigma S C^-1 Z``; C decides how the noise of different steps is
correlated. Coefficients are used as they are (most start with 1), and every sensitivity is
computed from the coefficients really in use.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import solve_triangular

from lightning_modules.components.privacy.amplification import MAX_DENSE
from lightning_modules.components.privacy.correlation import (
    BandedCorrelator,
    BufferedCorrelator,
    ConvolutionCorrelator,
    Correlator,
    DenseCorrelator,
    IdentityCorrelator,
)
from lightning_modules.components.privacy.optimise import (
    buffered_coefficients,
    lower_factor,
    optimise_banded,
    optimise_buffers,
    optimise_dense,
    tree_gram,
)
from lightning_modules.components.privacy.participation import (
    Participation,
    matrix_sensitivity,
    toeplitz_sensitivity,
)
from lightning_modules.components.privacy.power_series import (
    nu_noise_coefficients,
    nu_strategy_coefficients,
    series_inverse,
    toeplitz,
)

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

    def is_nonnegative(self, n: int) -> bool:
        """Whether conditional composition covers this strategy."""
        return bool(np.all(self.accounted(n) >= 0.0))

    def column_norms(self, n: int) -> Array:
        """L2 norms of the columns of C, (n,)."""
        column = self.coefficients(n)
        if column is None:
            return np.asarray(np.linalg.norm(self.matrix(n), axis=0))
        return np.sqrt(np.cumsum(np.square(column)))[::-1].copy()

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


class _Toeplitz(Strategy):
    """Toeplitz strategies share everything but their coefficients."""

    @abstractmethod
    def coefficients(self, n: int) -> Array: ...

    def matrix(self, n: int) -> Array:
        """C as a dense array, (n, n)."""
        _check_dense(n)
        return toeplitz(self.coefficients(n), n)

    def correlator(self, n: int) -> Correlator:
        """Recursion over the bands."""
        column = np.trim_zeros(self.coefficients(n), "b")
        if column.size == 1 and column[0] == 1.0:
            return IdentityCorrelator(n)
        return BandedCorrelator(n, column)


class Identity(_Toeplitz):
    """C = I: independent noise, DP-SGD."""

    def coefficients(self, n: int) -> Array:
        """(1, 0, 0, ...)."""
        return np.eye(1, n)[0]


class BandedToeplitz(Strategy):
    """C with the given first column and zeros after it.

    Args:
        coefficients: c_0, c_1, ..., c_0 > 0.
        normalise_columns: divide every column by its norm, which spends the privacy that the
            short last columns would leave unused.
    """

    def __init__(self, coefficients: list[float], normalise_columns: bool = False) -> None:
        values = np.asarray(coefficients, dtype=np.float64)
        if values.ndim != 1 or values.size == 0 or not np.all(np.isfinite(values)):
            raise ValueError("coefficients must be a non-empty row of finite numbers")
        if values[0] <= 0:
            raise ValueError(f"the first coefficient must be positive, got {values[0]}")
        self.values = values
        self.normalise_columns = normalise_columns

    def _column(self, n: int) -> Array:
        if self.values.size > n:
            raise ValueError(f"{self.values.size} coefficients (bands) for only {n} steps")
        return np.pad(self.values, (0, n - self.values.size))

    def coefficients(self, n: int) -> Array | None:
        """First column; ``None`` with normalised columns, as C is not Toeplitz then."""
        return None if self.normalise_columns else self._column(n)

    def matrix(self, n: int) -> Array:
        """C as a dense array, (n, n)."""
        _check_dense(n)
        c = toeplitz(self._column(n), n)
        return c / np.linalg.norm(c, axis=0) if self.normalise_columns else c

    def correlator(self, n: int) -> Correlator:
        """Recursion over the bands; row t is scaled by the norm of column t if normalised."""
        column = self._column(n)
        norms = np.sqrt(np.cumsum(np.square(column)))[::-1]
        if self.values.size == 1 and self.values[0] == 1.0:
            return IdentityCorrelator(n)
        return BandedCorrelator(n, self.values, norms if self.normalise_columns else None)


class NuToeplitz(_Toeplitz):
    """``c_t = (1 - nu)^t binom(2t, t) / 4^t``, optionally cut off after some bands.

    Without ``bands`` the stream is the exact nu family: O(t) work a step and no memory, since
    past white noise is drawn again. With bands the recursion keeps ``bands - 1`` vectors.

    Args:
        nu: damping in [0, 1); of the order of learning rate times smallest relevant curvature.
        bands: number of coefficients kept.
    """

    def __init__(self, nu: float, bands: int | None = None) -> None:
        nu_strategy_coefficients(nu, 1)  # checks nu
        if bands is not None and bands < 1:
            raise ValueError(f"bands must be at least 1, got {bands}")
        self.nu, self.band_count = nu, bands

    def coefficients(self, n: int) -> Array:
        """First column, (n,)."""
        if self.band_count is None:
            return nu_strategy_coefficients(self.nu, n)
        if self.band_count > n:
            raise ValueError(f"bands must be in [1, {n}] for {n} steps, got {self.band_count}")
        return np.pad(nu_strategy_coefficients(self.nu, self.band_count), (0, n - self.band_count))

    def correlator(self, n: int) -> Correlator:
        """Recursion if banded, else the exact convolution."""
        if self.band_count is not None:
            return super().correlator(n)
        return ConvolutionCorrelator(n, nu_noise_coefficients(self.nu, n))


class SquareRoot(NuToeplitz):
    """Square root of the prefix-sum matrix: nu = 0."""

    def __init__(self, bands: int | None = None) -> None:
        super().__init__(0.0, bands)


class AntiPGD(_Toeplitz):
    """Noise differences ``w_t - (1 - damping) w_{t-1}``; damping 0 is anti-PGD."""

    def __init__(self, damping: float = 0.0) -> None:
        if not 0.0 <= damping < 1.0:
            raise ValueError(f"damping must be in [0, 1), got {damping}")
        self.damping = damping

    def coefficients(self, n: int) -> Array:
        """``(1 - damping)^t``."""
        return np.power(1.0 - self.damping, np.arange(n))

    def correlator(self, n: int) -> Correlator:
        """Two taps."""
        return ConvolutionCorrelator(n, [1.0, -(1.0 - self.damping)])


class BandedInverse(_Toeplitz):
    """B = C^-1 is the nu family cut off after ``bands`` taps (banded inverse square root)."""

    def __init__(self, bands: int, nu: float = 0.0) -> None:
        if bands < 1:
            raise ValueError(f"bands must be at least 1, got {bands}")
        self.taps = nu_noise_coefficients(nu, bands)
        self.nu = nu

    def coefficients(self, n: int) -> Array:
        """Power-series inverse of the taps."""
        return series_inverse(self.taps, n)

    def correlator(self, n: int) -> Correlator:
        """Convolution with the taps."""
        return ConvolutionCorrelator(n, self.taps)


class BLT(_Toeplitz):
    """Buffered linear Toeplitz: ``c_0 = 1, c_t = sum_i scale_i decay_i^(t-1)``.

    Args:
        decay: in (0, 1], all different.
        scale: as many, positive.
    """

    def __init__(self, decay: list[float], scale: list[float]) -> None:
        lam, a = np.asarray(decay, dtype=np.float64), np.asarray(scale, dtype=np.float64)
        if lam.ndim != 1 or lam.size == 0 or lam.shape != a.shape:
            raise ValueError(f"decay and scale need one length, got {lam.shape} and {a.shape}")
        for value in lam.tolist():
            if not 0.0 < value <= 1.0:
                raise ValueError(f"decays must be in (0, 1], got {value}")
        if np.unique(lam).size != lam.size:
            raise ValueError(f"decays must be different, got {lam.tolist()}")
        if not np.all(np.isfinite(a)):
            raise ValueError(f"scales must be finite, got {a.tolist()}")
        self.decay, self.scale = lam, a

    def coefficients(self, n: int) -> Array:
        """First column, (n,)."""
        return buffered_coefficients(self.decay, self.scale, n)

    def correlator(self, n: int) -> Correlator:
        """One vector a buffer."""
        return BufferedCorrelator(n, self.decay, self.scale)


class OptimisedBLT(_Toeplitz):
    """BLT fitted to the number of steps; ``nu`` multiplies every decay by ``1 - nu``.

    Args:
        buffers: vectors of memory.
        nu: damping in [0, 1).
        momentum: heavy-ball momentum of the workload.
    """

    def __init__(self, buffers: int = 4, nu: float = 0.0, momentum: float = 0.0) -> None:
        nu_strategy_coefficients(nu, 1)
        if not 1 <= buffers <= 10:
            raise ValueError(f"buffers must be in [1, 10], got {buffers}")
        _check_momentum(momentum)
        self.buffers, self.nu, self.momentum = buffers, nu, momentum

    def parameters(self, n: int) -> tuple[Array, Array]:
        """Decay and scale for ``n`` steps."""
        decay, scale = optimise_buffers(n, self.buffers, self.momentum)
        return decay * (1 - self.nu), scale * (1 - self.nu)

    def coefficients(self, n: int) -> Array:
        """First column, (n,)."""
        return buffered_coefficients(*self.parameters(n), n) if n > 1 else np.ones(1)

    def correlator(self, n: int) -> Correlator:
        """One vector a buffer."""
        return BufferedCorrelator(n, *self.parameters(n)) if n > 1 else IdentityCorrelator(n)


class OptimisedBandedToeplitz(_Toeplitz):
    """Banded Toeplitz of unit norm with the least mean error at equal privacy (L-BFGS).

    Args:
        bands: number of coefficients.
        momentum: heavy-ball momentum of the workload.
        participations: participations of an example that the objective counts.
        separation: steps between them.
    """

    def __init__(self, bands: int, momentum: float = 0.0, participations: int = 1,
                 separation: int = 1) -> None:
        if bands < 1:
            raise ValueError(f"bands must be at least 1, got {bands}")
        _check_momentum(momentum)
        Participation(participations, separation)
        self.band_count, self.momentum = bands, momentum
        self.participations, self.separation = participations, separation

    def coefficients(self, n: int) -> Array:
        """First column, (n,)."""
        c = optimise_banded(n, self.band_count, self.momentum, self.participations,
                            self.separation)
        return np.pad(c, (0, n - c.size))


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
        _check_momentum(momentum)
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
        _check_dense(n)
        c = lower_factor(tree_gram(n))
        return np.where(np.abs(c) < 1e-12, 0.0, c)

    def correlator(self, n: int) -> Correlator:
        """Rows of C^-1."""
        return matrix_correlator(self.matrix(n))


STRATEGIES: dict[str, type[Strategy]] = {
    "identity": Identity, "nu": NuToeplitz, "square_root": SquareRoot, "banded": BandedToeplitz,
    "anti_pgd": AntiPGD, "banded_inverse": BandedInverse, "blt": BLT, "optimised_blt": OptimisedBLT,
    "optimised_banded": OptimisedBandedToeplitz, "optimised_dense": OptimisedDense,
    "tree": BinaryTree, "dense": Dense,
}


def parse_strategy(text: str) -> Strategy:
    """Build a strategy from words: ``nu(nu=0.05, bands=64)``, or ``tree`` without arguments.

    Raises:
        ValueError: an unknown name, or arguments that the strategy does not take.
    """
    names = ", ".join(STRATEGIES)
    try:
        call = ast.parse(text.strip(), mode="eval").body
        function = call.func if isinstance(call, ast.Call) else call
        if not isinstance(function, ast.Name) or (isinstance(call, ast.Call) and call.args):
            raise ValueError("not name(argument=value)")
        keywords = call.keywords if isinstance(call, ast.Call) else []
        arguments = {str(k.arg): ast.literal_eval(k.value) for k in keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"strategy must read like nu(nu=0.05, bands=64) or tree, got {text!r}"
        ) from error
    if function.id not in STRATEGIES:
        raise ValueError(f"strategy must be one of {names}, got {function.id!r}")
    made = STRATEGIES[function.id]
    try:
        return made(**arguments)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        takes = [name for name in inspect.signature(made).parameters]
        raise ValueError(
            f"strategy {function.id} takes {', '.join(takes) or 'no arguments'}; got {text!r}"
        ) from error


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


def _brief(value: object) -> str:
    if isinstance(value, np.ndarray):
        if value.size <= 32:
            return repr(value.tolist())
        return f"array{value.shape}:{hashlib.sha256(value.tobytes()).hexdigest()[:16]}"
    return repr(value)


def _check_dense(n: int) -> None:
    if n > MAX_DENSE:
        raise ValueError(
            f"a dense strategy matrix takes at most {MAX_DENSE} steps, got {n}: "
            "use a Toeplitz strategy"
        )


def _check_momentum(momentum: float) -> None:
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
