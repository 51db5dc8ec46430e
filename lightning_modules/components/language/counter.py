"""Random numbers as a pure function of counters: the same on any number of processes.

A running generator ties a sample to everything drawn before it, hence to how prompts were dealt out
to processes. Here the number for (seed, prompt, candidate, step) is a hash of these, so a prompt's
candidates are the same wherever and in whatever company they are drawn.
"""

import zlib

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def _xor_shift(x: Tensor, spare: Tensor, bits: int) -> Tensor:
    """Do x ^= x >> bits with a logical shift (torch's is arithmetic); `spare` is overwritten."""
    torch.bitwise_right_shift(x, bits, out=spare)
    spare &= (1 << (64 - bits)) - 1
    x ^= spare
    return x


def _mix(x: Tensor) -> Tensor:
    """Finaliser of splitmix64 (Steele, Lea, Flood 2014), on wrapping integers, in place."""
    spare = torch.empty_like(x)
    x = _xor_shift(x, spare, 30).mul_(_FIRST)
    x = _xor_shift(x, spare, 27).mul_(_SECOND)
    return _xor_shift(x, spare, 31)


def purpose(name: str) -> int:
    """A stable integer for a word, to keep streams of one seed apart."""
    return zlib.crc32(name.encode())


def counter_uniform(seed: int, *counters: Tensor | int) -> Tensor:
    """Uniform numbers in [0, 1), float64, of the broadcast shape of the counters.

    Args:
        seed: Any Python integer.
        counters: Integer tensors (or integers) that broadcast; at least one is a tensor.
    """
    device = next((c.device for c in counters if isinstance(c, Tensor)), torch.device("cpu"))
    wrapped = (seed + 2**63) % 2**64 - 2**63
    state = _mix(torch.tensor(wrapped, dtype=torch.int64, device=device) + _GOLDEN)
    for counter in counters:
        value = torch.as_tensor(counter, device=device).long()
        state = _mix((state ^ _mix(value + _GOLDEN)).add_(_GOLDEN))
    return state.bitwise_right_shift_(11).bitwise_and_(2**53 - 1).double().mul_(2.0**-53)


def counter_shuffle(seed: int, rows: Tensor, length: int) -> Tensor:
    """One random permutation of `range(length)` per row key: `(rows, length)` int64."""
    position = torch.arange(length, device=rows.device)
    return counter_uniform(seed, rows[:, None], position[None]).argsort(-1)
