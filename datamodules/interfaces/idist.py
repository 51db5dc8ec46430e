"""iDist: near-duplicate interfaces by distance between 20-number embeddings."""

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import cdist
from sklearn.neighbors import NearestNeighbors

from datamodules.interfaces.structure import Floats, Integers

THRESHOLDS = {6.0: 0.04, 10.0: 0.03}
"""Near duplicates are closer than this, by extraction radius in A."""


def embed(
    position: Floats,
    types: Integers,
    chain: ArrayLike,
    number: Integers | None = None,
    strict_reference: bool = False,
) -> Floats:
    """Embedding of one interface.

    Every residue averages the types around it with weights exp(-(d / 4 A)^2), those of its own
    chain with a plus, those of other chains with a minus; then residues are averaged per chain and
    chains with equal weight.

    Args:
        position: (residues, 3) C-alpha in A.
        types: (residues,) residue types 0 to 19.
        chain: (residues,) chain ids.
        number: (residues,) residue numbers, for `strict_reference` only.
        strict_reference: as in the original code, residues of one chain with one number (different
            insertion codes) don't see each other, and an empty mean is NaN.

    Returns:
        (20,).

    Raises:
        ValueError: if there are fewer than two residues, or numbers are missing.
    """
    if len(types) < 2:
        raise ValueError(f"an interface needs at least 2 residues, got {len(types)}")
    chains, group = np.unique(np.asarray(chain), return_inverse=True)
    one_hot = np.zeros((len(types), 20))
    one_hot[np.arange(len(types)), types] = 1.0
    weight = np.exp(-cdist(position, position, "sqeuclidean") / 16.0)
    same = group[:, None] == group[None, :]
    intra, inter = same.copy(), ~same
    np.fill_diagonal(intra, False)
    if strict_reference:
        if number is None:
            raise ValueError("strict_reference needs residue numbers")
        intra &= number[:, None] != number[None, :]
    messages = []
    for mask in (intra, inter):
        count = mask.sum(1, keepdims=True)
        with np.errstate(invalid="ignore"):
            mean = (weight * mask) @ one_hot / (count if strict_reference else np.maximum(count, 1))
        messages.append(mean)
        if not strict_reference and not count.all():
            what = "its own chain" if mask is intra else "another chain"
            warnings.warn(
                f"{int((count == 0).sum())} residue(s) have no neighbour in {what}; "
                "their mean counts as 0",
                stacklevel=2,
            )
    residue = 0.5 * one_hot + 0.25 * (messages[0] - messages[1])
    sums = np.zeros((len(chains), 20))
    np.add.at(sums, group, residue)
    return np.asarray((sums / np.bincount(group)[:, None]).mean(0))


def distances(embeddings: Floats) -> Floats:
    """(n, 20) to (n, n)."""
    return np.asarray(cdist(embeddings, embeddings))


def _check(embeddings: Floats, threshold: float) -> None:
    if threshold <= 0:
        raise ValueError(f"threshold must be positive, got {threshold}")
    if not np.isfinite(embeddings).all():
        row = int(np.flatnonzero(~np.isfinite(embeddings).all(1))[0])
        raise ValueError(f"embedding {row} is not finite; drop it or use strict_reference=False")


def deduplicate(embeddings: Floats, threshold: float, block: int = 2048) -> NDArray[np.bool_]:
    """Which rows stay: a row goes if a later one is closer than the threshold.

    Args:
        embeddings: (n, 20).
        threshold: see `THRESHOLDS`.
        block: rows of the distance matrix held at once.

    Returns:
        (n,) bool. The last member of every group stays.
    """
    _check(embeddings, threshold)
    keep = np.ones(len(embeddings), dtype=bool)
    for start in range(0, len(embeddings), block):
        part = embeddings[start : start + block]
        for other in range(start, len(embeddings), block):
            close = cdist(part, embeddings[other : other + block]) < threshold
            if other == start:
                close = np.triu(close, 1)
            keep[start : start + block] &= ~close.any(1)
    return keep


def cluster(embeddings: Floats, threshold: float) -> Integers:
    """Single linkage at the threshold: connected components of the graph of near duplicates.

    Returns:
        (n,) int64 cluster numbers.
    """
    _check(embeddings, threshold)
    index = NearestNeighbors(radius=threshold).fit(embeddings)
    graph = index.radius_neighbors_graph(mode="distance").tocoo()
    close = graph.data < threshold
    shape = (len(embeddings), len(embeddings))
    links = coo_matrix((np.ones(int(close.sum())), (graph.row[close], graph.col[close])), shape)
    return np.asarray(connected_components(links, directed=False)[1], dtype=np.int64)


class Index:
    """Radius search among the embeddings of many interfaces.

    Args:
        names: one per row.
        embeddings: (n, 20).

    Raises:
        ValueError: if the lengths differ.
    """

    def __init__(self, names: Sequence[str], embeddings: Floats) -> None:
        if len(names) != len(embeddings):
            raise ValueError(f"{len(names)} names for {len(embeddings)} embeddings")
        self.names = list(names)
        self._search = NearestNeighbors().fit(embeddings)

    def query(self, embedding: Floats, threshold: float) -> list[tuple[str, float]]:
        """Names and distances of all interfaces within the threshold, nearest first."""
        distance, row = self._search.radius_neighbors(
            np.atleast_2d(embedding), threshold, sort_results=True
        )
        return [(self.names[i], float(d)) for d, i in zip(distance[0], row[0], strict=True)]
