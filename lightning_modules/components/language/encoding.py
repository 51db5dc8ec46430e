"""From text to padded token batches: the boundary of prompt and response is exact, EOS is kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from lightning_modules.components.language.logprobs import IGNORE


class PairRecord(TypedDict, total=False):
    """One preference pair as token ids. `prompt`, `chosen`, `rejected` are always there.

    `index` is the row of the file; the floats are NaN where unknown.
    """

    index: int
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    ref_chosen_logps: float
    ref_rejected_logps: float
    margin: float
    reward_chosen: float
    reward_rejected: float


class PreferenceBatch(NamedTuple):
    """Preference pairs, right padded to one length, and their prompts, left padded.

    Attributes:
        index: `(batch,)` int64, row in the data set.
        prompt_input_ids: `(batch, prompt)` int64, left padded.
        prompt_attention_mask: `(batch, prompt)` int64.
        chosen_input_ids: `(batch, length)` int64, prompt and preferred response.
        chosen_attention_mask: `(batch, length)` int64.
        chosen_labels: `(batch, length)` int64, -100 outside the response.
        rejected_input_ids: As above for the other response.
        rejected_attention_mask: As above.
        rejected_labels: As above.
        ref_chosen_logps: `(batch,)` float, nats under the reference; NaN when not given.
        ref_rejected_logps: As above.
        margin: `(batch,)` float, r(chosen) - r(rejected) or a human margin; NaN when not given.
    """

    index: Tensor  # type: ignore[assignment]
    prompt_input_ids: Tensor
    prompt_attention_mask: Tensor
    chosen_input_ids: Tensor
    chosen_attention_mask: Tensor
    chosen_labels: Tensor
    rejected_input_ids: Tensor
    rejected_attention_mask: Tensor
    rejected_labels: Tensor
    ref_chosen_logps: Tensor
    ref_rejected_logps: Tensor
    margin: Tensor


class PromptBatch(NamedTuple):
    """Prompts to answer, left padded, with a reference answer where there is one.

    Attributes:
        index: `(batch,)` int64, row in the data set.
        prompt_input_ids: `(batch, prompt)` int64, left padded.
        prompt_attention_mask: `(batch, prompt)` int64.
        target_ids: `(batch, response)` int64, right padded reference answer (may be width 0).
        target_mask: `(batch, response)` int64.
    """

    index: Tensor  # type: ignore[assignment]
    prompt_input_ids: Tensor
    prompt_attention_mask: Tensor
    target_ids: Tensor
    target_mask: Tensor


class SupervisedBatch(NamedTuple):
    """Demonstrations, right padded.

    Attributes:
        index: `(batch,)` int64.
        input_ids: `(batch, length)` int64, prompt and response.
        attention_mask: `(batch, length)` int64.
        labels: `(batch, length)` int64, -100 outside the response.
    """

    index: Tensor  # type: ignore[assignment]
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


@dataclass
class Truncation:
    """How many prompts and responses were cut, and how many there were."""

    rows: int = 0
    prompts: int = 0
    responses: int = 0
    cut: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.prompts} of {self.rows} prompts cut on the left, "
            f"{self.responses} responses cut on the right (EOS kept)"
        )


@dataclass
class Encoder:
    """Turns prompts and responses into token ids with a `transformers` tokenizer.

    Args:
        tokenizer: Any `transformers` tokenizer with an EOS token.
        max_length: Longest prompt plus response, in tokens.
        max_prompt_length: Longest prompt; None leaves it to `max_length`.
        append_eos: Whether a response ends in EOS (its log-probability counts: without it the
            length of an answer cannot be learnt).
        separate: True for encoder-decoder models, where the two do not share a context.
    """

    tokenizer: Any
    max_length: int = 512
    max_prompt_length: int | None = None
    append_eos: bool = True
    separate: bool = False
    truncation: Truncation = field(default_factory=Truncation)

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError(f"max_length must be >= 2, got {self.max_length}")
        if self.max_prompt_length is not None and self.max_prompt_length < 1:
            raise ValueError(f"max_prompt_length must be >= 1, got {self.max_prompt_length}")
        if self.append_eos and self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no EOS token: set tokenizer.eos_token")

    def prompt(self, value: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a prompt given as text or as chat messages `{role, content}`."""
        if isinstance(value, str):
            ids = list(self.tokenizer(value)["input_ids"])
            eos = self.tokenizer.eos_token_id
            if len(ids) > 1 and ids[-1] == eos and not self.separate:
                ids.pop()  # some tokenizers close every text; a prompt goes on
            return ids
        return list(
            self.tokenizer(render_chat(self.tokenizer, value), add_special_tokens=False)[
                "input_ids"
            ]
        )

    def response(self, value: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a response, EOS included."""
        if not isinstance(value, str):
            value = "".join(message["content"] for message in value)
        ids = list(self.tokenizer(value, add_special_tokens=False)["input_ids"])
        return [*ids, self.tokenizer.eos_token_id] if self.append_eos else ids

    def fit(
        self, prompt: list[int], responses: Sequence[list[int]], index: int = 0
    ) -> tuple[list[int], list[list[int]]]:
        """Cut the prompt on the left and the responses on the right; the last token stays EOS.

        Raises:
            ValueError: No room is left for a response, or a response is empty.
        """
        whole = len(prompt)
        if self.max_prompt_length is not None and whole > self.max_prompt_length:
            prompt = prompt[-self.max_prompt_length :]
        room = self.max_length - (0 if self.separate else len(prompt))
        if room < 1:
            raise ValueError(
                f"row {index}: the prompt has {whole} tokens ({len(prompt)} after truncation) and "
                f"max_length is {self.max_length}: set max_prompt_length below max_length"
            )
        self.truncation.rows += 1
        self.truncation.prompts += whole > len(prompt)
        fitted = []
        for response in responses:
            if not response or (self.append_eos and len(response) == 1):
                raise ValueError(f"row {index}: empty response")
            if len(response) > room:
                self.truncation.responses += 1
                self.truncation.cut.append(index)
                last = [response[-1]] if self.append_eos else []
                response = response[: room - len(last)] + last
            fitted.append(response)
        return prompt, fitted


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    """The text of a conversation, ready for the assistant's next turn."""
    for message in messages:
        if not {"role", "content"} <= set(message):
            raise ValueError(
                f"a chat message needs role and content, got the keys {sorted(message)}"
            )
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "prompts are chat messages but the tokenizer has no chat template: set "
            "tokenizer.chat_template, or give prompts as text"
        )
    return str(
        tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    )


def pad_token_id(tokenizer: Any) -> int:
    """The id to pad with.

    Raises:
        ValueError: The tokenizer has no padding token.
    """
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "the tokenizer has no pad token: set tokenizer.pad_token = tokenizer.eos_token "
            "(masks come from lengths here, so sharing EOS is safe)"
        )
    return int(tokenizer.pad_token_id)


def pad(rows: Sequence[Sequence[int]], value: int, left: bool = False) -> tuple[Tensor, Tensor]:
    """Rows of ids to one `(rows, longest)` tensor and its mask; the mask comes from lengths."""
    width = max((len(row) for row in rows), default=0)
    ids = torch.full((len(rows), width), value, dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, where] = torch.tensor(row, dtype=torch.int64)
        mask[i, where] = 1
    return ids, mask


def join(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Prompt plus response, right padded: ids, attention mask, labels, each `(rows, length)`."""
    ids, mask = pad([[*p, *r] for p, r in zip(prompts, responses, strict=True)], pad_id)
    labels = ids.clone()
    column = torch.arange(ids.shape[1])
    start = torch.tensor([len(p) for p in prompts])[:, None]
    labels[(column < start) | (mask == 0)] = IGNORE
    return ids, mask, labels


@dataclass(frozen=True)
class PreferenceCollator:
    """Pairs to a `PreferenceBatch`; chosen and rejected get one common length."""

    pad_id: int

    def __call__(self, rows: Sequence[PairRecord]) -> PreferenceBatch:
        """Collate."""
        prompts = [row["prompt"] for row in rows]
        both = join(
            prompts * 2,
            [row["chosen"] for row in rows] + [row["rejected"] for row in rows],
            self.pad_id,
        )
        (ids, other_ids), (mask, other_mask), (labels, other_labels) = (x.chunk(2) for x in both)
        left, left_mask = pad(prompts, self.pad_id, left=True)

        def column(name: str) -> Tensor:
            values = [float(row.get(name, float("nan"))) for row in rows]  # type: ignore[arg-type]
            return torch.tensor(values, dtype=torch.float64).float()

        margin = column("margin")
        gap = column("reward_chosen") - column("reward_rejected")
        return PreferenceBatch(
            torch.tensor([row.get("index", i) for i, row in enumerate(rows)]),
            left,
            left_mask,
            ids,
            mask,
            labels,
            other_ids,
            other_mask,
            other_labels,
            column("ref_chosen_logps"),
            column("ref_rejected_logps"),
            torch.where(margin.isnan(), gap, margin),
        )


@dataclass(frozen=True)
class PromptCollator:
    """Rows `{prompt, response?}` to a `PromptBatch`."""

    pad_id: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> PromptBatch:
        """Collate."""
        prompts, mask = pad([row["prompt"] for row in rows], self.pad_id, left=True)
        target, target_mask = pad([row.get("response", ()) for row in rows], self.pad_id)
        index = torch.tensor([row.get("index", i) for i, row in enumerate(rows)])
        return PromptBatch(index, prompts, mask, target, target_mask)


@dataclass(frozen=True)
class SupervisedCollator:
    """Rows `{prompt, response}` to a `SupervisedBatch`."""

    pad_id: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> SupervisedBatch:
        """Collate."""
        index = torch.tensor([row.get("index", i) for i, row in enumerate(rows)])
        parts = join(
            [row["prompt"] for row in rows], [row["response"] for row in rows], self.pad_id
        )
        return SupervisedBatch(index, *parts)


def unpad(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """The real tokens of every row, as lists."""
    return [row[keep].tolist() for row, keep in zip(ids.cpu(), mask.cpu().bool(), strict=True)]
