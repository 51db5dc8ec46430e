"""Random numbers that depend on nothing but a key: never on what ran before or on other ranks."""

import hashlib

import torch


def seed_from(*key: object) -> int:
    """Hash a key of plain values to a 63-bit seed, the same on every machine and rank."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_from(*key: object, device: torch.device | str = "cpu") -> torch.Generator:
    """Fresh generator seeded by a key of plain values."""
    return torch.Generator(device=device).manual_seed(seed_from(*key))
