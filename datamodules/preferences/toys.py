"""Synthetic preference tasks whose true reward is known."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_modules.components.language.encoding import PairRecord

Ids = Sequence[int]


class Task:
    """What every synthetic task offers.

    Attributes:
        tokenizer: `transformers` tokenizer, or None where a response is one token id.
        eos: Id that ends a response.
        pad: Padding id.
        allowed: Ids that a policy may emit; None for all.
        max_new_tokens: Longest response.
        comparison_template: Ids of a `ComparisonTemplate`, or None.
    """

    comparison_template: dict[str, Any] | None = None
    tokenizer: Any = None
    eos: int = 0
    pad: int = 0
    allowed: list[int] | None = None
    max_new_tokens: int = 1

    def gold(self, prompts: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
        """True rewards `(rows,)`."""
        raise TypeError(f"{type(self).__name__} must define gold")

    def pairs(self, number: int, rng: np.random.Generator) -> list[PairRecord]:
        """Human preference pairs of two different responses each."""
        records: list[PairRecord] = []
        while len(records) < number:
            records += self.draw_pairs(number, rng)
        records = records[:number]
        for index, record in enumerate(records):
            record["index"] = index
        return records

    def draw_pairs(self, number: int, rng: np.random.Generator) -> list[PairRecord]:
        """At most so many pairs."""
        raise TypeError(f"{type(self).__name__} must define draw_pairs")

    def prompts(self, number: int, rng: np.random.Generator) -> list[dict[str, Any]]:
        """Unlabelled prompts with a reference answer."""
        raise TypeError(f"{type(self).__name__} must define prompts")

    def demonstrations(self, number: int, rng: np.random.Generator) -> list[dict[str, Any]]:
        """Prompts with good answers."""
        return self.prompts(number, rng)

    def labelled(
        self, prompts: list[list[int]], first: list[list[int]], second: list[list[int]],
        rng: np.random.Generator,
    ) -> list[PairRecord]:  # fmt: skip
        """Bradley-Terry labels of the true reward on given responses; equal ones are left out."""
        gap = self.gold(prompts, first) - self.gold(prompts, second)
        wins = torch.from_numpy(rng.random(len(prompts))) < gap.double().sigmoid()
        records: list[PairRecord] = []
        for x, a, b, win in zip(prompts, first, second, wins.tolist(), strict=True):
            if a != b:
                better, worse = (a, b) if win else (b, a)
                records.append(
                    PairRecord(index=len(records), prompt=x, chosen=better, rejected=worse)
                )
        return records


def poisson(longest: int, mean: float) -> np.ndarray:
    """Poisson probabilities renormalised on 0..longest."""
    n = np.arange(longest + 1)
    log = n * np.log(mean) - np.cumsum(np.log(np.maximum(n, 1)))
    law = np.exp(log - log.max())
    return law / law.sum()  # type: ignore[no-any-return]


class LengthTilt(Task):
    """A response is a length n in 0..16; the reward -(n - 9)^2 / 6 bends where good answers are.

    The SFT policy is Poisson(5), human pairs come from Poisson(3), both renormalised. Pairs from
    either say "longer is better"; only pairs near the optimum say where to stop.

    Args:
        longest: M.
        human_mean: Mean of the law of human pairs.
        sft_mean: Mean of the SFT law, from which reference answers come.
        target: Best length.
        scale: Divisor of the squared distance.
    """

    def __init__(
        self,
        longest: int = 16,
        human_mean: float = 3.0,
        sft_mean: float = 5.0,
        target: float = 9.0,
        scale: float = 6.0,
    ) -> None:
        self.longest = longest
        self.human_law = poisson(longest, human_mean)
        self.sft_law = poisson(longest, sft_mean)
        self.target, self.scale = target, scale
        self.prompt = [longest + 1]

    def gold(self, prompts: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
        """-(n - target)^2 / scale, `(rows,)`."""
        length = torch.tensor([float(response[0]) for response in responses])
        return -((length - self.target) ** 2) / self.scale

    def draw_pairs(self, number: int, rng: np.random.Generator) -> list[PairRecord]:
        """Two different lengths of the human law, labelled with Bradley-Terry odds."""
        draw = rng.choice(self.longest + 1, size=(2 * number, 2), p=self.human_law)
        first, second = ([[int(n)] for n in column] for column in draw.T)
        return self.labelled([self.prompt] * len(first), first, second, rng)

    def prompts(self, number: int, rng: np.random.Generator) -> list[dict[str, Any]]:
        """The one prompt, with answers of the SFT law."""
        answers = rng.choice(self.longest + 1, size=number, p=self.sft_law)
        return [
            {"index": i, "prompt": self.prompt, "response": [int(n)]} for i, n in enumerate(answers)
        ]


class FiniteSet(Task):
    """24 enumerable responses per prompt with normal rewards, for exact checks.

    Args:
        responses: Number of responses.
        contexts: Number of prompts.
        reward_seed: Seed of the rewards.
    """

    def __init__(self, responses: int = 24, contexts: int = 4, reward_seed: int = 0) -> None:
        self.responses, self.contexts = responses, contexts
        rng = np.random.default_rng(reward_seed)
        self.reward = torch.from_numpy(rng.normal(size=(contexts, responses))).float()

    def gold(self, prompts: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
        """Table look-up, `(rows,)`."""
        row = torch.tensor([p[-1] - self.responses for p in prompts], dtype=torch.int64)
        return self.reward[row, torch.tensor([r[0] for r in responses], dtype=torch.int64)]

    def draw_pairs(self, number: int, rng: np.random.Generator) -> list[PairRecord]:
        """Two different uniform responses to a uniform prompt."""
        first = rng.integers(0, self.responses, number)
        second = (first + rng.integers(1, self.responses, number)) % self.responses
        prompts = [[int(self.responses + k)] for k in rng.integers(0, self.contexts, number)]
        return self.labelled(prompts, [[int(n)] for n in first], [[int(n)] for n in second], rng)

    def prompts(self, number: int, rng: np.random.Generator) -> list[dict[str, Any]]:
        """Prompts in turn, with uniform answers."""
        answers = rng.integers(0, self.responses, number)
        return [
            {"index": i, "prompt": [self.responses + i % self.contexts], "response": [int(n)]}
            for i, n in enumerate(answers)
        ]


class LengthTarget(Task):
    """Words of a wanted length for a tiny language model: tokenizer, EOS and all.

    Four keys; a prompt is BOS and a key, a response L letters of a 4-letter alphabet and EOS (none
    when L = 16). The reward is -(L - L*_key)^2 / 6.

    Args:
        targets: L* of every key.
        broad: Share of human pairs whose lengths are uniform in 1..15; the rest is Poisson(3).
    """

    def __init__(self, targets: Sequence[int] = (6, 7, 8, 9), broad: float = 0.5) -> None:
        from lightning_modules.components.language.tokenizers import character_tokenizer

        if not 0 <= broad <= 1:
            raise ValueError(f"broad must be in [0, 1], got {broad}")
        self.targets, self.broad = tuple(targets), broad
        keys = [f"<k{k}>" for k in range(len(self.targets))]
        marks = ["<first>", "<second>", "<answer>", "<A>", "<B>"]
        self.tokenizer = character_tokenizer("abcd", specials=[*keys, *marks])
        self.eos, self.pad = 1, 0
        self.first_key = 3
        first, second, answer, label_a, label_b = range(3 + len(keys), 8 + len(keys))
        self.comparison_template = {
            "context": [],
            "first": [first],
            "second": [second],
            "answer": [answer],
            "label_a": label_a,
            "label_b": label_b,
        }
        self.first_letter = 8 + len(keys)
        self.allowed = [self.eos, *range(self.first_letter, self.first_letter + 4)]
        self.max_new_tokens = 16

    def gold(self, prompts: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
        """-(L - L*)^2 / 6, `(rows,)`."""
        length = [float(sum(token >= self.first_letter for token in r)) for r in responses]
        target = [float(self.targets[p[-1] - self.first_key]) for p in prompts]
        return -((torch.tensor(length) - torch.tensor(target)) ** 2) / 6

    def _prompts(self, number: int, rng: np.random.Generator) -> list[list[int]]:
        keys = rng.integers(0, len(self.targets), number)
        return [[2, int(self.first_key + k)] for k in keys]

    def _word(self, length: int, rng: np.random.Generator) -> list[int]:
        letters = (self.first_letter + rng.integers(0, 4, length)).tolist()
        return letters if length == self.max_new_tokens else [*letters, self.eos]

    def draw_pairs(self, number: int, rng: np.random.Generator) -> list[PairRecord]:
        """Labels are Bernoulli(sigma(r1 - r2))."""
        prompts = self._prompts(number, rng)
        wide = rng.random(number) < self.broad
        lengths = np.where(
            wide[:, None],
            rng.integers(1, 16, (number, 2)),
            rng.poisson(3, (number, 2)).clip(1, self.max_new_tokens),
        )
        first, second = ([self._word(int(n), rng) for n in column] for column in lengths.T)
        return self.labelled(prompts, first, second, rng)

    def prompts(self, number: int, rng: np.random.Generator) -> list[dict[str, Any]]:
        """Uniform keys with answers like the demonstrations."""
        lengths = rng.poisson(5, number).clip(1, self.max_new_tokens)
        return [
            {"index": i, "prompt": prompt, "response": self._word(int(n), rng)}
            for i, (prompt, n) in enumerate(zip(self._prompts(number, rng), lengths, strict=True))
        ]


TASKS: dict[str, type[Task]] = {
    "length_tilt": LengthTilt,
    "length_target": LengthTarget,
    "finite_set": FiniteSet,
}
