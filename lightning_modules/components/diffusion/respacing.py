"""Choose few of the T training steps for sampling and give the betas of the shorter process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_modules.components.diffusion.schedules import Betas


def spaced_timesteps(total: int, spacing: str | int | Sequence[int]) -> list[int]:
    """Sorted original indices kept by a respacing.

    Args:
        total: Number T of training steps.
        spacing: "ddimN" takes the integer stride with exactly N entries in range(0, T, stride).
            "n1,n2,..." (or the numbers themselves) splits T into equal sections and takes n_i
            evenly spread indices, ends included, of each. "" keeps every step.

    Returns:
        Sorted, distinct indices in 0 .. T - 1.

    Raises:
        ValueError: If no stride gives N entries or a section is smaller than its count.
    """
    if isinstance(spacing, str):
        text = spacing.strip()
        if text == "":
            return list(range(total))
        if text.startswith("ddim"):
            return _strided(total, text)
        try:
            counts = [int(word) for word in text.split(",")]
        except ValueError:
            raise ValueError(
                f"respacing must be 'ddimN', or numbers such as '20' or '10,15,20', got {text!r}"
            ) from None
    else:
        counts = [spacing] if isinstance(spacing, int) else list(spacing)
    return _sectioned(total, counts)


def _strided(total: int, text: str) -> list[int]:
    if not text[len("ddim") :].isdigit():
        raise ValueError(f"respacing must be 'ddimN' with a whole number N, got {text!r}")
    wanted = int(text[len("ddim") :])
    for stride in range(1, total + 1):
        if len(range(0, total, stride)) == wanted:
            return list(range(0, total, stride))
    raise ValueError(
        f"respacing {text!r}: no whole stride takes {wanted} of {total} steps; "
        f"choose a divisor of {total}, or '{wanted}' for even spacing without 'ddim'"
    )


def _sectioned(total: int, counts: list[int]) -> list[int]:
    steps: list[int] = []
    start = 0
    for section, count in enumerate(counts):
        size = total // len(counts) + (section < total % len(counts))
        if not 1 <= count <= size:
            raise ValueError(
                f"respacing asks for {count} steps of a section of {size} "
                f"(T = {total}, {len(counts)} section(s)); choose 1 to {size}"
            )
        stride = (size - 1) / (count - 1) if count > 1 else 1.0
        position = 0.0
        for _ in range(count):
            # Accumulated, not multiplied: published checkpoints were sampled with this rounding.
            steps.append(start + round(position))
            position += stride
        start += size
    return steps


def respaced_betas(betas: Betas, timesteps: Sequence[int]) -> tuple[Betas, NDArray[np.int64]]:
    """Betas of the process that visits only the kept steps: 1 - abar_i / abar_(i-1).

    Args:
        betas: ``(T,)`` of the training process.
        timesteps: Kept original indices, sorted.

    Returns:
        ``(T',)`` betas, and the ``(T',)`` original indices that the network is called with.

    Raises:
        ValueError: If the indices are not sorted, distinct and inside the training process.
    """
    kept = np.asarray(timesteps, dtype=np.int64)
    if kept.size == 0 or kept[0] < 0 or kept[-1] >= len(betas) or (np.diff(kept) <= 0).any():
        raise ValueError(
            f"timesteps must be sorted, distinct and within 0..{len(betas) - 1}, got {kept}"
        )
    signal = np.cumprod(1 - betas)[kept]
    return 1 - signal / np.concatenate([[1.0], signal[:-1]]), kept
