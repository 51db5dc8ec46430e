"""Protein interfaces as residue graphs: for pre-training, ddG labels, scans and case studies."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from datamodules.base import Order, SuiteDataModule, split
from datamodules.interfaces.files import load_tables
from datamodules.interfaces.graphs import (
    Label,
    ResidueTable,
    build_graph,
    place_labels,
    residue_table,
)
from datamodules.interfaces.idist import THRESHOLDS, deduplicate, embed
from datamodules.interfaces.mutations import parse_mutation, place, single_mutations
from datamodules.interfaces.potts import PottsInterfaces, sample_interfaces
from datamodules.interfaces.sets import Entry, InterfaceSet, NodeBudgetOrder
from datamodules.interfaces.skempi import interface_name, partners_of, read_labels, report_match
from datamodules.interfaces.splits import Folds, check_folds, choose, cluster_folds, read_folds
from datamodules.interfaces.structure import parse_structure
from datamodules.interfaces.vendored import asset, shipped_tables

Task = Literal["pretrain", "ddg", "scan", "mutations", "sars", "sak"]
CASES = {
    "sars": ("7FAE-RBD-Fv_A_H_L", "7FAE_mutations.csv.gz", ("A", "HL")),
    "sak": ("1bui_A_C", "SAK_activities.csv", ("A", "C")),
}
CASE_COLUMNS = {
    "sars": ("stabilizing", "stabilizing"),
    "sak": ("Activity enhancement", "2x activity enhancement"),
}
HELD_OUT = {
    "Barnase": ("1X1W_A_D", "1X1X_A_D", "1B3S_A_D", "1B2U_A_D", "1B2S_A_D", "1BRS_A_D"),
    "C. thermophilum YTM1": ("5CXB_A_B", "5CYK_A_B"),
    "Complement C3d": ("2NOJ_A_B", "2GOX_A_B", "3D5R_A_C", "3D5S_A_C"),
    "E6AP": ("1C4Z_ABC_D",),
    "dHP1 Chromodomain": ("1KNE_A_P",),
}
"""The five held-out proteins of the test fold and their complexes."""
_PROTEIN = {name: protein for protein, names in HELD_OUT.items() for name in names}


class Interfaces(SuiteDataModule):
    """Protein-protein interfaces.

    Batches are PyG `Batch`es of `datamodules.interfaces.graphs.InterfaceGraph`: C-alpha positions
    in A, virtual C-beta vectors, nearest neighbours, residue types, and mutations with ddG in
    kcal/mol (negative = stronger binding).

    Sources:

    - `potts`: model interfaces with a known energy, generated, no files (default);
    - `real`: 369 interfaces at 10 A from the Protein Data Bank with 1,610 SKEMPI labels and two
      case studies, shipped;
    - `files`: your own structures (`structures=`) and labels (`labels=`).

    Tasks:

    - `pretrain`: interfaces without labels for training; validation carries labels where there are
      any, for zero-shot correlations;
    - `ddg`: labelled interfaces in folds;
    - `scan`: all single substitutions of `sites` (default: every residue) of each interface;
    - `mutations`: the given `mutations` of each interface;
    - `sars`, `sak`: the case studies that come with `real`.

    Args:
        source: `potts`, `real` or `files`.
        task: what is loaded, see above.
        batch_size: interfaces per batch and device.
        seed: of the model interfaces, splits, orders and sampled mutations.
        num_workers: worker processes of a loader.
        cache_dir: keeps the residue tables of `files`.
        sampling: order of training, see `SuiteDataModule`.
        max_nodes_per_batch: fill training batches up to this many residues instead of counting
            interfaces.
        neighbors: edges per residue.
        vectors: `virtual_cb` (as published) or `backbone` (also directions to the sequence
            neighbours: 3 vectors).
        structures: `files`: folder, archive or one file of PDB or mmCIF structures.
        radius: `files`: cut interfaces out of whole structures at this distance in A; null takes
            the files as interfaces.
        chains: `files`: chains to cut between, default those in the file name, else all.
        partners: chain ids of the binding sides, for example [A, HL]; default each chain for itself
            (SKEMPI complexes: their two sides).
        folds: JSON file of folds; default for `real` the published folds of SKEMPI, for `files` a
            random split by iDist clusters.
        train_folds: folds joined by `+`, `whole`, or `rest`: all that aren't for validation or
            test.
        val_folds: folds joined by `+`.
        test_folds: folds joined by `+`.
        labels: `files`: CSV of ddG labels, SKEMPI's or your own columns.
        complex_column, mutation_column, ddg_column: names in an own CSV.
        numbering: which SKEMPI column fits the structures: `pdb` or `cleaned`.
        mutations: `mutations`: strings such as `SC16A,FC47A`.
        sites: `scan`: residues such as `H:53` or `H:52A`.
        outside: a mutation with a residue outside the interface is flagged for imputation in
            evaluation (`impute`), left out (`drop`) or an error (`error`). Training leaves it out.
        mutations_per_interface: mutations drawn per training interface and epoch; null takes all.
        deduplicate: leave out near duplicates (iDist) of pre-training interfaces, and those that
            are near duplicates of validation or test interfaces.
        interfaces: `potts`: number of training interfaces; 20 more each are made for validation
            and test.
        labels_per_interface: `potts`: labelled mutations per training interface.
        evaluation_labels: `potts`: the same of the 20 validation and 20 test interfaces.
        residues_per_chain: `potts`.

    Raises:
        ValueError: for an unknown choice, missing files, folds that overlap, unknown chains.
    """

    sources = ("potts", "real", "files")

    def __init__(
        self,
        source: str = "potts",
        task: Task = "pretrain",
        batch_size: int = 16,
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
        sampling: str = "shuffle",
        max_nodes_per_batch: int | None = None,
        neighbors: int = 10,
        vectors: Literal["virtual_cb", "backbone"] = "virtual_cb",
        structures: str | None = None,
        radius: float | None = None,
        chains: list[str] | None = None,
        partners: list[str] | None = None,
        folds: str | None = None,
        train_folds: str = "0+1",
        val_folds: str = "2",
        test_folds: str = "test",
        labels: str | None = None,
        complex_column: str | None = None,
        mutation_column: str | None = None,
        ddg_column: str | None = None,
        numbering: Literal["pdb", "cleaned"] = "pdb",
        mutations: list[str] | None = None,
        sites: list[str] | None = None,
        outside: Literal["impute", "drop", "error"] = "impute",
        mutations_per_interface: int | None = 1,
        deduplicate: bool = True,
        interfaces: int = 160,
        labels_per_interface: int = 12,
        evaluation_labels: int = 30,
        residues_per_chain: int = 20,
    ) -> None:
        super().__init__(source, batch_size, seed, num_workers, cache_dir, sampling)
        tasks = ("pretrain", "ddg", "scan", "mutations", "sars", "sak")
        if task not in tasks:
            raise ValueError(f"task must be one of {', '.join(tasks)}, got {task!r}")
        if task in CASES and source != "real":
            raise ValueError(f"task={task!r} comes with source='real', got source={source!r}")
        if source == "files" and structures is None:
            raise ValueError("source='files' needs structures=<folder, archive or structure file>")
        if source == "files" and task == "ddg" and labels is None:
            raise ValueError("source='files' with task='ddg' needs labels=<CSV file>")
        if task == "mutations" and not mutations:
            raise ValueError("task='mutations' needs mutations, for example [SC16A, 'SC16A,FC47A']")
        if mutations_per_interface is not None and mutations_per_interface < 1:
            raise ValueError(
                f"mutations_per_interface must be at least 1 or null, got {mutations_per_interface}"
            )
        if max_nodes_per_batch is not None and max_nodes_per_batch < 1:
            raise ValueError(f"max_nodes_per_batch must be positive, got {max_nodes_per_batch}")
        if radius is not None and radius <= 0:
            raise ValueError(f"radius must be positive, got {radius}")
        if interfaces < 1:
            raise ValueError(f"interfaces must be at least 1, got {interfaces}")
        for text in mutations or ():
            parse_mutation(text)
        self.task = task
        self.max_nodes_per_batch = max_nodes_per_batch
        self.neighbors, self.vectors = neighbors, vectors
        self.structures, self.radius, self.chains = structures, radius, chains
        self.partners, self.folds = partners, folds
        self.train_folds, self.val_folds, self.test_folds = train_folds, val_folds, test_folds
        self.labels, self.numbering = labels, numbering
        self.columns = (complex_column, mutation_column, ddg_column)
        self.mutations, self.sites, self.outside = mutations, sites, outside
        self.mutations_per_interface = mutations_per_interface
        self.deduplicate = deduplicate
        self.interfaces = interfaces
        self.labels_per_interface = labels_per_interface
        self.evaluation_labels = evaluation_labels
        self.residues_per_chain = residues_per_chain
        self.group_names: list[str] = []
        # of a case study: known improving mutations, and those whose ranks are listed
        self.improving: list[str] = []
        self.reported: list[str] = []
        self.potts: PottsInterfaces | None = None
        self._ready = False

    # ------------------------------------------------------------------ what a module may ask for

    @property
    def residue_counts(self) -> torch.Tensor:
        """(20,) int64, residue types of the training interfaces."""
        if not isinstance(self.train_set, InterfaceSet):
            raise ValueError(f"task={self.task!r} has no training interfaces to count residues in")
        types = torch.cat([entry.graph.types for entry in self.train_set.entries])
        return torch.bincount(types, minlength=20)

    @property
    def mean_ddg(self) -> float:
        """Mean label of the training mutations in kcal/mol."""
        if not isinstance(self.train_set, InterfaceSet):
            return float("nan")
        values = [label.ddg for entry in self.train_set.entries for label in entry.labels]
        return float(np.mean(values)) if values else float("nan")

    # ------------------------------------------------------------------ set-up

    def setup(self, stage: str | None = None) -> None:
        """Build graphs and neighbours of every interface once."""
        if self._ready:
            return
        if self.source == "potts":
            self._setup_potts()
        elif self.task in CASES:
            self._setup_case()
        else:
            self._setup_tables()
        self._ready = True

    def train_order(self, size: int, rank: int, world_size: int) -> Order:
        """By residues where `max_nodes_per_batch` is given, else by interfaces."""
        if self.max_nodes_per_batch is None:
            return super().train_order(size, rank, world_size)
        assert isinstance(self.train_set, InterfaceSet)
        sizes = self.train_set.sizes()
        return NodeBudgetOrder(sizes, self.max_nodes_per_batch, self.seed, rank, world_size)

    def _entry(
        self,
        table: ResidueTable,
        labels: Sequence[Label] = (),
        partners: Sequence[str] | None = None,
        outside: Literal["impute", "drop", "error"] | None = None,
        skipped: list[str] | None = None,
    ) -> Entry:
        chosen = self.partners or partners
        graph = build_graph(table, self.neighbors, self.vectors, chosen)
        kept, nodes, inside, left = place_labels(
            table, labels, outside or self.outside, skip_mismatch=skipped is not None
        )
        if skipped is not None:
            skipped += left
        return Entry(graph, tuple(kept), tuple(tuple(n) for n in nodes), tuple(inside))

    def _group(self, name: str) -> int:
        if name not in self.group_names:
            self.group_names.append(name)
        return self.group_names.index(name)

    def _setup_potts(self) -> None:
        held_out = 20
        total = self.interfaces + 2 * held_out
        data = self.potts = sample_interfaces(total, self.seed, self.residues_per_chain)
        self.group_names = [data.table(number).name for number in range(total)]

        def entries(numbers: Iterable[int], count: int) -> list[Entry]:
            return [
                self._entry(data.table(i), data.labels(i, count, self.seed) if count else ())
                for i in numbers
            ]

        # held-out interfaces come first, so that they are the same for any number of others
        parts = np.split(np.arange(total), [held_out, 2 * held_out])
        test, val, train = (part.tolist() for part in parts)
        if self.task in ("scan", "mutations"):
            tables = [data.table(number) for number in test]
            self.predict_set = self.test_set = InterfaceSet([self._asked(t) for t in tables])
            return
        supervised = self.task == "ddg"
        sample = self.mutations_per_interface if supervised else None
        train_labels = self.labels_per_interface if supervised else 0
        self.train_set = InterfaceSet(entries(train, train_labels), sample, self.seed)
        self.val_set = InterfaceSet(entries(val, self.evaluation_labels))
        self.test_set = InterfaceSet(entries(test, self.evaluation_labels))

    def _asked(self, table: ResidueTable, partners: Sequence[str] | None = None) -> Entry:
        """An interface with the mutations of a scan or of a list."""
        if self.task == "mutations":
            labels = [Label(parse_mutation(text)) for text in self.mutations or ()]
            return self._entry(table, labels, partners)
        keys = table.keys
        wanted = {place(key): node for node, key in enumerate(keys)}
        sites = self.sites or list(wanted)
        unknown = [site for site in sites if site not in wanted]
        if unknown:
            raise ValueError(
                f"{table.name}: site {unknown[0]!r} is not a residue of the interface; "
                "write chain:number and insertion code, as in H:53 or H:52A"
            )
        labels = [
            Label((point,))
            for site in sites
            for point in single_mutations(keys[wanted[site]], int(table.types[wanted[site]]))
        ]
        return self._entry(table, labels, partners)

    def _setup_case(self) -> None:
        name, file, partners = CASES[self.task]
        structure = parse_structure(asset(f"{name}.pdb.gz").read_bytes(), f"{name}.pdb.gz")
        table = residue_table(structure)
        frame = pd.read_csv(asset(file))
        labels = [Label(parse_mutation(text)) for text in frame["Mutation(s)"]]
        known, listed = CASE_COLUMNS[self.task]
        self.improving = frame["Mutation(s)"][frame[known].astype(bool)].tolist()
        self.reported = frame["Mutation(s)"][frame[listed].astype(bool)].tolist()
        self.predict_set = self.test_set = InterfaceSet([self._entry(table, labels, partners)])
        self.group_names = [name]

    def _tables(self) -> dict[str, ResidueTable]:
        if self.source == "real":
            return shipped_tables()
        assert self.structures is not None
        return load_tables(
            self.structures, radius=self.radius, chains=self.chains, cache_dir=self.cache_dir
        )

    def _embeddings(self, tables: dict[str, ResidueTable]) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # residues without neighbours: told once per data set
            return {
                name: embed(table.ca, table.types, table.chain) for name, table in tables.items()
            }

    @property
    def threshold(self) -> float:
        """Distance (iDist) below which two interfaces are near duplicates, by extraction radius."""
        return THRESHOLDS.get(self.radius or 10.0, 0.03)

    def _folds(self, names: list[str], tables: dict[str, ResidueTable]) -> Folds:
        if self.folds is not None:
            return read_folds(self.folds)
        if self.source == "real":
            return read_folds(asset("skempi2_folds.json"))
        if len(names) < 4:
            everything = list(names)
            return {"0": everything, "1": everything, "2": everything, "test": everything}
        embedded = self._embeddings({name: tables[name] for name in names})
        matrix = np.stack([embedded[name] for name in names])
        shares = {"0": 0.35, "1": 0.35, "2": 0.15, "test": 0.15}
        try:
            return cluster_folds(names, matrix, self.threshold, shares, self.seed)
        except ValueError:
            # few clusters: no non-leaking split exists, and the user should know
            warnings.warn(
                "too few iDist clusters for folds without near duplicates; splitting at random",
                stacklevel=2,
            )
            parts = split(len(names), [0.35, 0.35, 0.15], self.seed)
            keys = ("0", "1", "2", "test")
            return {k: [names[i] for i in p.tolist()] for k, p in zip(keys, parts, strict=True)}

    def _labels(self, tables: dict[str, ResidueTable]) -> pd.DataFrame | None:
        path = asset("ddg_labels.csv.gz") if self.source == "real" else self.labels
        if path is None:
            return None
        frame = read_labels(path, *self.columns, numbering=self.numbering)
        # complexes may be written 1ABC_AB_C while files are named 1ABC_A_B_C
        names = [
            name if name in tables else interface_name(name) for name in frame["interface"].tolist()
        ]
        return frame.assign(interface=names)

    def _labelled(
        self,
        frame: pd.DataFrame,
        names: Sequence[str],
        tables: dict[str, ResidueTable],
        by_protein: bool,
        outside: Literal["impute", "drop", "error"],
        what: str,
    ) -> list[Entry]:
        entries: list[Entry] = []
        skipped: list[str] = []
        total = matched = beyond = 0
        for name, rows in frame[frame["interface"].isin(list(names))].groupby(
            "interface", sort=False
        ):
            if name not in tables:
                continue
            labels = []
            columns = rows[["complex", "mutation", "ddg", "protein"]].itertuples(index=False)
            for origin, text, ddg, protein in columns:
                group = _PROTEIN.get(origin, protein) if by_protein else origin
                labels.append(Label(parse_mutation(text), float(ddg), self._group(str(group))))
            origin = str(rows["complex"].iloc[0])
            sides = partners_of(origin)
            chains = set(tables[str(name)].chain.tolist())
            known = chains <= set("".join(sides))
            before = len(skipped)
            total += len(labels)
            entry = self._entry(
                tables[str(name)], labels, sides if known else None, outside, skipped
            )
            # left out on purpose (outside the interface) is not a mismatch
            problems = [s for s in skipped[before:] if "is not a residue of" not in s]
            beyond += len(skipped) - before - len(problems) + entry.inside.count(False)
            del skipped[before:]
            skipped += problems
            matched += len(labels) - len(problems)
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

    def _setup_tables(self) -> None:
        tables = self._tables()
        if self.task in ("scan", "mutations"):
            chosen = (
                list(tables)
                if self.source == "files"
                else choose(self._folds(list(tables), tables), self.test_folds)
            )
            entries = [self._asked(tables[name]) for name in chosen if name in tables]
            self.predict_set = self.test_set = InterfaceSet(entries)
            return
        frame = self._labels(tables)
        labelled = set() if frame is None else set(frame["interface"])
        if self.task == "ddg":
            assert frame is not None
            known = [name for name in tables if name in labelled]
            if not known:
                raise ValueError(
                    f"none of the {len(labelled)} labelled interfaces is among the structures; "
                    f"first label: {sorted(labelled)[0]}, first structure: {next(iter(tables))}"
                )
            folds = self._folds(known, tables)
            self._setup_labelled(frame, folds, tables)
            return
        self._setup_pretraining(frame, labelled, tables)

    def _setup_labelled(
        self, frame: pd.DataFrame, folds: Folds, tables: dict[str, ResidueTable]
    ) -> None:
        train_folds = self.train_folds
        if train_folds == "rest":
            used = {*self.val_folds.split("+"), *self.test_folds.split("+")}
            train_folds = "+".join(name for name in folds if name not in used)
        names = {
            part: choose(folds, which, self.seed)
            for part, which in (
                ("train", train_folds),
                ("val", self.val_folds),
                ("test", self.test_folds),
            )
        }
        if self.folds is not None or len(tables) >= 4:
            check_folds(names)
        train = self._labelled(frame, names["train"], tables, False, "drop", "training labels")
        if not train:
            raise ValueError(f"train_folds={self.train_folds!r} has no labelled interface")
        self.train_set = InterfaceSet(train, self.mutations_per_interface, self.seed)
        val = self._labelled(frame, names["val"], tables, False, self.outside, "validation labels")
        test = self._labelled(frame, names["test"], tables, True, self.outside, "test labels")
        self.val_set = InterfaceSet(val)
        self.test_set = InterfaceSet(test)

    def _setup_pretraining(
        self, frame: pd.DataFrame | None, labelled: set[str], tables: dict[str, ResidueTable]
    ) -> None:
        names = [name for name in tables if name not in labelled]
        if not names:
            raise ValueError("every interface has labels: nothing is left for pre-training")
        val: list[Entry] = []
        test: list[Entry] = []
        if frame is not None:
            known = [name for name in tables if name in labelled]
            folds = self._folds(known, tables)
            parts = [f for f in folds if f != "test"] or list(folds)
            chosen = [name for part in parts for name in folds[part]]
            val = self._labelled(frame, chosen, tables, False, self.outside, "validation labels")
            held = folds.get("test", [])
            test = self._labelled(frame, held, tables, True, self.outside, "test labels")
        if not val:
            order = split(len(names), [0.9], self.seed)
            held_out = {names[i] for i in order[1].tolist()}
            val = [self._entry(tables[name]) for name in sorted(held_out)]
            names = [name for name in names if name not in held_out]
        if self.deduplicate:
            evaluated = {str(entry.graph.name) for entry in (*val, *test)}
            embedded = self._embeddings({n: tables[n] for n in (*names, *sorted(evaluated))})
            # evaluated ones come last, and the last of a group stays
            ordered = [*names, *sorted(evaluated)]
            keep = deduplicate(np.stack([embedded[name] for name in ordered]), self.threshold)
            names = [name for name, kept in zip(ordered, keep, strict=True) if kept]
            names = [name for name in names if name not in evaluated]
        self.train_set = InterfaceSet([self._entry(tables[name]) for name in names], seed=self.seed)
        self.val_set = InterfaceSet(val)
        self.test_set = InterfaceSet(test or val)
