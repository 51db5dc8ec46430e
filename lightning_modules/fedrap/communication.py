"""Bytes that a round sends."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

INDEX_BYTES = 4


class Traffic(NamedTuple):
    """Bytes of one round over all participants.

    ``down`` and ``up`` are what is sent with the cheaper of the two encodings, ``dense`` what both
    directions cost with dense tables; ``clients`` is the number of participants.
    """

    down: int
    up: int
    dense: int
    clients: int


def encoded_bytes(nonzeros: Tensor, entries: int, value_bytes: int = 4) -> Tensor:
    """Bytes of one table per message: the smaller of dense and coordinate form.

    The coordinate form holds a flat 32-bit index and a value for every non-zero entry.

    Args:
        nonzeros: Non-zero entries per message, int64.
        entries: Entries of the table.
        value_bytes: Bytes of a value.
    """
    return torch.minimum(
        nonzeros * (value_bytes + INDEX_BYTES),
        torch.full_like(nonzeros, entries * value_bytes),
    )


def sparsity(common: Tensor, threshold: float = 1e-4) -> float:
    """Share of entries with ``|c| <= threshold``."""
    return float((common.abs() <= threshold).double().mean())
