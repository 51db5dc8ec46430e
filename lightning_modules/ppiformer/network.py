"""The network as a whole: encoder, residue classifier and ddG read-out, without any training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_modules.components.randomness import generator_from
from lightning_modules.ppiformer.egnn import EGNNEncoder
from lightning_modules.ppiformer.encoder import SE3Encoder
from lightning_modules.ppiformer.geometry import Geometry, neighbors_within
from lightning_modules.ppiformer.readout import (
    READ_OUTS,
    AffineCorrection,
    EmbeddingConcatenation,
    EmbeddingDifference,
    MutationBatch,
    Mutations,
    masked_marginals,
    wt_marginals,
)
from lightning_modules.ppiformer.residues import RESIDUES, one_hot
from lightning_modules.ppiformer.search import Design, Substitution, beam_search

ReadOut = Literal[
    "masked_marginals", "wt_marginals", "embedding_difference", "embedding_concatenation"
]
_HEADS: dict[str, type[nn.Module]] = {
    "embedding_difference": EmbeddingDifference,
    "embedding_concatenation": EmbeddingConcatenation,
}


@dataclass
class Scoring:
    """How ddG is read from residue probabilities.

    Attributes:
        unbound: subtract the score of the mutation in its binding side alone.
        contexts: average over this many contexts; all but the first hide other residues as well.
        context_ratio: share of the other residues that is hidden.
        max_variants: masked variants encoded at once without gradients; None all.
    """

    unbound: bool = False
    contexts: int = 1
    context_ratio: float = 0.15
    max_variants: int | None = 32

    def __post_init__(self) -> None:
        if self.contexts < 1:
            raise ValueError(f"contexts must be at least 1, got {self.contexts}")
        if not 0 < self.context_ratio < 1:
            raise ValueError(f"context_ratio must be in (0, 1), got {self.context_ratio}")
        if self.max_variants is not None and self.max_variants < 1:
            raise ValueError(f"max_variants must be positive or null, got {self.max_variants}")


class InterfaceNetwork(nn.Module):
    """Encoder over residue graphs, classifier of residue types, optional heads of a read-out.

    Args:
        channels: hidden channels of degree 0 and 1.
        vectors: vector features per residue.
        depth: layers.
        heads: attention heads.
        head_widths: channels per head of degree 0 and 1.
        radial_hidden: width of the radial networks.
        edge_embedding: size of the embedding of the same-chain token.
        radius: longest edge in scaled units.
        gate_heads: see `SE3Encoder`.
        reference_attention: see `SE3Encoder`.
        chain_tokens: see `SE3Encoder`.
        encoder: `se3` or `egnn`.
        read_out: see `readout.py`.
        correction: learn a scale and a shift of ddG.
        scoring: see `Scoring`.
        activation_checkpointing: recompute layers in the backward pass.
    """

    def __init__(
        self,
        channels: tuple[int, int] = (128, 64),
        vectors: int = 1,
        depth: int = 8,
        heads: int = 2,
        head_widths: tuple[int, int] = (32, 16),
        radial_hidden: int = 64,
        edge_embedding: int = 16,
        radius: float = 8.0,
        gate_heads: bool = False,
        reference_attention: bool = False,
        chain_tokens: bool = True,
        encoder: str = "se3",
        read_out: str = "masked_marginals",
        correction: bool = False,
        scoring: Scoring | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if read_out not in READ_OUTS:
            raise ValueError(f"read_out must be one of {', '.join(READ_OUTS)}, got {read_out!r}")
        if encoder not in ("se3", "egnn"):
            raise ValueError(f"encoder must be 'se3' or 'egnn', got {encoder!r}")
        self.encoder: SE3Encoder | EGNNEncoder
        if encoder == "egnn":
            self.encoder = EGNNEncoder(channels[0], (20, vectors), depth, radius)
        else:
            self.encoder = SE3Encoder(
                channels,
                (20, vectors),
                depth,
                heads,
                head_widths,
                radial_hidden,
                edge_embedding,
                radius,
                gate_heads=gate_heads,
                reference_attention=reference_attention,
                chain_tokens=chain_tokens,
            )
        self.read_out = read_out
        self.scoring = scoring or Scoring()
        self.activation_checkpointing = activation_checkpointing
        self.classifier = nn.Linear(channels[0], 20)
        self.head = _HEADS[read_out](channels[0]) if read_out in _HEADS else None
        self.affine = AffineCorrection() if correction else None

    def geometry(self, batch: Any) -> Geometry:
        """Edges of a batch, shared by everything that is computed on it."""
        return self.encoder.geometry(batch.position, batch.neighbors, batch.exists)

    def embed(
        self, batch: Any, features: Tensor | None = None, geometry: Geometry | None = None
    ) -> Tensor:
        """Residue embeddings.

        Args:
            batch: graphs.
            features: (nodes, 20) or (nodes, variants, 20); default the one-hot types.
            geometry: default that of the batch.

        Returns:
            (nodes, [variants,] channels[0]).
        """
        geometry = self.geometry(batch) if geometry is None else geometry
        features = one_hot(batch.types, batch.vectors.dtype) if features is None else features
        options: dict[str, Any] = {}
        if (
            self.activation_checkpointing
            and torch.is_grad_enabled()
            and isinstance(self.encoder, SE3Encoder)
        ):
            options["checkpoint"] = _recomputed
        return self.encoder(features, batch.vectors, batch.chain, geometry, **options)[0]  # type: ignore[no-any-return]

    def forward(self, batch: Any, features: Tensor | None = None) -> Tensor:
        """Logits of the residue types, (nodes, [variants,] 20); see `embed`."""
        logits: Tensor = self.classifier(self.embed(batch, features))
        return logits

    def attention(self, batch: Any) -> list[dict[str, Any]]:
        """Attention weights as sparse edges.

        Returns:
            Per layer and degree `layer`, `degree`, `sender` (nodes, 1 + k) int64 with the residue
            itself first, and `weight` (nodes, 1 + k, heads).

        Raises:
            ValueError: for the EGNN baseline, which has none.
        """
        if not isinstance(self.encoder, SE3Encoder):
            raise ValueError("attention needs encoder='se3'; the EGNN baseline has none")
        record: list[Tensor] = []
        features = one_hot(batch.types, batch.vectors.dtype)
        with torch.no_grad():
            self.encoder(features, batch.vectors, batch.chain, self.geometry(batch), record=record)
        own = torch.arange(len(batch.types), device=batch.types.device)[:, None]
        sender = torch.cat([own, batch.neighbors], 1)
        return [
            {"layer": i // 2, "degree": i % 2, "sender": sender, "weight": weight[:, :, 0]}
            for i, weight in enumerate(record)
        ]

    # ------------------------------------------------------------------ mutations

    def ddg(
        self,
        batch: Any,
        mutations: MutationBatch | None = None,
        transform: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Predicted ddG, kcal/mol; negative = the mutant binds better.

        Args:
            batch: graphs.
            mutations: default those of the batch.
            transform: applied to embeddings, for example to scale their gradient.

        Returns:
            (mutations,) mean over contexts, 0 for a mutation without a residue in the interface,
            and (mutations,) spread over contexts.
        """
        asked: MutationBatch = batch if mutations is None else mutations
        bound = self.geometry(batch)
        apart = self._apart(batch) if self.scoring.unbound else None
        values = []
        for context in range(self.scoring.contexts):
            hidden = self._hidden(batch, context) if context else None
            value = self._read(batch, asked, bound, hidden, transform)
            if apart is not None:
                value = value - self._read(batch, asked, apart, hidden, transform)
            values.append(value if self.affine is None else self.affine(value))
        stacked = torch.stack(values)
        return stacked.mean(0), stacked.std(0, correction=0)

    def _hidden(self, batch: Any, context: int) -> Tensor:
        parts = [
            torch.rand(int(size), generator=generator_from("context", context, int(key)))
            for size, key in zip(batch.ptr.diff(), batch.key, strict=True)
        ]
        return (torch.cat(parts) < self.scoring.context_ratio).to(batch.types.device)

    def _apart(self, batch: Any) -> Geometry:
        k = batch.neighbors.shape[1]
        edges = neighbors_within(batch.position, batch.partner, batch.ptr.tolist(), k)
        return self.encoder.geometry(batch.position, *edges)

    def _read(
        self,
        batch: Any,
        mutations: MutationBatch,
        geometry: Geometry,
        hidden: Tensor | None,
        transform: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        def encode(features: Tensor) -> Tensor:
            embedding = self.embed(batch, features, geometry)
            return embedding if transform is None else transform(embedding)

        if self.head is not None:
            scored: Tensor = self.head(encode, mutations)
            return scored
        if self.read_out == "wt_marginals":
            return wt_marginals(encode, self.classifier, mutations)
        limit = None if torch.is_grad_enabled() else self.scoring.max_variants
        return masked_marginals(
            encode, self.classifier, mutations, max_variants=limit, hidden=hidden
        )

    def design(
        self, batch: Any, sites: list[int] | None = None, size: int = 3, width: int = 16
    ) -> list[tuple[list[str], Design]]:
        """Beam search for the best combination of substitutions of one interface.

        Args:
            batch: one graph.
            sites: nodes that may change, default all.
            size: most substitutions.
            width: of the beam.

        Returns:
            Best first: substitutions as `<node>:<mutant>` and the design.
        """
        types = batch.types.tolist()
        nodes = range(len(types)) if sites is None else sites
        candidates = [(n, t) for n in nodes for t in range(20) if t != types[n]]

        def score(sets: Any) -> list[float]:
            with torch.no_grad():
                values: list[float] = self.ddg(batch, Mutations.of(batch.types, sets))[0].tolist()
            return values

        def named(points: frozenset[Substitution]) -> list[str]:
            return [f"{node}:{RESIDUES[t]}" for node, t in sorted(points)]

        found = beam_search(score, candidates, size, width)
        return [(named(design.points), design) for design in found]


def _recomputed(block: nn.Module, *arguments: Any) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = checkpoint(block, *arguments, use_reentrant=False)
    return result


def ensemble_ddg(networks: list[InterfaceNetwork], batch: Any) -> tuple[Tensor, Tensor]:
    """Plain mean over networks and their spread; for one network its spread over contexts."""
    if len(networks) == 1:
        return networks[0].ddg(batch)
    stacked = torch.stack([network.ddg(batch)[0] for network in networks])
    return stacked.mean(0), stacked.std(0, correction=0)
