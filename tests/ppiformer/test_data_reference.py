"""Reading, cutting, features, iDist and SKEMPI against published values."""

import gzip
import json

import numpy as np
import pytest

from datamodules.interfaces import idist
from datamodules.interfaces.extraction import extract, extract_dimers
from datamodules.interfaces.graphs import backbone_directions, nearest, residue_table, virtual_cb
from datamodules.interfaces.skempi import read_skempi
from datamodules.interfaces.splits import choose, read_folds
from datamodules.interfaces.structure import parse_pdb, read_structure
from datamodules.interfaces.vendored import asset, shipped_tables
from lightning_modules.ppiformer.geometry import nearest_neighbors


@pytest.mark.parametrize(("name", "short"), [("1BRS_A_D", "1BRS"), ("2JEL_L_H_P", "2JEL")])
def test_features(reference, name, short):
    import torch

    z = np.load(reference / f"features_{short}.npz")
    table = residue_table(read_structure(reference / f"{name}.pdb.gz"))
    for ours, theirs in (("chain", "chain"), ("number", "resnum"), ("insertion", "ins")):
        assert getattr(table, ours).tolist() == z[theirs].tolist()
    assert table.types.tolist() == z["aa"].tolist()
    np.testing.assert_allclose(table.ca, z["coords"], atol=1e-9)
    np.testing.assert_allclose(virtual_cb(table.n, table.ca, table.c), z["virtual_cb"], atol=1e-9)
    forward, backward = backbone_directions(table)
    np.testing.assert_allclose(forward, z["n_to_c"], atol=1e-9)
    np.testing.assert_allclose(backward, z["c_to_n"], atol=1e-9)
    for found in (nearest(table.ca, 10)[0], nearest_neighbors(torch.tensor(table.ca))[0].numpy()):
        assert np.array_equal(np.sort(found), np.sort(z["knn10"]))


def test_shipped_backbones_equal_the_files(reference):
    tables = shipped_tables()
    assert len(tables) == 369
    assert sum(len(t) for t in tables.values()) == 52_877
    table = residue_table(read_structure(reference / "2JEL_L_H_P.pdb.gz"))
    packed = tables["2JEL_L_H_P"]
    np.testing.assert_allclose(packed.ca, table.ca, atol=1e-9)
    np.testing.assert_allclose(packed.n, table.n, atol=1e-9)
    np.testing.assert_allclose(packed.c, table.c, atol=1e-9)
    assert packed.keys == table.keys


def residues(structure):
    columns = (structure.chain, structure.number, structure.insertion)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {f"{c}:{n}:{i}" for c, n, i in rows}


def test_extraction(reference):
    expected = json.loads((reference / "extraction_1BRS.json").read_text())
    data = gzip.decompress((reference / "1BRS.pdb.gz").read_bytes())
    # the atom counts of the reference include alternate locations
    whole = parse_pdb(data, "1brs", alternates="all")
    found = {}
    for radius in (6.0, 10.0):
        for dimer in extract_dimers(whole, radius):
            found[f"{dimer.name}@{radius}"] = dimer
    found["1brs_A_D_B@10.0 joined"] = extract(whole, ["A", "D", "B"], 10.0)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert len(residues(found[name])) == value["n_residues"], name
        assert len(found[name]) == value["n_atoms"], name
        if value["residues"] is not None:
            assert residues(found[name]) == set(value["residues"]), name
    # one atom per name without them, the same residues
    best = extract(parse_pdb(data, "1brs"), ["A", "D"], 10.0)
    assert residues(best) == residues(found["1brs_A_D@10.0"])
    assert len(best) == len(found["1brs_A_D@10.0"]) - 2


def test_idist(reference):
    z = np.load(reference / "idist.npz")
    names = z["names"].tolist()
    fields = ("coords", "aa", "chain", "resnum")
    for strict in (False, True):
        embedded = np.stack(
            [idist.embed(*(z[f"{n}:{f}"] for f in fields), strict_reference=strict) for n in names]
        )
        expected = np.stack([z[f"{n}:embedding"] for n in names])
        np.testing.assert_allclose(embedded, expected, atol=1e-12)
    matrix = idist.distances(embedded)
    np.testing.assert_allclose(matrix, z["distance"], atol=1e-12)
    pair = matrix[names.index("1p7z_A_C"), names.index("3p9r_B_D")]
    assert pair == pytest.approx(0.0034661771664121184, abs=1e-15)
    label = dict(zip(names, idist.cluster(embedded, 0.04).tolist(), strict=True))
    assert label["1p7z_A_C"] == label["3p9r_B_D"]
    assert label["8atd_A_C"] == label["8atd_B_D"]
    assert len(set(label.values())) == 4
    # the last of a group stays
    kept = idist.deduplicate(embedded, 0.04)
    assert [n for n, k in zip(names, kept, strict=True) if k] == names[1:2] + names[3:]
    blocks = idist.deduplicate(embedded, 0.04, block=2)
    assert kept.tolist() == blocks.tolist()
    hits = idist.Index(names, embedded).query(embedded[0], 0.04)
    assert [n for n, _ in hits] == ["1p7z_A_C", "3p9r_B_D"]


def test_near_duplicates_of_the_shipped_interfaces():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tables = shipped_tables()
        embedded = {n: idist.embed(t.ca, t.types, t.chain) for n, t in tables.items()}
    matrix = idist.distances(np.stack(list(embedded.values())))
    assert int((np.triu(matrix < 0.03, 1)).sum()) == 35


def test_skempi():
    table = read_skempi(asset("skempi_v2.csv.gz"))
    assert len(table) == 6_706
    assert table["complex"].nunique() == 343
    assert table["ddg"].mean() == pytest.approx(1.2240, abs=5e-5)
    assert table["ddg"].std() == pytest.approx(2.067, abs=5e-4)
    assert table["ddg"].abs().max() == pytest.approx(12.352, abs=5e-4)
    # mutations were measured more than once: rows, not keys
    barnase = table[table["complex"] == "1BRS_A_D"].drop_duplicates("mutation")
    ddg = dict(zip(barnase["mutation"], barnase["ddg"], strict=True))
    for mutation, value in {"KA27A": 5.380949, "RA59A": 5.245372, "RA83Q": 5.420026}.items():
        assert ddg[mutation] == pytest.approx(value, abs=5e-7)
    cleaned = read_skempi(asset("skempi_v2.csv.gz"), numbering="cleaned")
    assert len(cleaned) == 6_706
    assert (cleaned["mutation"] != table["mutation"]).any()


def test_published_folds():
    folds = read_folds(asset("skempi2_folds.json"))
    sizes = {name: len(members) for name, members in folds.items()}
    assert sizes == {"0": 124, "1": 116, "2": 89, "test": 14}
    assert len(choose(folds, "0+1")) == 240
    assert len(choose(folds, "whole")) == 343
    table = read_skempi(asset("skempi_v2.csv.gz"))
    assert table["interface"].isin(folds["test"]).sum() == 219
