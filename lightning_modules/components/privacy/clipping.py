"""Sum of clipped per-example gradients by ``torch.func``: any module without state in forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree


class ClippedSum(NamedTuple):
    """Result of clipping.

    Attributes:
        gradients: parameter name -> sum over examples of the clipped gradient, float32.
        examples: examples in the batch.
        clipped: examples whose gradient was longer than the clip norm.
        nonfinite: examples whose gradient was not finite; they contribute zero.
    """

    gradients: dict[str, Tensor]
    examples: int
    clipped: Tensor
    nonfinite: Tensor


class _Loss(nn.Module):
    """Makes the loss a forward pass, which ``functional_call`` needs."""

    def __init__(self, module: nn.Module, losses: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.losses = losses

    def forward(self, batch: Any) -> Tensor:
        return self.losses(batch)


def clip_factors(squared_norms: Tensor, clip_norm: float) -> tuple[Tensor, Tensor, Tensor]:
    """``min(1, clip / norm)`` in float32, 0 where the norm isn't finite.

    Args:
        squared_norms: (batch,).
        clip_norm: bound on each example's contribution.

    Returns:
        Factors (batch,), number of clipped and number of non-finite examples (0-d).
    """
    norms = squared_norms.float().sqrt()
    finite = torch.isfinite(norms)
    # A factor rounded up by one unit would let the norm exceed the bound; shrink by 1e-6.
    factors = torch.clamp(clip_norm * (1 - 1e-6) / norms.clamp_min(1e-30), max=1.0)
    factors = torch.where(finite, factors, torch.zeros_like(factors))
    return factors, (finite & (norms > clip_norm)).sum(), (~finite).sum()


def batch_size(batch: Any) -> int:
    """Length of the first dimension of the first tensor in a batch.

    Raises:
        ValueError: the batch holds no tensor with a first dimension.
    """
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    raise ValueError("a batch needs at least one tensor whose first dimension counts examples")


def clipped_sum(
    module: nn.Module,
    losses: Callable[[Any], Tensor],
    batch: Any,
    clip_norm: float,
    names: list[str],
    chunk_size: int | None = None,
) -> ClippedSum:
    """Sum over the batch of the clipped gradients of one example's loss.

    Args:
        module: owner of the parameters; its forward must neither keep state nor mix examples.
        losses: ``batch -> (batch,)`` losses, one an example, computed with ``module``.
        batch: nested tuples, lists and dicts of tensors; every tensor counts examples in its first
            dimension.
        clip_norm: bound on the L2 norm of every example's gradient over all of ``names``.
        names: trainable parameters to differentiate.
        chunk_size: examples at once, which bounds the memory to ``chunk_size`` gradients.

    Raises:
        ValueError: ``losses`` does not return one number for an example.
    """
    parameters = dict(module.named_parameters())
    count = batch_size(batch)
    chosen = {f"module.{name}": parameters[name].detach() for name in names}
    total = {
        name: torch.zeros(
            parameters[name].shape, dtype=torch.float32, device=parameters[name].device
        )
        for name in names
    }
    device = next(iter(total.values())).device
    clipped = torch.zeros((), dtype=torch.int64, device=device)
    nonfinite = torch.zeros((), dtype=torch.int64, device=device)
    wrapper = _Loss(module, losses)

    def loss_of(chosen: Mapping[str, Tensor], example: Any) -> Tensor:
        one = pytree.tree_map(lambda x: x.unsqueeze(0) if isinstance(x, Tensor) else x, example)
        value: Tensor = functional_call(wrapper, dict(chosen), (one,))
        if value.shape != (1,):
            raise ValueError(
                f"the loss of a batch of 1 must have shape (1,), got {tuple(value.shape)}: "
                "return one loss per example, without reducing over the batch"
            )
        return value[0]

    in_dims = (None, pytree.tree_map(lambda x: 0 if isinstance(x, Tensor) else None, batch))
    per_example = vmap(grad(loss_of), in_dims=in_dims, randomness="different")
    size = chunk_size or max(count, 1)
    for start in range(0, count, size):
        part = pytree.tree_map(
            lambda x, s=start: x[s : s + size] if isinstance(x, Tensor) else x, batch
        )
        gradients = per_example(chosen, part)
        squares = torch.stack(
            [g.float().flatten(1).square().sum(1) for g in gradients.values()]
        ).sum(0)
        factors, over, bad = clip_factors(squares, clip_norm)
        clipped += over
        nonfinite += bad
        for name in names:
            g = gradients[f"module.{name}"].float()
            if bad:
                keep = torch.isfinite(squares).view(-1, *[1] * (g.dim() - 1))
                g = torch.where(keep, g, torch.zeros_like(g))
            total[name] += torch.tensordot(factors, g, dims=1)
    return ClippedSum(total, count, clipped, nonfinite)
