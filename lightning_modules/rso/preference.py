"""A policy fitted to preference pairs: DPO, SLiC, hinge-norm, IPO, with any reference."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torchmetrics import MeanMetric

from lightning_modules.base import PaperModule
from lightning_modules.components.language.backbone import (
    adapters_off,
    check_context,
    check_vocabulary,
    has_adapters,
    trainable,
)
from lightning_modules.components.language.encoding import (
    PairRecord,
    PreferenceBatch,
    PreferenceCollator,
)
from lightning_modules.components.language.reference import (
    model_fingerprint,
    tokenizer_fingerprint,
)
from lightning_modules.components.language.rollouts import Sampling
from lightning_modules.components.language.sharding import shard_language_model
from lightning_modules.rso.evaluation import overoptimisation_curve
from lightning_modules.rso.evaluator import METRICS, evaluate_policy
from lightning_modules.rso.losses import (
    check_loss,
    implicit_reward,
    pair_weights,
    preference_loss,
)
from lightning_modules.rso.pipeline import split_over_ranks
from lightning_modules.rso.policies import LanguagePolicy, Policy, build_policy
from lightning_modules.rso.reference_scores import ReferenceScores
from lightning_modules.rso.reward_source import load_reward
from lightning_modules.rso.stages import ask_tokens, token_lists

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Reference = Literal["precomputed", "copy", "adapter_off"]


class PreferenceModule(PaperModule):
    """Fits a policy to pairs (chosen, rejected); `RSO` adds the making of pairs.

    Logged: `train/preference`, `train/accuracy`, `train/margin`, `train/chosen_logps`,
    `train/rejected_logps` (both may fall); `val/` the same and `val/loss`; where responses are
    evaluated `val/proxy_reward`, `val/proxy_win_rate`, `val/gold_reward`, `val/gold_win_rate`
    (against the chosen response of the held-out pair), `val/kl`, `val/length`, `val/truncated`,
    `val/objective` = reward - beta KL, with the gold reward where there is one. Every validation
    value is a mean over samples. Categorical policies are evaluated exactly.

    The arguments are those of `RSO` of the same names.
    """

    monitor: str = "val/loss"
    mode: Literal["min", "max"] = "min"
    default_loss_weights: ClassVar[Mapping[str, float]] = {"preference": 1.0, "sft": 0.0}

    def __init__(
        self,
        policy: str = "language",
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
        reward: str | list[str] | None = "oracle",
        gold: str | None = None,
        beta: float = 0.5,
        max_new_tokens: int | None = None,
        rows: int = 256,
        evaluate_every: int = 1,
        chunk: int = 256,
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
        if evaluate_every < 0:
            raise ValueError(f"evaluate_every must be >= 0, got {evaluate_every}")
        Sampling(max_new_tokens or 128, rows=rows)
        self.policy_kind, self.backbone = policy, backbone
        self.eos_token_id, self.pad_token_id = eos_token_id, pad_token_id
        self.allowed_tokens = allowed_tokens
        self.loss_name, self.gamma, self.label_smoothing = loss, gamma, label_smoothing
        self.pair_weight = pair_weight
        self.reference_mode = reference
        self.reward_source, self.gold_source = reward, gold
        self.beta = beta
        self.max_new_tokens, self.rows = max_new_tokens, rows
        self.evaluate_every = evaluate_every
        self.chunk = chunk
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
        if isinstance(self.policy, LanguagePolicy):
            check_vocabulary(self.policy.backbone, self._tokenizer)
        if self.reference is not None and int(self.training_iterations) == 0:
            # Weights that the user loaded into the policy by hand are the reference as well.
            self.reference.load_state_dict(self.policy.state_dict())
        key = tokenizer_fingerprint(self._tokenizer)
        self._rewards = {
            "proxy": load_reward(self.reward_source, data, key),
            "gold": load_reward(self.gold_source or "oracle", data, key),
        }

    def reward_model(self, name: str) -> Any:
        """The `proxy` or `gold` reward on this module's device, or None."""
        reward = self._rewards.get(name)
        return reward.to(self.device) if isinstance(reward, nn.Module) else reward

    def configure_model(self) -> None:
        """Shard policy and reference under `ModelParallelStrategy` (FSDP2)."""
        mesh = getattr(self, "_device_mesh", None)
        for part in (self.policy, self.reference):
            if isinstance(part, LanguagePolicy):
                shard_language_model(part.backbone, mesh)

    def default_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """AdamW at 1e-6 without weight decay, a usual choice for real models."""
        return AdamW(parameters, lr=1e-6, weight_decay=0.0)

    # ------------------------------------------------------------------ reference

    def _logps(self, batch: PreferenceBatch, policy: Any = None) -> tuple[Tensor, Tensor]:
        """Sum log pi of chosen and rejected, each `(batch,)`, in one pass of 2 x batch rows."""
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

    def prepare_pairs(
        self, records: list[PairRecord], split: str, datamodule: Any
    ) -> list[PairRecord]:
        """Called by the data module before it builds a loader of pairs.

        Adds the reference's log-probabilities to every record, computed once.
        """
        if isinstance(self.policy, LanguagePolicy) and not self.policy.separate:
            check_context(self.policy.backbone, records)
        if self.reference_mode != "precomputed":
            return records
        if not self.scores.model:
            self.scores.model = self._reference_key()
        if self.evaluate_every and int(self.training_iterations) == 0:
            self._rebuilt_reference()  # kept before the first step changes the policy
        return self.scores.attach(
            records, split, self._score_records, self._reference_key,
            tokenizer_fingerprint(self._tokenizer),
        )  # fmt: skip

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
                    batch, chosen, self.beta, Sampling(self.max_new_tokens or 128, rows=self.rows),
                    self.reference_mode == "adapter_off",
                )  # fmt: skip
        real = batch.index >= 0  # rows that only fill up a batch of a sharded run have index -1
        for name, value in values.items():
            metric = cast(MeanMetric, self.metrics[f"{stage}_{name}"])
            metric.update(value.to(self.device)[real])
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

    # ------------------------------------------------------------------ checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the reference's scores, so that a resume needs no reference."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["preference"] = {
            "scores": self.scores.state_dict(),
            "history": [dict(point) for point in self._history],
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore them."""
        super().on_load_checkpoint(checkpoint)
        if (state := checkpoint.get("preference")) is not None:
            self.scores.load_state_dict(state["scores"])
            self._history = list(state["history"])
