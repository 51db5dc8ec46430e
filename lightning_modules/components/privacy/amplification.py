"""Amplification by Poisson sampling for matrix mechanisms: conditional composition (MMCC).

Released: ``C G + sigma S Z`` with lower-triangular, entrywise non-negative C. An example takes
part in every step independently with probability p. Row i of the mechanism, given what was
released before, is dominated by a mixture of Gaussians in which the example is present at step j
with probability ``p_tilde_ij >= p``; a failure probability ``delta_1`` pays for bounding it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from lightning_modules.components.privacy import tails
from lightning_modules.components.privacy.gaussian import gaussian_epsilon
from lightning_modules.components.privacy.mixture import Mixture, bernoulli_sum
from lightning_modules.components.privacy.pld import PrivacyLoss, compose, discretise
from lightning_modules.components.privacy.power_series import toeplitz

Array = NDArray[np.float64]
Tail = Literal["paper", "joint", "conservative"]
MAX_DENSE = 5000


def check_strategy_matrix(matrix: ArrayLike) -> Array:
    """The matrix as float64, if it's a strategy that MMCC covers.

    Raises:
        ValueError: not square, not lower triangular, negative, NaN, zero diagonal, or too large.
    """
    c = np.asarray(matrix, dtype=np.float64)
    if c.ndim != 2 or c.shape[0] != c.shape[1] or c.shape[0] < 1:
        raise ValueError(f"the strategy matrix must be square and not empty, got shape {c.shape}")
    if c.shape[0] > MAX_DENSE:
        raise ValueError(
            f"a dense strategy takes at most {MAX_DENSE} steps, got {c.shape[0]}; use a banded "
            "Toeplitz strategy (any number of steps)"
        )
    for bad, what in (
        (~np.isfinite(c), "is not finite"),
        (np.triu(c, 1) != 0, "lies above the diagonal: C must be lower triangular"),
        (c < 0, "is negative: conditional composition needs C >= 0"),
    ):
        if bad.any():
            i, j = (int(v) for v in np.argwhere(bad)[0])
            raise ValueError(f"strategy matrix entry ({i}, {j}) = {c[i, j]} {what}")
    if np.any(np.diag(c) == 0):
        i = int(np.nonzero(np.diag(c) == 0)[0][0])
        raise ValueError(f"strategy matrix entry ({i}, {i}) is zero: the diagonal must be positive")
    return c


def check_parameters(n: int, p: float, sigma: float, delta: float, delta1: float | None) -> None:
    """One-line errors for the scalars of every accountant."""
    if n < 1:
        raise ValueError(f"the number of steps must be at least 1, got {n}")
    if not 0.0 < p <= 1.0:
        raise ValueError(f"the sampling probability must be in (0, 1], got {p}")
    if not (sigma > 0.0 and math.isfinite(sigma)):
        raise ValueError(f"sigma must be positive and finite, got {sigma}")
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must be in (0, 1), got {delta}")
    if delta1 is not None and not 0.0 < delta1 < delta:
        raise ValueError(f"delta1 must be in (0, delta={delta}), got {delta1}")


def conditional_probabilities(
    matrix: ArrayLike,
    p: float,
    sigma: float,
    delta1: float,
    *,
    tail: Tail = "paper",
    method: tails.Method = "auto",
    pairs: int | None = None,
) -> Array:
    """``p_tilde_ij``: bound on the chance that the example took part in step j, seen at row i.

    Args:
        matrix: strategy C, (n, n), lower triangular, >= 0.
        p: sampling probability.
        sigma: noise multiplier in units of the clip norm.
        delta1: failure probability spent on all tail bounds together.
        tail: "paper" bounds sampling and noise separately; "joint" bounds their sum (never
            worse); "conservative" holds for contributions of any sign.
        method: how quantiles of the sampling are found (see :mod:`tails`).
        pairs: number of bounds that share ``delta1``; default: non-zeros below the diagonal.

    Returns:
        (n, n) float64; p on the diagonal, 1 where C is zero or above the diagonal.
    """
    c = check_strategy_matrix(matrix)
    n = c.shape[0]
    out = np.ones((n, n))
    np.fill_diagonal(out, p)
    total = int(np.count_nonzero(np.tril(c, -1))) if pairs is None else pairs
    if total == 0 or p == 1.0:
        return out
    failure = delta1 / total if tail == "joint" else delta1 / (2 * total)
    z = float(-ndtri(failure))
    gram = np.zeros((n, n))  # <c_j, c_j'> over the rows seen so far
    known: dict[bytes, float] = {}
    for i in range(1, n):
        seen = np.nonzero(c[i - 1, :i])[0]
        gram[np.ix_(seen, seen)] += np.outer(c[i - 1, seen], c[i - 1, seen])
        columns = np.nonzero(c[i, :i])[0]
        if columns.size == 0:
            continue
        overlaps = gram[columns, :i]
        square = gram[columns, columns]
        norm = np.sqrt(square)
        if tail == "joint":
            reach = np.zeros(columns.size)
            for k in np.nonzero(norm)[0]:
                key = _key(overlaps[k], norm[k])
                if key not in known:
                    chosen = _method(method, overlaps[k])
                    known[key] = tails.joint_quantile(
                        overlaps[k], p, sigma * float(norm[k]), failure, chosen
                    )
                reach[k] = known[key]
            exponent = (2 * reach - square) / (2 * sigma**2)
        else:
            reach = _quantiles(overlaps, p, failure, method, known)
            if tail == "conservative":
                reach = reach + overlaps.sum(axis=1) - square
            exponent = z * norm / sigma + (2 * reach - square) / (2 * sigma**2)
        # p e / (p e + 1 - p) without overflow; never below p, which only a sigma far below the
        # column norm could bring about.
        odds = math.log(p) - math.log1p(-p) + np.maximum(exponent, 0.0)
        out[i, columns] = 1.0 / (1.0 + np.exp(-np.minimum(odds, 700.0)))
    return out


def _method(method: tails.Method, values: Array) -> tails.Method:
    if method != "auto":
        return method
    terms = int(np.count_nonzero(values))
    return "exact" if terms <= tails.EXACT_TERMS else "grid" if terms <= 64 else "chernoff"


def _quantiles(
    overlaps: Array, p: float, failure: float, method: tails.Method, known: dict[bytes, float]
) -> Array:
    """Upper quantile of every row's weighted Bernoulli sum; equal rows are computed once."""
    chosen = [_method(method, row) for row in overlaps]
    if all(name == "chernoff" for name in chosen):
        return tails.chernoff(overlaps, p, failure)
    reach = np.zeros(len(overlaps))
    for k, name in enumerate(chosen):
        key = _key(overlaps[k], 0.0)
        if key not in known:
            known[key] = tails.quantile(overlaps[k], p, failure, name)
        reach[k] = known[key]
    return reach


def _key(row: Array, extra: float) -> bytes:
    return np.append(np.sort(row[row > 0]), extra).tobytes()


@dataclass(frozen=True)
class AmplifiedGuarantee:
    """What the accountant found.

    Attributes:
        epsilon: the guarantee: (epsilon, delta)-DP.
        delta: total failure probability.
        delta1: part of it spent on tail bounds (0 for the identity and for p = 1).
        eps_remove: epsilon of the direction in which the example is removed.
        eps_add: epsilon of the direction in which it is added.
        eps_rowwise_p: yardstick, NOT a guarantee: the value if rows were independent.
        p_tilde_mean: mean of the bounds on the conditional probabilities below the diagonal.
        p_tilde_max: their largest.
        distinct_rows: privacy-loss distributions that were built.
        seconds: time taken.
    """

    epsilon: float
    delta: float
    delta1: float
    eps_remove: float
    eps_add: float
    eps_rowwise_p: float
    p_tilde_mean: float
    p_tilde_max: float
    distinct_rows: int
    seconds: float


class PoissonAccountant:
    """(epsilon, delta) of a matrix mechanism under Poisson sampling, for every prefix of the run.

    Args:
        strategy: first column of a Toeplitz C (one row of numbers, zero padded to ``n``), or a
            square matrix C.
        n: number of steps.
        p: sampling probability of every example in every step.
        sigma: noise multiplier (noise standard deviation before C^-1, in units of the clip norm).
        delta: total failure probability.
        delta1: part spent on tail bounds; default delta / 2.
        tail: see :func:`conditional_probabilities`.
        method: see :func:`conditional_probabilities`.
        step: grid spacing h of privacy losses, in nats.
        law_step: rounding of row sums, relative to the largest entry, beyond 10 non-zeros.
    """

    def __init__(
        self,
        strategy: ArrayLike,
        n: int,
        p: float,
        sigma: float,
        delta: float,
        delta1: float | None = None,
        *,
        tail: Tail = "paper",
        method: tails.Method = "auto",
        step: float = 1e-4,
        law_step: float = 1e-3,
    ) -> None:
        started = time.perf_counter()
        check_parameters(n, p, sigma, delta, delta1)
        if tail not in ("paper", "joint", "conservative"):
            raise ValueError(f"tail must be paper, joint or conservative, got {tail!r}")
        self.n, self.p, self.sigma, self.delta, self.step = n, p, sigma, delta, step
        given = np.asarray(strategy, dtype=np.float64)
        if given.ndim == 1:
            column = np.trim_zeros(given[:n], "b")
            bands = max(1, column.size)
            # Rows 2b - 2, 2b - 1, ... of a b-banded Toeplitz matrix see the same history.
            size = min(n, 2 * bands - 1)
            matrix = check_strategy_matrix(toeplitz(column, size))
            pairs = sum(n - lag for lag in range(1, bands) if column[lag] != 0)
            self._last = size - 1
            total = float(np.sum(np.square(np.cumsum(np.pad(column, (0, n - bands))))))
        else:
            matrix = check_strategy_matrix(given)
            if matrix.shape[0] != n:
                raise ValueError(f"the strategy has {matrix.shape[0]} steps, the run {n}")
            pairs = int(np.count_nonzero(np.tril(matrix, -1)))
            self._last = n - 1
            total = float(np.sum(np.square(matrix.sum(axis=1))))
        self.matrix = matrix
        self.all_in_norm = math.sqrt(total)
        self.delta1 = 0.0 if pairs == 0 or p == 1.0 else (delta / 2 if delta1 is None else delta1)
        self.p_tilde = conditional_probabilities(
            matrix, p, sigma, self.delta1 or 1.0, tail=tail, method=method, pairs=pairs
        )
        self._law_step = law_step
        self._rows = self._build(self.p_tilde) if p < 1.0 else []
        self.seconds = time.perf_counter() - started

    def _build(self, probabilities: Array) -> list[PrivacyLoss]:
        rows: list[PrivacyLoss] = []
        known: dict[bytes, PrivacyLoss] = {}
        for i, row in enumerate(self.matrix):
            used = np.nonzero(row[: i + 1])[0]
            values, chances = row[used], probabilities[i, used]
            key = values.tobytes() + chances.tobytes()
            if key not in known:
                points, mass, lost = bernoulli_sum(values, chances, step=self._law_step)
                known[key] = discretise(Mixture(points, mass, self.sigma, lost), self.step)
            rows.append(known[key])
        return rows

    def _composed(self, rows: list[PrivacyLoss], steps: int) -> PrivacyLoss:
        counts: dict[int, int] = {}
        by_id = {id(row): row for row in rows}
        for i in range(min(steps, self._last + 1)):
            counts[id(rows[i])] = counts.get(id(rows[i]), 0) + 1
        if steps > self._last + 1:
            counts[id(rows[self._last])] += steps - self._last - 1
        parts = [(by_id[key], count) for key, count in counts.items()]
        return compose(parts, tilt=tilt_for(parts, self.delta - self.delta1))

    def loss(self, steps: int | None = None) -> PrivacyLoss:
        """Composed privacy loss of the first ``steps`` steps (default: all).

        Raises:
            ValueError: more steps than the run has, or p = 1 (use :meth:`epsilon`).
        """
        steps = self._steps(steps)
        if self.p == 1.0:
            raise ValueError("p = 1 is the Gaussian mechanism and has no discretised loss here")
        return self._composed(self._rows, steps)

    def _steps(self, steps: int | None) -> int:
        steps = self.n if steps is None else steps
        if not 0 <= steps <= self.n:
            raise ValueError(f"steps must be in [0, {self.n}], got {steps}")
        return steps

    def epsilon(self, steps: int | None = None) -> float:
        """Epsilon at ``delta`` of the first ``steps`` steps; delta1 is that of the whole run."""
        steps = self._steps(steps)
        if steps == 0:
            return 0.0
        if self.p == 1.0:
            return gaussian_epsilon(self._shift(steps) / self.sigma, self.delta)
        return self.loss(steps).epsilon(self.delta - self.delta1)

    def _shift(self, steps: int) -> float:
        if steps == self.n:
            return self.all_in_norm
        sums = self.matrix.sum(axis=1)
        sums = np.pad(sums, (0, max(0, steps - sums.size)), mode="edge")[:steps]
        return float(np.linalg.norm(sums))

    def guarantee(self) -> AmplifiedGuarantee:
        """Everything that the report prints, the yardstick included."""
        started = time.perf_counter()
        if self.p == 1.0:
            remove = add = rowwise = self.epsilon()
        else:
            spend = self.delta - self.delta1
            loss = self.loss()
            remove, add = loss.remove.epsilon(spend), loss.add.epsilon(spend)
            rowwise = max(remove, add)
            if self.delta1:
                flat = np.where(self.matrix > 0, self.p, 1.0)
                rowwise = compose_all(self, flat).epsilon(self.delta)
        below = self.p_tilde[np.tril(self.matrix, -1) > 0]
        return AmplifiedGuarantee(
            epsilon=max(remove, add),
            delta=self.delta,
            delta1=self.delta1,
            eps_remove=remove,
            eps_add=add,
            eps_rowwise_p=rowwise,
            p_tilde_mean=float(below.mean()) if below.size else self.p,
            p_tilde_max=float(below.max()) if below.size else self.p,
            distinct_rows=len({id(row) for row in self._rows}),
            seconds=self.seconds + time.perf_counter() - started,
        )


def compose_all(accountant: PoissonAccountant, probabilities: Array) -> PrivacyLoss:
    """Composition of all rows of ``accountant`` with other conditional probabilities."""
    return accountant._composed(accountant._build(probabilities), accountant.n)


def tilt_for(parts: list[tuple[PrivacyLoss, int]], delta: float) -> float:
    """Tilting order for the composition; 0 unless ``delta`` is too small for plain transforms."""
    if delta >= 1e-10:
        return 0.0
    orders = np.geomspace(0.01, 1000.0, 60)
    moments = sum(count * loss.remove.log_moments(orders) for loss, count in parts)
    best = int(np.argmin((np.asarray(moments) - math.log(delta)) / orders))
    return float(orders[best])


def mmcc(
    strategy: ArrayLike,
    n: int,
    p: float,
    sigma: float,
    delta: float,
    delta1: float | None = None,
    *,
    tail: Tail = "paper",
    method: tails.Method = "auto",
    step: float = 1e-4,
    law_step: float = 1e-3,
) -> AmplifiedGuarantee:
    """(epsilon, delta) guarantee of a matrix mechanism under Poisson sampling.

    Arguments as for :class:`PoissonAccountant`.
    """
    return PoissonAccountant(
        strategy, n, p, sigma, delta, delta1, tail=tail, method=method, step=step, law_step=law_step
    ).guarantee()


def best_split(
    strategy: ArrayLike,
    n: int,
    p: float,
    sigma: float,
    delta: float,
    shares: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 0.5, 0.7),
    *,
    tail: Tail = "paper",
    step: float = 1e-3,
) -> float:
    """``delta1`` of the least epsilon among ``shares * delta``.

    Every split is a valid guarantee; the choice depends on public quantities alone, so it costs
    nothing.
    """
    check_parameters(n, p, sigma, delta, None)
    found = {
        share * delta: PoissonAccountant(
            strategy, n, p, sigma, delta, share * delta, tail=tail, step=step
        ).epsilon()
        for share in shares
    }
    return min(found, key=lambda delta1: found[delta1])
