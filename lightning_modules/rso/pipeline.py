"""Pairs for many prompts: shards that can be resumed, on any number of processes.

Prompts are cut into groups of a fixed size by their position. A group is decoded in one go, so its
result is the same bit for bit whoever makes it; process r takes groups r, r + world, ... and the
results are merged in the order of the prompts.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_modules.components.language.encoding import PairRecord
from lightning_modules.components.language.reward import Reward
from lightning_modules.components.language.rollouts import Sampling
from lightning_modules.rso.candidates import (
    PairOptions,
    PairStatistics,
    draw_candidates,
    make_pairs,
    select_candidates,
)
from lightning_modules.rso.policies import Policy

Result = TypeVar("Result")


@dataclass(frozen=True)
class Provenance:
    """What made a file of pairs; two files with equal provenance hold the same pairs.

    Attributes:
        options: Pair options, seed and beta included.
        sampling: Temperature and limits.
        policy: Fingerprint of the policy that was sampled.
        reward: Fingerprint of the reward model, or its name.
        tokenizer: Fingerprint of the tokenizer.
        prompts: Fingerprint of the prompts.
        group: Prompts per shard.
    """

    options: dict[str, Any]
    sampling: dict[str, Any]
    policy: str
    reward: str
    tokenizer: str
    prompts: str
    group: int

    @property
    def key(self) -> str:
        """Hash of all of it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class MadePairs:
    """Pairs in the order of their prompts, and statistics of the round."""

    records: list[PairRecord]
    statistics: PairStatistics
    provenance: Provenance
    files: list[Path] = field(default_factory=list)


@dataclass
class PairPipeline:
    """Makes the pairs of a policy.

    Args:
        policy: What is sampled.
        reward: What scores and labels.
        options: How pairs are made.
        sampling: How responses are drawn.
        pad_id: Padding id.
        device: Device of the policy.
        group: Prompts per shard.
        folder: Where shards are kept; None keeps nothing. Shards that are there are not made
            again; shards of other settings are an error.
    """

    policy: Policy
    reward: Reward | None
    options: PairOptions
    sampling: Sampling
    pad_id: int
    device: torch.device | str = "cpu"
    group: int = 16
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ValueError(f"group must be >= 1, got {self.group}")

    def shard(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Pairs and statistics of one group of prompts."""
        statistics = PairStatistics()
        needs_scores = self.options.pair_source != "sft_sample_rank" or (
            self.options.ranking == "best_worst"
        )
        candidates = draw_candidates(
            self.policy, self.reward if needs_scores else None, rows, self.options, self.sampling,
            self.pad_id, self.device,
        )  # fmt: skip
        chosen = select_candidates(candidates, self.options, statistics)
        records = make_pairs(candidates, chosen, rows, self.reward, self.options, statistics)
        statistics.add("pairs", len(records), len(rows))
        return {"records": records, "statistics": asdict(statistics)}

    def run(
        self, rows: Sequence[Mapping[str, Any]], provenance: Provenance | None = None
    ) -> MadePairs:
        """Pairs of all prompts, the same on every process.

        Raises:
            ValueError: The folder holds shards of other settings.
        """
        if not rows:
            raise ValueError("there are no prompts to sample answers to")
        if self.options.ranking == "first_round" and self.options.n_select % 2:
            _say(f"n_select={self.options.n_select} is odd: one response per prompt goes unpaired")
        groups = [rows[i : i + self.group] for i in range(0, len(rows), self.group)]
        provenance = provenance or Provenance(
            asdict(self.options), asdict(self.sampling), "", "", "", "", self.group
        )
        key = provenance.key

        def one(number: int) -> dict[str, Any]:
            made = self._load(number, key)
            if made is None:
                made = self.shard(groups[number])
                self._store(number, key, made)
            return made

        statistics = PairStatistics()
        records: list[PairRecord] = []
        for made in split_over_ranks(len(groups), one, _sharded(self.policy)):
            records += made["records"]
            statistics.merge(made["statistics"])
        _warn(statistics, self.options)
        return MadePairs(records, statistics, provenance)

    def _path(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"shard-{number:05d}.json"

    def _load(self, number: int, key: str) -> dict[str, Any] | None:
        if self.folder is None or not self._path(number).exists():
            return None
        stored = json.loads(self._path(number).read_text(encoding="utf-8"))
        if stored["key"] != key:
            raise ValueError(
                f"{self._path(number)} was made with other settings (models, prompts, seed, beta "
                "or temperature): give another pairs_dir, or delete the folder"
            )
        return stored  # type: ignore[no-any-return]

    def _store(self, number: int, key: str, made: dict[str, Any]) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(number)
        partial = path.with_suffix(f".partial{_rank()[0]}")
        partial.write_text(json.dumps({"key": key, **made}), encoding="utf-8")
        partial.replace(path)


def _sharded(policy: Policy) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in policy.modules())


def _rank() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def split_over_ranks(
    groups: int, one: Callable[[int], Result], in_step: bool = False
) -> list[Result]:
    """`[one(0), one(1), ...]` on every process, process r working on r, r + world, ...

    Args:
        groups: Number of groups.
        one: Makes the (picklable) result of a group.
        in_step: Whether all processes must make the same number of calls (sharded models).
    """
    rank, world = _rank()
    mine: dict[int, Result] = {}
    for turn in range(-(-groups // world)):
        number = turn * world + rank
        if number < groups:
            mine[number] = one(number)
        elif in_step:
            one(groups - 1)
    if world == 1:
        return [mine[number] for number in range(groups)]
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, mine)
    merged = {number: made for part in parts for number, made in part.items()}
    return [merged[number] for number in range(groups)]


def _say(text: str) -> None:
    if _rank()[0] == 0:
        warnings.warn(text, stacklevel=3)


def _warn(statistics: PairStatistics, options: PairOptions) -> None:
    means = statistics.means()
    if means.get("flat_rewards", 0.0) > 0.5:
        _say(
            "all candidates of most prompts have one reward, so all are accepted: the reward "
            "model is flat"
        )
    if short := means.get("short_of_candidates", 0.0):
        _say(
            f"{short:.0%} of the prompts had fewer than n_select={options.n_select} candidates "
            "to accept: all there were are used"
        )
    size = means.get("effective_sample_size")
    if size is not None and size < 1.5 and options.sampler not in ("best_of_n", "sft"):
        _say(
            f"the effective sample size is {size:.2f}: beta={options.beta} is small for these "
            "rewards and the sampler is close to best_of_n; raise beta or set ess_target"
        )


def write_pairs(
    path: str | Path, made: MadePairs, decode: Callable[[Any], str] | None = None
) -> Path:
    """Write pairs as JSON lines, provenance first.

    Args:
        path: Where to.
        made: What `PairPipeline.run` gave.
        decode: Ids to text; given, each line also has the three texts.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with open(partial, "w", encoding="utf-8") as file:
        head = {**asdict(made.provenance), "statistics": made.statistics.means()}
        file.write(json.dumps({"provenance": head}) + "\n")
        for record in made.records:
            row: dict[str, Any] = dict(record)
            if decode is not None:
                for name in ("prompt", "chosen", "rejected"):
                    row[f"{name}_text"] = decode(row[name])
            file.write(json.dumps(row) + "\n")
    partial.replace(path)
    return path
