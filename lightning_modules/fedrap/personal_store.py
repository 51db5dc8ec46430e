"""Where the personal tables of the simulated clients lie: one big tensor, or only what was touched.

The tables never leave a client. In a simulation on several ranks client ``i`` lies on rank
``i % world_size``, so memory divides by the number of ranks.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

STORES = ("dense", "lazy")


def dense_bytes(clients: int, items: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of the personal tables of ``clients`` clients."""
    return clients * items * width * torch.empty((), dtype=dtype).element_size()


def _available_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


class DensePersonal(nn.Module):
    """All personal tables, ``(clients, items, width)``.

    Args:
        initial: The table that every client starts from ``(items, width)``.
        clients: Clients of this rank.

    Raises:
        ValueError: If the tables don't fit in memory.
    """

    table: Tensor

    def __init__(self, initial: Tensor, clients: int) -> None:
        super().__init__()
        items, width = initial.shape
        needed = dense_bytes(clients, items, width, initial.dtype)
        available = _available_bytes(initial.device)
        if available is not None and needed > available:
            raise ValueError(
                f"the personal tables of {clients} clients need {needed} bytes "
                f"({clients} x {items} x {width}), {available} are free: use store='lazy', "
                "a smaller width, or more ranks (the clients are divided among them)"
            )
        self.register_buffer("table", initial.repeat(clients, 1, 1))

    def rows(self, client: Tensor, item: Tensor) -> Tensor:
        """Rows ``(clients, rows, width)`` of items ``(clients, rows)`` of ``(clients,)``."""
        items, width = self.table.shape[1:]
        flat = (client[:, None] * items + item).view(-1)
        # Copies whole rows, which indexing by two tensors does not.
        return self.table.view(-1, width).index_select(0, flat).view(*item.shape, width)

    def write(
        self, client: Tensor, item: Tensor, mask: Tensor, rows: Tensor, decay: Tensor
    ) -> None:
        """Shrink the whole tables of some clients by ``decay``, then set their touched rows."""
        if bool((decay != 1).any()):
            # In place on every client's own slice: one pass over memory and no copy.
            for number, factor in zip(client.tolist(), decay.tolist(), strict=True):
                self.table[number].mul_(factor)
        self._set(client, item, mask, rows)

    def replace(
        self, client: Tensor, base: Tensor, item: Tensor, mask: Tensor, rows: Tensor
    ) -> None:
        """Set whole tables to ``base`` ``(clients, items, width)``, then their touched rows."""
        self.table[client] = base
        self._set(client, item, mask, rows)

    def _set(self, client: Tensor, item: Tensor, mask: Tensor, rows: Tensor) -> None:
        items, width = self.table.shape[1:]
        inside = torch.nonzero(mask.view(-1))[:, 0]
        flat = (client[:, None] * items + item).view(-1)[inside]
        self.table.view(-1, width).index_copy_(0, flat, rows.view(-1, width)[inside])

    def tables(self, client: Tensor) -> Tensor:
        """Whole tables ``(clients, items, width)``."""
        return self.table[client]

    def pack(self) -> dict[str, Tensor]:
        """State with clients along the first dimension."""
        return {"table": self.table}

    def bytes(self) -> int:
        """Memory held."""
        return self.table.numel() * self.table.element_size()


class LazyPersonal(nn.Module):
    """``scale_i * initial`` plus the rows that a client has touched so far.

    All clients start from one table, and a row that a client never touched has only shrunk by
    weight decay. Worth it while few of the items have been touched; sampled negatives touch more in
    every round, until nothing is saved.

    Args:
        initial: The table that every client starts from ``(items, width)``.
        clients: Clients of this rank.
    """

    initial: Tensor
    scale: Tensor
    key: Tensor
    value: Tensor

    def __init__(self, initial: Tensor, clients: int) -> None:
        super().__init__()
        width = initial.shape[1]
        self.register_buffer("initial", initial.clone())
        self.register_buffer("scale", initial.new_ones(clients))
        self.register_buffer(
            "key", torch.zeros(0, dtype=torch.int64, device=initial.device)
        )  # client * items + item, ascending
        self.register_buffer("value", initial.new_zeros(0, width))
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._pending_decay: list[tuple[Tensor, Tensor]] = []

    def rows(self, client: Tensor, item: Tensor) -> Tensor:
        """Rows ``(clients, rows, width)`` of items ``(clients, rows)`` of ``(clients,)``.

        What was written since the last merge is not seen: a round reads a client before it writes.
        """
        result = self.scale[client][:, None, None] * self.initial[item]
        wanted = client[:, None] * len(self.initial) + item
        place = torch.searchsorted(self.key, wanted)
        inside = place < len(self.key)
        found = torch.zeros_like(inside)
        found[inside] = self.key[place[inside]] == wanted[inside]
        result[found] = self.value[place[found]]
        return result

    def write(
        self, client: Tensor, item: Tensor, mask: Tensor, rows: Tensor, decay: Tensor
    ) -> None:
        """Shrink the whole tables of some clients by ``decay``, then set their touched rows."""
        self._pending_decay.append((client, decay))
        self._pending.append(((client[:, None] * len(self.initial) + item)[mask], rows[mask]))

    def flush(self) -> None:
        """Merge what was written; a client is written at most once between two merges."""
        if not self._pending:
            return
        factor = torch.ones_like(self.scale)
        for client, decay in self._pending_decay:
            factor[client] = decay
        self.scale.mul_(factor)
        self.value.mul_(factor[self.key // len(self.initial)][:, None])
        key = torch.cat([self.key, *(k for k, _ in self._pending)])
        value = torch.cat([self.value, *(v for _, v in self._pending)])
        self._pending, self._pending_decay = [], []
        order = torch.argsort(key, stable=True)
        key, value = key[order], value[order]
        newest = torch.ones_like(key, dtype=torch.bool)
        newest[:-1] = key[1:] != key[:-1]
        self.key, self.value = key[newest], value[newest]

    def tables(self, client: Tensor) -> Tensor:
        """Whole tables ``(clients, items, width)``."""
        self.flush()
        items = len(self.initial)
        result = self.scale[client][:, None, None] * self.initial
        first = torch.searchsorted(self.key, client * items)
        last = torch.searchsorted(self.key, (client + 1) * items)
        counts = last - first
        place = torch.repeat_interleave(torch.arange(len(client), device=client.device), counts)
        within = torch.arange(len(place), device=client.device)
        within = within - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        found = torch.repeat_interleave(first, counts) + within
        result[place, self.key[found] % items] = self.value[found]
        return result

    def pack(self) -> dict[str, Tensor]:
        """State; ``key`` counts the clients of this rank."""
        self.flush()
        return {"scale": self.scale, "key": self.key, "value": self.value}

    def bytes(self) -> int:
        """Memory held."""
        held = (self.initial, self.scale, self.key, self.value)
        return sum(x.numel() * x.element_size() for x in held)


Personal = DensePersonal | LazyPersonal
