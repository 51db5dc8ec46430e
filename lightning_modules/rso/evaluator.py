"""What a policy is worth on the prompts of a batch: by sampling, or exactly where it can be."""

from typing import Any

import torch
from torch import Tensor

from lightning_modules.components.language.counter import purpose
from lightning_modules.components.language.encoding import PreferenceBatch, join, unpad
from lightning_modules.components.language.reward import Reward
from lightning_modules.components.language.rollouts import Sampling
from lightning_modules.rso.evaluation import sample_values, wins
from lightning_modules.rso.optimal_policy import policy_value
from lightning_modules.rso.policies import CategoricalPolicy, Policy, TiltPolicy

METRICS = (
    "loss",
    "accuracy",
    "margin",
    "chosen_reward",
    "rejected_reward",
    "chosen_logps",
    "rejected_logps",
    "proxy_reward",
    "proxy_win_rate",
    "gold_reward",
    "gold_win_rate",
    "kl",
    "length",
    "truncated",
    "objective",
)


@torch.no_grad()
def evaluate_policy(
    policy: Policy,
    reference: Any,
    proxy: Reward | None,
    gold: Reward | None,
    batch: PreferenceBatch,
    opponents: list[list[int]],
    beta: float,
    sampling: Sampling,
    same_weights: bool = False,
) -> dict[str, Tensor]:
    """Values of the policy on every prompt of a batch, each `(batch,)`.

    The same seed serves every evaluation, so that successive values differ by the policy alone.

    Args:
        policy: What is evaluated.
        reference: Frozen policy. With `same_weights` it is the policy itself with its adapters off
            at the moment, and the adapters are switched on for sampling.
        proxy: Reward model.
        gold: Independent or true reward.
        batch: Only the prompts are read.
        opponents: What the responses are compared with.
        beta: Of the objective E[r] - beta KL, which takes the gold reward where there is one.
        sampling: Temperature 1 and the limits.
        same_weights: See above.
    """
    prompts = unpad(batch.prompt_input_ids, batch.prompt_attention_mask)
    if isinstance(policy, CategoricalPolicy):
        return _exact(policy, reference, proxy, gold, prompts, opponents, beta)
    if same_weights:
        policy.backbone.enable_adapter_layers()  # type: ignore[operator]
    rollout = policy.sample(
        batch.prompt_input_ids,
        batch.prompt_attention_mask,
        batch.index,
        1,
        purpose("evaluation"),
        sampling,
    )
    if same_weights:
        policy.backbone.disable_adapter_layers()  # type: ignore[operator]
    responses = rollout.responses()
    ids, mask, labels = (x.to(batch.index.device) for x in join(prompts, responses, policy.pad_id))
    reference_logps = reference.sequence_logprobs(ids, mask, labels).total
    values = sample_values(rollout, reference_logps)
    result: dict[str, Tensor] = values._asdict()
    reward = None
    for name, judge in (("proxy", proxy), ("gold", gold)):
        if judge is not None:
            baselines = opponents if judge.needs_baseline else None
            reward = judge.score(prompts, responses, baselines).to(values.kl.device)
            result[f"{name}_reward"] = reward
            result[f"{name}_win_rate"] = wins(judge, prompts, responses, opponents)
    if reward is not None:
        result["objective"] = reward - beta * values.kl
    return result


def _exact(
    policy: CategoricalPolicy,
    reference: Any,
    proxy: Reward | None,
    gold: Reward | None,
    prompts: list[list[int]],
    opponents: list[list[int]],
    beta: float,
) -> dict[str, Tensor]:
    """Expectations over all responses; win rates against the opponents the same way."""
    number = policy.responses
    device = next(policy.parameters()).device
    rows = torch.tensor([prompt[-1] - number for prompt in prompts], device=device)
    log_policy = policy.log_probs(rows).double()
    log_sft = reference.log_probs(rows).double()
    probs = log_policy.exp()
    # many rows share prompt and opponent, and rewards do not depend on the policy
    cases = [(tuple(x), tuple(y)) for x, y in zip(prompts, opponents, strict=True)]
    distinct = sorted(set(cases))
    place = torch.tensor([distinct.index(case) for case in cases], device=device)
    every = [list(x) for x, _ in distinct for _ in range(number)]
    answers = [[k] for _ in distinct for k in range(number)]
    others = [list(y) for _, y in distinct for _ in range(number)]
    result: dict[str, Tensor] = {}
    for name, judge in (("proxy", proxy), ("gold", gold)):
        if judge is None:
            continue
        reward = judge.score(every, answers).double().to(device).view(-1, number)[place]
        value = policy_value(log_policy, log_sft, reward, beta)
        won = wins(judge, every, answers, others).double().to(device).view(-1, number)[place]
        result[f"{name}_reward"] = value.expected_reward
        result[f"{name}_win_rate"] = (probs * won).sum(-1)
        result["objective"] = value.objective
    result["kl"] = (probs * (log_policy - log_sft).where(probs > 0, 0.0)).sum(-1)
    if isinstance(policy, TiltPolicy):
        result["length"] = (probs * torch.arange(number, device=device)).sum(-1)
    return {name: value.float() for name, value in result.items()}
