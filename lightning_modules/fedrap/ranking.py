"""Rank of a held-out item among candidates, and what follows from ranks."""

from __future__ import annotations

import torch
from torch import Tensor


def rank_among(target: Tensor, others: Tensor) -> Tensor:
    """Rank of one score among others, from 1; ties count against it.

    Args:
        target: ``(n,)``.
        others: ``(n, candidates)`` without the target.

    Returns:
        ``(n,)`` int64.
    """
    return 1 + (others >= target[:, None]).sum(1)


def rank_in_catalogue(scores: Tensor, target: Tensor, excluded: Tensor) -> Tensor:
    """Rank of the target among all items that are not excluded; ties count against it.

    Args:
        scores: ``(n, items)``.
        target: Item ``(n,)``, a candidate even if it is excluded.
        excluded: ``(n, items)`` bool.
    """
    own = scores.gather(1, target[:, None])
    beaten = (scores >= own) & ~excluded
    beaten.scatter_(1, target[:, None], False)
    return 1 + beaten.sum(1)


def hits(rank: Tensor, top_k: int) -> Tensor:
    """1 where the rank is at most ``top_k``; the mean is HR@K."""
    return (rank <= top_k).double()


def gains(rank: Tensor, top_k: int) -> Tensor:
    """``log 2 / log(rank + 1)`` for hits, else 0; the mean is NDCG@K with one relevant item."""
    return torch.where(rank <= top_k, 1.0 / torch.log2(rank.double() + 1), 0.0)


def excluded_mask(offsets: Tensor, items: Tensor, catalogue: int) -> Tensor:
    """Ragged lists of items as a mask ``(n, catalogue)`` bool."""
    counts = offsets.diff()
    owner = torch.repeat_interleave(torch.arange(len(counts), device=items.device), counts)
    mask = torch.zeros((len(counts), catalogue), dtype=torch.bool, device=items.device)
    mask[owner, items] = True
    return mask


def bootstrap_interval(
    values: Tensor, level: float = 0.95, draws: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean over users.

    Args:
        values: One value per user ``(n,)``, as from `hits` or `gains`.
        level: Confidence level.
        draws: Resamples.
        seed: Of the resamples.
    """
    generator = torch.Generator().manual_seed(seed)
    values = values.cpu().double()
    counts = torch.multinomial(
        torch.ones(len(values)), len(values) * draws, replacement=True, generator=generator
    )
    means = values[counts].view(draws, len(values)).mean(1)
    tail = (1 - level) / 2
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high
