"""Clipped gradient sums from one ordinary backward pass: per-layer rules, no B x d memory.

Hooks keep every layer's input and output gradient. The squared norm of an example's gradient
follows from them without forming it (``||a^T g||^2 = sum (a a^T) o (g g^T)``), and so does the
sum of the gradients weighted by the clip factors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv1d_weight, conv2d_weight

from lightning_modules.components.privacy.clipping import ClippedSum, clip_factors


def mixing_layers(module: nn.Module) -> list[str]:
    """Names of layers that mix the examples of a batch: batch normalisation, whoever wrote it."""
    return [
        name
        for name, layer in module.named_modules()
        if any("BatchNorm" in kind.__name__ for kind in type(layer).__mro__)
    ]


def unsupported_layers(module: nn.Module) -> list[str]:
    """Names of layers with trainable parameters of their own that have no rule here."""
    return [
        f"{name or 'the module itself'} ({type(layer).__name__})"
        for name, layer in module.named_modules()
        if any(p.requires_grad for p in layer.parameters(recurse=False)) and not _has_rule(layer)
    ]


def _has_rule(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if isinstance(layer, nn.Embedding):
        return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
    return isinstance(layer, nn.Linear | nn.LayerNorm | nn.GroupNorm)


@dataclass
class _Use:
    """One call of a layer: input, and the gradient of the loss with respect to the output.

    ``kept`` holds per-example gradients that were formed for the norms and are small.
    """

    layer: nn.Module
    inputs: Tensor
    upstream: Tensor | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class GhostClipper:
    """Records a module's layers during training steps.

    Args:
        module: every trainable parameter must belong to a layer with a rule.

    Raises:
        ValueError: a layer without a rule, or a parameter outside of any layer.
    """

    module: nn.Module
    names: list[str]
    active: bool = False
    _uses: list[_Use] = field(default_factory=list)
    _handles: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        missing = unsupported_layers(self.module)
        if missing:
            raise ValueError(
                f"ghost clipping has no rule for {', '.join(missing)}: use clipping='vmap'"
            )
        self._by_id = {id(p): name for name, p in self.module.named_parameters()}
        for layer in self.module.modules():
            if _has_rule(layer) and any(p.requires_grad for p in layer.parameters(recurse=False)):
                self._handles.append(layer.register_forward_hook(self._record))

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._uses.clear()

    def start(self) -> None:
        """Forget the last batch and record from now on."""
        self._uses.clear()
        self.active = True

    def _record(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not (self.active and torch.is_grad_enabled() and output.requires_grad):
            return
        use = _Use(layer, inputs[0].detach())
        self._uses.append(use)

        def keep(upstream: Tensor) -> None:
            # A retained graph may be walked twice; then the contributions add up.
            known = use.upstream
            use.upstream = upstream.detach() if known is None else known + upstream.detach()

        output.register_hook(keep)  # type: ignore[no-untyped-call]

    def clipped_sum(self, count: int, clip_norm: float, scale: float) -> ClippedSum:
        """Clip and sum what was recorded since :meth:`start`.

        Args:
            count: examples in the batch.
            clip_norm: bound on the norm of every example's gradient.
            scale: factor from the recorded to the example's own loss: ``count`` if the loss is a
                mean over examples, 1 if it is a sum.

        Raises:
            ValueError: a layer was fed something else than one row an example.
        """
        uses = self._collected(count)
        squares = self._squared_norms(uses, count)
        device = squares.device
        factors, clipped, nonfinite = clip_factors(squares * scale**2, clip_norm)
        weights = factors * scale
        keep = torch.isfinite(squares) if bool(nonfinite) else None
        gradients = {}
        for name, p in self.module.named_parameters():
            if name in self._wanted:
                shape = p.shape
                out = torch.zeros(shape, dtype=torch.float32, device=device)
                for use, role in uses.get(name, []):
                    out += _weighted_sum(use, role, weights, keep)
                gradients[name] = out
        self._uses.clear()
        return ClippedSum(gradients, count, clipped, nonfinite)

    def squared_norms(self, count: int) -> Tensor:
        """Squared gradient norms of what was recorded since :meth:`start`, (count,) float32."""
        squares = self._squared_norms(self._collected(count), count)
        self._uses.clear()
        return squares

    def _collected(self, count: int) -> dict[str, list[tuple[_Use, str]]]:
        """Stop recording; the uses of every wanted parameter, by its name."""
        self.active = False
        uses: dict[str, list[tuple[_Use, str]]] = {}
        for use in self._uses:
            if use.upstream is None:
                continue
            if use.inputs.shape[0] != count or use.upstream.shape[0] != count:
                raise ValueError(
                    f"{type(use.layer).__name__} saw {use.inputs.shape[0]} rows for {count} "
                    "examples: ghost clipping needs the batch in the first dimension; "
                    "use clipping='vmap'"
                )
            for role, p in use.layer.named_parameters(recurse=False):
                name = self._by_id[id(p)]
                if p.requires_grad and name in self._wanted:
                    uses.setdefault(name, []).append((use, role))
        return uses

    def _squared_norms(self, uses: dict[str, list[tuple[_Use, str]]], count: int) -> Tensor:
        device = next(self.module.parameters()).device
        squares = torch.zeros(count, dtype=torch.float32, device=device)
        for calls in uses.values():
            if len(calls) == 1:
                squares += _squared_norm(*calls[0])
            else:  # used several times (tied weights, recurrence): the gradients add up first
                total = sum(_gradients(use, role).flatten(1) for use, role in calls)
                assert isinstance(total, Tensor)
                squares += total.square().sum(1)
        return squares

    @property
    def _wanted(self) -> set[str]:
        return set(self.names)


def _rows(use: _Use) -> tuple[Tensor, Tensor]:
    """Input and output gradient of a linear map as (batch, positions, features), float32."""
    layer, a, g = use.layer, use.inputs.float(), use.upstream
    assert g is not None
    g = g.float()
    if isinstance(layer, nn.Linear):
        # explicit numbers of positions: a batch may be empty
        positions = a[0].numel() // a.shape[-1] if len(a) else 1
        return (
            a.reshape(len(a), positions, layer.in_features),
            g.reshape(len(g), positions, layer.out_features),
        )
    assert isinstance(layer, nn.Conv1d | nn.Conv2d)
    if isinstance(layer, nn.Conv1d):
        a, g = a.unsqueeze(2), g.unsqueeze(2)
        kernel: tuple[int, ...] = (1, layer.kernel_size[0])
        dilation: tuple[int, ...] = (1, layer.dilation[0])
        stride: tuple[int, ...] = (1, layer.stride[0])
        padding = (0, int(layer.padding[0]))
    else:
        kernel, dilation, stride = layer.kernel_size, layer.dilation, layer.stride
        padding = (int(layer.padding[0]), int(layer.padding[1]))
    if len(a):
        a = F.unfold(a, kernel, dilation, padding, stride).transpose(1, 2)
    else:
        a = a.new_zeros(0, 1, a.shape[1] * kernel[0] * kernel[1])
        g = g[:, :, :1, :1]
    return a, g.flatten(2).transpose(1, 2)


def _bias_gradients(use: _Use) -> Tensor:
    """Every example's gradient of a bias: output gradients summed over positions."""
    assert use.upstream is not None
    g = use.upstream.float()
    if isinstance(use.layer, nn.Linear):
        return g.sum(tuple(range(1, g.dim() - 1))) if g.dim() > 2 else g
    return g.flatten(2).sum(2)


def _groups(use: _Use) -> int:
    return use.layer.groups if isinstance(use.layer, nn.Conv1d | nn.Conv2d) else 1


def _squared_norm(use: _Use, role: str) -> Tensor:
    """Squared norm of every example's gradient of one parameter, (batch,)."""
    layer = use.layer
    if isinstance(layer, nn.Embedding):
        tokens, g = _tokens(use)
        same = (tokens[:, :, None] == tokens[:, None, :]).float()
        return (torch.bmm(g, g.transpose(1, 2)) * same).sum((1, 2))
    if role == "weight" and isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
        a, g = _rows(use)
        if _groups(use) == 1:
            if a.shape[1] == 1:
                return a.square().sum((1, 2)) * g.square().sum((1, 2))
            if a.shape[1] ** 2 * 2 < a.shape[2] * g.shape[2]:
                inner = torch.bmm(a, a.transpose(1, 2)) * torch.bmm(g, g.transpose(1, 2))
                # a sum of products that is non-negative up to round-off
                return inner.sum((1, 2)).clamp_min(0)
        gradients = _outer(use, a, g)
        if gradients[0:1].numel() <= 4 * a[0:1].numel():  # no more memory than the layer's input
            use.kept[role] = gradients
        return gradients.flatten(1).square().sum(1)
    return _gradients(use, role).flatten(1).square().sum(1)


def _tokens(use: _Use) -> tuple[Tensor, Tensor]:
    layer, g = use.layer, use.upstream
    assert isinstance(layer, nn.Embedding)
    assert g is not None
    count, dim = len(use.inputs), layer.embedding_dim
    positions = use.inputs[0].numel() if count else 1
    tokens = use.inputs.reshape(count, positions)
    g = g.float().reshape(count, positions, dim)
    if layer.padding_idx is not None:
        g = g.masked_fill((tokens == layer.padding_idx)[..., None], 0.0)
    return tokens, g


def _gradients(use: _Use, role: str) -> Tensor:
    """Every example's gradient of one parameter, (batch, *shape)."""
    layer = use.layer
    if isinstance(layer, nn.Embedding):
        tokens, g = _tokens(use)
        out = g.new_zeros(len(g), layer.num_embeddings, layer.embedding_dim)
        return out.scatter_add_(1, tokens[..., None].expand_as(g), g)
    if isinstance(layer, nn.LayerNorm | nn.GroupNorm):
        normal, g = _normalised(use)
        values = g * normal if role == "weight" else g
        if isinstance(layer, nn.LayerNorm):
            extra = values.dim() - len(layer.normalized_shape)
            return values.sum(tuple(range(1, extra))) if extra > 1 else values
        return values.flatten(2).sum(2) if values.dim() > 2 else values
    return _bias_gradients(use) if role == "bias" else _outer(use, *_rows(use))


def _outer(use: _Use, a: Tensor, g: Tensor) -> Tensor:
    """Every example's weight gradient from rows of inputs and output gradients."""
    layer, groups = use.layer, _groups(use)
    assert isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d)
    if groups == 1:
        weight = torch.bmm(g.transpose(1, 2), a)
    else:
        a = a.reshape(*a.shape[:2], groups, a.shape[2] // groups)
        g = g.reshape(*g.shape[:2], groups, g.shape[2] // groups)
        weight = torch.einsum("btgo,btgi->bgoi", g, a)
    return weight.reshape(len(weight), *layer.weight.shape)


def _normalised(use: _Use) -> tuple[Tensor, Tensor]:
    layer, g = use.layer, use.upstream
    assert g is not None
    x = use.inputs.float()
    if isinstance(layer, nn.LayerNorm):
        return F.layer_norm(x, layer.normalized_shape, eps=layer.eps), g.float()
    assert isinstance(layer, nn.GroupNorm)
    return F.group_norm(x, layer.num_groups, eps=layer.eps), g.float()


def _weighted_sum(use: _Use, role: str, weights: Tensor, keep: Tensor | None) -> Tensor:
    """``sum_i weights_i gradient_i`` of one parameter, without the gradients where possible."""
    layer = use.layer
    select: Callable[[Tensor], Tensor] = partial(_zero_bad, keep=keep)
    if isinstance(layer, nn.Embedding):
        tokens, g = _tokens(use)
        g = select(g) * weights[:, None, None]
        out = g.new_zeros(layer.num_embeddings, layer.embedding_dim)
        summed: Tensor = out.index_add_(0, tokens.flatten(), g.flatten(0, 1))
        return summed
    if isinstance(layer, nn.LayerNorm | nn.GroupNorm):
        total: Tensor = torch.tensordot(weights, select(_gradients(use, role)), dims=1)
        return total
    if role == "bias":
        return torch.mv(select(_bias_gradients(use)).T, weights)
    if role in use.kept:
        known: Tensor = torch.tensordot(weights, select(use.kept[role]), dims=1)
        return known
    assert isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d)
    if isinstance(layer, nn.Linear):
        a, g = _rows(use)
        a, g = select(a), select(g) * weights[:, None, None]
        return g.flatten(0, 1).T @ a.flatten(0, 1)
    assert use.upstream is not None
    inputs, upstream = select(use.inputs.float()), select(use.upstream.float())
    upstream = upstream * weights.view(-1, *[1] * (upstream.dim() - 1))
    backward: Callable[..., Tensor] = (
        conv1d_weight if isinstance(layer, nn.Conv1d) else conv2d_weight
    )
    return backward(
        inputs,
        layer.weight.shape,
        upstream,
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.groups,
    )


def _zero_bad(values: Tensor, keep: Tensor | None) -> Tensor:
    if keep is None:
        return values
    shape = (-1, *[1] * (values.dim() - 1))
    return torch.where(keep.view(shape), values, torch.zeros_like(values))
