"""Toeplitz strategies, and all strategies by name.

Coefficients are used as they are; most start with 1, so a noise multiplier is in units of the
clip norm over a column norm above 1.
"""

from __future__ import annotations

import ast
import inspect

import numpy as np
from numpy.typing import NDArray

from lightning_modules.components.privacy.correlation import (
    BandedCorrelator,
    BufferedCorrelator,
    ConvolutionCorrelator,
    Correlator,
    IdentityCorrelator,
)
from lightning_modules.components.privacy.dense_strategies import (
    BinaryTree,
    Dense,
    OptimisedDense,
)
from lightning_modules.components.privacy.optimise import (
    buffered_coefficients,
    optimise_banded,
    optimise_buffers,
)
from lightning_modules.components.privacy.participation import Participation
from lightning_modules.components.privacy.power_series import (
    nu_noise_coefficients,
    nu_strategy_coefficients,
    series_inverse,
    toeplitz,
)
from lightning_modules.components.privacy.strategy import (
    Strategy,
    ToeplitzStrategy,
    check_dense,
    check_momentum,
)

Array = NDArray[np.float64]


class Identity(ToeplitzStrategy):
    """C = I: independent noise, DP-SGD."""

    def coefficients(self, n: int) -> Array:
        """(1, 0, 0, ...)."""
        return np.asarray(np.eye(1, n)[0], dtype=np.float64)


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
        check_dense(n)
        c = toeplitz(self._column(n), n)
        return c / np.linalg.norm(c, axis=0) if self.normalise_columns else c

    def correlator(self, n: int) -> Correlator:
        """Recursion over the bands; row t is scaled by the norm of column t if normalised."""
        column = self._column(n)
        norms = np.sqrt(np.cumsum(np.square(column)))[::-1]
        if self.values.size == 1 and self.values[0] == 1.0:
            return IdentityCorrelator(n)
        return BandedCorrelator(n, self.values, norms if self.normalise_columns else None)


class NuToeplitz(ToeplitzStrategy):
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


class AntiPGD(ToeplitzStrategy):
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


class BandedInverse(ToeplitzStrategy):
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


class BLT(ToeplitzStrategy):
    """Buffered linear Toeplitz: ``c_0 = 1, c_t = sum_i scale_i decay_i^(t-1)``.

    Args:
        decay: in (0, 1], all different.
        scale: as many, finite; amplification needs coefficients >= 0.
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


class OptimisedBLT(ToeplitzStrategy):
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
        check_momentum(momentum)
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


class OptimisedBandedToeplitz(ToeplitzStrategy):
    """Banded Toeplitz of unit norm with the least mean error at equal privacy (L-BFGS).

    Args:
        bands: number of coefficients.
        momentum: heavy-ball momentum of the workload.
        participations: participations of an example that the objective counts.
        separation: steps between them.
    """

    def __init__(
        self, bands: int, momentum: float = 0.0, participations: int = 1, separation: int = 1
    ) -> None:
        if bands < 1:
            raise ValueError(f"bands must be at least 1, got {bands}")
        check_momentum(momentum)
        Participation(participations, separation)
        self.band_count, self.momentum = bands, momentum
        self.participations, self.separation = participations, separation

    def coefficients(self, n: int) -> Array:
        """First column, (n,)."""
        c = optimise_banded(n, self.band_count, self.momentum, self.participations, self.separation)
        return np.pad(c, (0, n - c.size))


STRATEGIES: dict[str, type[Strategy]] = {
    "identity": Identity,
    "nu": NuToeplitz,
    "square_root": SquareRoot,
    "banded": BandedToeplitz,
    "anti_pgd": AntiPGD,
    "banded_inverse": BandedInverse,
    "blt": BLT,
    "optimised_blt": OptimisedBLT,
    "optimised_banded": OptimisedBandedToeplitz,
    "optimised_dense": OptimisedDense,
    "tree": BinaryTree,
    "dense": Dense,
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
        takes = list(inspect.signature(made).parameters)
        raise ValueError(
            f"strategy {function.id} takes {', '.join(takes) or 'no arguments'}; got {text!r}"
        ) from error
