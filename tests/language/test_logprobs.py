"""Sequence log-probabilities: shifted, masked, independent of padding, equal to the plain way."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_modules.components.language import (
    BackboneConfig,
    Support,
    adapters_off,
    build_backbone,
    gather_logprobs,
    sequence_logprobs,
)

REFERENCE = Path(__file__).parents[1] / "rso" / "reference"
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 40,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
T5 = {
    "model_type": "t5",
    "vocab_size": 40,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def golden():
    return np.load(REFERENCE / "tiny_gpt2.npz")


def golden_model(golden, which, dtype=torch.float64):
    config = json.loads((REFERENCE / "tiny_gpt2_config.json").read_text())
    model = build_backbone(
        {"source": {"model_type": "gpt2", **config}, "attn_implementation": "eager"}
    ).to(torch.float64)
    state = {
        k[len(which) + 1 :]: torch.from_numpy(golden[k])
        for k in golden
        if k.startswith(f"{which}.")
    }
    model.load_state_dict(state, strict=False)
    assert not {k for k in model.state_dict() if k not in state and "attn.bias" not in k}
    return model.to(dtype).eval()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
@pytest.mark.parametrize("which", ["w", "ref"])
def test_reference_values(golden, which, dtype, tolerance):
    model = golden_model(golden, which, dtype)
    name = "policy" if which == "w" else "ref"
    for side in ("chosen", "rejected"):
        batch = [
            torch.from_numpy(golden[f"{side}_{k}"])
            for k in ("input_ids", "attention_mask", "labels")
        ]
        with torch.no_grad():
            result = sequence_logprobs(model, *batch)
        assert (
            np.abs(result.tokens.numpy() - golden[f"{name}_{side}_token_logps"]).max() < tolerance
        )
        assert np.abs(result.total.numpy() - golden[f"{name}_{side}_logps"]).max() < tolerance


def rows(seed=0, batch=5, length=12, vocabulary=40):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, length + 1, (batch,), generator=generator)
    starts = torch.randint(1, 5, (batch,), generator=generator)
    ids = torch.randint(3, vocabulary, (batch, length), generator=generator)
    column = torch.arange(length)
    mask = (column < lengths[:, None]).long()
    labels = torch.where((column >= starts[:, None]) & (mask == 1), ids, -100)
    return ids * mask, mask, labels


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_padding_order_and_side_do_not_matter(config):
    model = build_backbone(config).eval()
    ids, mask, labels = rows()
    plain = sequence_logprobs(model, ids, mask, labels).total
    wide = [
        torch.nn.functional.pad(x, (0, 7), value=v)
        for x, v in ((ids, 0), (mask, 0), (labels, -100))
    ]
    left = [
        torch.nn.functional.pad(x, (7, 0), value=v)
        for x, v in ((ids, 0), (mask, 0), (labels, -100))
    ]
    # move every row's own right padding to the left as well
    shift = 12 - mask.sum(-1)
    left = [torch.stack([row.roll(int(s)) for row, s in zip(x, shift, strict=True)]) for x in left]
    order = torch.tensor([3, 0, 4, 2, 1])
    assert torch.allclose(sequence_logprobs(model, *wide).total, plain, atol=1e-5)
    assert torch.allclose(sequence_logprobs(model, *left).total, plain, atol=1e-5)
    permuted = sequence_logprobs(model, ids[order], mask[order], labels[order]).total
    assert torch.allclose(permuted, plain[order], atol=1e-5)
    single = torch.cat(
        [
            sequence_logprobs(model, i[None, :n], m[None, :n], y[None, :n]).total
            for i, m, y, n in zip(ids, mask, labels, mask.sum(-1).tolist(), strict=True)
        ]
    )
    assert torch.allclose(single, plain, atol=1e-5)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_equal_log_softmax_with_gradients(config, chunk):
    model = build_backbone({"source": config, "dtype": "float64"}).eval()
    ids, mask, labels = rows()
    target = labels[:, 1:].clamp(min=0)[..., None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, :-1]
    plain = logits.log_softmax(-1).gather(-1, target).squeeze(-1) * (labels[:, 1:] != -100)
    weight = torch.linspace(-1, 1, len(ids), dtype=torch.float64)
    wanted = torch.autograd.grad((plain.sum(-1) * weight).sum(), model.parameters())
    ours = sequence_logprobs(model, ids, mask, labels, chunk=chunk)
    assert torch.allclose(ours.tokens, plain, atol=1e-12)
    got = torch.autograd.grad((ours.total * weight).sum(), model.parameters())
    for a, b in zip(got, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-11)


def test_gather_from_logits_has_the_right_gradient():
    torch.manual_seed(0)
    logits = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 9, (6,))
    assert torch.autograd.gradcheck(lambda x: gather_logprobs(x, labels, chunk=4), (logits,))


def test_half_precision_is_reduced_in_float32():
    logits = (torch.randn(64, 5000, generator=torch.Generator().manual_seed(0)) * 4).bfloat16()
    labels = torch.arange(64)
    exact = logits.double().log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
    ours = gather_logprobs(logits, labels)
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().max() < 1e-4
    # the same in bfloat16 is off by far more than the margins that losses compare
    half = logits.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
    assert (half - exact).abs().max() > 1e-2


def test_support_restricts_and_sharpens():
    model = build_backbone(GPT2).eval()
    ids, mask, labels = rows()
    allowed = tuple(range(1, 40))
    support = Support(allowed=allowed, temperature=0.7)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, :-1] / 0.7
    logits[..., 0] = -torch.inf
    plain = logits.log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None]).squeeze(-1)
    wanted = plain.where(labels[:, 1:] != -100, 0.0).sum(-1)
    got = sequence_logprobs(model, ids, mask, labels, support=support).total
    assert torch.allclose(got, wanted, atol=1e-5)


def test_only_the_response_counts_and_eos_is_in_it():
    model = build_backbone(GPT2).eval()
    ids, mask, labels = rows()
    result = sequence_logprobs(model, ids, mask, labels)
    assert torch.equal(result.mask, labels[:, 1:] != -100)
    assert (result.tokens[~result.mask] == 0).all()
    assert (result.tokens[result.mask] < 0).all()


def test_encoder_decoder():
    model = build_backbone({"source": T5, "kind": "seq2seq"}).eval()
    ids = torch.randint(2, 40, (3, 6), generator=torch.Generator().manual_seed(0))
    labels = torch.randint(2, 40, (3, 5), generator=torch.Generator().manual_seed(1))
    labels[0, 3:] = -100
    result = sequence_logprobs(model, ids, torch.ones_like(ids), labels)
    loss = model(input_ids=ids, labels=labels).loss
    assert torch.allclose(-result.tokens.sum() / result.mask.sum(), loss, atol=1e-5)


def test_adapters_off_is_the_base_model_and_a_zero_adapter_changes_nothing():
    config = BackboneConfig(source=LLAMA, lora={"r": 4})
    base = build_backbone(LLAMA).eval()
    model = build_backbone(config).eval()
    batch = rows()
    plain = sequence_logprobs(base, *batch).total
    assert torch.allclose(sequence_logprobs(model, *batch).total, plain, atol=1e-6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.3)
    assert not torch.allclose(sequence_logprobs(model, *batch).total, plain, atol=1e-3)
    with adapters_off(model):
        assert torch.allclose(sequence_logprobs(model, *batch).total, plain, atol=1e-6)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, _ in model.named_parameters() if "lora_" in n
    }
