"""From residue log-probabilities to changes of the binding free energy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_modules.ppiformer.residues import one_hot

READ_OUTS = (
    "masked_marginals",
    "wt_marginals",
    "embedding_difference",
    "embedding_concatenation",
)
"""How a mutation is scored; the first is the published one."""

Encode = Callable[[Tensor], Tensor]
"""(nodes, variants, 20) residue types to (nodes, variants, channels) embeddings."""


class MutationBatch(Protocol):
    """What a read-out needs of a batch.

    Attributes:
        types: (nodes,) int64, wild types.
        point_node: (points,) int64, node of every substituted residue.
        point_type: (points,) int64, its mutant type.
        point_mutation: (points,) int64, mutation that the point belongs to.
        mutation_graph: (mutations,) int64, graph of every mutation.
    """

    @property
    def types(self) -> Tensor:
        """Wild types, (nodes,) int64."""
        ...

    @property
    def point_node(self) -> Tensor:
        """Node of every point."""
        ...

    @property
    def point_type(self) -> Tensor:
        """Mutant type of every point."""
        ...

    @property
    def point_mutation(self) -> Tensor:
        """Mutation of every point."""
        ...

    @property
    def mutation_graph(self) -> Tensor:
        """Graph of every mutation."""
        ...


class Mutations(NamedTuple):
    """Mutations without a data set around them; the fields of `MutationBatch`."""

    types: Tensor
    point_node: Tensor
    point_type: Tensor
    point_mutation: Tensor
    mutation_graph: Tensor

    @classmethod
    def of(cls, types: Tensor, mutations: Sequence[Iterable[tuple[int, int]]]) -> Mutations:
        """Mutations of one graph, each a collection of (node, mutant type)."""
        points = [(n, t, i) for i, points in enumerate(mutations) for n, t in points]
        columns = torch.tensor(points, dtype=torch.int64, device=types.device).reshape(-1, 3)
        graph = torch.zeros(len(mutations), dtype=torch.int64, device=types.device)
        return cls(types, columns[:, 0], columns[:, 1], columns[:, 2], graph)


class Variants(NamedTuple):
    """Which variant of its graph answers for each mutation.

    Attributes:
        number: variants of the graph that needs most.
        of_mutation: (mutations,) int64.
    """

    number: int
    of_mutation: Tensor


def group_by_positions(batch: MutationBatch, grouped: bool = True) -> Variants:
    """Number the distinct position sets of every graph: one masked pass serves a whole set.

    The v-th set of every graph of the batch goes into variant v, since graphs don't interact.

    Args:
        batch: mutations.
        grouped: false gives every mutation its own variant.
    """
    mutations = batch.mutation_graph.tolist()
    positions: list[list[int]] = [[] for _ in mutations]
    for mutation, node in zip(
        batch.point_mutation.tolist(), batch.point_node.tolist(), strict=True
    ):
        positions[mutation].append(node)
    seen: dict[int, dict[object, int]] = {}
    numbers = []
    for mutation, graph in enumerate(mutations):
        key: object = tuple(sorted(positions[mutation])) if grouped else mutation
        known = seen.setdefault(graph, {})
        numbers.append(known.setdefault(key, len(known)))
    count = max((len(known) for known in seen.values()), default=0)
    return Variants(count, torch.tensor(numbers, dtype=torch.int64, device=batch.types.device))


def sum_points(values: Tensor, batch: MutationBatch) -> Tensor:
    """Sum (points, ...) values over the points of each mutation, in the order of the points."""
    shape = (len(batch.mutation_graph), *values.shape[1:])
    return values.new_zeros(shape).index_add(0, batch.point_mutation, values)


def _log_odds(logits: Tensor, wild: Tensor, mutant: Tensor) -> Tensor:
    """(points, 20) logits to log p(wild type) - log p(mutant), at least in single precision."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    log_probability = torch.log_softmax(logits, dim=-1)
    types = torch.stack([wild, mutant], dim=1)
    at_wild, at_mutant = log_probability.gather(1, types).unbind(1)
    return at_wild - at_mutant


def masked_marginals(
    encode: Encode,
    classifier: nn.Module,
    batch: MutationBatch,
    *,
    max_variants: int | None = None,
    grouped: bool = True,
    hidden: Tensor | None = None,
) -> Tensor:
    """Sum over the mutated positions of log p(wild type) - log p(mutant), all of them hidden.

    Antisymmetric under exchange of wild type and mutant, zero for equal ones, independent of the
    order of the points: the hidden context contains neither residue.

    Args:
        encode: the encoder over one set of graphs.
        classifier: embeddings to 20 logits.
        batch: mutations.
        max_variants: variants encoded at once; None all.
        grouped: encode every position set once (false: every mutation, for comparison).
        hidden: (nodes,) bool, further residues to hide: another context for the same question.

    Returns:
        (mutations,), negative = the mutant binds better.
    """
    variants = group_by_positions(batch, grouped)
    types = one_hot(batch.types, next(classifier.parameters()).dtype)
    result = types.new_zeros(len(batch.mutation_graph))
    of_point = variants.of_mutation[batch.point_mutation]
    step = max_variants or max(variants.number, 1)
    for start in range(0, variants.number, step):
        size = min(step, variants.number - start)
        here = (of_point >= start) & (of_point < start + size)
        shown = torch.ones(len(types), size, dtype=types.dtype, device=types.device)
        shown[batch.point_node[here], of_point[here] - start] = 0
        if hidden is not None:
            shown[hidden] = 0
        embedding = encode(types[:, None, :] * shown[..., None])
        node = batch.point_node[here]
        logits = classifier(embedding[node, of_point[here] - start])
        odds = _log_odds(logits, batch.types[node], batch.point_type[here])
        result = result.index_add(0, batch.point_mutation[here], odds.to(result.dtype))
    return result


def wt_marginals(encode: Encode, classifier: nn.Module, batch: MutationBatch) -> Tensor:
    """As `masked_marginals` with nothing hidden: one pass for any number of mutations.

    Not antisymmetric: the wild type is part of the context.
    """
    embedding = encode(one_hot(batch.types, next(classifier.parameters()).dtype)[:, None])
    node = batch.point_node
    logits = classifier(embedding[node, 0])
    return sum_points(_log_odds(logits, batch.types[node], batch.point_type), batch)


def _wild_and_mutant(
    encode: Encode, batch: MutationBatch, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(points, channels) embeddings of the mutated residues before and after the mutation."""
    variants = group_by_positions(batch, grouped=False)
    types = batch.types[:, None].repeat(1, variants.number + 1)
    column = variants.of_mutation[batch.point_mutation] + 1
    types[batch.point_node, column] = batch.point_type
    embedding = encode(one_hot(types, dtype))
    return embedding[batch.point_node, 0], embedding[batch.point_node, column]


class EmbeddingDifference(nn.Module):
    """Odd function of the summed difference of residue embeddings: antisymmetric by construction.

    Args:
        channels: of the embedding.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Linear(channels, channels // 2, bias=False)
        self.out = nn.Linear(channels // 2, 1, bias=False)

    def forward(self, encode: Encode, batch: MutationBatch) -> Tensor:
        """(mutations,)."""
        wild, mutant = _wild_and_mutant(encode, batch, self.inner.weight.dtype)
        difference = sum_points(wild - mutant, batch)
        result: Tensor = self.out(torch.tanh(self.inner(difference)))[:, 0]
        return result


class EmbeddingConcatenation(nn.Module):
    """A small network on the mean embeddings of the mutated residues before and after.

    Args:
        channels: of the embedding.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * channels, channels)
        self.out = nn.Linear(channels, 1)

    def forward(self, encode: Encode, batch: MutationBatch) -> Tensor:
        """(mutations,)."""
        wild, mutant = _wild_and_mutant(encode, batch, self.inner.weight.dtype)
        points = sum_points(torch.ones_like(wild[:, :1]), batch).clamp(min=1)
        means = torch.cat([sum_points(wild, batch), sum_points(mutant, batch)], -1) / points
        result: Tensor = self.out(torch.relu(self.inner(means)))[:, 0]
        return result


class AffineCorrection(nn.Module):
    """``scale * ddG + shift``, the identity at the start."""

    def __init__(self) -> None:
        super().__init__()
        # one element instead of none: sharded parameters need a dimension
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, ddg: Tensor) -> Tensor:
        """(mutations,) to (mutations,)."""
        return self.scale * ddg + self.shift


def reversed_mutations(batch: Any) -> Any:
    """A copy of a batch with one mutation per interface, going from the mutant back to wild type.

    Raises:
        ValueError: if an interface carries several mutations, whose contexts would mix.
    """
    graphs = batch.mutation_graph
    if len(torch.unique(graphs)) < len(graphs):
        raise ValueError("reverse=true needs mutations_per_interface=1 in the data")
    result = copy.copy(batch)
    types = batch.types.clone()
    types[batch.point_node] = batch.point_type
    result.types, result.point_type = types, batch.types[batch.point_node]
    return result
