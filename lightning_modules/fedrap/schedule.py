"""From a round's samples to padded blocks of clients, with the order of every local batch.

A client's round is a list of samples (item, label), fed for several epochs in shuffled minibatches.
Clients whose samples fit one batch feed the same batch in every epoch, so their order is immaterial
and a sample repeated ``w`` times is a row of weight ``w``. Larger clients are shuffled by a hash of
(seed, round, client, epoch, sample): the result depends neither on the block nor on the process in
which a client is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def hash_words(*words: Tensor | int) -> Tensor:
    """Mix integers into well-spread non-negative 63-bit integers (splitmix64, broadcasting)."""
    state = torch.zeros((), dtype=torch.int64)
    for word in words:
        state = _mixed(state, word)
    return state & 0x7FFFFFFFFFFFFFFF


def _mixed(state: Tensor, word: Tensor | int) -> Tensor:
    """Take one more word into the state of `hash_words`."""
    state = (state.to(word.device) if isinstance(word, Tensor) else state) + _GOLDEN
    state = state ^ word
    state = (state ^ _shift(state, 30)) * _FIRST
    state = (state ^ _shift(state, 27)) * _SECOND
    return state ^ _shift(state, 31)


def _shift(word: Tensor, by: int) -> Tensor:
    """Logical shift to the right."""
    return (word >> by) & ((1 << (64 - by)) - 1)


@dataclass(frozen=True)
class Samples:
    """The samples of a set of clients, flat.

    Args:
        client: Position of the client in the caller's list ``(samples,)`` int64.
        item: Item ids ``(samples,)`` int64.
        label: ``(samples,)`` 1 for observed, 0 for sampled negatives.
    """

    client: Tensor
    item: Tensor
    label: Tensor


@dataclass(frozen=True)
class Order:
    """Where every sample is fed: ``epoch``, ``slot`` (batch of the epoch) and ``sample`` index.

    All ``(entries,)`` int64. ``epoch`` is ``None`` if the same batches are fed in every epoch; of a
    client with a single batch the entries of epoch 0 are enough, they are repeated.
    """

    epoch: Tensor | None
    slot: Tensor
    sample: Tensor


def shuffled_order(
    client: Tensor, identity: Tensor, batch_size: int, epochs: int, seed: int, round_index: int
) -> Order:
    """Split every client's samples into shuffled minibatches.

    Args:
        client: Position of every sample's client, ascending ``(samples,)``.
        identity: Global number of each client by position ``(clients,)``.
        batch_size: Largest batch.
        epochs: Local epochs.
        seed: Of the run.
        round_index: Round, so that every round is shuffled anew.
    """
    counts = torch.bincount(client, minlength=len(identity))
    every = torch.arange(len(client), device=client.device)
    if not len(client) or int(counts.max()) <= batch_size:
        return Order(None, torch.zeros_like(client), every)
    # `take` copies single numbers several times as fast as indexing does.
    large = (counts > batch_size).take(client)
    small = torch.nonzero(~large)[:, 0]
    epoch_ids, slots, samples = [torch.zeros_like(small)], [torch.zeros_like(small)], [small]
    every = torch.nonzero(large)[:, 0]
    client = client.take(every)
    starts = torch.cumsum(counts, 0) - counts
    within = every - starts.take(client)
    for epoch in range(epochs):
        key = hash_words(seed, round_index, epoch, identity.take(client), within)
        # By client, then by 40 bits of the hash.
        order = torch.argsort((client << 40) | (key >> 23), stable=True)
        epoch_ids.append(torch.full_like(client, epoch))
        slots.append(within // batch_size)
        samples.append(every.take(order))
    return Order(torch.cat(epoch_ids), torch.cat(slots), torch.cat(samples))


class Block:
    """A padded block of clients and its batches.

    Attributes:
        client: Position of every client in the caller's list ``(clients,)`` int64.
        item: Distinct item ids of every client, ascending, padded with 0 ``(clients, rows)``.
        mask: Which rows exist ``(clients, rows)`` bool.
        slots_per_epoch: Batches in an epoch of the client with the most.
        repeats: Whether every epoch feeds the same batches.
    """

    def __init__(
        self, client: Tensor, item: Tensor, mask: Tensor, slots_per_epoch: int, repeats: bool
    ) -> None:
        self.client, self.item, self.mask = client, item, mask
        self.slots_per_epoch, self.repeats = slots_per_epoch, repeats
        # Of every moment (epoch, slot) or only slot: the rows fed, and their labels.
        self.entries: list[tuple[Tensor, Tensor]] = []
        # Weight and positive weight of the only batch or of all that repeat.
        self.whole: list[tuple[Tensor, Tensor]] = []

    def batches(self, epoch: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """Weight and positive weight ``(clients, rows)`` of every batch of an epoch."""
        if self.whole:
            if self.whole[0][0].dtype != dtype:
                self.whole = [(w.to(dtype), p.to(dtype)) for w, p in self.whole]
            yield from self.whole
            return
        first = 0 if self.repeats else epoch * self.slots_per_epoch
        built = []
        for where, label in self.entries[first : first + self.slots_per_epoch]:
            label = label.to(dtype)
            flat = torch.zeros((2, self.item.numel()), dtype=dtype, device=self.item.device)
            # Repeats of a row add up to its weight.
            flat[0].index_add_(0, where, torch.ones_like(label))
            flat[1].index_add_(0, where, label)
            pair = (flat[0].view(self.item.shape), flat[1].view(self.item.shape))
            if self.repeats:
                built.append(pair)
            yield pair
        self.whole = built


def build_blocks(
    samples: Samples,
    order: Order,
    clients: int,
    items: int,
    block_rows: int = 6144,
    all_rows: bool = False,
) -> list[Block]:
    """Group clients of similar size into padded blocks.

    Args:
        samples: Flat samples.
        order: How they are fed.
        clients: Number of positions (clients without samples are left out).
        items: Number of items.
        block_rows: Rows of a block, chosen so that a block stays in the processor's cache. On an
            accelerator take more.
        all_rows: Every item is a row of every client (``scope: table``).
    """
    device = samples.item.device
    if not len(samples.item):
        return []
    row_key, row_of_sample = _distinct(samples.client * items + samples.item, clients * items)
    if all_rows:
        taking_part = torch.unique(samples.client)
        grid = torch.arange(items, device=device)
        row_key = (taking_part[:, None] * items + grid).reshape(-1)
        row_of_sample = torch.searchsorted(row_key, samples.client * items + samples.item)
    row_client = row_key // items
    row_item = row_key - row_client * items
    counts = torch.bincount(row_client, minlength=clients)
    starts = torch.cumsum(counts, 0) - counts

    slots_of_client = torch.zeros(clients, dtype=torch.int64, device=device)
    entry_client = samples.client.take(order.sample)
    slots_of_client.scatter_reduce_(0, entry_client, order.slot + 1, "amax")
    deep = (slots_of_client > 1).take(entry_client)

    # Clients with a single batch: add up the repeats of all their rows at once.
    once = ~deep if order.epoch is None else ~deep & (order.epoch == 0)
    sample = order.sample.take(torch.nonzero(once)[:, 0])
    row, label = row_of_sample.take(sample), samples.label.take(sample).double()
    weight, positive = torch.zeros((2, len(row_key)), dtype=label.dtype, device=device)
    weight.index_add_(0, row, torch.ones_like(label))
    positive.index_add_(0, row, label)

    # Many batches first, then by size: neighbours in a block have the same shape.
    present = torch.nonzero(counts)[:, 0]
    present = present[torch.argsort(counts[present], descending=True, stable=True)]
    present = present[torch.argsort(slots_of_client[present], descending=True, stable=True)]
    blocks: list[Block] = []
    for first, last in _edges(
        counts[present].tolist(), slots_of_client[present].tolist(), block_rows
    ):
        members = present[first:last]
        place = torch.arange(int(counts[members].max()), device=device)
        mask = place < counts[members, None]
        # Padding looks at any row.
        row = (starts[members, None] + place).clamp_max_(len(row_key) - 1)
        depth = int(slots_of_client[members].max())
        repeats = order.epoch is None or depth == 1
        block = Block(members, row_item.take(row) * mask, mask, depth, repeats)
        if depth == 1:
            block.whole = [(weight.take(row) * mask, positive.take(row) * mask)]
        blocks.append(block)
    _feed(
        [block for block in blocks if not block.whole], samples, order, deep, row_of_sample, starts
    )
    return blocks


def _feed(
    blocks: list[Block],
    samples: Samples,
    order: Order,
    deep: Tensor,
    row_of_sample: Tensor,
    starts: Tensor,
) -> None:
    """Hand the entries of the clients with several batches to their blocks."""
    if not blocks:
        return
    device = samples.item.device
    epochs = 1 if order.epoch is None else int(order.epoch.max()) + 1
    moments = [block.slots_per_epoch * epochs for block in blocks]
    first_place, first_moment = torch.zeros((2, len(starts)), dtype=torch.int64, device=device)
    depth = torch.zeros_like(first_place)
    for number, block in enumerate(blocks):
        lines, length = block.item.shape
        first_place[block.client] = torch.arange(lines, device=device) * length
        first_moment[block.client] = sum(moments[:number])
        depth[block.client] = block.slots_per_epoch
    entry = torch.nonzero(deep)[:, 0]
    sample, moment = order.sample.take(entry), order.slot.take(entry)
    client = samples.client.take(sample)
    if order.epoch is not None:
        moment += order.epoch.take(entry) * depth.take(client)
    groups = _group(moment.add_(first_moment.take(client)), sum(moments))
    place = (first_place - starts).take(client).add_(row_of_sample.take(sample))
    label = samples.label.take(sample)
    entries = iter([(place.take(group), label.take(group)) for group in groups])
    for block, number in zip(blocks, moments, strict=True):
        block.entries = list(islice(entries, number))


def _distinct(key: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Distinct keys below ``limit``, ascending, and where each key went."""
    if limit > 16 * len(key):
        distinct, place = torch.unique(key, return_inverse=True)
        return distinct, place
    # A table of all possible keys is faster than a sort as long as it is not mostly empty.
    seen = torch.zeros(limit, dtype=torch.bool, device=key.device)
    seen.index_fill_(0, key, True)
    distinct = torch.nonzero(seen)[:, 0]
    place = torch.empty(limit, dtype=torch.int64, device=key.device)
    place[distinct] = torch.arange(len(distinct), device=key.device)
    return distinct, place.take(key)


def _group(number: Tensor, groups: int) -> list[Tensor]:
    """Indices of every group, in their present order."""
    if groups == 1:
        return [torch.arange(len(number), device=number.device)]
    if number.device.type == "cpu" and groups < 1 << 15:
        # A radix sort, which numpy has for short integers.
        short = number.to(torch.int16).numpy()
        order = torch.from_numpy(np.argsort(short, kind="stable"))
    else:
        order = torch.argsort(number, stable=True)
    sizes = torch.bincount(number, minlength=groups)
    return list(torch.split(order, sizes.tolist()))  # type: ignore[no-untyped-call]


def _edges(rows: list[int], slots: list[int], block_rows: int) -> list[tuple[int, int]]:
    """Cut a list of clients into blocks of at most ``block_rows`` padded rows."""
    edges, first, widest = [], 0, 0
    for place, (count, depth) in enumerate(zip(rows, slots, strict=True)):
        grown = max(widest, count) * (place - first + 1)
        # A block of single batches can replay them; mixing in a deeper client would prevent it.
        if place > first and (grown > block_rows or (depth == 1) != (slots[first] == 1)):
            edges.append((first, place))
            first, widest = place, 0
        widest = max(widest, count)
    if rows:
        edges.append((first, len(rows)))
    return edges
