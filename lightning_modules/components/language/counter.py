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
_WORD = 2**64 - 1


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


def _mix_number(x: int) -> int:
    """`_mix` of one number: a tensor operation on it would cost more than a thousand of these."""
    x &= _WORD
    x = ((x ^ x >> 30) * _FIRST) & _WORD
    x = ((x ^ x >> 27) * _SECOND) & _WORD
    x ^= x >> 31
    return x - ((x >> 63) << 64)  # signed, as tensors have it


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
    state: Tensor | int = _mix_number(seed + _GOLDEN)
    for counter in counters:
        if isinstance(counter, Tensor):
            state = state ^ _mix(counter.to(device, torch.int64) + _GOLDEN)
        else:
            state = state ^ _mix_number(int(counter) + _GOLDEN)
        if isinstance(state, Tensor):
            state = _mix(state.add_(_GOLDEN))
        else:
            state = _mix_number(state + _GOLDEN)
    bits = torch.as_tensor(state, device=device).bitwise_right_shift_(11)
    return bits.bitwise_and_(2**53 - 1).double().mul_(2.0**-53)


def counter_shuffle(seed: int, rows: Tensor, length: int) -> Tensor:
    """One random permutation of `range(length)` per row key: `(rows, length)` int64."""
    position = torch.arange(length, device=rows.device)
    return counter_uniform(seed, rows[:, None], position[None]).argsort(-1)
