"""Distances of samples against reference values and torchmetrics."""

import pytest
import torch
from torch import nn

from lightning_modules.epsilon_scaling import image_grid
from lightning_modules.epsilon_scaling.features import ClassifierFeatures, PixelFeatures
from lightning_modules.epsilon_scaling.quality import FeatureRows, quality
from lightning_modules.epsilon_scaling.sample_metrics import (
    frechet_distance,
    inception_score,
    kernel_distance,
    precision_recall,
    sliced_wasserstein,
)


class Identity(nn.Module):
    num_features = 6

    def forward(self, x):
        return x


def test_reference(reference):
    want = reference("metrics.npz")
    ref, gen = torch.from_numpy(want["ref"]), torch.from_numpy(want["gen"])
    assert frechet_distance(ref, gen) == pytest.approx(float(want["frechet"]), abs=1e-8)
    got = precision_recall(ref, gen)
    assert got.precision == float(want["precision_k3"])
    assert got.recall == float(want["recall_k3"])


def test_equal_torchmetrics(reference):
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.kid import KernelInceptionDistance

    want = reference("metrics.npz")
    ref, gen = torch.from_numpy(want["ref"]), torch.from_numpy(want["gen"])
    fid = FrechetInceptionDistance(feature=Identity()).set_dtype(torch.float64)
    fid.update(ref, real=True)
    fid.update(gen, real=False)
    assert frechet_distance(ref, gen) == pytest.approx(float(fid.compute()), abs=1e-8)
    kid = KernelInceptionDistance(feature=Identity(), subsets=1, subset_size=280)
    kid.update(ref[:280], real=True)
    kid.update(gen, real=False)
    assert kernel_distance(ref[:280], gen) == pytest.approx(float(kid.compute()[0]), rel=1e-5)


def test_equal_sets_are_near_and_shifted_sets_far(draw):
    first, second = draw(0, (500, 8)), draw(1, (500, 8))
    for distance in (frechet_distance, kernel_distance, sliced_wasserstein):
        assert distance(first, second + 1) > 5 * abs(distance(first, second))
    assert sliced_wasserstein(first, first) == 0
    # a shift s moves the projection on u by s.u, whose mean square is |s|^2 / d
    assert sliced_wasserstein(first, first + 2) == pytest.approx(4.0, rel=0.2)
    assert sliced_wasserstein(first, second[:300] + 2) == pytest.approx(4.0, rel=0.2)


def test_bounded_tables_change_nothing(draw, monkeypatch):
    """Tables too big for memory are made a part at a time, however long a row is."""
    metrics = "lightning_modules.epsilon_scaling.sample_metrics"
    first, second = draw(0, (90, 4)), draw(1, (70, 4))
    whole = precision_recall(first, second), kernel_distance(first, second)
    sizes = []
    multiply = torch.addmm

    def recorded(*arguments, **named):
        table = multiply(*arguments, **named)
        sizes.append(table.numel() * table.element_size())
        return table

    monkeypatch.setattr(torch, "addmm", recorded)
    for limit in (20_000, 100):  # a row of distances to 90 others has 720 bytes
        monkeypatch.setattr(f"{metrics}.TABLE_BYTES", limit)
        sizes.clear()
        parts = precision_recall(first, second), kernel_distance(first, second)
        assert max(sizes) <= max(limit, 720)
        assert parts[0] == whole[0]
        assert parts[1] == pytest.approx(whole[1], rel=1e-9)


def test_neighbours_equal_the_full_table(draw):
    first, second = draw(0, (90, 40)) + 5, draw(1, (70, 40)) * 0.9 + 5
    a, b = first.double(), second.double()
    inside = torch.cdist(a, a).kthvalue(4, dim=1).values
    reached = torch.cdist(b, b).kthvalue(4, dim=1).values
    got = precision_recall(first, second)
    assert got.precision == (torch.cdist(b, a) <= inside).any(1).double().mean()
    assert got.recall == (torch.cdist(a, b) <= reached).any(1).double().mean()
    assert 0.1 < got.recall < got.precision


def test_inception_score():
    certain = torch.eye(4).repeat(5, 1)
    assert inception_score(certain) == pytest.approx(4.0)
    assert inception_score(torch.full((8, 4), 0.25)) == pytest.approx(1.0)
    assert inception_score(torch.eye(4).repeat(2, 1), split=4) == pytest.approx(4.0)


def test_too_few_samples(draw):
    with pytest.warns(UserWarning, match="not full rank"):
        frechet_distance(draw(0, (5, 8)), draw(1, (50, 8)))
    with pytest.raises(ValueError, match="more than 3"):
        precision_recall(draw(0, (3, 8)), draw(1, (50, 8)))


def test_names_never_claim_to_be_fid(draw):
    rows = draw(0, (40, 4)), draw(1, (40, 4))
    assert set(quality(*rows, "classifier")) == {
        f"{kind}_classifier" for kind in ("fd", "kd", "sw", "precision", "recall")
    }
    assert "fid" in quality(*rows, "inception")


def test_feature_rows_gather():
    metric = FeatureRows()
    metric.update(torch.ones(2, 3))
    metric.update(torch.zeros(1, 3))
    assert metric.compute().shape == (3, 3)
    assert metric.compute().sum() == 6


def test_classifier_features_tell_the_classes_apart():
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.data / 8 - 1).float().reshape(-1, 1, 8, 8)
    y = torch.tensor(digits.target)
    features = ClassifierFeatures.fit(x, y)
    assert features.num_features == features(x).shape[1] == 64
    right = (features.probabilities(features(x)).argmax(1) == y).float().mean()
    assert right > 0.97
    again = ClassifierFeatures.fit(x, y)
    assert torch.equal(features.weight, again.weight)
    two = y < 2
    binary = ClassifierFeatures.fit(x[two], y[two])
    guessed = binary.probabilities(binary(x[two])).argmax(1)
    assert (guessed == y[two]).float().mean() > 0.97
    with pytest.raises(ValueError, match="two classes"):
        ClassifierFeatures.fit(x[:5], torch.zeros(5))
    assert PixelFeatures(64)(x).shape == (1797, 64)


def test_image_grid_places_images_row_by_row():
    images = torch.arange(1, 6, dtype=torch.uint8)[:, None, None, None].expand(-1, 2, 3, 1)
    grid = image_grid(images, columns=2)
    assert grid.shape == (3 * 3 + 1, 2 * 4 + 1, 3)
    assert grid[1::3, 1::4, 0][:3].tolist() == [[1, 2], [3, 4], [5, 255]]
    assert (grid[0] == 255).all()
    assert (grid[-1] == 255).all()
    assert (grid[:, -1] == 255).all()
    assert (grid[1:3, 1:4] == 1).all()
