"""Corruption of residue types for masked modelling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_modules.components.randomness import generator_from
from lightning_modules.ppiformer.residues import one_hot


class Masking(NamedTuple):
    """Corrupted input and the residues to predict.

    Attributes:
        features: (nodes, 20), one-hot types; zero rows where hidden.
        masked: (nodes,) bool, all residues that enter the loss.
    """

    features: Tensor
    masked: Tensor


def masked_count(ratio: float, residues: int) -> int:
    """How many of `residues` are masked: at least one, halves rounded to even."""
    return max(1, round(ratio * residues))


def mask_residues(
    types: Tensor,
    chain: Tensor,
    ptr: Sequence[int],
    keys: Sequence[tuple[object, ...]],
    ratio: float = 0.5,
    same_chain: bool = True,
    bert: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Masking:
    """Mask residues of every graph of a batch, each graph with its own random numbers.

    A graph's mask depends on its key alone, so it is the same in any batch and on any rank.

    Args:
        types: (nodes,) int64.
        chain: (nodes,) int64.
        ptr: first node of every graph, and the number of nodes at the end.
        keys: per graph the key of its random numbers.
        ratio: share of the candidates that is masked, in (0, 1].
        same_chain: mask within one chain, chosen uniformly; otherwise in the whole graph.
        bert: of the masked residues 80 % hidden, 10 % replaced by a random type (which may be the
            true one), 10 % left; otherwise all hidden.
        dtype: of the features.

    Raises:
        ValueError: if the ratio is out of range.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"mask_ratio must be in (0, 1], got {ratio}")
    device = types.device
    types, chain = types.cpu(), chain.cpu()
    shown = types.clone()
    hidden = torch.zeros_like(types, dtype=torch.bool)
    masked = torch.zeros_like(hidden)
    for start, stop, key in zip(ptr[:-1], ptr[1:], keys, strict=True):
        generator = generator_from(*key)
        candidates = torch.arange(start, stop)
        if same_chain:
            chains = torch.unique(chain[start:stop])
            chosen = chains[torch.randint(len(chains), (), generator=generator)]
            candidates = candidates[chain[start:stop] == chosen]
        order = torch.randperm(len(candidates), generator=generator)
        picked = candidates[order[: masked_count(ratio, len(candidates))]]
        masked[picked] = True
        if not bert:
            hidden[picked] = True
            continue
        draw = torch.rand(len(picked), generator=generator)
        other = torch.randint(20, (len(picked),), generator=generator)
        hidden[picked] = draw < 0.8
        replaced = (draw >= 0.8) & (draw < 0.9)
        shown[picked[replaced]] = other[replaced]
    features = one_hot(shown, dtype) * (~hidden)[:, None]
    return Masking(features.to(device), masked.to(device))
