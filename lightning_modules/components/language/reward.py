"""Reward models on a language-model backbone: a scalar head, or a text comparison of two answers.

Both answer the same questions. `preference_logit(x, y1, y2)` is the log-odds that y1 is preferred,
and `score(x, y, baseline)` a pointwise reward; responses and prompts are token ids.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_modules.components.language.encoding import pad
from lightning_modules.components.language.logprobs import positions, unwrap

Ids = Sequence[int]
PromptBuilder = Callable[[Ids, Ids, Any], Sequence[int]]
"""Makes the reward model's input of (prompt, response, principles)."""


class Reward(Protocol):
    """What samplers and evaluations ask of a reward.

    Attributes:
        needs_baseline: Whether `score` compares with a baseline response and cannot do without.
    """

    needs_baseline: bool

    def score(
        self,
        prompts: Sequence[Ids],
        responses: Sequence[Ids],
        baselines: Sequence[Ids] | None = None,
        principles: Any = None,
    ) -> Tensor:
        """Pointwise rewards `(rows,)` in nats of preference odds."""
        ...

    def preference_logit(
        self, prompts: Sequence[Ids], first: Sequence[Ids], second: Sequence[Ids]
    ) -> Tensor:
        """Log-odds `(rows,)` that the first response is preferred."""
        ...


def concatenate(prompt: Ids, response: Ids, principles: Any = None) -> list[int]:
    """Prompt, then response."""
    return [*prompt, *response]


def last_hidden(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Hidden state of the last real token, `(rows, width)`; either side may be padded."""
    inner: Any = unwrap(model)
    body = getattr(inner, inner.base_model_prefix, inner)
    import inspect

    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    if "position_ids" in inspect.signature(body.forward).parameters:
        inputs["position_ids"] = positions(attention_mask)
    hidden = body(**inputs, use_cache=False).last_hidden_state
    column = torch.arange(input_ids.shape[1], device=input_ids.device)
    last = (attention_mask.long() * column).argmax(-1)
    return hidden[torch.arange(len(last), device=last.device), last]  # type: ignore[no-any-return]


class ScalarReward(nn.Module):
    """Bradley-Terry reward: a linear head on the last real token, rho = sigma(s(y1) - s(y2)).

    Args:
        backbone: Causal language model; start from the SFT model, a fresh one learns little.
        pad_id: Padding id of batches.
        build: Makes the input of (prompt, response, principles); default prompt then response.
        batch_size: Rows per forward pass when scoring.
        init: `zero` weights (every reward 0) or torch's `default` of a linear layer.
    """

    needs_baseline = False

    def __init__(
        self,
        backbone: nn.Module,
        pad_id: int,
        build: PromptBuilder = concatenate,
        batch_size: int = 64,
        init: str = "default",
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.pad_id = pad_id
        self.build = build
        self.batch_size = batch_size
        config: Any = unwrap(backbone).config
        like = next(backbone.parameters())
        self.head = nn.Linear(config.hidden_size, 1, dtype=like.dtype, device=like.device)
        nn.init.zeros_(self.head.bias)
        if init == "zero":
            nn.init.zeros_(self.head.weight)
        elif init != "default":
            raise ValueError(f"init must be default or zero, got {init}")

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Rewards `(rows,)`, at least float32, of padded inputs `(rows, length)`."""
        state = last_hidden(self.backbone, input_ids, attention_mask)
        reward = self.head(state).squeeze(-1)
        return reward.to(torch.promote_types(reward.dtype, torch.float32))  # type: ignore[no-any-return]

    def inputs(
        self, prompts: Sequence[Ids], responses: Sequence[Ids], principles: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Right-padded ids and mask on the model's device."""
        rows = [self.build(p, r, principles) for p, r in zip(prompts, responses, strict=True)]
        ids, mask = pad(rows, self.pad_id)
        return ids.to(self.head.weight.device), mask.to(self.head.weight.device)

    @torch.no_grad()
    def score(
        self,
        prompts: Sequence[Ids],
        responses: Sequence[Ids],
        baselines: Sequence[Ids] | None = None,
        principles: Any = None,
    ) -> Tensor:
        """s(x, y), or s(x, y) - s(x, y_b) when baselines are given; `(rows,)`."""
        parts = [
            self(*self.inputs(prompts[i : i + self.batch_size], responses[i : i + self.batch_size],
                              principles))
            for i in range(0, len(prompts), self.batch_size)
        ]  # fmt: skip
        reward = torch.cat(parts) if parts else self.head.weight.new_zeros(0)
        if baselines is not None:
            reward = reward - self.score(prompts, baselines, principles=principles)
        return reward

    def preference_logit(
        self, prompts: Sequence[Ids], first: Sequence[Ids], second: Sequence[Ids]
    ) -> Tensor:
        """s(x, y1) - s(x, y2), `(rows,)`."""
        return self.score(prompts, first) - self.score(prompts, second)

    def pair_loss(
        self, prompts: Sequence[Ids], chosen: Sequence[Ids], rejected: Sequence[Ids]
    ) -> tuple[Tensor, Tensor]:
        """Bradley-Terry loss and margin per pair, each `(rows,)`, with gradient."""
        both = self(*self.inputs([*prompts, *prompts], [*chosen, *rejected]))
        better, worse = both.chunk(2)
        return -F.logsigmoid(better - worse), better - worse


@dataclass(frozen=True)
class ComparisonTemplate:
    """Token pieces around a prompt and two responses, and the two answers.

    The text is `[CONTEXT] x [SUMMARY A] y1 [SUMMARY B] y2`, after which the model says A or B.
    Pieces are joined as ids, so a response is never tokenised again.
    """

    context: tuple[int, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]
    answer: tuple[int, ...]
    label_a: int
    label_b: int

    def __post_init__(self) -> None:
        if self.label_a == self.label_b:
            raise ValueError(
                f"the answers A and B are the same token {self.label_a}: choose other labels"
            )

    @classmethod
    def of(cls, tokenizer: Any, kind: str = "dialogue") -> "ComparisonTemplate":
        """The template for `dialogue` (RESPONSE) or `summary` (SUMMARY) with a real tokenizer.

        Raises:
            ValueError: "A" or "B" is more than one token.
        """
        names = {"dialogue": "RESPONSE", "summary": "SUMMARY"}
        if kind not in names:
            raise ValueError(f"template must be dialogue or summary, got {kind}")

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

        labels = [ids(text) for text in (" A", " B")]
        if any(len(label) != 1 for label in labels):
            labels = [ids(text) for text in ("A", "B")]
        for name, label in zip("AB", labels, strict=True):
            if len(label) != 1:
                raise ValueError(
                    f"the answer {name!r} must be one token, the tokenizer gives {list(label)}"
                )
        return cls(
            ids("[CONTEXT] "), ids(f" [{names[kind]} A] "), ids(f" [{names[kind]} B] "),
            ids(" [PREFERRED]"), labels[0][0], labels[1][0],
        )  # fmt: skip

    def build(self, prompt: Ids, first: Ids, second: Ids) -> list[int]:
        """Ids of the whole comparison."""
        return [*self.context, *prompt, *self.first, *first, *self.second, *second, *self.answer]


class PairwiseReward(nn.Module):
    """Text-to-text ranking model: the language-model head restricted to the two answer tokens.

    Args:
        backbone: Causal language model; start from the SFT model.
        template: Token pieces of the comparison.
        pad_id: Padding id of batches.
        swap: Average the log-odds of both orders when scoring, which cancels a position bias.
        batch_size: Rows per forward pass when scoring.
    """

    needs_baseline = True

    def __init__(
        self,
        backbone: nn.Module,
        template: ComparisonTemplate,
        pad_id: int,
        swap: bool = True,
        batch_size: int = 64,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.template = template
        self.pad_id = pad_id
        self.swap = swap
        self.batch_size = batch_size

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Log-odds log p(A) - log p(B), `(rows,)`: from two logits, so it is never infinite."""
        state = last_hidden(self.backbone, input_ids, attention_mask)
        head = unwrap(self.backbone).get_output_embeddings()  # type: ignore[operator]
        logits = head(state).to(torch.promote_types(state.dtype, torch.float32))
        return logits[:, self.template.label_a] - logits[:, self.template.label_b]  # type: ignore[no-any-return]

    def _logit(self, prompts: Sequence[Ids], first: Sequence[Ids], second: Sequence[Ids]) -> Tensor:
        rows = [self.template.build(*row) for row in zip(prompts, first, second, strict=True)]
        ids, mask = pad(rows, self.pad_id)
        device = next(self.backbone.parameters()).device
        return self(ids.to(device), mask.to(device))  # type: ignore[no-any-return]

    @torch.no_grad()
    def preference_logit(
        self, prompts: Sequence[Ids], first: Sequence[Ids], second: Sequence[Ids]
    ) -> Tensor:
        """Log-odds of rho(x, y1, y2), `(rows,)`; the mean of both orders with `swap`."""
        parts = []
        for i in range(0, len(prompts), self.batch_size):
            take = slice(i, i + self.batch_size)
            x, y1, y2 = prompts[take], first[take], second[take]
            forward = self._logit(x, y1, y2)
            parts.append(swapped_logit(forward, self._logit(x, y2, y1)) if self.swap else forward)
        return torch.cat(parts) if parts else torch.zeros(0)

    def score(
        self,
        prompts: Sequence[Ids],
        responses: Sequence[Ids],
        baselines: Sequence[Ids] | None = None,
        principles: Any = None,
    ) -> Tensor:
        """r(x, y) = logit rho(x, y, y_b): the baseline has reward 0.

        Raises:
            ValueError: There are no baselines; a comparison needs something to compare with.
        """
        if baselines is None:
            raise ValueError("a pairwise reward needs baselines, one response per row")
        return self.preference_logit(prompts, responses, baselines)

    def pair_loss(
        self,
        prompts: Sequence[Ids],
        chosen: Sequence[Ids],
        rejected: Sequence[Ids],
        flip: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy on the right letter and margin per pair, each `(rows,)`, with gradient.

        Args:
            prompts: Prompts.
            chosen: Preferred responses.
            rejected: The others.
            flip: `(rows,)` bool, put the preferred one second. Without a random order the model
                learns the position and nothing else.
        """
        turned = flip.tolist() if flip is not None else [False] * len(prompts)
        first = [b if f else a for a, b, f in zip(chosen, rejected, turned, strict=True)]
        second = [a if f else b for a, b, f in zip(chosen, rejected, turned, strict=True)]
        logit = self._logit(prompts, first, second)
        sign = torch.tensor([-1.0 if f else 1.0 for f in turned], device=logit.device)
        return -F.logsigmoid(sign * logit), sign * logit


def logit(probability: Tensor) -> Tensor:
    """Log-odds log p - log(1 - p)."""
    return torch.log(probability) - torch.log1p(-probability)


def swapped_logit(forward: Tensor, backward: Tensor) -> Tensor:
    """½ [logit rho(x, y, y_b) - logit rho(x, y_b, y)] from the log-odds of both orders."""
    return 0.5 * (forward - backward)


def pairwise_reward(first: Tensor, second: Tensor | None = None) -> Tensor:
    """Reward of y from the probability of "A" with y first, and with y second if given.

    Args:
        first: `(rows,)` probability of "A" when y is A.
        second: `(rows,)` probability of "A" when y is B.
    """
    return logit(first) if second is None else swapped_logit(logit(first), logit(second))


class EnsembleReward(nn.Module):
    """Lower-confidence reward of several models: mean minus `caution` standard deviations.

    Args:
        members: Reward models.
        caution: Standard deviations (of the population) to subtract, >= 0.
    """

    def __init__(self, members: Sequence[nn.Module], caution: float = 1.0) -> None:
        super().__init__()
        if not members:
            raise ValueError("members must hold at least one reward model")
        if caution < 0:
            raise ValueError(f"caution must be >= 0, got {caution}")
        self.members = nn.ModuleList(members)
        self.caution = caution
        self.needs_baseline = any(getattr(m, "needs_baseline", False) for m in members)

    def _lower(self, values: list[Tensor]) -> Tensor:
        stacked = torch.stack(values)
        return stacked.mean(0) - self.caution * stacked.std(0, correction=0)

    def score(
        self,
        prompts: Sequence[Ids],
        responses: Sequence[Ids],
        baselines: Sequence[Ids] | None = None,
        principles: Any = None,
    ) -> Tensor:
        """Lower confidence bound of the pointwise reward, `(rows,)`."""
        members: list[Any] = list(self.members)
        return self._lower([m.score(prompts, responses, baselines, principles) for m in members])

    def preference_logit(
        self, prompts: Sequence[Ids], first: Sequence[Ids], second: Sequence[Ids]
    ) -> Tensor:
        """Mean log-odds of the members, `(rows,)`: antisymmetric, so no caution here."""
        members: list[Any] = list(self.members)
        return torch.stack([m.preference_logit(prompts, first, second) for m in members]).mean(0)
