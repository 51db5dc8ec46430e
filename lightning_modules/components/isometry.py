"""How far a set of vectors is from orthogonal with equal norms, and what one random layer does."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from scipy.special import digamma
from torch import Tensor

__all__ = [
    "batched_isometry_gap",
    "expected_log_norm",
    "expected_one_layer_gap",
    "gap_of_singular_values",
    "isometry_gap",
    "nonzero_isometry_gap",
    "orthogonality_gap",
]


def _as_double(x: Tensor) -> Tensor:
    if x.ndim < 2:
        raise ValueError(f"x must have at least two axes (..., n, d), got shape {tuple(x.shape)}")
    return x.to(torch.float64)


def _resolution(x: Tensor, computed_in: torch.dtype | None) -> float:
    """Singular values below this share of the largest are rounding noise.

    Measured on normalised activations, the zero that centring builds in comes out at about 1 eps of
    the type they were computed in, several if the means were large beside the deviations; the
    singular values themselves are good to n eps of float64.
    """
    floor = max(x.shape[-2:]) * torch.finfo(torch.float64).eps
    if computed_in is None:
        return floor
    eps = torch.finfo(computed_in).eps
    return max(floor, eps * (16 if eps < 1e-6 else 4))


def gap_of_singular_values(singular_values: Tensor, resolution: float) -> Tensor:
    """Isometry gap from all `n` singular values of a matrix with `n` rows.

    Args:
        singular_values: float64 `(..., n)`, in descending order.
        resolution: Values up to this share of the largest count as zero.

    Returns:
        float64 `(...)`; `inf` where a value is zero, NaN where one is NaN.
    """
    largest = singular_values[..., :1]
    # a common factor cancels; scaling by the largest keeps tiny matrices away from underflow
    s = singular_values / torch.where(largest > 0, largest, torch.ones_like(largest))
    s = torch.where(s <= resolution, torch.zeros_like(s), s)
    gap = s.square().mean(-1).log() - 2 * s.log().mean(-1)
    # both logarithms of an all-zero matrix are -inf: it is rank deficient all the same
    gap = torch.where((s == 0).any(-1), torch.full_like(gap, torch.inf), gap)
    return torch.where(gap < 0, torch.zeros_like(gap), gap)


def isometry_gap(
    x: Tensor, dim_check: bool = True, computed_in: torch.dtype | None = None
) -> Tensor:
    """Isometry gap phi of the rows of a matrix, from float64 singular values.

        phi(X) = log( (1/n) sum_i mu_i ) - (1/n) sum_i log mu_i,   mu = eigenvalues of X X^T

    It is 0 if and only if the rows are orthogonal with equal norms, infinite if and only if they
    are linearly dependent, and does not change when X is scaled or its features are rotated.

    Args:
        x: `(..., n, d)`, any floating type; leading axes are a batch of matrices.
        dim_check: Whether more rows than columns, which are always dependent, are an error;
            otherwise their gap is `inf`.
        computed_in: Type in which the entries were computed: rows that are dependent up to its
            rounding count as dependent. `None` takes the entries as exact numbers.

    Returns:
        float64 `(...)`.

    Raises:
        ValueError: If `n > d` and `dim_check`, or `x` has fewer than two axes.
    """
    x, resolution = _as_double(x), _resolution(x, computed_in)
    n, d = x.shape[-2:]
    if n > d:
        if dim_check:
            raise ValueError(
                f"the isometry gap of n={n} rows in d={d} dimensions is infinite: "
                f"take at most {d} rows, or nonzero_isometry_gap for the spread of the others"
            )
        return torch.full(x.shape[:-2], torch.inf, dtype=x.dtype, device=x.device)
    return gap_of_singular_values(_singular_values(x), resolution)


# Inverse iteration overestimates the smallest singular value. From two random vectors one step is
# taken as good to a factor of 3, six steps to 1.3; what is closer to the limit is left open.
_ROUGH, _FINE = (1, 3.0), (6, 1.3)


def batched_isometry_gap(x: Tensor, computed_in: torch.dtype | None = None) -> Tensor:
    """Isometry gap of many matrices at a fraction of the cost of their singular values.

    `det(X X^T)` is the squared product of the diagonal of a triangular factor: of the LU
    decomposition of X^T where it is square, else of its QR decomposition. Both are as stable as
    the singular values and several times cheaper. The diagonal itself can hide a singular value
    of zero, which is looked for from cheap to dear, each step only where a doubt is left:

    1. `s_min / s_max <= |1^T X| / |X|_F`: rows that cancel are dependent, without a factor.
    2. `n s_min^2 / |X|_F^2 >= exp(-n phi - 1)`, since n - 1 numbers of a given sum have the largest
       product if they are equal: a small gap leaves no room for a small singular value.
    3. Inverse iteration for `s_min`, with `|X|_F / sqrt(n) <= s_max <= |X|_F`.
    4. Power iteration for `s_max`; then more steps for `s_min`.
    5. All singular values.

    Not differentiable; more rows than columns give `inf`.

    Args:
        x: `(..., n, d)`.
        computed_in: See `isometry_gap`.

    Returns:
        float64 `(...)`.
    """
    resolution = _resolution(x, computed_in)
    x = _as_double(x.detach())
    n, d = x.shape[-2:]
    if n > d:
        return isometry_gap(x, dim_check=False, computed_in=computed_in)
    matrices = x.reshape(-1, n, d)
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1))
    dependent = torch.linalg.vector_norm(matrices.sum(-2), dim=-1) < resolution * norm
    if not bool(dependent.any()):
        return _factored_gap(matrices, norm, resolution, computed_in).reshape(x.shape[:-2])
    gap = torch.full_like(norm, torch.inf)
    rest = ~dependent
    if bool(rest.any()):
        gap[rest] = _factored_gap(matrices[rest], norm[rest], resolution, computed_in)
    return gap.reshape(x.shape[:-2])


def _factored_gap(
    matrices: Tensor, norm: Tensor, resolution: float, computed_in: torch.dtype | None
) -> Tensor:
    """Steps 2 to 5 of `batched_isometry_gap` for `(batch, n, d)` and Frobenius norms `(batch,)`."""
    n = matrices.shape[-2]
    factor = _Triangular.of(matrices)
    logs = factor.matrix.diagonal(dim1=-2, dim2=-1).abs().log()
    gap = (2 * norm.log() - math.log(n) - 2 * logs.mean(-1)).clamp_min(0.0)
    safe = norm.log().abs() < 300  # squares neither under- nor overflow
    # comparisons are False for NaN, which leaves a doubt
    regular = safe & (torch.exp(-(n * gap + 1) / 2) > _ROUGH[1] * resolution * math.sqrt(n))
    if bool(regular.all()):
        return gap
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(n, 2, dtype=norm.dtype, generator=generator).to(norm.device)
    smallest = torch.where(safe, factor.smallest(start, _ROUGH[0]), torch.nan)
    dependent = smallest < resolution * norm / math.sqrt(n)
    regular |= smallest > _ROUGH[1] * resolution * norm
    gap[dependent] = torch.inf
    index = (~(regular | dependent)).nonzero().flatten()
    if len(index):
        largest = _largest(matrices[index], start, _FINE[0])
        index, largest = _undecided(gap, index, smallest[index], largest, resolution, _ROUGH[1])
    if len(index):
        finer = factor.take(index).smallest(start, _FINE[0])
        finer = torch.where(safe[index], finer, torch.nan)
        index, _ = _undecided(gap, index, finer, largest, resolution, _FINE[1])
    if len(index):
        gap[index] = isometry_gap(matrices[index], computed_in=computed_in)
    return gap


def _undecided(
    gap: Tensor,
    index: Tensor,
    smallest: Tensor,
    largest: Tensor,
    resolution: float,
    margin: float,
) -> tuple[Tensor, Tensor]:
    """Enters `inf` for the dependent; returns the entries of `index`, `largest` left in doubt."""
    ratio = smallest / largest
    dependent = ratio < resolution
    gap[index[dependent]] = torch.inf
    left = ~(dependent | (ratio > margin * resolution))
    return index[left], largest[left]


class _Triangular(NamedTuple):
    """Factors of a batch: packed LU of X^T with pivots, or R of its QR decomposition."""

    matrix: Tensor
    pivots: Tensor | None

    @classmethod
    def of(cls, matrices: Tensor) -> _Triangular:
        if matrices.shape[-2] == matrices.shape[-1]:
            # of the transpose, which lies in memory the way LAPACK wants it
            packed, pivots, _ = torch.linalg.lu_factor_ex(matrices.mT)
            return cls(packed, pivots)
        return cls(torch.linalg.qr(matrices.mT, mode="r").R, None)

    def take(self, index: Tensor) -> _Triangular:
        pivots = None if self.pivots is None else self.pivots[index]
        return _Triangular(self.matrix.mT[index].mT, pivots)  # the columns stay contiguous

    def smallest(self, start: Tensor, steps: int) -> Tensor:
        """At least the smallest singular value, and next to it if far below the others."""
        w = start.expand(len(self.matrix), *start.shape)
        for _ in range(steps):
            if self.pivots is None:
                v = torch.linalg.solve_triangular(self.matrix, _normalised(w), upper=True)
                w = torch.linalg.solve_triangular(self.matrix.mT, _normalised(v), upper=False)
            else:
                v = torch.linalg.lu_solve(self.matrix, self.pivots, _normalised(w))
                v = _normalised(v)
                w = torch.linalg.lu_solve(self.matrix, self.pivots, v, adjoint=True)
        bound: Tensor = torch.linalg.vector_norm(w, dim=-2).amax(-1).reciprocal()
        return bound


def _largest(matrices: Tensor, start: Tensor, steps: int) -> Tensor:
    """At most the largest singular value, and not far below it (power iteration)."""
    w = start.expand(len(matrices), *start.shape)
    for _ in range(steps):
        v = matrices.mT @ _normalised(w)
        w = matrices @ _normalised(v)
    bound: Tensor = torch.linalg.vector_norm(w, dim=-2).amax(-1)
    return bound


def _normalised(columns: Tensor) -> Tensor:
    unit: Tensor = columns / torch.linalg.vector_norm(columns, dim=-2, keepdim=True)
    return unit


def nonzero_isometry_gap(x: Tensor, computed_in: torch.dtype | None = None) -> Tensor:
    """Spread of the non-zero part of the spectrum, defined for any shape and rank.

    The formula of `isometry_gap` over the non-zero eigenvalues alone. It is *not* the isometry
    gap: dependent rows do not make it infinite. It serves where a zero is built in, as with more
    rows than columns and behind a norm that subtracts the batch mean (rank `n - 1`).

    Args:
        x: `(..., n, d)`.
        computed_in: Type in which the entries were computed, default that of `x`.

    Returns:
        float64 `(...)`; NaN for a matrix of zeros.
    """
    s = _singular_values(_as_double(x))
    if computed_in is None and x.is_floating_point():
        computed_in = x.dtype
    kept = (s > _resolution(x, computed_in) * s[..., :1]).to(s.dtype)
    count = kept.sum(-1)
    logs = torch.where(kept > 0, s, torch.ones_like(s)).log()
    gap: Tensor = ((s.square() * kept).sum(-1) / count).log() - 2 * logs.sum(-1) / count
    return gap


def _singular_values(x: Tensor) -> Tensor:
    """Singular values, NaN for a matrix with an entry that is not finite (LAPACK would raise)."""
    finite = torch.isfinite(x).all(-1).all(-1)
    if bool(finite.all()):
        values: Tensor = torch.linalg.svdvals(x)
        return values
    s = torch.linalg.svdvals(torch.where(finite[..., None, None], x, torch.zeros_like(x)))
    return torch.where(finite[..., None], s, torch.full_like(s, torch.nan))


def orthogonality_gap(x: Tensor) -> Tensor:
    """Frobenius distance of the normalised Gram matrix from that of orthogonal rows.

        || X X^T / ||X||_F^2 - I / n ||_F

    Args:
        x: `(..., n, d)`.

    Returns:
        float64 `(...)`, in [0, 1); NaN for a matrix of zeros.
    """
    x = _as_double(x)
    n = x.shape[-2]
    gram = x @ x.mT
    total = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    eye = torch.eye(n, dtype=x.dtype, device=x.device)
    gap: Tensor = torch.linalg.matrix_norm(gram / total - eye / n)
    return gap


# ---------------------------------------------------------------------- one layer, exactly

# Trapezoidal rule in log t. The integrand is analytic for |Im log t| < pi/2, so the error falls
# like exp(-pi^2 / step), here 1e-17. On the left it grows like t, on the right it decays at least
# like t^(-1/2).
_LOG_T, _STEP = (-45.0, 95.0), 0.25


def expected_log_norm(eigenvalues: Tensor) -> Tensor:
    """Mean of log(sum_i lam_i w_i^2) over w uniform on the unit sphere.

    Equals `E log(sum_i lam_i g_i^2) - digamma(d/2) - log 2` with g standard normal, where

        E log(sum_i lam_i g_i^2) = integral_0^inf ( e^-t - prod_i (1 + 2 t lam_i)^(-1/2) ) / t dt

    With lam scaled to mean 1 it is never positive, and 0 only for equal eigenvalues.

    Args:
        eigenvalues: `(..., d)`, not negative, not all zero.

    Returns:
        float64 `(...)`, accurate to about 1e-14.
    """
    lam = eigenvalues.to(torch.float64)
    d = lam.shape[-1]
    mean = lam.mean(-1, keepdim=True)
    log_t = torch.arange(*_LOG_T, _STEP, dtype=torch.float64, device=lam.device)
    t = log_t.exp()
    log_product = -0.5 * torch.log1p(2 * t * (lam / mean)[..., None]).sum(-2)
    # the difference of two exponentials, without cancellation where both are near 1
    integral = _STEP * (torch.expm1(-t) - torch.expm1(log_product)).sum(-1)
    constant = float(digamma(d / 2)) + math.log(2)
    log_norm: Tensor = integral - constant + mean[..., 0].log()
    return log_norm


def expected_one_layer_gap(x: Tensor, computed_in: torch.dtype | None = None) -> Tensor:
    """Exact mean isometry gap behind one random layer: Haar-orthogonal map, then row-wise norm.

        E phi(out) = phi(in) + E log(sum_i lam_i w_i^2),   w uniform on the sphere

    with lam the eigenvalues of X X^T divided by their mean. Holds for square X of full rank, the
    norm without centring and the identity activation; the second term is never positive.

    Args:
        x: `(..., d, d)` input of the layer.
        computed_in: See `isometry_gap`.

    Returns:
        float64 `(...)`; `inf` where X is singular.

    Raises:
        ValueError: If X is not square.
    """
    x, resolution = _as_double(x), _resolution(x, computed_in)
    n, d = x.shape[-2:]
    if n != d:
        raise ValueError(f"the exact mean gap needs as many rows as features, got n={n}, d={d}")
    s = _singular_values(x)
    largest = s[..., :1]
    s = s / torch.where(largest > 0, largest, torch.ones_like(largest))
    mu = s.square()
    mean = mu.mean(-1, keepdim=True)
    lam = mu / torch.where(mean > 0, mean, torch.ones_like(mean))
    return gap_of_singular_values(s, resolution) + expected_log_norm(lam)
