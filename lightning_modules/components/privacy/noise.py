"""Correlated noise for a whole model: seeded by (seed, step, chunk), independent of world size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_modules.components.privacy.correlation import Correlator
from lightning_modules.components.randomness import secret_generator

CHUNK = 2**18


class WhiteNoise:
    """Standard normal noise over one virtual vector, cut into chunks with their own seeds.

    Chunk q of step t is drawn from a generator seeded with (seed, t, q), so that any part of any
    step can be drawn by any rank, at any time, again.

    Args:
        size: length of the virtual vector.
        seed: secret seed of the run.
        device: where to draw; streams differ between kinds of device.
        dtype: float32 or float64.
        rank: this rank owns the chunks ``rank, rank + world, ...``.
        world: number of ranks that share the vector; 1 owns everything.
        chunk: length of a chunk.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        rank: int = 0,
        world: int = 1,
        chunk: int = CHUNK,
    ) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"noise must be float32 or float64, got {dtype}")
        self.seed, self.device, self.dtype = seed, device, dtype
        self.spans = [
            (q, start, min(size, start + chunk))
            for q, start in enumerate(range(0, size, chunk))
            if q % world == rank
        ]
        self.size = sum(stop - start for _, start, stop in self.spans)

    def __call__(self, t: int) -> Tensor:
        """White noise of step ``t`` on the chunks of this rank, shape (size of this rank,)."""
        out = torch.empty(self.size, dtype=self.dtype, device=self.device)
        place = 0
        for q, start, stop in self.spans:
            part = out[place : place + stop - start]
            part.normal_(generator=secret_generator(self.seed, t, q, device=self.device))
            place += stop - start
        return out

    def scatter_add(self, vector: Tensor, part: Tensor, alpha: float = 1.0) -> None:
        """Add this rank's part of a noise vector into the virtual vector, in place."""
        place = 0
        for _, start, stop in self.spans:
            vector[start:stop].add_(part[place : place + stop - start], alpha=alpha)
            place += stop - start


class NoiseStream:
    """Noise ``(C^-1 Z)_t`` of unit white variance, one step at a time, with exact resume.

    Args:
        correlator: from ``Strategy.correlator(n)``.
        white: source of white noise.
    """

    def __init__(self, correlator: Correlator, white: WhiteNoise) -> None:
        self.correlator, self.white = correlator, white

    @property
    def time(self) -> int:
        """Steps taken."""
        return self.correlator.time

    def step(self) -> Tensor:
        """Noise of the next step on the chunks of this rank."""
        return self.correlator.step(self.white)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs: the time and the correlator's buffers."""
        return {
            "time": self.time,
            "buffers": {k: v.cpu().clone() for k, v in self.correlator.state().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where :meth:`state_dict` was taken."""
        buffers = {
            k: v.to(device=self.white.device, dtype=self.white.dtype)
            for k, v in state["buffers"].items()
        }
        for name, buffer in buffers.items():
            if buffer.shape[-1] != self.white.size:
                raise ValueError(
                    f"noise buffer {name} of the checkpoint has {buffer.shape[-1]} coordinates, "
                    f"the trainable parameters have {self.white.size}: resume with the same model"
                )
        self.correlator.load(int(state["time"]), buffers)
