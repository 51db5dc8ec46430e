"""Preference optimisation: RSO, and by its settings DPO, SLiC, IPO, RAFT and ReST."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_modules.components.language.encoding import PairRecord, unpad
from lightning_modules.components.language.reference import (
    data_fingerprint,
    model_fingerprint,
    tokenizer_fingerprint,
)
from lightning_modules.components.language.rollouts import Sampling
from lightning_modules.components.randomness import global_seed
from lightning_modules.rso.candidates import (
    PairOptions,
    PairStatistics,
    draw_candidates,
    make_pairs,
    select_candidates,
)
from lightning_modules.rso.evaluation import win_rate
from lightning_modules.rso.pipeline import MadePairs, PairPipeline, Provenance, write_pairs
from lightning_modules.rso.preference import PreferenceModule, Reference
from lightning_modules.rso.reference_scores import pack, unpack


class RSO(PreferenceModule):
    """Fits a policy to preference pairs, which it may first make itself by rejection sampling.

    The data module gives human pairs and prompts. With `pair_source=direct` the policy is fitted to
    the human pairs (DPO with `sigmoid_norm`, SLiC with `hinge`); with `sft_sample_rank` or
    `rso_sample_rank` the module samples responses of the reference policy before training, keeps
    all of them or those that look like draws of the KL-regularised optimal policy, and labels pairs
    with the reward. `raft` and `rest` make supervised targets for `loss=cross_entropy`.

    What is logged is listed at `PreferenceModule`, and `pairs/...` when pairs are made.

    Args:
        policy: `length_tilt`, `length_tilt_quadratic`, `tabular` or `language`.
        backbone: Language model: hub id, folder, or a dictionary of `BackboneConfig`.
        eos_token_id: Ends a response; None asks the data module.
        pad_token_id: Padding; None asks the data module.
        allowed_tokens: Ids that may be emitted; None asks the data module.
        loss: `sigmoid_norm`, `hinge_norm`, `hinge`, `ipo` or `cross_entropy`.
        gamma: Temperature of the loss, not the beta of the target policy.
        label_smoothing: Chance of a wrong label, `sigmoid_norm` only.
        pair_weight: `none`, or `reward_gap` (sigma of the labelled margin).
        reference: `precomputed` (log-probabilities of fixed pairs, once), `copy` (a frozen model),
            `adapter_off` (LoRA: the model without its adapters).
        reference_cache: Folder for precomputed log-probabilities.
        pair_source: See above.
        reward: `oracle` (the data module's known reward), a checkpoint of `RewardRanking`, a list
            of them (their lower confidence bound), or None for `pair_source=direct`; then
            checkpoints are chosen by `val/loss`, else by `val/objective`.
        gold: Independent reward for evaluation, the same forms; None takes the known one.
        sampler: `paper`, `iid`, `gumbel_topk`, `best_of_n` or `sft`.
        n_candidates: Responses per prompt.
        n_select: Kept per prompt.
        beta: Temperature of the target policy in units of the reward.
        ranking: `first_round`, `tournament` or `best_worst`.
        label: `argmax` or `bt_sample`.
        min_margin: Drop pairs with smaller |log-odds|.
        deduplicate: Collapse equal candidates, as the paper does.
        correct_proposal: Undo temperature and top-k with log-probability ratios.
        ess_target: Choose beta per prompt by effective sample size.
        length_penalty: Rewards become r - length_penalty * tokens.
        rest_threshold: Normalised reward from which ReST keeps a candidate.
        temperature: Of candidates.
        top_k: Of candidates, 0 keeps all.
        top_p: Of candidates.
        max_new_tokens: Longest response; None asks the data module, else 128.
        rows: Most responses decoded at a time.
        group: Prompts per shard of candidates.
        pairs_dir: Folder of resumable shards of pairs.
        evaluate_every: Sample and score responses every so many validations; 0 never.
        chunk: Token rows whose logits are in memory at a time.
        optimizer: Default AdamW at 1e-6 without weight decay.
        lr_scheduler: Default none.
        lr_interval: Whether the scheduler counts steps or epochs.
        loss_weights: `preference`, and `sft` for SLiC's regulariser -log pi(y_w|x).

    Raises:
        ValueError: An argument is out of range, or two do not go together.
    """

    monitor: str = "val/objective"
    mode: Literal["min", "max"] = "max"

    def __init__(
        self,
        policy: str = "length_tilt",
        backbone: str | dict[str, Any] | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        allowed_tokens: list[int] | None = None,
        loss: str = "sigmoid_norm",
        gamma: float = 0.05,
        label_smoothing: float = 0.0,
        pair_weight: str = "none",
        reference: Reference = "precomputed",
        reference_cache: str | None = None,
        pair_source: str = "rso_sample_rank",
        reward: str | list[str] | None = "oracle",
        gold: str | None = None,
        sampler: str = "paper",
        n_candidates: int = 64,
        n_select: int = 8,
        beta: float = 0.5,
        ranking: str = "first_round",
        label: str = "argmax",
        min_margin: float = 0.0,
        deduplicate: bool = True,
        correct_proposal: bool = False,
        ess_target: float | None = None,
        length_penalty: float = 0.0,
        rest_threshold: float = 0.7,
        temperature: float = 0.7,
        top_k: int = 40,
        top_p: float = 1.0,
        max_new_tokens: int | None = None,
        rows: int = 256,
        group: int = 16,
        pairs_dir: str | None = None,
        evaluate_every: int = 1,
        chunk: int = 256,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["step", "epoch"] = "step",
        loss_weights: dict[str, float] | None = None,
    ) -> None:
        super().__init__(
            policy, backbone, eos_token_id, pad_token_id, allowed_tokens, loss, gamma,
            label_smoothing, pair_weight, reference, reference_cache, reward, gold, beta,
            max_new_tokens, rows, evaluate_every, chunk, optimizer, lr_scheduler, lr_interval,
            loss_weights,
        )  # fmt: skip
        if pair_source in ("raft", "rest") and loss != "cross_entropy":
            raise ValueError(
                f"pair_source={pair_source} makes targets, not pairs: set loss=cross_entropy"
            )
        if pair_source != "direct" and reward is None:
            raise ValueError(
                f"pair_source={pair_source} needs reward: a checkpoint of RewardRanking, or oracle"
            )
        if evaluate_every == 0 or (reward is None and gold is None):
            # without a reward the likelihood of held-out pairs is all there is to choose by
            self.__dict__.update(monitor="val/loss", mode="min")
        self.options = PairOptions(
            pair_source, sampler, n_candidates, n_select, beta, ranking, label, min_margin,
            deduplicate, correct_proposal, ess_target, length_penalty, rest_threshold,
        )  # fmt: skip
        Sampling(max_new_tokens or 128, temperature, top_k, top_p, rows=rows)
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.min_margin = min_margin
        self.group = group
        self.pairs_dir = pairs_dir
        self._records: list[PairRecord] | None = None
        self._round = 0
        self._predicted: list[dict[str, Any]] = []
        self._resampling: tuple[int, bool, bool] | None = None

    def setup(self, stage: str) -> None:
        """As the base class, and a reward to make pairs with."""
        super().setup(stage)
        if self._rewards["proxy"] is None and self.reward_source is not None:
            raise ValueError(
                f"reward={self.reward_source} but these data have no known reward: train "
                "RewardRanking and give its checkpoint, or set reward=null for pair_source=direct"
            )
        if stage == "fit" and self.options.pair_source != "direct":
            decodes, calls = self.options.costs
            rank_zero_info(
                f"pairs by {self.options.pair_source}: {decodes} decodes and {calls} calls of the "
                "reward per prompt"
            )

    # ------------------------------------------------------------------ pairs

    def resample_every(self, epochs: int, move_reference: bool, replay: bool) -> None:
        """Make new pairs from the current policy every so many epochs (`IterativeRSO`).

        Args:
            epochs: Length of a round.
            move_reference: Whether the policy at the start of a round becomes the reference.
            replay: Whether earlier pairs stay.
        """
        if epochs < 1:
            raise ValueError(f"every_n_epochs must be >= 1, got {epochs}")
        if self.options.pair_source == "direct":
            raise ValueError("pair_source=direct makes no pairs: iterative RSO needs a sampler")
        if move_reference and self.reference_mode != "copy":
            raise ValueError("a moving reference needs reference=copy")
        self._resampling = (epochs, move_reference, replay)

    def prepare_pairs(
        self, records: list[PairRecord], split: str, datamodule: Any
    ) -> list[PairRecord]:
        """Called by the data module before it builds a loader of pairs.

        Makes the training pairs, unless human ones are used; the base class then adds the
        reference's log-probabilities.
        """
        if split == "train" and self.options.pair_source != "direct":
            records = self._training_pairs(datamodule)
        return super().prepare_pairs(records, split, datamodule)

    def _training_pairs(self, datamodule: Any) -> list[PairRecord]:
        """Pairs of the present round; the same list until the next one begins."""
        now, move, replay = 0, False, False
        if self._resampling is not None:
            length, move, replay = self._resampling
            now = self.trainer.current_epoch // length
        if self._records is None or now > self._round:
            if move and now > 0 and self.reference is not None and self.policy is not None:
                self.reference.load_state_dict(self.policy.state_dict())
            earlier = self._records if replay and self._records else []
            made = self.make_pairs(datamodule.prompts, now)
            self._records = [*earlier, *made.records]
            self._round = now
        return self._records

    def make_pairs(self, prompts: list[dict[str, Any]], number: int = 0) -> MadePairs:
        """Sample, score, select and label with the current policy.

        Args:
            prompts: Rows `{index, prompt}`.
            number: Round, which moves the seed.
        """
        assert self.policy is not None
        assert self.pad_token_id is not None
        # beta and min_margin are attributes, so that a `Curriculum` can move them between rounds
        options = replace(
            self.options,
            seed=global_seed() + 1_000_003 * number,
            beta=self.beta,
            min_margin=self.min_margin,
        )
        sampling = self.sampling()
        reward = self.reward_model("proxy")
        provenance = self._provenance(options, prompts, self.group)
        folder = None if self.pairs_dir is None else Path(self.pairs_dir) / f"round-{number:03d}"
        pipeline = PairPipeline(
            self.policy, reward, options, sampling, self.pad_token_id, self.device, self.group,
            folder,
        )  # fmt: skip
        made = pipeline.run(prompts, provenance)
        gold = self.reward_model("gold")
        if gold is not None and made.records:
            # is the reward model right where it matters, among the accepted candidates?
            columns = [[r[k] for r in made.records] for k in ("prompt", "chosen", "rejected")]
            won = win_rate(gold.preference_logit(*columns))
            made.statistics.add("gold_accuracy", float(won.sum()), len(won))
        means = made.statistics.means()
        rank_zero_info(
            f"{len(made.records)} pairs of {len(prompts)} prompts: "
            + ", ".join(f"{name} {value:.4g}" for name, value in sorted(means.items()))
        )
        for logger in self.loggers:
            logger.log_metrics({f"pairs/{k}": v for k, v in means.items()}, self.global_step)
        if folder is not None and self.trainer.is_global_zero:
            decode = getattr(self._tokenizer, "decode", None)
            write_pairs(folder / "pairs.jsonl", made, decode)
        return made

    def _provenance(
        self, options: PairOptions, prompts: list[dict[str, Any]], group: int
    ) -> Provenance:
        reward = self.reward_model("proxy")
        assert self.policy is not None
        return Provenance(
            asdict(options),
            asdict(self.sampling()),
            model_fingerprint(self.policy),
            model_fingerprint(reward) if isinstance(reward, nn.Module) else str(self.reward_source),
            tokenizer_fingerprint(self._tokenizer),
            data_fingerprint(prompts),
            group,
        )

    def sampling(self) -> Sampling:
        """How candidates are drawn."""
        longest = self.max_new_tokens or 128
        return Sampling(longest, self.temperature, self.top_k, self.top_p, rows=self.rows)

    @torch.no_grad()
    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Candidates of the policy, their rewards, and the pairs made of them.

        Returns:
            `index` and `candidate` `(rows,)`, `ids` and `mask` `(rows, response)`, `logps` and
            `sampling_logps` `(rows,)`; with a reward `reward` `(prompts, candidates)` and, unless
            `pair_source=direct`, `selected` `(prompts, n_select)` and `pairs` (packed records).
        """
        assert self.policy is not None
        assert self.pad_token_id is not None
        prompts = unpad(batch.prompt_input_ids, batch.prompt_attention_mask)
        rows = [
            {"index": i, "prompt": p} for i, p in zip(batch.index.tolist(), prompts, strict=True)
        ]
        options = self._prediction_options()
        reward = self.reward_model("proxy")
        candidates = draw_candidates(
            self.policy, reward, rows, options, self.sampling(), self.pad_token_id, self.device
        )
        result: dict[str, Any] = candidates.rollout._asdict()
        if candidates.reward is not None:
            result["reward"] = candidates.reward
            if options.pair_source != "direct":
                statistics = PairStatistics()
                chosen = select_candidates(candidates, options, statistics)
                result["selected"] = chosen.indices
                records = make_pairs(candidates, chosen, rows, reward, options, statistics)
                result["pairs"] = pack(records)
                self._predicted.append({"records": records, "statistics": asdict(statistics)})
        return result

    def on_predict_epoch_start(self) -> None:
        """Forget earlier predictions."""
        self._predicted = []

    def on_predict_epoch_end(self) -> None:
        """Write `pairs.jsonl` of all ranks, which `Preferences(pairs_file=...)` reads."""
        statistics = PairStatistics()
        rank, world = self.trainer.global_rank, self.trainer.world_size
        parts: list[Any] = [self._predicted]
        if world > 1:
            parts = [None] * world
            torch.distributed.all_gather_object(parts, self._predicted)
        made = [entry for part in parts for entry in part]
        if rank > 0 or not made:
            return
        records: list[PairRecord] = []
        for entry in made:
            statistics.merge(entry["statistics"])
            records += entry["records"]
        # a rank has every world-th prompt; the sort is stable within a prompt
        records.sort(key=lambda record: record["index"])
        folder = Path(self.trainer.log_dir or self.trainer.default_root_dir)
        provenance = self._provenance(self._prediction_options(), [], 0)
        decode = getattr(self._tokenizer, "decode", None)
        path = write_pairs(
            folder / "pairs.jsonl", MadePairs(records, statistics, provenance), decode
        )
        rank_zero_info(f"{len(records)} pairs: {path}")

    def _prediction_options(self) -> PairOptions:
        return replace(self.options, seed=global_seed())

    # ------------------------------------------------------------------ checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store this round's pairs: a resume needs neither the sampler nor the reward."""
        super().on_save_checkpoint(checkpoint)
        records = None if self._records is None else pack(self._records)
        checkpoint["rso"] = {"round": self._round, "records": records}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore them."""
        super().on_load_checkpoint(checkpoint)
        if (state := checkpoint.get("rso")) is not None:
            self._round = state["round"]
            self._records = None if state["records"] is None else unpack(state["records"])
