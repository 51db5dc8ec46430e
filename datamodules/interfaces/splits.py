"""Folds of interfaces: the split files of PPIRef and SKEMPI, and folds without near duplicates."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from datamodules.interfaces.idist import cluster
from datamodules.interfaces.structure import Floats
from lightning_modules.components.randomness import seed_from

Folds = dict[str, list[str]]


def read_folds(path: str | Path) -> Folds:
    """Fold name to interface names, from `{"source": ..., "folds": {...}}` or the bare mapping.

    Raises:
        ValueError: if the file isn't such a mapping, a fold is empty or two folds overlap.
    """
    content = json.loads(Path(path).read_text())
    folds = content.get("folds", content) if isinstance(content, dict) else None
    if not isinstance(folds, dict) or not all(isinstance(v, list) for v in folds.values()):
        raise ValueError(f"{path} must map fold names to lists of interfaces, under 'folds'")
    return check_folds({str(name): [str(i) for i in ids] for name, ids in folds.items()})


def check_folds(folds: Folds) -> Folds:
    """Refuse empty and overlapping folds (a fold named `whole` may hold everything)."""
    owner: dict[str, str] = {}
    for name, members in folds.items():
        if not members:
            raise ValueError(f"fold {name!r} is empty")
        if name == "whole":
            continue
        for member in members:
            if owner.setdefault(member, name) != name:
                raise ValueError(f"folds {owner[member]!r} and {name!r} both hold {member}")
    return folds


def choose(folds: Folds, which: str, seed: int = 0) -> list[str]:
    """Members of folds joined with `+`; `whole` is all, a number not in use a random sample.

    Args:
        folds: from `read_folds`.
        which: for example `0+1`, `whole`, or `1000` (that many at random, where no fold has that
            name).
        seed: of the sample.

    Raises:
        ValueError: for an unknown fold, or a sample larger than the data.
    """
    everything = list(dict.fromkeys(m for members in folds.values() for m in members))
    if which in folds:
        return list(folds[which])
    if which == "whole":
        return everything
    if which.isdigit():
        size = int(which)
        if not 0 < size <= len(everything):
            raise ValueError(
                f"a sample of {size} interfaces out of {len(everything)} is impossible"
            )
        order = np.random.default_rng(seed_from(seed, "sample")).permutation(len(everything))
        return [everything[i] for i in sorted(order[:size].tolist())]
    chosen: list[str] = []
    for name in which.split("+"):
        if name not in folds:
            raise ValueError(f"there is no fold {name!r}; there are {', '.join(folds)} and 'whole'")
        chosen += folds[name]
    return list(dict.fromkeys(chosen))


def cluster_folds(
    names: Sequence[str],
    embeddings: Floats,
    threshold: float,
    fractions: Mapping[str, float],
    seed: int = 0,
) -> Folds:
    """Folds such that no near duplicate crosses them: whole iDist clusters, largest first.

    Args:
        names: interfaces.
        embeddings: (n, 20) iDist embeddings.
        threshold: clusters are single linkage at it.
        fractions: fold name to share, summing to 1.
        seed: breaks ties between clusters of one size.

    Raises:
        ValueError: if the shares don't sum to 1 or a fold stays empty.
    """
    if abs(sum(fractions.values()) - 1) > 1e-6 or min(fractions.values()) <= 0:
        raise ValueError(f"fractions must be positive and sum to 1, got {dict(fractions)}")
    label = cluster(embeddings, threshold)
    order = np.random.default_rng(seed_from(seed, "folds")).permutation(label.max() + 1)
    sizes = np.bincount(label)
    folds: Folds = {name: [] for name in fractions}
    for number in sorted(order.tolist(), key=lambda c: -int(sizes[c])):
        # the fold that is furthest behind its share
        name = max(fractions, key=lambda f: fractions[f] * len(names) - len(folds[f]))
        folds[name] += [names[i] for i in np.flatnonzero(label == number).tolist()]
    return check_folds(folds)


def leaks(
    first: Mapping[str, Floats], second: Mapping[str, Floats], threshold: float
) -> list[tuple[str, str, float]]:
    """Near duplicates between two sets of named embeddings, closest first."""
    if not first or not second:
        return []
    a, b = np.stack(list(first.values())), np.stack(list(second.values()))
    distance = np.linalg.norm(a[:, None] - b[None], axis=-1)
    names = (list(first), list(second))
    rows = np.argwhere(distance < threshold)
    found = [(names[0][i], names[1][j], float(distance[i, j])) for i, j in rows.tolist()]
    return sorted(found, key=lambda row: row[2])
