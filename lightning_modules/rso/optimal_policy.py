"""The KL-regularised optimal policy on a finite set of responses, in closed form."""

from typing import NamedTuple

import torch
from torch import Tensor


class OptimalPolicy(NamedTuple):
    """pi_r(y) = pi_sft(y) exp(r(y)/beta) / Z and what follows from it; leading shape `(...)`.

    Attributes:
        log_probs: `(..., responses)` log pi_r.
        log_partition: `(...)` log Z = log sum_y pi_sft(y) exp(r(y)/beta).
        expected_reward: `(...)` E_{pi_r}[r].
        kl: `(...)` KL(pi_r || pi_sft), nats.
        acceptance: `(...)` E_{pi_sft} exp((r - r_max)/beta), of rejection sampling from pi_sft.
        objective: `(...)` E[r] - beta KL = beta log Z, the best value there is.
    """

    log_probs: Tensor
    log_partition: Tensor
    expected_reward: Tensor
    kl: Tensor
    acceptance: Tensor
    objective: Tensor


def optimal_policy(log_sft: Tensor, reward: Tensor, beta: float | Tensor) -> OptimalPolicy:
    """Solve max_pi E_pi[r] - beta KL(pi || pi_sft).

    Args:
        log_sft: `(..., responses)` log-probabilities of the SFT policy, normalised.
        reward: `(..., responses)`.
        beta: Scalar or `(...)`, > 0.
    """
    scale = torch.as_tensor(beta, dtype=reward.dtype, device=reward.device)
    if not bool((scale > 0).all()):
        raise ValueError(f"beta must be > 0, got {beta}")
    tilted = log_sft + reward / scale[..., None]
    log_partition = tilted.logsumexp(-1)
    log_probs = tilted - log_partition[..., None]
    probs = log_probs.exp()
    expected = (probs * reward).sum(-1)
    kl = (probs * (log_probs - log_sft).where(probs > 0, 0.0)).sum(-1)
    gap = (reward - reward.amax(-1, keepdim=True)) / scale[..., None]
    acceptance = (log_sft + gap).logsumexp(-1).exp()
    return OptimalPolicy(log_probs, log_partition, expected, kl, acceptance, scale * log_partition)


class PolicyValue(NamedTuple):
    """What a policy on a finite set is worth, each `(...)`."""

    expected_reward: Tensor
    kl: Tensor
    objective: Tensor


def policy_value(log_policy: Tensor, log_sft: Tensor, reward: Tensor, beta: float) -> PolicyValue:
    """E_pi[r], KL(pi || pi_sft) and J = E[r] - beta KL; each `(...)` for `(..., responses)`."""
    probs = log_policy.exp()
    expected = (probs * reward).sum(-1)
    kl = (probs * (log_policy - log_sft).where(probs > 0, 0.0)).sum(-1)
    return PolicyValue(expected, kl, expected - beta * kl)


def effective_sample_size(reward: Tensor, beta: float | Tensor) -> Tensor:
    """(sum w)^2 / sum w^2 of w = exp(r/beta) over the last dimension: 1 means best-of-N.

    Args:
        reward: `(..., candidates)`; -inf where there is no candidate.
        beta: Scalar or `(...)`, > 0.
    """
    scale = torch.as_tensor(beta, dtype=reward.dtype, device=reward.device)[..., None]
    log_weight = (reward - reward.amax(-1, keepdim=True)) / scale
    return (2 * log_weight.logsumexp(-1) - (2 * log_weight).logsumexp(-1)).exp()


def beta_for_sample_size(reward: Tensor, target: float, steps: int = 60) -> Tensor:
    """The beta of every prompt at which the effective sample size is `target`, by bisection.

    The effective sample size grows with beta, from the number of ties at the top to the number of
    candidates; a target outside of that range gives the nearest end.

    Args:
        reward: `(prompts, candidates)`.
        target: Wanted size, in (1, candidates).
        steps: Halvings of the interval of log beta.
    """
    if not 1 < target < reward.shape[-1]:
        raise ValueError(
            f"ess_target must be between 1 and the {reward.shape[-1]} candidates, got {target}"
        )
    spread = (reward.amax(-1) - reward.where(reward.isfinite(), torch.inf).amin(-1)).clamp(min=1e-6)
    low, high = (spread * 1e-6).log(), (spread * 1e6).log()
    for _ in range(steps):
        middle = (low + high) / 2
        small = effective_sample_size(reward, middle.exp()) < target
        low, high = torch.where(small, middle, low), torch.where(small, high, middle)
    return ((low + high) / 2).exp()
