"""Points of the plane drawn from a known mixture."""

import pytest
import torch

from datamodules import GaussianMixture


@pytest.mark.parametrize(("source", "components"), [("ring", 8), ("grid", 25)])
def test_points_belong_to_their_component(source, components):
    data = GaussianMixture(source, size=4000)
    data.setup("fit")
    assert data.n_classes == len(data.mixture.centres) == components
    batch = data.train_set[list(range(4000))]
    assert batch.x.shape == (4000, 2, 1, 1)
    assert batch.x.abs().max() <= 1
    assert torch.bincount(batch.y).min() > 0.6 * 4000 / components
    error = (batch.x - data.mixture.centres[batch.y]).flatten(1)
    assert error.std(0).tolist() == pytest.approx([0.08, 0.08], rel=0.05)
    assert error.mean(0).tolist() == pytest.approx([0, 0], abs=0.005)
    nearest = torch.pdist(data.mixture.centres.flatten(1)).min()
    assert nearest > 3 * 0.08  # components are told apart


def test_parts_differ_and_repeat():
    first, second = GaussianMixture(size=40), GaussianMixture(size=40)
    first.setup("fit")
    second.setup("test")
    assert len(first.val_set) == len(first.test_set) == 10
    every = list(range(10))
    assert torch.equal(first.train_set[every].x, second.train_set[every].x)
    assert not torch.equal(first.train_set[every].x, first.test_set[every].x)
    assert not torch.equal(first.val_set[every].x, first.test_set[every].x)
    other = GaussianMixture(size=40, seed=1)
    other.setup()
    assert not torch.equal(first.train_set[every].x, other.train_set[every].x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "moons"}, "source"),
        ({"size": 3}, "size must be at least 4"),
        ({"std": 0.0}, "must be positive"),
        ({"spread": -1.0}, "must be positive"),
        ({"std": 0.1}, "points would leave"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        GaussianMixture(**arguments)
