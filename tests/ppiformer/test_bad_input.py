"""What is wrong is said with its place and the fix."""

import json

import numpy as np
import pytest
import torch

from datamodules import Interfaces
from datamodules.interfaces import idist
from datamodules.interfaces.extraction import extract, extract_dimers
from datamodules.interfaces.files import load_tables
from datamodules.interfaces.graphs import Label, build_graph, place_labels, residue_table
from datamodules.interfaces.mutations import parse_mutation
from datamodules.interfaces.skempi import ddg_from_affinities, read_labels, read_skempi
from datamodules.interfaces.splits import choose, cluster_folds, read_folds
from datamodules.interfaces.structure import parse_pdb, parse_structure, read_structure
from lightning_modules import DDGPPIformer, PPIformer
from lightning_modules.ppiformer import InterfaceNetwork, Scoring, SE3Encoder
from lightning_modules.ppiformer.checkpoint import load_weights, read_weights
from lightning_modules.ppiformer.geometry import nearest_neighbors
from lightning_modules.ppiformer.losses import ddg_loss
from lightning_modules.ppiformer.masking import mask_residues
from lightning_modules.ppiformer.residues import class_weights
from lightning_modules.ppiformer.search import beam_search

LINE = (
    "ATOM      2  CA  SER {chain} {number:3d}     {x:7.3f}  10.000   0.000"
    "  1.00  0.00           C\n"
)


def pdb(*rows):
    return "".join(LINE.format(chain=c, number=n, x=x) for c, n, x in rows).encode()


def structure(*rows):
    return parse_pdb(pdb(*rows), "1abc")


TWO = (("A", 1, 0.0), ("A", 2, 4.0), ("B", 1, 2.0))


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda: structure(), "no ATOM"),
        (lambda: extract_dimers(structure(("A", 1, 0.0), ("A", 2, 4.0))), "1 protein chain"),
        (lambda: extract(structure(*TWO), ["A"]), "needs two chains"),
        (lambda: extract(structure(*TWO), ["A", "Q"]), "no protein chain 'Q'; it has A, B"),
        (lambda: extract(structure(("A", 1, 0.0), ("B", 1, 90.0)), ["A", "B"]), "no contact"),
        (lambda: extract(structure(*TWO), ["A", "B"], -1.0), "radius must be positive"),
        (lambda: parse_pdb(pdb(*TWO).replace(b"  4.000", b"    nan"), "x"), "A:2 has a coord"),
        (lambda: parse_pdb(pdb(*TWO).replace(b"  4.000", b"  4.x00"), "x"), "'4.x00'"),
        (lambda: residue_table(structure(("A", 1, 0.0))), "at least 2"),
        (lambda: parse_structure(b"", "x.xyz"), "end in .pdb"),
        (lambda: parse_mutation("SC16"), "'SC16' is not wild type"),
        (lambda: parse_mutation("SC16B"), "is not wild type"),
        (lambda: parse_mutation("SC16A,SC16G"), "twice"),
        (lambda: ddg_from_affinities(0.0, 1e-9), "mutant affinity must be positive"),
        (lambda: nearest_neighbors(torch.tensor([[0.0, 0, 0], [float("nan"), 0, 0]])), "index 1"),
        (lambda: nearest_neighbors(torch.zeros(3, 3), 0), "at least 1"),
        (lambda: idist.embed(np.zeros((1, 3)), np.zeros(1, int), ["A"]), "at least 2"),
        (lambda: idist.cluster(np.full((2, 20), np.nan), 0.04), "not finite"),
        (lambda: choose({"0": ["a"]}, "0+7"), "no fold '7'; there are 0"),
        (lambda: choose({"0": ["a"]}, "5"), "5 interfaces out of 1"),
        (lambda: cluster_folds(["a"], np.zeros((1, 20)), 0.04, {"0": 0.5}), "sum to 1"),
        (lambda: class_weights("rare"), "'rare'"),
        (lambda: class_weights([1.0] * 19), "20 positive numbers"),
        (lambda: ddg_loss(torch.zeros(1), torch.zeros(1), "mape"), "mse, l1"),
        (
            lambda: mask_residues(torch.zeros(2).long(), torch.zeros(2), [0, 2], [(0,)], 0.0),
            r"\(0,",
        ),
        (lambda: beam_search(len, [], 2), "candidates is empty"),
        (lambda: SE3Encoder(depth=0), "depth must be positive, got 0"),
        (lambda: InterfaceNetwork(read_out="x"), "read_out must be one of masked_marginals"),
        (lambda: Scoring(contexts=0), "contexts"),
        (lambda: PPIformer(mask_ratio=1.5), "mask_ratio"),
        (lambda: PPIformer(label_smoothing=1.0), "label_smoothing"),
        (lambda: PPIformer(focal_gamma=-1), "focal_gamma"),
        (lambda: DDGPPIformer(ddg_loss="x"), "ddg_loss must be one of"),
        (lambda: DDGPPIformer(encoder_gradient=2.0), "encoder_gradient"),
        (lambda: PPIformer(loss_weights={"ddg": 1.0}), "no term 'ddg'"),
        (lambda: Interfaces(task="dock"), "task must be one of"),
        (lambda: Interfaces(source="pdb"), "source must be one of potts, real, files"),
        (lambda: Interfaces(task="sars"), "source='real'"),
        (lambda: Interfaces(source="files"), "structures="),
        (lambda: Interfaces(source="files", structures="x", task="ddg"), "labels="),
        (lambda: Interfaces(task="mutations"), "needs mutations"),
        (lambda: Interfaces(task="mutations", mutations=["?"]), "'\\?'"),
        (lambda: Interfaces(mutations_per_interface=0), "mutations_per_interface"),
        (lambda: Interfaces(max_nodes_per_batch=0), "max_nodes_per_batch"),
    ],
)
def test_refused(action, words):
    with pytest.raises(ValueError, match=words) as error:
        action()
    assert "\n" not in str(error.value)


def test_mutations_that_do_not_fit(reference):
    table = residue_table(read_structure(reference / "1BRS_A_D.pdb.gz"))

    def place(text, **options):
        return place_labels(table, [Label(parse_mutation(text))], **options)

    with pytest.raises(ValueError, match="position A:27 is LYS, mutation says THR"):
        place("TA27A")
    with pytest.raises(ValueError, match="no chain 'X'; the interface has A, D"):
        place("KX27A")
    with pytest.raises(ValueError, match="A:3 is not a residue of the interface"):
        place("VA3A", outside="error")
    assert place("VA3A")[2] == [False]
    assert place("VA3A", outside="drop")[0] == []
    assert "A:27 is LYS" in place("TA27A", skip_mismatch=True)[3][0]
    with pytest.raises(ValueError, match="outside must be"):
        place("VA3A", outside="ignore")


def test_wild_type_as_mutant_warns(reference):
    table = residue_table(read_structure(reference / "1BRS_A_D.pdb.gz"))
    with pytest.warns(UserWarning, match="KA27K: the mutant is the wild type; its ddG is 0"):
        place_labels(table, [Label(parse_mutation("KA27K"))])


def test_graph_options(reference):
    table = residue_table(read_structure(reference / "1BRS_A_D.pdb.gz"))
    with pytest.raises(ValueError, match="neighbors"):
        build_graph(table, 0)
    with pytest.raises(ValueError, match="vectors"):
        build_graph(table, vectors="side_chains")
    with pytest.raises(ValueError, match="chain 'D' belongs to none"):
        build_graph(table, partners=["A", "B"])


def test_folds(tmp_path):
    path = tmp_path / "folds.json"
    for folds, words in (
        ({"0": ["a"], "1": ["b", "a"]}, "folds '0' and '1' both hold a"),
        ({"0": []}, "fold '0' is empty"),
        ({"0": "a"}, "must map fold names to lists"),
    ):
        path.write_text(json.dumps(folds))
        with pytest.raises(ValueError, match=words):
            read_folds(path)
    data = Interfaces(source="real", task="ddg", train_folds="0+2")
    with pytest.raises(ValueError, match="'train' and 'val' both hold"):
        data.setup()
    with pytest.raises(ValueError, match="no fold 'nine'"):
        Interfaces(source="real", task="ddg", val_folds="nine").setup()


def test_label_tables(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("interface,mutation,ddg\nx,KA1A,strong\n")
    with pytest.raises(ValueError, match="line 2: ddg 'strong' is no number"):
        read_labels(path)
    with pytest.raises(ValueError, match="no column 'kcal'"):
        read_labels(path, ddg_column="kcal")
    single, double = "1BRS_A_D,KA27A,5.4\n", "1BRS_A_D,KA27A,RA59A,5.4\n"
    for rows in (double + double, single + double):
        path.write_text("interface,mutation,ddg\n" + rows)
        with pytest.raises(ValueError, match="quote mutations of several points") as error:
            read_labels(path)
        assert "\n" not in str(error.value)
    path.write_text('interface,mutation,ddg\n1BRS_A_D,"KA27A,RA59A",5.4\n')
    assert read_labels(path)["mutation"].tolist() == ["KA27A,RA59A"]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="column of interfaces and one of mutations"):
        read_labels(path)
    with pytest.raises(ValueError, match="lacks the SKEMPI column"):
        read_skempi(path)
    header = "#Pdb;Mutation(s)_PDB;Affinity_mut_parsed;Affinity_wt_parsed;Protein 1\n"
    path.write_text(header + "1ABC_A_B;KA1A;-1e-9;1e-9;x\n")
    with pytest.raises(ValueError, match="line 2: affinities must be positive"):
        read_skempi(path)
    with pytest.raises(ValueError, match="numbering"):
        read_skempi(path, "author")
    with pytest.raises(FileNotFoundError, match="doesn't exist"):
        read_labels(tmp_path / "none.csv")


def test_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="structures="):
        load_tables(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no file"):
        load_tables(tmp_path)
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ValueError, match="no structure file, folder"):
        load_tables(tmp_path / "x.txt")
    (tmp_path / "1abc_A_B.pdb").write_bytes(pdb(*TWO))
    with pytest.raises(ValueError, match="not found"):
        load_tables(tmp_path, names=["1abc_A_B", "9xyz_A_B"])
    data = Interfaces(source="files", task="scan", structures=str(tmp_path), sites=["A:9"])
    with pytest.raises(ValueError, match="site 'A:9' is not a residue"):
        data.setup()


def test_checkpoints(tmp_path):
    small = {"channels": (8, 4), "depth": 1, "head_widths": (4, 2), "radial_hidden": 4}
    one, other = InterfaceNetwork(**small), InterfaceNetwork(**{**small, "radial_hidden": 6})
    with pytest.raises(ValueError, match=r"differences: .* has shape .*; set channels, depth"):
        load_weights(other, one.state_dict())
    deeper = InterfaceNetwork(**{**small, "depth": 2})
    with pytest.raises(ValueError, match="is missing"):
        load_weights(deeper, one.state_dict())
    path = tmp_path / "x.ckpt"
    with pytest.raises(ValueError, match="doesn't exist"):
        read_weights(path)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="can't be read"):
        read_weights(path)
    torch.save({"state_dict": {"a": torch.zeros(1)}}, path)
    with pytest.raises(ValueError, match="no encoder weights"):
        read_weights(path)


def test_a_residue_that_is_no_standard_one_is_told():
    structure = parse_pdb(pdb(*TWO) + pdb(("A", 3, 6.0)).replace(b"SER", b"MSE"), "1abc")
    with pytest.raises(ValueError, match=r"A:3 is not a residue .*20 standard residues"):
        place_labels(residue_table(structure), [Label(parse_mutation("MA3A"))], outside="error")
