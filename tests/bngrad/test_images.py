"""Images: sources, formats on disk, splits, scalings, and what is refused."""

import gzip
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules import Images, IsometryInputs
from datamodules.image_readers import read_idx
from datamodules.images import DOWNLOADS, PUBLISHED_MOMENTS
from lightning_modules.components.isometry import isometry_gap

RNG = np.random.default_rng(0)


def ready(**arguments) -> Images:
    data = Images(**arguments)
    data.prepare_data()
    data.setup("fit")
    return data


def all_rows(dataset):
    return dataset[list(range(len(dataset)))]


def write_idx(path: Path, array: np.ndarray, compressed: bool) -> None:
    raw = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    raw += array.astype(np.uint8).tobytes()
    if compressed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(raw))
    else:
        path.write_bytes(raw)


def mnist_folder(folder: Path, compressed: bool) -> dict[str, np.ndarray]:
    arrays = {}
    for part, prefix, n in (("train", "train", 40), ("test", "t10k", 12)):
        arrays[f"x_{part}"] = RNG.integers(0, 256, (n, 28, 28))
        arrays[f"y_{part}"] = np.arange(n) % 10
        write_idx(folder / f"{prefix}-images-idx3-ubyte", arrays[f"x_{part}"], compressed)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte", arrays[f"y_{part}"], compressed)
    return arrays


def cifar_folder(folder: Path, source: str, protocol: int = 2) -> dict[str, np.ndarray]:
    inside = folder / {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[source]
    inside.mkdir()
    names = {
        "cifar10": [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"],
        "cifar100": ["train", "test"],
    }[source]
    key = b"labels" if source == "cifar10" else b"fine_labels"
    data = {}
    for name in names:
        data[name] = RNG.integers(0, 256, (10, 3072), dtype=np.uint8)
        content = {b"data": data[name], key: [i % 10 for i in range(10)], b"batch_label": b"x"}
        text = {k.decode(): v for k, v in content.items()}
        (inside / name).write_bytes(pickle.dumps(text, protocol=protocol))
    return data


def test_digits_split_and_scaling():
    data = ready(source="digits", seed=0)
    assert [len(s) for s in (data.train_set, data.val_set, data.test_set)] == [1294, 144, 359]
    assert (data.n_features, data.n_classes, data.sample_shape) == (64, 10, (1, 8, 8))
    rows = all_rows(data.train_set)
    assert rows.x.dtype == torch.float32
    assert rows.x.shape == (1294, 64)
    assert rows.y.dtype == torch.int64
    assert rows.x.mean().abs() < 1e-5
    assert rows.x.std(unbiased=False) == pytest.approx(1.0, abs=1e-5)
    # the three parts hold every digit once
    parts = [data.train_set, data.val_set, data.test_set]
    pixels = torch.cat([s.x.flatten(1) for s in parts]).double()
    from sklearn.datasets import load_digits

    expected = load_digits().data
    assert sorted(map(tuple, pixels.tolist())) == sorted(map(tuple, expected.tolist()))
    other = ready(source="digits", seed=1)
    assert not torch.equal(other.test_set.y, data.test_set.y)
    assert torch.equal(ready(source="digits", seed=0).test_set.y, data.test_set.y)


def test_scalings():
    for scaling, low, high in (("unit", 0, 1), ("minus_one_one", -1, 1), ("none", 0, 16)):
        x = all_rows(ready(scaling=scaling, flatten=False).train_set).x
        assert x.shape[1:] == (1, 8, 8)
        assert (float(x.min()), float(x.max())) == (low, high)


def test_validation_on_the_test_part():
    data = ready(val_fraction=0.0)
    assert len(data.train_set) == 1438
    assert torch.equal(data.val_set.y, data.test_set.y)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("source", ["mnist", "fashion_mnist"])
def test_idx_files(tmp_path, source, compressed):
    arrays = mnist_folder(tmp_path, compressed)
    data = ready(source=source, path=str(tmp_path), val_fraction=0.25, flatten=False)
    assert [len(s) for s in (data.train_set, data.val_set, data.test_set)] == [30, 10, 12]
    test = all_rows(data.test_set)
    mean, std = (m[0] for m in PUBLISHED_MOMENTS[source])
    expected = (arrays["x_test"][:, None] / 255 - mean) / std
    np.testing.assert_allclose(test.x.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert test.y.tolist() == arrays["y_test"].tolist()


@pytest.mark.parametrize("archived", [False, True])
@pytest.mark.parametrize("source", ["cifar10", "cifar100"])
def test_cifar_files(tmp_path, source, archived):
    content = cifar_folder(tmp_path, source)
    if archived:
        name = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}[source]
        with tarfile.open(tmp_path / name, "w:gz") as tar:
            for folder in list(tmp_path.iterdir()):
                if folder.is_dir():
                    tar.add(folder, folder.name)
                    for file in folder.iterdir():
                        file.unlink()
    data = ready(source=source, path=str(tmp_path), scaling="unit", flatten=False, val_fraction=0.0)
    assert len(data.train_set) == (50 if source == "cifar10" else 10)
    raw = content["test_batch" if source == "cifar10" else "test"].reshape(10, 3, 32, 32)
    np.testing.assert_allclose(all_rows(data.test_set).x.numpy(), raw / 255, atol=1e-6)
    assert data.n_features == 3072


def test_cifar_pickles_cannot_run_code(tmp_path):
    cifar_folder(tmp_path, "cifar100")
    target = tmp_path / "cifar-100-python" / "train"
    target.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ValueError, match=r"os\.system is not allowed"):
        ready(source="cifar100", path=str(tmp_path))


def test_npz(tmp_path):
    x, y = RNG.normal(size=(50, 5)), np.arange(50) % 3
    np.savez(tmp_path / "a.npz", x=x, y=y)
    data = ready(source="npz", path=str(tmp_path / "a.npz"))
    train = all_rows(data.train_set).x
    assert (data.n_features, data.n_classes) == (5, 3)
    assert train.mean(0).abs().max() < 1e-6
    torch.testing.assert_close(train.std(0, unbiased=False), torch.ones(5))
    images = RNG.integers(0, 256, (20, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "b.npz", x=images, y=y[:20], x_test=images[:7], y_test=y[:7])
    data = ready(source="npz", path=str(tmp_path / "b.npz"), scaling="unit", flatten=False)
    assert len(data.test_set) == 7
    np.testing.assert_allclose(all_rows(data.test_set).x[:, 0].numpy(), images[:7] / 255, atol=1e-6)


def test_named_classes_of_a_test_part(tmp_path):
    x, y = RNG.normal(size=(12, 2)), np.array(["ant", "bee", "cow"] * 4)
    np.savez(tmp_path / "a.npz", x=x, y=y, x_test=x[:2], y_test=np.array(["cow", "ant"]))
    data = ready(source="npz", path=str(tmp_path / "a.npz"), val_fraction=0.0)
    assert data.class_names == ["ant", "bee", "cow"]
    assert data.train_set.y.tolist() == [0, 1, 2] * 4
    assert data.test_set.y.tolist() == [2, 0]
    np.savez(tmp_path / "b.npz", x=x, y=y, x_test=x[:2], y_test=np.array(["cow", "dog"]))
    with pytest.raises(ValueError, match=r"test labels \['dog'\] do not occur in training"):
        ready(source="npz", path=str(tmp_path / "b.npz"))


def test_csv_with_a_named_and_with_a_last_column(tmp_path):
    table = tmp_path / "t.csv"
    lines = [f"{i},{2.5 * i},{'cat' if i % 2 else 'dog'}" for i in range(20)]
    table.write_text("a,b,kind\n" + "\n".join(lines))
    data = ready(source="csv", path=str(table), label_column="kind", scaling="none")
    assert data.class_names == ["cat", "dog"]
    rows = all_rows(data.train_set)
    assert torch.equal(rows.y, 1 - rows.x[:, 0].long() % 2)
    plain = tmp_path / "p.csv.gz"
    plain.write_bytes(gzip.compress("\n".join(f"{i},7,{i % 4}" for i in range(20)).encode()))
    data = ready(source="csv", path=str(plain), label_column=-1)
    assert data.n_classes == 4
    assert torch.equal(all_rows(data.train_set).x[:, 1], torch.zeros(14))  # a constant column
    values = ready(source="csv", path=str(table.with_name("p.csv.gz")), label_column=0,
                   targets="values")  # fmt: skip
    assert values.n_classes is None
    assert all_rows(values.train_set).y.dtype == torch.float32


def test_downloads_only_when_asked(tmp_path, monkeypatch):
    fetched = []

    def fetch(self, url, sha256):
        fetched.append((url, sha256, self.cache_dir))
        return Path(self.cache_dir) / url.rsplit("/", 1)[-1]

    monkeypatch.setattr(Images, "fetch", fetch)
    mnist = tmp_path / "mnist"
    mnist.mkdir()
    mnist_folder(mnist, compressed=True)
    data = Images(source="mnist", download=True, cache_dir=str(tmp_path))
    assert not fetched
    data.prepare_data()
    assert [f[:2] for f in fetched] == DOWNLOADS["mnist"]
    assert all(f[2] == str(mnist) for f in fetched)
    data.setup("fit")
    assert len(data.test_set) == 12
    assert all(len(digest) == 64 for files in DOWNLOADS.values() for _, digest in files)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "svhn"}, "source must be one of digits, mnist"),
        ({"source": "mnist"}, "source 'mnist' needs path: .* download=true"),
        ({"source": "csv"}, "source 'csv' needs path"),
        ({"source": "npz", "path": "x", "download": True}, "no address for source 'npz'"),
        ({"scaling": "zscore"}, "scaling must be standardise"),
        ({"targets": "labels"}, "targets must be classes or values"),
        ({"val_fraction": 1.0}, r"val_fraction must be in \[0, 1\), got 1.0"),
        ({"test_fraction": 0.0}, r"test_fraction must be in \(0, 1\)"),
        ({"n_classes": 5}, "labels go up to 9, out of range for n_classes=5"),
    ],
)
def test_refused_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ready(**arguments)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist: give the folder of the mnist"):
        ready(source="mnist", path=str(tmp_path / "no"))
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte or .*\.gz \(idx images"):
        ready(source="mnist", path=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"data_batch_1 \(pickle of the cifar10"):
        ready(source="cifar10", path=str(tmp_path))
    mnist_folder(tmp_path, compressed=False)
    images = tmp_path / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-5])
    with pytest.raises(ValueError, match="truncated idx file"):
        ready(source="mnist", path=str(tmp_path))
    images.write_bytes(b"PNG....")
    with pytest.raises(ValueError, match="not an idx file"):
        read_idx(images)
    np.savez(tmp_path / "a.npz", features=np.ones(3))
    with pytest.raises(ValueError, match=r"expected the arrays x .* found \['features'\]"):
        ready(source="npz", path=str(tmp_path / "a.npz"))
    with pytest.raises(FileNotFoundError, match=r"b.npz' does not exist \(expected: .npz"):
        ready(source="npz", path=str(tmp_path / "b.npz"))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.array([[1.0], [np.nan], [2.0]] * 4), np.zeros(12, int), "4 of 12 .* first is row 1"),
        (np.ones((12, 2)), np.linspace(0, 1, 12), "targets: values for regression"),
        (np.ones((12, 2)), np.arange(12) - 1, "labels must be at least 0, got -1"),
        (np.ones((12, 2)), np.zeros(11, int), "x has shape"),
        (np.ones((12, 2, 2, 2, 2)), np.zeros(12, int), "x has shape"),
    ],
)
def test_refused_content(tmp_path, x, y, message):
    np.savez(tmp_path / "a.npz", x=x, y=y)
    with pytest.raises(ValueError, match=message):
        ready(source="npz", path=str(tmp_path / "a.npz"))


def test_refused_tables(tmp_path):
    table = tmp_path / "t.csv"
    table.write_text("a,b,label\n1,x,0\n2,y,1\n")
    with pytest.raises(ValueError, match=r"columns \['b'\] are not numeric"):
        ready(source="csv", path=str(table))
    with pytest.raises(ValueError, match=r"label_column='target' is not in .*columns: \['a'"):
        ready(source="csv", path=str(table), label_column="target")
    with pytest.raises(ValueError, match="label_column=9"):
        ready(source="csv", path=str(table), label_column=9)
    table.write_text("a,label\n1,cat\n2,\n3,dog\n")
    with pytest.raises(ValueError, match="1 labels are missing, the first in data row 1"):
        ready(source="csv", path=str(table))


def test_synthetic_inputs_have_the_gap_they_promise():
    gaps = {}
    for source in ("near_identity", "gaussian", "duplicated"):
        data = IsometryInputs(source, width=16, matrices=2, seed=0)
        data.setup("fit")
        batches = list(data.train_dataloader())
        assert len(batches) == 2
        assert batches[0].x.shape == (16, 16)
        assert not torch.equal(batches[0].x, batches[1].x)
        gaps[source] = isometry_gap(torch.stack([b.x for b in batches]))
    assert gaps["near_identity"].max() < 0.05 < gaps["gaussian"].min()
    assert torch.isinf(gaps["duplicated"]).all()
    for arguments in ({"width": 1}, {"matrices": 0}, {"n_classes": 1}, {"perturbation": 2.0}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            IsometryInputs(**arguments)
