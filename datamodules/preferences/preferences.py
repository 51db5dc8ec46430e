"""Preference pairs, prompts and demonstrations for language-model alignment."""

import json
import lzma
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from datamodules.base import (
    BatchedDataset,
    Collated,
    EvaluationOrder,
    ResumableLoader,
    SuiteDataModule,
    split,
)
from datamodules.preferences.formats import Example, Kind, parse, read_rows
from datamodules.preferences.toys import TASKS, Ids, Task
from lightning_modules.components.language.encoding import (
    Encoder,
    PairRecord,
    PreferenceCollator,
    PromptCollator,
    SupervisedCollator,
    Truncation,
    pad_token_id,
)
from lightning_modules.components.language.reference import tokenizer_fingerprint
from lightning_modules.components.language.tokenizers import (
    english_corpus,
    load_tokenizer,
    train_byte_bpe,
)

HH = "https://huggingface.co/datasets/Anthropic/hh-rlhf/resolve/main/helpful-base"
HUB = {"hh_helpful": (f"{HH}/train.jsonl.gz", f"{HH}/test.jsonl.gz")}


class Preferences(SuiteDataModule):
    """Preference pairs, with the prompts and demonstrations that go with them.

    Synthetic sources with a known reward: `length_tilt` (a response is a length), `length_target`
    (words for a tiny language model), `finite_set` (24 responses per prompt). Embedded real ones:
    `llmbar` (419 judged pairs, meant for evaluation) and `english` (plain text to try supervised
    fine-tuning on). `hh_helpful` is downloaded. Anything else is the path of a file of yours, see
    `datamodules.preferences.formats` for the columns.

    Pairs that a method makes itself replace the training pairs: when a loader of pairs is built
    and the module has `prepare_pairs(records, split, datamodule)`, that call may return others.

    Args:
        source: See above.
        task: `pairs` gives `PreferenceBatch`, `demonstrations` gives `SupervisedBatch`, `prompts`
            gives `PromptBatch`. For prediction it is always prompts.
        tokenizer: Hub id, folder, or `byte_bpe` (trained on the data). Synthetic sources have their
            own.
        max_length: Longest prompt plus response in tokens; prompts are cut on the left, responses
            on the right, EOS is kept.
        max_prompt_length: Longest prompt.
        pairs_file: Pairs written by a pipeline (token ids, with provenance), instead of the
            training pairs of the source.
        prompts_file: Unlabelled prompts to sample answers to; default the source's own.
        val_file: Validation pairs; default a part of the source.
        val_fraction: That part.
        n_train: Rows of a synthetic source, or the most to take of a file; None takes 768 or all.
        n_val: The same for validation and test.
        n_prompts: The same for prompts to sample answers to.
        vocab_size: Size of a `byte_bpe` tokenizer.
        targets: Wanted lengths of `length_target`.
        broad: Share of human pairs of `length_target` with uniform lengths.
        batch_size: Rows per batch and device.
        seed: Seed of synthetic data, splits and orders.
        num_workers: Worker processes of each loader.
        cache_dir: Folder of downloads.
        sampling: How training batches are drawn.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        source: str = "length_tilt",
        task: Literal["pairs", "demonstrations", "prompts"] = "pairs",
        tokenizer: str | None = None,
        max_length: int = 512,
        max_prompt_length: int | None = None,
        pairs_file: str | None = None,
        prompts_file: str | None = None,
        val_file: str | None = None,
        val_fraction: float = 0.1,
        n_train: int | None = None,
        n_val: int | None = None,
        n_prompts: int | None = None,
        vocab_size: int = 512,
        targets: list[int] | None = None,
        broad: float = 0.5,
        batch_size: int = 32,
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
        sampling: str = "shuffle",
    ) -> None:
        super().__init__(source, batch_size, seed, num_workers, cache_dir, sampling)
        if task not in ("pairs", "demonstrations", "prompts"):
            raise ValueError(f"task must be pairs, demonstrations or prompts, got '{task}'")
        for name, value in (("n_train", n_train), ("n_val", n_val), ("n_prompts", n_prompts)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction must be in (0, 1), got {val_fraction}")
        self.synthetic = source in TASKS
        if not self.synthetic and tokenizer is None:
            if source not in ("llmbar", "english", *HUB) and not Path(source).exists():
                known = ", ".join([*TASKS, "llmbar", "english", *HUB])
                raise ValueError(f"source must be one of {known}, or a file, got '{source}'")
            raise ValueError(f"source='{source}' needs tokenizer: a hub id, a folder or byte_bpe")
        self.task_name = task
        self.tokenizer_source = tokenizer
        self.max_length, self.max_prompt_length = max_length, max_prompt_length
        self.pairs_file, self.prompts_file, self.val_file = pairs_file, prompts_file, val_file
        self.val_fraction = val_fraction
        self.n_train, self.n_val, self.n_prompts = n_train, n_val, n_prompts
        self.vocab_size = vocab_size
        self.targets, self.broad = targets, broad
        self.toy: Task | None = None
        self.tokenizer: Any = None
        self.truncation = Truncation()
        self.records: dict[str, list[Any]] = {}
        self.prompts: list[dict[str, Any]] = []

    # ------------------------------------------------------------------ what methods may ask

    @property
    def eos_token_id(self) -> int | None:
        """Id that ends a response."""
        return self.toy.eos if self.toy else self.tokenizer.eos_token_id if self.tokenizer else None

    @property
    def pad_token_id(self) -> int:
        """Id of padding."""
        return self.toy.pad if self.toy else pad_token_id(self.tokenizer)

    @property
    def allowed_tokens(self) -> list[int] | None:
        """Ids that a policy may emit, None for all."""
        return self.toy.allowed if self.toy else None

    @property
    def max_new_tokens(self) -> int | None:
        """Longest response of a synthetic source."""
        return self.toy.max_new_tokens if self.toy else None

    @property
    def comparison_template(self) -> dict[str, Any] | None:
        """How a synthetic source puts two responses side by side."""
        return self.toy.comparison_template if self.toy else None

    @property
    def has_gold(self) -> bool:
        """Whether the true reward is known."""
        return self.toy is not None

    def gold_reward(self, prompts: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
        """True rewards `(rows,)` of a synthetic source.

        Raises:
            ValueError: The source has none.
        """
        if self.toy is None:
            raise ValueError(
                f"source='{self.source}' has no known reward: give the module a reward model"
            )
        return self.toy.gold(prompts, responses)

    # ------------------------------------------------------------------ reading

    def prepare_data(self) -> None:
        """Download once."""
        for url in HUB.get(self.source, ()):
            self.fetch(url, None)

    def setup(self, stage: str | None = None) -> None:
        """Read, encode and split."""
        if self.records:
            return
        if self.synthetic:
            self._setup_toy()
        else:
            self._setup_text()
        if self.pairs_file is not None and self.task_name == "pairs":
            self.records["train"] = read_pairs(
                self.pairs_file, tokenizer_fingerprint(self.tokenizer)
            )
        if self.truncation.prompts or self.truncation.responses:
            rank_zero_warn(f"truncation: {self.truncation}")
        for name in ("train", "val", "test"):
            if name in self.records:
                setattr(self, f"{name}_set", self._collated(self.records[name]))
        self.predict_set = Collated(self.prompts, PromptCollator(self.pad_token_id))

    def _collated(self, records: list[Any]) -> Collated:
        collate: Any = {
            "pairs": PreferenceCollator,
            "demonstrations": SupervisedCollator,
            "prompts": PromptCollator,
        }[self.task_name]
        return Collated(records, collate(self.pad_token_id))

    def _setup_toy(self) -> None:
        options: dict[str, Any] = {}
        if self.source == "length_target":
            options = {"targets": self.targets or (6, 7, 8, 9), "broad": self.broad}
        self.toy = TASKS[self.source](**options)
        self.tokenizer = self.toy.tokenizer
        sizes = {"train": self.n_train or 768, "val": self.n_val or 256, "test": self.n_val or 256}
        for number, (name, size) in enumerate(sizes.items()):
            rng = np.random.default_rng([self.seed, number])
            makers: dict[str, Any] = {
                "pairs": self.toy.pairs,
                "demonstrations": self.toy.demonstrations,
                "prompts": self.toy.prompts,
            }
            self.records[name] = makers[self.task_name](size, rng)
        rng = np.random.default_rng([self.seed, 9])
        self.prompts = self.toy.prompts(self.n_prompts or 192, rng)

    def _texts(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Rows of training, and of evaluation where the source has its own."""
        if self.source == "llmbar":
            path = Path(str(files("datamodules"))) / "assets" / "llmbar" / "llmbar.jsonl.xz"
            with lzma.open(path, "rt", encoding="utf-8") as file:
                return [json.loads(line) for line in file], None
        if self.source == "english":
            return demonstrations_of(english_corpus()), None
        if self.source in HUB:
            train, test = (read_rows(self.fetch(url, None)) for url in HUB[self.source])
            return train, test
        return read_rows(self.source), read_rows(self.val_file) if self.val_file else None

    def _setup_text(self) -> None:
        kind: Kind = self.task_name
        rows, held_out = self._texts()
        examples = parse(rows, kind)
        if held_out is None:
            if len(examples) < 3:
                raise ValueError(f"source='{self.source}' has {len(examples)} rows, needs 3")
            share = max(self.val_fraction, 1 / len(examples))
            kept = max(1 - 2 * share, 1 / len(examples))
            order, rest = (part.tolist() for part in split(len(examples), [kept], self.seed))
            groups = {"train": order, "val": rest[::2], "test": rest[1::2] or rest[::2]}
            chosen = {name: [examples[i] for i in group] for name, group in groups.items()}
        else:
            others = parse(held_out, kind)
            chosen = {"train": examples, "val": others, "test": others}
        self.tokenizer = self._load_tokenizer(chosen["train"])
        encoder = Encoder(
            self.tokenizer, self.max_length, self.max_prompt_length, truncation=self.truncation
        )
        limits = {"train": self.n_train, "val": self.n_val, "test": self.n_val}
        for name, group in chosen.items():
            self.records[name] = [self._encode(encoder, e) for e in group[: limits[name]]]
        if self.prompts_file is not None:
            found = parse(read_rows(self.prompts_file), "prompts")
        else:
            found = distinct_prompts(chosen["train"])
        self.prompts = [
            self._encode(encoder, e._replace(index=i), "prompts")
            for i, e in enumerate(found[: self.n_prompts])
        ]

    def _load_tokenizer(self, examples: Sequence[Example]) -> Any:
        if self.tokenizer_source == "byte_bpe":
            texts = [e.prompt for e in examples] + [e.chosen for e in examples]
            return train_byte_bpe([t for t in texts if isinstance(t, str)], self.vocab_size)
        assert self.tokenizer_source is not None
        tokenizer = load_tokenizer(self.tokenizer_source)
        pad_token_id(tokenizer)
        return tokenizer

    def _encode(self, encoder: Encoder, example: Example, task: str | None = None) -> Any:
        task = task or self.task_name
        prompt = encoder.prompt(example.prompt)
        if task == "pairs":
            assert example.chosen is not None
            assert example.rejected is not None
            texts = [encoder.response(t) for t in (example.chosen, example.rejected)]
            prompt, (better, worse) = encoder.fit(prompt, texts, example.index)
            return PairRecord(
                index=example.index, prompt=prompt, chosen=better, rejected=worse,
                **example.numbers,  # type: ignore[typeddict-item]
            )  # fmt: skip
        answers = [] if example.chosen is None else [encoder.response(example.chosen)]
        prompt, fitted = encoder.fit(prompt, answers, example.index)
        row: dict[str, Any] = {"index": example.index, "prompt": prompt}
        return {**row, "response": fitted[0]} if fitted else row

    # ------------------------------------------------------------------ loaders

    def _loader(self, name: str, train: bool = False) -> ResumableLoader[Any]:
        loader = super()._loader(name, train)
        world = self._ranks()[1]
        if train or world == 1 or not _sharded(self.trainer):
            return loader
        # a sharded model runs on all ranks or on none: each gets the same number of batches
        rows = EvenRows(loader.dataset, world)
        order = EvaluationOrder(len(rows), self.batch_size, *self._ranks())
        return ResumableLoader(rows, order, self.num_workers)

    def _pairs_of_module(self, name: str) -> None:
        """Let the module add to, or replace, the pairs of a split before its loader is built."""
        module = self.trainer.lightning_module if self.trainer else None
        prepare = getattr(module, "prepare_pairs", None)
        if self.task_name != "pairs" or prepare is None or name not in self.records:
            return
        records = prepare(self.records[name], name, self)
        if not records:
            raise ValueError("no preference pair is left to train on: lower min_margin or beta")
        setattr(self, f"{name}_set", self._collated(records))

    def train_dataloader(self) -> ResumableLoader[Any]:
        """Loader of training pairs, which the module may have made."""
        self._pairs_of_module("train")
        return super().train_dataloader()

    def val_dataloader(self) -> ResumableLoader[Any]:
        """Loader of validation pairs."""
        self._pairs_of_module("val")
        return super().val_dataloader()

    def test_dataloader(self) -> ResumableLoader[Any]:
        """Loader of test pairs."""
        self._pairs_of_module("test")
        return super().test_dataloader()


class EvenRows:
    """Rows up to a multiple of the number of ranks; `index` is -1 in those that are not there.

    Args:
        dataset: Gives a batch with a field `index` for a list of indices.
        ranks: Number of ranks.
    """

    def __init__(self, dataset: BatchedDataset, ranks: int) -> None:
        self.dataset = dataset
        self.ranks = ranks

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.ranks) * self.ranks

    def __getitem__(self, indices: list[int]) -> Any:
        size = len(self.dataset)
        batch = self.dataset[[i if i < size else 0 for i in indices]]
        extra = torch.tensor([i >= size for i in indices])
        return batch._replace(index=batch.index.masked_fill(extra, -1))


def _sharded(trainer: Any) -> bool:
    return "ModelParallel" in type(trainer.strategy).__name__


def distinct_prompts(examples: Sequence[Example]) -> list[Example]:
    """One example per prompt, in order of first appearance."""
    seen: dict[str, Example] = {}
    for example in examples:
        seen.setdefault(json.dumps(example.prompt, sort_keys=True), example)
    return list(seen.values())


def demonstrations_of(texts: Sequence[str], words: int = 24) -> list[dict[str, Any]]:
    """Cut plain text into prompts and continuations of so many words each."""
    rows = []
    for text in texts:
        parts = text.split()
        for start in range(0, len(parts) - 2 * words + 1, 2 * words):
            middle = start + words
            rows.append(
                {
                    "prompt": " ".join(parts[start:middle]) + " ",
                    "response": " ".join(parts[middle : middle + words]),
                }
            )
    return rows


def read_pairs(path: str | Path, tokenizer: str) -> list[PairRecord]:
    """Pairs that a pipeline wrote: a line of provenance, then one pair of token ids per line.

    Args:
        path: The file.
        tokenizer: Fingerprint of the tokenizer in use.

    Raises:
        ValueError: The file has no provenance, or was made with another tokenizer.
    """
    rows = read_rows(path)
    provenance = rows[0].get("provenance") if rows else None
    if not isinstance(provenance, dict):
        raise ValueError(f"{path} does not begin with a line of provenance: is it a pairs file?")
    if provenance.get("tokenizer") != tokenizer:
        raise ValueError(
            f"the pairs in {path} hold token ids of another tokenizer (fingerprint "
            f"{provenance.get('tokenizer')}, now {tokenizer}): make them again, or use that one"
        )
    rank_zero_info(f"{len(rows) - 1} pairs from {path}")
    keys = PairRecord.__annotations__
    return [PairRecord(**{k: v for k, v in row.items() if k in keys}) for row in rows[1:]]  # type: ignore[typeddict-item]
