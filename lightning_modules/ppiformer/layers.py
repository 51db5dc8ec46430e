"""Layers of the equivariant transformer: norm, distance attention, gated feed-forward."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_modules.ppiformer.geometry import Geometry
from lightning_modules.ppiformer.tensor_product import Linear, TensorProduct

DIFFERENCE_EPS = 1e-6
"""Added to each component of a key-query difference: a distance with a gradient at zero."""


def full_precision(value: Tensor) -> Tensor:
    """Half precision to float32; float32 and float64 unchanged."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


class Norm(nn.Module):
    """Root-mean-square normalisation with one scale per channel and no shift.

    For degree 1 the mean square is taken over channels of the squared vector lengths.

    Args:
        channels: of degree 0 and degree 1; 0 leaves a degree out.
    """

    def __init__(self, channels: tuple[int, int]) -> None:
        super().__init__()
        self.scale = nn.ParameterList(torch.ones(width) for width in channels if width)

    def forward(self, scalars: Tensor, vectors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Normalise (nodes, variants, c0) and (nodes, variants, 3, c1)."""
        x = full_precision(scalars)
        mean_square = x.square().mean(-1, keepdim=True)
        # The clamp of the square (1e-12 of the root) keeps the gradient finite for an all-zero
        # input.
        scalars = x / mean_square.clamp(min=1e-24).sqrt() * self.scale[0]
        if vectors is None or len(self.scale) == 1:
            return scalars, None
        v = full_precision(vectors)
        mean_square = v.square().sum(-2, keepdim=True).mean(-1, keepdim=True)
        return scalars, v / mean_square.clamp(min=1e-24).sqrt() * self.scale[1]


class PooledProduct(nn.Module):
    """Input layer: mean of the edge messages within the radius, and the node's own features."""

    def __init__(
        self, inputs: tuple[int, int], outputs: tuple[int, int], edge_inputs: int, hidden: int
    ) -> None:
        super().__init__()
        self.product = TensorProduct(inputs, outputs, edge_inputs, hidden)

    def forward(
        self, scalars: Tensor, vectors: Tensor, edge: Tensor, geometry: Geometry, constants: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `TensorProduct.forward`; a residue without neighbours gets zero messages."""
        zero, one = self.product(scalars, vectors, edge, geometry, constants)
        assert one is not None
        share = geometry.within.to(zero.dtype)
        share = share / share.sum(1, keepdim=True).clamp(min=1.0)
        pooled = (
            torch.einsum("nk,nkvc->nvc", share, zero),
            torch.einsum("nk,nkvxc->nvxc", share, one),
        )
        out, own = self.product.out, self.product.self_slot
        return out[0](pooled[0]) + own[0](scalars), out[1](pooled[1]) + own[1](vectors)


class Attention(nn.Module):
    """Attention whose score is the negative distance of query and key.

    The softmax runs over the residue itself and its neighbours, per degree and head.

    Args:
        channels: of degree 0 and 1.
        heads: number of heads, the same for both degrees.
        widths: channels per head of degree 0 and 1.
        edge_inputs: edge features.
        hidden: width of the radial networks.
        gate_heads: multiply every head by a sigmoid gate computed from the scalars.
        scalar_only: leave the vector branch out (last layer of an invariant model).
    """

    def __init__(
        self,
        channels: tuple[int, int],
        heads: int,
        widths: tuple[int, int],
        edge_inputs: int,
        hidden: int,
        gate_heads: bool = False,
        scalar_only: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.widths = heads, widths
        degrees = (0,) if scalar_only else (0, 1)
        self.degrees = degrees
        inner = tuple(heads * width if d in degrees else 0 for d, width in enumerate(widths))
        self.norm = Norm(channels)
        self.query = nn.ModuleList(Linear(channels[d], inner[d]) for d in degrees)
        self.product = TensorProduct(channels, (2 * inner[0], 2 * inner[1]), edge_inputs, hidden)
        self.out = nn.ModuleList(Linear(inner[d], channels[d], zero=True) for d in degrees)
        self.gate = nn.Linear(channels[0], heads * len(degrees)) if gate_heads else None

    def _attend(
        self, query: Tensor, own: Tensor, edges: Tensor, allowed: Tensor, width: int
    ) -> tuple[Tensor, Tensor]:
        """One degree. query (n, v, [3,] h*w), own (n, v, [3,] 2hw), edges (n, k, v, [3,] 2hw)."""
        heads = self.heads
        query = query.view(*query.shape[:-1], heads, width)
        own_key, own_value = own.view(*own.shape[:-1], heads, 2, width).unbind(-2)
        key, value = edges.view(*edges.shape[:-1], heads, 2, width).unbind(-2)
        vector = query.ndim == 5

        def score(difference: Tensor) -> Tensor:
            squares = full_precision(difference + DIFFERENCE_EPS).square()
            if vector:
                return -squares.sum(-3).sqrt().sum(-1) / math.sqrt(width)
            return -squares.sum(-1).sqrt() / math.sqrt(width)

        scores = score(query.unsqueeze(1) - key).masked_fill(~allowed[:, :, None, None], -torch.inf)
        scores = torch.cat([score(query - own_key).unsqueeze(1), scores], dim=1)
        weights = torch.softmax(scores, dim=1)
        share = weights.to(value.dtype)
        letters = "nkvh,nkvxhw->nvxhw" if vector else "nkvh,nkvhw->nvhw"
        own_share = share[:, 0, :, None, :, None] if vector else share[:, 0, :, :, None]
        return own_share * own_value + torch.einsum(letters, share[:, 1:], value), weights

    def forward(
        self,
        scalars: Tensor,
        vectors: Tensor,
        edge: Tensor,
        geometry: Geometry,
        constants: Tensor,
        record: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The update of both degrees (to be added by the caller); vectors None if ``scalar_only``.

        ``record`` collects attention weights (nodes, 1 + k, variants, heads) per degree, the
        residue itself first.
        """
        x, v = self.norm(scalars, vectors)
        edges = self.product(x, v, edge, geometry, constants)
        gates = None
        if self.gate is not None:
            gates = torch.sigmoid(self.gate(x))
            gates = gates.view(*x.shape[:-1], len(self.degrees), self.heads)
        updates: list[Tensor | None] = [None, None]
        for degree in self.degrees:
            features = v if degree else x
            own = self.product.self_slot[degree](features)
            slots = self.product.out[degree](edges[degree])
            allowed = geometry.within if degree else geometry.attends
            heads, weights = self._attend(
                self.query[degree](features), own, slots, allowed, self.widths[degree]
            )
            if record is not None:
                record.append(weights.detach())
            if gates is not None:
                gate = gates[..., degree, :, None]
                heads = heads * (gate.unsqueeze(-3) if degree else gate)
            updates[degree] = self.out[degree](heads.flatten(-2))
        assert updates[0] is not None
        return updates[0], updates[1]


class FeedForward(nn.Module):
    """Two channel maps, four times as wide inside; SiLU on scalars, gates on vectors."""

    def __init__(self, channels: tuple[int, int], scalar_only: bool = False) -> None:
        super().__init__()
        self.gates = 4 * channels[1]
        self.scalar_only = scalar_only
        degrees = (0,) if scalar_only else (0, 1)
        self.norm = Norm((channels[0], 0 if scalar_only else channels[1]))
        widths = (4 * channels[0] + self.gates, 4 * channels[1])
        self.inner = nn.ModuleList(Linear(channels[d], widths[d]) for d in degrees)
        self.out = nn.ModuleList(Linear(4 * channels[d], channels[d], zero=True) for d in degrees)

    def forward(self, scalars: Tensor, vectors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The update of both degrees, to be added by the caller."""
        x, v = self.norm(scalars, None if self.scalar_only else vectors)
        if self.scalar_only:
            # The first columns would only gate vectors; they are kept so that shapes equal those of
            # the full layer.
            weight = self.inner[0].weight
            assert isinstance(weight, Tensor)
            hidden = x @ weight[:, self.gates :]
            return self.out[0](functional.silu(hidden)), None
        hidden = self.inner[0](x)
        gate, hidden = hidden[..., : self.gates], hidden[..., self.gates :]
        gated = self.inner[1](v) * torch.sigmoid(gate).unsqueeze(-2)
        return self.out[0](functional.silu(hidden)), self.out[1](gated)


class Block(nn.Module):
    """Attention and feed-forward, each added to its input: the unit that is sharded under FSDP2."""

    def __init__(self, attention: Attention, feed_forward: FeedForward) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward

    def forward(
        self,
        scalars: Tensor,
        vectors: Tensor,
        edge: Tensor,
        geometry: Geometry,
        constants: Tensor,
        record: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One layer."""
        update, vector_update = self.attention(scalars, vectors, edge, geometry, constants, record)
        scalars = scalars + update
        vectors = vectors if vector_update is None else vectors + vector_update
        update, vector_update = self.feed_forward(scalars, vectors)
        return scalars + update, vectors if vector_update is None else vectors + vector_update
