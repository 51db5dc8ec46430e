"""FedRAP under a Trainer: options, baselines, checkpoints, ranks, lists."""

import csv
import math

import pytest
import torch
from interrupt import Interrupt, InterruptedRunError
from lightning.pytorch import LightningModule, Trainer, seed_everything

from callbacks import CommunicationCost, Curriculum
from datamodules import Interactions
from lightning_modules import FedRAP
from lightning_modules.fedrap import CentralRecommender, FedNCF
from lightning_modules.fedrap.privacy import spent_epsilon
from lightning_modules.fedrap.settings import MODES

SMALL = {"source": "planted", "max_users": 60, "batch_size": 20}
GENTLE = {"width": 4, "lr_item": 20.0, "local_epochs": 2, "personal_std": 0.1}


def data(**options):
    return Interactions(**{**SMALL, **options})


def model(**options):
    return FedRAP(**{**GENTLE, **options})


def same(left, right, tolerance=0.0):
    left, right = left.state_dict(), right.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_and_scores(fit, mode):
    rate = 0.5 if mode == "central" else 20.0
    module = model(mode=mode, lr_item=rate)
    trainer = fit(module, data(), callbacks=[CommunicationCost()])
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert {"val/hr", "val/ndcg", "val/hr_paper", "val/ndcg_paper", "train/loss"} <= set(metrics)
    assert 0 <= metrics["val/ndcg"] <= metrics["val/hr"] <= 1
    assert all(math.isfinite(value) for value in metrics.values())
    federation = module.federation
    sends = mode not in ("local_only", "popularity")
    assert (metrics["traffic/total_mb"] > 0) == sends
    if mode == "local_only":
        assert int(federation.common.count_nonzero()) == 0
    if mode == "global_only":
        assert federation.personal is None
    (tested,) = trainer.test(module, data(), verbose=False)
    assert tested["test/hr_low"] <= tested["test/hr"] <= tested["test/hr_high"]
    assert {"test/hr_rare", "test/hr_popular"} <= set(tested)


def test_each_client_of_pfedrec_scores_with_its_own_table(fit):
    module = model(mode="pfedrec")
    fit(module, data(clients_sample_ratio=0.5), epochs=1)
    federation = module.federation
    client = torch.arange(federation.clients)
    scores = federation.scores(client)
    tables = federation.personal.table
    tables = torch.where(federation.taken_part[:, None, None], tables, federation.common)
    expected = torch.einsum("nmk,nk->nm", tables, federation.vector) + federation.bias[:, None]
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
    assert 0 < int(federation.taken_part.sum()) < len(client)


def test_popularity_does_not_depend_on_the_pool(fit):
    results = []
    for pool in ("train_only", "unobserved"):
        trainer = fit(model(mode="popularity"), data(negative_pool=pool), epochs=1)
        results.append(float(trainer.callback_metrics["val/hr_paper"]))
    assert results[0] == results[1]


@pytest.mark.parametrize("batch_size", [7, 60])
def test_touched_rows_alone_train_the_same(fit, tmp_path, batch_size):
    dense, lazy = model(), model(store="lazy")
    fit(dense, data())
    seed_everything(0, verbose=False)
    trainer = fit(lazy, data(batch_size=batch_size))
    client = torch.arange(60)
    torch.testing.assert_close(
        dense.federation.scores(client), lazy.federation.scores(client), rtol=0, atol=1e-5
    )
    trainer.save_checkpoint(tmp_path / "lazy.ckpt")
    loaded = FedRAP.load_from_checkpoint(tmp_path / "lazy.ckpt", map_location="cpu")
    assert torch.equal(loaded.federation.scores(client), lazy.federation.scores(client))


@pytest.mark.parametrize(
    "options",
    [
        {"server": "median", "store": "lazy"},
        {"server": "fedadam", "dp_clip": 1.0, "dp_noise": 0.1},
        {"l1_mode": "prox", "loss_weights": {"sparsity": 5.0}, "mode": "no_independence"},
    ],
)
def test_resume_in_the_middle_of_a_round(fit, tmp_path, options):
    part = {"clients_sample_ratio": 0.7, "batch_size": 10}
    whole, first, second = (model(**options) for _ in range(3))
    fit(whole, data(**part), epochs=3)
    path = tmp_path / "stopped.ckpt"
    seed_everything(0, verbose=False)
    with pytest.raises(InterruptedRunError):
        fit(first, data(**part), epochs=3, callbacks=[Interrupt(after=7, path=str(path))])
    seed_everything(0, verbose=False)
    fit(second, data(**part), epochs=3, ckpt_path=path, callbacks=[])
    same(whole, second)


def runs_on_ranks(world):
    """Several kinds of runs on `world` ranks; gives the whole states and metrics of this rank."""
    kinds = {
        "partial": (model(), {"clients_sample_ratio": 0.55}),
        "lazy": (model(store="lazy"), {}),
        "median": (model(server="median", dp_clip=1.0, dp_noise=0.2), {}),
        "prox": (model(l1_mode="prox", loss_weights={"sparsity": 2.0}), {}),
        "pfedrec": (model(mode="pfedrec"), {}),
        "fedncf": (FedNCF(width=4, local_epochs=2), {"clients_sample_ratio": 0.55}),
    }
    results = {}
    for name, (module, options) in kinds.items():
        seed_everything(0, verbose=False)
        trainer = Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=world,
            strategy="ddp" if world > 1 else "auto",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
        )
        held = []
        module.on_train_end = lambda module=module, held=held: held.append(bytes_held(module))
        trainer.fit(module, data(**{**options, "batch_size": 20 // world}))
        state = {k: v.numpy() for k, v in module.state_dict().items() if "metrics" not in k}
        results[name] = state, float(trainer.callback_metrics["val/hr_paper"]), held[0]
    return results


def bytes_held(module):
    """Memory of the personal tables."""
    personal = getattr(getattr(module, "federation", None), "personal", None)
    return 0 if personal is None else personal.bytes()


def test_result_does_not_depend_on_the_number_of_ranks(ranks):
    alone = runs_on_ranks(1)
    first, second = ranks(runs_on_ranks, 2)
    for name, (state, value, held) in alone.items():
        assert first[name][1] == pytest.approx(value, abs=1e-6), name
        assert second[name][1] == pytest.approx(value, abs=1e-6), name
        for key, expected in state.items():
            if key == "training_iterations":  # a rank may have more, empty batches
                continue
            actual = first[name][0][key]
            torch.testing.assert_close(
                torch.from_numpy(actual),
                torch.from_numpy(expected),
                rtol=0,
                atol=1e-6,
                msg=lambda text, name=name, key=key: f"{name} {key}: {text}",
            )
        if name not in ("fedncf", "lazy"):
            assert first[name][2] == second[name][2] == held / 2
    torch.testing.assert_close(
        torch.from_numpy(second["partial"][0]["federation.common"]),
        torch.from_numpy(alone["partial"][0]["federation.common"]),
        rtol=0,
        atol=1e-6,
    )


def test_curriculum_moves_the_weights_unless_it_is_dead(fit):
    def run(**options):
        seed_everything(0, verbose=False)
        weights = {"independence": 2.0, "sparsity": 2.0}
        module = model(loss_weights=options.pop("loss_weights", weights), **options)
        callbacks = [
            Curriculum(f"loss_weights.{name}", "tanh", "epoch", delay=1, initial=0.0, relative=True)
            for name in ("independence", "sparsity")
        ]
        fit(module, data(), epochs=1, callbacks=callbacks)
        return module.federation.common

    applied, dead = run(), run(curriculum_applies=False)
    without = run(loss_weights={"independence": 0.0, "sparsity": 0.0})
    torch.testing.assert_close(applied, without)  # nothing in the first round
    assert float((dead - without).abs().max()) > 1e-4


def test_selection_on_test_is_possible_and_named(fit):
    module = model(select_on="test", protocol="sampled99")
    assert module.monitor == "val_on_test/hr_paper"
    trainer = fit(module, data(validate_on_test=True), epochs=1)
    held_out = float(trainer.callback_metrics["val_on_test/hr_paper"])
    (tested,) = trainer.test(module, data(), verbose=False)
    assert tested["test/hr_paper"] == pytest.approx(held_out)
    assert model().monitor == "val/hr"


def test_privacy_is_accounted(fit):
    values = []
    for options in (
        {"dp_noise": 2.0},
        {"dp_noise": 2.0, "dp_trust": "central"},
        {"dp_noise": 20.0},
    ):
        module = model(dp_clip=1.0, **options)
        trainer = fit(module, data(clients_sample_ratio=0.5, participation="poisson"), epochs=2)
        values.append(float(trainer.callback_metrics["train/epsilon"]))
    local, central, quiet = values
    assert 0 < quiet < local
    assert 0 < central < local


def test_central_noise_is_what_is_accounted(fit):
    """Poisson rounds divide by a constant and get constant noise, whoever takes part."""
    changes = []
    for noise in (1e-9, 3.0):
        module = model(dp_clip=1.0, dp_noise=noise, dp_trust="central", mode="global_only")
        fit(module, data(clients_sample_ratio=0.5, participation="poisson"), epochs=1)
        assert module.federation.expected_clients == 30
        changes.append(module.federation.common.double())
    spread = float((changes[1] - changes[0]).std())
    assert spread == pytest.approx(3.0 / 30**0.5, rel=0.05)
    fixed = model(dp_clip=1.0, dp_noise=2.0, dp_trust="central")
    fit(fixed, data(clients_sample_ratio=0.51), epochs=1)
    assert fixed.federation.expected_clients is None
    expected = spent_epsilon(2.0 * 30**0.5, 0.51, 1, fixed.dp_delta, "fixed")
    assert fixed.epsilon() == pytest.approx(expected)
    with pytest.raises(ValueError, match="not on server='median'"):
        fit(model(dp_clip=1.0, dp_noise=2.0, dp_trust="central", server="median"), data())


def test_lists_leave_out_what_the_user_has(fit, tmp_path):
    module, known = model(top_k=5), data()
    trainer = fit(module, known)
    parts = trainer.predict(module, known)
    assert sum(len(part.client) for part in parts) == 60
    observed = known.predict_set.seen
    for part in parts:
        assert part.item.shape == (len(part.client), 5)
        assert bool((part.score.diff(dim=1) <= 0).all())
        for client, items in zip(part.client.tolist(), part.item.tolist(), strict=True):
            _, seen = observed.of(torch.tensor([client]).numpy())
            assert not set(items) & set(seen.tolist())
    (path,) = module.write_predictions(parts, tmp_path)
    rows = list(csv.DictReader(path.open()))
    assert len(rows) == 300
    assert rows[0]["user"] == str(known.user_ids[0])
    assert rows[4]["rank"] == "5"


def test_an_unknown_user_gets_the_common_table_and_a_warning(fit, tmp_path):
    known = data()
    known.setup()
    user = str(known.user_ids[7])
    asked = data(predict_users=[user, "nobody"])
    module = model(top_k=5)
    trainer = fit(module, asked, epochs=1)
    with pytest.warns(UserWarning, match=r"1 user\(s\) without training data"):
        (part,) = trainer.predict(module, asked)
    federation = module.federation
    cold = federation.common @ federation.vector.mean(0) + federation.bias.mean()
    assert part.client.tolist()[1] == -1
    assert torch.equal(part.item[1], cold.topk(5).indices)
    (path,) = module.write_predictions([part], tmp_path)
    assert [row["user"] for row in csv.DictReader(path.open())][::5] == [user, "nobody"]


@pytest.mark.parametrize("network", ["mf", "gmf", "bpr", "neumf", "lightgcn"])
def test_central_baselines_learn(fit, tmp_path, network):
    module = CentralRecommender(network, width=8)
    known = data(source="planted", max_users=None, batch_size=24)
    trainer = fit(module, known, epochs=1)
    before = float(trainer.callback_metrics["val/hr"])
    trainer = fit(module, known, epochs=7 if network != "neumf" else 4)
    after = float(trainer.callback_metrics["val/hr"])
    popularity = fit(model(mode="popularity"), known, epochs=1)
    assert after > max(before, float(popularity.callback_metrics["val/hr"])) - 0.02
    trainer.save_checkpoint(tmp_path / "central.ckpt")
    loaded = CentralRecommender.load_from_checkpoint(tmp_path / "central.ckpt")
    client = torch.tensor([0, 5, -1])
    assert torch.equal(loaded.scores(client), module.scores(client))


def test_fedncf_learns_and_reloads(fit, tmp_path):
    module = FedNCF(width=8, local_epochs=5, lr=0.02)
    known = data(batch_size=60)
    trainer = fit(module, known, epochs=1, callbacks=[CommunicationCost()])
    first = float(trainer.callback_metrics["train/loss"])
    trainer = fit(module, known, epochs=15)
    assert float(trainer.callback_metrics["train/loss"]) < 0.8 * first
    trainer.save_checkpoint(tmp_path / "ncf.ckpt")
    loaded = FedNCF.load_from_checkpoint(tmp_path / "ncf.ckpt")
    client = torch.arange(60)
    assert torch.equal(loaded.scores(client), module.scores(client))
    assert module.scores(torch.tensor([-1])).shape == (1, module.n_items)


def test_fedncf_clients_are_those_of_a_loop(fit):
    """One block of clients against a network per client."""
    from torch.nn import functional as F

    from lightning_modules.fedrap.networks import NeuralFusion

    module, known = FedNCF(width=4, local_epochs=3), data()
    fit(module, known, epochs=1)
    batch = known.train_set[[2, 9]]
    start = {name: getattr(module, name).clone() for name in ("user", "item", "head")}
    module._trainer = None
    from lightning_modules.fedrap.schedule import Order, Samples, build_blocks

    items = torch.cat([batch.positive[:, None], batch.negative], 1)
    label = torch.zeros_like(items)
    label[:, 0] = 1
    position = torch.arange(2).repeat_interleave(batch.offsets.diff() * items.shape[1])
    every = torch.arange(len(position))
    order = Order(None, torch.zeros_like(position), every)
    samples = Samples(position, items.reshape(-1), label.reshape(-1))
    for block in build_blocks(samples, order, 2, module.n_items):
        module._train_block(block, batch.client[block.client])
    tables, heads = [], []
    for i, client in enumerate(batch.client.tolist()):
        network = NeuralFusion(4)
        torch.nn.utils.vector_to_parameters(start["head"].clone(), network.parameters())
        user = start["user"][client].clone().requires_grad_(True)
        table = start["item"].clone().requires_grad_(True)
        optimizer = torch.optim.Adam([user, table, *network.parameters()], lr=module.lr)
        chosen, truth = samples.item[position == i], samples.label[position == i].float()
        for _ in range(3):
            rows = table[chosen]
            mine = user.expand(len(chosen), -1)
            logits = network(mine[:, :4], mine[:, 4:], rows[:, :4], rows[:, 4:])
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(logits, truth).backward()
            optimizer.step()
        torch.testing.assert_close(
            module.round_user[client].float(), user.detach(), rtol=0, atol=1e-5
        )
        tables.append(table.detach() - start["item"])
        heads.append(torch.nn.utils.parameters_to_vector(network.parameters()).detach())
    torch.testing.assert_close(module.round_item.float(), sum(tables), rtol=0, atol=2e-5)
    moved = sum(head - start["head"] for head in heads)
    torch.testing.assert_close(module.round_head.float(), moved, rtol=0, atol=2e-5)


def test_traffic_is_summed_over_a_resume_and_needs_a_federated_method(fit):
    cost = CommunicationCost()
    module = model()
    fit(module, data(), epochs=3, callbacks=[cost])
    once = 60 * module.n_items * module.width * 4
    assert cost.total_dense_bytes == 3 * 2 * once
    assert cost.total_bytes <= cost.total_dense_bytes
    other = CommunicationCost()
    other.load_state_dict(cost.state_dict())
    assert other.total_bytes == cost.total_bytes
    with pytest.raises(ValueError, match="CommunicationCost needs a federated method"):
        cost.on_fit_start(Trainer(logger=False, enable_checkpointing=False), LightningModule())


def test_proximal_rounds_save_traffic_and_subgradients_do_not(fit):
    sent = {}
    for mode in ("subgradient", "prox", "server_prox"):
        seed_everything(0, verbose=False)
        cost = CommunicationCost()
        module = model(l1_mode=mode, loss_weights={"sparsity": 30.0, "independence": 0.0})
        fit(module, data(), epochs=12, callbacks=[cost])
        sent[mode] = cost.total_bytes / cost.total_dense_bytes
    assert sent["subgradient"] > 0.99
    assert sent["prox"] < 0.9
    assert sent["server_prox"] < 0.95
