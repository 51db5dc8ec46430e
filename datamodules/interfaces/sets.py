"""Data sets of residue graphs, and batches by a budget of residues."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch_geometric.data import Batch

from datamodules.interfaces.graphs import InterfaceGraph, Label, collate, with_mutations
from lightning_modules.components.randomness import generator_from


@dataclass(frozen=True)
class Entry:
    """An interface and the mutations that fit it.

    Attributes:
        graph: without mutations; its geometry is built once.
        labels: mutations.
        nodes: nodes of the points of each.
        inside: whether each lies within the interface.
    """

    graph: InterfaceGraph
    labels: tuple[Label, ...] = ()
    nodes: tuple[tuple[int, ...], ...] = ()
    inside: tuple[bool, ...] = ()


class InterfaceSet:
    """Interfaces with all their mutations; gives a batch for a list of indices.

    Args:
        entries: interfaces.
        sample: with a number, that many mutations per interface and epoch, drawn without
            replacement as a pure function of (seed, epoch, interface); None gives all.
        seed: of the draws.
    """

    def __init__(self, entries: Sequence[Entry], sample: int | None = None, seed: int = 0) -> None:
        self.entries = list(entries)
        self.sample, self.seed, self.epoch = sample, seed, 0

    def __len__(self) -> int:
        return len(self.entries)

    def set_epoch(self, epoch: int) -> None:
        """Choose other mutations."""
        self.epoch = epoch

    def sizes(self) -> list[int]:
        """Residues of every interface."""
        return [int(entry.graph.num_nodes) for entry in self.entries]

    def one(self, index: int) -> InterfaceGraph:
        """One interface with its mutations of this epoch."""
        entry = self.entries[index]
        rows = list(range(len(entry.labels)))
        if self.sample is not None and len(rows) > self.sample:
            generator = generator_from(self.seed, "mutations", self.epoch, entry.graph.name)
            rows = torch.randperm(len(rows), generator=generator)[: self.sample].tolist()
        return with_mutations(
            entry.graph,
            [entry.labels[row] for row in rows],
            [entry.nodes[row] for row in rows],
            [entry.inside[row] for row in rows],
        )

    def __getitem__(self, indices: list[int]) -> Batch:
        return collate([self.one(index) for index in indices])


class NodeBudgetOrder:
    """Batches of as many interfaces as fit a budget of residues, per rank.

    Args:
        sizes: residues of each interface.
        budget: residues per batch; a larger interface gets a batch of its own.
        seed: of the order.
        rank: of this process.
        world_size: number of processes; batches that don't fill every rank are left out.

    Raises:
        ValueError: if there are fewer batches than ranks.
    """

    def __init__(
        self, sizes: Sequence[int], budget: int, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        self.sizes, self.budget, self.seed = list(sizes), budget, seed
        self.rank, self.world_size, self.epoch = rank, world_size, 0
        self._length = len(self._packed(0)) // world_size
        if self._length == 0:
            raise ValueError(
                f"max_nodes_per_batch={budget} gives {len(self._packed(0))} batch(es) for "
                f"{world_size} devices: choose a smaller one"
            )

    def _packed(self, epoch: int) -> list[list[int]]:
        order = torch.randperm(
            len(self.sizes), generator=generator_from(self.seed, "order", epoch)
        ).tolist()
        batches: list[list[int]] = []
        room = 0
        for index in order:
            if not batches or self.sizes[index] > room:
                batches.append([])
                room = self.budget
            batches[-1].append(index)
            room -= self.sizes[index]
        return batches

    def __len__(self) -> int:
        return self._length

    def batches(self) -> Iterator[list[int]]:
        """Index lists of this rank; the number of batches is that of the first epoch at most."""
        packed = self._packed(self.epoch)
        count = min(self._length, len(packed) // self.world_size)
        yield from packed[self.rank : count * self.world_size : self.world_size]
