"""Backbones, reward models, the cache of reference log-probabilities."""

import pytest
import torch

from lightning_modules.components.language import (
    BackboneConfig,
    ComparisonTemplate,
    EnsembleReward,
    LogprobCache,
    PairwiseReward,
    ScalarReward,
    build_backbone,
    context_length,
    data_fingerprint,
    disable_dropout,
    dispatch,
    model_fingerprint,
    pad,
    sequence_logprobs,
    train_byte_bpe,
)
from lightning_modules.components.language.encoding import join
from lightning_modules.rso.policies import build_policy

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 20,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
PROMPTS = [[2, 3], [2, 4, 5], [2]]
ANSWERS = [[6, 7, 1], [8, 1], [9, 9, 9, 1]]


def test_weights_are_a_function_of_the_config_and_the_global_seed_is_left_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    a, b = build_backbone(GPT2), build_backbone(GPT2)
    assert torch.equal(before, torch.get_rng_state())
    assert model_fingerprint(a) == model_fingerprint(b)
    c = build_backbone({"source": GPT2, "init_seed": 1})
    assert model_fingerprint(c) != model_fingerprint(a)
    with torch.no_grad():
        next(iter(b.parameters()))[0, 0] += 1e-3
    assert model_fingerprint(a) != model_fingerprint(b)


def test_folder_round_trip_and_accelerate(tmp_path):
    model = build_backbone(GPT2).eval()
    model.save_pretrained(tmp_path)
    batch = join(PROMPTS, ANSWERS, 0)
    with torch.no_grad():
        wanted = sequence_logprobs(model, *batch).total
        loaded = build_backbone(str(tmp_path)).eval()
        assert torch.equal(sequence_logprobs(loaded, *batch).total, wanted)
        spread = dispatch(BackboneConfig(str(tmp_path)), tmp_path)
        assert torch.allclose(sequence_logprobs(spread, *batch).total, wanted, atol=1e-6)
        placed = build_backbone(str(tmp_path), device_map="cpu").eval()
        assert torch.allclose(sequence_logprobs(placed, *batch).total, wanted, atol=1e-6)
        half = build_backbone({"source": str(tmp_path), "dtype": "bfloat16"}).eval()
        assert half.dtype == torch.bfloat16
        assert sequence_logprobs(half, *batch).total.dtype == torch.float32
    assert context_length(model) == 32


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_gradient_checkpointing_gives_the_same_gradient(lora):
    gradients = []
    for recompute in (False, True):
        config = {"source": GPT2, "gradient_checkpointing": recompute, "lora": lora}
        model = build_backbone(config)
        disable_dropout(model)
        sequence_logprobs(model, *join(PROMPTS, ANSWERS, 0)).total.sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert any(g is not None and g.abs().max() > 0 for g in gradients[0])
    for a, b in zip(*gradients, strict=True):
        assert (a is None and b is None) or torch.allclose(a, b, atol=1e-6)


def test_dropout_is_off_in_training_mode():
    model = build_backbone(GPT2).train()
    batch = join(PROMPTS, ANSWERS, 0)
    noisy = [sequence_logprobs(model, *batch).total for _ in range(2)]
    assert not torch.equal(*noisy)
    disable_dropout(model)
    quiet = [sequence_logprobs(model, *batch).total for _ in range(2)]
    assert torch.equal(*quiet)


def test_scalar_reward_reads_the_last_real_token():
    model = ScalarReward(build_backbone(GPT2), 0).eval()
    assert model.head.bias.item() == 0
    together = model.score(PROMPTS, ANSWERS)
    alone = torch.cat([model.score([p], [a]) for p, a in zip(PROMPTS, ANSWERS, strict=True)])
    assert torch.allclose(together, alone, atol=1e-6)
    rows = [[*p, *a] for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    with torch.no_grad():
        left = model(*pad(rows, 0, left=True))
    assert torch.allclose(left, together, atol=1e-5)
    # padding that shares EOS's id
    other = ScalarReward(model.backbone, 1)
    other.head = model.head
    assert torch.allclose(other.eval().score(PROMPTS, ANSWERS), together, atol=1e-6)
    zero = ScalarReward(build_backbone(GPT2), 0, init="zero").eval()
    assert zero.score(PROMPTS, ANSWERS).abs().max() == 0
    losses, margin = zero.pair_loss(PROMPTS, ANSWERS, ANSWERS[::-1])
    assert torch.allclose(losses, torch.full((3,), 2.0).log())
    assert margin.abs().max() == 0
    relative = model.score(PROMPTS, ANSWERS, ANSWERS[::-1])
    assert torch.allclose(relative, model.preference_logit(PROMPTS, ANSWERS, ANSWERS[::-1]))


def test_a_prompt_builder_may_add_principles():
    def build(prompt, response, principles):
        return [*response, *prompt, *(principles or [])]

    model = ScalarReward(build_backbone(GPT2), 0, build=build).eval()
    plain = model.score(PROMPTS, ANSWERS)
    ruled = model.score(PROMPTS, ANSWERS, principles=[15, 16])
    assert not torch.allclose(plain, ruled, atol=1e-4)


def test_pairwise_reward_reads_two_logits():
    template = ComparisonTemplate((10,), (11,), (12,), (13,), 14, 15)
    model = PairwiseReward(build_backbone(GPT2), template, 0, swap=False).eval()
    logit = model.preference_logit(PROMPTS, ANSWERS, ANSWERS[::-1])
    for row, value in enumerate(logit):
        ids = template.build(PROMPTS[row], ANSWERS[row], ANSWERS[::-1][row])
        assert ids[0] == 10
        assert ids[-1] == 13
        with torch.no_grad():
            law = model.backbone(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        assert abs(value - (law[14] - law[15])) < 1e-5
    losses, _ = model.pair_loss(PROMPTS, ANSWERS, ANSWERS[::-1], torch.tensor([False, True, False]))
    flipped = model._logit(PROMPTS[1:2], ANSWERS[1:2], ANSWERS[1:2])
    assert torch.allclose(losses[1], torch.nn.functional.softplus(flipped[0]), atol=1e-6)
    assert torch.allclose(losses[0], torch.nn.functional.softplus(-logit[0]), atol=1e-5)


def test_templates_of_a_real_tokenizer():
    tokenizer = train_byte_bpe(["hello A B"], 300)
    dialogue = ComparisonTemplate.of(tokenizer)
    text = tokenizer.decode(dialogue.build(*([tokenizer(t)["input_ids"] for t in "xyz"])))
    assert text == "[CONTEXT] x [RESPONSE A] y [RESPONSE B] z [PREFERRED]"
    summary = tokenizer.decode(list(ComparisonTemplate.of(tokenizer, "summary").first))
    assert summary == " [SUMMARY A] "
    assert "A" in tokenizer.decode([dialogue.label_a])


def test_ensemble_takes_the_lower_confidence_bound():
    members = [
        ScalarReward(build_backbone({"source": GPT2, "init_seed": s}), 0).eval() for s in (0, 1)
    ]
    values = torch.stack([m.score(PROMPTS, ANSWERS) for m in members])
    got = EnsembleReward(members, caution=2.0).score(PROMPTS, ANSWERS)
    assert torch.allclose(got, values.mean(0) - 2 * values.std(0, correction=0))
    with pytest.raises(ValueError, match="at least one"):
        EnsembleReward([])
    with pytest.raises(ValueError, match="caution"):
        EnsembleReward(members, caution=-1.0)


def test_cache_of_reference_log_probabilities(tmp_path):
    key = {"model": "m", "tokenizer": "t", "data": data_fingerprint([{"prompt": [1]}])}
    cache = LogprobCache(tmp_path / "x.npz", **key)
    assert cache.load() is None
    cache.save(torch.tensor([1.0]), torch.tensor([2.0]))
    assert [x.item() for x in cache.load()] == [1.0, 2.0]
    for name in key:
        with pytest.raises(ValueError, match=f"another {name}"):
            LogprobCache(tmp_path / "x.npz", **{**key, name: "other"}).load()


def test_encoder_decoder_policy_reads_causal_batches():
    t5 = {
        "model_type": "t5", "vocab_size": 20, "d_model": 16, "d_kv": 8, "d_ff": 32,
        "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0, "eos_token_id": 1,
        "pad_token_id": 0,
    }  # fmt: skip
    policy = build_policy("language", {"source": t5, "kind": "seq2seq"}, 1, 0).eval()
    with torch.no_grad():
        total = policy.sequence_logprobs(*join(PROMPTS, ANSWERS, 0)).total
        for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
            ids, labels = torch.tensor([prompt]), torch.tensor([answer])
            loss = policy.backbone(input_ids=ids, labels=labels).loss
            assert abs(total[row] + loss * len(answer)) < 1e-4
    ids, mask = pad(PROMPTS, 0, left=True)
    from lightning_modules.components.language import Sampling

    rollout = policy.sample(ids, mask, torch.arange(3), 2, 0, Sampling(5))
    prompts = [p for p in PROMPTS for _ in range(2)]
    with torch.no_grad():
        scored = policy.sequence_logprobs(*join(prompts, rollout.responses(), 0)).total
    assert torch.allclose(scored, rollout.logps, atol=1e-4)
