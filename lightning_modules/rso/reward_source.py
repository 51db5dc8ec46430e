"""Where rewards come from: the known reward of a synthetic task, or a trained reward model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_modules.components.language.reward import EnsembleReward, Ids, Reward


class OracleReward:
    """The known reward r* with the interface of a reward model, rho = sigma(r1 - r2).

    Args:
        gold: Gives r* `(rows,)` of (prompts, responses).
    """

    needs_baseline = False

    def __init__(self, gold: Callable[[Sequence[Ids], Sequence[Ids]], Tensor]) -> None:
        self.gold = gold

    def score(
        self,
        prompts: Sequence[Ids],
        responses: Sequence[Ids],
        baselines: Sequence[Ids] | None = None,
        principles: Any = None,
    ) -> Tensor:
        """r*, or r* less that of the baseline."""
        reward = self.gold(prompts, responses)
        return reward if baselines is None else reward - self.gold(prompts, baselines)

    def preference_logit(
        self, prompts: Sequence[Ids], first: Sequence[Ids], second: Sequence[Ids]
    ) -> Tensor:
        """r*(x, y1) - r*(x, y2)."""
        return self.gold(prompts, first) - self.gold(prompts, second)


def load_reward(source: str | list[str] | None, data: Any, tokenizer: str) -> Reward | None:
    """The reward that a setting names.

    Args:
        source: `oracle`, a checkpoint of `RewardRanking`, several of them (the ensemble's mean less
            one standard deviation), or None.
        data: Data module; `oracle` is None where it knows no reward.
        tokenizer: Fingerprint of the tokenizer in use.

    Raises:
        ValueError: There is no such checkpoint, or it belongs to another tokenizer.
    """
    if source is None:
        return None
    if isinstance(source, list):
        members: list[Any] = [load_reward(path, data, tokenizer) for path in source]
        return EnsembleReward(members)
    if source == "oracle":
        return OracleReward(data.gold_reward) if getattr(data, "has_gold", False) else None
    if not Path(source).is_file():
        raise ValueError(f"reward must be 'oracle' or a checkpoint of RewardRanking, got {source}")
    from lightning_modules.rso.stages import RewardRanking

    trained = RewardRanking.load_from_checkpoint(source, map_location="cpu")
    if trained.tokenizer_key not in (None, tokenizer):
        raise ValueError(
            f"the reward model {source} was trained with another tokenizer (fingerprint "
            f"{trained.tokenizer_key}, now {tokenizer})"
        )
    reward = trained.reward
    assert isinstance(reward, torch.nn.Module)
    return reward.requires_grad_(False).eval()  # type: ignore[return-value]
