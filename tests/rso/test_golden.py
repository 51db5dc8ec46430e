"""The independent reference values."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch.nn.functional import logsigmoid

from lightning_modules.components.language import (
    build_backbone,
    pairwise_reward,
    sequence_logprobs,
)
from lightning_modules.rso import (
    by_scores,
    optimal_policy,
    play,
    policy_value,
    preference_loss,
    rejection_law,
    rejection_trace,
    select,
)
from lightning_modules.rso.losses import slic_margin_loss
from lightning_modules.rso.policies import log_poisson
from lightning_modules.rso.rejection_sampling import (
    collapse,
    inclusion_probability,
    rejection_passes,
    text_keys,
)

REFERENCE = Path(__file__).parent / "reference"


def load(name):
    path = REFERENCE / name
    return json.loads(path.read_text()) if path.suffix == ".json" else np.load(path)


@pytest.mark.parametrize("case", load("rejection_traces.json"))
def test_rejection_traces(case):
    arguments = [case[k] for k in ("candidates", "rewards", "num_samples", "beta", "uniforms")]
    accepted, passes = rejection_trace(*arguments)
    assert accepted == case["accepted"]
    assert passes == case["rounds"]


@pytest.mark.parametrize("case", load("rejection_traces.json"))
def test_rejection_traces_vectorised(case):
    """The batched passes on the same numbers, each dealt to the candidate that it belongs to."""
    rewards = torch.tensor([case["rewards"]], dtype=torch.float64)
    first, rewards = collapse(text_keys([case["candidates"]]), rewards)
    grid, stream = [], iter(case["uniforms"])
    pool = {i: rewards[0, i].item() for i in first[0].nonzero().flatten().tolist()}
    while pool:
        row, taken, bound = (
            torch.zeros(rewards.shape[1], dtype=torch.float64),
            [],
            max(pool.values()),
        )
        for i, r in pool.items():
            row[i] = next(stream, 1.0)
            if row[i] < np.exp((r - bound) / case["beta"]):
                taken.append(i)
        grid.append(row)
        if not taken:  # the stream of the case is used up
            break
        for i in taken:
            del pool[i]
    result = rejection_passes(
        rewards, case["num_samples"], case["beta"], first, lambda turn, rows: grid[turn][None]
    )
    assert [case["candidates"][i] for i in result.rows()[0]] == case["accepted"]
    assert result.passes.item() == case["rounds"]


@pytest.mark.parametrize("case", load("rejection_exact.json"))
def test_rejection_law(case):
    law = rejection_law(case["rewards"], case["num_samples"], case["beta"])
    assert abs(sum(law.values()) - 1) < 1e-12
    assert len(law) == len(case["ordered_tuples"])
    for entry in case["ordered_tuples"]:
        assert abs(law[tuple(entry["accepted"])] - entry["probability"]) < 1e-12
    inclusion = inclusion_probability(law, len(case["rewards"]))
    assert np.abs(np.array(inclusion) - case["inclusion_probability"]).max() < 1e-12


@pytest.mark.parametrize("case", load("rejection_exact.json"))
def test_sampler_follows_the_exact_law(case):
    number = 40_000
    rewards = torch.tensor(case["rewards"], dtype=torch.float64).expand(number, -1)
    rows = select(rewards, case["num_samples"], case["beta"], "paper").rows()
    for entry in case["ordered_tuples"]:
        p = entry["probability"]
        seen = sum(row == entry["accepted"] for row in rows) / number
        assert abs(seen - p) < 4 * (p * (1 - p) / number) ** 0.5 + 3 / number


def test_optimal_policy():
    z = load("optimal_policy.npz")
    log_sft, reward, beta = (torch.from_numpy(z[k]) for k in ("log_pi_sft", "reward", "beta"))
    got = optimal_policy(log_sft, reward, beta)
    names = ("pi_r", "log_Z", "expected_reward", "kl_to_sft", "acceptance_rate", "objective")
    values = (got.log_probs.exp(), *got[1:])
    for name, value in zip(names, values, strict=True):
        assert np.abs(value.numpy() - z[name]).max() < 1e-10, name


@pytest.mark.parametrize("gamma", ["0.005", "0.05", "0.5"])
@pytest.mark.parametrize(
    "name", ["sigmoid_norm", "hinge_norm", "hinge", "ipo", "sigmoid_norm_ls0.1"]
)
def test_losses_and_gradients(name, gamma):
    z = load("losses.npz")
    names = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")
    values = [torch.from_numpy(z[k]) for k in names]
    values[0].requires_grad_()
    values[1].requires_grad_()
    kind, smoothing = (name[:12], 0.1) if "ls" in name else (name, 0.0)
    losses = preference_loss(kind, *values, gamma=float(gamma), label_smoothing=smoothing)
    assert np.abs(losses.detach().numpy() - z[f"{name}_g{gamma}"]).max() < 1e-10
    chosen, rejected = torch.autograd.grad(losses.mean(), values[:2])
    assert np.abs(chosen.numpy() - z[f"{name}_g{gamma}_grad_chosen"]).max() < 1e-10
    assert np.abs(rejected.numpy() - z[f"{name}_g{gamma}_grad_rejected"]).max() < 1e-10
    assert (chosen + rejected).abs().max() < 1e-15
    if kind == "hinge":
        own = slic_margin_loss(values[0], values[1], 1 / float(gamma)) * float(gamma)
        assert torch.allclose(own, losses, atol=1e-12)


@pytest.mark.parametrize("case", load("pairing.json"))
def test_pairing(case):
    judge = by_scores(torch.tensor([case["scores"]], dtype=torch.float64))
    for ranking in ("first_round", "tournament"):
        matches = play([case["order"]], judge, ranking)
        assert [[m.winner, m.loser] for m in matches] == case[ranking]


def test_pairwise_to_pointwise_reward():
    z = load("pairwise_reward.npz")
    first = torch.from_numpy(z["prob_A_when_y_is_A"])
    second = torch.from_numpy(z["prob_A_when_y_is_B"])
    single = pairwise_reward(first).numpy()
    assert np.abs(single - z["reward_single_order"]).max() < 1e-12
    both = pairwise_reward(first, second).numpy()
    assert np.abs(both - z["reward_swap_mean_of_logits"]).max() < 1e-12
    mean = pairwise_reward((first + 1 - second) / 2).numpy()
    assert np.abs(mean - z["reward_swap_logit_of_mean"]).max() < 1e-12


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
@pytest.mark.parametrize("loss", ["sigmoid_norm", "hinge_norm", "hinge"])
def test_three_training_steps_of_a_tiny_gpt2(loss, dtype, tolerance):
    z = load("tiny_gpt2.npz")
    source = {"model_type": "gpt2", **load("tiny_gpt2_config.json")}
    model = build_backbone({"source": source, "attn_implementation": "eager"}).double()
    model.load_state_dict(
        {k[2:]: torch.from_numpy(z[k]) for k in z if k.startswith("w.")}, strict=False
    )
    model.to(dtype).eval()
    parts = ("input_ids", "attention_mask", "labels")
    batch = [
        torch.cat([torch.from_numpy(z[f"{side}_{part}"]) for side in ("chosen", "rejected")])
        for part in parts
    ]
    reference = [
        torch.from_numpy(z[f"ref_{side}_logps"]).to(dtype) for side in ("chosen", "rejected")
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for wanted in z[f"train_{loss}"]:
        optimizer.zero_grad()
        policy = sequence_logprobs(model, *batch).total.chunk(2)
        value = preference_loss(loss, *policy, *reference, gamma=0.05).mean()
        value.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert abs(value.item() - wanted[0]) < tolerance
        assert abs(norm.item() - wanted[1]) < tolerance * max(1, wanted[1])
        optimizer.step()
    after = sequence_logprobs(model, *batch).total.chunk(2)[0].detach().numpy()
    assert np.abs(after - z[f"after_{loss}_chosen_logps"]).max() < tolerance


@pytest.mark.parametrize("key", load("pair_source_fit.json"))
@pytest.mark.parametrize("source", ["direct", "sft_sample_rank", "rso_sample_rank"])
@pytest.mark.parametrize("family", ["linear", "quadratic"])
def test_population_fits_of_length_tilt(key, source, family):
    """Fit on the exact law of pairs, with exact Bradley-Terry labels."""
    case = load("pair_source_fit.json")[key]
    longest, sft_mean, human_mean, target, scale, beta, gamma = ast.literal_eval(key)
    n = torch.arange(longest + 1, dtype=torch.float64)
    log_sft = log_poisson(longest, sft_mean)
    reward = -((n - target) ** 2) / scale
    best = optimal_policy(log_sft, reward, beta)
    assert abs(best.objective.item() - case["J_star"]) < 1e-10
    law = {
        "direct": log_poisson(longest, human_mean),
        "sft_sample_rank": log_sft,
        "rso_sample_rank": best.log_probs,
    }[source].exp()
    weight = law[:, None] * law[None]
    weight.fill_diagonal_(0)
    weight /= weight.sum()
    chance = (reward[:, None] - reward[None]).sigmoid()
    x = (n - longest / 2) / longest
    features = torch.stack([x, x**2][: 1 if family == "linear" else 2], -1)
    theta = torch.zeros(features.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [theta], max_iter=2000, tolerance_grad=1e-13, tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure():
        optimizer.zero_grad()
        score = features @ theta
        z = gamma * (score[:, None] - score[None])
        loss = (weight * -(chance * logsigmoid(z) + (1 - chance) * logsigmoid(-z))).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    log_policy = (log_sft + features @ theta.detach()).log_softmax(-1)
    value = policy_value(log_policy, log_sft, reward, beta)
    wanted = case[f"{family}|sigmoid_norm|{source}"]
    assert abs(value.objective.item() / wanted["J"] - 1) < 1e-4
    assert abs((log_policy.exp() * n).sum().item() - wanted["mean_length"]) < 1e-2
    if family == "quadratic":
        assert abs(value.objective.item() - case["J_star"]) < 1e-4


@pytest.mark.parametrize("key", load("pair_source_fit.json"))
@pytest.mark.parametrize("source", ["direct", "sft_sample_rank", "rso_sample_rank"])
def test_population_fits_with_hinge(key, source):
    """The same with `hinge_norm` and one slope: piecewise linear, so optima may be flat."""
    case = load("pair_source_fit.json")[key]
    longest, sft_mean, human_mean, target, scale, beta, gamma = ast.literal_eval(key)
    n = torch.arange(longest + 1, dtype=torch.float64)
    log_sft = log_poisson(longest, sft_mean)
    reward = -((n - target) ** 2) / scale
    law = {
        "direct": log_poisson(longest, human_mean),
        "sft_sample_rank": log_sft,
        "rso_sample_rank": optimal_policy(log_sft, reward, beta).log_probs,
    }[source].exp()
    weight = law[:, None] * law[None]
    weight.fill_diagonal_(0)
    weight /= weight.sum()
    chance = (reward[:, None] - reward[None]).sigmoid()
    x = (n - longest / 2) / longest
    zero = torch.zeros((), dtype=torch.float64)

    def loss(theta):
        margin = theta * (x[:, None] - x[None])
        won, lost = (
            preference_loss("hinge_norm", sign * margin, zero, zero, zero, gamma=gamma)
            for sign in (1, -1)
        )
        return float((weight * (chance * won + (1 - chance) * lost)).sum())

    wanted = case[f"linear|hinge_norm|{source}"]
    (slope,) = wanted["theta"]
    fitted = minimize_scalar(loss, bracket=(0.0, 1.0), tol=1e-12).x
    # ours is no worse than the recorded optimum, and the same one where it is the only one
    assert loss(fitted) <= loss(slope) + 1e-9
    assert loss(slope) <= loss(fitted) + 1e-9
    if min(loss(slope + 0.1), loss(slope - 0.1)) > loss(slope) + 1e-7:
        log_policy = (log_sft + fitted * x).log_softmax(-1)
        value = policy_value(log_policy, log_sft, reward, beta).objective.item()
        assert abs(value / wanted["J"] - 1) < 5e-2
