"""Data sets of `Interactions`: they give a batch for a list of client numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from datamodules.interactions.batches import ClientRound, EvaluationBatch
from datamodules.interactions.negatives import ItemSets, draw_distinct
from lightning_modules.components.randomness import generator_from

Ints = npt.NDArray[np.int64]


class ClientRounds:
    """Training data of every client, with fresh negatives in every round.

    Args:
        client: Client of every training interaction, ascending ``(rows,)``.
        item: Its item ``(rows,)``.
        forbidden: What may not be drawn as a negative of each client.
        negatives: Negatives of every positive, distinct within it.
        seed: Of the draws.
    """

    def __init__(
        self, client: Ints, item: Ints, forbidden: ItemSets, negatives: int, seed: int
    ) -> None:
        self.item, self.forbidden = item, forbidden
        self.negatives, self.seed, self.epoch = negatives, seed, 0
        self.offsets = np.searchsorted(client, np.arange(forbidden.clients + 1))

    def __len__(self) -> int:
        return self.forbidden.clients

    def set_epoch(self, epoch: int) -> None:
        """Choose the round; negatives are a function of (seed, round, client)."""
        self.epoch = epoch

    def __getitem__(self, indices: list[int]) -> ClientRound:
        client = np.asarray(indices, dtype=np.int64)
        counts = self.offsets[client + 1] - self.offsets[client]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        owner = np.repeat(client, counts)
        positive = self.item[self.offsets[owner] + within]
        space = self.forbidden.items - self.forbidden.sizes()[owner]
        rank = draw_distinct(space, self.negatives, self.seed, self.epoch, owner, within)
        negative = self.forbidden.complement(owner[:, None], rank)
        return ClientRound(
            torch.from_numpy(client),
            torch.from_numpy(offsets),
            torch.from_numpy(positive),
            torch.from_numpy(negative),
        )


class HeldOut:
    """The held-out item of every client with its candidates.

    Args:
        target: Held-out items ``(clients,)``.
        negative: Sampled candidates ``(clients, negatives)``.
        seen: What is no candidate when all items are ranked.
        clients: Clients to give, all by default; -1 stands for an unknown user.
    """

    def __init__(
        self, target: Ints, negative: Ints, seen: ItemSets, clients: Ints | None = None
    ) -> None:
        self.target, self.negative, self.seen = target, negative, seen
        self.clients = np.arange(len(target)) if clients is None else clients

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, indices: list[int]) -> EvaluationBatch:
        client = self.clients[np.asarray(indices, dtype=np.int64)]
        known = np.maximum(client, 0)
        offsets, seen = self.seen.of(known)
        if (client < 0).any():
            counts = np.diff(offsets)
            seen = seen[np.repeat(client >= 0, counts)]
            offsets = np.concatenate([[0], np.cumsum(np.where(client >= 0, counts, 0))])
        return EvaluationBatch(
            torch.from_numpy(client),
            torch.from_numpy(np.where(client >= 0, self.target[known], -1)),
            torch.from_numpy(self.negative[known]),
            torch.from_numpy(offsets),
            torch.from_numpy(seen),
        )


class ParticipationOrder:
    """The clients that take part in each round, in batches.

    A client always lies on rank ``client % world_size``, so that its state never moves. All ranks
    give the same number of batches, some of them empty if the draw is uneven.

    Args:
        clients: Number of clients.
        batch_size: Clients per batch and rank.
        ratio: Share of clients in a round.
        poisson: Every client takes part independently with probability ``ratio``; otherwise exactly
            ``floor(clients * ratio)`` of them do.
        seed: Of the draw.
        rank: Rank of this process.
        world_size: Number of processes.
    """

    def __init__(
        self,
        clients: int,
        batch_size: int,
        ratio: float = 1.0,
        poisson: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.clients, self.batch_size, self.ratio = clients, batch_size, ratio
        self.poisson, self.seed, self.epoch = poisson, seed, 0
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        per_rank = -(-self.clients // self.world_size)
        most = per_rank if self.poisson else min(int(self.clients * self.ratio), per_rank)
        return max(1, -(-most // self.batch_size))

    def participants(self) -> list[int]:
        """Clients of the present round on all ranks, ascending."""
        if self.ratio >= 1.0:
            return list(range(self.clients))
        draw = generator_from(self.seed, "participants", self.epoch)
        if self.poisson:
            chosen = torch.nonzero(torch.rand(self.clients, generator=draw) < self.ratio)[:, 0]
        else:
            count = int(self.clients * self.ratio)
            chosen = torch.randperm(self.clients, generator=draw)[:count].sort().values
        return [int(client) for client in chosen]

    def batches(self) -> Iterator[list[int]]:
        """Client numbers of this rank."""
        mine = [c for c in self.participants() if c % self.world_size == self.rank]
        for number in range(len(self)):
            yield mine[number * self.batch_size : (number + 1) * self.batch_size]
