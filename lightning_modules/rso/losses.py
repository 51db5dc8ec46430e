"""Pairwise losses of the family: DPO, SLiC, RSO's hinge-norm, IPO, and plain cross-entropy.

`gamma` is a temperature of the loss and has nothing to do with the `beta` of the target policy,
except that DPO is `sigmoid_norm` with gamma = beta.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LOSSES = ("sigmoid_norm", "hinge_norm", "hinge", "ipo", "cross_entropy")
"""`sigmoid_norm` is what trl calls `sigmoid`; `hinge_norm` is trl's `hinge` and torchtune's
`RSOLoss`; `hinge` has no reference. trl's `sigmoid_norm` is another, length-normalised loss."""

NEEDS_REFERENCE = frozenset({"sigmoid_norm", "hinge_norm", "ipo"})


class ImplicitReward(NamedTuple):
    """gamma (log pi - log pi_sft) of both responses, each `(batch,)`, detached."""

    chosen: Tensor
    rejected: Tensor

    @property
    def margin(self) -> Tensor:
        """Chosen minus rejected."""
        return self.chosen - self.rejected

    @property
    def accuracy(self) -> Tensor:
        """1 where the chosen response has the larger reward, ½ on ties, `(batch,)`."""
        return 0.5 * (1 + self.margin.sign())


def check_loss(loss: str, gamma: float, label_smoothing: float = 0.0) -> None:
    """Raise a `ValueError` on arguments that no loss takes."""
    if loss not in LOSSES:
        raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got '{loss}'")
    if not gamma > 0:
        raise ValueError(f"gamma must be > 0, got {gamma}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5), got {label_smoothing}")
    if label_smoothing and loss != "sigmoid_norm":
        raise ValueError(f"label_smoothing is only for loss=sigmoid_norm, got loss={loss}")


def preference_loss(
    loss: str,
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor | None = None,
    ref_rejected: Tensor | None = None,
    gamma: float = 0.05,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Loss of every pair.

    With Delta = log pi(y_w|x) - log pi(y_l|x) and z = gamma (Delta - Delta_ref):
    `sigmoid_norm` -log sigma(z); `hinge_norm` max(0, 1 - z); `hinge` max(0, 1 - gamma Delta);
    `ipo` (Delta - Delta_ref - 1/(2 gamma))^2; `cross_entropy` -log pi(y_w|x).

    Args:
        loss: One of `LOSSES`.
        policy_chosen: `(batch,)` log pi(y_w|x), sums over the response.
        policy_rejected: `(batch,)` log pi(y_l|x).
        ref_chosen: `(batch,)` under the reference; unused by `hinge` and `cross_entropy`.
        ref_rejected: As above.
        gamma: Temperature, > 0.
        label_smoothing: Chance that a label is wrong, `sigmoid_norm` only.

    Returns:
        `(batch,)`, to be averaged.
    """
    check_loss(loss, gamma, label_smoothing)
    if loss == "cross_entropy":
        return -policy_chosen
    delta = policy_chosen - policy_rejected
    if loss == "hinge":
        return torch.relu(1 - gamma * delta)
    if ref_chosen is None or ref_rejected is None:
        raise ValueError(f"loss={loss} needs reference log-probabilities")
    normed = delta - (ref_chosen - ref_rejected)
    if loss == "hinge_norm":
        return torch.relu(1 - gamma * normed)
    if loss == "ipo":
        return (normed - 1 / (2 * gamma)) ** 2
    z = gamma * normed
    if not label_smoothing:
        return -F.logsigmoid(z)
    return -(1 - label_smoothing) * F.logsigmoid(z) - label_smoothing * F.logsigmoid(-z)


def slic_margin_loss(policy_chosen: Tensor, policy_rejected: Tensor, delta: float) -> Tensor:
    """SLiC's own form max(0, delta - Delta): `hinge` with gamma = 1/delta, times delta."""
    return torch.relu(delta - (policy_chosen - policy_rejected))


def implicit_reward(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    gamma: float,
) -> ImplicitReward:
    """The reward that the policy itself stands for, up to a constant per prompt."""
    return ImplicitReward(
        gamma * (policy_chosen - ref_chosen).detach(),
        gamma * (policy_rejected - ref_rejected).detach(),
    )


def pair_weights(margin: Tensor, kind: str = "none") -> Tensor:
    """Weight of every pair: 1, or sigma(reward gap), so that near-ties count half.

    Args:
        margin: `(batch,)` r(chosen) - r(rejected); NaN where unknown (weight 1).
        kind: `none` or `reward_gap`.
    """
    if kind == "none":
        return torch.ones_like(margin)
    if kind != "reward_gap":
        raise ValueError(f"pair_weight must be none or reward_gap, got '{kind}'")
    return torch.where(margin.isnan(), torch.ones_like(margin), margin.sigmoid())
