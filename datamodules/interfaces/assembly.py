"""From residue tables and labels to the entries of a data set."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from datamodules.base import split as random_split
from datamodules.interfaces.graphs import (
    Label,
    Outside,
    ResidueTable,
    VectorFeatures,
    build_graph,
    place_labels,
)
from datamodules.interfaces.idist import embed
from datamodules.interfaces.mutations import parse_mutation, place, single_mutations
from datamodules.interfaces.sets import Entry
from datamodules.interfaces.skempi import partners_of, report_match
from datamodules.interfaces.splits import Folds, cluster_folds
from datamodules.interfaces.structure import Floats

Tables = Mapping[str, ResidueTable]
HELD_OUT = {
    "Barnase": ("1X1W_A_D", "1X1X_A_D", "1B3S_A_D", "1B2U_A_D", "1B2S_A_D", "1BRS_A_D"),
    "C. thermophilum YTM1": ("5CXB_A_B", "5CYK_A_B"),
    "Complement C3d": ("2NOJ_A_B", "2GOX_A_B", "3D5R_A_C", "3D5S_A_C"),
    "E6AP": ("1C4Z_ABC_D",),
    "dHP1 Chromodomain": ("1KNE_A_P",),
}
"""The five held-out proteins of the test fold and their complexes."""
_PROTEIN = {name: protein for protein, names in HELD_OUT.items() for name in names}


@dataclass
class Assembly:
    """Builds entries with the same options, and numbers the groups of labels.

    Attributes:
        neighbors: edges per residue.
        vectors: vector features.
        partners: chain ids of the binding sides, for all interfaces; None: by interface.
        outside: what happens to mutations outside the interface.
        group_names: complexes or proteins by group number.
    """

    neighbors: int
    vectors: VectorFeatures
    partners: Sequence[str] | None
    outside: Outside
    group_names: list[str] = field(default_factory=list)

    def entry(
        self,
        table: ResidueTable,
        labels: Sequence[Label] = (),
        partners: Sequence[str] | None = None,
        outside: Outside | None = None,
        skipped: list[str] | None = None,
    ) -> Entry:
        """An interface with mutations; with `skipped`, those that don't fit are added there."""
        graph = build_graph(table, self.neighbors, self.vectors, self.partners or partners)
        kept, nodes, inside, left = place_labels(
            table, labels, outside or self.outside, skip_mismatch=skipped is not None
        )
        if skipped is not None:
            skipped += left
        return Entry(graph, tuple(kept), tuple(tuple(n) for n in nodes), tuple(inside))

    def group(self, name: str) -> int:
        """Number of a group, new or known."""
        if name not in self.group_names:
            self.group_names.append(name)
        return self.group_names.index(name)

    def scan(self, table: ResidueTable, sites: Sequence[str] | None) -> Entry:
        """All single substitutions of the sites (`H:53`), default of every residue.

        Raises:
            ValueError: for a site that isn't a residue of the interface.
        """
        keys = table.keys
        wanted = {place(key): node for node, key in enumerate(keys)}
        chosen = sites or list(wanted)
        unknown = [site for site in chosen if site not in wanted]
        if unknown:
            raise ValueError(
                f"{table.name}: site {unknown[0]!r} is not a residue of the interface; "
                "write chain:number and insertion code, as in H:53 or H:52A"
            )
        labels = [
            Label((point,))
            for site in chosen
            for point in single_mutations(keys[wanted[site]], int(table.types[wanted[site]]))
        ]
        return self.entry(table, labels)

    def labelled(
        self,
        frame: pd.DataFrame,
        names: Sequence[str],
        tables: Tables,
        what: str,
        by_protein: bool = False,
        outside: Outside | None = None,
    ) -> list[Entry]:
        """Entries of the labelled interfaces among `names`.

        Args:
            frame: from `read_labels`.
            names: interfaces; those without structure are left out.
            tables: by name.
            what: of the labels, for warnings.
            by_protein: group by the held-out protein and not by complex.
            outside: default that of the assembly.
        """
        entries: list[Entry] = []
        skipped: list[str] = []
        total = matched = beyond = 0
        chosen = frame[frame["interface"].isin([name for name in names if name in tables])]
        for name, rows in chosen.groupby("interface", sort=False):
            table = tables[str(name)]
            labels = []
            columns = rows[["complex", "mutation", "ddg", "protein"]].itertuples(index=False)
            for origin, text, ddg, protein in columns:
                group = _PROTEIN.get(origin, protein) if by_protein else origin
                labels.append(Label(parse_mutation(text), float(ddg), self.group(str(group))))
            sides = partners_of(str(rows["complex"].iloc[0]))
            known = set(table.chain.tolist()) <= set("".join(sides))
            left: list[str] = []
            entry = self.entry(table, labels, sides if known else None, outside, left)
            # left out on purpose (outside the interface) is not a mismatch
            problems = [reason for reason in left if "is not a residue of" not in reason]
            total += len(labels)
            matched += len(labels) - len(problems)
            beyond += len(left) - len(problems) + entry.inside.count(False)
            skipped += problems
            if entry.labels:
                entries.append(entry)
        report_match(matched, total, skipped, what)
        if beyond > 0.3 * total:
            warnings.warn(
                f"{what}: {beyond} of {total} mutations lie outside the interfaces; if the files "
                "hold the whole structures, check the numbering column",
                stacklevel=2,
            )
        return entries


def embeddings(tables: Tables, names: Sequence[str]) -> Floats:
    """(names, 20) iDist embeddings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # residues without neighbours are no news here
        rows = [embed(t.ca, t.types, t.chain) for t in (tables[name] for name in names)]
    return np.stack(rows)


def make_folds(names: Sequence[str], tables: Tables, threshold: float, seed: int) -> Folds:
    """Folds `0`, `1`, `2` and `test` without near duplicates across them.

    With too few clusters folds are random, with fewer than 4 interfaces all the same; both warn.
    """
    keys = ("0", "1", "2", "test")
    if len(names) < 4:
        warnings.warn(
            f"only {len(names)} labelled interface(s): training, validation and test use the same; "
            "their metrics say nothing about other interfaces",
            stacklevel=2,
        )
        return {key: list(names) for key in keys}
    shares = dict(zip(keys, (0.35, 0.35, 0.15, 0.15), strict=True))
    try:
        return cluster_folds(names, embeddings(tables, names), threshold, shares, seed)
    except ValueError:
        warnings.warn(
            "too few iDist clusters for folds without near duplicates; splitting at random",
            stacklevel=2,
        )
        parts = random_split(len(names), [0.35, 0.35, 0.15], seed)
        return {key: [names[i] for i in p.tolist()] for key, p in zip(keys, parts, strict=True)}
