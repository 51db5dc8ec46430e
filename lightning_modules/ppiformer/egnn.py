"""Invariant message passing on the same residue graphs: the simpler encoder to compare with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_modules.ppiformer.geometry import COORDINATE_SCALE, Geometry, build_geometry


class EGNNEncoder(nn.Module):
    """Equivariant graph neural network (Satorras et al., 2021) with fixed coordinates.

    Messages see features, the distance and the chain token; vector inputs enter through
    their products with the edge direction, so that the virtual C-beta is used.

    Args:
        channels: hidden width.
        inputs: input channels of degree 0 and degree 1.
        depth: number of layers.
        radius: largest distance of an edge in scaled units.
        coordinate_scale: coordinates in A are divided by this.
    """

    def __init__(
        self,
        channels: int = 32,
        inputs: tuple[int, int] = (20, 1),
        depth: int = 7,
        radius: float = 8.0,
        coordinate_scale: float = COORDINATE_SCALE,
    ) -> None:
        super().__init__()
        self.channels = (channels, 0)
        self.inputs = inputs
        self.depth = depth
        self.radius, self.coordinate_scale = radius, coordinate_scale
        self.last_layer_scalar_only = True
        edge = 2 + 2 * inputs[1]
        self.embed = nn.Linear(inputs[0], channels)
        self.message = nn.ModuleList(
            nn.Sequential(
                nn.Linear(2 * channels + edge, channels),
                nn.SiLU(),
                nn.Linear(channels, channels),
                nn.SiLU(),
            )
            for _ in range(depth)
        )
        self.gate = nn.ModuleList(nn.Linear(channels, 1) for _ in range(depth))
        self.update = nn.ModuleList(
            nn.Sequential(
                nn.Linear(2 * channels, channels), nn.SiLU(), nn.Linear(channels, channels)
            )
            for _ in range(depth)
        )

    def geometry(self, position: Tensor, neighbors: Tensor, exists: Tensor) -> Geometry:
        """Edge quantities; see `build_geometry`."""
        return build_geometry(
            position, neighbors, exists, radius=self.radius, scale=self.coordinate_scale
        )

    def forward(
        self,
        scalars: Tensor,
        vectors: Tensor,
        chain: Tensor,
        geometry: Geometry,
        record: list[Tensor] | None = None,
    ) -> tuple[Tensor, None]:
        """See `SE3Encoder.forward`; there are no vector outputs and no attention to record."""
        single = scalars.ndim == 2
        x = self.embed(scalars.unsqueeze(1) if single else scalars)
        neighbors, k = geometry.neighbors, geometry.neighbors.shape[1]
        unit = geometry.unit.to(vectors.dtype)
        own = torch.einsum("nfx,nkx->nkf", vectors, unit)
        theirs = torch.einsum("nkfx,nkx->nkf", vectors[neighbors], unit)
        same = (chain[:, None] == chain[neighbors]).to(x.dtype)[..., None]
        edge = torch.cat([geometry.distance[..., None].to(x.dtype), same, own, theirs], -1)
        edge = edge[:, :, None].expand(-1, -1, x.shape[1], -1)
        within = geometry.within[:, :, None, None].to(x.dtype)
        for message, gate, update in zip(self.message, self.gate, self.update, strict=True):
            ends = torch.cat([x[:, None].expand(-1, k, -1, -1), x[neighbors], edge], -1)
            sent = message(ends)
            pooled = (sent * torch.sigmoid(gate(sent)) * within).sum(1)
            x = x + update(torch.cat([x, pooled], -1))
        return (x.squeeze(1) if single else x), None
