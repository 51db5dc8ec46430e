"""Image folders and npz files of bytes."""

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules import ImageFiles
from datamodules.image_folder import crop_and_resize


@pytest.fixture
def folder(tmp_path):
    """Six pictures, 20 x 40, red on the left and blue on the right, in two classes."""
    random = np.random.RandomState(0)
    for number in range(6):
        pixels = np.zeros((20, 40, 3), dtype=np.uint8)
        pixels[:, :20, 0], pixels[:, 20:, 2] = 200, 100 + number
        pixels[random.randint(20), random.randint(40)] += 1
        where = tmp_path / "images" / f"{'cat' if number % 2 else 'ant'}"
        where.mkdir(parents=True, exist_ok=True)
        kind = ["png", "jpg", "gif"][number // 2]
        Image.fromarray(pixels).save(where / f"{'b' if number % 2 else 'a'}_{number}.{kind}")
    (tmp_path / "images" / "notes.txt").write_text("no image")
    return tmp_path / "images"


def prepared(**arguments) -> ImageFiles:
    data = ImageFiles(**arguments)
    data.prepare_data()
    data.setup("fit")
    return data


def test_folder(folder):
    data = prepared(
        source="folder", path=str(folder), image_size=10, labels="file_name", val_fraction=0
    )
    batch = data.train_set[[0, 1, 2, 3, 4, 5]]
    assert batch.x.shape == (6, 3, 10, 10)
    assert batch.x.dtype == torch.float32
    assert data.class_names == ["a", "b"]
    assert batch.y.tolist() == [0, 0, 0, 1, 1, 1]
    # a PNG, halved once by a box filter: the crop keeps the middle, half red and half blue
    red = batch.x[0, 0]
    assert float(red[:, :4].mean()) == pytest.approx(200 / 127.5 - 1, abs=0.02)
    assert float(red[:, 6:].mean()) == pytest.approx(-1, abs=0.02)
    named = prepared(source="folder", path=str(folder), image_size=10, labels="folder_name")
    assert named.class_names == ["ant", "cat"]
    assert len(named.train_set) + len(named.val_set) == 6


def test_shapes_of_odd_sizes(tmp_path):
    for size in ((50, 31), (31, 50), (7, 9), (100, 100)):
        Image.new("L", size, 128).save(tmp_path / "grey.png")
        pixels = crop_and_resize(tmp_path / "grey.png", 16)
        assert pixels.shape == (16, 16, 3)
        assert (pixels == 128).all()


def test_npz(tmp_path):
    images = np.random.RandomState(0).randint(0, 256, (12, 8, 8, 3)).astype(np.uint8)
    np.savez(tmp_path / "set.npz", images, np.arange(12) % 3)
    data = prepared(source="npz", path=str(tmp_path / "set.npz"), image_size=8, val_fraction=0)
    batch = data.train_set[[3, 5]]
    np.testing.assert_allclose(batch.x, images[[3, 5]].transpose(0, 3, 1, 2) / 127.5 - 1, atol=1e-6)
    assert batch.y.tolist() == [0, 2]
    assert data.n_classes == 3


def test_flips_are_a_function_of_the_epoch():
    flipped = prepared(flip=True)
    plain = prepared(flip=False)
    indices = list(range(64))
    epochs = []
    for epoch in (0, 1, 0):
        flipped.train_set.set_epoch(epoch)
        epochs.append(flipped.train_set[indices].x)
    assert torch.equal(epochs[0], epochs[2])
    assert not torch.equal(epochs[0], epochs[1])
    straight = plain.train_set[indices].x
    mirrored = (epochs[0] != straight).flatten(1).any(1)
    assert 16 <= int(mirrored.sum()) <= 48
    assert torch.equal(epochs[0][mirrored], straight[mirrored].flip(3))
    assert torch.equal(flipped.val_set[[0, 1]].x, plain.val_set[[0, 1]].x)


def test_synthetic_images_have_two_classes():
    data = prepared(val_fraction=0)
    batch = data.train_set[list(range(512))]
    assert batch.x.shape == (512, 3, 16, 16)
    assert batch.y.float().mean() == 0.5
    assert batch.x.abs().max() <= 1


def test_bad_files(tmp_path, folder):
    with pytest.raises(ValueError, match="needs path"):
        ImageFiles("folder")
    with pytest.raises(ValueError, match="image_size"):
        ImageFiles(image_size=0)
    with pytest.raises(ValueError, match="val_fraction"):
        ImageFiles(val_fraction=1.0)
    with pytest.raises(FileNotFoundError, match="no folder"):
        prepared(source="folder", path=str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds 0 images"):
        prepared(source="folder", path=str(tmp_path / "empty"))
    Image.new("RGB", (9, 9)).save(tmp_path / "empty" / "one.png")
    with pytest.raises(ValueError, match="holds 1 images"):
        prepared(source="folder", path=str(tmp_path / "empty"))
    (tmp_path / "empty" / "two.png").write_text("no image")
    broken = prepared(source="folder", path=str(tmp_path / "empty"), val_fraction=0)
    with pytest.raises(ValueError, match=r"two\.png cannot be read"):
        broken.train_set[[0, 1]]


def test_bad_npz(tmp_path):
    path = str(tmp_path / "bad.npz")
    with pytest.raises(FileNotFoundError, match=r"bad\.npz"):
        prepared(source="npz", path=path)
    cases = [
        ({"mu": np.zeros(3), "sigma": np.eye(3)}, "reference statistics"),
        ({"arr_0": np.zeros((4, 8, 8, 3))}, "must be uint8"),
        ({"arr_0": np.zeros((4, 3, 8, 8), np.uint8)}, "must be uint8"),
        ({"arr_0": np.zeros((4, 9, 9, 3), np.uint8)}, "image_size is 8"),
        ({"arr_0": np.zeros((1, 8, 8, 3), np.uint8)}, "1 images"),
        ({"arr_0": np.zeros((4, 8, 8, 3), np.uint8), "arr_1": np.zeros(3)}, "3 labels"),
    ]
    for arrays, message in cases:
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match=message):
            prepared(source="npz", path=path, image_size=8)
