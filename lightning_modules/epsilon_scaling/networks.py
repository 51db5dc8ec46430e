"""A small residual network for tiny images, and the choice of networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.components.diffusion import ADMUNet
from lightning_modules.components.diffusion.unet_blocks import timestep_embedding


class _Block(nn.Module):
    """Linear, embedding added, SiLU, linear; residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, width)
        self.contract = nn.Linear(width, width)

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        inner = nn.functional.silu(self.expand(hidden) + embedding)
        out: Tensor = hidden + self.contract(inner)
        return out


class ResidualMLP(nn.Module):
    """Fully connected residual network with a sinusoidal timestep.

    Args:
        image_shape: ``(c, h, w)``.
        out_channels: Output channels; 2 c for a learned variance.
        width: Hidden width.
        blocks: Residual blocks.
        num_classes: Labels of a class-conditional model.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        out_channels: int,
        width: int = 192,
        blocks: int = 3,
        num_classes: int | None = None,
    ) -> None:
        super().__init__()
        self.out_shape = (out_channels, *image_shape[1:])
        self.width, self.num_classes = width, num_classes
        self.time_embed = nn.Linear(width, width)
        if num_classes is not None:
            self.label_emb = nn.Embedding(num_classes, width)
        self.inlet = nn.Linear(prod(image_shape), width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(blocks))
        self.outlet = nn.Linear(width, prod(self.out_shape))

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor | None = None) -> Tensor:
        """Network output ``(n, out_channels, h, w)``.

        Raises:
            ValueError: If labels are missing, or given to an unconditional model.
        """
        if (labels is None) != (self.num_classes is None):
            raise ValueError(
                "this model is class-conditional and needs labels"
                if labels is None
                else "labels given to a model without classes; set num_classes or drop them"
            )
        embedding = self.time_embed(timestep_embedding(timesteps, self.width).to(x.dtype))
        if labels is not None:
            embedding = embedding + self.label_emb(labels)
        hidden = self.inlet(x.flatten(1))
        for block in self.blocks:
            hidden = block(hidden, embedding)
        out: Tensor = self.outlet(hidden)
        return out.reshape(len(x), *self.out_shape)


def _unet(image_shape: Sequence[int], out_channels: int, **arguments: Any) -> nn.Module:
    arguments = {"image_size": image_shape[-1], "in_channels": image_shape[0], **arguments}
    return ADMUNet(out_channels=out_channels, **arguments)


NETWORKS: dict[str, Callable[..., nn.Module]] = {"mlp": ResidualMLP, "unet": _unet}

BLOCKS = {
    "mlp": ["blocks.*"],
    "unet": ["input_blocks.*", "middle_block", "output_blocks.*"],
}
"""Names of the blocks that are sharded one by one."""


def build_network(
    name: str,
    image_shape: Sequence[int],
    out_channels: int,
    num_classes: int | None,
    arguments: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Network by name, "mlp" or "unet", with further constructor arguments.

    Raises:
        ValueError: If the name or an argument is unknown.
    """
    if name not in NETWORKS:
        raise ValueError(f"network must be one of {sorted(NETWORKS)} or 'exact', got {name!r}")
    given = dict(arguments or {})
    if num_classes is not None:
        given["num_classes"] = num_classes
    try:
        return NETWORKS[name](tuple(image_shape), out_channels, **given)
    except TypeError as error:
        raise ValueError(f"network_args of network {name!r}: {error}") from error


@torch.no_grad()
def label_or_null(labels: Tensor, drop: Tensor, null_label: int) -> Tensor:
    """Labels ``(n,)`` with those of dropped rows replaced by the empty label."""
    return torch.where(drop, torch.full_like(labels, null_label), labels)
