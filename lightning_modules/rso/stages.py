"""The two stages before the policy: supervised fine-tuning and the reward-ranking model."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torchmetrics import MeanMetric

from lightning_modules.base import PaperModule
from lightning_modules.components.language.backbone import (
    BackboneConfig,
    build_backbone,
    has_adapters,
    trainable,
)
from lightning_modules.components.language.counter import counter_uniform, purpose
from lightning_modules.components.language.encoding import (
    PreferenceBatch,
    SupervisedBatch,
    unpad,
)
from lightning_modules.components.language.logprobs import IGNORE
from lightning_modules.components.language.reference import tokenizer_fingerprint
from lightning_modules.components.language.reward import (
    ComparisonTemplate,
    PairwiseReward,
    ScalarReward,
)
from lightning_modules.components.language.sharding import shard_language_model
from lightning_modules.components.randomness import global_seed
from lightning_modules.rso.policies import LanguagePolicy


class SupervisedFineTuning(PaperModule):
    """Maximum likelihood of demonstrations: the SFT policy that everything starts from.

    The loss is the mean over sequences of -log pi(y|x), summed over the response, EOS included.
    Logged: `train/nll`, `val/loss` (the same) and `val/token_nll`, the mean per token.

    Args:
        backbone: Hub id, folder, or a dictionary of `BackboneConfig`.
        eos_token_id: Ends a response; None asks the data module.
        pad_token_id: Padding; None asks the data module.
        allowed_tokens: Ids that may be emitted; None asks the data module.
        export_to: Folder for the model and tokenizer in the `transformers` form at the end of
            training, for the next stage's `backbone`.
        chunk: Token rows whose logits are in memory at a time.
        optimizer: Default AdamW at 1e-5.
        lr_scheduler: Default none.
        lr_interval: Whether the scheduler counts steps or epochs.
        loss_weights: `nll`.
    """

    monitor: str = "val/loss"
    default_loss_weights: ClassVar[Mapping[str, float]] = {"nll": 1.0}

    def __init__(
        self,
        backbone: str | dict[str, Any],
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        allowed_tokens: list[int] | None = None,
        export_to: str | None = None,
        chunk: int = 256,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["step", "epoch"] = "step",
        loss_weights: dict[str, float] | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval, loss_weights)
        self.backbone_config = BackboneConfig.of(backbone)
        self.backbone_config.check_trainable()
        self.eos_token_id, self.pad_token_id = eos_token_id, pad_token_id
        self.allowed_tokens = allowed_tokens
        self.export_to = export_to
        self.chunk = chunk
        self.policy: LanguagePolicy | None = None
        self.val_loss, self.val_token_nll = MeanMetric(), MeanMetric()
        self.test_loss, self.test_token_nll = MeanMetric(), MeanMetric()
        if eos_token_id is not None and pad_token_id is not None:
            self._build()

    def _build(self) -> None:
        if self.policy is None:
            if self.eos_token_id is None or self.pad_token_id is None:
                raise ValueError("eos_token_id and pad_token_id are needed, or a tokenizer")
            allowed = tuple(self.allowed_tokens) if self.allowed_tokens else None
            self.policy = LanguagePolicy(
                self.backbone_config, self.eos_token_id, self.pad_token_id, allowed, self.chunk
            )
            trainable(self.policy)

    def setup(self, stage: str) -> None:
        """Ask the data module for what is None, then build."""
        ask_tokens(self)
        self._build()

    def configure_model(self) -> None:
        """Shard under `ModelParallelStrategy` (FSDP2)."""
        if self.policy is not None:
            shard_language_model(self.policy.backbone, getattr(self, "_device_mesh", None))

    def default_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """AdamW at 1e-5."""
        return AdamW(parameters, lr=1e-5, weight_decay=0.0)

    def _scores(self, batch: SupervisedBatch) -> tuple[Tensor, Tensor, Tensor]:
        assert self.policy is not None
        result = self.policy.sequence_logprobs(batch.input_ids, batch.attention_mask, batch.labels)
        return -result.total, -result.tokens, result.mask

    def training_step(self, batch: SupervisedBatch, batch_idx: int) -> Tensor:
        """Mean over sequences of -log pi(y|x)."""
        return self.objective(nll=self._scores(batch)[0].mean())

    def validation_step(self, batch: SupervisedBatch, batch_idx: int) -> None:
        """Loss per sequence, perplexity per token."""
        self._evaluate(batch, "val")

    def test_step(self, batch: SupervisedBatch, batch_idx: int) -> None:
        """As in validation."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: SupervisedBatch, stage: str) -> None:
        real = batch.index >= 0  # rows that only fill up a batch of a sharded run have index -1
        total, tokens, mask = self._scores(batch)
        total, tokens = total[real], tokens[real][mask[real]]
        size = len(batch.index)
        for name, value in (("loss", total), ("token_nll", tokens)):
            metric: MeanMetric = getattr(self, f"{stage}_{name}")
            metric.update(value)
            self.log(f"{stage}/{name}", metric, batch_size=size)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Greedy answers to prompts: `index`, `ids` `(rows, response)`, `mask`."""
        from lightning_modules.components.language.rollouts import Sampling

        assert self.policy is not None
        rollout = self.policy.sample(
            batch.prompt_input_ids, batch.prompt_attention_mask, batch.index, 1, 0,
            Sampling(max_new_tokens=128, temperature=0.0),
        )  # fmt: skip
        return {"index": rollout.index, "ids": rollout.ids, "mask": rollout.mask}

    def on_train_end(self) -> None:
        """Export the model where the next stage finds it."""
        if self.export_to is not None and self.trainer.is_global_zero:
            self.export(self.export_to, getattr(self.trainer.datamodule, "tokenizer", None))  # type: ignore[attr-defined]

    def export(self, folder: str | Path, tokenizer: Any = None) -> Path:
        """Write weights (adapters merged) and tokenizer in the form of `transformers`.

        Raises:
            ValueError: The model is sharded; convert its checkpoint instead.
        """
        assert self.policy is not None
        if getattr(self, "_device_mesh", None) is not None:
            raise ValueError("export_to: a sharded model is exported from its checkpoint instead")
        model: Any = self.policy.backbone
        if has_adapters(model):
            import copy

            model = copy.deepcopy(model).merge_and_unload()
        model.save_pretrained(str(folder))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        return Path(folder)


class RewardRanking(PaperModule):
    """The reward-ranking model rho(x, y1, y2) = P(y1 preferred), from preference pairs.

    Logged: `train/ranking`, `val/loss`, `val/accuracy` (both orders averaged for `pairwise_text`),
    `val/margin` (mean log-odds of the chosen response).

    Args:
        backbone: Start from the SFT model; a fresh model learns little.
        kind: `pairwise_text` (reads both responses, says A or B) or `bradley_terry` (scalar head).
        template: `dialogue` or `summary` texts, or a dictionary of `ComparisonTemplate`; None asks
            the data module, else `dialogue`. Only for `pairwise_text`.
        swap: Average both orders when scoring.
        head_init: `default` or `zero` weights of the scalar head.
        eos_token_id: None asks the data module.
        pad_token_id: None asks the data module.
        tokenizer_key: Fingerprint of the tokenizer, filled in from the data module.
        optimizer: Default AdamW at 1e-5.
        lr_scheduler: Default none.
        lr_interval: Whether the scheduler counts steps or epochs.
        loss_weights: `ranking`.
    """

    monitor: str = "val/loss"
    default_loss_weights: ClassVar[Mapping[str, float]] = {"ranking": 1.0}

    def __init__(
        self,
        backbone: str | dict[str, Any],
        kind: Literal["pairwise_text", "bradley_terry"] = "pairwise_text",
        template: str | dict[str, Any] | None = None,
        swap: bool = True,
        head_init: str = "default",
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        tokenizer_key: str | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["step", "epoch"] = "step",
        loss_weights: dict[str, float] | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval, loss_weights)
        if kind not in ("pairwise_text", "bradley_terry"):
            raise ValueError(f"kind must be pairwise_text or bradley_terry, got '{kind}'")
        self.backbone_config = BackboneConfig.of(backbone)
        self.backbone_config.check_trainable()
        self.kind, self.template, self.swap = kind, template, swap
        self.head_init = head_init
        self.eos_token_id, self.pad_token_id = eos_token_id, pad_token_id
        self.tokenizer_key = tokenizer_key
        self.reward: ScalarReward | PairwiseReward | None = None
        for stage in ("val", "test"):
            for name in ("loss", "accuracy", "margin"):
                setattr(self, f"{stage}_{name}", MeanMetric())
        if pad_token_id is not None and (kind == "bradley_terry" or isinstance(template, dict)):
            self._build(None)

    def _build(self, tokenizer: Any) -> None:
        if self.reward is not None:
            return
        assert self.pad_token_id is not None
        backbone = build_backbone(self.backbone_config)
        if self.kind == "bradley_terry":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.backbone_config.init_seed)
                self.reward = ScalarReward(backbone, self.pad_token_id, init=self.head_init)
            return
        if not isinstance(self.template, dict):
            made = ComparisonTemplate.of(tokenizer, self.template or "dialogue")
            # stored as ids, so that a checkpoint needs no tokenizer
            self.set_hparam(
                "template",
                {k: list(v) if isinstance(v, tuple) else v for k, v in vars(made).items()},
            )
        assert isinstance(self.template, dict)
        pieces = {k: tuple(v) if isinstance(v, list) else v for k, v in self.template.items()}
        template = ComparisonTemplate(**cast(dict[str, Any], pieces))
        self.reward = PairwiseReward(backbone, template, self.pad_token_id, self.swap)

    def setup(self, stage: str) -> None:
        """Ask the data module for what is None, then build."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        ask_tokens(self)
        tokenizer = getattr(data, "tokenizer", None)
        if self.template is None and getattr(data, "comparison_template", None) is not None:
            self.set_hparam("template", data.comparison_template)
        if self.tokenizer_key is None:
            self.set_hparam("tokenizer_key", tokenizer_fingerprint(tokenizer))
        if self.pad_token_id is None:
            raise ValueError("pad_token_id is needed, or a tokenizer")
        self._build(tokenizer)

    def configure_model(self) -> None:
        """Shard under `ModelParallelStrategy` (FSDP2)."""
        mesh = getattr(self, "_device_mesh", None)
        if self.reward is not None and mesh is not None:
            shard_language_model(self.reward, mesh)

    def default_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """AdamW at 1e-5."""
        return AdamW(parameters, lr=1e-5, weight_decay=0.0)

    def _losses(self, batch: PreferenceBatch, flip: Tensor | None) -> tuple[Tensor, Tensor]:
        """Loss and log-odds of the chosen response, each `(batch,)`."""
        if isinstance(self.reward, ScalarReward):
            ids = torch.cat([batch.chosen_input_ids, batch.rejected_input_ids])
            mask = torch.cat([batch.chosen_attention_mask, batch.rejected_attention_mask])
            better, worse = self.reward(ids, mask).chunk(2)
            return -nn.functional.logsigmoid(better - worse), better - worse
        assert self.reward is not None
        prompts, chosen, rejected = token_lists(batch)
        return self.reward.pair_loss(prompts, chosen, rejected, flip)

    def training_step(self, batch: PreferenceBatch, batch_idx: int) -> Tensor:
        """Cross-entropy, with the order of A and B flipped at random per pair and epoch."""
        u = counter_uniform(
            global_seed(), purpose("flip"), self.current_epoch, batch.index.to(self.device)
        )
        losses, margin = self._losses(batch, u < 0.5)
        self.log("train/accuracy", (margin > 0).float().mean())
        return self.objective(ranking=losses.mean())

    def validation_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """Loss, accuracy and margin."""
        self._evaluate(batch, "val")

    def test_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """As in validation."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: PreferenceBatch, stage: str) -> None:
        losses, margin = self._losses(batch, None)
        if isinstance(self.reward, PairwiseReward):
            swapped, other = self._losses(batch, torch.ones(len(losses), dtype=torch.bool))
            losses, margin = 0.5 * (losses + swapped), 0.5 * (margin + other)
        real = batch.index >= 0
        values = {"loss": losses, "accuracy": 0.5 * (1 + margin.sign()), "margin": margin}
        for name, value in values.items():
            metric: MeanMetric = getattr(self, f"{stage}_{name}")
            metric.update(value[real])
            self.log(f"{stage}/{name}", metric, batch_size=len(losses))

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """`index` and `margin` (log-odds of the chosen response) of pairs, `score` of answers."""
        assert self.reward is not None
        prompts = unpad(batch.prompt_input_ids, batch.prompt_attention_mask)
        if isinstance(batch, PreferenceBatch):
            _, chosen, rejected = token_lists(batch)
            logit = self.reward.preference_logit(prompts, chosen, rejected)
            return {"index": batch.index, "margin": logit}
        answers = unpad(batch.target_ids, batch.target_mask)
        if isinstance(self.reward, PairwiseReward):
            raise ValueError("kind=pairwise_text ranks pairs: predict on pairs, not on prompts")
        return {"index": batch.index, "score": self.reward.score(prompts, answers)}


def ask_tokens(module: Any) -> None:
    """Fill in token ids that are None from the data module."""
    data = module.trainer.datamodule
    for name in ("eos_token_id", "pad_token_id", "allowed_tokens", "max_new_tokens"):
        if getattr(module, name, 0) is None and getattr(data, name, None) is not None:
            module.set_hparam(name, getattr(data, name))


def token_lists(
    batch: PreferenceBatch,
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Prompts, chosen and rejected responses of a batch as lists of ids."""
    return (
        unpad(batch.prompt_input_ids, batch.prompt_attention_mask),
        unpad(batch.chosen_input_ids, batch.chosen_labels != IGNORE),
        unpad(batch.rejected_input_ids, batch.rejected_labels != IGNORE),
    )
