"""The activations on offer, and what initialisation and shaping need to know of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["ACTIVATIONS", "ActivationSpec", "ShapedReLU", "Sine", "activation_spec"]


class Sine(nn.Module):
    """Elementwise sine."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns sin(x), same shape."""
        return torch.sin(x)


class ShapedReLU(nn.Module):
    """ReLU whose negative slope is one minus the gain (an extension, not from the paper).

    A gain in front of a positively homogeneous activation does nothing under a norm. Here the gain
    moves the *shape* instead: gain 1 is the ReLU, gain 0 the identity, so that a gain that shrinks
    with depth makes the deep part linear, as it does for sin and tanh.
    """

    def forward(self, x: Tensor, gain: Tensor | float) -> Tensor:
        """Returns x where positive, `(1 - gain) x` elsewhere."""
        return torch.where(x > 0, x, (1.0 - gain) * x)


@dataclass(frozen=True)
class ActivationSpec:
    """What is known of one activation.

    Attributes:
        build: Constructor of the module.
        xavier_gain: Factor on the standard deviation of Xavier and Kaiming initialisation.
        homogeneous: Whether act(a x) = a act(x) for a > 0, so that a gain has no effect under a
            norm that follows.
        shaped: Whether the module takes the gain as second argument instead of a scaled input.
    """

    build: Callable[[], nn.Module]
    xavier_gain: float
    homogeneous: bool = False
    shaped: bool = False


ACTIVATIONS: dict[str, ActivationSpec] = {
    "identity": ActivationSpec(nn.Identity, 1.0, homogeneous=True),
    "sin": ActivationSpec(Sine, 1.0),
    "tanh": ActivationSpec(nn.Tanh, 5 / 3),
    "selu": ActivationSpec(nn.SELU, 3 / 4),
    "relu": ActivationSpec(nn.ReLU, math.sqrt(2.0), homogeneous=True),
    "leaky_relu": ActivationSpec(
        lambda: nn.LeakyReLU(0.01), math.sqrt(2 / (1 + 0.01**2)), homogeneous=True
    ),
    "shaped_relu": ActivationSpec(ShapedReLU, math.sqrt(2.0), shaped=True),
}


def activation_spec(name: str) -> ActivationSpec:
    """Returns the entry of an activation.

    Raises:
        ValueError: If the name is unknown; names the allowed ones.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]
