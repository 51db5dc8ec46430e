"""Epsilon Scaling as a wrapper of any denoiser, for samplers that know nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_modules.components.diffusion import GaussianDiffusion
from lightning_modules.epsilon_scaling.schedule import EpsilonSchedule


class ScaledModel:
    """A network whose noise is divided by lambda_t, in the type that it predicts.

    The output is turned into noise, divided, and turned back; a learned variance in further
    channels is not touched.

    Args:
        model: Called with (x, original timesteps, ...).
        diffusion: The respaced process of the sampler; tells the prediction type and which step
            of the sampler an original timestep is.
        schedule: Divisors, or one number for all steps; 1 gives the model's own output, bit for
            bit.
    """

    def __init__(
        self,
        model: Callable[..., Tensor],
        diffusion: GaussianDiffusion,
        schedule: float | EpsilonSchedule,
    ) -> None:
        self.model, self.diffusion = model, diffusion
        self.scales = EpsilonSchedule.of(schedule).scales_or_none(diffusion.steps)
        self._step_of = torch.full((int(diffusion.timestep_map.max()) + 1,), -1)
        self._step_of[diffusion.timestep_map] = torch.arange(diffusion.steps)

    def __call__(self, x: Tensor, timesteps: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Scaled output at x ``(n, c, ...)`` and original timesteps ``(n,)``.

        Raises:
            ValueError: If a timestep is none of the sampler's.
        """
        output = self.model(x, timesteps, *args, **kwargs)
        if self.scales is None:
            return output
        asked = timesteps.long().cpu().reshape(-1)
        known = (asked >= 0) & (asked < len(self._step_of))
        index = torch.where(known, self._step_of[asked.clamp(0, len(self._step_of) - 1)], -1)
        if (index < 0).any():
            raise ValueError(
                f"timestep {int(asked[index < 0][0])} is not among the sampler's steps "
                f"{self.diffusion.timestep_map.tolist()[:5]} ...; respace the diffusion alike"
            )
        index = index.expand(len(x)).to(x.device)
        channels = x.shape[1]
        epsilon = self.diffusion.to_epsilon(output[:, :channels], x, index)
        scale = self.scales.to(x.device)[index].to(x.dtype).reshape((-1,) + (1,) * (x.ndim - 1))
        scaled = self.diffusion.from_epsilon(epsilon / scale, x, index)
        return torch.cat([scaled, output[:, channels:]], dim=1)
