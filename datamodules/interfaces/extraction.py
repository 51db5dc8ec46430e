"""Cutting interfaces out of structures: contacts, joined partners, quality filter."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isnan
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from datamodules.interfaces.structure import Structure, pdb_text, read_structure
from datamodules.interfaces.surface import buried_area

Kind = Literal["heavy", "bsa"]


def _whole_residues(structure: Structure, atoms: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """(atoms,) bool: all atoms of residues of which one is marked."""
    residue = structure.residue_rows()
    marked = np.zeros(residue.max(initial=-1) + 1, dtype=bool)
    marked[residue[atoms]] = True
    return marked[residue]


def _chain_atoms(structure: Structure, chains: Iterable[str]) -> dict[str, NDArray[np.int64]]:
    present = structure.chains
    rows = {}
    for chain in chains:
        if chain not in present:
            raise ValueError(
                f"{structure.name} has no protein chain {chain!r}; it has {', '.join(present)}"
            )
        rows[chain] = np.flatnonzero(structure.chain == chain)
    return rows


def _contacts(
    structure: Structure, rows: dict[str, NDArray[np.int64]], pair: tuple[str, str], radius: float
) -> NDArray[np.bool_]:
    """(atoms,) bool: atoms of either chain strictly closer than `radius` to the other."""
    marked = np.zeros(len(structure), dtype=bool)
    for own, other in (pair, pair[::-1]):
        tree = cKDTree(structure.position[rows[other]])
        # the bound of the query is only a speed-up: a little wider, then strictly compared
        distance, _ = tree.query(
            structure.position[rows[own]], distance_upper_bound=radius * 1.001 + 1e-6
        )
        marked[rows[own][distance < radius]] = True
    return marked


def extract(
    structure: Structure,
    chains: Sequence[str],
    radius: float = 10.0,
    kind: Kind = "heavy",
    expansion_radius: float = 0.0,
) -> Structure:
    """Interface residues among the named chains, over all pairs of them.

    Args:
        structure: complex.
        chains: at least two chain ids; with more, the union over all pairs, also within a partner.
        radius: heavy atoms strictly closer than this (A) are in contact.
        kind: `heavy` (contacts) or `bsa` (residues that lose accessible surface).
        expansion_radius: residues of the same chain within this distance (A) of the interface join.

    Returns:
        The interface in the order of the file, named `<id>_<a>_<b>...`.

    Raises:
        ValueError: for an unknown chain, fewer than two chains, a radius that isn't positive, or
            no contact.
    """
    if len(set(chains)) < 2:
        raise ValueError(
            f"{structure.name}: an interface needs two chains, got {', '.join(chains) or 'none'}; "
            f"the structure has {', '.join(structure.chains)}"
        )
    if radius <= 0:
        raise ValueError(f"radius must be positive, got {radius}")
    rows = _chain_atoms(structure, chains)
    if kind == "heavy":
        marked = np.zeros(len(structure), dtype=bool)
        for pair in combinations(rows, 2):
            marked |= _contacts(structure, rows, pair, radius)
    elif kind == "bsa":
        inside = np.isin(structure.chain, list(rows))
        marked = np.zeros(len(structure), dtype=bool)
        marked[np.flatnonzero(inside)] = buried_area(structure.select(inside))[1]
    else:
        raise ValueError(f"kind must be 'heavy' or 'bsa', got {kind!r}")
    if not marked.any():
        raise ValueError(
            f"{structure.name}: chains {', '.join(rows)} have no contact within {radius} A"
        )
    keep = _whole_residues(structure, marked)
    if expansion_radius > 0:
        for own in rows.values():
            core = own[keep[own]]
            if len(core):
                distance, _ = cKDTree(structure.position[core]).query(structure.position[own])
                marked[own[distance < expansion_radius]] = True
        keep = _whole_residues(structure, marked)
    interface = structure.select(keep)
    name = "_".join([structure.name, *rows])
    return Structure(**{**interface.__dict__, "name": name})


def extract_dimers(
    structure: Structure, radius: float = 10.0, **options: object
) -> list[Structure]:
    """One interface for every unordered pair of chains that touch; see `extract`.

    Raises:
        ValueError: if the structure has fewer than two protein chains.
    """
    chains = structure.chains
    if len(chains) < 2:
        raise ValueError(
            f"{structure.name} has {len(chains)} protein chain ({', '.join(chains)}); "
            "an interface needs two"
        )
    rows = _chain_atoms(structure, chains)
    trees = {chain: cKDTree(structure.position[rows[chain]]) for chain in chains}
    dimers = []
    for first, second in combinations(sorted(chains), 2):
        touching = trees[first].count_neighbors(trees[second], np.nextafter(radius, 0))
        if touching:
            dimers.append(extract(structure, (first, second), radius, **options))  # type: ignore[arg-type]
    return dimers


@dataclass(frozen=True)
class QualityFilter:
    """Which interfaces are good enough to learn from; the defaults are those of PPIRef300K.

    Attributes:
        methods: allowed experimental methods.
        resolution: largest resolution in A; unknown fails.
        buried_area: smallest buried area in A^2; 0 skips its computation.
    """

    methods: tuple[str, ...] = ("x-ray diffraction", "electron microscopy")
    resolution: float = 3.5
    buried_area: float = 500.0

    def reason(self, interface: Structure) -> str | None:
        """Why an interface is refused, or None."""
        if interface.method not in self.methods:
            return f"method {interface.method or 'unknown'!r} is not {' or '.join(self.methods)}"
        if not interface.resolution <= self.resolution:
            return f"resolution {interface.resolution} A is not <= {self.resolution} A"
        if self.buried_area > 0:
            area = buried_area(interface)[0]
            if area < self.buried_area:
                return f"buried area {area:.0f} A^2 is not >= {self.buried_area:.0f} A^2"
        return None


def write_interface(
    interface: Structure,
    folder: str | Path,
    kind: Kind = "heavy",
    radius: float = 10.0,
    expansion_radius: float = 0.0,
    area: float | None = None,
) -> Path:
    """Write `<folder>/<characters 2-3 of the id>/<name>.pdb` with its origin in remarks."""
    target = Path(folder) / interface.name[1:3].lower() / f"{interface.name}.pdb"
    target.parent.mkdir(parents=True, exist_ok=True)
    dates = zip(("DEPOSITION", "RELEASE"), interface.dates, strict=False)
    remarks = [
        f"KIND: {kind}",
        f"EXTRACTION RADIUS: {radius} A",
        f"EXPANSION RADIUS: {expansion_radius} A",
        f"RESOLUTION: {'None' if isnan(interface.resolution) else interface.resolution} A",
        f"STRUCTURE METHOD: {interface.method or 'unknown'}",
        *(f"{what} DATE: {date}" for what, date in dates),
        *([] if area is None else [f"BSA: {area} A^2"]),
    ]
    target.write_text(pdb_text(interface, remarks))
    return target


def extract_folder(
    paths: Iterable[str | Path],
    folder: str | Path,
    radius: float = 10.0,
    quality: QualityFilter | None = None,
) -> tuple[list[Path], dict[str, str]]:
    """All dimers of many structure files.

    Args:
        paths: structure files.
        folder: where the interface files go.
        radius: contact distance in A.
        quality: filter, None keeps everything.

    Returns:
        The files written, and for every structure or interface left out the reason.
    """
    written: list[Path] = []
    refused: dict[str, str] = {}
    for path in paths:
        try:
            dimers = extract_dimers(read_structure(path), radius)
        except ValueError as error:
            refused[str(path)] = str(error)
            continue
        for dimer in dimers:
            reason = None if quality is None else quality.reason(dimer)
            if reason is None:
                written.append(write_interface(dimer, folder, radius=radius))
            else:
                refused[dimer.name] = reason
    return written, refused
