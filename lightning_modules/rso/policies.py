"""Policies: a language model, and small categorical ones whose every expectation is exact.

All of them are called alike: log-probabilities of a padded batch, and samples for left-padded
prompts. A response of a categorical policy is one token.
"""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.components.language.backbone import (
    BackboneConfig,
    build_backbone,
    context_length,
    disable_dropout,
)
from lightning_modules.components.language.counter import counter_uniform, purpose
from lightning_modules.components.language.encoding import pad, unpad
from lightning_modules.components.language.logprobs import (
    IGNORE,
    SequenceLogprobs,
    Support,
    sequence_logprobs,
    unwrap,
)
from lightning_modules.components.language.rollouts import LENGTH, Rollout, Sampling, generate


class CategoricalPolicy(nn.Module):
    """A policy over a finite set of responses 0..K-1, each one token.

    A subclass gives `log_probs`. Prompts are one token `K + k` for prompt k.

    Args:
        responses: K, the number of responses.
    """

    def __init__(self, responses: int) -> None:
        super().__init__()
        self.responses = responses

    def log_probs(self, prompts: Tensor) -> Tensor:
        """`(..., K)` log-probabilities for prompt numbers `(...)`."""
        raise TypeError(f"{type(self).__name__} must define log_probs")

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:
        """`.logits` `(batch, length, K)` like a language model's."""
        return SimpleNamespace(logits=self.log_probs((input_ids - self.responses).clamp(min=0)))

    def sequence_logprobs(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> SequenceLogprobs:
        """Log-probabilities of the labelled tokens."""
        return sequence_logprobs(self, input_ids, attention_mask, labels)

    @torch.no_grad()
    def sample(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        index: Tensor,
        candidates: int,
        seed: int,
        sampling: Sampling | None = None,
    ) -> Rollout:
        """Draw by inverse CDF of the number of (seed, prompt index, candidate)."""
        base = self.log_probs(prompt_ids[:, -1] - self.responses).double()
        warped = base
        if sampling is not None and sampling.temperature not in (0.0, 1.0):
            warped = warped / sampling.temperature
        if sampling is not None and 0 < sampling.top_k < self.responses:
            least = warped.topk(sampling.top_k, dim=-1).values[:, -1:]
            warped = warped.masked_fill(warped < least, -torch.inf)
        warped = warped.log_softmax(-1)
        number = torch.arange(candidates, device=index.device)
        u = counter_uniform(seed, purpose("rollout"), index[:, None], number[None], 0)
        cumulative = warped.exp().cumsum(-1)
        token = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
        if sampling is not None and sampling.temperature == 0.0:
            token = base.argmax(-1, keepdim=True).expand(-1, candidates)
        ids = token.reshape(-1, 1)
        return Rollout(
            index.repeat_interleave(candidates),
            number.repeat(len(index)),
            ids,
            torch.ones_like(ids),
            base.gather(1, token).flatten().float(),
            warped.gather(1, token).flatten().float(),
            torch.full((len(ids),), 1 - LENGTH, device=ids.device),
        )


class TiltPolicy(CategoricalPolicy):
    """pi_theta(n) proportional to Poisson(n; mean) exp(theta . f(n)) on lengths 0..longest.

    f is (n / longest), or with degree 2 (n / longest, (n / longest)^2). One slope is too few for a
    reward that bends: the policy must choose where its slope is right.

    Args:
        longest: Largest length M.
        mean: Mean of the Poisson law of the SFT policy.
        degree: 1 or 2.
    """

    def __init__(self, longest: int = 16, mean: float = 5.0, degree: int = 1) -> None:
        super().__init__(longest + 1)
        if degree not in (1, 2):
            raise ValueError(f"degree must be 1 or 2, got {degree}")
        length = torch.arange(longest + 1, dtype=torch.float64)
        self.register_buffer("log_sft", log_poisson(longest, mean).float())
        x = length / longest
        self.register_buffer("features", torch.stack([x, x**2][:degree], -1).float())
        self.theta = nn.Parameter(torch.zeros(degree))

    def log_probs(self, prompts: Tensor) -> Tensor:
        """The same law for every prompt, `(..., longest + 1)`."""
        scores: Tensor = self.log_sft + self.features @ self.theta  # type: ignore[operator]
        return scores.log_softmax(-1).expand(*prompts.shape, -1)


class TabularPolicy(CategoricalPolicy):
    """One free logit per prompt and response.

    Args:
        responses: K.
        prompts: Number of prompts.
        init_seed: Seed of the SFT policy, whose logits are standard normal.
    """

    def __init__(self, responses: int = 24, prompts: int = 4, init_seed: int = 0) -> None:
        super().__init__(responses)
        generator = torch.Generator().manual_seed(init_seed)
        self.table = nn.Parameter(torch.randn(prompts, responses, generator=generator))

    def log_probs(self, prompts: Tensor) -> Tensor:
        """`(..., K)`."""
        return self.table.log_softmax(-1)[prompts]


class LanguagePolicy(nn.Module):
    """A language model with its vocabulary's support and special tokens.

    Args:
        config: What to load.
        eos: Token id(s) that end a response.
        pad_id: Padding id.
        allowed: Token ids that may be emitted; both sampler and log-probabilities use it.
        chunk: Token rows whose logits are in memory at a time.
    """

    def __init__(
        self,
        config: BackboneConfig,
        eos: int | list[int],
        pad_id: int,
        allowed: tuple[int, ...] | None = None,
        chunk: int = 256,
    ) -> None:
        super().__init__()
        self.backbone = build_backbone(config)
        disable_dropout(self.backbone)
        self.eos = eos
        self.pad_id = pad_id
        self.support = Support(allowed)
        self.chunk = chunk

    @property
    def separate(self) -> bool:
        """Whether prompt and response do not share a context (encoder-decoder)."""
        return bool(getattr(unwrap(self.backbone).config, "is_encoder_decoder", False))

    @property
    def context(self) -> int | None:
        """Longest sequence, or None without a limit."""
        return context_length(self.backbone)

    def sequence_logprobs(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> SequenceLogprobs:
        """Log-probabilities of the labelled tokens on the support."""
        if self.separate:
            # the encoder reads the prompt, the decoder's labels are the response
            prompt, response = (attention_mask == 1) & (labels == IGNORE), labels != IGNORE
            ids, mask = (x.to(labels.device) for x in pad(unpad(input_ids, prompt), self.pad_id))
            answer, kept = (x.to(labels.device) for x in pad(unpad(labels, response), self.pad_id))
            input_ids, attention_mask = ids, mask
            labels = answer.masked_fill(kept == 0, IGNORE)
        return sequence_logprobs(
            self.backbone, input_ids, attention_mask, labels, self.support, self.chunk
        )

    def sample(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        index: Tensor,
        candidates: int,
        seed: int,
        sampling: Sampling | None = None,
    ) -> Rollout:
        """Draw responses; see `generate`."""
        from torch.distributed.fsdp import FSDPModule

        sampling = sampling or Sampling()
        if self.context is not None and not self.separate:
            longest = prompt_ids.shape[1] + sampling.max_new_tokens
            if longest > self.context:
                raise ValueError(
                    f"a prompt of {prompt_ids.shape[1]} tokens and max_new_tokens="
                    f"{sampling.max_new_tokens} exceed the model's context of {self.context}"
                )
        return generate(
            self.backbone,
            prompt_ids,
            prompt_mask,
            index,
            candidates,
            sampling,
            seed,
            self.eos,
            self.pad_id,
            self.support,
            synced=isinstance(self.backbone, FSDPModule),
        )


Policy = CategoricalPolicy | LanguagePolicy

KINDS = ("length_tilt", "length_tilt_quadratic", "tabular", "language")


def build_policy(
    kind: str,
    backbone: str | Mapping[str, Any] | None = None,
    eos: int | list[int] | None = None,
    pad_id: int | None = None,
    allowed: list[int] | None = None,
    chunk: int = 256,
) -> Policy:
    """The policy by name; the same arguments give the same weights.

    Raises:
        ValueError: The name is unknown, or a language policy lacks its backbone or tokens.
    """
    if kind == "length_tilt":
        return TiltPolicy()
    if kind == "length_tilt_quadratic":
        return TiltPolicy(degree=2)
    if kind == "tabular":
        return TabularPolicy()
    if kind != "language":
        raise ValueError(f"policy must be one of {', '.join(KINDS)}, got '{kind}'")
    if backbone is None:
        raise ValueError("policy=language needs backbone: a hub id, a folder or a config")
    if eos is None or pad_id is None:
        raise ValueError("policy=language needs eos_token_id and pad_token_id, or a tokenizer")
    config = BackboneConfig.of(backbone)
    config.check_trainable()
    return LanguagePolicy(config, eos, pad_id, tuple(allowed) if allowed else None, chunk)


def log_poisson(longest: int, mean: float) -> Tensor:
    """Log-probabilities of Poisson(mean) renormalised on 0..longest, float64 `(longest + 1,)`."""
    n = torch.arange(longest + 1, dtype=torch.float64)
    return (n * math.log(mean) - torch.lgamma(n + 1)).log_softmax(-1)
