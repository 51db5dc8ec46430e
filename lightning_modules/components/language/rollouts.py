"""Sampling with the KV cache; a prompt's candidates do not depend on who else is drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_modules.components.language.backbone import (
    recompute_activations,
    recomputes_activations,
)
from lightning_modules.components.language.counter import counter_uniform, purpose
from lightning_modules.components.language.logprobs import Support, unwrap

LENGTH, EOS, STOP = 0, 1, 2
"""Finish reasons: ran into the length limit, emitted EOS, met a stop sequence."""


class Rollout(NamedTuple):
    """Sampled responses, `candidates` consecutive rows per prompt.

    Attributes:
        index: `(rows,)` int64, the prompt's index in the data set.
        candidate: `(rows,)` int64, number of the candidate of that prompt.
        ids: `(rows, response)` int64, right padded; EOS included when it was emitted.
        mask: `(rows, response)` int64, from lengths, so padding may share EOS's id.
        logps: `(rows,)` float32, nats, under temperature 1 on the policy's support.
        sampling_logps: `(rows,)` float32, nats, under the distribution that was sampled.
        finish: `(rows,)` int64, see `LENGTH`, `EOS`, `STOP`.
    """

    index: Tensor  # type: ignore[assignment]
    candidate: Tensor
    ids: Tensor
    mask: Tensor
    logps: Tensor
    sampling_logps: Tensor
    finish: Tensor

    def responses(self) -> list[list[int]]:
        """Token ids of every row without padding."""
        lengths = self.mask.sum(-1).tolist()
        return [row[:n] for row, n in zip(self.ids.tolist(), lengths, strict=True)]


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn.

    Temperature and top-k sharpen the policy: what comes out is a sample of the sharpened policy,
    and `Rollout` holds log-probabilities under both.

    Args:
        max_new_tokens: Longest response.
        temperature: > 0; 0 means greedy.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens with this mass; 1 keeps all.
        stop: Token-id sequences that end a response (they are cut off).
        rows: Most rows in one call of `generate`.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[tuple[int, ...], ...] = ()
    rows: int = 256

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 keeps all tokens), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.rows < 1:
            raise ValueError(f"rows must be >= 1, got {self.rows}")


@dataclass
class _Drawer:
    """Logits processor that draws the next token itself, by inverse CDF of a counted uniform.

    It leaves only that token possible, so the greedy loop of `generate` picks it: the library's KV
    cache is used while no global generator is.
    """

    sampling: Sampling
    support: Support
    eos: Sequence[int]
    seed: int
    index: Tensor  # type: ignore[assignment]
    candidate: Tensor
    start: int | None = None
    logps: Tensor = field(init=False)
    sampling_logps: Tensor = field(init=False)
    length: Tensor = field(init=False)
    finish: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.logps = torch.zeros(len(self.index), dtype=torch.float64, device=self.index.device)
        self.sampling_logps = self.logps.clone()
        self.length = torch.zeros_like(self.index)
        self.finish = torch.full_like(self.index, LENGTH)

    def warp(self, scores: Tensor) -> Tensor:
        """Sharpen and cut the logits as the sampling options say."""
        if self.sampling.temperature > 0:
            scores = scores / self.sampling.temperature
        if 0 < self.sampling.top_k < scores.shape[-1]:
            least = scores.topk(self.sampling.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.sampling.top_p < 1:
            ordered, order = scores.sort(dim=-1, descending=True)
            mass = ordered.softmax(-1).cumsum(-1)
            drop = (mass - ordered.softmax(-1)) >= self.sampling.top_p
            scores = scores.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
        return scores

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.start is None:
            self.start = input_ids.shape[1]
        step = input_ids.shape[1] - self.start
        raw = self.support.apply(scores.double())
        warped = self.warp(raw)
        if self.sampling.temperature == 0:
            token = warped.argmax(-1)
        else:
            uniform = counter_uniform(
                self.seed, purpose("rollout"), self.index, self.candidate, step
            )
            cumulative = warped.softmax(-1).cumsum(-1)
            threshold = (uniform * cumulative[:, -1])[:, None]
            token = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
        alive = self.finish == LENGTH
        picked = raw.log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)
        drawn = warped.log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)
        greedy = self.sampling.temperature == 0
        self.logps += torch.where(alive, picked, 0.0)
        self.sampling_logps += torch.where(alive, torch.zeros_like(drawn) if greedy else drawn, 0.0)
        self.length += alive
        ended = torch.isin(token, torch.tensor(list(self.eos), device=token.device))
        self.finish = torch.where(alive & ended, EOS, self.finish)
        self._stop(torch.cat([input_ids, token[:, None]], 1)[:, self.start :])
        return torch.full_like(scores, -torch.inf).scatter_(-1, token[:, None], 0.0)

    def _stop(self, response: Tensor) -> None:
        for sequence in self.sampling.stop:
            if len(sequence) > response.shape[1]:
                continue
            tail = response[:, -len(sequence) :]
            met = (tail == torch.tensor(sequence, device=tail.device)).all(-1)
            met &= self.finish == LENGTH
            self.finish = torch.where(met, STOP, self.finish)
            self.length = torch.where(met, self.length - len(sequence), self.length)

    def finished(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Stopping criterion, row by row."""
        return self.finish != LENGTH


def generate(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    index: Tensor,
    candidates: int,
    sampling: Sampling,
    seed: int,
    eos: int | Sequence[int],
    pad_id: int,
    support: Support | None = None,
    first_candidate: int = 0,
    synced: bool = False,
) -> Rollout:
    """Draw responses to left-padded prompts.

    The token at (prompt index, candidate, step) uses the uniform number hashed from these and the
    seed, so a result does not depend on the order of prompts, on `sampling.rows`, or on how many
    processes share the work. (Padding changes logits in the last bits; a draw within 1e-6 of a
    boundary of the distribution can still differ. Fixed shards, as in the pipeline, exclude that.)

    Args:
        model: `transformers` model with `generate`.
        prompt_ids: `(prompts, length)` int64, left padded.
        prompt_mask: `(prompts, length)`.
        index: `(prompts,)` int64, global index of every prompt.
        candidates: Responses per prompt.
        sampling: Temperature and limits.
        seed: Seed of the draw.
        eos: Token id(s) that end a response.
        pad_id: Id written after the end.
        support: What the policy may emit; give the same to `sequence_logprobs`.
        first_candidate: Number of the first candidate, to continue an earlier draw.
        synced: All processes must step together (sharded models).

    Returns:
        `prompts * candidates` rows, the candidates of a prompt together.
    """
    if candidates < 1:
        raise ValueError(f"candidates must be >= 1, got {candidates}")
    if prompt_mask.numel() and not bool(prompt_mask[:, -1].all()):
        raise ValueError("prompts must be padded on the left for generation")
    eos_ids = [eos] if isinstance(eos, int) else list(eos)
    rows = index.repeat_interleave(candidates)
    number = torch.arange(candidates, device=index.device).repeat(len(index)) + first_candidate
    parts = []
    device = prompt_ids.device
    for start in range(0, len(rows), sampling.rows):
        take = slice(start, start + sampling.rows)
        prompt = torch.arange(len(index), device=device).repeat_interleave(candidates)[take]
        drawer = _Drawer(
            sampling, support or Support(), eos_ids, seed, rows[take].to(device),
            number[take].to(device),
        )  # fmt: skip
        ids = _call(model, prompt_ids[prompt], prompt_mask[prompt], drawer, eos_ids, pad_id, synced)
        ids = ids[:, drawer.start :]
        column = torch.arange(ids.shape[1], device=device)
        mask = column < drawer.length[:, None]
        parts.append((ids.masked_fill(~mask, pad_id), mask.long(), drawer))
    width = max(int(mask.sum(-1).max()) for _, mask, _ in parts)

    def stack(pieces: list[Tensor], fill: int) -> Tensor:
        fitted = [nn.functional.pad(p, (0, width - p.shape[1]), value=fill) for p in pieces]
        return torch.cat(fitted)

    return Rollout(
        rows,
        number,
        stack([ids for ids, _, _ in parts], pad_id),
        stack([mask for _, mask, _ in parts], 0),
        torch.cat([drawer.logps for *_, drawer in parts]).float(),
        torch.cat([drawer.sampling_logps for *_, drawer in parts]).float(),
        torch.cat([drawer.finish for *_, drawer in parts]),
    )


def _call(
    model: nn.Module,
    ids: Tensor,
    mask: Tensor,
    drawer: _Drawer,
    eos: list[int],
    pad_id: int,
    synced: bool,
) -> Tensor:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    inner: Any = unwrap(model)
    own = inner.generation_config
    training = model.training
    recomputing = recomputes_activations(inner)
    # A hub model's own generation config may hold warpers (top-k, repetition penalty) that would
    # change the distribution behind the sampler's back: it is set aside for the call.
    inner.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        num_beams=1,
        max_new_tokens=drawer.sampling.max_new_tokens,
        eos_token_id=eos,
        pad_token_id=pad_id,
        bos_token_id=own.bos_token_id,
        decoder_start_token_id=own.decoder_start_token_id,
    )
    model.eval()
    if recomputing:
        recompute_activations(inner, False)
    try:
        with torch.no_grad():
            return model.generate(  # type: ignore[operator,no-any-return]
                input_ids=ids,
                attention_mask=mask,
                logits_processor=LogitsProcessorList([drawer]),
                stopping_criteria=StoppingCriteriaList([drawer.finished]),
                synced_gpus=synced,
            )
    finally:
        inner.generation_config = own
        model.train(training)
        if recomputing:
            recompute_activations(inner, True)
