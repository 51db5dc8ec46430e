"""Static geometry of residue graphs: neighbours, edge vectors, edges grouped by sender.

Everything here depends on the coordinates alone, so it is computed once per structure (or per
batch) and shared by all layers and, in a mutation scan, by all variants.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

COORDINATE_SCALE = 4.0
"""C-alpha coordinates (in A) are divided by this before the network sees them."""


def nearest_neighbors(position: Tensor, k: int = 10) -> tuple[Tensor, Tensor]:
    """The ``k`` nearest other residues of every residue of one graph.

    Args:
        position: (nodes, 3), C-alpha coordinates in A; ties go to the lower index.
        k: neighbours per residue, at least 1.

    Returns:
        ``neighbors`` (nodes, k) int64, nearest first, padded with the residue's own index where the
        graph has fewer than ``k + 1`` residues, and ``exists`` (nodes, k) bool, false on the
        padding.

    Raises:
        ValueError: if ``k`` is not positive, the shape is wrong or a coordinate is not finite.
    """
    if k < 1:
        raise ValueError(f"k (neighbours per residue) must be at least 1, got {k}")
    if position.ndim != 2 or position.shape[1] != 3:
        raise ValueError(f"position must have shape (residues, 3), got {tuple(position.shape)}")
    if not torch.isfinite(position).all():
        row = int((~torch.isfinite(position)).any(dim=1).nonzero()[0])
        raise ValueError(
            f"position of residue index {row} is not finite; remove residues without coordinates"
        )
    nodes = position.shape[0]
    own = torch.arange(nodes, device=position.device)[:, None]
    # Differences, not the matrix-product form of cdist: that form loses digits for structures far
    # from the origin.
    distance = torch.cdist(position, position, compute_mode="donot_use_mm_for_euclid_dist")
    distance.fill_diagonal_(float("inf"))
    found = min(k, nodes - 1)
    order = torch.sort(distance, dim=1, stable=True).indices[:, :found]
    neighbors = own.repeat(1, k)
    neighbors[:, :found] = order
    exists = torch.zeros(nodes, k, dtype=torch.bool, device=position.device)
    exists[:, :found] = True
    return neighbors, exists


class Geometry(NamedTuple):
    """Edges of a batch of residue graphs as a table of ``k`` senders for every receiver.

    Attributes:
        neighbors: (nodes, k) int64, sender of each edge.
        attends: (nodes, k) bool, edges that the degree-0 attention may use.
        within: (nodes, k) bool, edges that exist and lie within the radius.
        distance: (nodes, k), scaled distance.
        unit: (nodes, k, 3), unit vector from sender to receiver; zero for coincident residues.
        by_sender: (nodes, d) int64, flat edge numbers leaving each sender; padding points one past
            the last edge.
        slot: (nodes * k,) int64, where each edge sits in the flattened ``by_sender``; one past its
            end for edges that are not listed there.
    """

    neighbors: Tensor
    attends: Tensor
    within: Tensor
    distance: Tensor
    unit: Tensor
    by_sender: Tensor
    slot: Tensor


def group_by_sender(neighbors: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """List the used edges of every sender in a table padded to the largest out-degree.

    Args:
        neighbors: (nodes, k) int64.
        used: (nodes, k) bool.

    Returns:
        ``by_sender`` (nodes, d) and ``slot`` (nodes * k,), see `Geometry`.
    """
    nodes, k = neighbors.shape
    flat = neighbors.reshape(-1)
    edges = used.reshape(-1).nonzero()[:, 0]
    sender = flat[edges]
    order = torch.argsort(sender, stable=True)
    edges, sender = edges[order], sender[order]
    degree = torch.bincount(sender, minlength=nodes)
    width = max(int(degree.max()) if degree.numel() else 0, 1)
    start = torch.cumsum(degree, 0) - degree
    rank = torch.arange(edges.numel(), device=flat.device) - start[sender]
    by_sender = torch.full((nodes, width), nodes * k, dtype=torch.int64, device=flat.device)
    by_sender[sender, rank] = edges
    slot = torch.full((nodes * k,), nodes * width, dtype=torch.int64, device=flat.device)
    slot[edges] = sender * width + rank
    return by_sender, slot


def build_geometry(
    position: Tensor,
    neighbors: Tensor,
    exists: Tensor,
    *,
    radius: float = 8.0,
    scale: float = COORDINATE_SCALE,
    reference_attention: bool = False,
) -> Geometry:
    """Edge quantities of a batch of graphs, always in at least single precision.

    Args:
        position: (nodes, 3), C-alpha coordinates in A.
        neighbors: (nodes, k) int64, indices into the batch.
        exists: (nodes, k) bool.
        radius: largest scaled distance of an edge.
        scale: divisor of the coordinates.
        reference_attention: let degree-0 attention see neighbours beyond ``radius``, as the
            original encoder does.
    """
    with torch.autocast(position.device.type, enabled=False):
        scaled = (position if position.dtype == torch.float64 else position.float()) / scale
        offset = scaled[:, None, :] - scaled[neighbors]
        squared = offset.square().sum(-1)
        # Coincident residues (duplicate records) have no direction: a zero vector, and no division
        # by zero.
        apart = squared > 0
        distance = torch.where(apart, squared, torch.ones_like(squared)).sqrt()
        unit = torch.where(apart[..., None], offset / distance[..., None], torch.zeros_like(offset))
        distance = torch.where(apart, distance, torch.zeros_like(distance))
    within = exists & (distance <= radius)
    attends = exists if reference_attention else within
    by_sender, slot = group_by_sender(neighbors, attends)
    return Geometry(neighbors, attends, within, distance, unit, by_sender, slot)


def neighbors_within(
    position: Tensor, part: Tensor, ptr: Sequence[int], k: int = 10
) -> tuple[Tensor, Tensor]:
    """Nearest neighbours among the residues of the same part of the same graph.

    With the binding sides as parts this is the graph of the partners alone, unbound.

    Args:
        position: (nodes, 3) in A.
        part: (nodes,) int64.
        ptr: first node of every graph, and the number of nodes at the end.
        k: neighbours per residue.

    Returns:
        As `nearest_neighbors`, with indices into the batch.
    """
    neighbors = torch.empty(len(part), k, dtype=torch.int64, device=part.device)
    exists = torch.zeros(len(part), k, dtype=torch.bool, device=part.device)
    for start, stop in pairwise(ptr):
        for value in torch.unique(part[start:stop]):
            rows = start + (part[start:stop] == value).nonzero()[:, 0]
            local, found = nearest_neighbors(position[rows], k)
            neighbors[rows], exists[rows] = rows[local], found
    return neighbors, exists
