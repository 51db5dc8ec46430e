"""Protein interfaces as residue graphs: for pre-training, ddG labels, scans and case studies."""

from collections.abc import Iterable
from typing import Literal

import numpy as np
import pandas as pd
import torch

from datamodules.base import Order, SuiteDataModule
from datamodules.base import split as random_split
from datamodules.interfaces.assembly import Assembly, Tables, embeddings, make_folds
from datamodules.interfaces.files import load_tables
from datamodules.interfaces.graphs import Label, ResidueTable, residue_table
from datamodules.interfaces.idist import THRESHOLDS, deduplicate
from datamodules.interfaces.mutations import parse_mutation
from datamodules.interfaces.potts import PottsInterfaces, sample_interfaces
from datamodules.interfaces.sets import Entry, InterfaceSet, NodeBudgetOrder
from datamodules.interfaces.skempi import interface_name, read_labels
from datamodules.interfaces.splits import Folds, check_folds, choose, read_folds
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
        split: `pretrain`: JSON split file of the pre-training interfaces, as those of PPIRef.
        split_fold: the part of it to train on: fold names joined by `+`, `whole`, or a number.
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
        split: str | None = None,
        split_fold: str = "whole",
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
        self.structures, self.radius, self.chains = structures, radius, chains
        self.folds = folds
        self.split, self.split_fold = split, split_fold
        self.train_folds, self.val_folds, self.test_folds = train_folds, val_folds, test_folds
        self.labels, self.numbering = labels, numbering
        self.columns = (complex_column, mutation_column, ddg_column)
        self.mutations, self.sites = mutations, sites
        self.assembly = Assembly(neighbors, vectors, partners, outside)
        self.mutations_per_interface = mutations_per_interface
        self.deduplicate = deduplicate
        self.interfaces = interfaces
        self.labels_per_interface = labels_per_interface
        self.evaluation_labels = evaluation_labels
        self.residues_per_chain = residues_per_chain
        # of a case study: known improving mutations, and those whose ranks are listed
        self.improving: list[str] = []
        self.reported: list[str] = []
        self.potts: PottsInterfaces | None = None
        self._ready = False

    # ------------------------------------------------------------------ what a module may ask for

    @property
    def group_names(self) -> list[str]:
        """Complexes, or held-out proteins, by the group number of a mutation."""
        return self.assembly.group_names

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

    def _setup_potts(self) -> None:
        held_out = 20
        total = self.interfaces + 2 * held_out
        data = self.potts = sample_interfaces(total, self.seed, self.residues_per_chain)
        self.assembly.group_names[:] = [data.table(number).name for number in range(total)]

        def entries(numbers: Iterable[int], count: int) -> list[Entry]:
            build = self.assembly.entry
            return [
                build(data.table(i), data.labels(i, count, self.seed) if count else ())
                for i in numbers
            ]

        # held-out interfaces come first, so that they are the same for any number of others
        parts = np.split(np.arange(total), [held_out, 2 * held_out])
        test, val, train = (part.tolist() for part in parts)
        if self.task in ("scan", "mutations"):
            self._ask([data.table(number) for number in test])
            return
        supervised = self.task == "ddg"
        sample = self.mutations_per_interface if supervised else None
        train_labels = self.labels_per_interface if supervised else 0
        self.train_set = InterfaceSet(entries(train, train_labels), sample, self.seed)
        self.val_set = InterfaceSet(entries(val, self.evaluation_labels))
        self.test_set = InterfaceSet(entries(test, self.evaluation_labels))

    def _ask(self, tables: list[ResidueTable]) -> None:
        """Interfaces with the mutations of a scan or of a list."""
        if self.task == "scan":
            entries = [self.assembly.scan(table, self.sites) for table in tables]
        else:
            labels = [Label(parse_mutation(text)) for text in self.mutations or ()]
            entries = [self.assembly.entry(table, labels) for table in tables]
        self.predict_set = self.test_set = InterfaceSet(entries)

    def _setup_case(self) -> None:
        name, file, partners = CASES[self.task]
        structure = parse_structure(asset(f"{name}.pdb.gz").read_bytes(), f"{name}.pdb.gz")
        frame = pd.read_csv(asset(file))
        labels = [Label(parse_mutation(text)) for text in frame["Mutation(s)"]]
        known, listed = CASE_COLUMNS[self.task]
        self.improving = frame["Mutation(s)"][frame[known].astype(bool)].tolist()
        self.reported = frame["Mutation(s)"][frame[listed].astype(bool)].tolist()
        entry = self.assembly.entry(residue_table(structure), labels, partners)
        self.predict_set = self.test_set = InterfaceSet([entry])
        self.assembly.group(name)

    @property
    def threshold(self) -> float:
        """Distance (iDist) below which two interfaces are near duplicates, by extraction radius."""
        return THRESHOLDS.get(self.radius or 10.0, 0.03)

    def _tables(self) -> dict[str, ResidueTable]:
        if self.source == "real":
            return shipped_tables()
        assert self.structures is not None
        return load_tables(
            self.structures, radius=self.radius, chains=self.chains, cache_dir=self.cache_dir
        )

    def _folds(self, names: list[str], tables: Tables) -> Folds:
        if self.folds is not None:
            return read_folds(self.folds)
        if self.source == "real":
            return read_folds(asset("skempi2_folds.json"))
        return make_folds(names, tables, self.threshold, self.seed)

    def _labels(self, tables: Tables) -> pd.DataFrame | None:
        path = asset("ddg_labels.csv.gz") if self.source == "real" else self.labels
        if path is None:
            return None
        frame = read_labels(path, *self.columns, numbering=self.numbering)
        # complexes may be written 1ABC_AB_C while files are named 1ABC_A_B_C
        names = [
            name if name in tables else interface_name(name) for name in frame["interface"].tolist()
        ]
        return frame.assign(interface=names)

    def _setup_tables(self) -> None:
        tables = self._tables()
        if self.task in ("scan", "mutations"):
            names = list(tables)
            if self.source == "real":
                names = choose(self._folds(names, tables), self.test_folds)
            self._ask([tables[name] for name in names if name in tables])
            return
        frame = self._labels(tables)
        labelled = [] if frame is None else list(dict.fromkeys(frame["interface"]))
        if self.task == "pretrain":
            self._setup_pretraining(frame, labelled, tables)
            return
        assert frame is not None
        known = [name for name in tables if name in set(labelled)]
        if not known:
            raise ValueError(
                f"none of the {len(labelled)} labelled interfaces is among the structures; "
                f"first label: {labelled[0]}, first structure: {next(iter(tables))}"
            )
        self._setup_labelled(frame, self._folds(known, tables), tables, len(known))

    def _setup_labelled(
        self, frame: pd.DataFrame, folds: Folds, tables: Tables, known: int
    ) -> None:
        train_folds = self.train_folds
        if train_folds == "rest":
            used = {*self.val_folds.split("+"), *self.test_folds.split("+")}
            train_folds = "+".join(name for name in folds if name not in used)
        chosen = {"train": train_folds, "val": self.val_folds, "test": self.test_folds}
        names = {part: choose(folds, which, self.seed) for part, which in chosen.items()}
        if self.folds is not None or self.source == "real" or known >= 4:
            check_folds(names)
        labelled = self.assembly.labelled
        train = labelled(frame, names["train"], tables, "training labels", outside="drop")
        if not train:
            raise ValueError(f"train_folds={self.train_folds!r} has no labelled interface")
        self.train_set = InterfaceSet(train, self.mutations_per_interface, self.seed)
        self.val_set = InterfaceSet(labelled(frame, names["val"], tables, "validation labels"))
        test = labelled(frame, names["test"], tables, "test labels", by_protein=True)
        self.test_set = InterfaceSet(test)

    def _setup_pretraining(
        self, frame: pd.DataFrame | None, labelled: list[str], tables: Tables
    ) -> None:
        names = [name for name in tables if name not in set(labelled)]
        if self.split is not None:
            wanted = choose(read_folds(self.split), self.split_fold, self.seed)
            missing = [name for name in wanted if name not in tables]
            if missing:
                raise ValueError(
                    f"split={self.split!r} wants {len(missing)} interface(s) that are not among "
                    f"the structures, first: {missing[0]}"
                )
            names = [name for name in wanted if name not in set(labelled)]
        if not names:
            raise ValueError("every interface has labels: nothing is left for pre-training")
        val: list[Entry] = []
        test: list[Entry] = []
        if frame is not None:
            folds = self._folds([name for name in tables if name in set(labelled)], tables)
            parts = [fold for fold in folds if fold != "test"] or list(folds)
            chosen = [name for part in parts for name in folds[part]]
            val = self.assembly.labelled(frame, chosen, tables, "validation labels")
            held = folds.get("test", [])
            test = self.assembly.labelled(frame, held, tables, "test labels", by_protein=True)
        if not val:
            order = random_split(len(names), [0.9], self.seed)
            held_out = {names[i] for i in order[1].tolist()}
            val = [self.assembly.entry(tables[name]) for name in sorted(held_out)]
            names = [name for name in names if name not in held_out]
        if self.deduplicate:
            evaluated = sorted({str(entry.graph.name) for entry in (*val, *test)})
            # evaluated ones come last, and the last of a group stays
            ordered = [*names, *evaluated]
            keep = deduplicate(embeddings(tables, ordered), self.threshold)
            names = [name for name, kept in zip(names, keep, strict=False) if kept]
        train = [self.assembly.entry(tables[name]) for name in names]
        self.train_set = InterfaceSet(train, seed=self.seed)
        self.val_set = InterfaceSet(val)
        self.test_set = InterfaceSet(test or val)
