"""Orders whose sampling an accountant can credit."""

import math
from itertools import chain, pairwise

import pytest
import torch

from datamodules.base import ORDERS, ResumableLoader, Rows
from datamodules.regression_stream import RegressionBatch, RegressionStream
from datamodules.sampling import (
    BallsInBinsOrder,
    CyclicPoissonOrder,
    FixedOrder,
    PoissonOrder,
)

EVERY = [PoissonOrder, CyclicPoissonOrder, FixedOrder, BallsInBinsOrder]


def global_batches(order, epochs: int) -> list[set[int]]:
    found = []
    for epoch in range(epochs):
        order.epoch = epoch
        found += [set(batch) for batch in order.batches()]
    return found


def test_poisson_frequencies_and_independence() -> None:
    size, batch, epochs = 200, 10, 100
    order = PoissonOrder(size, batch, seed=3)
    assert len(order) == 20
    assert order.probability == 0.05
    present = torch.zeros(len(order) * epochs, size)
    for step, members in enumerate(global_batches(order, epochs)):
        present[step, list(members)] = 1.0
    n, p = len(present), 0.05
    spread = math.sqrt(n * p * (1 - p))
    assert torch.all((present.sum(0) - n * p).abs() < 5 * spread)
    centred = (present - p) / math.sqrt(p * (1 - p))
    follow = (centred[1:] * centred[:-1]).mean(0)  # of one example in consecutive steps
    assert torch.all(follow.abs() < 5 / math.sqrt(n - 1))
    pairs = centred.T @ centred / n
    pairs.fill_diagonal_(0)
    assert pairs.abs().max() < 6 / math.sqrt(n)
    sizes = present.sum(1)
    assert sizes.var() == pytest.approx(size * p * (1 - p), rel=0.2)


@pytest.mark.parametrize("kind", EVERY, ids=lambda k: k.scheme)
def test_the_same_global_batches_for_any_number_of_ranks(kind) -> None:
    whole = kind(37, 8, seed=1)
    for world in (2, 4):
        ranks = [kind(37, 8 // world, seed=1, rank=r, world_size=world) for r in range(world)]
        for epoch in (0, 3):
            for order in (whole, *ranks):
                order.epoch = epoch
            for batch, *parts in zip(whole.batches(), *(r.batches() for r in ranks), strict=True):
                merged = [None] * len(batch)
                for r, part in enumerate(parts):
                    merged[r::world] = part
                assert merged == batch
    assert len(whole) == len(ranks[0])


def test_epochs_differ_for_random_and_agree_for_fixed_orders() -> None:
    for kind in EVERY:
        order = kind(40, 4, seed=2)
        first, second = global_batches(order, 1), global_batches(order, 2)[len(order) :]
        fixed = kind in (FixedOrder, BallsInBinsOrder)
        assert (first == second) == fixed
        assert global_batches(kind(40, 4, seed=2), 1) == first
        assert global_batches(kind(40, 4, seed=9), 1) != first


def test_fixed_order_uses_every_example_once_also_in_a_short_last_batch() -> None:
    order = FixedOrder(10, 4)
    batches = list(order.batches())
    assert [len(b) for b in batches] == [4, 4, 2]
    assert sorted(chain(*batches)) == list(range(10))
    bins = list(BallsInBinsOrder(10, 2).batches())
    assert len(bins) == 5
    assert sorted(chain(*bins)) == list(range(10))


def test_cyclic_groups_keep_participations_apart_across_epochs() -> None:
    order = CyclicPoissonOrder(60, 6, seed=0)
    order.groups = 4  # does not divide the 10 steps of an epoch
    steps: dict[int, list[int]] = {}
    counts = 0
    for t, members in enumerate(global_batches(order, 40)):
        counts += len(members)
        for member in members:
            steps.setdefault(member, []).append(t)
    assert all((b - a) % 4 == 0 for seen in steps.values() for a, b in pairwise(seen))
    assert counts / 400 == pytest.approx(6, abs=5 * math.sqrt(6 / 400))
    order.groups = 11
    with pytest.raises(ValueError, match="1 to 10 groups, got 11"):
        next(order.batches())


def test_empty_batches_reach_the_module_as_tensors() -> None:
    order = PoissonOrder(6, 1, seed=0)
    data = Rows(RegressionBatch, torch.randn(6, 3), torch.randn(6))
    batches = []
    for epoch in range(20):
        order.epoch = epoch
        batches += list(ResumableLoader(data, order))
    empty = [b for b in batches if len(b.y) == 0]
    assert empty
    assert empty[0].x.shape == (0, 3)


def test_a_resumed_loader_skips_what_was_delivered() -> None:
    data = Rows(RegressionBatch, torch.arange(40.0)[:, None], torch.arange(40.0))
    loader = ResumableLoader(data, PoissonOrder(40, 4, seed=1))
    loader.set_epoch(2)
    expected = [b.y.tolist() for b in loader]
    again = ResumableLoader(data, PoissonOrder(40, 4, seed=1))
    again.set_epoch(2)
    again.load_state_dict({"batches": 3})
    assert [b.y.tolist() for b in again] == expected[3:]


def test_registered_and_checked() -> None:
    assert {"poisson", "cyclic_poisson", "fixed_order", "balls_in_bins"} <= set(ORDERS)
    data = RegressionStream(size=50, batch_size=5, sampling="poisson")
    data.setup("fit")
    assert isinstance(data.train_dataloader().order, PoissonOrder)
    with pytest.raises(ValueError, match="batches of 60, more than the 50 examples"):
        PoissonOrder(50, 60)
    with pytest.raises(ValueError, match="at least one example"):
        PoissonOrder(0, 1)
