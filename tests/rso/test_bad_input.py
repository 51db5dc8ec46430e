"""Every mistake that a user can make ends in one line that says what to do."""

import json

import pytest
import torch

from datamodules import Preferences
from datamodules.preferences import parse, read_rows
from lightning_modules.components.language import (
    BackboneConfig,
    ComparisonTemplate,
    Encoder,
    Sampling,
    build_backbone,
    character_tokenizer,
    pad_token_id,
    train_byte_bpe,
)
from lightning_modules.components.language.backbone import check_context, check_vocabulary
from lightning_modules.rso import (
    RSO,
    PairOptions,
    PairPipeline,
    RewardRanking,
    TiltPolicy,
    beta_for_sample_size,
    optimal_policy,
    play,
    preference_loss,
    select,
)
from lightning_modules.rso.evaluation import side_by_side
from lightning_modules.rso.pairing import by_scores, rest_targets
from lightning_modules.rso.policies import build_policy
from lightning_modules.rso.reward_source import OracleReward

COMPARED = {"prompt": "q", "output_1": "a", "output_2": "b"}


@pytest.mark.parametrize(
    ("rows", "kind", "text"),
    [
        ([{"x": 1}], "pairs", r"row 0: no preference pair in the columns \['x'\]; accepted are"),
        ([{"x": 1}], "prompts", r"row 0: no prompt in the columns"),
        ([{"prompt": "q"}], "demonstrations", "row 0: no response"),
        ([{"prompt": "q", "chosen": "a", "rejected": "a"}], "pairs", "row 0: .* are equal"),
        ([{"prompt": "q", "chosen": "a", "rejected": ""}], "pairs", "row 0: rejected is empty"),
        ([{**COMPARED, "label": 3}], "pairs", "label must be 1 or 2"),
        ([{**COMPARED, "label": "first"}], "pairs", "label must be 1 or 2"),
        ([{**COMPARED, "label": 0}, {**COMPARED, "label": 2}], "pairs", "labels 0 and 2"),
        ([COMPARED], "pairs", "without label or preference"),
        ([{"chosen": "yes", "rejected": "no"}], "pairs", "no common prompt"),
        ([{"chosen": [{"role": "user", "content": "x"}], "rejected": "no"}], "pairs", "both"),
        ([], "pairs", "no rows"),
    ],
)  # fmt: skip
def test_rows(rows, kind, text):
    with pytest.raises(ValueError, match=text):
        parse(rows, kind)


def test_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_rows(tmp_path / "none.jsonl")
    (tmp_path / "x.jsonl").write_text('{"prompt": 1}\n{oops\n')
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: no JSON"):
        read_rows(tmp_path / "x.jsonl")
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"unknown form '\.txt'"):
        read_rows(tmp_path / "x.txt")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="JSON list"):
        read_rows(tmp_path / "x.json")


def test_data_module(tmp_path):
    for options, text in (
        ({"source": "nowhere"}, "source must be one of length_tilt"),
        ({"source": "llmbar"}, "needs tokenizer"),
        ({"task": "pears"}, "task must be"),
        ({"val_fraction": 1.5}, "val_fraction"),
        ({"n_train": 0}, "n_train"),
        ({"batch_size": 0}, "batch_size"),
    ):
        with pytest.raises(ValueError, match=text):
            Preferences(**options)
    with pytest.raises(ValueError, match=r"no folder with a tokenizer"):
        Preferences("llmbar", tokenizer=str(tmp_path / "none")).setup("fit")
    with pytest.raises(ValueError, match="broad"):
        Preferences("length_target", broad=2.0).setup("fit")
    data = Preferences("llmbar", tokenizer="byte_bpe", max_length=64, batch_size=2)
    with pytest.raises(ValueError, match=r"row \d+: the prompt has \d+ tokens .* max_length is 64"):
        data.setup("fit")
    with pytest.raises(ValueError, match="no known reward"):
        data.gold_reward([], [])


def test_pairs_of_another_tokenizer(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": [1], "chosen": [2], "rejected": [3]}) + "\n")
    with pytest.raises(ValueError, match="provenance"):
        Preferences("length_target", pairs_file=str(path)).setup("fit")
    path.write_text(json.dumps({"provenance": {"tokenizer": "abc"}}) + "\n")
    with pytest.raises(ValueError, match="another tokenizer"):
        Preferences("length_target", pairs_file=str(path)).setup("fit")


def test_encoder():
    tokenizer = character_tokenizer("abcd")
    with pytest.raises(ValueError, match="row 4: empty response"):
        Encoder(tokenizer).fit([3], [[1]], 4)
    with pytest.raises(ValueError, match="max_length must be >= 2"):
        Encoder(tokenizer, max_length=1)
    with pytest.raises(ValueError, match="no chat template"):
        Encoder(tokenizer).prompt([{"role": "user", "content": "a"}])
    with pytest.raises(ValueError, match="role and content"):
        Encoder(tokenizer).prompt([{"role": "user"}])
    bare = train_byte_bpe(["abc"], 260)
    bare.pad_token = None
    with pytest.raises(ValueError, match="no pad token"):
        pad_token_id(bare)
    bare.eos_token = None
    with pytest.raises(ValueError, match="no EOS"):
        Encoder(bare)
    with pytest.raises(ValueError, match="vocab_size must be >= 259"):
        train_byte_bpe(["abc"], 100)
    with pytest.raises(ValueError, match="'A' must be one token"):
        ComparisonTemplate.of(train_byte_bpe(["x"], 259), "dialogue").of(_Splitter(), "dialogue")
    with pytest.raises(ValueError, match="same token"):
        ComparisonTemplate((), (), (), (), 3, 3)


class _Splitter:
    """A tokenizer without any one-token word."""

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [1, 2]}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pair_source": "online"}, "pair_source must be one of"),
        ({"sampler": "exact"}, "sampler must be one of"),
        ({"n_candidates": 4}, "n_select=8 is more than n_candidates=4"),
        ({"n_select": 1}, "n_select must be >= 2"),
        ({"beta": 0.0}, "beta=0 is best_of_n"),
        ({"beta": -1.0, "sampler": "iid"}, "beta must be > 0"),
        ({"ranking": "swiss"}, "ranking must be one of"),
        ({"label": "coin"}, "label must be one of"),
        ({"min_margin": -1.0}, "min_margin"),
        ({"rest_threshold": 1.0}, "rest_threshold"),
        ({"ess_target": 100.0}, "ess_target"),
        ({"gamma": 0.0}, "gamma must be > 0"),
        ({"loss": "kto"}, "loss must be one of"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "only for loss=sigmoid_norm"),
        ({"label_smoothing": 0.6}, "label_smoothing must be in"),
        ({"pair_weight": "all"}, "pair_weight"),
        ({"reference": "none"}, "reference must be"),
        ({"reference": "adapter_off"}, "needs adapters"),
        ({"pair_source": "raft"}, "set loss=cross_entropy"),
        ({"reward": None}, "needs reward"),
        ({"evaluate_every": -1}, "evaluate_every"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"policy": "mlp"}, "policy must be one of"),
        ({"policy": "language", "eos_token_id": 1, "pad_token_id": 0}, "needs backbone"),
        ({"loss_weights": {"kl": 1.0}}, "has no term 'kl'"),
    ],
)  # fmt: skip
def test_module_arguments(options, text):
    with pytest.raises(ValueError, match=text):
        RSO(**options)


def test_best_of_n_takes_beta_zero():
    assert PairOptions(beta=0.0, sampler="best_of_n").beta == 0.0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"lora": {}}, "needs source"),
        ({"source": {"vocab_size": 3}}, "without model_type"),
        ({"source": "x", "quantisation": "nf4"}, "has no option quantisation"),
        ({"source": "x", "dtype": "int4"}, "dtype must be one of"),
        ({"source": "x", "kind": "masked"}, "kind must be"),
        ({"source": "x", "quantization": "fp4"}, "quantization must be"),
    ],
)
def test_backbone_config(value, text):
    with pytest.raises(ValueError, match=text):
        BackboneConfig.of(value)


def test_backbones(tmp_path, monkeypatch):
    with pytest.raises(TypeError, match="hub id, a folder"):
        BackboneConfig.of(3)
    with pytest.raises(ValueError, match="no folder with a model"):
        build_backbone(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="leaves nothing to train"):
        RSO(
            policy="language", backbone={"source": "x", "quantization": "nf4"}, eos_token_id=1,
            pad_token_id=0,
        )  # fmt: skip
    import sys

    for module, options in (
        ("peft", {"lora": {"r": 2}}),
        ("bitsandbytes", {"quantization": "nf4"}),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        source = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 8}
        value = {"source": source if module == "peft" else str(tmp_path), **options}
        with pytest.raises(ImportError, match=f"needs the package {module}"):
            build_backbone(value)


def test_rewards():
    rewards = torch.zeros(2, 8)
    rewards[1, 3] = torch.nan
    toy = Preferences("length_tilt", n_prompts=4)
    toy.setup("fit")

    def broken(prompts, responses):
        return torch.full((len(prompts),), torch.inf)

    options = PairOptions(n_candidates=8, n_select=4)
    pipeline = PairPipeline(TiltPolicy(), OracleReward(broken), options, Sampling(1), 0)
    with pytest.raises(ValueError, match="reward of candidate 0 of prompt 0 is inf"):
        pipeline.run(toy.prompts)
    flat = OracleReward(lambda prompts, responses: torch.zeros(len(prompts)))
    pipeline = PairPipeline(TiltPolicy(), flat, options, Sampling(1), 0)
    with pytest.warns(UserWarning, match="reward model is flat"):
        made = pipeline.run(toy.prompts)
    assert made.statistics.means()["acceptance"] == 1.0
    with pytest.raises(ValueError, match="no prompts"):
        pipeline.run([])


def test_sampler_warnings():
    toy = Preferences("length_tilt", n_prompts=4)
    toy.setup("fit")
    reward = OracleReward(toy.gold_reward)
    odd = PairOptions(n_candidates=8, n_select=3, deduplicate=False)
    with pytest.warns(UserWarning, match="n_select=3 is odd"):
        PairPipeline(TiltPolicy(), reward, odd, Sampling(1), 0).run(toy.prompts)
    few = PairOptions(n_candidates=8, n_select=8)
    with pytest.warns(UserWarning, match="fewer than n_select=8"):
        PairPipeline(TiltPolicy(), reward, few, Sampling(1), 0).run(toy.prompts)
    sharp = PairOptions(beta=1e-4)
    distinct = OracleReward(lambda prompts, responses: torch.arange(len(prompts)).float())
    with pytest.warns(UserWarning, match="close to best_of_n"):
        PairPipeline(TiltPolicy(), distinct, sharp, Sampling(1), 0).run(toy.prompts)


def test_functions():
    with pytest.raises(ValueError, match="reward_bound"):
        select(torch.ones(1, 4), 2, 1.0, "iid", reward_bound=0.0)
    with pytest.raises(ValueError, match="beta must be > 0"):
        optimal_policy(torch.zeros(2), torch.zeros(2), 0.0)
    with pytest.raises(ValueError, match="ess_target"):
        beta_for_sample_size(torch.ones(1, 4), 9.0)
    with pytest.raises(ValueError, match="needs reference"):
        preference_loss("sigmoid_norm", torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="needs the scores"):
        play([[0, 1]], by_scores(torch.zeros(1, 2)), "best_worst")
    with pytest.raises(ValueError, match="threshold"):
        rest_targets(torch.zeros(1, 2), 1.0)
    with pytest.raises(ValueError, match="decodes must be even"):
        side_by_side(lambda *_: 0.5, ["x"], ["a"], ["b"], decodes=3)
    with pytest.raises(ValueError, match=r"score in \[0, 1\]"):
        side_by_side(lambda *_: 2.0, ["x"], ["a"], ["b"])


def test_reward_stage(tmp_path):
    with pytest.raises(ValueError, match="kind must be"):
        RewardRanking("x", kind="scalar")
    toy = Preferences("length_tilt")
    toy.setup("fit")
    from lightning_modules.rso.reward_source import load_reward

    with pytest.raises(ValueError, match="checkpoint of RewardRanking"):
        load_reward(str(tmp_path / "none.ckpt"), toy, "none")
    source = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 16}
    module = RewardRanking(
        source, kind="bradley_terry", pad_token_id=0, eos_token_id=1, tokenizer_key="abc"
    )
    import lightning.pytorch as pl

    runner = pl.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False)
    runner.strategy.connect(module)
    runner.save_checkpoint(tmp_path / "r.ckpt")
    with pytest.raises(ValueError, match="another tokenizer"):
        load_reward(str(tmp_path / "r.ckpt"), toy, "none")
    assert load_reward(str(tmp_path / "r.ckpt"), toy, "abc") is not None


def test_language_policy_limits():
    source = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 16}
    policy = build_policy("language", {**source, "n_positions": 8}, 1, 0)
    prompt = torch.tensor([[2, 3, 4, 5]])
    with pytest.raises(ValueError, match=r"4 tokens and max_new_tokens=6 exceed .* context of 8"):
        policy.sample(prompt, torch.ones_like(prompt), torch.arange(1), 2, 0, Sampling(6))
    with pytest.raises(ValueError, match="row 5: prompt and response have 9 tokens"):
        check_context(policy.backbone, [{"index": 5, "prompt": [2] * 4, "chosen": [3] * 5}])
    with pytest.raises(ValueError, match=r"tokenizer has 7 entries .* embeds 5"):
        check_vocabulary(build_backbone({**source, "vocab_size": 5}), character_tokenizer("abcd"))


def test_data_without_known_reward(tmp_path):
    import lightning.pytorch as pl

    rows = [{"prompt": f"q{i}", "chosen": "yes", "rejected": "no"} for i in range(8)]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    data = Preferences(str(path), tokenizer="byte_bpe", vocab_size=260, batch_size=2)
    source = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 260}
    runner = pl.Trainer(
        logger=False, accelerator="cpu", enable_progress_bar=False, max_epochs=1,
        enable_checkpointing=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(ValueError, match="train RewardRanking"):
        runner.fit(RSO(policy="language", backbone=source), data)
