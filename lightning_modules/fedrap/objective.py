"""The objective of one client: binary cross-entropy, independence of the two views, sparsity.

The paper minimises ``sum_i BCE_i + lambda R(D_i, C) + mu ||C||_1`` with
``R(D_i, C) = -||D_i - C||_F^2`` (the two views are pushed apart). A client batch of ``B`` rows
estimates it by means over the rows, repeats included, and over the width ``k``.

Everything here works on a *block* of clients at once. A block is padded: ``(clients, rows)`` with a
weight per row, the number of times that the batch contains it, and zero for padding. Weights stand
in for repeated rows exactly, since all repeats of a row see the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

REGULARISERS = ("l1", "l2", "nuc", "inf", "none")
SCOPES = ("batch", "table")
REDUCTIONS = ("mean", "sum")
CLOSED_FORM = ("l1", "l2", "none")


class ClientObjective(Protocol):
    """A user's own objective for a block of clients; its gradient is taken by autograd."""

    def __call__(
        self,
        logits: Tensor,
        weight: Tensor,
        positive: Tensor,
        personal: Tensor,
        common: Tensor,
    ) -> Tensor:
        """Loss of every client.

        Args:
            logits: Scores ``(clients, rows)``.
            weight: How often the batch contains each row ``(clients, rows)``, 0 for padding.
            positive: How many of these carry label 1 ``(clients, rows)``.
            personal: The clients' personal rows ``(clients, rows, width)``.
            common: The clients' working copies of the common rows ``(clients, rows, width)``.

        Returns:
            ``(clients,)``, finite also where all weights of a client are zero.
        """
        ...


@dataclass(frozen=True)
class Objective:
    """What one local step minimises.

    Args:
        independence: Coefficient lambda of the independence term.
        sparsity: Coefficient mu of the regulariser of the common rows.
        regulariser: ``l1``, ``l2``, ``nuc`` (nuclear norm of the gathered rows), ``inf`` (largest
            absolute entry) or ``none``.
        scope: ``batch`` regularises the rows of the batch, ``table`` all rows of the table.
        reduction: ``mean`` over rows and width, or the paper's ``sum``.
        saturating: Sigmoid followed by logarithms clamped at -100, whose gradient vanishes once the
            probability is exactly 0 or 1 (the released behaviour). Otherwise from logits.
        proximal: The l1 term is left to a proximal step: no subgradient, its value still counts.
        custom: Replaces the whole objective.
    """

    independence: float = 0.1
    sparsity: float = 0.1
    regulariser: str = "l1"
    scope: str = "batch"
    reduction: str = "mean"
    saturating: bool = False
    proximal: bool = False
    custom: Callable[..., Tensor] | None = None

    @property
    def closed_form(self) -> bool:
        """Whether the gradients are known in closed form."""
        return self.custom is None and self.regulariser in CLOSED_FORM

    @property
    def mu(self) -> float:
        """Coefficient of the regulariser in force (zero for ``none``)."""
        return 0.0 if self.regulariser == "none" else self.sparsity


def cross_entropy(logits: Tensor, weight: Tensor, positive: Tensor, saturating: bool) -> Tensor:
    """Weighted binary cross-entropy of every row, not averaged.

    Args:
        logits: ``(..., rows)``.
        weight: How often each row occurs ``(..., rows)``.
        positive: How many of the occurrences carry label 1.
        saturating: See `Objective`.
    """
    if saturating:
        probability = torch.sigmoid(logits)
        # The library's loss, because its backward pass stays finite at probabilities 0 and 1.
        one = F.binary_cross_entropy(probability, torch.ones_like(logits), reduction="none")
        zero = F.binary_cross_entropy(probability, torch.zeros_like(logits), reduction="none")
        return positive * one + (weight - positive) * zero
    return weight * F.softplus(logits) - positive * logits


def cross_entropy_slope(
    logits: Tensor, weight: Tensor, positive: Tensor, saturating: bool
) -> Tensor:
    """Derivative of `cross_entropy` with respect to the logits: ``sum_b (p_b - y_b)``.

    The saturating form follows the backward pass of a binary cross-entropy on probabilities,
    ``(p - y) / max(p (1 - p), 1e-12)`` times the sigmoid's ``p (1 - p)``.
    """
    probability = torch.sigmoid(logits)
    slope = weight * probability - positive
    if saturating:
        variance = probability * (1 - probability)
        slope = slope / variance.clamp_min(1e-12) * variance
    return slope


def regulariser_rows(weight: Tensor, mask: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Weight of every row in the two regularisers and their common normaliser over rows.

    Returns:
        ``(clients, rows)`` weights and ``(clients, 1)`` counts of rows (1 for ``sum``).
    """
    rows = weight if objective.scope == "batch" else mask.to(weight.dtype)
    if objective.reduction == "sum":
        return rows, torch.ones_like(rows[:, :1])
    return rows, rows.sum(1, keepdim=True).clamp_min(1.0)


def block_loss(
    personal: Tensor,
    common: Tensor,
    vector: Tensor,
    bias: Tensor,
    weight: Tensor,
    positive: Tensor,
    mask: Tensor,
    objective: Objective,
) -> Tensor:
    """Loss of every client of a block, differentiable: the reference for the closed form.

    Args:
        personal: ``D_i[j_b]`` ``(clients, rows, width)``.
        common: ``C_i[j_b]`` ``(clients, rows, width)``.
        vector: ``u_i`` ``(clients, width)``.
        bias: ``b_i`` ``(clients,)``.
        weight: ``(clients, rows)``.
        positive: ``(clients, rows)``.
        mask: Which rows exist ``(clients, rows)`` bool.
        objective: Coefficients and form.

    Returns:
        ``(clients,)``.
    """
    logits = ((personal + common) * vector[:, None]).sum(-1) + bias[:, None]
    if objective.custom is not None:
        return objective.custom(logits, weight, positive, personal, common)
    width = personal.shape[-1]
    size = weight.sum(1).clamp_min(1.0)
    loss = cross_entropy(logits, weight, positive, objective.saturating).sum(1) / size
    rows, count = regulariser_rows(weight, mask, objective)
    per_entry = count[:, 0] * (width if objective.reduction == "mean" else 1)
    distance = ((personal - common).square().sum(-1) * rows).sum(1) / per_entry
    loss = loss - objective.independence * distance
    if objective.mu:
        loss = loss + objective.mu * _regulariser(common, rows, per_entry, objective.regulariser)
    return loss


def _regulariser(common: Tensor, rows: Tensor, per_entry: Tensor, kind: str) -> Tensor:
    if kind == "l1":
        return (common.abs().sum(-1) * rows).sum(1) / per_entry
    if kind == "l2":
        return (common.square().sum(-1) * rows).sum(1) / per_entry
    if kind == "inf":
        inside = (rows > 0)[..., None]
        return common.abs().masked_fill(~inside, 0.0).flatten(1).amax(1)
    values = []
    for table, times in zip(common, rows, strict=True):
        # Repeats belong to the matrix whose singular values are summed.
        gathered = table.repeat_interleave(times.round().long(), dim=0)
        empty = gathered.numel() == 0
        values.append(table.sum() * 0 if empty else torch.linalg.matrix_norm(gathered, "nuc"))
    return torch.stack(values)


def client_loss(
    items: Tensor,
    labels: Tensor,
    personal: Tensor,
    common: Tensor,
    vector: Tensor,
    bias: Tensor,
    objective: Objective,
) -> Tensor:
    """Loss of one batch of one client as a user writes it down: item ids, repeats allowed.

    Args:
        items: ``(rows,)`` int64 ids.
        labels: ``(rows,)`` in [0, 1].
        personal: The client's whole personal table ``(items, width)``.
        common: The client's copy of the common table ``(items, width)``.
        vector: ``(width,)``.
        bias: ``(1,)`` or scalar.
        objective: Coefficients and form.
    """
    distinct, inverse = torch.unique(items, return_inverse=True)
    weight = torch.zeros(len(distinct), dtype=personal.dtype, device=personal.device)
    positive = weight.index_add(0, inverse, labels.to(weight.dtype))
    weight = weight.index_add(0, inverse, torch.ones_like(labels, dtype=weight.dtype))
    if objective.scope == "table":
        full = torch.zeros(len(personal), dtype=weight.dtype, device=weight.device)
        weight = full.index_put((distinct,), weight)
        positive = full.index_put((distinct,), positive)
        distinct = torch.arange(len(personal), device=items.device)
    return block_loss(
        personal[distinct][None],
        common[distinct][None],
        vector[None],
        bias.reshape(1),
        weight[None],
        positive[None],
        torch.ones_like(weight, dtype=torch.bool)[None],
        objective,
    )[0]
