"""The modules: references, resume, rounds, baselines, stages, files."""

import json
import math

import lightning.pytorch as pl
import pytest
import torch
from torch.optim import SGD, AdamW

from callbacks import IterativeRSO, RewardModelSelection
from datamodules import Preferences
from lightning_modules.components.language import model_fingerprint
from lightning_modules.rso import RSO, RewardRanking, SupervisedFineTuning, TiltPolicy
from lightning_modules.rso.chain import RSOPipeline, main

TINY = {
    "model_type": "gpt2",
    "vocab_size": 16,
    "n_positions": 48,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
QUICK = {
    "policy": "language",
    "backbone": TINY,
    "temperature": 1.0,
    "top_k": 0,
    "n_candidates": 8,
    "n_select": 4,
    "gamma": 0.5,
}


def trainer(folder, **options):
    return pl.Trainer(
        **{
            "max_epochs": 1,
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "use_distributed_sampler": False,
            "default_root_dir": folder,
            "num_sanity_val_steps": 0,
            **options,
        }
    )


def words(**options):
    sizes = {"n_train": 32, "n_val": 8, "n_prompts": 8, "batch_size": 8}
    return Preferences(source="length_target", **{**sizes, **options})


def lengths(**options):
    sizes = {"n_train": 64, "n_val": 16, "n_prompts": 32, "batch_size": 16}
    return Preferences(source="length_tilt", **{**sizes, **options})


class _SGD(SGD):
    """Picklable optimiser with a rate that moves a tiny model."""

    def __init__(self, params):
        super().__init__(params, lr=0.05)


def fit(folder, module, data, **options):
    pl.seed_everything(0)
    runner = trainer(folder, **options)
    runner.fit(module, data)
    return module, runner


def weights(module):
    return {k: v.clone() for k, v in module.policy.state_dict().items()}


def difference(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a.values(), b.values(), strict=True))


@pytest.fixture(scope="module")
def by_reference(tmp_path_factory):
    """The same DPO run with the three references and with adapters."""
    folder = tmp_path_factory.mktemp("reference")
    made = {}
    for name in ("precomputed", "copy"):
        module = RSO(**QUICK, pair_source="direct", reference=name, optimizer=_SGD)
        made[name], _ = fit(folder, module, words())
    backbone = {"source": TINY, "lora": {"r": 4, "init_lora_weights": True}}
    for name in ("precomputed", "adapter_off"):
        options = {**QUICK, "backbone": backbone}
        module = RSO(**options, pair_source="direct", reference=name, optimizer=_SGD)
        made[f"lora {name}"], _ = fit(folder, module, words())
    return made


def test_precomputed_live_and_adapter_free_reference_are_one(by_reference):
    a = by_reference["precomputed"]
    b = by_reference["copy"]
    assert difference(weights(a), weights(b)) < 1e-6
    assert difference(weights(a), dict(a._frozen[0].state_dict().items())) > 1e-4
    c, d = by_reference["lora precomputed"], by_reference["lora adapter_off"]
    assert difference(weights(c), weights(d)) < 1e-6
    for left, right in ((a, b), (c, d)):
        for name in ("loss", "margin", "kl", "gold_reward", "length"):
            x, y = (m.trainer.callback_metrics[f"val/{name}"] for m in (left, right))
            assert torch.allclose(x, y, atol=1e-5), name


def test_metrics_of_a_language_policy(by_reference):
    metrics = by_reference["precomputed"].trainer.callback_metrics
    names = (
        "loss", "accuracy", "margin", "chosen_logps", "rejected_logps", "gold_reward",
        "gold_win_rate", "proxy_reward", "proxy_win_rate", "kl", "length", "truncated", "objective",
    )  # fmt: skip
    assert {f"val/{name}" for name in names} <= set(metrics)
    gold, kl = metrics["val/gold_reward"], metrics["val/kl"]
    assert torch.allclose(metrics["val/objective"], gold - 0.5 * kl, atol=1e-5)
    assert 1 <= metrics["val/length"] <= 16
    assert by_reference["precomputed"].figures().keys() == {"overoptimisation"}


def test_before_training_loss_is_ln_2_and_kl_is_zero(tmp_path):
    for loss, value in (("sigmoid_norm", math.log(2)), ("hinge_norm", 1.0)):
        module = RSO(**QUICK, pair_source="direct", loss=loss)
        pl.seed_everything(0)
        (metrics,) = trainer(tmp_path).validate(module, words(), verbose=False)
        assert abs(metrics["val/loss"] - value) < 1e-6
        assert abs(metrics["val/kl"]) < 1e-5
        assert metrics["val/accuracy"] == 0.5


@pytest.mark.parametrize("loss", ["hinge_norm", "hinge", "ipo"])
def test_other_losses_train(tmp_path, loss):
    module, runner = fit(
        tmp_path, RSO(loss=loss, gamma=0.5, pair_source="direct", optimizer=_SGD), lengths()
    )
    assert module.policy.theta.item() > 0
    assert math.isfinite(runner.callback_metrics["train/loss"])


@pytest.mark.parametrize("source", ["raft", "rest"])
def test_supervised_baselines(tmp_path, source):
    module = RSO(
        pair_source=source, loss="cross_entropy", temperature=1.0, top_k=0, n_candidates=16,
        optimizer=_SGD,
    )  # fmt: skip
    module, runner = fit(tmp_path, module, lengths(), max_epochs=3)
    # targets are the best candidates, which are longer than what the SFT policy says
    assert module.policy.theta.item() > 0.05
    assert runner.callback_metrics["val/gold_reward"] > -3.5


def test_slic_regulariser_and_pair_weights_enter_the_objective(tmp_path):
    plain, _ = fit(tmp_path, RSO(gamma=0.5, optimizer=_SGD, top_k=0), lengths())
    pulled, runner = fit(
        tmp_path,
        RSO(gamma=0.5, optimizer=_SGD, top_k=0, loss_weights={"sft": 1.0}),
        lengths(),
    )
    assert pulled.policy.theta.item() != plain.policy.theta.item()
    total = runner.callback_metrics["train/preference"] + runner.callback_metrics["train/sft"]
    assert torch.allclose(runner.callback_metrics["train/loss"], total, atol=1e-6)
    weighted, _ = fit(
        tmp_path, RSO(gamma=0.5, optimizer=_SGD, top_k=0, pair_weight="reward_gap"), lengths()
    )
    # weights lie between 1/2 and 1, so steps are shorter
    assert 0 < weighted.policy.theta.item() < plain.policy.theta.item()


def test_sampled_pairs_depend_on_the_seed_alone(tmp_path):
    made = []
    for group, rows in ((16, 2048), (5, 7)):
        module, _ = fit(
            tmp_path,
            RSO(**{**QUICK, "group": group, "rows": rows}, evaluate_every=0, optimizer=_SGD),
            words(),
        )
        made.append([(r["index"], r["chosen"], r["rejected"]) for r in module._records])
    assert made[0] == made[1]
    assert len(made[0]) > 8


def test_resume_in_the_middle_of_a_round_is_exact(tmp_path):
    def run(folder, epochs, checkpoint=None):
        module = RSO(temperature=1.0, top_k=0, gamma=0.5, label="bt_sample", reference="copy")
        rounds = IterativeRSO(every_n_epochs=2, reference="move", replay=True)
        pl.seed_everything(0)
        runner = trainer(folder, max_epochs=epochs, callbacks=[rounds])
        module.optimizer = _SGD
        runner.fit(module, lengths(), ckpt_path=checkpoint, weights_only=True)
        return module, runner

    whole, _ = run(tmp_path / "a", 4)
    assert whole._round == 1
    for stop in (2, 3):
        _, first = run(tmp_path / "b", stop)
        path = tmp_path / f"stop-{stop}.ckpt"
        first.save_checkpoint(path)
        resumed, _ = run(tmp_path / "c", 4, path)
        assert resumed._records == whole._records
        assert torch.equal(resumed.policy.theta, whole.policy.theta)
        assert torch.equal(resumed.reference.theta, whole.reference.theta)
    assert whole.reference.theta.item() != 0


def test_rounds_use_the_current_policy(tmp_path):
    module = RSO(temperature=1.0, top_k=0, gamma=0.5, optimizer=_SGD)
    module, _ = fit(
        tmp_path, module, lengths(), max_epochs=3, callbacks=[IterativeRSO(every_n_epochs=1)]
    )
    assert module._round == 2
    with pytest.raises(ValueError, match="reference=copy"):
        RSO().resample_every(1, True, False)
    with pytest.raises(ValueError, match="direct"):
        RSO(pair_source="direct").resample_every(1, False, False)


def test_checkpoint_alone_rebuilds_policy_and_reference(tmp_path, by_reference):
    source = by_reference["precomputed"]
    path = tmp_path / "x.ckpt"
    source.trainer.save_checkpoint(path)
    loaded = RSO.load_from_checkpoint(path, weights_only=True)
    assert difference(weights(loaded), weights(source)) == 0
    data = words()
    (metrics,) = trainer(tmp_path).validate(loaded, data, verbose=False)
    for name in ("val/loss", "val/kl"):
        assert abs(metrics[name] - source.trainer.callback_metrics[name].item()) < 1e-5
    # other pairs than those that were scored: the reference is built from its source again
    (other,) = trainer(tmp_path).validate(loaded, words(seed=3), verbose=False)
    assert math.isfinite(other["val/loss"])


def test_a_reference_that_cannot_be_rebuilt_is_an_error(tmp_path):
    module = RSO(pair_source="direct", gamma=0.5, optimizer=_SGD)
    with torch.no_grad():
        module.policy.theta.fill_(1.0)  # weights loaded by hand
    module, runner = fit(tmp_path, module, lengths())
    path = tmp_path / "x.ckpt"
    runner.save_checkpoint(path)
    loaded = RSO.load_from_checkpoint(path)
    with pytest.raises(ValueError, match="reference=copy"):
        trainer(tmp_path).validate(loaded, lengths(seed=5), verbose=False)


def test_reference_cache_on_disk(tmp_path):
    cache = str(tmp_path / "cache")
    options = {"pair_source": "direct", "reference_cache": cache, "evaluate_every": 0}
    first, _ = fit(tmp_path, RSO(**QUICK, **options, optimizer=_SGD), words())
    second = RSO(**QUICK, **options, optimizer=_SGD)
    second._score_records = None  # never called
    second, _ = fit(tmp_path, second, words())
    assert difference(weights(first), weights(second)) == 0
    other = {**QUICK, "backbone": {"source": TINY, "init_seed": 1}}
    with pytest.raises(ValueError, match=r"another model.*delete the file"):
        fit(tmp_path, RSO(**other, **options), words())
    with pytest.raises(ValueError, match="another data"):
        fit(tmp_path, RSO(**QUICK, **options), words(seed=1))


def test_reference_columns_of_the_data_are_used(tmp_path):
    data = lengths()
    data.setup("fit")
    for record in data.records["train"] + data.records["val"]:
        record["ref_chosen_logps"], record["ref_rejected_logps"] = -1.0, -2.0
    module = RSO(pair_source="direct", gamma=0.5)
    assert module.prepare_pairs(data.records["train"], "train", data) == data.records["train"]
    assert not module.scores.values


def test_shards_are_resumed_and_refuse_other_settings(tmp_path, monkeypatch):
    options = {**QUICK, "group": 4, "pairs_dir": str(tmp_path / "pairs"), "evaluate_every": 0}
    first, _ = fit(tmp_path, RSO(**options, optimizer=_SGD), words())
    folder = tmp_path / "pairs" / "round-000"
    assert sorted(p.name for p in folder.iterdir()) == [
        "pairs.jsonl", "shard-00000.json", "shard-00001.json",
    ]  # fmt: skip
    (folder / "shard-00001.json").unlink()
    calls = []
    from lightning_modules.rso import pipeline

    whole = pipeline.PairPipeline.shard
    monkeypatch.setattr(
        pipeline.PairPipeline, "shard", lambda self, rows: calls.append(1) or whole(self, rows)
    )
    second, _ = fit(tmp_path, RSO(**options, optimizer=_SGD), words())
    assert calls == [1]
    assert second._records == first._records
    with pytest.raises(ValueError, match="other settings"):
        fit(tmp_path, RSO(**{**options, "beta": 0.25}), words())
    head, *rows = (folder / "pairs.jsonl").read_text().splitlines()
    provenance = json.loads(head)["provenance"]
    assert provenance["options"]["beta"] == 0.5
    # the true reward labelled these pairs itself
    assert provenance["statistics"]["gold_accuracy"] == pytest.approx(1.0, abs=0.1)
    assert provenance["sampling"]["temperature"] == 1.0
    assert provenance["options"]["seed"] == 0
    assert len(provenance["policy"]) == 16
    assert len(rows) == len(first._records)
    assert {"chosen_text", "margin"} <= set(json.loads(rows[0]))


def test_whole_chain_of_stages(tmp_path, monkeypatch):
    """SFT, reward model, pairs file, policy: each by its packed config, then nothing again."""
    from lightning_modules.__main__ import main as command

    quiet = [
        "--trainer.logger=false", "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
    ]  # fmt: skip
    tiny = ["--data.init_args.n_train=64", "--data.init_args.n_val=16"]
    short = ["--trainer.max_steps=2", "--trainer.check_val_every_n_epoch=1"]
    stages = {
        "sft": {"config": "rso/sft.yaml", "words": [*quiet, *tiny, *short]},
        "reward": {"config": "rso/reward.yaml", "words": [*quiet, *tiny, *short]},
        "pairs": {
            "config": "rso/pairs.yaml",
            "words": [*quiet, *tiny, "--data.init_args.n_prompts=24",
                      "--model.init_args.n_candidates=8"],
        },
        "policy": {
            "config": "rso/policy.yaml",
            "words": [*quiet, *tiny, *short, "--trainer.val_check_interval=1"],
        },
    }  # fmt: skip
    calls = []
    chain = RSOPipeline(stages, tmp_path, run=lambda w: calls.append(w[0]) or command(w))
    assert chain.run() == ["sft", "reward", "pairs", "policy"]
    assert calls == ["fit", "fit", "predict", "fit"]
    assert chain.run() == []
    pairs = (tmp_path / "pairs" / "pairs.jsonl").read_text().splitlines()
    assert 24 * 3 < len(pairs) <= 24 * 4 + 1  # equal candidates collapse
    assert list((tmp_path / "policy" / "checkpoints").glob("proxy-*.ckpt"))
    # a changed stage is run again, and so is everything after it
    stages["pairs"]["words"][-1] = "--model.init_args.n_candidates=9"
    calls.clear()
    assert RSOPipeline(stages, tmp_path, run=lambda w: calls.append(w[0]) or 0).run() == [
        "pairs", "policy",
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="stage sft failed"):
        RSOPipeline(stages, tmp_path / "new", run=lambda w: 1).run()
    # an interrupted stage goes on from its last checkpoint
    (tmp_path / "policy" / "done.json").unlink()
    seen = []
    RSOPipeline(stages, tmp_path, run=lambda w: seen.append(w) or 0).run()
    assert seen[0][-1].endswith("policy/checkpoints/last.ckpt")
    assert main(["nowhere.yaml"]) == 2
    for bad, text in (({"sfx": {}}, "known are"), ({"sft": {}}, "needs config")):
        with pytest.raises(ValueError, match=text):
            RSOPipeline(bad, tmp_path)


def test_text_reward_model_learns_no_position(tmp_path):
    module = RewardRanking(TINY, kind="pairwise_text", optimizer=_SGD)
    module, runner = fit(tmp_path, module, words())
    assert math.isfinite(runner.callback_metrics["val/loss"])
    module.eval()
    prompts, first, second = [[2, 3]] * 4, [[12, 1]] * 4, [[13, 14, 1]] * 4
    a = module.reward.preference_logit(prompts, first, second)
    b = module.reward.preference_logit(prompts, second, first)
    assert torch.allclose(a, -b, atol=1e-6)
    assert module.reward.score(prompts, first, first).abs().max() < 1e-6
    with pytest.raises(ValueError, match="baselines"):
        module.reward.score(prompts, first)
    path = tmp_path / "reward.ckpt"
    runner.save_checkpoint(path)
    loaded = RewardRanking.load_from_checkpoint(path).eval()
    assert torch.equal(loaded.reward.preference_logit(prompts, first, second), a)
    # and it serves the sampler, with candidate 0 as baseline
    rso = RSO(**QUICK, reward=str(path), evaluate_every=1, optimizer=_SGD)
    rso, runner = fit(tmp_path, rso, words())
    assert rso._records
    assert "val/proxy_win_rate" in runner.callback_metrics


def test_a_curriculum_moves_beta_between_rounds(tmp_path, monkeypatch):
    from callbacks import Curriculum

    seen = []
    whole = RSO._provenance
    monkeypatch.setattr(
        RSO, "_provenance",
        lambda self, options, *rest: seen.append(options.beta) or whole(self, options, *rest),
    )  # fmt: skip
    module = RSO(temperature=1.0, top_k=0, gamma=0.5, optimizer=_SGD)
    steps = Curriculum("beta", lambda epoch: 4.0 * 0.5**epoch, clock="epoch")
    fit(tmp_path, module, lengths(), max_epochs=3, callbacks=[IterativeRSO(), steps])
    # the pairs of a round are made before its first batch moves beta again
    assert seen == [0.5, 4.0, 2.0]


def test_an_ensemble_of_reward_models(tmp_path):
    paths = []
    for seed in (0, 1):
        module = RewardRanking(
            {"source": TINY, "init_seed": seed}, kind="bradley_terry", optimizer=_SGD
        )
        _, runner = fit(tmp_path, module, words())
        paths.append(str(tmp_path / f"{seed}.ckpt"))
        runner.save_checkpoint(paths[-1])
    rso, runner = fit(tmp_path, RSO(**QUICK, reward=paths, optimizer=_SGD), words())
    assert rso._records
    assert "val/proxy_reward" in runner.callback_metrics
    assert len(rso.reward_model("proxy").members) == 2


def test_flips_of_the_text_reward_model_are_fair(tmp_path):
    """Half of the pairs are shown the other way round, in other places each epoch."""
    from lightning_modules.components.language.counter import counter_uniform, purpose

    flips = torch.stack(
        [counter_uniform(0, purpose("flip"), epoch, torch.arange(4000)) < 0.5 for epoch in (0, 1)]
    )
    assert (flips.double().mean(-1) - 0.5).abs().max() < 0.03
    assert 0.45 < (flips[0] != flips[1]).double().mean() < 0.55


def test_sft_export_is_the_next_backbone(tmp_path):
    module = SupervisedFineTuning(TINY, export_to=str(tmp_path / "model"), optimizer=_SGD)
    module, _ = fit(tmp_path, module, words(task="demonstrations"))
    again = SupervisedFineTuning(str(tmp_path / "model"), eos_token_id=1, pad_token_id=0)
    assert model_fingerprint(again.policy) == model_fingerprint(module.policy)
    lora = SupervisedFineTuning(
        {"source": TINY, "lora": {"r": 2}}, export_to=str(tmp_path / "merged"), optimizer=_SGD
    )
    lora, _ = fit(tmp_path, lora, words(task="demonstrations"))
    merged = SupervisedFineTuning(
        str(tmp_path / "merged"), eos_token_id=1, pad_token_id=0,
        allowed_tokens=lora.allowed_tokens,
    )  # fmt: skip
    batch = lora.trainer.datamodule.val_set[[0, 1]]
    with torch.no_grad():
        a, b = (m.eval()._scores(batch)[0] for m in (lora, merged))
    assert torch.allclose(a, b, atol=1e-5)


def test_selection_by_proxy_needs_evaluation(tmp_path):
    module = RSO(pair_source="direct", evaluate_every=0)
    with pytest.raises(ValueError, match="evaluate_every"):
        fit(
            tmp_path, module, lengths(), enable_checkpointing=True,
            callbacks=[RewardModelSelection()],
        )  # fmt: skip


def test_default_optimizer_and_predictions(tmp_path):
    module = RSO(**QUICK)
    data = words()
    pl.seed_everything(0)
    predictions = trainer(tmp_path).predict(module, data)
    assert isinstance(module.configure_optimizers(), AdamW)
    assert sum(len(p["reward"]) for p in predictions) == 8
    assert predictions[0]["selected"].shape == (8, 4)
    assert predictions[0]["logps"].shape == (64,)
    file = (tmp_path / "pairs.jsonl").read_text().splitlines()
    assert len(file) > 1
    again = words(pairs_file=str(tmp_path / "pairs.jsonl"))
    again.setup("fit")
    assert len(again.records["train"]) == len(file) - 1
    plain = trainer(tmp_path).predict(RSO(**{**QUICK, "pair_source": "direct"}), data)
    assert "selected" not in plain[0]


def test_tilt_policy_is_its_closed_form():
    policy = TiltPolicy(degree=2)
    with torch.no_grad():
        policy.theta.copy_(torch.tensor([3.0, -1.0]))
    n = torch.arange(17.0)
    law = (5.0**n / torch.exp(torch.lgamma(n + 1))) * torch.exp(3 * n / 16 - (n / 16) ** 2)
    got = policy.log_probs(torch.zeros(2, dtype=torch.int64)).exp()
    assert torch.allclose(got, (law / law.sum()).expand(2, -1), atol=1e-6)
