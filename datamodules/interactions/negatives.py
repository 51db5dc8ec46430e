"""Sampling of items that a client has not interacted with, by hashing instead of by a stream.

Every draw is a function of (seed, round, client, position), so that it depends neither on the batch
nor on the process or worker in which the client is looked at.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def hash_words(*words: Ints | int) -> npt.NDArray[np.uint64]:
    """Mix integers into well-spread 64-bit words (splitmix64), broadcasting over arrays."""
    with np.errstate(over="ignore"):
        state = np.zeros((), dtype=np.uint64)
        for word in words:
            state = (state + _GOLDEN) ^ np.asarray(word).astype(np.uint64)
            state = (state ^ (state >> np.uint64(30))) * _FIRST
            state = (state ^ (state >> np.uint64(27))) * _SECOND
            state = state ^ (state >> np.uint64(31))
    return np.asarray(state)


class ItemSets:
    """A sorted set of items for each client, with its complement.

    Args:
        client: Client of each pair ``(pairs,)``.
        item: Item of each pair; repeats are merged.
        clients: Number of clients.
        items: Number of items.
    """

    def __init__(self, client: Ints, item: Ints, clients: int, items: int) -> None:
        self.clients, self.items = clients, items
        key = np.unique(client.astype(np.int64) * items + item)
        self.item = key % items
        owner = key // items
        self.offsets = np.searchsorted(owner, np.arange(clients + 1))
        # Number of items of the complement below each member, made ascending over all clients.
        place = np.arange(len(key)) - self.offsets[owner]
        self._below = owner * (items + 1) + (self.item - place)

    def sizes(self) -> Ints:
        """Members of every client's set ``(clients,)``."""
        return np.diff(self.offsets)

    def of(self, client: Ints) -> tuple[Ints, Ints]:
        """Offsets ``(len(client) + 1,)`` and members of some clients' sets, in their order."""
        counts = self.offsets[client + 1] - self.offsets[client]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        index = np.arange(offsets[-1]) + np.repeat(self.offsets[client] - offsets[:-1], counts)
        return offsets, self.item[index]

    def complement(self, client: Ints, rank: Ints) -> Ints:
        """The ``rank``-th item, from 0, that is not in the client's set; broadcasts."""
        wanted = client * (self.items + 1) + rank
        passed = np.searchsorted(self._below, wanted.ravel(), side="right").reshape(wanted.shape)
        return rank + passed - self.offsets[client]


def draw_distinct(space: Ints, count: int, *key: Ints | int) -> Ints:
    """Draw ``count`` distinct numbers below ``space`` for every row (Floyd's algorithm).

    Args:
        space: How many numbers there are ``(rows,)``, each at least ``count``.
        count: How many to draw.
        *key: What the draws are a function of; scalars or ``(rows,)``.

    Returns:
        ``(rows, count)``; every subset of a row is equally likely, the order is not random.
    """
    chosen = np.full((len(space), count), -1, dtype=np.int64)
    for draw in range(count):
        top = space - count + draw
        word = hash_words(*key, draw)
        # 53 bits are a float without rounding; the bias of the product is below 2^-40.
        share = (word >> np.uint64(11)).astype(np.float64) * 2.0**-53
        number = np.minimum((share * (top + 1)).astype(np.int64), top)
        taken = (chosen[:, :draw] == number[:, None]).any(1)
        chosen[:, draw] = np.where(taken, top, number)
    return chosen
