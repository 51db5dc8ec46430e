"""Networks of the private-training literature: no normalisation, bounded activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
}


def _activation(name: str) -> nn.Module:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]()


class MLP(nn.Module):
    """Perceptron on flattened inputs with PyTorch's default initialisation.

    Args:
        features: input size after flattening.
        hidden: widths of the hidden layers.
        classes: number of outputs.
        activation: "tanh", "relu", "elu" or "silu".
    """

    def __init__(
        self, features: int, hidden: Sequence[int], classes: int, activation: str = "tanh"
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = features
        for size in hidden:
            layers += [nn.Linear(width, size), _activation(activation)]
            width = size
        self.features = features
        self.layers = nn.Sequential(*layers, nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes) of inputs (batch, ...)."""
        logits: Tensor = self.layers(x.reshape(x.shape[0], self.features))
        return logits


class DPVGG(nn.Module):
    """Blocks of [3x3 conv, tanh, 3x3 conv, tanh, 2x2 max-pool], then a hidden dense layer.

    Initialisation: truncated normal of variance 2/fan-in (convolutions) and 2/(fan-in + fan-out)
    (dense), zero bias.

    Args:
        shape: (channels, height, width) of the input; both sides divisible by 2^blocks.
        classes: number of outputs.
        widths: channels of the blocks.
        hidden: width of the dense layer.
        activation: see :class:`MLP`.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        widths: Sequence[int] = (32, 64, 128),
        hidden: int = 128,
        activation: str = "tanh",
    ) -> None:
        super().__init__()
        channels, height, width = shape
        factor = 2 ** len(widths)
        if height % factor or width % factor:
            raise ValueError(
                f"images of {height} x {width} cannot be halved {len(widths)} times: "
                "give fewer widths"
            )
        layers: list[nn.Module] = []
        for size in widths:
            layers += [
                nn.Conv2d(channels, size, 3, padding=1),
                _activation(activation),
                nn.Conv2d(size, size, 3, padding=1),
                _activation(activation),
                nn.MaxPool2d(2),
            ]
            channels = size
        self.shape = (shape[0], height, width)
        self.blocks = nn.Sequential(*layers)
        self.hidden = nn.Linear(channels * (height // factor) * (width // factor), hidden)
        self.act = _activation(activation)
        self.out = nn.Linear(hidden, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                _truncated_normal(layer.weight, 2.0 / layer.weight[0].numel())
            elif isinstance(layer, nn.Linear):
                _truncated_normal(layer.weight, 2.0 / sum(layer.weight.shape))
            if isinstance(layer, nn.Conv2d | nn.Linear):
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes) of images (batch, channels, height, width), or flattened ones."""
        h = self.blocks(x.reshape(x.shape[0], *self.shape))
        logits: Tensor = self.out(self.act(self.hidden(h.flatten(1))))
        return logits


def _truncated_normal(weight: Tensor, variance: float) -> None:
    # 0.8796 is the deviation of a standard normal cut off at two deviations.
    deviation = math.sqrt(variance) / 0.87962566103423978
    with torch.no_grad():
        nn.init.trunc_normal_(weight, 0.0, deviation, -2 * deviation, 2 * deviation)
