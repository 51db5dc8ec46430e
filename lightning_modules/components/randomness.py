"""Random numbers that depend on nothing but a key: never on what ran before or on other ranks."""

import hashlib
import os

import numpy as np
import torch


def global_seed() -> int:
    """Return the seed given to `seed_everything`, 0 if there was none."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def seed_from(*key: object) -> int:
    """Hash a key of plain values to a 63-bit seed, the same on every machine and rank."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_from(*key: object, device: torch.device | str = "cpu") -> torch.Generator:
    """Fresh generator seeded by a key of plain values."""
    return torch.Generator(device=device).manual_seed(seed_from(*key))


_STATE = slice(24, 24 + 8 * 624)
"""Where the state of a CPU generator holds the 624 words of its Mersenne Twister, 8 bytes each."""


def secret_generator(*key: object, device: torch.device | str = "cpu") -> torch.Generator:
    """Generator for draws that must stay secret: its state depends on the whole key.

    `manual_seed` on the CPU keeps 32 bits of a seed, few enough to be tried out one by one, and
    few enough for two of a million streams to be the same.
    """
    generator = generator_from(*key, device=device)
    if generator.device.type == "cpu":
        digest = hashlib.shake_256(repr(key).encode()).digest(4 * 624)
        words = torch.from_numpy(np.frombuffer(digest, "<u4").astype(np.int64))
        state = generator.get_state()
        state[_STATE] = words.view(torch.uint8)
        generator.set_state(state)
    return generator
