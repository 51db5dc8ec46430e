"""Distances between two sets of samples or of their features."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

TABLE_BYTES = 2**26
"""Size of the part of a pairwise table that is in memory at a time."""


class PrecisionRecall(NamedTuple):
    """Share of generated samples inside the reference manifold, and the reverse."""

    precision: float
    recall: float


def frechet_from_moments(mean1: Tensor, cov1: Tensor, mean2: Tensor, cov2: Tensor) -> Tensor:
    """|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), the root's trace by eigenvalues of C1 C2.

    Args:
        mean1: ``(d,)``.
        cov1: ``(d, d)`` with divisor N - 1.
        mean2: ``(d,)``.
        cov2: ``(d, d)``.
    """
    root = torch.linalg.eigvals(cov1 @ cov2).sqrt().real.sum()
    distance: Tensor = ((mean1 - mean2) ** 2).sum() + cov1.trace() + cov2.trace() - 2 * root
    return distance


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean ``(d,)`` and covariance ``(d, d)`` (divisor N - 1) of rows, in float64.

    Warns if there are fewer rows than needed for a covariance of full rank.
    """
    rows = features.double()
    if len(rows) <= rows.shape[1]:
        warnings.warn(
            f"{len(rows)} samples of {rows.shape[1]} features: the covariance has not full rank "
            "and the Fréchet distance is biased; use more samples",
            stacklevel=3,
        )
    return rows.mean(0), torch.cov(rows.T)


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Fréchet distance of two sets of rows ``(n, d)``, ``(m, d)``, in float64."""
    return float(frechet_from_moments(*moments(first), *moments(second)))


def _chunks(rows: Tensor, columns: int) -> tuple[Tensor, ...]:
    """Rows in parts whose float64 tables with so many columns stay below `TABLE_BYTES`."""
    return torch.split(rows, max(1, TABLE_BYTES // (8 * columns)))


def _squared(rows: Tensor, others: Tensor) -> Iterator[Tensor]:
    """Squared distances ``(chunk, m)``, a chunk of rows at a time."""
    lengths = (others**2).sum(1)
    for part in _chunks(rows, len(others)):
        # |a|^2 + |b|^2 - 2 a b, in the memory of one table
        table = torch.addmm(lengths[None, :], part, others.T, alpha=-2)
        yield table.add_((part**2).sum(1)[:, None]).clamp_(min=0)


def _radius(rows: Tensor, k: int) -> Tensor:
    # The nearest of all is the row itself.
    parts = [part.topk(k + 1, dim=1, largest=False).values for part in _squared(rows, rows)]
    return torch.cat(parts)[:, k]


def precision_recall(reference: Tensor, generated: Tensor, k: int = 3) -> PrecisionRecall:
    """k-nearest-neighbour precision and recall of feature rows ``(n, d)``, ``(m, d)``.

    Raises:
        ValueError: If a set has no more than k rows.
    """
    if min(len(reference), len(generated)) <= k:
        raise ValueError(
            f"precision and recall with k = {k} need more than {k} samples in both sets, "
            f"got {len(reference)} and {len(generated)}"
        )
    reference, generated = reference.double(), generated.double()
    inside, reached = _radius(reference, k), _radius(generated, k)
    precise = [(part <= inside[None, :]).any(1) for part in _squared(generated, reference)]
    recalled = [(part <= reached[None, :]).any(1) for part in _squared(reference, generated)]
    precision, recall = (torch.cat(each).double().mean() for each in (precise, recalled))
    return PrecisionRecall(float(precision), float(recall))


def _quantiles(ordered: Tensor, count: int = 512) -> Tensor:
    """Evenly spaced quantiles ``(count, p)`` of sorted columns ``(n, p)``."""
    # torch.quantile refuses more than 16 million values.
    levels = (torch.arange(count, dtype=torch.float64, device=ordered.device) + 0.5) / count
    places = levels * (len(ordered) - 1)
    low = places.long()
    share = (places - low)[:, None]
    return ordered[low] * (1 - share) + ordered[(low + 1).clamp(max=len(ordered) - 1)] * share


def sliced_wasserstein(
    first: Tensor, second: Tensor, projections: int = 256, seed: int = 0
) -> float:
    """Mean squared 1-D Wasserstein-2 distance over random directions.

    Args:
        first: ``(n, ...)``.
        second: ``(m, ...)``; quantiles are compared if the sizes differ.
        projections: Number of directions.
        seed: Of the directions.
    """
    a, b = first.flatten(1).double(), second.flatten(1).double()
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(a.shape[1], projections, generator=generator, dtype=torch.float64)
    directions = (directions / directions.norm(dim=0)).to(a.device)
    left, right = (a @ directions).sort(0).values, (b @ directions).sort(0).values
    if len(left) != len(right):
        left, right = _quantiles(left), _quantiles(right)
    return float(((left - right) ** 2).mean())


def kernel_distance(first: Tensor, second: Tensor) -> float:
    """Unbiased squared MMD of feature rows with the kernel (x.y / d + 1)^3 (KID on all rows)."""
    a, b = first.double(), second.double()

    def total(x: Tensor, y: Tensor) -> Tensor:
        parts = [(part @ y.T).div_(x.shape[1]).add_(1).pow_(3).sum() for part in _chunks(x, len(y))]
        return torch.stack(parts).sum()

    def within(x: Tensor) -> Tensor:
        own = (((x * x).sum(1) / x.shape[1] + 1) ** 3).sum()
        return (total(x, x) - own) / (len(x) * (len(x) - 1))

    return float(within(a) + within(b) - 2 * total(a, b) / (len(a) * len(b)))


def inception_score(probabilities: Tensor, split: int = 5000) -> float:
    """Mean over splits of exp(mean KL(p(y|x) || p(y))), of class probabilities ``(n, k)``."""
    scores = []
    for rows in torch.split(probabilities.double(), split):
        marginal = rows.mean(0, keepdim=True)
        kl = torch.special.xlogy(rows, rows) - rows * marginal.clamp(min=1e-300).log()
        scores.append(kl.sum(1).mean().exp())
    return float(torch.stack(scores).mean())
