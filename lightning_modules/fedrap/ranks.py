"""The clients' state over several ranks: client ``i`` lies on rank ``i % world_size``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_modules.fedrap.federation import Federation
from lightning_modules.fedrap.personal_store import LazyPersonal

BY_CLIENT = ("vector", "bias", "taken_part", "personal.table", "personal.scale")
KEY, VALUE = "personal.key", "personal.value"
PER_RANK = (*BY_CLIENT, KEY, VALUE)
SUMS = ("round_rows", "round_clients", "round_nonzero")


def whole_state(federation: Federation) -> dict[str, Tensor]:
    """State of all clients in their order, meaningful on rank 0 (a collective call)."""
    if isinstance(federation.personal, LazyPersonal):
        federation.personal.flush()
    state: dict[str, Tensor] = dict(federation.state_dict())
    world = federation.world_size
    if world == 1:
        return state
    for name in SUMS:
        state[name] = sum_over_ranks(state[name])
    state["item_counts"] = all_item_counts(federation)
    for name in BY_CLIENT:
        if name in state:
            state[name] = _interleave(_to_first_rank(state[name]), world)
    if KEY in state:
        key, value = _to_first_rank(state[KEY]), _to_first_rank(state[VALUE])
        items = len(federation.common)
        keys = torch.cat(
            [((k // items) * world + r) * items + k % items for r, k in enumerate(key)]
        )
        order = torch.argsort(keys)
        state[KEY], state[VALUE] = keys[order], torch.cat(value)[order]
    return state


def own_part(state: Mapping[str, Tensor], federation: Federation) -> dict[str, Tensor]:
    """What a rank holds of a state of all clients."""
    rank, world = federation.rank, federation.world_size
    part = dict(state)
    for name in BY_CLIENT:
        if name in part:
            part[name] = part[name][rank::world].clone()
    if KEY in part:
        items = len(federation.common)
        client, item = part[KEY] // items, part[KEY] % items
        mine = client % world == rank
        part[KEY] = (client[mine] // world) * items + item[mine]
        part[VALUE] = part[VALUE][mine]
    if rank:  # sums over ranks so far count once
        for name in SUMS:
            part[name] = torch.zeros_like(part[name])
    return part


def all_item_counts(federation: Federation) -> Tensor:
    """Counts of finished rounds are equal on all ranks, those of the present one are not."""
    before = federation.counts_before
    if federation.world_size == 1:
        return federation.item_counts
    return before + sum_over_ranks(federation.item_counts - before)


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum of a tensor over all ranks; the argument is left alone."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def _lengths(tensor: Tensor) -> list[int]:
    own = torch.tensor([len(tensor)], device=tensor.device)
    parts = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return [int(part) for part in parts]


def concatenate_over_ranks(tensor: Tensor) -> Tensor:
    """Tensors of all ranks along the first dimension."""
    lengths = _lengths(tensor)
    padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    parts = [torch.zeros_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def _to_first_rank(tensor: Tensor) -> list[Tensor]:
    """Every rank's tensor on rank 0, one after the other; elsewhere only one's own."""
    lengths = _lengths(tensor)
    numeric = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    if dist.get_rank():
        dist.send(numeric.contiguous(), 0)
        return [tensor]
    parts = [tensor]
    for rank, length in enumerate(lengths[1:], 1):
        part = numeric.new_zeros((length, *tensor.shape[1:]))
        dist.recv(part, rank)
        parts.append(part.to(tensor.dtype))
    return parts


def _interleave(parts: list[Tensor], world_size: int) -> Tensor:
    """Clients ``r, r + world, ...`` of every rank in one order."""
    if len(parts) < world_size:
        return parts[0]
    whole = parts[0].new_zeros((sum(map(len, parts)), *parts[0].shape[1:]))
    for rank, part in enumerate(parts):
        whole[rank::world_size] = part
    return whole
