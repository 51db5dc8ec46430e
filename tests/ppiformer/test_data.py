"""Interfaces as data: sources, labels, folds, batches, model interfaces."""

import gzip
import json
import warnings
import zipfile

import numpy as np
import pytest
import torch

from datamodules import Interfaces
from datamodules.interfaces import idist
from datamodules.interfaces.extraction import (
    QualityFilter,
    extract,
    extract_folder,
    write_interface,
)
from datamodules.interfaces.files import load_tables
from datamodules.interfaces.graphs import Label, build_graph, place_labels, residue_table
from datamodules.interfaces.mutations import parse_mutation
from datamodules.interfaces.potts import make_energy, sample_interfaces
from datamodules.interfaces.sets import NodeBudgetOrder
from datamodules.interfaces.skempi import ddg_from_affinities, interface_name, read_labels
from datamodules.interfaces.splits import cluster_folds, leaks
from datamodules.interfaces.structure import parse_pdb, pdb_text, read_structure
from datamodules.interfaces.surface import accessible_area, buried_area
from datamodules.interfaces.vendored import shipped_tables


@pytest.fixture(scope="module")
def barnase(request):
    path = request.path.parent / "reference" / "1BRS.pdb.gz"
    return parse_pdb(gzip.decompress(path.read_bytes()), "1brs")


# ---------------------------------------------------------------------- structures


def mmcif(structure):
    keys = [
        "group_PDB",
        "auth_atom_id",
        "label_alt_id",
        "auth_comp_id",
        "auth_asym_id",
        "auth_seq_id",
        "pdbx_PDB_ins_code",
        "Cartn_x",
        "Cartn_y",
        "Cartn_z",
        "occupancy",
        "type_symbol",
        "pdbx_PDB_model_num",
    ]
    from datamodules.interfaces.structure import THREE_LETTER

    lines = ["data_x", "_exptl.method 'X-RAY DIFFRACTION'", "_refine.ls_d_res_high 2.0", "loop_"]
    lines += [f"_atom_site.{key}" for key in keys]
    for i in range(len(structure)):
        xyz = " ".join(f"{v:.3f}" for v in structure.position[i])
        lines.append(
            f'ATOM "{structure.atom[i]}" . {THREE_LETTER[structure.residue[i]]} '
            f"{structure.chain[i]} {structure.number[i]} {structure.insertion[i] or '?'} {xyz} "
            f"1.0 {structure.element[i]} 1"
        )
    return "\n".join([*lines, "#"])


def test_mmcif_equals_pdb_and_long_chain_ids(barnase, tmp_path):
    dimer = extract(barnase, ["A", "D"], 6.0)
    long = dimer.select(np.ones(len(dimer), dtype=bool))
    long = type(long)(**{**long.__dict__, "chain": np.char.add(long.chain, "AA")})
    path = tmp_path / "x.cif.gz"
    path.write_bytes(gzip.compress(mmcif(long).encode()))
    read = read_structure(path)
    assert read.chains == ["AAA", "DAA"]
    assert (read.method, read.resolution) == ("x-ray diffraction", 2.0)
    np.testing.assert_allclose(read.position, dimer.position, atol=1e-9)
    assert read.residue.tolist() == dimer.residue.tolist()
    with pytest.raises(ValueError, match="rename the chain"):
        pdb_text(read)
    table = residue_table(read)
    label = Label(parse_mutation("K:AAA:27:A"))
    assert place_labels(table, [label])[2] == [True]


def test_pdb_round_trip(barnase, tmp_path):
    dimer = extract(barnase, ["A", "D"], 10.0)
    area, _ = buried_area(dimer)
    path = write_interface(dimer, tmp_path, radius=10.0, area=area)
    assert path == tmp_path / "br" / "1brs_A_D.pdb"
    again = read_structure(path)
    np.testing.assert_allclose(again.position, dimer.position, atol=1e-9)
    assert again.chain.tolist() == dimer.chain.tolist()
    assert (again.resolution, again.method) == (2.0, "x-ray diffraction")
    assert "REMARK   3  BSA:" in path.read_text()


PDB = """\
ATOM      1  N   SER C  16A     11.000  10.000   0.000  1.00  0.00           N
ATOM      2  CA ASER C  16A     12.000  10.000   0.000  0.40  0.00           C
ATOM      3  CA BSER C  16A     12.500  10.000   0.000  0.60  0.00           C
ATOM      4  C  ASER C  16A     13.000  10.000   0.000  0.50  0.00           C
ATOM      5  C  BSER C  16A     13.500  10.000   0.000  0.50  0.00           C
ATOM      6  H   SER C  16A     13.000  11.000   0.000  1.00  0.00           H
HETATM    7  CA  MSE C  17      15.000  10.000   0.000  1.00  0.00           C
ATOM      8  N   GLY D   1      11.000  14.000   0.000  1.00  0.00           N
ATOM      9  CA  ALA D  -2      12.000  14.000   0.000  1.00  0.00           C
"""


def test_alternates_hydrogens_and_missing_atoms():
    structure = parse_pdb(PDB.encode(), "x")
    assert len(structure) == 5
    # higher occupancy, and the first on a tie
    assert structure.position[structure.atom == "CA"][0, 0] == 12.5
    assert structure.position[structure.atom == "C"][0, 0] == 13.0
    table = residue_table(structure)
    assert table.keys == [("C", 16, "A"), ("D", -2, "")]
    assert table.without_ca == (("D", 1, ""),)
    graph = build_graph(table)
    assert graph.vectors[1].abs().sum() == 0  # no N and C: no virtual C-beta
    with pytest.raises(ValueError, match="no C-alpha"):
        place_labels(table, [Label(parse_mutation("GD1A"))])
    # insertion codes in lower case, as SKEMPI writes them; negative numbers
    for text in ("SC16aA", "SC16AA", "AD-2G"):
        assert place_labels(table, [Label(parse_mutation(text))])[2] == [True]


def test_first_model_is_used():
    text = "MODEL        1\n" + PDB + "ENDMDL\nMODEL        2\n" + PDB + "ENDMDL\n"
    with pytest.warns(UserWarning, match="2 models"):
        assert len(parse_pdb(text.encode(), "x")) == 5


def test_surface_against_biopython(barnase):
    import io

    shrake = pytest.importorskip("Bio.PDB")
    chain = barnase.select(barnase.chain == "D")
    structure = shrake.PDBParser(QUIET=True).get_structure("x", io.StringIO(pdb_text(chain)))
    shrake.ShrakeRupley(n_points=200).compute(structure, level="A")
    expected = np.array([atom.sasa for atom in structure.get_atoms()])
    area = accessible_area(chain.position, chain.element, points=200)
    assert area.sum() == pytest.approx(expected.sum(), rel=0.01)
    assert np.corrcoef(area, expected)[0, 1] > 0.99


def test_buried_interface_and_quality(barnase):
    pair = barnase.select(np.isin(barnase.chain, ["A", "D"]))
    area, loses = buried_area(pair)
    assert 600 < area < 1000
    core = extract(barnase, ["A", "D"], kind="bsa")
    assert len(set(core.residue_rows())) < len(set(extract(barnase, ["A", "D"]).residue_rows()))
    wider = extract(barnase, ["A", "D"], 6.0, expansion_radius=4.0)
    assert len(wider) > len(extract(barnase, ["A", "D"], 6.0))
    assert loses.any()
    assert QualityFilter().reason(extract(barnase, ["A", "D"], 10.0)) is None
    assert "buried" in QualityFilter().reason(extract(barnase, ["B", "C"], 10.0))
    assert "resolution" in QualityFilter(resolution=1.5).reason(pair)
    assert "method" in QualityFilter(methods=("solution nmr",)).reason(pair)


def test_extract_folder(barnase, tmp_path):
    keep = barnase.select(np.isin(barnase.chain, ["A", "D"]))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1brs.pdb").write_text(pdb_text(keep))
    (tmp_path / "in" / "2one.pdb").write_text(pdb_text(keep.select(keep.chain == "A")))
    paths = sorted((tmp_path / "in").iterdir())
    written, refused = extract_folder(paths, tmp_path / "out", 10.0)
    assert [p.name for p in written] == ["1brs_A_D.pdb"]
    assert "1 protein chain" in next(iter(refused.values()))


# ---------------------------------------------------------------------- files as a source


def test_files_folder_archive_single_and_cache(reference, tmp_path):
    folder = tmp_path / "structures" / "nested"
    folder.mkdir(parents=True)
    for name in ("1BRS_A_D", "2JEL_L_H_P"):
        data = (reference / f"{name}.pdb.gz").read_bytes()
        (folder / f"{name}.pdb.gz").write_bytes(data)
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in folder.iterdir():
            file.write(path, path.name)
    cache = tmp_path / "cache"
    first = load_tables(folder.parent, cache_dir=str(cache))
    assert len(list(cache.glob("*.npz"))) == 1
    for source in (archive, folder.parent):
        tables = load_tables(source, cache_dir=str(cache))
        assert sorted(tables) == ["1BRS_A_D", "2JEL_L_H_P"]
        np.testing.assert_allclose(tables["1BRS_A_D"].ca, first["1BRS_A_D"].ca)
    whole = load_tables(reference / "1BRS.pdb.gz", names=["1BRS_A_D"], radius=10.0)
    assert whole["1BRS_A_D"].keys == tables["1BRS_A_D"].keys


def test_scan_and_mutations_of_a_file(reference):
    path = str(reference / "1BRS.pdb.gz")
    options = {"source": "files", "structures": path, "radius": 10.0, "chains": ["A", "D"]}
    data = Interfaces(task="scan", sites=["A:27", "D:35"], partners=["A", "D"], **options)
    data.setup()
    batch = data.predict_set[[0]]
    assert len(batch.mutation[0]) == 38
    assert batch.mutation[0][0] == "KA27A"
    assert len(set(batch.mutation[0])) == 38
    data = Interfaces(task="mutations", mutations=["KA27A", "KA27A,DD35A", "VA3A"], **options)
    data.setup()
    batch = data.predict_set[[0]]
    assert batch.inside.tolist() == [True, True, False]
    assert batch.point_mutation.tolist() == [0, 1, 1]


def test_own_labels_with_either_separator(reference, tmp_path):
    for name in ("1BRS_A_D", "2JEL_L_H_P"):
        (tmp_path / f"{name}.pdb.gz").write_bytes((reference / f"{name}.pdb.gz").read_bytes())
    for separator in ",;":
        table = tmp_path / "labels.csv"
        rows = ["name,change,kcal", "1BRS_A_D,KA27A,5.4", "1BRS_A_D,RA59A,5.2"]
        table.write_text("\n".join(rows).replace(",", separator))
        data = Interfaces(
            source="files",
            task="ddg",
            structures=str(tmp_path),
            labels=str(table),
            complex_column="name",
            mutation_column="change",
            ddg_column="kcal",
            mutations_per_interface=None,
            batch_size=1,
        )
        data.setup()
        assert data.train_set[[0]].ddg.tolist() == pytest.approx([5.4, 5.2])
        assert data.mean_ddg == pytest.approx(5.3)


def test_wrong_numbering_is_told(reference, tmp_path):
    table = tmp_path / "labels.csv"
    rows = ["interface;mutation;ddg", "1BRS_A_D;EA27A;5.4", "1BRS_A_D;RA59A;5.2"]
    table.write_text("\n".join(rows))
    data = Interfaces(
        source="files",
        task="ddg",
        structures=str(reference / "1BRS_A_D.pdb.gz"),
        labels=str(table),
        batch_size=1,
    )
    with pytest.warns(UserWarning, match=r"1 of 2 labels .*Mutation\(s\)_cleaned"):
        data.setup()


# ---------------------------------------------------------------------- shipped data


def test_real_ddg():
    data = Interfaces(source="real", task="ddg")
    data.setup()
    test = data.test_set[list(range(len(data.test_set)))]
    assert len(test.ddg) == 96
    assert {data.group_names[g] for g in test.group.tolist()} == {"Barnase", "Complement C3d"}
    evaluated = sum(len(e.labels) for e in data.val_set.entries)
    assert evaluated == 499  # with mutations outside the interface: flagged, to be imputed
    assert sum(sum(e.inside) for e in data.val_set.entries) == 474
    train = {e.graph.name for e in data.train_set.entries}
    assert not train & {e.graph.name for e in data.val_set.entries}
    rest = Interfaces(source="real", task="ddg", train_folds="rest")
    rest.setup()
    assert {e.graph.name for e in rest.train_set.entries} == train


def test_one_mutation_per_complex_and_epoch():
    data = Interfaces(task="ddg", interfaces=4, batch_size=4)
    data.setup()
    draws = []
    for epoch in range(3):
        data.train_set.set_epoch(epoch)
        batch = data.train_set[[0, 1, 2, 3]]
        assert batch.mutation_graph.tolist() == [0, 1, 2, 3]
        assert batch.ptr[batch.mutation_graph].tolist() == [0, 40, 80, 120]
        assert (batch.batch[batch.point_node] == batch.mutation_graph).all()
        draws.append(str(batch.mutation))
    assert len(set(draws)) == 3
    data.train_set.set_epoch(0)
    # what a complex contributes doesn't depend on its batch mates
    assert str(data.train_set[[2]].mutation[0]) == str(data.train_set[[0, 1, 2]].mutation[2])


def test_real_pretraining_has_no_near_duplicate_of_evaluation():
    data = Interfaces(source="real", batch_size=8)
    data.setup()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = {n: idist.embed(t.ca, t.types, t.chain) for n, t in shipped_tables().items()}

    def embedded(entries):
        return {e.graph.name: every[e.graph.name] for e in entries}

    train = embedded(data.train_set.entries)
    held_out = embedded([*data.val_set.entries, *data.test_set.entries])
    assert len(train) == 290
    assert leaks(train, held_out, 0.03) == []
    loose = Interfaces(source="real", deduplicate=False)
    loose.setup()
    assert leaks(embedded(loose.train_set.entries), held_out, 0.03)


def test_split_file_of_pretraining(tmp_path):
    names = [name for name in shipped_tables() if "_" in name][-12:]
    path = tmp_path / "split.json"
    path.write_text(json.dumps({"source": "x", "folds": {"a": names[:4], "b": names[4:]}}))
    options = {"source": "real", "split": str(path), "deduplicate": False, "batch_size": 2}
    for fold, size in (("a", 4), ("a+b", 12), ("5", 5)):
        data = Interfaces(split_fold=fold, **options)
        data.setup()
        assert len(data.train_set) == size
    path.write_text(json.dumps({"folds": {"a": [names[0], "9zzz_A_B"]}}))
    with pytest.raises(ValueError, match="first: 9zzz_A_B"):
        Interfaces(**options).setup()


def test_case_studies_load():
    for task, rows, inside, improving in (("sars", 494, 475, 5), ("sak", 80, 80, 20)):
        data = Interfaces(source="real", task=task)
        data.setup()
        batch = data.test_set[[0]]
        assert (len(batch.ddg), int(batch.inside.sum())) == (rows, inside)
        assert len(data.improving) == improving
        assert len(torch.unique(batch.partner)) == 2


def test_repeats_stay_and_duplicates_go(reference):
    table = residue_table(read_structure(reference / "1BRS_A_D.pdb.gz"))
    points = parse_mutation("KA27A,KA27A,RA59A")
    assert len(points) == 2
    swapped = parse_mutation("RA59A,KA27A")
    labels = [Label(points, 1.0), Label(swapped, 1.0), Label(points, 2.0)]
    kept = place_labels(table, labels)[0]
    assert [label.ddg for label in kept] == [1.0, 2.0]


# ---------------------------------------------------------------------- splits and batches


def test_cluster_folds_do_not_leak():
    random = np.random.default_rng(0)
    centres = random.normal(size=(12, 20))
    points = np.concatenate(
        [c + 0.001 * random.normal(size=(n % 4 + 1, 20)) for n, c in enumerate(centres)]
    )
    names = [f"i{n}" for n in range(len(points))]
    folds = cluster_folds(names, points, 0.04, {"0": 0.5, "1": 0.3, "test": 0.2})
    assert sorted(m for fold in folds.values() for m in fold) == sorted(names)
    of = dict(zip(names, points, strict=True))
    for a, b in (("0", "1"), ("0", "test"), ("1", "test")):
        assert leaks({n: of[n] for n in folds[a]}, {n: of[n] for n in folds[b]}, 0.04) == []
    assert len(folds["0"]) > len(folds["test"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_node_budget(world_size):
    sizes = [30, 50, 20, 90, 10, 40, 60, 120]
    orders = [NodeBudgetOrder(sizes, 100, 0, rank, world_size) for rank in range(world_size)]
    seen = []
    for order in orders:
        batches = list(order.batches())
        assert len(batches) == len(order)
        for batch in batches:
            assert sum(sizes[i] for i in batch) <= 100 or len(batch) == 1
        seen += [i for batch in batches for i in batch]
    assert len(seen) == len(set(seen))
    data = Interfaces(interfaces=20, max_nodes_per_batch=100)
    data.setup()
    assert [len(b.key) for b in data.train_dataloader()] == [2] * 10


# ---------------------------------------------------------------------- model interfaces


def test_potts_geometry():
    data = sample_interfaces(20, seed=3)
    steps = np.linalg.norm(np.diff(data.position[:, :20], axis=1), axis=-1)
    np.testing.assert_allclose(steps, 3.8, atol=1e-9)
    distance = np.linalg.norm(data.position[:, :, None] - data.position[:, None], axis=-1)
    bonded = np.abs(np.subtract.outer(np.arange(40), np.arange(40))) <= 1
    bonded &= data.chain[:, None] == data.chain[None]
    assert distance[:, ~bonded].min() >= 4.2
    assert np.allclose(data.contact, data.contact.transpose(0, 2, 1))
    assert data.contact[:, bonded].max() == 0


def test_potts_conditional_is_that_of_the_energy():
    data = sample_interfaces(20, seed=0)
    energy, contact, sequence = data.energy, data.contact[0], data.sequence[0]

    def total(s):
        pairs = contact * energy.pair[np.ix_(s, s)]
        return np.triu(pairs, 1).sum() + energy.field[s].sum()

    site = 7
    costs = []
    for residue in range(20):
        s = sequence.copy()
        s[site] = residue
        costs.append(total(s))
    weights = np.exp(-np.array(costs) + min(costs))
    np.testing.assert_allclose(data.conditional()[0, site], weights / weights.sum(), atol=1e-12)
    # ddG is the part of the difference between the chains
    across = contact * (data.chain[:, None] != data.chain[None])
    s = sequence.copy()
    s[site] = (s[site] + 3) % 20
    change = [np.triu(across * energy.pair[np.ix_(x, x)], 1).sum() for x in (s, sequence)]
    assert data.binding_ddg(0, site, int(s[site])) == pytest.approx(change[0] - change[1])


def test_potts_sequences_follow_the_energy():
    """Gibbs samples are calibrated: mean of p(own type) equals mean of sum p^2."""
    data = sample_interfaces(200, seed=0)
    p = data.conditional()
    own = np.take_along_axis(p, data.sequence[..., None], -1).mean()
    assert own == pytest.approx((p**2).sum(-1).mean(), abs=0.006)


def test_potts_is_cached_and_prefix_consistent():
    sample_interfaces.cache_clear()
    few, many = sample_interfaces(15, 1), sample_interfaces(45, 1)
    assert np.array_equal(few.sequence, many.sequence[:15])
    assert np.array_equal(few.position, many.position[:15])
    assert sample_interfaces(45, 1) is many
    assert make_energy(1).pair.shape == (20, 20)


def test_small_helpers(tmp_path):
    assert ddg_from_affinities(1e-6, 1e-8) == pytest.approx(2.7284, abs=1e-3)
    assert interface_name("1AHW_AB_C") == "1AHW_A_B_C"
    path = tmp_path / "folds.json"
    path.write_text(json.dumps({"source": "x", "folds": {"whole": ["a", "b", "c"]}}))
    from datamodules.interfaces.splits import choose, read_folds

    folds = read_folds(path)
    assert choose(folds, "whole") == ["a", "b", "c"]
    assert len(choose(folds, "2", seed=1)) == 2
    assert read_labels.__doc__
