"""Reference log-probabilities that are computed once and kept, with proof of what made them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_modules.components.sharding import full


def model_fingerprint(model: nn.Module, samples: int = 4096) -> str:
    """Hash of all parameters by name: the same weights give the same text on every device.

    Of a large parameter so many evenly spaced entries are hashed: an optimiser step moves all of
    them, and billions of weights are fingerprinted in seconds.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        value = full(parameter.detach()).reshape(-1)
        digest.update(f"{name}{tuple(parameter.shape)}{value.dtype}".encode())
        # a copy: `numpy` would pin the storage, which FSDP2 must be able to free
        taken = value[:: max(1, value.numel() // samples)].cpu().clone()
        digest.update(taken.view(torch.uint8).numpy().tobytes() if taken.numel() else b"")
    return digest.hexdigest()[:16]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of a tokenizer's vocabulary; pairs stored as token ids are only valid with it."""
    if tokenizer is None:
        return "none"
    text = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def data_fingerprint(rows: Sequence[Mapping[str, Any]]) -> str:
    """Hash of the token ids of pairs or prompts, in order."""
    digest = hashlib.sha256()
    for row in rows:
        keys = [key for key in ("prompt", "chosen", "rejected", "response") if key in row]
        digest.update(json.dumps([list(row[key]) for key in keys]).encode())
    return digest.hexdigest()[:16]


class LogprobCache:
    """Reference log-probabilities of a fixed set of pairs on disk.

    Args:
        path: An `.npz` file.
        model: Fingerprint of the reference.
        tokenizer: Fingerprint of the tokenizer.
        data: Fingerprint of the pairs.
    """

    def __init__(self, path: str | Path, model: str, tokenizer: str, data: str) -> None:
        self.path = Path(path)
        self.key = {"model": model, "tokenizer": tokenizer, "data": data}

    def save(self, chosen: Tensor, rejected: Tensor) -> Path:
        """Write `(pairs,)` log-probabilities with the three fingerprints, in one step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial.npz")
        values: dict[str, Any] = {"chosen": chosen, "rejected": rejected}
        values = {name: value.cpu().double().numpy() for name, value in values.items()} | self.key
        np.savez(partial, **values)
        partial.replace(self.path)
        return self.path

    def load(self) -> tuple[Tensor, Tensor] | None:
        """The stored values, or None when there is no file.

        Raises:
            ValueError: The file was made by another reference, tokenizer or data.
        """
        if not self.path.exists():
            return None
        with np.load(self.path) as stored:
            for name, wanted in self.key.items():
                if str(stored[name]) != wanted:
                    raise ValueError(
                        f"the reference log-probabilities in {self.path} were made with another "
                        f"{name} (fingerprint {stored[name]}, now {wanted}): delete the file to "
                        "compute them again"
                    )
            return torch.from_numpy(stored["chosen"]), torch.from_numpy(stored["rejected"])
