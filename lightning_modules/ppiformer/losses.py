"""Losses of pre-training and fine-tuning; all plain sums or means per graph, exact under ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class MaskedLoss(NamedTuple):
    """Masked-residue loss of a batch.

    Attributes:
        per_graph: (graphs,) mean over the graph's masked residues of the weighted loss.
        reference_perplexity: (graphs,) mean of exp(weighted, smoothed loss): the quantity that the
            authors log as perplexity.
        cross_entropy: (masked,) plain cross entropy in nats; exp of its mean is the perplexity.
        correct: (masked,) bool.
    """

    per_graph: Tensor
    reference_perplexity: Tensor
    cross_entropy: Tensor
    correct: Tensor


def graph_mean(values: Tensor, graph: Tensor, graphs: int) -> Tensor:
    """Mean of (rows,) values per graph; 0 for a graph without rows."""
    total = values.new_zeros(graphs).index_add(0, graph, values)
    count = values.new_zeros(graphs).index_add(0, graph, torch.ones_like(values))
    return total / count.clamp(min=1)


def masked_loss(
    logits: Tensor,
    types: Tensor,
    graph: Tensor,
    graphs: int,
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    focal_gamma: float = 0.0,
) -> MaskedLoss:
    """Weighted, smoothed and optionally focal cross entropy, averaged per graph.

    Args:
        logits: (masked, 20), masked residues only.
        types: (masked,) int64, true types.
        graph: (masked,) int64, graph of each residue.
        graphs: number of graphs.
        weights: (20,) class weights or None. Means are plain: not divided by the weights' sum.
        label_smoothing: in [0, 1).
        focal_gamma: the loss is multiplied by (1 - p(true)) to this power.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    weights = None if weights is None else weights.to(logits)
    loss = functional.cross_entropy(
        logits, types, weight=weights, reduction="none", label_smoothing=label_smoothing
    )
    plain = functional.cross_entropy(logits, types, reduction="none")
    if focal_gamma:
        # 1 - p through expm1: a residue predicted with certainty keeps a finite gradient
        loss = loss * (-torch.expm1(-plain)).clamp(min=1e-12) ** focal_gamma
    return MaskedLoss(
        graph_mean(loss, graph, graphs),
        graph_mean(loss.detach().exp(), graph, graphs),
        plain.detach(),
        logits.detach().argmax(-1) == types,
    )


DDG_LOSSES = ("mse", "l1", "huber", "rank")


def ddg_loss(predicted: Tensor, target: Tensor, kind: str = "mse") -> tuple[Tensor, int]:
    """Sum of the losses of a batch of mutations and their number.

    Args:
        predicted: (mutations,) kcal/mol.
        target: (mutations,) kcal/mol.
        kind: `mse`, `l1`, `huber` (unit threshold), or `rank`: logistic loss on every pair of
            mutations of the batch, weighted by nothing but the sign of the true difference.

    Returns:
        The sum, and by what to divide it.
    """
    if kind == "rank":
        first, second = torch.triu_indices(len(target), len(target), 1, device=target.device)
        sign = torch.sign(target[first] - target[second])
        margin = (predicted[first] - predicted[second]) * sign
        pairs = functional.softplus(-margin)[sign != 0]
        return pairs.sum(), pairs.numel()
    functions: dict[str, Callable[..., Tensor]] = {
        "mse": functional.mse_loss,
        "l1": functional.l1_loss,
        "huber": functional.huber_loss,
    }
    if kind not in functions:
        raise ValueError(f"loss must be one of {', '.join(DDG_LOSSES)}, got {kind!r}")
    return functions[kind](predicted, target, reduction="sum"), target.numel()


def mean_over_ranks(total: Tensor, count: int, world_size: int = 1) -> Tensor:
    """A mean whose gradient, averaged over ranks, is that of the mean over all ranks' rows.

    Args:
        total: sum over this rank's rows.
        count: number of this rank's rows; ranks may differ.
        world_size: number of ranks.
    """
    if world_size == 1:
        return total / max(count, 1)
    rows = torch.tensor(float(count), device=total.device)
    torch.distributed.all_reduce(rows)
    return total * (world_size / rows.clamp(min=1.0).to(total.dtype))
