"""The SE(3)-equivariant transformer over residue graphs (degrees 0 and 1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_modules.ppiformer.geometry import COORDINATE_SCALE, Geometry, build_geometry
from lightning_modules.ppiformer.layers import Attention, Block, FeedForward, Norm, PooledProduct
from lightning_modules.ppiformer.tensor_product import ROTATION_CONSTANTS


class SE3Encoder(nn.Module):
    """Residue embeddings that do not change when the complex is rotated or translated.

    Reflections do change them (the degree 1 to 1 map has a cross product), so chirality is seen.

    Args:
        channels: hidden channels of degree 0 (scalars) and degree 1 (vectors). Published: (128,
            64).
        inputs: input channels of degree 0 and degree 1. Published: (20, 1).
        depth: number of layers. Published: 8.
        heads: attention heads. Published: 2.
        head_widths: channels per head of degree 0 and 1. Published: (32, 16).
        radial_hidden: width of the radial networks. Published: 64.
        edge_embedding: size of the embedding of the same-chain token. Published: 16.
        radius: largest distance of an edge in scaled units (8 is 32 A).
        coordinate_scale: coordinates in A are divided by this.
        gate_heads: gate attention heads by the scalars. Published: off.
        reference_attention: reproduce the original encoder, whose degree-0 attention ignores
            ``radius``.
        last_layer_scalar_only: leave out the vector branch of the last layer, which a scalar
            read-out cannot train.
        chain_tokens: tell same-chain from inter-chain edges; false feeds one token everywhere
            (ablation).

    Raises:
        ValueError: for sizes that are not positive.
    """

    def __init__(
        self,
        channels: tuple[int, int] = (128, 64),
        inputs: tuple[int, int] = (20, 1),
        depth: int = 8,
        heads: int = 2,
        head_widths: tuple[int, int] = (32, 16),
        radial_hidden: int = 64,
        edge_embedding: int = 16,
        radius: float = 8.0,
        coordinate_scale: float = COORDINATE_SCALE,
        gate_heads: bool = False,
        reference_attention: bool = False,
        last_layer_scalar_only: bool = True,
        chain_tokens: bool = True,
    ) -> None:
        super().__init__()
        channels, inputs, head_widths = _pair(channels), _pair(inputs), _pair(head_widths)
        sizes = {"channels": channels, "inputs": inputs, "head_widths": head_widths}
        counts = {
            "depth": depth,
            "heads": heads,
            "radial_hidden": radial_hidden,
            "edge_embedding": edge_embedding,
        }
        for name, value in {**sizes, **{key: (count,) for key, count in counts.items()}}.items():
            if min(value) < 1:
                raise ValueError(
                    f"{name} must be positive, got {value if len(value) > 1 else value[0]}"
                )
        if radius <= 0 or coordinate_scale <= 0:
            raise ValueError(
                f"radius and coordinate_scale must be positive, got {radius} and {coordinate_scale}"
            )
        self.channels, self.inputs, self.depth = channels, inputs, depth
        self.radius, self.coordinate_scale = radius, coordinate_scale
        self.reference_attention, self.chain_tokens = reference_attention, chain_tokens
        self.last_layer_scalar_only = last_layer_scalar_only
        edge_inputs = edge_embedding + 1
        self.register_buffer(
            "constants", torch.tensor(ROTATION_CONSTANTS, dtype=torch.float64).float()
        )
        self.edge_embedding = nn.Embedding(2, edge_embedding)
        self.embed = PooledProduct(inputs, channels, edge_inputs, radial_hidden)
        scalar_only = [last_layer_scalar_only and layer == depth - 1 for layer in range(depth)]
        self.blocks = nn.ModuleList(
            Block(
                Attention(
                    channels, heads, head_widths, edge_inputs, radial_hidden, gate_heads, scalar
                ),
                FeedForward(channels, scalar),
            )
            for scalar in scalar_only
        )
        self.norm = Norm((channels[0], 0 if last_layer_scalar_only else channels[1]))

    def geometry(self, position: Tensor, neighbors: Tensor, exists: Tensor) -> Geometry:
        """Edge quantities with this encoder's radius and scale; see `build_geometry`."""
        return build_geometry(
            position,
            neighbors,
            exists,
            radius=self.radius,
            scale=self.coordinate_scale,
            reference_attention=self.reference_attention,
        )

    def edge_features(self, geometry: Geometry, chain: Tensor) -> Tensor:
        """Embedding of the token (1 = same chain, 0 = different chains) beside the scaled distance.

        Args:
            geometry: edges.
            chain: (nodes,) int64, chain number of each residue (compared per edge, so any node
                order will do).

        Returns:
            (nodes, k, edge_embedding + 1).
        """
        same = (chain[:, None] == chain[geometry.neighbors]).long()
        embedded = self.edge_embedding(same if self.chain_tokens else torch.zeros_like(same))
        return torch.cat([embedded, geometry.distance[..., None].to(embedded.dtype)], dim=-1)

    def forward(
        self,
        scalars: Tensor,
        vectors: Tensor,
        chain: Tensor,
        geometry: Geometry,
        record: list[Tensor] | None = None,
        checkpoint: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Encode one or several feature variants of the same batch of graphs.

        Args:
            scalars: (nodes, inputs[0]) or (nodes, variants, inputs[0]); one-hot residue types.
            vectors: (nodes, inputs[1], 3), shared by all variants; in A, not scaled.
            chain: (nodes,) int64.
            geometry: from `geometry`.
            record: collects the attention weights of every layer and degree.
            checkpoint: runs a layer, for example with activation checkpointing; None calls it.

        Returns:
            Scalars (nodes, [variants,] channels[0]) and vectors (nodes, [variants,] channels[1],
            3), or None for the vectors with ``last_layer_scalar_only``.
        """
        single = scalars.ndim == 2
        x = scalars.unsqueeze(1) if single else scalars
        v = vectors.transpose(1, 2).unsqueeze(1).expand(-1, x.shape[1], -1, -1)
        edge = self.edge_features(geometry, chain)
        constants = self.constants
        x, v = self.embed(x, v, edge, geometry, constants)
        for block in self.blocks:
            arguments = (x, v, edge, geometry, constants, record)
            x, v = block(*arguments) if checkpoint is None else checkpoint(block, *arguments)
        x, out = self.norm(x, None if self.last_layer_scalar_only else v)
        if out is not None:
            out = out.transpose(2, 3)
        if single:
            return x.squeeze(1), None if out is None else out.squeeze(1)
        return x, out


def _pair(value: tuple[int, int]) -> tuple[int, int]:
    first, second = value
    return int(first), int(second)
