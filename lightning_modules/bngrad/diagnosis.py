"""What is wrong with a batch, and where a training run that diverged did so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_modules.bngrad.network import DeepBNMLP
from lightning_modules.components.sharding import full

__all__ = ["check_batch", "divergence_message", "unpack"]


def unpack(batch: Any) -> tuple[Tensor, Tensor | None]:
    """Takes `x` and `y` out of a pair, a dictionary or a lone tensor.

    Raises:
        TypeError: If the batch is none of these.
    """
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, Mapping) and "x" in batch:
        return batch["x"], batch.get("y")
    if isinstance(batch, tuple | list) and 1 <= len(batch) <= 2:
        return batch[0], batch[1] if len(batch) == 2 else None
    raise TypeError(
        f"a batch must be (x, y) or a dictionary with the keys x and y, got {type(batch).__name__}"
    )


def check_batch(x: Tensor, y: Tensor, out_dim: int, task: str) -> None:
    """Refuses a batch that the loss would choke on with a less helpful message.

    Raises:
        ValueError: For input that is not finite, labels that are no class numbers or out of range,
            or targets of another shape than the output's.
    """
    finite = torch.isfinite(x).flatten(1).all(-1)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0, 0])
        raise ValueError(f"x has NaN or infinite values, first in sample {row}: clean the inputs")
    if task == "regression":
        shapes = [(len(x), out_dim)] + ([(len(x),)] if out_dim == 1 else [])
        if tuple(y.shape) not in shapes:
            raise ValueError(f"y has shape {tuple(y.shape)}, regression needs {shapes[-1]}")
        return
    if y.is_floating_point():
        raise ValueError(
            f"y has type {y.dtype}, classification needs int64 class numbers: convert them, or set "
            "task=regression"
        )
    if y.shape != x.shape[:1]:
        raise ValueError(f"y has shape {tuple(y.shape)}, classification needs ({len(x)},)")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= out_dim:
        raise ValueError(
            f"labels lie in [{low}, {high}], out_dim={out_dim} allows 0 to {out_dim - 1}"
        )


def divergence_message(network: DeepBNMLP, loss: float, iteration: int) -> str:
    """Says which layer had the largest gradient in the last step, and what to change."""
    norms: dict[str, float] = {}
    for number, layer in enumerate(network.linear_maps):
        if layer.weight.grad is not None:
            norm = float(full(layer.weight.grad.detach().float().square().sum()).sqrt())
            norms[f"{number}"] = norm if norm == norm else float("inf")
    if norms:
        layer_name = max(norms, key=lambda name: norms[name])
        where = (
            f"the largest gradient of the step before was that of linear map {layer_name} "
            f"(norm {norms[layer_name]:.2g})"
        )
    else:
        where = "there was no step before"
    first = network.blocks[0].norm
    eps = getattr(first, "eps", None)
    return (
        f"the loss is {loss} at iteration {iteration}; {where}. Try a larger gain_exponent "
        f"(now {network.gain_exponent:g}), a smaller learning rate, a batch of at least "
        f"width={network.width} samples"
        + (f", or another eps (now {eps:g})" if eps is not None else "")
    )
