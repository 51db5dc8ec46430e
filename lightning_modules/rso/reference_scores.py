"""Reference log-probabilities of fixed pairs: computed once, kept in the checkpoint and on disk."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_modules.components.language.encoding import PairRecord
from lightning_modules.components.language.reference import LogprobCache, data_fingerprint

Score = Callable[[list[PairRecord]], tuple[Tensor, Tensor]]
"""log pi_sft of chosen and rejected of all records, each `(records,)`."""


class ReferenceScores:
    """The scores of every split, with the fingerprints of what made them.

    Args:
        folder: Where they are kept between runs; None keeps them in the checkpoint only.
    """

    def __init__(self, folder: str | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.model = ""
        self.values: dict[str, tuple[str, Tensor, Tensor]] = {}

    def check_model(self, fingerprint: str) -> None:
        """Raise when a rebuilt reference is not the one that made the scores.

        Raises:
            ValueError: The fingerprints differ.
        """
        if self.model and fingerprint != self.model:
            raise ValueError(
                f"the reference rebuilt from backbone has fingerprint {fingerprint}, training "
                f"started from {self.model}: its weights were loaded by hand or changed; use "
                "reference=copy, which keeps the reference in the checkpoint"
            )

    def attach(
        self,
        records: Sequence[PairRecord],
        split: str,
        score: Score,
        model: Callable[[], str],
        tokenizer: str,
    ) -> list[PairRecord]:
        """Records with `ref_chosen_logps` and `ref_rejected_logps`.

        Values that the data bring are kept; else those of this run or checkpoint, then those on
        disk, are used; else they are computed.

        Args:
            records: Pairs.
            split: Name of the split.
            score: Computes what is missing.
            model: Fingerprint of the reference.
            tokenizer: Fingerprint of the tokenizer.
        """
        given = [
            math.isfinite(r.get("ref_chosen_logps", math.nan))
            and math.isfinite(r.get("ref_rejected_logps", math.nan))
            for r in records
        ]
        if all(given):
            return list(records)
        data = data_fingerprint(records)
        stored = self.values.get(split)
        if stored is None or stored[0] != data:
            chosen, rejected = self._load_or_score(records, split, score, model, tokenizer, data)
            self.values[split] = (data, chosen.double().cpu(), rejected.double().cpu())
        _, chosen, rejected = self.values[split]
        result = []
        for record, ours, theirs in zip(records, chosen.tolist(), rejected.tolist(), strict=True):
            row = PairRecord(**record)
            row["ref_chosen_logps"], row["ref_rejected_logps"] = ours, theirs
            result.append(row)
        return result

    def _load_or_score(
        self,
        records: Sequence[PairRecord],
        split: str,
        score: Score,
        model: Callable[[], str],
        tokenizer: str,
        data: str,
    ) -> tuple[Tensor, Tensor]:
        if self.folder is None:
            return score(list(records))
        path = self.folder / f"reference-{split}.npz"
        cache = LogprobCache(path, model(), tokenizer, data)
        found = cache.load()
        if found is not None:
            return found
        chosen, rejected = score(list(records))
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            cache.save(chosen, rejected)
        return chosen, rejected

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "model": self.model,
            "values": {k: [data, c.clone(), r.clone()] for k, (data, c, r) in self.values.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore."""
        self.model = state["model"]
        self.values = {k: (v[0], v[1], v[2]) for k, v in state["values"].items()}


def pack(records: Sequence[PairRecord]) -> dict[str, Tensor]:
    """Records as a few tensors, small and plain enough for a checkpoint."""
    packed: dict[str, Tensor] = {
        "index": torch.tensor([r.get("index", i) for i, r in enumerate(records)])
    }
    for name in ("prompt", "chosen", "rejected"):
        rows: list[list[int]] = [r[name] for r in records]  # type: ignore[literal-required]
        packed[name] = torch.tensor([t for row in rows for t in row], dtype=torch.int32)
        packed[f"{name}_lengths"] = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    for name in ("margin", "reward_chosen", "reward_rejected"):
        values = [float(r.get(name, math.nan)) for r in records]  # type: ignore[arg-type]
        packed[name] = torch.tensor(values, dtype=torch.float64)
    return packed


def unpack(packed: dict[str, Tensor]) -> list[PairRecord]:
    """Inverse of `pack`."""
    columns: dict[str, list[Any]] = {}
    for name in ("prompt", "chosen", "rejected"):
        parts = torch.split(packed[name], packed[f"{name}_lengths"].tolist())
        columns[name] = [part.tolist() for part in parts]
    for name in ("index", "margin", "reward_chosen", "reward_rejected"):
        columns[name] = packed[name].tolist()
    names = list(columns)
    return [
        PairRecord(**dict(zip(names, row, strict=True)))  # type: ignore[typeddict-item]
        for row in zip(*columns.values(), strict=True)
    ]
