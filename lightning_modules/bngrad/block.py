"""The block that deep networks are stacked from: linear map, norm and shaped activation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_modules.bngrad.activations import activation_spec
from lightning_modules.bngrad.norms import BatchNorm, Scale, build_norm

__all__ = ["ORDERS", "Block"]

ORDERS = ("norm_act", "act_norm")


class Block(nn.Module):
    """Linear map, norm and shaped activation; usable on its own in any network.

        norm_act:  act(a * norm(x W^T + b))
        act_norm:  norm(act(a * (x W^T + b)))

    Args:
        in_features: Features of the input.
        width: Features of the output.
        activation: Name of the activation, see `ACTIVATIONS`.
        norm: `bn`, `bn_nocenter`, `ln`, `torch_bn` or `none`.
        center: Whether the norm subtracts the mean.
        scale: `"sqrt_n"` or the constant of the norm.
        order: `norm_act` or `act_norm`.
        gain: The factor a in front of the activation.
        bias: Whether the linear map has a bias.
        eps: Added to the mean square in the norm.
        sync_stats: Whether batch statistics are those of all processes.
        track_running_stats: Whether the norm keeps statistics for evaluation.
        momentum: Weight of the newest batch in them.
        skip: Factor of the input added to the output (0: plain, 1: residual block).
        learnable_gain: Whether the gain is a parameter.
        deferred: See `BatchNorm`: a network of many blocks does its bookkeeping at once.

    Raises:
        ValueError: For an argument out of range.
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        activation: str = "sin",
        norm: str = "bn",
        center: bool = True,
        scale: Scale = "sqrt_n",
        order: str = "norm_act",
        gain: float = 1.0,
        bias: bool = True,
        eps: float = 0.0,
        sync_stats: bool = False,
        track_running_stats: bool = True,
        momentum: float = 0.1,
        skip: float = 0.0,
        learnable_gain: bool = False,
        deferred: bool = False,
    ) -> None:
        super().__init__()
        if order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
        if skip and in_features != width:
            raise ValueError(f"skip={skip} needs equal sizes, got {in_features} and {width}")
        spec = activation_spec(activation)
        self.order, self.skip, self.shaped = order, skip, spec.shaped
        self.linear = nn.Linear(in_features, width, bias=bias)
        self.norm = build_norm(
            norm, width, center, scale, eps, sync_stats, track_running_stats, momentum, deferred
        )
        self.activation = spec.build()
        # a plain number unless trained: exact in every precision
        self.gain: float | nn.Parameter = float(gain)
        if learnable_gain:
            self.gain = nn.Parameter(torch.full((1,), float(gain)))  # FSDP shards no scalars

    def _activate(self, h: Tensor) -> Tensor:
        arguments = (h, self.gain) if self.shaped else (self.gain * h,)
        out: Tensor = self.activation(*arguments)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Maps `(n, in_features)` to `(n, width)`."""
        if self.order == "norm_act" and isinstance(self.norm, BatchNorm) and not self.shaped:
            # as in `states`, but the norm's kernel multiplies by the gain
            out: Tensor = self.activation(self.norm(self.linear(x), self.gain))
            return out + self.skip * x if self.skip else out
        return self.states(x)[-1]

    def states(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Outputs of linear map, norm and activation, and of the block, each `(n, width)`."""
        fc = self.linear(x)
        if self.order == "norm_act":
            norm = self.norm(fc)
            out = act = self._activate(norm)
        else:
            act = self._activate(fc)
            out = norm = self.norm(act)
        if self.skip:
            out = out + self.skip * x
        return fc, norm, act, out
