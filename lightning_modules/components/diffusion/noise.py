"""Counter-based noise: a value depends on (key, position), never on who draws it.

Sample i of a global batch gets the same noise whichever process holds it, so training with any
number of ranks draws the same numbers. Keys come from `components.randomness.seed_from`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # int64 shifts keep the sign: mask it off for a logical shift.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64 finaliser, elementwise on int64 (wrapping arithmetic)."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _bits(key: int, positions: Tensor, count: int) -> Tensor:
    """``(n, count)`` int64 random bits."""
    stream = _mix(_mix(positions.to(torch.int64) * _GOLDEN + key) ^ key)
    counter = torch.arange(1, count + 1, device=positions.device, dtype=torch.int64)
    return _mix(stream[:, None] + counter[None, :] * _GOLDEN)


def _unit(bits: Tensor) -> Tensor:
    """32 bits (as int64 in [0, 2^32)) to float32 in (0, 1]."""
    return (bits.to(torch.float32) + 0.5) * 2.0**-32


def counter_uniform(key: int, positions: Tensor) -> Tensor:
    """``(n,)`` float64 uniform on [0, 1), one for each position.

    Args:
        key: Integer from `components.randomness.seed_from`.
        positions: ``(n,)`` int64 place of each sample in the global batch or data set.
    """
    return _shift_right(_bits(key, positions.cpu(), 1)[:, 0], 11).to(torch.float64) * 2.0**-53


def counter_normal(key: int, positions: Tensor, shape: Sequence[int]) -> Tensor:
    """``(n, *shape)`` float32 standard normal noise (Box-Muller).

    Args:
        key: Integer from `components.randomness.seed_from`.
        positions: ``(n,)`` int64, on the device where the noise is wanted.
        shape: Shape of one sample.
    """
    size = 1
    for length in shape:
        size *= length
    bits = _bits(key, positions, (size + 1) // 2)
    radius = (-2 * _unit(_shift_right(bits, 32)).log()).sqrt()
    angle = _unit(bits & 0xFFFFFFFF) * (2 * torch.pi)
    pairs = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)
    return pairs.reshape(len(positions), -1)[:, :size].reshape(len(positions), *shape)
