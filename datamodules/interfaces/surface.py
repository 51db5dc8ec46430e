"""Solvent accessible surface and the area buried between chains (Shrake and Rupley, 1973)."""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from datamodules.interfaces.structure import Floats, Structure

RADII = {"C": 1.70, "N": 1.55, "O": 1.52, "S": 1.80, "SE": 1.90, "P": 1.80}
"""Van der Waals radii in A (Bondi); other elements get 1.7."""


def sphere_points(count: int) -> Floats:
    """(count, 3) nearly even points of the unit sphere (golden spiral)."""
    step = np.arange(count) + 0.5
    z = 1 - 2 * step / count
    angle = np.pi * (1 + 5**0.5) * step
    ring = np.sqrt(1 - z * z)
    return np.stack([ring * np.cos(angle), ring * np.sin(angle), z], 1)


def accessible_area(
    position: Floats, element: NDArray[np.str_], points: int = 100, probe: float = 1.4
) -> Floats:
    """Solvent accessible area of every atom.

    Args:
        position: (atoms, 3) in A.
        element: (atoms,) upper-case symbols.
        points: test points per atom.
        probe: radius of the solvent in A.

    Returns:
        (atoms,) in A^2.
    """
    radius = np.array([RADII.get(symbol, 1.7) for symbol in element.tolist()]) + probe
    tree = cKDTree(position)
    pairs = tree.query_pairs(2 * float(radius.max()), output_type="ndarray")
    distance = np.linalg.norm(position[pairs[:, 0]] - position[pairs[:, 1]], axis=1)
    pairs = pairs[distance < radius[pairs[:, 0]] + radius[pairs[:, 1]]]
    pairs = np.concatenate([pairs, pairs[:, ::-1]])
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    sphere = sphere_points(points)
    free = np.ones((len(position), points), dtype=bool)
    # blocks of atom pairs, so that memory stays small for whole complexes
    for start in range(0, len(pairs), 20_000):
        centre, other = pairs[start : start + 20_000].T
        # |x_i + r_i s - x_j| < r_j without forming the points
        offset = position[centre] - position[other]
        level = (radius[other] ** 2 - radius[centre] ** 2 - (offset**2).sum(1)) / (
            2 * radius[centre]
        )
        covered = offset @ sphere.T < level[:, None]
        rows, first = np.unique(centre, return_index=True)
        free[rows] &= ~np.logical_or.reduceat(covered, first, axis=0)
    return np.asarray(4 * np.pi * radius**2 * free.mean(1))


def buried_area(structure: Structure, points: int = 100) -> tuple[float, NDArray[np.bool_]]:
    """Area that the chains of a structure bury in each other.

    Returns:
        Half of the summed loss of accessible area over all pairs of chains, in A^2, and (atoms,)
        bool, which atoms lose any.
    """
    alone, rows = {}, {}
    for chain in structure.chains:
        rows[chain] = np.flatnonzero(structure.chain == chain)
        part = rows[chain]
        alone[chain] = accessible_area(structure.position[part], structure.element[part], points)
    total = 0.0
    loses = np.zeros(len(structure), dtype=bool)
    for first, second in combinations(structure.chains, 2):
        both = np.concatenate([rows[first], rows[second]])
        area = accessible_area(structure.position[both], structure.element[both], points)
        loss = np.concatenate([alone[first], alone[second]]) - area
        total += float(loss.sum())
        loses[both[loss > 1e-9]] = True
    return total / 2, loses
