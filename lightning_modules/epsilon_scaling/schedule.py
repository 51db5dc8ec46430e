"""The divisors lambda_t of the predicted noise: uniform, linear in the step, or listed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

USUAL = (0.9, 1.2)


@dataclass(frozen=True)
class EpsilonSchedule:
    """lambda_t = slope * t + offset, t the index among the steps used (0 = last, cleanest).

    Attributes:
        offset: b; the uniform divisor if slope is 0. 1 leaves the sampler as it is.
        slope: k of the linear schedule.
        values: One lambda per step instead, indexed like t.
        skip_first: Number of first (noisiest) steps left unscaled. With the cosine schedule the
            first step's sqrt(abar) is tiny, and (1 - 1/lambda) / sqrt(abar) in the hundreds.

    Raises:
        ValueError: If a number is not finite or a listed lambda is not positive.
    """

    offset: float = 1.0
    slope: float = 0.0
    values: tuple[float, ...] | None = None
    skip_first: int = 0

    def __post_init__(self) -> None:
        for name in ("offset", "slope"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise ValueError(f"epsilon schedule: {name} must be finite, got {value}")
        if self.values is None and self.slope == 0 and self.offset <= 0:
            raise ValueError(f"epsilon scale must be positive, got {self.offset}")
        if self.skip_first < 0:
            raise ValueError(f"skip_first must be at least 0, got {self.skip_first}")
        for value in self.values or ():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"every listed epsilon scale must be positive, got {value}")

    @classmethod
    def with_mean(cls, mean: float, slope: float, steps: int) -> EpsilonSchedule:
        """Linear schedule comparable to a uniform one: b = mean - k (T' - 1) / 2."""
        return cls(mean - slope * (steps - 1) / 2, slope)

    @classmethod
    def of(cls, values: float | Sequence[float] | Tensor | EpsilonSchedule) -> EpsilonSchedule:
        """Schedule from a number, a list per step or a schedule."""
        if isinstance(values, EpsilonSchedule):
            return values
        if isinstance(values, Tensor):
            values = values.tolist()
        if isinstance(values, (int, float)):
            return cls(float(values))
        return cls(values=tuple(float(value) for value in values))

    @property
    def is_identity(self) -> bool:
        """Whether nothing is scaled."""
        if self.values is not None:
            return all(value == 1 for value in self.values)
        return self.offset == 1 and self.slope == 0

    def scales(self, steps: int) -> Tensor:
        """Divisors ``(steps,)`` float64 by respaced index.

        Args:
            steps: Number T' of steps used.

        Raises:
            ValueError: If the list has another length or a step's lambda is not positive.
        """
        if self.values is not None:
            if len(self.values) != steps:
                raise ValueError(
                    f"epsilon schedule lists {len(self.values)} values, but the sampler takes "
                    f"{steps} steps; give one per step (index 0 = last step)"
                )
            scales = torch.tensor(self.values, dtype=torch.float64)
        else:
            scales = self.slope * torch.arange(steps, dtype=torch.float64) + self.offset
        if self.skip_first:
            scales[max(steps - self.skip_first, 0) :] = 1.0
        if not (scales > 0).all():
            worst = int(scales.argmin())
            raise ValueError(
                f"slope {self.slope:g} and offset {self.offset:g} give epsilon scale "
                f"{float(scales[worst]):g} at step {worst} of {steps}; it must be positive"
            )
        low, high = float(scales.min()), float(scales.max())
        if low < USUAL[0] or high > USUAL[1]:
            warnings.warn(
                f"epsilon scales reach {low:g} to {high:g}, outside the usual "
                f"{USUAL[0]:g} to {USUAL[1]:g}: samples will probably be damaged",
                stacklevel=2,
            )
        return scales

    def scales_or_none(self, steps: int) -> Tensor | None:
        """Like `scales`, but None where nothing is scaled, so that lambda = 1 costs nothing."""
        return None if self.is_identity else self.scales(steps)

    def describe(self) -> str:
        """Short name for metrics and files, such as ``1.017`` or ``0.0025t+1``."""
        if self.values is not None:
            return f"list{len(self.values)}"
        name = f"{self.offset:.6g}" if self.slope == 0 else f"{self.slope:.6g}t+{self.offset:.6g}"
        return f"{name}-skip{self.skip_first}" if self.skip_first else name
