"""The ADM U-Net and its encoder half as a classifier."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_modules.components.diffusion.unet_blocks import (
    GROUPS,
    AttentionBlock,
    AttentionPool2d,
    Downsample,
    ResBlock,
    TimestepSequential,
    Upsample,
    group_norm,
    timestep_embedding,
    zero_init,
)

POOLS = ("attention", "adaptive", "spatial", "spatial_v2")


class _Encoder(nn.Module):
    """Timestep embedding, down path and middle, shared by U-Net and classifier.

    The channels at the end of each input block are kept in `widths`.
    """

    def __init__(
        self,
        image_size: int,
        in_channels: int,
        model_channels: int,
        num_res_blocks: int,
        attention_resolutions: Sequence[int],
        dropout: float,
        channel_mult: Sequence[float],
        num_heads: int,
        num_head_channels: int | None,
        use_scale_shift_norm: bool,
        resblock_updown: bool,
        use_new_attention_order: bool,
        checkpointing: bool,
    ) -> None:
        super().__init__()
        factor = 2 ** (len(channel_mult) - 1)
        if image_size % factor:
            raise ValueError(
                f"image_size must be divisible by 2^(levels - 1) = {factor}, got {image_size}; "
                "shorten channel_mult or resize the images"
            )
        self.image_size, self.in_channels = image_size, in_channels
        self.model_channels, self.dropout = model_channels, dropout
        self.num_heads, self.num_head_channels = num_heads, num_head_channels
        self.use_scale_shift_norm = use_scale_shift_norm
        self.resblock_updown = resblock_updown
        self.use_new_attention_order = use_new_attention_order
        self.checkpointing = checkpointing
        self.embedding = 4 * model_channels
        self.time_embed = nn.Sequential(
            nn.Linear(model_channels, self.embedding),
            nn.SiLU(),
            nn.Linear(self.embedding, self.embedding),
        )
        width = int(channel_mult[0] * model_channels)
        self.input_blocks = nn.ModuleList(
            [TimestepSequential(nn.Conv2d(in_channels, width, 3, padding=1))]
        )
        self.widths = [width]
        downsampling = 1
        for level, multiple in enumerate(channel_mult):
            for _ in range(num_res_blocks):
                layers: list[nn.Module] = [self._res(width, int(multiple * model_channels))]
                width = int(multiple * model_channels)
                if downsampling in attention_resolutions:
                    layers.append(self._attention(width))
                self.input_blocks.append(TimestepSequential(*layers))
                self.widths.append(width)
            if level != len(channel_mult) - 1:
                down: nn.Module = (
                    self._res(width, width, "down")
                    if resblock_updown
                    else Downsample(width, with_conv=True)
                )
                self.input_blocks.append(TimestepSequential(down))
                self.widths.append(width)
                downsampling *= 2
        self.downsampling = downsampling
        self.middle_block = TimestepSequential(
            self._res(width, width), self._attention(width), self._res(width, width)
        )

    def _res(self, channels: int, out_channels: int, resample: str | None = None) -> ResBlock:
        for width in (channels, out_channels):
            if width % GROUPS:
                raise ValueError(
                    f"channels of every block must be multiples of {GROUPS} (group norm), got "
                    f"{width}; change model_channels or channel_mult"
                )
        return ResBlock(
            channels,
            self.embedding,
            out_channels,
            self.dropout,
            self.use_scale_shift_norm,
            resample,
        )

    def _attention(self, channels: int) -> AttentionBlock:
        if self.num_head_channels in (None, -1):
            heads, name = self.num_heads, f"num_heads = {self.num_heads}"
        else:
            heads = channels // int(self.num_head_channels or 1)
            name = f"num_head_channels = {self.num_head_channels}"
        if (
            heads < 1
            or channels % heads
            or (
                self.num_head_channels not in (None, -1)
                and channels % int(self.num_head_channels or 1)
            )
        ):
            raise ValueError(f"{channels} attention channels cannot be split by {name}")
        return AttentionBlock(channels, heads, self.use_new_attention_order)

    def _run(self, block: nn.Module, x: Tensor, embedding: Tensor) -> Tensor:
        if self.checkpointing and self.training:
            out = checkpoint(block, x, embedding, use_reentrant=False)
        else:
            out = block(x, embedding)
        assert isinstance(out, Tensor)
        return out

    def _embed(self, x: Tensor, timesteps: Tensor) -> Tensor:
        if x.shape[-1] % self.downsampling or x.shape[-2] % self.downsampling:
            raise ValueError(
                f"image sides must be divisible by {self.downsampling}, got {tuple(x.shape[-2:])}"
            )
        features = timestep_embedding(timesteps, self.model_channels)
        out: Tensor = self.time_embed(features.to(x.dtype))
        return out


class ADMUNet(_Encoder):
    """The U-Net of "Diffusion Models Beat GANs", with the published names of its parameters.

    Args:
        image_size: Side of the training images.
        in_channels: Channels of the data.
        model_channels: Base width C.
        out_channels: Channels of the data, doubled for a learned variance.
        num_res_blocks: Residual blocks per level (one more on the way up).
        attention_resolutions: Downsampling factors (not sides) with attention.
        dropout: Dropout in residual blocks.
        channel_mult: Width of each level in units of C.
        num_classes: Number of labels of a class-conditional model.
        num_heads: Heads, where num_head_channels is not given.
        num_head_channels: Channels per head.
        use_scale_shift_norm: Embedding scales and shifts, instead of being added.
        resblock_updown: Resampling inside residual blocks.
        use_new_attention_order: Must follow the checkpoint: shapes do not tell the two apart.
        checkpointing: Recompute blocks in the backward pass to save memory.

    Raises:
        ValueError: If sizes do not divide.
    """

    def __init__(
        self,
        image_size: int = 32,
        in_channels: int = 3,
        model_channels: int = 128,
        out_channels: int = 6,
        num_res_blocks: int = 3,
        attention_resolutions: Sequence[int] = (2, 4),
        dropout: float = 0.0,
        channel_mult: Sequence[float] = (1, 2, 2, 2),
        num_classes: int | None = None,
        num_heads: int = 1,
        num_head_channels: int | None = None,
        use_scale_shift_norm: bool = True,
        resblock_updown: bool = True,
        use_new_attention_order: bool = False,
        checkpointing: bool = False,
    ) -> None:
        super().__init__(
            image_size,
            in_channels,
            model_channels,
            num_res_blocks,
            attention_resolutions,
            dropout,
            channel_mult,
            num_heads,
            num_head_channels,
            use_scale_shift_norm,
            resblock_updown,
            use_new_attention_order,
            checkpointing,
        )
        self.num_classes, self.out_channels = num_classes, out_channels
        if num_classes is not None:
            self.label_emb = nn.Embedding(num_classes, self.embedding)
        skips, width = list(self.widths), self.widths[-1]
        downsampling = self.downsampling
        self.output_blocks = nn.ModuleList()
        for level, multiple in reversed(list(enumerate(channel_mult))):
            for place in range(num_res_blocks + 1):
                out_width = int(multiple * model_channels)
                layers: list[nn.Module] = [self._res(width + skips.pop(), out_width)]
                width = out_width
                if downsampling in attention_resolutions:
                    layers.append(self._attention(width))
                if level and place == num_res_blocks:
                    layers.append(
                        self._res(width, width, "up")
                        if resblock_updown
                        else Upsample(width, with_conv=True)
                    )
                    downsampling //= 2
                self.output_blocks.append(TimestepSequential(*layers))
        self.out = nn.Sequential(
            group_norm(width), nn.SiLU(), zero_init(nn.Conv2d(width, out_channels, 3, padding=1))
        )

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor | None = None) -> Tensor:
        """Network output.

        Args:
            x: ``(n, in_channels, h, w)``.
            timesteps: ``(n,)`` original indices (fractions allowed).
            labels: ``(n,)`` int64, exactly when the model is class-conditional.

        Returns:
            ``(n, out_channels, h, w)``.

        Raises:
            ValueError: If labels are missing, or given to an unconditional model.
        """
        if (labels is None) != (self.num_classes is None):
            raise ValueError(
                "this model is class-conditional and needs labels"
                if labels is None
                else "labels given to a model without classes; set num_classes or drop them"
            )
        embedding = self._embed(x, timesteps)
        if labels is not None:
            embedding = embedding + self.label_emb(labels)
        skips = []
        for block in self.input_blocks:
            x = self._run(block, x, embedding)
            skips.append(x)
        x = self._run(self.middle_block, x, embedding)
        for block in self.output_blocks:
            x = self._run(block, torch.cat([x, skips.pop()], dim=1), embedding)
        out: Tensor = self.out(x)
        return out


class ADMClassifier(_Encoder):
    """Noisy-image classifier for guidance: encoder half and a pooling head.

    Args:
        out_channels: Number of classes.
        pool: "attention", "adaptive", "spatial" or "spatial_v2".

    The other arguments are those of `ADMUNet`.
    """

    def __init__(
        self,
        image_size: int = 64,
        in_channels: int = 3,
        model_channels: int = 128,
        out_channels: int = 1000,
        num_res_blocks: int = 2,
        attention_resolutions: Sequence[int] = (2, 4, 8),
        dropout: float = 0.0,
        channel_mult: Sequence[float] = (1, 2, 3, 4),
        num_heads: int = 1,
        num_head_channels: int | None = 64,
        use_scale_shift_norm: bool = True,
        resblock_updown: bool = True,
        use_new_attention_order: bool = False,
        pool: str = "attention",
        checkpointing: bool = False,
    ) -> None:
        super().__init__(
            image_size,
            in_channels,
            model_channels,
            num_res_blocks,
            attention_resolutions,
            dropout,
            channel_mult,
            num_heads,
            num_head_channels,
            use_scale_shift_norm,
            resblock_updown,
            use_new_attention_order,
            checkpointing,
        )
        if pool not in POOLS:
            raise ValueError(f"pool must be one of {POOLS}, got {pool!r}")
        self.pool, width = pool, self.widths[-1]
        if pool == "attention":
            if num_head_channels in (None, -1):
                raise ValueError("pool 'attention' needs num_head_channels")
            side = image_size // self.downsampling
            head: list[nn.Module] = [
                group_norm(width),
                nn.SiLU(),
                AttentionPool2d(side, width, int(num_head_channels or 1), out_channels),
            ]
        elif pool == "adaptive":
            head = [
                group_norm(width),
                nn.SiLU(),
                nn.AdaptiveAvgPool2d((1, 1)),
                zero_init(nn.Conv2d(width, out_channels, 1)),
                nn.Flatten(),
            ]
        else:
            # Means of every input block and of the middle, side by side.
            features = sum(self.widths) + width
            between: list[nn.Module] = (
                [nn.ReLU()] if pool == "spatial" else [group_norm(2048), nn.SiLU()]
            )
            head = [nn.Linear(features, 2048), *between, nn.Linear(2048, out_channels)]
        self.out = nn.Sequential(*head)

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        """Logits ``(n, out_channels)`` of noisy images ``(n, in_channels, h, w)``."""
        embedding = self._embed(x, timesteps)
        means = []
        for block in [*self.input_blocks, self.middle_block]:
            x = self._run(block, x, embedding)
            means.append(x.mean(dim=(2, 3)))
        out: Tensor = self.out(torch.cat(means, dim=1) if self.pool.startswith("spatial") else x)
        return out


def count_parameters(module: nn.Module) -> int:
    """Number of trainable and fixed parameters."""
    return sum(parameter.numel() for parameter in module.parameters())
