"""Search for combinations of substitutions: a beam over positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

Substitution = tuple[int, int]
"""(node, mutant type)."""
Score = Callable[[Sequence[frozenset[Substitution]]], Sequence[float]]


class Design(NamedTuple):
    """A set of substitutions and its predicted ddG in kcal/mol."""

    points: frozenset[Substitution]
    ddg: float


def beam_search(
    score: Score,
    candidates: Iterable[Substitution],
    size: int = 3,
    width: int = 16,
    branch: int = 64,
) -> list[Design]:
    """Best sets of up to `size` substitutions at different positions.

    Args:
        score: ddG of many sets at once; lower is better.
        candidates: substitutions to combine.
        size: most positions of a set.
        width: sets kept after every round.
        branch: single substitutions, best first, by which sets are extended.

    Returns:
        The best sets of all sizes found, best first.

    Raises:
        ValueError: if there is no candidate or a bound is not positive.
    """
    if min(size, width, branch) < 1:
        raise ValueError(f"size, width and branch must be positive, got {size}, {width}, {branch}")
    singles = [frozenset([candidate]) for candidate in dict.fromkeys(candidates)]
    if not singles:
        raise ValueError("candidates is empty; give at least one substitution")

    def ranked(sets: list[frozenset[Substitution]]) -> list[Design]:
        values = score(sets)
        designs = [Design(points, float(v)) for points, v in zip(sets, values, strict=True)]
        return sorted(designs, key=lambda design: (design.ddg, sorted(design.points)))

    first = ranked(singles)
    found, beam = first[:width], first[:width]
    steps = [design.points for design in first[:branch]]
    for _ in range(size - 1):
        extended = {
            design.points | step
            for design in beam
            for step in steps
            if not {n for n, _ in step} & {n for n, _ in design.points}
        }
        if not extended:
            break
        beam = ranked(sorted(extended, key=sorted))[:width]
        found = sorted([*found, *beam], key=lambda design: (design.ddg, sorted(design.points)))
    return found[:width]
