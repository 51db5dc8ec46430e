"""Sample, score, select, label: from prompts and a policy to preference pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_modules.components.language.encoding import PairRecord, pad
from lightning_modules.components.language.reward import Ids, Reward
from lightning_modules.components.language.rollouts import LENGTH, Rollout, Sampling
from lightning_modules.rso.optimal_policy import beta_for_sample_size, effective_sample_size
from lightning_modules.rso.pairing import (
    check_pairing,
    play,
    raft_targets,
    rest_targets,
    shuffled,
)
from lightning_modules.rso.policies import Policy
from lightning_modules.rso.rejection_sampling import (
    Selection,
    check_rewards,
    check_sampler,
    corrected_reward,
    select,
    text_keys,
)

SOURCES = ("direct", "sft_sample_rank", "rso_sample_rank", "raft", "rest")


@dataclass(frozen=True)
class PairOptions:
    """How pairs are made; part of a pairs file's provenance.

    Args:
        pair_source: `direct` (human pairs), `sft_sample_rank`, `rso_sample_rank`, or the
            supervised baselines `raft` and `rest`.
        sampler: Mode of `rejection_sampling.select` for `rso_sample_rank`.
        n_candidates: Responses drawn per prompt.
        n_select: Responses kept per prompt.
        beta: Temperature of the target policy, in units of the reward.
        ranking: `first_round`, `tournament` or `best_worst`.
        label: `argmax` or `bt_sample`.
        min_margin: Drop pairs whose |log-odds| is smaller.
        deduplicate: Collapse equal candidates, as the paper's map does. On small response spaces
            that turns the proposal into "uniform over distinct samples".
        correct_proposal: Undo temperature and top-k of the proposal with log-probability ratios.
        ess_target: Choose beta per prompt so that the effective sample size of exp(r/beta) is this.
        length_penalty: Rewards become r - length_penalty * tokens.
        rest_threshold: Normalised reward from which ReST keeps a candidate.
        seed: Seed of every draw.
    """

    pair_source: str = "rso_sample_rank"
    sampler: str = "paper"
    n_candidates: int = 64
    n_select: int = 8
    beta: float = 0.5
    ranking: str = "first_round"
    label: str = "argmax"
    min_margin: float = 0.0
    deduplicate: bool = True
    correct_proposal: bool = False
    ess_target: float | None = None
    length_penalty: float = 0.0
    rest_threshold: float = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        if self.pair_source not in SOURCES:
            raise ValueError(
                f"pair_source must be one of {', '.join(SOURCES)}, got '{self.pair_source}'"
            )
        check_sampler(self.sampler, self.n_candidates, self.n_select, self.beta)
        check_pairing(self.ranking, self.label, self.min_margin)
        if not 0 <= self.rest_threshold < 1:
            raise ValueError(f"rest_threshold must be in [0, 1), got {self.rest_threshold}")
        if self.ess_target is not None and not 1 < self.ess_target < self.n_candidates:
            raise ValueError(
                f"ess_target must be between 1 and n_candidates={self.n_candidates}, "
                f"got {self.ess_target}"
            )

    @property
    def draws(self) -> int:
        """Responses to decode per prompt."""
        return self.n_select if self.pair_source == "sft_sample_rank" else self.n_candidates

    @property
    def costs(self) -> tuple[int, int]:
        """Decodes and calls of the reward model per prompt (first round, no swap)."""
        if self.pair_source == "direct":
            return 0, 0
        ranked = self.n_select // 2
        if self.pair_source == "sft_sample_rank":
            # a tournament of n has n - 1 matches, and no pointwise reward is needed
            return self.n_select, ranked if self.ranking == "first_round" else self.n_select - 1
        if self.pair_source in ("raft", "rest"):
            return self.n_candidates, self.n_candidates - 1
        if self.ranking == "tournament":
            ranked = self.n_select - 1
        return self.n_candidates, self.n_candidates - 1 + ranked


class Candidates(NamedTuple):
    """Scored responses to some prompts.

    Attributes:
        prompts: `(prompts,)` global indices.
        rollout: `prompts * candidates` rows.
        reward: `(prompts, candidates)` pointwise rewards, or None if none was needed.
    """

    prompts: Tensor
    rollout: Rollout
    reward: Tensor | None


@dataclass
class PairStatistics:
    """Sums over prompts of what is worth knowing about a round of pairs."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, total: float, number: float) -> None:
        """Add `number` values that sum to `total`."""
        self.sums[name] = self.sums.get(name, 0.0) + float(total)
        self.counts[name] = self.counts.get(name, 0.0) + float(number)

    def merge(self, other: "PairStatistics | Mapping[str, Mapping[str, float]]") -> None:
        """Add those of other prompts."""
        values = other if isinstance(other, Mapping) else asdict(other)
        for name, total in values["sums"].items():
            self.add(name, total, values["counts"][name])

    def means(self) -> dict[str, float]:
        """Mean of every quantity."""
        return {name: self.sums[name] / max(self.counts[name], 1.0) for name in self.sums}


@torch.no_grad()
def draw_candidates(
    policy: Policy,
    reward: Reward | None,
    rows: Sequence[Mapping[str, Any]],
    options: PairOptions,
    sampling: Sampling,
    pad_id: int,
    device: torch.device | str = "cpu",
) -> Candidates:
    """Decode `options.draws` responses per prompt and score them.

    The pairwise reward needs a baseline response with reward 0: candidate 0 of the same prompt,
    which is as random as any.

    Args:
        policy: Where responses come from.
        reward: Pointwise scores; None skips scoring.
        rows: Prompts `{index, prompt}`.
        options: How many, and the seed.
        sampling: Temperature and limits.
        pad_id: Padding id.
        device: Device of the policy.
    """
    ids, mask = pad([row["prompt"] for row in rows], pad_id, left=True)
    index = torch.tensor([int(row["index"]) for row in rows])
    number = options.draws
    rollout = policy.sample(
        ids.to(device), mask.to(device), index.to(device), number, options.seed, sampling
    )
    if reward is None:
        return Candidates(index, rollout, None)
    responses = rollout.responses()
    prompts = [row["prompt"] for row in rows for _ in range(number)]
    if reward.needs_baseline:
        scored = [i for i in range(len(responses)) if i % number]
        part = reward.score(
            [prompts[i] for i in scored],
            [responses[i] for i in scored],
            [responses[i - i % number] for i in scored],
        )
        values = torch.zeros(len(responses), dtype=torch.float64)
        values[torch.tensor(scored)] = part.double().cpu()
    else:
        values = reward.score(prompts, responses).double().cpu()
    table = values.view(len(rows), number)
    check_rewards(table, index.tolist())
    if options.length_penalty:
        lengths = rollout.mask.sum(-1).cpu().view(table.shape)
        table = table - options.length_penalty * lengths
    return Candidates(index, rollout, table)


def select_candidates(
    candidates: Candidates, options: PairOptions, statistics: PairStatistics
) -> Selection:
    """Choose which candidates go into pairs or become targets, and note statistics."""
    rollout, reward = candidates.rollout, candidates.reward
    number = len(rollout.index) // len(candidates.prompts)
    count = len(candidates.prompts)
    keys = text_keys(
        [
            [tuple(r) for r in rollout.responses()[p * number : (p + 1) * number]]
            for p in range(count)
        ]
    )
    distinct = sum(len(set(row)) for row in keys.tolist())
    total = count * number
    statistics.add("duplicates", total - distinct, total)
    statistics.add("truncated", int((rollout.finish == LENGTH).sum()), total)
    statistics.add("length", float(rollout.mask.sum()), total)
    if options.pair_source == "sft_sample_rank" or reward is None:
        every = torch.arange(number).expand(count, -1)
        ones = torch.ones(count, dtype=torch.int64)
        return Selection(every, ones * number, ones)
    beta: float | Tensor = options.beta
    if options.ess_target is not None:
        beta = beta_for_sample_size(reward, options.ess_target)
        statistics.add("beta", float(beta.sum()), count)
    scale = torch.as_tensor(beta, dtype=reward.dtype)
    if bool((scale > 0).all()):
        gap = (reward - reward.amax(-1, keepdim=True)) / (scale[:, None] if scale.dim() else scale)
        statistics.add("acceptance", float(gap.exp().sum()), total)
        statistics.add(
            "effective_sample_size", float(effective_sample_size(reward, scale).sum()), count
        )
    flat = reward.amax(-1) == reward.amin(-1)
    statistics.add("flat_rewards", int(flat.sum()), count)
    statistics.add("candidate_reward", float(reward.sum()), total)
    if options.pair_source in ("raft", "rest"):
        targets = (
            raft_targets(reward)
            if options.pair_source == "raft"
            else rest_targets(reward, options.rest_threshold)
        )
        width = max(1, *(len(row) for row in targets))
        indices = torch.tensor([row + [-1] * (width - len(row)) for row in targets])
        chosen = Selection(indices, (indices >= 0).sum(-1), torch.ones(count, dtype=torch.int64))
    else:
        if options.correct_proposal:
            logps, drawn = (
                x.cpu().double().view(count, number)
                for x in (rollout.logps, rollout.sampling_logps)
            )
            reward = corrected_reward(reward, logps, drawn, beta)
        chosen = select(
            reward,
            options.n_select,
            beta,
            options.sampler,
            options.seed,
            candidates.prompts,
            keys=keys if options.deduplicate else None,
        )
        statistics.add("short_of_candidates", int((chosen.count < options.n_select).sum()), count)
        statistics.add("passes", int(chosen.passes.sum()), count)
    picked = [reward[p, row].sum().item() for p, row in enumerate(chosen.rows())]
    statistics.add("selected_reward", sum(picked), int(chosen.count.sum()))
    return chosen


@torch.no_grad()
def make_pairs(
    candidates: Candidates,
    chosen: Selection,
    rows: Sequence[Mapping[str, Any]],
    reward: Reward | None,
    options: PairOptions,
    statistics: PairStatistics,
) -> list[PairRecord]:
    """Pair and label the chosen candidates of all prompts; pairs of equal responses are left out.

    For `raft` and `rest` the chosen responses are targets: the record's rejected response is
    another candidate, which `loss=cross_entropy` does not read.
    """
    number = len(candidates.rollout.index) // len(rows)
    flat = candidates.rollout.responses()
    responses = [flat[p * number : (p + 1) * number] for p in range(len(rows))]
    scores = candidates.reward
    records: list[PairRecord] = []
    if options.pair_source in ("raft", "rest"):
        for p, row in enumerate(chosen.rows()):
            for c in row:
                other = next((k for k in range(number) if responses[p][k] != responses[p][c]), c)
                records.append(_record(rows[p], responses[p], c, other, scores, p, float("nan")))
        return records
    if reward is None:
        raise ValueError("making pairs needs a reward: set reward to a checkpoint or 'oracle'")
    order = shuffled(chosen.rows(), candidates.prompts, options.seed)

    def prefer(prompts: list[int], first: list[int], second: list[int]) -> Tensor:
        logit = reward.preference_logit(
            [rows[p]["prompt"] for p in prompts],
            [responses[p][a] for p, a in zip(prompts, first, strict=True)],
            [responses[p][b] for p, b in zip(prompts, second, strict=True)],
        ).double().cpu()  # fmt: skip
        bad = (~logit.isfinite()).nonzero()
        if len(bad):
            where = rows[prompts[int(bad[0])]]["index"]
            raise ValueError(f"the preference of a pair of prompt {where} is not finite")
        if options.length_penalty:
            gap = [
                len(responses[p][a]) - len(responses[p][b])
                for p, a, b in zip(prompts, first, second, strict=True)
            ]
            logit = logit - options.length_penalty * torch.tensor(gap, dtype=torch.float64)
        return logit

    matches = play(
        order,
        prefer,
        options.ranking,
        options.label,
        options.seed,
        candidates.prompts,
        scores,
        options.min_margin,
    )
    dropped = 0
    for match in matches:
        if responses[match.prompt][match.winner] == responses[match.prompt][match.loser]:
            dropped += 1
            continue
        records.append(
            _record(
                rows[match.prompt],
                responses[match.prompt],
                match.winner,
                match.loser,
                scores,
                match.prompt,
                match.logit,
            )
        )
    statistics.add("equal_pairs", dropped, max(len(matches), 1))
    statistics.add("margin", sum(abs(match.logit) for match in matches), max(len(matches), 1))
    return records


def _record(
    row: Mapping[str, Any],
    responses: Sequence[Ids],
    better: int,
    worse: int,
    scores: Tensor | None,
    p: int,
    margin: float,
) -> PairRecord:
    nan = float("nan")
    return PairRecord(
        index=int(row["index"]),
        prompt=list(row["prompt"]),
        chosen=list(responses[better]),
        rejected=list(responses[worse]),
        margin=margin,
        reward_chosen=nan if scores is None else float(scores[p, better]),
        reward_rejected=nan if scores is None else float(scores[p, worse]),
    )
