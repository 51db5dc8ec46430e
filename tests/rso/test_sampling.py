"""Invariants of rejection sampling, pairing and the target policy."""

import math

import pytest
import torch

from lightning_modules.rso import (
    beta_for_sample_size,
    by_scores,
    effective_sample_size,
    optimal_policy,
    play,
    rejection_trace,
    select,
)
from lightning_modules.rso.pairing import raft_targets, rest_targets, shuffled
from lightning_modules.rso.rejection_sampling import (
    collapse,
    corrected_reward,
    text_keys,
)


def rewards(prompts=200, candidates=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(prompts, candidates, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("mode", ["paper", "iid", "gumbel_topk", "best_of_n", "sft"])
def test_offset_and_common_scale_do_not_matter(mode):
    r = rewards()
    plain = select(r, 8, 0.5, mode).rows()
    # powers of two keep the arithmetic exact
    assert select(r + 1024 * torch.arange(200)[:, None], 8, 0.5, mode).rows() == plain
    assert select(4 * r, 8, 2.0, mode).rows() == plain


def test_limits_of_beta():
    r = rewards()
    best = r.argsort(-1, descending=True)[:, :8].tolist()
    assert select(r, 8, 1e-9, "paper").rows() == best
    assert select(r, 8, 0.5, "best_of_n").rows() == best
    assert select(r, 8, 1e9, "paper").rows() == [list(range(8))] * 200
    assert select(r, 8, 1e9, "sft").rows() == [list(range(8))] * 200


@pytest.mark.parametrize("mode", ["paper", "gumbel_topk", "iid"])
def test_nothing_twice_and_at_most_n_passes(mode):
    result = select(rewards(), 8, 0.05, mode)
    assert all(len(set(row)) == len(row) for row in result.rows())
    assert result.passes.max() <= 8
    if mode != "iid":
        assert (result.count == 8).all()


def test_batch_equals_prompts_one_by_one_and_any_split():
    r = rewards(20)
    whole = select(r, 8, 0.5, seed=3)
    alone = [
        select(r[i : i + 1], 8, 0.5, seed=3, index=torch.tensor([i])).rows()[0] for i in range(20)
    ]
    assert whole.rows() == alone
    assert select(r, 8, 0.5, seed=4).rows() != whole.rows()


def test_layout_of_the_rewards_in_memory_does_not_matter():
    r = rewards(20)
    assert select(r.T.contiguous().T, 8, 0.5).rows() == select(r, 8, 0.5).rows()


def test_a_beta_per_prompt():
    r = rewards(4)
    beta = torch.tensor([1e-9, 1e9, 0.5, 0.5])
    result = select(r, 8, beta).rows()
    assert result[0] == r[0].argsort(descending=True)[:8].tolist()
    assert result[1] == list(range(8))
    assert result[2] == select(r, 8, 0.5).rows()[2]


def test_equal_texts_collapse_with_the_last_reward_at_the_first_place():
    keys = text_keys([["a", "b", "a", "c", "b"], ["x", "x", "x", "x", "x"]])
    first, r = collapse(keys, torch.arange(10.0).view(2, 5))
    assert first.tolist() == [[True, True, False, True, False], [True, *[False] * 4]]
    assert r[first].tolist() == [2.0, 4.0, 3.0, 9.0]
    few = select(torch.zeros(2, 5), 4, 1.0, keys=keys)
    assert few.count.tolist() == [3, 1]
    assert few.rows() == [[0, 1, 3], [0]]
    assert few.indices[1].tolist() == [0, -1, -1, -1]


def test_one_prompt_form_returns_what_there_is():
    accepted, _ = rejection_trace(["a", "a"], [1.0, 2.0], 2, 0.5, iter(lambda: 0.3, None))
    assert accepted == ["a"]


def test_first_accepted_of_iid_mode_follows_the_optimal_policy():
    generator = torch.Generator().manual_seed(0)
    log_sft = torch.randn(24, generator=generator, dtype=torch.float64).log_softmax(-1)
    reward = torch.randn(24, generator=generator, dtype=torch.float64)
    target = optimal_policy(log_sft, reward, 0.5)
    draws = torch.multinomial(log_sft.exp(), 50_000 * 100, True, generator=generator)
    draws = draws.view(50_000, 100)
    result = select(reward[draws], 1, 0.5, "iid", reward_bound=reward.max().item())
    assert (result.count == 1).float().mean() > 0.999
    accepted = draws.gather(1, result.indices.clamp(min=0))[result.count == 1]
    law = torch.bincount(accepted.flatten(), minlength=24) / len(accepted)
    assert 0.5 * (law - target.log_probs.exp()).abs().sum() < 0.02


def test_acceptance_rate_matches_the_closed_form():
    generator = torch.Generator().manual_seed(1)
    log_sft = torch.randn(24, generator=generator, dtype=torch.float64).log_softmax(-1)
    reward = torch.randn(24, generator=generator, dtype=torch.float64)
    number = 200_000
    draws = torch.multinomial(log_sft.exp(), number, True, generator=generator).view(1, -1)
    rate = optimal_policy(log_sft, reward, 0.5).acceptance.item()
    accepted = select(reward[draws], number, 0.5, "iid", reward_bound=reward.max().item()).count
    assert abs(accepted.item() / number - rate) < 4 * math.sqrt(rate * (1 - rate) / number)


def test_gumbel_mode_draws_its_first_from_the_importance_weights():
    r = rewards(1, 8).expand(40_000, -1)
    first = select(r, 2, 1.0, "gumbel_topk").indices[:, 0]
    law = torch.bincount(first, minlength=8) / 40_000
    assert 0.5 * (law - r[0].softmax(-1)).abs().sum() < 0.01


def test_correction_undoes_a_sharpened_proposal():
    generator = torch.Generator().manual_seed(2)
    log_sft = torch.randn(24, generator=generator, dtype=torch.float64).log_softmax(-1)
    reward = torch.randn(24, generator=generator, dtype=torch.float64)
    sharp = (log_sft / 0.7).log_softmax(-1)
    draws = torch.multinomial(sharp.exp(), 30_000 * 64, True, generator=generator).view(-1, 64)
    corrected = corrected_reward(reward[draws], log_sft[draws], sharp[draws], 0.5)
    bound = corrected_reward(reward[None], log_sft[None], sharp[None], 0.5).max().item()
    law = []
    for values, top in ((corrected, bound), (reward[draws], reward.max().item())):
        got = select(values, 1, 0.5, "iid", reward_bound=top)
        accepted = draws.gather(1, got.indices.clamp(min=0))[got.count == 1]
        law.append(torch.bincount(accepted.flatten(), minlength=24) / len(accepted))
    target = optimal_policy(log_sft, reward, 0.5).log_probs.exp()
    assert 0.5 * (law[0] - target).abs().sum() < 0.02
    # uncorrected, the target is the sharpened policy tilted
    other = optimal_policy(sharp, reward, 0.5).log_probs.exp()
    assert 0.5 * (law[1] - other).abs().sum() < 0.02
    assert 0.5 * (law[1] - target).abs().sum() > 0.05


def test_optimal_policy_over_beta():
    generator = torch.Generator().manual_seed(3)
    log_sft = torch.randn(24, generator=generator, dtype=torch.float64).log_softmax(-1)
    reward = torch.randn(24, generator=generator, dtype=torch.float64)
    got = optimal_policy(log_sft, reward, torch.logspace(-2, 2, 9, dtype=torch.float64))
    assert (got.expected_reward.diff() < 0).all()
    assert (got.kl.diff() < 0).all()
    assert torch.allclose(
        got.objective, got.expected_reward - torch.logspace(-2, 2, 9).double() * got.kl, atol=1e-12
    )


def test_effective_sample_size_and_adaptive_beta():
    r = rewards(30)
    assert torch.allclose(effective_sample_size(r, 1e9), torch.tensor(64.0).double())
    assert torch.allclose(effective_sample_size(r, 1e-6), torch.tensor(1.0).double())
    beta = beta_for_sample_size(r, 8.0)
    assert torch.allclose(effective_sample_size(r, beta), torch.tensor(8.0).double(), atol=1e-6)


def test_bradley_terry_labels_have_the_odds_of_the_judge():
    number = 20_000
    judge = by_scores(torch.tensor([[1.0, 0.0]]).expand(number, -1))
    matches = play([[0, 1]] * number, judge, label="bt_sample")
    share = sum(m.winner == 0 for m in matches) / number
    p = 1 / (1 + math.exp(-1))
    assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / number)
    assert all(m.logit == (1.0 if m.winner == 0 else -1.0) for m in matches[:50])


def test_margin_byes_and_extremes():
    scores = torch.tensor([[0.0, 0.1, 2.0, -1.0, 5.0]])
    judge = by_scores(scores)
    kept = play([[0, 1, 2, 3, 4]], judge, min_margin=0.5)
    assert [(m.winner, m.loser) for m in kept] == [(2, 3)]
    assert len(play([list(range(5))], judge, "tournament")) == 4
    (match,) = play([list(range(5))], judge, "best_worst", scores=scores)
    assert (match.winner, match.loser, match.logit) == (4, 3, 6.0)
    assert play([[], [1]], by_scores(torch.zeros(2, 5))) == []


def test_shuffle_is_a_function_of_seed_and_prompt():
    rows = [list(range(8))] * 50
    whole = shuffled(rows, torch.arange(50), 0)
    assert whole[7] == shuffled(rows[7:8], torch.tensor([7]), 0)[0]
    assert all(sorted(row) == list(range(8)) for row in whole)
    assert len({tuple(row) for row in whole}) > 45


def test_targets_of_raft_and_rest():
    scores = torch.tensor([[0.0, 10.0, 4.0], [8.0, 1.0, 7.5]])
    assert raft_targets(scores) == [[1], [0]]
    assert rest_targets(scores) == [[1], [0, 2]]
    assert rest_targets(torch.tensor([[0.0, 1.0], [10.0, 9.0]]), per_prompt=True) == [[1], [0]]
