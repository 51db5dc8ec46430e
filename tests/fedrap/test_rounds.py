"""Whole federated rounds against recorded ones and against a loop over the clients."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch

from lightning_modules.fedrap import FedRAP, native, ranking
from lightning_modules.fedrap.aggregation import ServerOptimizer
from lightning_modules.fedrap.federation import LOSS, Federation
from lightning_modules.fedrap.local_training import LocalTraining
from lightning_modules.fedrap.native import NativeStep
from lightning_modules.fedrap.objective import Objective
from lightning_modules.fedrap.schedule import Order, Samples
from lightning_modules.fedrap.settings import Federating

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++")), reason="no C++ compiler"
)
NAMES = ["rounds_full", "rounds_partial_earlystop"]


def close(left, right, tolerance=1e-10):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("block_rows", "pieces", "compiled"),
    [
        (6144, 1, False),
        (300, 4, False),
        pytest.param(6144, 1, True, marks=needs_compiler),
        pytest.param(300, 4, True, marks=needs_compiler),
    ],
)
def test_recorded_rounds(replay, name, block_rows, pieces, compiled):
    record = replay.load(name)
    federation = record.federation(block_rows=block_rows, compile=compiled)
    training = record.training()
    for a in range(record.rounds):
        client = record.participants(a)
        kept = record.run_round(federation, a, training, pieces)
        drawn = record.tensor(f"r{a}_participants").argsort()
        close(kept[client, LOSS], record.tensor(f"r{a}_loss")[drawn])
        assert torch.equal(kept[client, LOSS + 1].long(), record.tensor(f"r{a}_epochs_run")[drawn])
        report = federation.finish_round()
        assert report.clients == len(client)
        assert report.sparsity == pytest.approx(float(record.arrays[f"r{a}_sparsity"]), abs=1e-12)
        close(federation.common, record.tensor(f"r{a}_C"))
        state = record.tensor(f"r{a}_clients_with_state")
        assert torch.equal(federation.taken_part.nonzero()[:, 0], state)
        close(federation.personal.tables(state), record.tensor(f"r{a}_D"))
        close(federation.vector[state], record.tensor(f"r{a}_u").view(len(state), -1))
        close(federation.bias[state], record.tensor(f"r{a}_b").view(-1))
        everyone = torch.arange(federation.clients)
        scores = federation.scores(everyone)
        others = scores.gather(1, record.tensor("eval_neg"))
        for part in ("test", "val"):
            target = scores.gather(1, record.tensor(f"{part}_item")[:, None])[:, 0]
            rank = ranking.rank_among(target, others)
            found = [ranking.hits(rank, 10).mean(), ranking.gains(rank, 10).mean()]
            np.testing.assert_allclose(found, record.arrays[f"r{a}_{part}_hr_ndcg"], atol=1e-12)


def test_single_precision_stays_close_for_a_round(replay):
    for name in NAMES:
        record = replay.load(name, torch.float32)
        federation = record.federation()
        record.run_round(federation, 0, record.training())
        federation.finish_round()
        close(federation.common, record.tensor("r0_C"), 5e-5)
        state = record.tensor("r0_clients_with_state")
        close(federation.personal.tables(state), record.tensor("r0_D"), 5e-5)


def test_touched_rows_alone_give_the_same_state(replay):
    record = replay.load("rounds_partial_earlystop")
    lazy = record.federation(store="lazy")
    for a in range(record.rounds):
        record.run_round(lazy, a, record.training(), pieces=3)
        lazy.finish_round()
        state = record.tensor(f"r{a}_clients_with_state")
        close(lazy.personal.tables(state), record.tensor(f"r{a}_D"))
    untouched = torch.tensor([i for i in range(lazy.clients) if i not in state])
    assert len(untouched)
    expected = record.tensor("init_D").expand(len(untouched), -1, -1)
    close(lazy.personal.tables(untouched), expected)
    dense = record.federation()
    dense.load_state_dict(
        {
            **{k: v for k, v in lazy.state_dict().items() if not k.startswith("personal.")},
            "personal.table": lazy.personal.tables(torch.arange(lazy.clients)),
        }
    )
    everyone = torch.arange(lazy.clients)
    close(lazy.scores(everyone), dense.scores(everyone))


@pytest.mark.parametrize("store", ["dense", "lazy"])
def test_sharded_clients_give_the_same_table(replay, store):
    record = replay.load("rounds_partial_earlystop")
    shards = [record.federation(r, 3, store=store) for r in range(3)]
    for a in range(record.rounds):
        for shard in shards:
            record.run_round(shard, a, record.training())
        rows = sum(s.round_rows for s in shards)
        records = sum(s.round_clients for s in shards)

        def total(tensor, rows=rows, records=records):
            return (rows if tensor.shape == rows.shape else records).clone()

        for shard in shards:
            shard.finish_round(reduce=total)
            close(shard.common, record.tensor(f"r{a}_C"))
        for i in record.tensor(f"r{a}_clients_with_state").tolist():
            place = record.tensor(f"r{a}_clients_with_state").tolist().index(i)
            local = torch.tensor([i // 3])
            close(shards[i % 3].personal.tables(local)[0], record.tensor(f"r{a}_D")[place])


def random_round(seed, clients=7, items=40, width=3, batch_size=9, epochs=4, repeats=True):
    """Samples as an engine takes them, and as the loop does."""
    draw = torch.Generator().manual_seed(seed)
    flat, plain = [], {}
    for i in range(clients):
        count = int(torch.randint(2, 25, (), generator=draw))
        chosen = torch.randint(items, (count,), generator=draw)
        labels = (chosen % 4 == i % 4).double()
        plain[i] = []
        for e in range(epochs):
            order = torch.randperm(count, generator=draw)
            plain[i].append([(chosen[p], labels[p]) for p in order.split(batch_size)])
            for t, part in enumerate(order.split(batch_size)):
                flat += [(i, e, t, int(chosen[p]), float(labels[p])) for p in part]
    client, epoch, slot, item, label = (torch.tensor(x) for x in zip(*flat, strict=True))
    order = Order(epoch, slot, torch.arange(len(client)))
    return Samples(client, item, label.double()), order, plain


CASES = [
    {},
    {"tolerance": 0.05},
    {"decay_common": 0.0, "decay_personal": 0.0, "decay_network": 0.0},
    {"step_decay": 1.0, "decay_personal": 0.02, "lr_personal": 3.0},
    {"objective": Objective(0.3, 0.2, "l2")},
    {"objective": Objective(0.3, 0.2, "none")},
    {"objective": Objective(0.3, 0.2, "nuc"), "tolerance": 0.05},
    {"objective": Objective(0.3, 0.2, "inf")},
    {"objective": Objective(0.01, 0.02, "l1", scope="table")},
    {"objective": Objective(1e-3, 2e-3, "l2", scope="table", reduction="sum")},
    {"objective": Objective(1e-3, 2e-3, "l1", reduction="sum", saturating=True)},
    {"lr_common": 50.0, "lr_personal": 50.0, "objective": Objective(0.0, 0.0, saturating=True)},
]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_compiler)])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_equals_the_loop_over_clients(loop, case, compiled):
    training = LocalTraining(
        **{
            "objective": Objective(0.3, 0.2),
            "lr_common": 20.0,
            "lr_personal": 20.0,
            "epochs": 4,
            "decay_common": 0.01,
            "decay_personal": 0.01,
            "decay_network": 0.01,
            **CASES[case],
        }
    )
    samples, order, plain = random_round(case)
    draw = torch.Generator().manual_seed(100 + case)
    common, initial = (torch.randn(40, 3, generator=draw, dtype=torch.float64) for _ in "CD")
    vector = torch.randn(3, generator=draw, dtype=torch.float64)
    bias = torch.randn(1, generator=draw, dtype=torch.float64)
    federation = Federation(
        common,
        initial,
        vector,
        bias,
        7,
        Federating(round_decay=0.9, block_rows=60, compile=compiled),
    )
    personal = initial.repeat(7, 1, 1)
    vectors, biases = vector.repeat(7, 1), bias.repeat(7)
    for a in range(2):
        scaled = dataclasses.replace(
            training,
            lr_network=training.lr_network * 0.9**a,
            lr_common=training.lr_common * 0.9**a,
            lr_personal=training.lr_personal * 0.9**a,
        )
        common, reports = loop(plain, common, personal, vectors, biases, scaled)
        federation.train_clients(torch.arange(7), samples, order, training)
        records = federation.round_clients.clone()
        federation.finish_round()
        tolerance = 1e-10 * max(1.0, float(common.abs().max()))
        close(federation.common, common, tolerance)
        close(federation.personal.tables(torch.arange(7)), personal, tolerance)
        close(federation.vector, vectors, tolerance)
        close(federation.bias, biases, tolerance)
        losses = torch.tensor([reports[i][0] for i in range(7)], dtype=torch.float64)
        torch.testing.assert_close(records[:, LOSS], losses, rtol=1e-10, atol=1e-10)
        assert records[:, LOSS + 1].tolist() == [reports[i][1] for i in range(7)]


def sum_of_squares(logits, weight, positive, personal, common):
    """A user's objective."""
    return (weight * logits.square() - positive * logits).sum(1) / weight.sum(1).clamp_min(1)


def test_user_objective_by_autograd():
    samples, order, _ = random_round(3)
    training = LocalTraining(
        Objective(custom=sum_of_squares), 0.01, 0.05, 0.05, 0.0, 0.0, 0.0, epochs=2
    )
    eye = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    federation = Federation(
        eye, eye, torch.ones(3, dtype=torch.float64), torch.zeros(1).double(), 7, Federating()
    )
    losses = []
    for _ in range(5):
        federation.train_clients(torch.arange(7), samples, order, training)
        losses.append(federation.finish_round().loss)
    assert losses[-1] < losses[0]
    wrong = dataclasses.replace(training, objective=Objective(custom=lambda z, *_: z.sum()))
    with pytest.raises(ValueError, match="one loss per client"):
        federation.train_clients(torch.arange(7), samples, order, wrong)


def test_client_order_and_strangers_change_nothing(replay):
    record = replay.load("rounds_full")
    one, other = record.federation(), record.federation(block_rows=1)
    client = record.participants(0)
    one.train_clients(client, *record.samples(0, client), record.training())
    for i in client.flip(0).tolist():
        part = torch.tensor([i])
        other.train_clients(part, *record.samples(0, part), record.training())
    one.finish_round()
    other.finish_round()
    close(one.common, other.common, 1e-13)
    close(one.personal.table, other.personal.table, 1e-13)

    initial = [record.tensor(f"init_{name}") for name in "CDub"]
    more = Federation(*initial, 31, Federating(round_decay=record.config["decay_rate"]))
    more.train_clients(client, *record.samples(0, client), record.training())
    more.finish_round()
    assert torch.equal(more.common, one.common)
    assert torch.equal(more.scores(client), one.scores(client))
    stranger = (more.common + initial[1]) @ initial[2] + initial[3]
    close(more.scores(torch.tensor([30]))[0], stranger, 1e-12)


KERNEL_CASES = [
    ({"server_prox": True}, {}),
    ({"mode": "global_only"}, {}),
    ({"mode": "local_only"}, {}),
    ({"mode": "pfedrec"}, {}),
    ({"mode": "central"}, {}),
    ({"clip": 0.1, "zero_threshold": 0.5}, {"proximal": True, "saturating": False}),
    ({"clip": 0.1, "zero_threshold": 0.5}, {}),
    ({"server": ServerOptimizer("median")}, {}),
    ({"server": ServerOptimizer("weighted")}, {"scope": "table"}),
    ({}, {"regulariser": "l2"}),
    ({}, {"regulariser": "nuc"}),
]


@needs_compiler
@pytest.mark.parametrize("store", ["dense", "lazy"])
@pytest.mark.parametrize(("settings", "objective"), KERNEL_CASES)
def test_kernel_gives_the_same_round(replay, settings, objective, store):
    record = replay.load("rounds_partial_earlystop")
    if settings.get("mode") == "pfedrec":
        store = "dense"
    kept = []
    for compiled in (False, True):
        federation = record.federation(store=store, compile=compiled, **settings)
        training = dataclasses.replace(record.training(**objective), decay_personal=0.01)
        for a in range(2):
            clients = record.run_round(federation, a, training)
            report = federation.finish_round()
        state = federation.state_dict()
        kept.append((clients, report, state, federation.scores(torch.arange(federation.clients))))
    (clients, report, state, scores), (others, again, compiled_state, compiled_scores) = kept
    close(others, clients)
    close(compiled_scores, scores, 1e-9)
    assert again.traffic == report.traffic
    assert again.sparsity == report.sparsity
    assert again.loss == pytest.approx(report.loss, rel=1e-10)
    for name, value in state.items():
        close(compiled_state[name], value)


@needs_compiler
def test_kernel_is_used_only_when_asked(replay, monkeypatch):
    calls = []
    score = NativeStep.score
    monkeypatch.setattr(NativeStep, "score", lambda *args: (calls.append(1), score(*args)))
    record = replay.load("rounds_full")
    record.run_round(record.federation(), 0, record.training())
    assert not calls
    record.run_round(record.federation(compile=True), 0, record.training())
    assert calls
    for asked in (False, True):
        assert FedRAP(n_users=2, n_items=3, compile=asked).federation.settings.compile is asked


@pytest.mark.parametrize("compiler", ["", "false", "/nowhere/c++"])
def test_without_a_compiler_the_round_is_taken_in_pytorch(replay, monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    native.native_step.cache_clear()
    record = replay.load("rounds_full")
    federation = record.federation(compile=True)
    with pytest.warns(UserWarning, match=r"compile=True: .*continuing without the kernel") as seen:
        record.run_round(federation, 0, record.training(), pieces=2)
    native.native_step.cache_clear()
    assert len(seen) == 1
    assert "\n" not in str(seen[0].message)
    federation.finish_round()
    close(federation.common, record.tensor("r0_C"))
