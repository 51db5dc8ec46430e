"""Preference optimisation: RSO, and by its settings DPO, SLiC, IPO, RAFT and ReST."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torchmetrics import MeanMetric

from lightning_modules.base import PaperModule, global_seed
from lightning_modules.components.language.backbone import adapters_off, has_adapters, trainable
from lightning_modules.components.language.encoding import (
    PairRecord,
    PreferenceBatch,
    PreferenceCollator,
    unpad,
)
from lightning_modules.components.language.reference import (
    data_fingerprint,
    model_fingerprint,
    tokenizer_fingerprint,
)
from lightning_modules.components.language.rollouts import Sampling
from lightning_modules.components.language.sharding import shard_language_model
from lightning_modules.rso.candidates import (
    PairOptions,
    PairStatistics,
    draw_candidates,
    make_pairs,
    select_candidates,
)
from lightning_modules.rso.evaluation import overoptimisation_curve
from lightning_modules.rso.evaluator import METRICS, evaluate_policy
from lightning_modules.rso.losses import (
    check_loss,
    implicit_reward,
    pair_weights,
    preference_loss,
)
from lightning_modules.rso.pipeline import (
    MadePairs,
    PairPipeline,
    Provenance,
    split_over_ranks,
    write_pairs,
)
from lightning_modules.rso.policies import Policy, build_policy
from lightning_modules.rso.reference_scores import ReferenceScores, pack, unpack
from lightning_modules.rso.reward_source import load_reward
from lightning_modules.rso.stages import ask_tokens, token_lists

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Reference = Literal["precomputed", "copy", "adapter_off"]


class RSO(PaperModule):
    """Fits a policy to preference pairs, which it may first make itself by rejection sampling.

    The data module gives human pairs and prompts. With `pair_source=direct` the policy is fitted to
    the human pairs (DPO with `sigmoid_norm`, SLiC with `hinge`); with `sft_sample_rank` or
    `rso_sample_rank` the module samples responses of the reference policy before training, keeps
    all of them or those that look like draws of the KL-regularised optimal policy, and labels pairs
    with the reward. `raft` and `rest` make supervised targets for `loss=cross_entropy`.

    Logged: `train/preference`, `train/accuracy`, `train/margin`, `train/chosen_logps`,
    `train/rejected_logps` (both may fall); `val/` the same and `val/loss`; where responses are
    evaluated `val/proxy_reward`, `val/proxy_win_rate`, `val/gold_reward`, `val/gold_win_rate`
    (against the chosen response of the held-out pair), `val/kl`, `val/length`, `val/truncated`,
    `val/objective` = reward - beta KL, with the gold reward where there is one. Every validation
    value is a mean over samples. Categorical policies are evaluated exactly.

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
        reward: `oracle` (the data module's known reward) or a checkpoint of `RewardRanking`.
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

    monitor: ClassVar[str] = "val/loss"
    mode: ClassVar[Literal["min", "max"]] = "min"
    default_loss_weights: ClassVar[Mapping[str, float]] = {"preference": 1.0, "sft": 0.0}

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
        reward: str | None = "oracle",
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
        chunk: int = 1024,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["step", "epoch"] = "step",
        loss_weights: dict[str, float] | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval, loss_weights)
        check_loss(loss, gamma, label_smoothing)
        pair_weights(torch.zeros(1), pair_weight)
        if reference not in ("precomputed", "copy", "adapter_off"):
            raise ValueError(
                f"reference must be precomputed, copy or adapter_off, got '{reference}'"
            )
        if pair_source in ("raft", "rest") and loss != "cross_entropy":
            raise ValueError(
                f"pair_source={pair_source} makes targets, not pairs: set loss=cross_entropy"
            )
        if pair_source != "direct" and reward is None:
            raise ValueError(
                f"pair_source={pair_source} needs reward: a checkpoint of RewardRanking, or oracle"
            )
        if evaluate_every < 0:
            raise ValueError(f"evaluate_every must be >= 0, got {evaluate_every}")
        self.options = PairOptions(
            pair_source, sampler, n_candidates, n_select, beta, ranking, label, min_margin,
            deduplicate, correct_proposal, ess_target, length_penalty, rest_threshold,
        )  # fmt: skip
        self.policy_kind, self.backbone = policy, backbone
        self.eos_token_id, self.pad_token_id = eos_token_id, pad_token_id
        self.allowed_tokens = allowed_tokens
        self.loss_name, self.gamma, self.label_smoothing = loss, gamma, label_smoothing
        self.pair_weight = pair_weight
        self.reference_mode = reference
        self.reward_source, self.gold_source = reward, gold
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.max_new_tokens, self.rows, self.group = max_new_tokens, rows, group
        self.pairs_dir = pairs_dir
        self.evaluate_every = evaluate_every
        self.chunk = chunk
        Sampling(max_new_tokens or 128, temperature, top_k, top_p, rows=rows)
        self.policy: Policy | None = None
        self.reference: nn.Module | None = None
        self.scores = ReferenceScores(reference_cache)
        self.metrics = nn.ModuleDict(
            {f"{stage}_{name}": MeanMetric() for stage in ("val", "test") for name in METRICS}
        )
        # Not parameters of this module: frozen helpers that no checkpoint should hold.
        self._frozen: list[nn.Module] = []
        self._rewards: dict[str, Any] = {}
        self._tokenizer: Any = None
        self._records: list[PairRecord] | None = None
        self._round = 0
        self._resampling: tuple[int, bool, bool] | None = None
        self._history: list[dict[str, float]] = []
        if policy != "language" or (eos_token_id is not None and pad_token_id is not None):
            self._build()

    # ------------------------------------------------------------------ models

    def _build(self) -> None:
        """Make the policy, and the frozen copy where one is asked for."""
        if self.policy is not None:
            return
        self.policy = self._fresh_policy()
        trainable(self.policy)
        inner: Any = getattr(self.policy, "backbone", self.policy)
        if self.reference_mode == "adapter_off" and not has_adapters(inner):
            raise ValueError("reference=adapter_off needs adapters: set backbone.lora")
        if self.reference_mode == "copy":
            self.reference = self._fresh_policy().requires_grad_(False).eval()

    def _fresh_policy(self) -> Policy:
        return build_policy(
            self.policy_kind, self.backbone, self.eos_token_id, self.pad_token_id,
            self.allowed_tokens, self.chunk,
        )  # fmt: skip

    def setup(self, stage: str) -> None:
        """Ask the data module for tokens and rewards; build what could not be built before."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        ask_tokens(self)
        self._tokenizer = getattr(data, "tokenizer", None)
        self._build()
        assert self.policy is not None
        if self.reference is not None and int(self.training_iterations) == 0:
            # Weights that the user loaded into the policy by hand are the reference as well.
            self.reference.load_state_dict(self.policy.state_dict())
        key = tokenizer_fingerprint(self._tokenizer)
        self._rewards = {
            "proxy": load_reward(self.reward_source, data, key),
            "gold": load_reward(self.gold_source or "oracle", data, key),
        }
        if stage == "fit" and self.options.pair_source != "direct":
            if self._rewards["proxy"] is None:
                raise ValueError(
                    f"reward={self.reward_source} but these data have no known reward: train "
                    "RewardRanking and give its checkpoint"
                )
            decodes, calls = self.options.costs
            rank_zero_info(
                f"pairs by {self.options.pair_source}: {decodes} decodes and {calls} calls of the "
                "reward per prompt"
            )

    def reward_model(self, name: str) -> Any:
        """The `proxy` or `gold` reward on this module's device, or None."""
        reward = self._rewards.get(name)
        return reward.to(self.device) if isinstance(reward, nn.Module) else reward

    def configure_model(self) -> None:
        """Shard policy and reference under `ModelParallelStrategy` (FSDP2)."""
        mesh = getattr(self, "_device_mesh", None)
        for part in (self.policy, self.reference):
            if part is not None and hasattr(part, "backbone"):
                shard_language_model(part.backbone, mesh)

    def default_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """AdamW at 1e-6 without weight decay, a usual choice for real models."""
        return AdamW(parameters, lr=1e-6, weight_decay=0.0)

    # ------------------------------------------------------------------ reference

    def _logps(self, batch: PreferenceBatch, policy: Any = None) -> tuple[Tensor, Tensor]:
        """Sum log pi of chosen and rejected, each `(batch,)`, by one forward pass of 2 x batch rows."""
        policy = policy or self.policy
        total = policy.sequence_logprobs(
            torch.cat([batch.chosen_input_ids, batch.rejected_input_ids]),
            torch.cat([batch.chosen_attention_mask, batch.rejected_attention_mask]),
            torch.cat([batch.chosen_labels, batch.rejected_labels]),
        ).total
        chosen, rejected = total.chunk(2)
        return chosen, rejected

    @contextmanager
    def live_reference(self) -> Iterator[Any]:
        """The frozen policy: the copy, the model without adapters, or rebuilt from its source.

        Raises:
            ValueError: The rebuilt model is not the one that training started from.
        """
        assert self.policy is not None
        if self.reference is not None:
            yield self.reference
        elif self.reference_mode == "adapter_off":
            with adapters_off(cast(Any, self.policy).backbone):
                yield self.policy
        else:
            yield self._rebuilt_reference()

    def _rebuilt_reference(self) -> nn.Module:
        if not self._frozen:
            assert self.policy is not None
            mesh = getattr(self, "_device_mesh", None)
            frozen: Any
            if int(self.training_iterations) == 0 and mesh is None:
                frozen = copy.deepcopy(self.policy)
            else:
                frozen = self._fresh_policy().to(self.device)
                if hasattr(frozen, "backbone"):
                    shard_language_model(frozen.backbone, mesh)
            frozen = frozen.requires_grad_(False).eval()
            self.scores.check_model(model_fingerprint(frozen))
            self._frozen = [frozen]
        return self._frozen[0]

    @torch.no_grad()
    def reference_logps(self, batch: PreferenceBatch) -> tuple[Tensor, Tensor]:
        """Take log pi_sft as given in the batch, else by a forward pass without gradient."""
        if not bool(batch.ref_chosen_logps.isnan().any() | batch.ref_rejected_logps.isnan().any()):
            return batch.ref_chosen_logps, batch.ref_rejected_logps
        with self.live_reference() as policy:
            return self._logps(batch, policy)

    @torch.no_grad()
    def _score_records(self, records: list[PairRecord]) -> tuple[Tensor, Tensor]:
        """Reference log-probabilities of all records, the work split over processes."""
        assert self.pad_token_id is not None
        collate = PreferenceCollator(self.pad_token_id)
        size = max(1, self.rows // 2)
        groups = [records[i : i + size] for i in range(0, len(records), size)]

        def score(number: int) -> list[list[float]]:
            batch = PreferenceBatch(*(x.to(self.device) for x in collate(groups[number])))
            # before the first step the policy is the reference
            if int(self.training_iterations) == 0:
                chosen, rejected = self._logps(batch)
            else:
                with self.live_reference() as policy:
                    chosen, rejected = self._logps(batch, policy)
            return [chosen.tolist(), rejected.tolist()]

        done = split_over_ranks(len(groups), score, getattr(self, "_device_mesh", None) is not None)
        columns = [[v for part in done for v in part[side]] for side in (0, 1)]
        return torch.tensor(columns[0]), torch.tensor(columns[1])

    def _reference_key(self) -> str:
        if int(self.training_iterations) == 0:
            assert self.policy is not None
            return model_fingerprint(self.policy)
        with self.live_reference() as policy:
            return model_fingerprint(policy)

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

        Makes the training pairs, unless human ones are used, and adds the reference's
        log-probabilities to every record.
        """
        if split == "train" and self.options.pair_source != "direct":
            records = self._training_pairs(datamodule)
        if self.reference_mode != "precomputed":
            return records
        if not self.scores.model:
            self.scores.model = self._reference_key()
        return self.scores.attach(
            records, split, self._score_records, self._reference_key,
            tokenizer_fingerprint(self._tokenizer),
        )  # fmt: skip

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
        options = replace(self.options, seed=global_seed() + 1_000_003 * number)
        sampling = self.sampling()
        reward = self.reward_model("proxy")
        is_model = isinstance(reward, nn.Module)
        provenance = Provenance(
            asdict(options),
            asdict(sampling),
            model_fingerprint(self.policy),
            model_fingerprint(reward) if is_model else str(self.reward_source),
            tokenizer_fingerprint(self._tokenizer),
            data_fingerprint(prompts),
            self.group,
        )
        folder = None if self.pairs_dir is None else Path(self.pairs_dir) / f"round-{number:03d}"
        pipeline = PairPipeline(
            self.policy, reward, options, sampling, self.pad_token_id, self.device, self.group,
            folder,
        )  # fmt: skip
        made = pipeline.run(prompts, provenance)
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

    def sampling(self, temperature: float | None = None) -> Sampling:
        """How candidates are drawn; at a given temperature without top-k and top-p."""
        longest = self.max_new_tokens or 128
        if temperature is not None:
            return Sampling(longest, temperature, rows=self.rows)
        return Sampling(longest, self.temperature, self.top_k, self.top_p, rows=self.rows)

    # ------------------------------------------------------------------ training

    def _pair_terms(self, batch: PreferenceBatch) -> dict[str, Tensor]:
        """Loss and what is logged of every pair, each `(batch,)`."""
        chosen, rejected = self._logps(batch)
        ref_chosen, ref_rejected = self.reference_logps(batch)
        ref_chosen, ref_rejected = ref_chosen.to(chosen), ref_rejected.to(chosen)
        losses = preference_loss(
            self.loss_name, chosen, rejected, ref_chosen, ref_rejected, self.gamma,
            self.label_smoothing,
        )  # fmt: skip
        implied = implicit_reward(chosen, rejected, ref_chosen, ref_rejected, self.gamma)
        return {
            "loss": losses * pair_weights(batch.margin, self.pair_weight),
            "nll": -chosen,
            "accuracy": implied.accuracy,
            "margin": implied.margin,
            "chosen_reward": implied.chosen,
            "rejected_reward": implied.rejected,
            "chosen_logps": chosen.detach(),
            "rejected_logps": rejected.detach(),
        }

    def training_step(self, batch: PreferenceBatch, batch_idx: int) -> Tensor:
        """Mean pair loss, and SLiC's regulariser with the weight `loss_weights.sft`."""
        terms = self._pair_terms(batch)
        for name, value in terms.items():
            if name not in ("loss", "nll"):
                self.log(f"train/{name}", value.mean())
        return self.objective(preference=terms["loss"].mean(), sft=terms["nll"].mean())

    # ------------------------------------------------------------------ evaluation

    def _evaluate(self, batch: PreferenceBatch, stage: str) -> None:
        values = self._pair_terms(batch)
        values.pop("nll")
        fitting = self.trainer.state.fn == "fit"
        every = self.evaluate_every
        if every and not (fitting and self.trainer.current_epoch % every):
            assert self.policy is not None
            _, chosen, _ = token_lists(batch)
            with self.live_reference() as reference:
                values |= evaluate_policy(
                    self.policy, reference, self.reward_model("proxy"), self.reward_model("gold"),
                    batch, chosen, self.options.beta, self.sampling(temperature=1.0),
                    self.reference_mode == "adapter_off",
                )  # fmt: skip
        for name, value in values.items():
            metric = cast(MeanMetric, self.metrics[f"{stage}_{name}"])
            metric.update(value.to(self.device))
            self.log(f"{stage}/{name}", metric, batch_size=len(batch.index))

    def validation_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """Held-out pairs, and responses of the policy to their prompts."""
        self._evaluate(batch, "val")

    def test_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """As in validation."""
        self._evaluate(batch, "test")

    def on_validation_epoch_end(self) -> None:
        """Keep a point of the over-optimisation curve."""
        point = {}
        for name in ("kl", "proxy_reward", "gold_reward"):
            metric = cast(MeanMetric, self.metrics[f"val_{name}"])
            if metric.update_called:
                point[name] = float(metric.compute())
        if "kl" in point and not self.trainer.sanity_checking:
            self._history.append(point)

    def figures(self) -> "dict[str, Figure]":
        """Proxy and gold reward against sqrt(KL)."""
        points = [p for p in self._history if "proxy_reward" in p or "gold_reward" in p]
        if not points:
            return {}
        first = "proxy_reward" if "proxy_reward" in points[0] else "gold_reward"
        gold = [p["gold_reward"] for p in points if "gold_reward" in p]
        return {
            "overoptimisation": overoptimisation_curve(
                [p["kl"] for p in points],
                [p[first] for p in points],
                gold if first == "proxy_reward" and len(gold) == len(points) else None,
            )
        }

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
        options = replace(self.options, seed=global_seed())
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
                result["statistics"] = asdict(statistics)
        return result

    def write_predictions(self, predictions: list[Any], folder: Path) -> list[Path]:
        """Write `pairs.jsonl`, which `Preferences(pairs_file=...)` reads."""
        made = [p for p in predictions if "pairs" in p]
        if not made:
            return []
        statistics = PairStatistics()
        records: list[PairRecord] = []
        for part in made:
            statistics.merge(part["statistics"])
            records += unpack(part["pairs"])
        assert self.policy is not None
        provenance = Provenance(
            asdict(replace(self.options, seed=global_seed())),
            asdict(self.sampling()),
            model_fingerprint(self.policy),
            str(self.reward_source),
            tokenizer_fingerprint(self._tokenizer),
            "",
            0,
        )
        decode = getattr(self._tokenizer, "decode", None)
        path = folder / "pairs.jsonl"
        return [write_pairs(path, MadePairs(records, statistics, provenance), decode)]

    # ------------------------------------------------------------------ checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store this round's pairs and the reference's scores: a resume needs neither model."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["rso"] = {
            "round": self._round,
            "records": None if self._records is None else pack(self._records),
            "scores": self.scores.state_dict(),
            "history": [dict(point) for point in self._history],
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore them."""
        super().on_load_checkpoint(checkpoint)
        state = checkpoint.get("rso")
        if state is None:
            return
        self._round = state["round"]
        self._records = None if state["records"] is None else unpack(state["records"])
        self.scores.load_state_dict(state["scores"])
        self._history = list(state["history"])
