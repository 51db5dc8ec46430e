"""Residual, attention and resampling blocks of the ADM networks.

Attribute names are those of the published checkpoints.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

GROUPS = 32


def timestep_embedding(timesteps: Tensor, width: int, max_period: float = 10000.0) -> Tensor:
    """Sinusoidal features ``(n, width)`` of (fractional) timesteps ``(n,)``: cos, then sin."""
    half = width // 2
    exponents = torch.arange(half, dtype=torch.float32, device=timesteps.device) / half
    angles = timesteps[:, None].float() * torch.exp(-math.log(max_period) * exponents)
    features = torch.cat([angles.cos(), angles.sin()], dim=1)
    return functional.pad(features, (0, width % 2))


class GroupNorm32(nn.GroupNorm):
    """GroupNorm computed in float32 whatever the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform x ``(n, channels, ...)``."""
        normed = functional.group_norm(
            x.float(), self.num_groups, self.weight.float(), self.bias.float(), self.eps
        )
        return normed.to(x.dtype)


def group_norm(channels: int) -> GroupNorm32:
    """Group norm with the groups of ADM."""
    return GroupNorm32(GROUPS, channels)


def zero_init(module: nn.Conv1d | nn.Conv2d) -> nn.Module:
    """Zero a layer's parameters, so that its branch starts as nothing."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


class Upsample(nn.Module):
    """Nearest-neighbour doubling, then an optional convolution."""

    def __init__(self, channels: int, with_conv: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if with_conv else None

    def forward(self, x: Tensor) -> Tensor:
        """Transform x ``(n, channels, ...)``."""
        x = functional.interpolate(x, scale_factor=2, mode="nearest")
        return x if self.conv is None else self.conv(x)


class Downsample(nn.Module):
    """Strided convolution, or averaging of 2 x 2 pixels."""

    def __init__(self, channels: int, with_conv: bool) -> None:
        super().__init__()
        self.op: nn.Module = (
            nn.Conv2d(channels, channels, 3, stride=2, padding=1)
            if with_conv
            else nn.AvgPool2d(2, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Transform x ``(n, channels, ...)``."""
        out: Tensor = self.op(x)
        return out


class ResBlock(nn.Module):
    """GroupNorm-SiLU-conv twice, with the timestep embedding between, around a skip.

    Args:
        channels: Input channels.
        embedding: Width of the timestep embedding.
        out_channels: Output channels.
        dropout: Probability in the second half.
        scale_shift: Embedding multiplies and shifts the normed features; otherwise it is added.
        resample: "up" or "down" resamples inside the block, after the first GroupNorm-SiLU and
            on the skip; None does not.
    """

    def __init__(
        self,
        channels: int,
        embedding: int,
        out_channels: int,
        dropout: float = 0.0,
        scale_shift: bool = True,
        resample: str | None = None,
    ) -> None:
        super().__init__()
        self.scale_shift, self.resample = scale_shift, resample
        self.in_layers = nn.Sequential(
            group_norm(channels), nn.SiLU(), nn.Conv2d(channels, out_channels, 3, padding=1)
        )
        self.h_upd = self._resampler(channels)
        self.x_upd = self._resampler(channels)
        self.emb_layers = nn.Sequential(
            nn.SiLU(), nn.Linear(embedding, 2 * out_channels if scale_shift else out_channels)
        )
        self.out_layers = nn.Sequential(
            group_norm(out_channels),
            nn.SiLU(),
            nn.Dropout(dropout),
            zero_init(nn.Conv2d(out_channels, out_channels, 3, padding=1)),
        )
        self.skip_connection: nn.Module = (
            nn.Identity() if channels == out_channels else nn.Conv2d(channels, out_channels, 1)
        )

    def _resampler(self, channels: int) -> nn.Module:
        if self.resample is None:
            return nn.Identity()
        kind = {"up": Upsample, "down": Downsample}[self.resample]
        return kind(channels, with_conv=False)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """Transform x ``(n, channels, h, w)`` under embedding ``(n, embedding)``."""
        norm, activation, convolution = self.in_layers
        hidden = convolution(self.h_upd(activation(norm(x))))
        x = self.x_upd(x)
        modulation = self.emb_layers(embedding).to(hidden.dtype)[:, :, None, None]
        if self.scale_shift:
            scale, shift = modulation.chunk(2, dim=1)
            hidden = self.out_layers[0](hidden) * (1 + scale) + shift
            hidden = self.out_layers[1:](hidden)
        else:
            hidden = self.out_layers(hidden + modulation)
        out: Tensor = self.skip_connection(x) + hidden
        return out


def attend(qkv: Tensor, heads: int, new_order: bool) -> Tensor:
    """Self-attention of ``(n, 3 * width, length)`` to ``(n, width, length)``.

    The two orders read the same weights differently: new splits the channels into q, k, v and
    each into heads; legacy splits them into heads and each into q, k, v.
    """
    batch, total, length = qkv.shape
    width = total // (3 * heads)
    if new_order:
        q, k, v = qkv.reshape(batch, 3, heads, width, length).unbind(1)
    else:
        q, k, v = qkv.reshape(batch, heads, 3, width, length).unbind(2)
    out = functional.scaled_dot_product_attention(
        q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3)
    )
    return out.transpose(2, 3).reshape(batch, heads * width, length)


class AttentionBlock(nn.Module):
    """GroupNorm, self-attention over all pixels, zero-initialised projection, residual."""

    def __init__(self, channels: int, heads: int, new_order: bool) -> None:
        super().__init__()
        self.heads, self.new_order = heads, new_order
        self.norm = group_norm(channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = zero_init(nn.Conv1d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Transform x ``(n, channels, ...)``."""
        flat = x.flatten(2)
        mixed = attend(self.qkv(self.norm(flat)), self.heads, self.new_order)
        projected: Tensor = self.proj_out(mixed)
        # The sum comes last: a block under FSDP2 should not return a view.
        return x + projected.reshape(x.shape)


class AttentionPool2d(nn.Module):
    """CLIP-style pooling: the mean token attends to all pixels.

    Args:
        side: Height and width of the feature map.
        channels: Its channels.
        head_channels: Channels per head.
        outputs: Width of the result.
    """

    def __init__(self, side: int, channels: int, head_channels: int, outputs: int) -> None:
        super().__init__()
        self.positional_embedding = nn.Parameter(torch.randn(channels, side**2 + 1) / channels**0.5)
        self.qkv_proj = nn.Conv1d(channels, 3 * channels, 1)
        self.c_proj = nn.Conv1d(channels, outputs, 1)
        self.heads = channels // head_channels

    def forward(self, x: Tensor) -> Tensor:
        """Transform x ``(n, channels, ...)``."""
        flat = x.flatten(2)
        tokens = torch.cat([flat.mean(-1, keepdim=True), flat], dim=-1)
        tokens = tokens + self.positional_embedding[None].to(tokens.dtype)
        mixed = attend(self.qkv_proj(tokens), self.heads, new_order=True)
        out: Tensor = self.c_proj(mixed)[:, :, 0]
        return out


class TimestepSequential(nn.Sequential):
    """Sequence that hands the embedding to residual blocks only."""

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:  # type: ignore[override]
        """Run all layers."""
        for layer in self:
            x = layer(x, embedding) if isinstance(layer, ResBlock) else layer(x)
        return x
