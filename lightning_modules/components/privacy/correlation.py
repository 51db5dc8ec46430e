"""Streaming multiplication of white noise by C^-1, with memory for the bands or buffers only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Array = NDArray[np.float64]
Draw = Callable[[int], Tensor]
"""White noise of a step, shape (size,); must give the same numbers when asked again."""


class Correlator(ABC):
    """Turns white noise w_t into correlated noise ``(C^-1 w)_t``, one step at a time.

    Attributes:
        time: index of the next step.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.time = 0

    def step(self, draw: Draw) -> Tensor:
        """Correlated noise of the next step, shape (size,).

        Raises:
            RuntimeError: all ``n`` planned steps were taken; more would void the guarantee.
        """
        if self.time >= self.n:
            raise RuntimeError(
                f"the noise was calibrated for {self.n} steps and all were taken: "
                "plan more steps before training"
            )
        out = self._step(self.time, draw)
        self.time += 1
        return out

    @abstractmethod
    def _step(self, t: int, draw: Draw) -> Tensor: ...

    @property
    def memory(self) -> int:
        """Vectors of the model's size that are kept between steps."""
        return 0

    def state(self) -> dict[str, Tensor]:
        """Buffers that a checkpoint needs beside the time."""
        return {}

    def load(self, time: int, state: dict[str, Tensor]) -> None:
        """Continue after ``time`` steps with the buffers of :meth:`state`."""
        self.time = time


class IdentityCorrelator(Correlator):
    """C = I: independent noise."""

    def _step(self, t: int, draw: Draw) -> Tensor:
        return draw(t)


class BandedCorrelator(Correlator):
    """b-banded C: ``w~_t = (w_t - sum_{s<b} C_{t,t-s} w~_{t-s}) / C_tt``; keeps past outputs.

    Args:
        n: number of steps.
        band: entries ``band[s] = c_s`` of a Toeplitz C, shape (b,), or ``band[t, s] = C_{t,t-s}``,
            shape (n, b).
        scale: multiplies row t of C^-1, shape (n,); the column norms if columns are normalised.
    """

    def __init__(self, n: int, band: ArrayLike, scale: ArrayLike | None = None) -> None:
        super().__init__(n)
        self.band = np.asarray(band, dtype=np.float64)
        self.scale = None if scale is None else np.asarray(scale, dtype=np.float64)
        self.width = self.band.shape[-1] - 1
        self.past: Tensor | None = None  # (b - 1, size), row t % (b - 1) holds the output of t

    def _step(self, t: int, draw: Draw) -> Tensor:
        white = draw(t)
        row = self.band if self.band.ndim == 1 else self.band[t]
        reach = min(self.width, t)
        if self.width and self.past is None:
            self.past = white.new_zeros(self.width, white.numel())
        out = white.clone() if reach else white
        if reach:
            assert self.past is not None
            weights = np.zeros(self.width)
            weights[[(t - s) % self.width for s in range(1, reach + 1)]] = row[1 : reach + 1]
            out -= torch.as_tensor(weights, dtype=white.dtype, device=white.device) @ self.past
        if row[0] != 1.0:
            out = out / float(row[0])
        if self.past is not None:
            self.past[t % self.width] = out
        return out if self.scale is None else out * float(self.scale[t])

    @property
    def memory(self) -> int:
        """B - 1 past outputs."""
        return int(self.width)

    def state(self) -> dict[str, Tensor]:
        """Ring buffer of past outputs."""
        return {} if self.past is None else {"past": self.past}

    def load(self, time: int, state: dict[str, Tensor]) -> None:
        """Continue with the ring buffer."""
        super().load(time, state)
        self.past = state["past"].clone() if "past" in state else None


class ConvolutionCorrelator(Correlator):
    """Banded B = C^-1: ``w~_t = sum_s beta_s w_{t-s}``; draws past inputs again, keeps nothing."""

    def __init__(self, n: int, taps: ArrayLike) -> None:
        super().__init__(n)
        self.taps = np.asarray(taps, dtype=np.float64)

    def _step(self, t: int, draw: Draw) -> Tensor:
        out = draw(t)
        if self.taps[0] != 1.0:
            out = out * float(self.taps[0])
        for s in range(1, min(self.taps.size - 1, t) + 1):
            if self.taps[s] != 0.0:
                out = torch.add(out, draw(t - s), alpha=float(self.taps[s]))
        return out


class BufferedCorrelator(Correlator):
    """Buffered linear Toeplitz C with ``c_0 = 1, c_t = sum_i scale_i decay_i^(t-1)``.

    ``w~_t = w_t - sum_i scale_i S_i``, then ``S_i <- decay_i S_i + w~_t``.
    """

    def __init__(self, n: int, decay: ArrayLike, scale: ArrayLike) -> None:
        super().__init__(n)
        self.decay = np.asarray(decay, dtype=np.float64)
        self.scale = np.asarray(scale, dtype=np.float64)
        self.buffers: Tensor | None = None  # (m, size)

    def _step(self, t: int, draw: Draw) -> Tensor:
        white = draw(t)
        if self.buffers is None:
            self.buffers = white.new_zeros(self.decay.size, white.numel())
        scale = torch.as_tensor(self.scale, dtype=white.dtype, device=white.device)
        decay = torch.as_tensor(self.decay, dtype=white.dtype, device=white.device)
        out: Tensor = white - scale @ self.buffers
        self.buffers.mul_(decay[:, None]).add_(out)
        return out

    @property
    def memory(self) -> int:
        """One vector a buffer."""
        return len(self.decay)

    def state(self) -> dict[str, Tensor]:
        """The buffers."""
        return {} if self.buffers is None else {"buffers": self.buffers}

    def load(self, time: int, state: dict[str, Tensor]) -> None:
        """Continue with the buffers."""
        super().load(time, state)
        self.buffers = state["buffers"].clone() if "buffers" in state else None


class DenseCorrelator(Correlator):
    """Any C: row t of C^-1 times white noise that is drawn again; O(t) a step, no memory."""

    def __init__(self, inverse: ArrayLike) -> None:
        self.inverse = np.asarray(inverse, dtype=np.float64)
        super().__init__(self.inverse.shape[0])

    def _step(self, t: int, draw: Draw) -> Tensor:
        out = draw(t) * float(self.inverse[t, t])
        for s in range(t):
            if self.inverse[t, s] != 0.0:
                out = torch.add(out, draw(s), alpha=float(self.inverse[t, s]))
        return out
