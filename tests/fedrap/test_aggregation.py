"""The server's algebra against actual copies of the table."""

import dataclasses

import pytest
import torch

from lightning_modules.fedrap import communication
from lightning_modules.fedrap.aggregation import (
    ServerOptimizer,
    TableProfile,
    median_change,
    shrink,
    untouched_sum,
    upload_change_norm,
    upload_nonzeros,
)
from lightning_modules.fedrap.federation import NONZERO, SCALE, Federation
from lightning_modules.fedrap.local_training import LocalTraining, train_block
from lightning_modules.fedrap.objective import Objective
from lightning_modules.fedrap.schedule import Order, Samples, build_blocks
from lightning_modules.fedrap.settings import Federating

CLIENTS, ITEMS, WIDTH = 6, 30, 3


def draw_table(seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(ITEMS, WIDTH, generator=generator, dtype=torch.float64)


def draw_samples(seed=0, per_client=12):
    generator = torch.Generator().manual_seed(seed)
    client = torch.arange(CLIENTS).repeat_interleave(per_client)
    item = torch.randint(ITEMS, (len(client),), generator=generator)
    label = ((item + client) % 3 == 0).double()
    every = torch.arange(len(client))
    return Samples(client, item, label), Order(None, torch.zeros_like(every), every)


def federate(common, settings=None, personal=None, **options):
    personal = draw_table(7) if personal is None else personal
    vector = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
    bias = torch.zeros(1, dtype=torch.float64)
    return Federation(common, personal, vector, bias, CLIENTS, settings or Federating(), **options)


def uploads(federation, training):
    """Every client's copy of C after its round, as a whole table."""
    samples, _ = draw_samples()
    copies = []
    for i in range(CLIENTS):
        mine = samples.client == i
        part = Samples(
            torch.zeros_like(samples.client[mine]), samples.item[mine], samples.label[mine]
        )
        every = torch.arange(int(mine.sum()))
        (block,) = build_blocks(part, Order(None, torch.zeros_like(every), every), 1, ITEMS)
        place = torch.tensor([i])
        result = train_block(
            block,
            federation.personal.rows(place, block.item),
            federation.common[block.item],
            federation.vector[i : i + 1],
            federation.bias[i : i + 1],
            training,
        )
        table = shrink(federation.common, result.common_decay, result.common_shift)
        table[block.item[0]] = result.common[0]
        copies.append(table)
    return torch.stack(copies)


TRAINING = LocalTraining(
    Objective(0.05, 0.3, proximal=True), 0.1, 3.0, 3.0, 0.0, 0.01, 0.0, epochs=3, tolerance=0.0
)


@pytest.mark.parametrize("proximal", [True, False])
def test_uploads_are_averaged_counted_and_measured(proximal):
    training = dataclasses.replace(TRAINING, objective=Objective(0.05, 0.3, proximal=proximal))
    settings = Federating(clip=0.7, zero_threshold=0.05, block_rows=25)
    federation = federate(draw_table(), settings)
    copies = uploads(federation, training)
    change = copies - federation.common
    norm = change.flatten(1).norm(dim=1)
    factor = (0.7 / norm).clamp_max(1.0)
    assert bool((factor < 1).any())
    expected = federation.common + (factor[:, None, None] * change).mean(0)
    federation.train_clients(torch.arange(CLIENTS), *draw_samples(), training)
    record = federation.round_clients.clone()
    torch.testing.assert_close(record[:, SCALE], factor)
    nonzero = (copies.abs() > 0.05).flatten(1).sum(1)
    assert torch.equal(record[:, NONZERO].long(), nonzero)
    before = int((federation.common.abs() > 0.05).sum())
    report = federation.finish_round()
    torch.testing.assert_close(federation.common, expected, rtol=0, atol=1e-12)
    dense, value = ITEMS * WIDTH * 8, 8
    assert report.traffic.dense == 2 * CLIENTS * dense
    assert report.traffic.down == CLIENTS * min(dense, before * (value + 4))
    assert report.traffic.up == sum(min(dense, int(n) * (value + 4)) for n in nonzero)


def test_proximal_copies_have_exact_zeros_where_the_closed_form_says():
    federation = federate(draw_table(scale=0.1))
    copies = uploads(federation, TRAINING)
    assert 0 < int((copies == 0).sum()) < copies.numel()
    samples, order = draw_samples()
    (block,) = build_blocks(samples, order, CLIENTS, ITEMS)
    start = federation.common[block.item]
    place = torch.arange(CLIENTS)
    result = train_block(
        block,
        federation.personal.rows(place, block.item),
        start,
        federation.vector,
        federation.bias,
        TRAINING,
    )
    described = (start, result.common, block.mask, result.common_decay, result.common_shift)
    profile = TableProfile(federation.common)
    order_of_block = block.client
    exact = (copies != 0).flatten(1).sum(1)[order_of_block]
    assert torch.equal(upload_nonzeros(profile, *described, 0.0), exact)
    norms = (copies - federation.common).flatten(1).norm(dim=1)[order_of_block]
    torch.testing.assert_close(upload_change_norm(profile, *described), norms)


def test_large_mu_makes_the_table_exactly_zero():
    heavy = dataclasses.replace(TRAINING, objective=Objective(0.0, 1e4, proximal=True))
    client_form = federate(draw_table())
    client_form.train_clients(torch.arange(CLIENTS), *draw_samples(), heavy)
    report = client_form.finish_round()
    assert int((client_form.common != 0).sum()) == 0
    assert report.sparsity == 1.0
    assert report.traffic.up == 0

    plain = dataclasses.replace(TRAINING, objective=Objective(0.0, 1e4))
    server_form = federate(draw_table(), Federating(server_prox=True))
    server_form.train_clients(torch.arange(CLIENTS), *draw_samples(), plain)
    server_form.finish_round()
    assert int((server_form.common != 0).sum()) == 0
    server_form.train_clients(torch.arange(CLIENTS), *draw_samples(), plain)
    assert server_form.finish_round().traffic.down == 0

    subgradient = federate(draw_table())
    subgradient.train_clients(torch.arange(CLIENTS), *draw_samples(), plain)
    subgradient.finish_round()
    assert int((subgradient.common == 0).sum()) == 0


def test_average_is_exactly_zero_where_all_uploads_are():
    federation = federate(draw_table(scale=0.1))
    copies = uploads(federation, TRAINING)
    silent = (copies == 0).all(0)
    assert 0 < int(silent.sum()) < silent.numel()
    federation.train_clients(torch.arange(CLIENTS), *draw_samples(), TRAINING)
    federation.finish_round()
    assert torch.equal(federation.common == 0, silent)


def test_server_threshold_is_the_clients_total():
    mild = dataclasses.replace(TRAINING, objective=Objective(0.0, 0.05), step_decay=0.9)
    with_prox = federate(draw_table(), Federating(server_prox=True))
    without = federate(draw_table())
    none = dataclasses.replace(mild, objective=Objective(0.0, 0.0))
    with_prox.train_clients(torch.arange(CLIENTS), *draw_samples(), mild)
    without.train_clients(torch.arange(CLIENTS), *draw_samples(), none)
    with_prox.finish_round()
    without.finish_round()
    amount = 3.0 * 0.05 * (1 + 0.9 + 0.81) / (12 * WIDTH)
    expected = without.common.sign() * (without.common.abs() - amount).clamp_min(0)
    torch.testing.assert_close(with_prox.common, expected, rtol=0, atol=1e-12)


def test_untouched_sum_of_clients_with_different_thresholds():
    common = draw_table(3)
    draw = torch.Generator().manual_seed(1)
    weight, decay, shift = torch.rand(3, 9, generator=draw, dtype=torch.float64)
    shift[4] = 0.0
    copies = shrink(common[None], decay[:, None, None], shift[:, None, None])
    expected = (weight[:, None, None] * (copies - common)).sum(0)
    torch.testing.assert_close(untouched_sum(common, weight, decay, shift), expected)


@pytest.mark.parametrize("kind", ["weighted", "median", "fedadam"])
def test_server_optimisers(kind):
    settings = Federating(server=ServerOptimizer(kind, lr=0.5), block_rows=30)
    federation = federate(draw_table(), settings)
    start = federation.common.clone()
    change = uploads(federation, TRAINING) - start
    client = torch.arange(CLIENTS)
    federation.train_clients(client, *draw_samples(), TRAINING)
    federation.round_clients[:, 1] = torch.arange(1.0, CLIENTS + 1) if kind == "weighted" else 12.0
    if kind == "weighted":
        federation.round_rows.zero_()  # taken in with equal weights; repeat with these
        for i in range(CLIENTS):
            untouched = shrink(start, *federation.round_clients[i, 3:5])
            federation.round_rows += (i + 1) * (change[i] + start - untouched)
    federation.finish_round()
    if kind == "fedadam":
        mean = change.mean(0)
        expected = start + 0.5 * 0.1 * mean / ((0.01 * mean**2).sqrt() + 1e-3)
    elif kind == "median":
        expected = start + 0.5 * change.quantile(0.5, dim=0)
    else:
        share = torch.arange(1.0, CLIENTS + 1, dtype=torch.float64)
        expected = start + 0.5 * torch.einsum("p,pmk->mk", share / share.sum(), change)
    torch.testing.assert_close(federation.common, expected, rtol=0, atol=1e-12)


def test_median_in_chunks_is_the_median():
    common = draw_table()
    generator = torch.Generator().manual_seed(0)
    owner = torch.tensor([0, 0, 1, 3])
    item = torch.tensor([4, 20, 4, 29])
    rows = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
    decay = torch.tensor([0.9, 0.8, 1.0, 0.7], dtype=torch.float64)
    copies = decay[:, None, None] * common
    copies[owner, item] = rows
    found = median_change(
        common,
        decay,
        torch.zeros(4).double(),
        owner,
        item,
        rows,
        torch.ones(4).double(),
        0.0,
        None,
        chunk_entries=40,
    )
    torch.testing.assert_close(found, (copies - common).quantile(0.5, dim=0))


@pytest.mark.parametrize("kind", ["mean", "median"])
def test_noise_has_the_promised_size_and_is_seeded(kind):
    still = LocalTraining(Objective(0, 0), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, epochs=1)
    settings = Federating(server=ServerOptimizer(kind), clip=2.0, noise=1.5)
    common = torch.zeros(ITEMS, WIDTH, dtype=torch.float64)
    tables = []
    for seed in (*range(40), 0):
        federation = federate(common, settings)
        federation.train_clients(torch.arange(CLIENTS), *draw_samples(), still)
        report = federation.finish_round(torch.Generator().manual_seed(seed))
        tables.append(federation.common)
        assert report.traffic.up == report.traffic.dense // 2
    assert torch.equal(tables[0], tables[-1])
    deviation = float(torch.stack(tables[:-1]).std())
    if kind == "mean":
        assert deviation == pytest.approx(2.0 * 1.5 / CLIENTS**0.5, rel=0.05)
    else:  # the median of Gaussians spreads a little more than their mean
        assert 1.0 < deviation / (2.0 * 1.5 / CLIENTS**0.5) < 1.4


def test_bytes_of_a_message():
    bytes_ = communication.encoded_bytes(torch.tensor([0, 10, 60]), 100)
    assert bytes_.tolist() == [0, 80, 400]
    assert communication.sparsity(torch.tensor([0.0, 1e-4, 2e-4, 1.0])) == 0.5


# ---------------------------------------------------------------- invariants of a round


def test_one_plain_step_moves_by_the_mean_gradient():
    federation = federate(draw_table(), Federating(round_decay=1.0))
    training = LocalTraining(Objective(0, 0), 0.1, 5.0, 5.0, 0.0, 0.0, 0.0, epochs=1)
    gradient = (draw_table() - uploads(federation, training)).mean(0) / 5.0
    client = torch.arange(CLIENTS)
    federation.train_clients(client, *draw_samples(), training)
    federation.finish_round()
    torch.testing.assert_close(federation.common, draw_table() - 5.0 * gradient)

    central = federate(draw_table(), Federating("central", round_decay=1.0))
    longer = dataclasses.replace(training, epochs=7)
    central.train_clients(client, *draw_samples(), longer)
    central.finish_round()
    torch.testing.assert_close(central.common, draw_table() - CLIENTS * 5.0 * gradient)


def test_equal_clients_agree_with_their_average():
    samples, _ = draw_samples()
    one = samples.client == 0
    twice = Samples(
        torch.cat([samples.client[one] * 0 + i for i in range(CLIENTS)]),
        samples.item[one].repeat(CLIENTS),
        samples.label[one].repeat(CLIENTS),
    )
    every = torch.arange(len(twice.client))
    federation = federate(draw_table())
    expected = uploads(federation, TRAINING)[0]
    order = Order(None, torch.zeros_like(every), every)
    federation.train_clients(torch.arange(CLIENTS), twice, order, TRAINING)
    federation.finish_round()
    torch.testing.assert_close(federation.common, expected, rtol=0, atol=1e-12)


def test_weight_decay_alone_shrinks_all_rows_alike():
    training = LocalTraining(
        Objective(0, 0), 0.0, 2.0, 3.0, 0.0, 0.05, 0.02, epochs=2, tolerance=0.0
    )
    nothing = torch.zeros(WIDTH, dtype=torch.float64)
    federation = Federation(
        draw_table(), draw_table(7), nothing, torch.zeros(1).double(), CLIENTS, Federating()
    )
    federation.train_clients(torch.arange(CLIENTS), *draw_samples(), training)
    federation.finish_round()
    shrunk = [(1 - lr * wd) * (1 - lr * 0.95 * wd) for lr, wd in ((2.0, 0.05), (3.0, 0.02))]
    torch.testing.assert_close(federation.common, shrunk[0] * draw_table())
    tables = federation.personal.tables(torch.arange(CLIENTS))
    torch.testing.assert_close(tables, (shrunk[1] * draw_table(7)).expand_as(tables))


def test_divergence_names_client_round_and_step_sizes():
    federation = federate(draw_table().float(), personal=draw_table(7).float())
    federation.vector = federation.vector.float()
    federation.bias = federation.bias.float()
    wild = LocalTraining(Objective(100.0, 0.0), 1.0, 1e6, 1e6, 0.0, 0.0, 0.0, epochs=9)
    with pytest.raises(ValueError, match=r"client \d+ .* round 0 .*lr_item=1e\+06.*independence"):
        federation.train_clients(torch.arange(CLIENTS), *draw_samples(), wild)
