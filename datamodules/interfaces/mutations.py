"""Mutation strings: grammar, and finding the mutated residues in an interface."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from datamodules.interfaces.structure import RESIDUES, THREE_LETTER

_SHORT = re.compile(rf"([{RESIDUES}])([A-Za-z0-9])(-?\d+)([A-Za-z]?)([{RESIDUES}])")
_LONG = re.compile(rf"([{RESIDUES}]):([^:,\s]+):(-?\d+)([A-Za-z]?):([{RESIDUES}])")

ResidueKey = tuple[str, int, str]
"""(chain, number, insertion code in upper case)."""


@dataclass(frozen=True)
class Point:
    """One substitution.

    Attributes:
        wild: residue type 0 to 19 before.
        key: chain, number and insertion code.
        mutant: residue type after.
    """

    wild: int
    key: ResidueKey
    mutant: int

    def __str__(self) -> str:
        chain, number, insertion = self.key
        wild, mutant = RESIDUES[self.wild], RESIDUES[self.mutant]
        if len(chain) == 1:
            return f"{wild}{chain}{number}{insertion}{mutant}"
        return f"{wild}:{chain}:{number}{insertion}:{mutant}"


def parse_mutation(text: str) -> tuple[Point, ...]:
    """Points of `SC16A` or `SC16A,FC47A`; repeated points count once.

    A point is wild type, chain, number, optional insertion code (any case) and mutant. Chain ids of
    several characters are written with colons, `S:AA:16:A`.

    Raises:
        ValueError: for anything else, or two mutants at one position.
    """
    points: dict[ResidueKey, Point] = {}
    for part in str(text).replace('"', "").split(","):
        match = _SHORT.fullmatch(part.strip()) or _LONG.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"mutation {text!r}: {part.strip()!r} is not wild type, chain, number, optional "
                "insertion code and mutant, as in SC16A (or S:AA:16:A for long chain ids)"
            )
        wild, chain, number, insertion, mutant = match.groups()
        key = (chain, int(number), insertion.upper())
        point = Point(RESIDUES.index(wild), key, RESIDUES.index(mutant))
        if points.setdefault(key, point) != point:
            raise ValueError(f"mutation {text!r} names position {place(key)} twice")
    return tuple(points.values())


def place(key: ResidueKey) -> str:
    """`C:16` or `H:52A`."""
    chain, number, insertion = key
    return f"{chain}:{number}{insertion}"


def find_points(
    points: Sequence[Point],
    nodes: dict[ResidueKey, int],
    types: Sequence[int],
    chains: Sequence[str],
    without_ca: Sequence[ResidueKey] = (),
) -> tuple[list[int], str | None]:
    """Nodes of the points in an interface.

    Args:
        points: of one mutation.
        nodes: residue to node.
        types: wild type of every node.
        chains: chain ids of the interface.
        without_ca: residues left out because they have no C-alpha.

    Returns:
        The nodes, and None or why a point is not among the residues of the interface.

    Raises:
        ValueError: for an unknown chain, a wild type that differs from the structure, or a residue
            without C-alpha.
    """
    found: list[int] = []
    outside: str | None = None
    for point in points:
        if point.key[0] not in chains:
            raise ValueError(
                f"mutation {point}: there is no chain {point.key[0]!r}; "
                f"the interface has {', '.join(chains)}"
            )
        if point.key in without_ca:
            raise ValueError(f"mutation {point}: residue {place(point.key)} has no C-alpha atom")
        if point.key not in nodes:
            outside = (
                f"mutation {point}: {place(point.key)} is not a residue of the interface "
                "(beyond its radius, absent, or not one of the 20 standard residues)"
            )
            continue
        node = nodes[point.key]
        if types[node] != point.wild:
            raise ValueError(
                f"mutation {point}: position {place(point.key)} is {THREE_LETTER[types[node]]}, "
                f"mutation says {THREE_LETTER[point.wild]}"
            )
        found.append(node)
    return found, outside


def single_mutations(key: ResidueKey, wild: int) -> list[Point]:
    """The 19 substitutions of a residue."""
    return [Point(wild, key, mutant) for mutant in range(20) if mutant != wild]
