"""The server's side of a round, without a copy of the common table per client.

Client ``i`` uploads ``C_i``. At its touched rows that is what training left there; an untouched
entry ``x`` of ``C`` became ``phi_i(x) = sign(x) max(a_i |x| - t_i, 0)`` (``t_i = 0`` without a
proximal step). For any client weights ``q_i`` therefore::

    sum_i q_i (C_i - C) = sum_i q_i (phi_i(C) - C) + scatter_add over rows of q_i (C_i - phi_i(C))

and the first sum is a piecewise linear function of ``|x|``, evaluated for all entries with prefix
sums over the clients sorted by ``t_i / a_i``. Norms and non-zero counts of single uploads follow
from prefix sums over the sorted entries in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SERVERS = ("mean", "weighted", "fedadam", "median")


def shrink(values: Tensor, decay: Tensor, shift: Tensor) -> Tensor:
    """``phi``: what an untouched entry became; broadcasts."""
    moved = decay * values
    if not bool((shift > 0).any()):
        return moved
    return torch.sign(moved) * (moved.abs() - shift).clamp_min(0.0)


class TableProfile:
    """Sorted magnitudes of the common table, for norms and counts of untouched uploads."""

    def __init__(self, common: Tensor) -> None:
        self.magnitude = torch.sort(common.abs().double().flatten()).values
        zero = self.magnitude.new_zeros(1)
        self._sum = torch.cat([zero, self.magnitude.cumsum(0)])
        self._square = torch.cat([zero, self.magnitude.square().cumsum(0)])
        self.entries = common.numel()

    def above(self, threshold: Tensor) -> Tensor:
        """How many entries have a magnitude above each threshold (int64)."""
        found = torch.searchsorted(self.magnitude, threshold.double().contiguous(), right=True)
        return self.entries - found

    def squared_change(self, decay: Tensor, shift: Tensor) -> Tensor:
        """``||phi_i(C) - C||^2`` for every client ``(clients,)`` float64."""
        decay, shift = decay.double(), shift.double()
        border = torch.where(shift > 0, shift / decay, torch.zeros_like(shift))
        cut = torch.searchsorted(self.magnitude, border.contiguous(), right=True)
        tail_sum = self._sum[-1] - self._sum[cut]
        tail_square = self._square[-1] - self._square[cut]
        kept = (self.entries - cut).double()
        lost = 1 - decay
        return (
            self._square[cut]
            + lost.square() * tail_square
            + 2 * lost * shift * tail_sum
            + shift.square() * kept
        )


def upload_change_norm(
    profile: TableProfile,
    start: Tensor,
    final: Tensor,
    mask: Tensor,
    decay: Tensor,
    shift: Tensor,
) -> Tensor:
    """L2 norm of ``C_i - C`` over the whole table, for every client of a block.

    Args:
        profile: Of the server's table.
        start: ``C`` at the block's rows ``(clients, rows, width)``.
        final: ``C_i`` at the block's rows.
        mask: Which rows exist ``(clients, rows)``.
        decay: ``a_i`` ``(clients,)``.
        shift: ``t_i`` ``(clients,)``.
    """
    untouched = shrink(start, decay[:, None, None], shift[:, None, None])
    inside = mask[..., None].double()
    touched = ((final - start).double().square() - (untouched - start).double().square()) * inside
    total = profile.squared_change(decay, shift) + touched.sum((1, 2))
    return total.clamp_min(0.0).sqrt().to(start.dtype)


def upload_nonzeros(
    profile: TableProfile,
    start: Tensor,
    final: Tensor,
    mask: Tensor,
    decay: Tensor,
    shift: Tensor,
    threshold: float,
) -> Tensor:
    """Entries of ``C_i`` with magnitude above ``threshold``, for every client (int64)."""
    untouched = shrink(start, decay[:, None, None], shift[:, None, None])
    inside = mask[..., None]
    gained = ((final.abs() > threshold) & inside).sum((1, 2))
    lost = ((untouched.abs() > threshold) & inside).sum((1, 2))
    return untouched_nonzeros(profile, decay, shift, threshold) + gained - lost


def untouched_nonzeros(
    profile: TableProfile, decay: Tensor, shift: Tensor, threshold: float
) -> Tensor:
    """Entries with magnitude above ``threshold`` in a copy that was never touched (int64)."""
    size = decay.double().abs()
    border = torch.where(size > 0, (threshold + shift.double()) / size, torch.inf)
    return profile.above(border)


def untouched_sum(common: Tensor, weight: Tensor, decay: Tensor, shift: Tensor) -> Tensor:
    """``sum_i q_i (phi_i(C) - C)`` over the whole table, float64.

    Args:
        common: ``C`` ``(items, width)``.
        weight: ``q_i`` ``(clients,)``.
        decay: ``a_i`` ``(clients,)``.
        shift: ``t_i`` ``(clients,)``.
    """
    table, weight = common.double(), weight.double()
    decay, shift = decay.double(), shift.double()
    if not bool((shift > 0).any()):
        return (weight * (decay - 1)).sum() * table
    order = torch.argsort(shift / decay)
    border = (shift / decay)[order]
    zero = border.new_zeros(1)
    slope = torch.cat([zero, (weight * decay)[order].cumsum(0)])
    offset = torch.cat([zero, (weight * shift)[order].cumsum(0)])
    size = table.abs()
    # A client contributes where its threshold lies below the entry.
    number = torch.searchsorted(border, size.contiguous(), right=False)
    return torch.sign(table) * (slope[number] * size - offset[number]) - weight.sum() * table


@dataclass
class ServerOptimizer:
    """What the server does with the averaged change of the common table.

    Args:
        kind: ``mean`` and ``weighted`` apply the average, ``fedadam`` takes it as a
            pseudo-gradient, ``median`` replaces the average by the coordinatewise median.
        lr: Server step size (1 applies the average as it is).
        beta1: First-moment decay of FedAdam.
        beta2: Second-moment decay of FedAdam.
        adaptivity: Added to the root of the second moment (``tau``).
    """

    kind: str = "mean"
    lr: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99
    adaptivity: float = 1e-3

    def apply(self, common: Tensor, change: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """New common table.

        Args:
            common: ``C`` ``(items, width)``.
            change: Averaged ``C_i - C``, same shape, float64.
            first: FedAdam's first moment, changed in place.
            second: FedAdam's second moment, changed in place.
        """
        if self.kind == "fedadam":
            delta = change.to(first.dtype)
            first.mul_(self.beta1).add_(delta, alpha=1 - self.beta1)
            second.mul_(self.beta2).addcmul_(delta, delta, value=1 - self.beta2)
            return common + self.lr * first / (second.sqrt() + self.adaptivity)
        if self.lr == 1.0:
            return (common.double() + change).to(common.dtype)
        return (common.double() + self.lr * change).to(common.dtype)


def median_change(
    common: Tensor,
    decay: Tensor,
    shift: Tensor,
    row_client: Tensor,
    row_item: Tensor,
    rows: Tensor,
    scale: Tensor,
    noise_std: float,
    generator: torch.Generator | None,
    chunk_entries: int = 4_000_000,
) -> Tensor:
    """Coordinatewise median of ``scale_i (C_i - C)`` over the clients, in chunks of items.

    The median of an even number of clients is the mean of the two middle ones.

    Args:
        common: ``C`` ``(items, width)``.
        decay: ``a_i`` ``(clients,)``.
        shift: ``t_i`` ``(clients,)``.
        row_client: Client position of every touched row ``(rows,)``.
        row_item: Its item ``(rows,)``.
        rows: ``C_i`` there ``(rows, width)``.
        scale: Clipping factors ``(clients,)``.
        noise_std: Gaussian noise on every upload.
        generator: Source of the noise.
        chunk_entries: Memory bound, entries of one chunk.
    """
    items, width = common.shape
    clients = len(decay)
    chunk = max(1, chunk_entries // max(1, clients * width))
    order = torch.argsort(row_item, stable=True)
    row_client, row_item, rows = row_client[order], row_item[order], rows[order]
    result = torch.zeros_like(common, dtype=torch.float64)
    for first in range(0, items, chunk):
        last = min(first + chunk, items)
        part = common[first:last]
        uploads = shrink(
            part[None].expand(clients, -1, -1), decay[:, None, None], shift[:, None, None]
        ).clone()
        begin, end = torch.searchsorted(
            row_item, torch.tensor([first, last], device=row_item.device)
        ).tolist()
        uploads[row_client[begin:end], row_item[begin:end] - first] = rows[begin:end]
        change = scale[:, None, None] * (uploads - part)
        if noise_std:
            change = change + noise_std * torch.randn(
                change.shape, generator=generator, dtype=change.dtype, device=change.device
            )
        ordered = change.sort(0).values
        middle = (ordered[(clients - 1) // 2].double() + ordered[clients // 2].double()) / 2
        result[first:last] = middle
    return result
