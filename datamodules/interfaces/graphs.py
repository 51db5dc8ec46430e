"""Residue graphs: from atoms to the fields that a model reads."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal
from zlib import crc32

import numpy as np
import torch
from torch_geometric.data import Batch, Data

from datamodules.interfaces.mutations import Point, ResidueKey, find_points
from datamodules.interfaces.structure import Floats, Integers, Strings, Structure

Outside = Literal["impute", "drop", "error"]
VectorFeatures = Literal["virtual_cb", "backbone"]


@dataclass(frozen=True)
class ResidueTable:
    """Residues of an interface that have a C-alpha, sorted by chain, number and insertion code.

    Attributes:
        name: interface.
        ca: (residues, 3) C-alpha in A.
        n: (residues, 3) backbone nitrogen, NaN if missing.
        c: (residues, 3) carbonyl carbon, NaN if missing.
        types: (residues,) 0 to 19.
        chain: (residues,) chain ids.
        number: (residues,) residue numbers.
        insertion: (residues,) insertion codes.
        without_ca: residues left out.
        side_vector: (residues, 3) vector to the virtual C-beta where it is known without N and C.
    """

    name: str
    ca: Floats
    n: Floats
    c: Floats
    types: Integers
    chain: Strings
    number: Integers
    insertion: Strings
    without_ca: tuple[ResidueKey, ...] = field(default=())
    side_vector: Floats | None = None

    def __len__(self) -> int:
        return len(self.types)

    @property
    def keys(self) -> list[ResidueKey]:
        """(chain, number, insertion) of every residue."""
        columns = (self.chain.tolist(), self.number.tolist(), self.insertion.tolist())
        return list(zip(*columns, strict=True))


def residue_table(structure: Structure) -> ResidueTable:
    """Backbone of every residue.

    Raises:
        ValueError: if fewer than two residues have a C-alpha.
    """
    row = structure.residue_rows()
    count = int(row.max(initial=-1)) + 1
    backbone = {}
    for name in ("CA", "N", "C"):
        atoms = np.flatnonzero(structure.atom == name)
        place = np.full((count, 3), np.nan)
        # the first record wins: assign backwards
        place[row[atoms][::-1]] = structure.position[atoms][::-1]
        backbone[name] = place
    first = np.zeros(count, dtype=np.int64)
    first[row[::-1]] = np.arange(len(row))[::-1]
    chain, number = structure.chain[first], structure.number[first]
    insertion = structure.insertion[first]
    order = np.lexsort((insertion, number, chain))
    has = np.isfinite(backbone["CA"][order, 0])
    missing = order[~has]
    order = order[has]
    if len(order) < 2:
        raise ValueError(
            f"{structure.name} has {len(order)} residue(s) with a C-alpha; a graph needs at least 2"
        )
    return ResidueTable(
        structure.name,
        backbone["CA"][order],
        backbone["N"][order],
        backbone["C"][order],
        structure.residue[first][order],
        chain[order],
        number[order],
        insertion[order],
        tuple(
            zip(
                chain[missing].tolist(),
                number[missing].tolist(),
                insertion[missing].tolist(),
                strict=True,
            )
        ),
    )


def virtual_cb(n: Floats, ca: Floats, c: Floats) -> Floats:
    """(residues, 3) vector from C-alpha to an ideal C-beta in A; zero if N or C is missing."""
    b, c = ca - n, c - ca
    vector = -0.58273431 * np.cross(b, c) + 0.56802827 * b - 0.54067466 * c
    return np.where(np.isfinite(vector).all(1, keepdims=True), vector, 0.0)


def _follows(insertion: str, number: int, next_insertion: str, next_number: int) -> bool:
    if next_number - number == 1:
        return True
    if next_number != number:
        return False
    # "no code" comes before "A"
    code = ord(insertion) if insertion else ord("A") - 1
    after = ord(next_insertion) if next_insertion else ord("A") - 1
    return after - code == 1


def backbone_directions(table: ResidueTable) -> tuple[Floats, Floats]:
    """Unit vectors to the next and to the previous residue of the chain.

    Zero unless the two are sequence neighbours: numbers that differ by 1, or one number and
    consecutive insertion codes. Interfaces are full of chain breaks.

    Returns:
        Two (residues, 3).
    """
    keys = table.keys
    linked = np.array(
        [a[0] == b[0] and _follows(a[2], a[1], b[2], b[1]) for a, b in pairwise(keys)],
        dtype=bool,
    )
    step = np.diff(table.ca, axis=0)
    length = np.linalg.norm(step, axis=1, keepdims=True)
    step = np.where(linked[:, None] & (length > 0), step / np.maximum(length, 1e-12), 0.0)
    forward, backward = np.zeros_like(table.ca), np.zeros_like(table.ca)
    forward[:-1], backward[1:] = step, -step
    return forward, backward


def nearest(position: Floats, k: int) -> tuple[Integers, "np.ndarray[Any, np.dtype[np.bool_]]"]:
    """The `k` nearest other residues, nearest first; padded with the residue itself.

    Returns:
        (residues, k) neighbours and which of them exist.
    """
    count = len(position)
    square = ((position[:, None] - position[None]) ** 2).sum(-1)
    np.fill_diagonal(square, np.inf)
    found = min(k, count - 1)
    neighbors = np.repeat(np.arange(count)[:, None], k, 1)
    neighbors[:, :found] = np.argsort(square, axis=1, kind="stable")[:, :found]
    exists = np.zeros((count, k), dtype=bool)
    exists[:, :found] = True
    return neighbors, exists


class InterfaceGraph(Data):  # type: ignore[misc]
    """One interface with, optionally, mutations; PyG batches it by shifting node numbers.

    Attributes:
        position: (nodes, 3) float32, C-alpha in A, shifted to their mean.
        types: (nodes,) int64, residue types 0 to 19.
        chain: (nodes,) int64, number of the chain id in sorted order.
        partner: (nodes,) int64, binding side (equal to `chain` unless partners are known).
        vectors: (nodes, features, 3) float32: virtual C-beta in A, then unit vectors along the
            backbone if chosen.
        neighbors: (nodes, k) int64, nearest residues.
        exists: (nodes, k) bool.
        key: (1,) int64, stable hash of the name: seeds what must not depend on the batch.
        name: interface name.
        point_node, point_type, point_mutation: (points,) int64: node, mutant type and mutation of
            every substitution.
        mutation_graph: (mutations,) int64, graph of every mutation.
        ddg: (mutations,) float32 in kcal/mol, NaN if unknown.
        group: (mutations,) int64, complex or protein over which correlations are taken.
        inside: (mutations,) bool, whether all points are residues of the interface.
        mutation: list of mutation strings.
        num_mutations: their number.
    """

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        if key in ("neighbors", "point_node"):
            return self.num_nodes
        if key == "point_mutation":
            return self.num_mutations
        if key == "mutation_graph":
            return 1
        return 0

    def __cat_dim__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return 0


@dataclass(frozen=True)
class Label:
    """A mutation of an interface.

    Attributes:
        points: substitutions.
        ddg: kcal/mol, NaN if unknown.
        group: number of the complex or protein.
    """

    points: tuple[Point, ...]
    ddg: float = float("nan")
    group: int = 0

    @property
    def text(self) -> str:
        """As written by a user."""
        return ",".join(str(point) for point in self.points)


def build_graph(
    table: ResidueTable,
    neighbors: int = 10,
    vectors: VectorFeatures = "virtual_cb",
    partners: Sequence[str | Sequence[str]] | None = None,
    dtype: torch.dtype = torch.float32,
) -> InterfaceGraph:
    """Residue graph without mutations; geometry is computed in double precision once.

    Args:
        table: residues.
        neighbors: edges per residue.
        vectors: `virtual_cb` (one vector, as published) or `backbone` (and the two directions).
        partners: chain ids of each binding side.
        dtype: of the stored coordinates.

    Raises:
        ValueError: if a chain is in no partner, or `neighbors` or `vectors` is invalid.
    """
    if neighbors < 1:
        raise ValueError(f"neighbors must be at least 1, got {neighbors}")
    if vectors not in ("virtual_cb", "backbone"):
        raise ValueError(f"vectors must be 'virtual_cb' or 'backbone', got {vectors!r}")
    side = table.side_vector
    features = [virtual_cb(table.n, table.ca, table.c) if side is None else side]
    if vectors == "backbone":
        features += list(backbone_directions(table))
    index, exists = nearest(table.ca, neighbors)
    chains, chain = np.unique(table.chain, return_inverse=True)
    partner = chain
    if partners is not None:
        of_chain = {c: i for i, group in enumerate(partners) for c in group}
        for c in chains.tolist():
            if c not in of_chain:
                raise ValueError(f"{table.name}: chain {c!r} belongs to none of {list(partners)}")
        partner = np.array([of_chain[c] for c in table.chain.tolist()])
    centred = table.ca - table.ca.mean(0)
    graph = InterfaceGraph(
        position=torch.as_tensor(centred, dtype=dtype),
        types=torch.as_tensor(table.types),
        chain=torch.as_tensor(chain),
        partner=torch.as_tensor(partner),
        vectors=torch.as_tensor(np.stack(features, 1), dtype=dtype),
        neighbors=torch.as_tensor(index),
        exists=torch.as_tensor(exists),
        key=torch.tensor([crc32(table.name.encode())]),
        name=table.name,
        num_nodes=len(table),
    )
    return with_mutations(graph, [], [], [])


def with_mutations(
    graph: InterfaceGraph,
    labels: Sequence[Label],
    nodes: Sequence[Sequence[int]],
    inside: Sequence[bool],
) -> InterfaceGraph:
    """A copy of a graph that carries mutations; geometry is shared.

    Args:
        graph: interface.
        labels: mutations.
        nodes: nodes of the points of each, empty where not inside.
        inside: whether each lies within the interface.
    """
    result = InterfaceGraph(**graph.to_dict())
    points = [
        (node, point.mutant, number)
        for number, (label, found) in enumerate(zip(labels, nodes, strict=True))
        for node, point in zip(found, label.points, strict=bool(found))
    ]
    columns = torch.tensor(points, dtype=torch.int64).reshape(-1, 3)
    result.point_node, result.point_type, result.point_mutation = columns.T.contiguous().unbind()
    result.mutation_graph = torch.zeros(len(labels), dtype=torch.int64)
    result.ddg = torch.tensor([label.ddg for label in labels], dtype=torch.float32)
    result.group = torch.tensor([label.group for label in labels], dtype=torch.int64)
    result.inside = torch.tensor(list(inside), dtype=torch.bool)
    result.mutation = [label.text for label in labels]
    result.num_mutations = len(labels)
    return result


def place_labels(
    table: ResidueTable,
    labels: Sequence[Label],
    outside: Outside = "impute",
    skip_mismatch: bool = False,
) -> tuple[list[Label], list[list[int]], list[bool], list[str]]:
    """Find the residues of mutations.

    Args:
        table: interface.
        labels: mutations; exact duplicates (points and ddG) are kept once, repeats with another
            ddG stay.
        outside: what happens to a mutation with a residue outside the interface: kept and flagged,
            left out, or an error.
        skip_mismatch: leave out mutations that don't fit the structure instead of raising.

    Returns:
        Labels, their nodes, whether they are inside, and what was left out and why.

    Raises:
        ValueError: see `find_points`; also for `outside="error"`.
    """
    if outside not in ("impute", "drop", "error"):
        raise ValueError(f"outside must be 'impute', 'drop' or 'error', got {outside!r}")
    index = {key: node for node, key in enumerate(table.keys)}
    types, chains = table.types.tolist(), sorted(set(table.chain.tolist()))
    kept: list[Label] = []
    nodes: list[list[int]] = []
    inside: list[bool] = []
    skipped: list[str] = []
    seen: set[object] = set()
    for label in labels:
        for point in label.points:
            if point.wild == point.mutant:
                warnings.warn(
                    f"{table.name}: mutation {point}: the mutant is the wild type; its ddG is 0",
                    stacklevel=2,
                )
        identity = (frozenset((p.key, p.mutant) for p in label.points), label.ddg, label.group)
        if identity in seen and label.ddg == label.ddg:
            continue
        seen.add(identity)
        try:
            found, problem = find_points(label.points, index, types, chains, table.without_ca)
        except ValueError as error:
            if not skip_mismatch:
                raise ValueError(f"{table.name}: {error}") from None
            skipped.append(f"{table.name}: {error}")
            continue
        if problem is not None and outside == "error":
            raise ValueError(f"{table.name}: {problem}")
        if problem is not None and outside == "drop":
            skipped.append(f"{table.name}: {problem}")
            continue
        kept.append(label)
        nodes.append([] if problem else found)
        inside.append(problem is None)
    return kept, nodes, inside, skipped


def collate(graphs: Sequence[InterfaceGraph]) -> Batch:
    """PyG batch of graphs: fields concatenated, node numbers shifted."""
    return Batch.from_data_list(list(graphs))
