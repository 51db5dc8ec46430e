"""Classifier and classifier-free guidance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from lightning_modules.components.diffusion.losses import Model

ConditionalModel = Callable[[Tensor, Tensor, Tensor], Tensor]


def classifier_gradient(
    classifier: Callable[[Tensor, Tensor], Tensor], labels: Tensor, scale: float = 1.0
) -> Callable[[Tensor, Tensor], Tensor]:
    """Gradient of scale * log p(label | x, t) for the samplers.

    Args:
        classifier: Called with (x, original timesteps), gives ``(n, classes)`` logits. Its
            weights must not have been made in inference mode.
        labels: ``(n,)`` int64.
        scale: Strength.
    """

    def gradient(x: Tensor, timesteps: Tensor) -> Tensor:
        # Lightning tests and predicts in inference mode, whose tensors autograd refuses: copies.
        with torch.inference_mode(False), torch.enable_grad():
            inputs = x.detach().clone().requires_grad_(True)
            log_probability = functional.log_softmax(classifier(inputs, timesteps.clone()), dim=-1)
            chosen = log_probability.gather(1, labels.clone()[:, None]).sum()
            return torch.autograd.grad(chosen, inputs)[0] * scale

    return gradient


def classifier_free(
    model: ConditionalModel,
    condition: Tensor,
    null_condition: Tensor,
    scale: float,
    channels: int | None = None,
    rescale: float = 0.0,
) -> Model:
    """Model whose output is uncond + scale (cond - uncond), both from one batched call.

    Epsilon Scaling divides the combined output once.

    Args:
        model: Called with (x, timesteps, condition).
        condition: ``(n, ...)``.
        null_condition: ``(n, ...)`` the empty condition.
        scale: 0 is unconditional, 1 conditional, more exaggerates.
        channels: Guide only the first so many output channels; the rest (a learned variance)
            stays conditional. None guides all.
        rescale: phi in [0, 1]: share of the result that is scaled to the conditional output's
            standard deviation per sample (counters overexposure at a large scale).

    Raises:
        ValueError: If scale is negative or rescale lies outside [0, 1].
    """
    if scale < 0:
        raise ValueError(f"guidance scale must be at least 0, got {scale}")
    if not 0 <= rescale <= 1:
        raise ValueError(f"rescale must lie in [0, 1], got {rescale}")

    def guided(x: Tensor, timesteps: Tensor) -> Tensor:
        if scale == 1:
            return model(x, timesteps, condition)
        if scale == 0:
            return model(x, timesteps, null_condition)
        each = timesteps.expand(len(x))  # EDM samplers hand over one noise level for all
        both = model(
            torch.cat([x, x]),
            torch.cat([each, each]),
            torch.cat([condition, null_condition]),
        )
        with_condition, without = both.chunk(2)
        width = with_condition.shape[1] if channels is None else channels
        combined = combine(with_condition[:, :width], without[:, :width], scale, rescale)
        return torch.cat([combined, with_condition[:, width:]], dim=1)

    return guided


def combine(
    conditional: Tensor, unconditional: Tensor, scale: float, rescale: float = 0.0
) -> Tensor:
    """Form uncond + scale (cond - uncond), a share `rescale` of it brought to cond's spread."""
    guided = unconditional + scale * (conditional - unconditional)
    if rescale == 0:
        return guided
    axes = tuple(range(1, guided.ndim))
    ratio = conditional.std(axes, keepdim=True) / guided.std(axes, keepdim=True)
    return rescale * guided * ratio + (1 - rescale) * guided
