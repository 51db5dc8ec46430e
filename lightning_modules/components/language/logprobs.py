"""Log-probabilities of token sequences: shifted, masked, in float32 at least, in chunks.

The vocabulary of a modern language model has 32k to 256k entries, so a log-softmax over it is the
largest tensor of a training step. Both functions here keep at most one chunk of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

IGNORE = -100
"""Label of a position that is no part of the response (the convention of `transformers`)."""


class SequenceLogprobs(NamedTuple):
    """Log-probabilities of a batch of responses.

    Attributes:
        tokens: `(batch, length - 1)`; entry t scores token t + 1, zero outside the response.
        total: `(batch,)`, the sum over the response, EOS included, never length-normalised.
        mask: `(batch, length - 1)` bool, true where `tokens` counts.
    """

    tokens: Tensor
    total: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Support:
    """What a policy can emit, and how sharply: shared by the sampler and the log-probabilities.

    A sampler that cannot emit a token whose log-probability is trained lets a preference loss move
    mass onto it, and Monte-Carlo KL estimates then come out negative. So both sides take this.

    Args:
        allowed: Token ids that may be emitted; None means the whole vocabulary.
        temperature: Logits are divided by it, > 0.
    """

    allowed: tuple[int, ...] | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be > 0, got {self.temperature}")
        if self.allowed is not None and len(set(self.allowed)) != len(self.allowed):
            raise ValueError("allowed must list every token id once")
        if self.allowed is not None and not self.allowed:
            raise ValueError("allowed is empty: list the token ids that may be emitted, or None")

    @property
    def trivial(self) -> bool:
        """Whether this is the model's own distribution."""
        return self.allowed is None and self.temperature == 1.0

    def bias(self, vocabulary: int, like: Tensor) -> Tensor | None:
        """`(vocabulary,)` additive mask: 0 on the support and -inf elsewhere, or None."""
        if self.allowed is None:
            return None
        outside = [token for token in self.allowed if not 0 <= token < vocabulary]
        if outside:
            raise ValueError(
                f"allowed holds token id {outside[0]}, but the vocabulary has {vocabulary} entries"
            )
        bias = torch.full((vocabulary,), -torch.inf, dtype=like.dtype, device=like.device)
        bias[torch.tensor(self.allowed, device=like.device)] = 0.0
        return bias

    def apply(self, logits: Tensor) -> Tensor:
        """Logits `(..., vocabulary)` of the restricted, sharpened distribution."""
        if self.temperature != 1.0:
            logits = logits / self.temperature
        bias = self.bias(logits.shape[-1], logits)
        return logits if bias is None else logits + bias


class _GatherLogprobs(torch.autograd.Function):
    """`log_softmax(logits).gather(labels)` row by row, with one chunk of rows in memory."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rows: int) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        normaliser = torch.cat([part.to(wide).logsumexp(-1) for part in torch.split(logits, rows)])
        picked = logits.gather(-1, labels[:, None]).squeeze(-1).to(wide)
        ctx.save_for_backward(logits, labels, normaliser)
        ctx.rows = rows
        return picked - normaliser

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits, labels, normaliser = ctx.saved_tensors
        out = torch.empty_like(logits)
        parts = zip(
            *(torch.split(x, ctx.rows) for x in (logits, labels, normaliser, grad, out)),
            strict=True,
        )
        for scores, label, norm, weight, target in parts:
            probability = (scores.to(norm.dtype) - norm[:, None]).exp_().mul_(-weight[:, None])
            probability.scatter_add_(-1, label[:, None], weight[:, None].to(norm.dtype))
            target.copy_(probability)
        return out, None, None


def gather_logprobs(logits: Tensor, labels: Tensor, chunk: int = 256) -> Tensor:
    """Log-probability of one label per row of logits, without a log-softmax of the whole.

    Args:
        logits: `(..., vocabulary)`, any floating dtype; reduced in float32, or float64 if given so.
        labels: `(...)` int64 in `[0, vocabulary)`.
        chunk: Rows whose float32 copy is in memory at a time.

    Returns:
        `(...)` in float32 (float64 for float64 logits).
    """
    flat = _GatherLogprobs.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), max(1, chunk)
    )
    return flat.view(labels.shape)  # type: ignore[no-any-return]


def head_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    labels: Tensor,
    support: Support | None = None,
    chunk: int = 256,
) -> Tensor:
    """Log-probability of one label per hidden state; the logits are never kept.

    The head runs chunk by chunk and again in the backward pass, so the peak is
    `chunk x vocabulary` instead of `rows x vocabulary`.

    Args:
        hidden: `(rows, width)` last hidden states.
        head: Maps `(n, width)` to `(n, vocabulary)` logits.
        labels: `(rows,)` int64.
        support: What the policy can emit; None for everything.
        chunk: Rows per call of the head.
    """

    def part(states: Tensor, target: Tensor) -> Tensor:
        logits = head(states)
        wide = torch.promote_types(logits.dtype, torch.float32)
        logits = logits.to(wide)
        if support is not None:
            logits = support.apply(logits)
        picked = logits.gather(-1, target[:, None]).squeeze(-1)
        return picked - logits.logsumexp(-1)

    if hidden.shape[0] == 0:
        return hidden.sum(-1)
    pieces = zip(torch.split(hidden, chunk), torch.split(labels, chunk), strict=True)
    if torch.is_grad_enabled():
        return torch.cat([checkpoint(part, h, y, use_reentrant=False) for h, y in pieces])
    return torch.cat([part(h, y) for h, y in pieces])


def positions(attention_mask: Tensor) -> Tensor:
    """`(batch, length)` position ids that count real tokens, so the side of padding is harmless."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def sequence_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    support: Support | None = None,
    chunk: int = 256,
) -> SequenceLogprobs:
    """Sequence log-probability `sum_t log pi(y_t | x, y_<t)` over the labelled tokens.

    Only hidden states that predict a labelled token reach the language-model head. A model whose
    head cannot be called apart (sharded, encoder-decoder, soft-capped logits, or not a
    `transformers` one) goes through its whole forward pass and `gather_logprobs`.

    Args:
        model: Anything whose call returns an object with `.logits` `(batch, length, vocabulary)`.
        input_ids: `(batch, length)` int64. For an encoder-decoder model: the prompt.
        attention_mask: `(batch, length)`, 1 for real tokens; either side may be padded.
        labels: `(batch, length)` int64, -100 outside the response. Encoder-decoder: the response.
        support: Restriction of the policy; None for the model's own distribution.
        chunk: Token rows whose logits are in float32 at a time.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return _encoder_decoder(model, input_ids, attention_mask, labels, support, chunk)
    if input_ids.shape != labels.shape:
        raise ValueError(
            f"labels must have the shape of input_ids {tuple(input_ids.shape)}, "
            f"got {tuple(labels.shape)}"
        )
    target, mask = labels[:, 1:], labels[:, 1:] != IGNORE
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    if _takes_positions(model):
        inputs["position_ids"] = positions(attention_mask)
    split = _body_and_head(model)
    if split is not None:
        body, head = split
        hidden = body(**inputs, use_cache=False).last_hidden_state[:, :-1][mask]
        picked = head_logprobs(hidden, head, target[mask], support, chunk)
    else:
        extra = {"use_cache": False} if config is not None else {}
        logits = model(**inputs, **extra).logits[:, :-1]
        picked = _from_logits(logits[mask], target[mask], support, chunk)
    return _scatter(picked, mask)


def _from_logits(logits: Tensor, labels: Tensor, support: Support | None, chunk: int) -> Tensor:
    if support is None or support.trivial:
        return gather_logprobs(logits, labels, chunk)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return gather_logprobs(support.apply(logits.to(wide)), labels, chunk)


def _scatter(picked: Tensor, mask: Tensor) -> SequenceLogprobs:
    tokens = picked.new_zeros(mask.shape).masked_scatter(mask, picked)
    return SequenceLogprobs(tokens, tokens.sum(-1), mask)


def _encoder_decoder(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    support: Support | None,
    chunk: int,
) -> SequenceLogprobs:
    """The decoder's labels already name the token to predict: no shift, and no prompt in them."""
    mask = labels != IGNORE
    logits = model(
        input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=False
    ).logits
    return _scatter(_from_logits(logits[mask], labels[mask], support, chunk), mask)


def _takes_positions(model: nn.Module) -> bool:
    """Whether the model can be told positions (ALiBi and relative-position models cannot)."""
    import inspect

    inner = unwrap(model)
    if getattr(inner, "config", None) is None:
        return False
    return "position_ids" in inspect.signature(inner.forward).parameters


def unwrap(model: nn.Module) -> nn.Module:
    """The `transformers` model inside adapters, whose layers keep the adapters."""
    inner: Any = model
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    return inner  # type: ignore[no-any-return]


def _body_and_head(model: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """Transformer body and head when calling them apart equals the model's own forward pass."""
    from torch.distributed.tensor import DTensor

    inner: Any = unwrap(model)
    if not hasattr(inner, "get_output_embeddings") or not hasattr(inner, "base_model_prefix"):
        return None
    config = inner.config
    # Soft-capped or scaled logits are made in the model's forward pass, after the head.
    if any(getattr(config, name, None) for name in ("final_logit_softcapping", "logit_scale")):
        return None
    if getattr(config, "logits_scaling", 1.0) not in (None, 1.0):
        return None
    head = inner.get_output_embeddings()
    body = getattr(inner, inner.base_model_prefix, None)
    if not isinstance(head, nn.Linear) or body is None or body is inner:
        return None
    if any(isinstance(parameter, DTensor) for parameter in inner.parameters()):
        return None  # a sharded head is only whole inside the root's own forward pass
    return body, head
