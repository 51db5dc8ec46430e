"""Win rates, distance from the reference, length, and the curve of over-optimisation."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_modules.components.language.reward import Ids, Reward
from lightning_modules.components.language.rollouts import LENGTH, Rollout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Judge = Callable[[str, str, str], float]
"""(prompt, first response, second response) to a score: 1 the first is better, 0 not, ½ tie."""


def win_rate(logit: Tensor) -> Tensor:
    """Per prompt 1 for a win, 0 for a loss, ½ for a tie, from log-odds `(prompts,)`."""
    return 0.5 * (1 + logit.sign())


def wins(
    reward: Reward,
    prompts: Sequence[Ids],
    responses: Sequence[Ids],
    opponents: Sequence[Ids],
) -> Tensor:
    """Whether a reward prefers responses to their opponents, both orders averaged, `(rows,)`."""
    forward = reward.preference_logit(prompts, responses, opponents)
    backward = reward.preference_logit(prompts, opponents, responses)
    return win_rate(0.5 * (forward - backward))


class SideBySide(NamedTuple):
    """Verdicts of a judge.

    Attributes:
        score: `(prompts,)` mean over the decodes, 1 if the policy's response is better.
        verdict: `(prompts,)` 1 win, 0 loss, ½ undecided.
        win_rate: Mean verdict.
    """

    score: Tensor
    verdict: Tensor
    win_rate: float


def side_by_side(
    judge: Judge,
    prompts: Sequence[str],
    responses: Sequence[str],
    opponents: Sequence[str],
    decodes: int = 8,
    threshold: float = 0.35,
) -> SideBySide:
    """Few-shot judge in the manner of AutoSxS: half of the decodes with the two in swapped order.

    A win or loss is called only if the mean score is further than `threshold` from ½ (the paper
    says that the magnitude must exceed 0.35; how it centres the score it does not say).

    Args:
        judge: Any callable, e.g. a client of a language-model server.
        prompts: Prompts as text.
        responses: The policy's.
        opponents: What they are compared with.
        decodes: Calls per prompt, even.
        threshold: In [0, ½).
    """
    if decodes < 2 or decodes % 2:
        raise ValueError(f"decodes must be even and >= 2, got {decodes}")
    if not 0 <= threshold < 0.5:
        raise ValueError(f"threshold must be in [0, 0.5), got {threshold}")
    scores = []
    for x, ours, theirs in zip(prompts, responses, opponents, strict=True):
        calls = [judge(x, ours, theirs) for _ in range(decodes // 2)]
        calls += [1 - judge(x, theirs, ours) for _ in range(decodes // 2)]
        if any(not 0 <= call <= 1 for call in calls):
            raise ValueError(f"judge must return a score in [0, 1], got {calls}")
        scores.append(sum(calls) / decodes)
    score = torch.tensor(scores, dtype=torch.float64)
    centred = score - 0.5
    verdict = torch.where(centred.abs() > threshold, 0.5 * (1 + centred.sign()), 0.5)
    return SideBySide(score, verdict, float(verdict.mean()) if len(verdict) else float("nan"))


class SampleValues(NamedTuple):
    """What samples of a policy say about it, each `(rows,)`.

    Attributes:
        kl: log pi_theta(y|x) - log pi_sft(y|x), whose mean is KL(pi_theta || pi_sft).
        length: Response tokens.
        truncated: 1 where the response ran into the length limit.
    """

    kl: Tensor
    length: Tensor
    truncated: Tensor


def sample_values(rollout: Rollout, reference_logps: Tensor) -> SampleValues:
    """Per-sample KL, length and truncation of samples drawn at temperature 1.

    Args:
        rollout: Samples of the policy.
        reference_logps: `(rows,)` of the same responses under the reference, on the same support;
            with another support the estimate can be negative.
    """
    return SampleValues(
        rollout.logps - reference_logps.to(rollout.logps.dtype),
        rollout.mask.sum(-1).float(),
        (rollout.finish == LENGTH).float(),
    )


def overoptimisation_curve(
    kl: Sequence[float], proxy: Sequence[float], gold: Sequence[float] | None = None
) -> "Figure":
    """Proxy and gold reward against sqrt(KL): where they part, the reward model is being gamed.

    Args:
        kl: KL(pi_theta || pi_sft) at successive evaluations, nats.
        proxy: Mean reward of the reward model.
        gold: Mean reward of an independent one, if there is one.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5))
    axes = figure.subplots()
    distance = torch.tensor(list(kl)).clamp(min=0).sqrt().tolist()
    axes.plot(distance, list(proxy), marker="o", label="proxy")
    if gold:
        axes.plot(distance, list(gold), marker="s", label="gold")
    axes.set_xlabel(r"$\sqrt{\mathrm{KL}(\pi_\theta \| \pi_{\mathrm{sft}})}$")
    axes.set_ylabel("reward")
    axes.legend()
    figure.tight_layout()
    return figure


def human_majority(votes: Sequence[Sequence[int]]) -> list[int | None]:
    """Best-of-n votes of three raters: the system with a majority, None without one.

    Args:
        votes: For every prompt, the system that each rater chose.
    """
    result: list[int | None] = []
    for row in votes:
        counts = {system: list(row).count(system) for system in row}
        best = max(counts, key=lambda system: counts[system])
        result.append(best if 2 * counts[best] > len(row) else None)
    return result
