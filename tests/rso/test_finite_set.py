"""Where everything can be enumerated: the optimum of the losses, regret, sampling, evaluation."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from datamodules import Preferences
from datamodules.preferences import FiniteSet
from lightning_modules.components.language import Sampling
from lightning_modules.rso import (
    RSO,
    PairOptions,
    PairPipeline,
    TabularPolicy,
    implicit_reward,
    optimal_policy,
    policy_value,
    preference_loss,
)
from lightning_modules.rso.candidates import PairStatistics, draw_candidates, select_candidates
from lightning_modules.rso.evaluation import (
    human_majority,
    overoptimisation_curve,
    side_by_side,
    win_rate,
    wins,
)
from lightning_modules.rso.reward_source import OracleReward


@pytest.mark.parametrize("gamma", [0.2, 0.5, 1.0])
def test_exact_labels_lead_to_the_optimal_policy(gamma):
    """Gradient descent on sigmoid_norm over all pairs, gamma = beta."""
    generator = torch.Generator().manual_seed(0)
    log_sft = torch.randn(24, generator=generator, dtype=torch.float64).log_softmax(-1)
    reward = torch.randn(24, generator=generator, dtype=torch.float64)
    table = log_sft.clone().requires_grad_()
    chance = (reward[:, None] - reward[None]).sigmoid()
    optimizer = torch.optim.LBFGS(
        [table], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
    )
    w, other = torch.meshgrid(torch.arange(24), torch.arange(24), indexing="ij")

    def closure():
        optimizer.zero_grad()
        logp = table.log_softmax(-1)
        losses = preference_loss(
            "sigmoid_norm", logp[w], logp[other], log_sft[w], log_sft[other], gamma
        )
        loss = (chance * losses).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    target = optimal_policy(log_sft, reward, gamma)
    value = policy_value(table.detach().log_softmax(-1), target.log_probs, reward, gamma)
    assert value.kl < 1e-6
    # the implicit reward is the reward up to a constant
    logp = table.detach().log_softmax(-1)
    implied = implicit_reward(logp[w], logp[other], log_sft[w], log_sft[other], gamma)
    assert torch.allclose(implied.margin, reward[w] - reward[other], atol=1e-3)


def test_regret_is_beta_times_kl_to_the_optimal_policy():
    generator = torch.Generator().manual_seed(1)
    log_sft, log_policy = torch.randn(2, 24, generator=generator).double().log_softmax(-1)
    reward = torch.randn(24, generator=generator).double()
    best = optimal_policy(log_sft, reward, 0.5)
    value = policy_value(log_policy, log_sft, reward, 0.5)
    regret = 0.5 * policy_value(log_policy, best.log_probs, reward, 0.5).kl
    assert torch.allclose(best.objective - value.objective, regret, atol=1e-12)


def test_losses_at_the_reference_and_under_a_swap():
    a, b = torch.tensor([-3.0]), torch.tensor([-4.0])
    assert abs(preference_loss("sigmoid_norm", a, b, a, b) - torch.tensor(2.0).log()) < 1e-7
    assert preference_loss("hinge_norm", a, b, a, b) == 1.0
    other = torch.tensor([-3.5]), torch.tensor([-3.0])
    z = 0.05 * ((a - b) - (other[0] - other[1]))
    assert torch.allclose(preference_loss("sigmoid_norm", a, b, *other), -logsigmoid(z))
    assert torch.allclose(preference_loss("sigmoid_norm", b, a, *other[::-1]), -logsigmoid(-z))


def test_the_module_reaches_a_better_policy(tmp_path):
    data = Preferences("finite_set", n_train=64, n_val=16, n_prompts=64, batch_size=64)
    module = RSO(
        policy="tabular", gamma=0.5, label="bt_sample", deduplicate=False, temperature=1.0,
        top_k=0, optimizer=_Adam,
    )  # fmt: skip
    pl.seed_everything(0)
    trainer = pl.Trainer(
        max_epochs=8, logger=False, accelerator="cpu", enable_progress_bar=False,
        enable_checkpointing=False, default_root_dir=tmp_path, use_distributed_sampler=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    before, after = module._history[0], module._history[-1]
    assert after["gold_reward"] > before["gold_reward"] + 0.1
    assert module.monitor == "val/objective"
    # the logged values are the exact ones
    probs = module.policy.table.detach().double().softmax(-1)
    rows = data.val_set[list(range(16))].prompt_input_ids[:, -1] - 24
    exact = (probs * FiniteSet().reward).sum(-1)[rows].mean()
    assert abs(trainer.callback_metrics["val/gold_reward"] - exact) < 1e-5


class _Adam(torch.optim.Adam):
    def __init__(self, params):
        super().__init__(params, lr=0.05)


def test_costs_are_those_of_the_paper():
    costs = {
        source: PairOptions(pair_source=source).costs
        for source in ("direct", "sft_sample_rank", "rso_sample_rank", "raft", "rest")
    }
    assert costs == {
        "direct": (0, 0),
        "sft_sample_rank": (8, 4),
        "rso_sample_rank": (64, 63 + 4),
        "raft": (64, 63),
        "rest": (64, 63),
    }
    assert PairOptions(pair_source="sft_sample_rank", ranking="tournament").costs == (8, 7)


class _Counting(OracleReward):
    needs_baseline = True

    def __init__(self, gold):
        super().__init__(gold)
        self.calls = 0

    def score(self, prompts, responses, baselines=None, principles=None):
        assert baselines is not None
        self.calls += len(prompts)
        return super().score(prompts, responses, baselines)

    def preference_logit(self, prompts, first, second):
        self.calls += len(prompts)
        return super().preference_logit(prompts, first, second)


def test_calls_of_a_pairwise_reward_are_the_costs():
    task = FiniteSet()
    rows = task.prompts(8, np.random.default_rng(0))
    for options in (
        PairOptions(deduplicate=False),
        PairOptions(pair_source="sft_sample_rank"),
        PairOptions(pair_source="sft_sample_rank", ranking="tournament"),
        PairOptions(deduplicate=False, ranking="tournament"),
    ):
        reward = _Counting(task.gold)
        PairPipeline(TabularPolicy(), reward, options, Sampling(1), 0).run(rows)
        assert reward.calls == 8 * options.costs[1]


def test_statistics_of_a_round():
    task = FiniteSet()
    rows = task.prompts(64, np.random.default_rng(0))
    options = PairOptions(deduplicate=False)
    statistics = PairStatistics()
    candidates = draw_candidates(
        TabularPolicy(), OracleReward(task.gold), rows, options, Sampling(1), 0
    )
    chosen = select_candidates(candidates, options, statistics)
    means = statistics.means()
    assert 1 < means["effective_sample_size"] < 64
    assert 0 < means["acceptance"] < 1
    assert means["duplicates"] > 0.5
    assert means["selected_reward"] > means["candidate_reward"]
    assert chosen.count.tolist() == [8] * 64
    longer = PairOptions(deduplicate=False, length_penalty=1.0)
    punished = draw_candidates(
        TabularPolicy(), OracleReward(task.gold), rows, longer, Sampling(1), 0
    )
    assert torch.allclose(punished.reward, candidates.reward - 1.0)


def test_adaptive_beta_hits_the_sample_size():
    task = FiniteSet()
    rows = task.prompts(16, np.random.default_rng(0))
    options = PairOptions(ess_target=8.0, deduplicate=False)
    statistics = PairStatistics()
    candidates = draw_candidates(
        TabularPolicy(), OracleReward(task.gold), rows, options, Sampling(1), 0
    )
    select_candidates(candidates, options, statistics)
    means = statistics.means()
    assert abs(means["effective_sample_size"] - 8) < 1.0  # ties at the top can forbid it
    assert means["beta"] > 0


def test_win_rates_and_judges():
    assert win_rate(torch.tensor([2.0, -1.0, 0.0])).tolist() == [1.0, 0.0, 0.5]
    reward = OracleReward(lambda prompts, responses: torch.tensor([float(r[0]) for r in responses]))
    assert wins(reward, [[0]] * 3, [[5], [1], [2]], [[4], [3], [2]]).tolist() == [1.0, 0.0, 0.5]
    # a judge that always says "first" is undecided, since half of the calls are swapped
    biased = side_by_side(lambda x, a, b: 1.0, ["q"], ["ours"], ["theirs"])
    assert biased.score.tolist() == [0.5]
    fair = side_by_side(
        lambda x, a, b: float(len(a) > len(b)), ["q", "q"], ["long", "s"], ["s", "long"]
    )
    assert fair.verdict.tolist() == [1.0, 0.0]
    assert fair.win_rate == 0.5
    # a mean of 0.8 is within 0.35 of the middle
    assert side_by_side(
        lambda x, a, b: 0.8 if a == "ours" else 0.2, ["q"], ["ours"], ["t"]
    ).verdict.tolist() == [0.5]
    assert human_majority([[0, 0, 1], [0, 1, 2], [2, 2, 2]]) == [0, None, 2]


def test_figure_of_over_optimisation():
    figure = overoptimisation_curve([0.0, 1.0, 4.0], [0, 1, 2], [0, 1, 0.5])
    (axes,) = figure.axes
    assert axes.lines[0].get_xdata().tolist() == [0.0, 1.0, 2.0]
    assert len(axes.lines) == 2
