"""Rollouts: the KV cache, left padding, the law of the samples, and independence of the batch."""

import pytest
import torch

from lightning_modules.components.language import (
    Sampling,
    Support,
    build_backbone,
    counter_shuffle,
    counter_uniform,
    generate,
    sequence_logprobs,
)
from lightning_modules.components.language.encoding import join, pad
from lightning_modules.components.language.rollouts import EOS, LENGTH, STOP

TINY = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 12}
GPT2 = {
    "model_type": "gpt2",
    **TINY,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "initializer_range": 0.3,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
PROMPTS = [[2, 5], [2, 3, 4, 5], [2], [2, 7, 7], [2, 9, 4]]


@pytest.fixture(scope="module")
def model():
    return build_backbone(GPT2)


def draw(model, prompts=PROMPTS, index=None, candidates=6, seed=3, **options):
    ids, mask = pad(prompts, 0, left=True)
    index = torch.arange(len(prompts)) if index is None else torch.tensor(index)
    support = options.pop("support", None)
    first = options.pop("first_candidate", 0)
    sampling = Sampling(**{"max_new_tokens": 8, **options})
    return generate(
        model, ids, mask, index, candidates, sampling, seed, eos=1, pad_id=0, support=support,
        first_candidate=first,
    )  # fmt: skip


def test_same_candidates_whatever_the_company(model):
    whole = draw(model)
    small = draw(model, rows=4)
    assert whole.responses() == small.responses()
    for which in range(len(PROMPTS)):
        alone = draw(model, [PROMPTS[which]], [which])
        assert alone.responses() == whole.responses()[6 * which : 6 * which + 6]
    later = draw(model, candidates=2, first_candidate=4)
    assert later.responses()[:2] == whole.responses()[4:6]
    assert draw(model, seed=4).responses() != whole.responses()


def test_two_rank_split_gives_the_one_process_result(model):
    whole = draw(model)
    parts = [draw(model, PROMPTS[r::2], list(range(r, 5, 2))) for r in (0, 1)]
    rows = {
        (int(i), int(c)): response
        for part in parts
        for i, c, response in zip(part.index, part.candidate, part.responses(), strict=True)
    }
    assert [
        rows[int(i), int(c)] for i, c in zip(whole.index, whole.candidate, strict=True)
    ] == whole.responses()


@pytest.mark.parametrize("support", [None, Support(allowed=tuple(range(1, 12)))])
def test_log_probabilities_agree_with_the_forward_pass(model, support):
    rollout = draw(model, support=support)
    prompts = [PROMPTS[int(i)] for i in rollout.index]
    batch = join(prompts, rollout.responses(), 0)
    with torch.no_grad():
        total = sequence_logprobs(model.eval(), *batch, support=support).total
    assert torch.allclose(total, rollout.logps, atol=1e-4)
    assert torch.allclose(rollout.sampling_logps, rollout.logps)


def test_sharpened_sampling_reports_both_laws(model):
    rollout = draw(model, temperature=0.5, top_k=3)
    prompts = [PROMPTS[int(i)] for i in rollout.index]
    batch = join(prompts, rollout.responses(), 0)
    with torch.no_grad():
        total = sequence_logprobs(model.eval(), *batch).total
    assert torch.allclose(total, rollout.logps, atol=1e-4)
    assert (rollout.sampling_logps >= rollout.logps).float().mean() > 0.9


def test_first_token_follows_the_model(model):
    number = 20_000
    rollout = draw(model, [[2, 5]], [0], candidates=number, max_new_tokens=1, rows=number)
    with torch.no_grad():
        law = model.eval()(torch.tensor([[2, 5]])).logits[0, -1].double().softmax(-1)
    count = torch.bincount(rollout.ids[:, 0], minlength=12)
    deviation = (count / number - law).abs() / (law * (1 - law) / number).sqrt()
    assert deviation.max() < 4


def test_top_k_and_top_p_cut_the_support(model):
    with torch.no_grad():
        law = model.eval()(torch.tensor([[2, 5]])).logits[0, -1].softmax(-1)
    ordered = law.argsort(descending=True)
    kept = draw(model, [[2, 5]], [0], 300, max_new_tokens=1, top_k=3).ids[:, 0]
    assert set(kept.tolist()) <= set(ordered[:3].tolist())
    mass = law[ordered].cumsum(0)
    nucleus = set(ordered[: int((mass < 0.6).sum()) + 1].tolist())
    kept = draw(model, [[2, 5]], [0], 300, max_new_tokens=1, top_p=0.6).ids[:, 0]
    assert set(kept.tolist()) == nucleus


def test_greedy_is_the_argmax_with_and_without_cache(model):
    rollout = draw(model, candidates=1, temperature=0.0)
    for prompt, response in zip(PROMPTS, rollout.responses(), strict=True):
        ids = list(prompt)
        for token in response:
            with torch.no_grad():
                best = model.eval()(torch.tensor([ids])).logits[0, -1].argmax()
            assert int(best) == token
            ids.append(token)


def test_finish_reasons_and_masks_when_padding_is_eos(model):
    ids, mask = pad(PROMPTS, 1, left=True)
    rollout = generate(
        model, ids, mask, torch.arange(5), 8, Sampling(max_new_tokens=6), 0, eos=1, pad_id=1
    )
    for response, finish in zip(rollout.responses(), rollout.finish, strict=True):
        assert (response[-1] == 1) == (finish == EOS)
        assert 1 not in response[:-1]
        assert len(response) == 6 or finish == EOS
    assert {int(f) for f in rollout.finish} == {LENGTH, EOS}


def test_stop_sequences_are_cut_off(model):
    plain = draw(model, candidates=12)
    stop = next(tuple(r[1:3]) for r in plain.responses() if len(r) > 4)
    rollout = draw(model, candidates=12, stop=(stop,))
    hit = rollout.finish == STOP
    assert hit.any()
    for response, before, stopped in zip(rollout.responses(), plain.responses(), hit, strict=True):
        assert response == before[: len(response)]
        if stopped:
            assert tuple(before[len(response) : len(response) + 2]) == stop


def test_a_hub_models_own_generation_config_is_set_aside(model):
    plain = draw(model).responses()
    own = model.generation_config
    own.repetition_penalty, own.top_k, own.do_sample = 5.0, 1, True
    try:
        assert draw(model).responses() == plain
        assert model.generation_config is own
    finally:
        own.repetition_penalty, own.top_k, own.do_sample = 1.0, 50, False


def test_training_mode_and_the_global_generator_are_left_alone(model):
    model.train()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    draw(model)
    assert model.training
    assert torch.equal(before, torch.get_rng_state())


def test_counter_numbers_are_uniform_and_uncorrelated():
    index, step = torch.arange(400)[:, None], torch.arange(500)[None]
    u = counter_uniform(7, index, step)
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(float(u.mean()) - 0.5) < 4 * (1 / 12 / u.numel()) ** 0.5
    bins = torch.histc(u.float(), 20, 0, 1)
    assert ((bins - 10_000) ** 2 / 10_000).sum() < 45  # chi-square, 19 degrees, p < 1e-3
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u, counter_uniform(8, index, step))):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert correlation.abs() < 0.01
    assert torch.equal(u[3, 5], counter_uniform(7, torch.tensor(3), 5))
    order = counter_shuffle(0, torch.arange(3000), 4)
    assert torch.equal(order.sort(-1).values, torch.arange(4).expand(3000, 4))
    assert (torch.bincount(order[:, 0], minlength=4) / 3000 - 0.25).abs().max() < 0.04


def test_counters_that_are_numbers_give_what_tensors_give():
    index = torch.arange(5)
    for seed in (0, -1, 2**63 - 1):
        for number in (0, 7, -3, 2**63 - 1, -(2**63)):
            by_tensor = counter_uniform(seed, torch.tensor(number), index)
            assert torch.equal(counter_uniform(seed, number, index), by_tensor)
    # the numbers themselves, as pairs on disk depend on them
    got = counter_uniform(3, 11, index[:3], 2)
    assert got.tolist() == [0.6948909210546403, 0.7342228999098888, 0.00988908454762083]


def test_bad_input(model):
    ids, mask = pad(PROMPTS, 0)
    with pytest.raises(ValueError, match="padded on the left"):
        generate(model, ids, mask, torch.arange(5), 2, Sampling(), 0, eos=1, pad_id=0)
    for options, text in (
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ):
        with pytest.raises(ValueError, match=text):
            Sampling(**options)
    with pytest.raises(ValueError, match="candidates"):
        draw(model, candidates=0)


def test_recomputed_activations_are_off_while_sampling_and_on_again():
    from lightning_modules.components.language.backbone import recomputes_activations

    plain = build_backbone(GPT2)
    model = build_backbone({"source": GPT2, "gradient_checkpointing": True})
    assert recomputes_activations(model)
    assert draw(model).responses() == draw(plain).responses()
    assert recomputes_activations(model)
    assert not recomputes_activations(plain)
