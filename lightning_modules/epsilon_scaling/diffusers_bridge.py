"""Epsilon Scaling for schedulers and pipelines of diffusers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_modules.epsilon_scaling.schedule import EpsilonSchedule

PREDICTIONS = ("epsilon", "v_prediction", "sample")


class ScaledScheduler:
    """A diffusers scheduler whose `step` divides the model's noise by lambda first.

    Everything else is the wrapped scheduler's. Only the output is scaled, so a guided pipeline
    scales the combined noise once. With `DDIMScheduler` and clipping, diffusers equals the ADM
    sampler only with ``step(..., use_clipped_model_output=True)``; that is set here.

    Args:
        scheduler: Any scheduler with discrete timesteps whose network predicts noise, v or the
            clean sample.
        schedule: Divisors by index from the clean end of the timesteps in use.

    Raises:
        TypeError: If the object is no diffusers scheduler.
        ValueError: If its prediction type is unknown.
    """

    def __init__(self, scheduler: Any, schedule: EpsilonSchedule) -> None:
        if not (hasattr(scheduler, "step") and hasattr(scheduler, "config")):
            raise TypeError(f"expected a diffusers scheduler, got {type(scheduler).__name__}")
        self._scheduler, self._schedule = scheduler, schedule
        self._prediction = getattr(scheduler.config, "prediction_type", "epsilon")
        if self._prediction not in PREDICTIONS:
            raise ValueError(
                f"prediction_type must be one of {PREDICTIONS}, got {self._prediction!r}"
            )
        self._scales: Tensor | None = None
        self._taken = 0

    def __getattr__(self, name: str) -> Any:
        # Only what this object does not define; guards against recursion while unpickling.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._scheduler, name)

    def __len__(self) -> int:
        return len(self._scheduler)

    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        """Choose the steps; as the wrapped scheduler's, and one lambda for each."""
        self._scheduler.set_timesteps(*args, **kwargs)
        # Heun-like schedulers list a level twice: both evaluations are one step.
        levels = torch.as_tensor(self._scheduler.timesteps).double().cpu()
        self._levels = torch.unique(levels)
        self._scales = self._schedule.scales_or_none(len(self._levels))

    def step(
        self, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kw: Any
    ) -> Any:
        """One step with the scaled output; arguments as the wrapped scheduler's.

        Raises:
            RuntimeError: If `set_timesteps` has not been called.
        """
        if not hasattr(self, "_levels"):
            raise RuntimeError("call set_timesteps before step")
        if self._scales is not None:
            position = int((self._levels - float(timestep)).abs().argmin())
            model_output = self._scaled(model_output, timestep, sample, self._scales[position])
        if type(self._scheduler).__name__ == "DDIMScheduler" and not args:
            kw.setdefault("use_clipped_model_output", True)
        return self._scheduler.step(model_output, timestep, sample, *args, **kw)

    def _scaled(self, output: Tensor, timestep: Any, sample: Tensor, scale: Tensor) -> Tensor:
        channels = sample.shape[1]
        mean_part, rest = output[:, :channels], output[:, channels:]
        divisor = scale.to(mean_part)
        if self._prediction == "epsilon":
            return torch.cat([mean_part / divisor, rest], dim=1)
        signal = self._scheduler.alphas_cumprod[int(timestep)].to(sample)
        root, noise = signal.sqrt(), (1 - signal).sqrt()
        if self._prediction == "v_prediction":
            epsilon = (noise * sample + root * mean_part) / divisor
            scaled = (epsilon - noise * sample) / root
        else:
            epsilon = (sample - root * mean_part) / noise / divisor
            scaled = (sample - noise * epsilon) / root
        return torch.cat([scaled, rest], dim=1)


def scale_pipeline(pipeline: Any, schedule: float | EpsilonSchedule) -> Any:
    """Give a diffusers pipeline a scaled scheduler; returns the pipeline.

    Called again, it replaces the former schedule. A schedule of 1 restores the plain scheduler.

    Raises:
        TypeError: If the pipeline has no scheduler.
    """
    if not hasattr(pipeline, "scheduler"):
        raise TypeError(f"{type(pipeline).__name__} has no scheduler")
    plain = pipeline.scheduler
    if isinstance(plain, ScaledScheduler):
        plain = plain._scheduler
    wanted = EpsilonSchedule.of(schedule)
    pipeline.scheduler = plain if wanted.is_identity else ScaledScheduler(plain, wanted)
    return pipeline
