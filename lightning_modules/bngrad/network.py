"""Very deep plain multilayer perceptrons with batch normalisation and activation shaping."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_modules.bngrad.activations import activation_spec
from lightning_modules.bngrad.block import Block
from lightning_modules.bngrad.initialisation import initialise
from lightning_modules.bngrad.norms import (
    BatchNorm,
    SampleNorm,
    Scale,
    frozen_statistics,
    settle,
    world_size,
)

__all__ = ["DeepBNMLP", "Hidden", "power_law_gains"]


class Hidden(NamedTuple):
    """Hidden states of all blocks.

    Attributes:
        fc: Outputs of the linear maps, `(depth, n, width)`.
        norm: Outputs of the norms, `(depth, n, width)`.
        act: Outputs of the activations, `(depth, n, width)`.
    """

    fc: Tensor
    norm: Tensor
    act: Tensor


def power_law_gains(depth: int, exponent: float) -> list[float]:
    """Gains a_l = (l + 1)^(-exponent) of blocks l = 0 ... depth - 1."""
    return [float(layer + 1) ** -exponent for layer in range(depth)]


class DeepBNMLP(nn.Module):
    """Skip-free multilayer perceptron of any depth whose gradients neither explode nor vanish.

    `depth` blocks (`Block`) and one output map, so `depth + 1` linear maps. Block l has the gain
    `a_l = (l + 1)^(-gain_exponent)`: with an odd activation the deep part then works in the linear
    range, where orthogonal weights and batch normalisation keep gradients bounded at any depth.

    Example:
        >>> net = DeepBNMLP(64, 10, depth=200)
        >>> net(torch.randn(100, 8, 8)).shape
        torch.Size([100, 10])

    Args:
        in_dim: Features of the input, after flattening.
        out_dim: Number of outputs.
        depth: Number L of hidden blocks.
        width: Features d of each.
        activation: `identity`, `sin`, `tanh`, `selu`, `relu`, `leaky_relu`, or the extension
            `shaped_relu`.
        norm: `bn`, `bn_nocenter`, `ln`, `torch_bn` or `none`, see `build_norm`.
        center: Whether the norm subtracts the mean (`bn_nocenter` is `bn` with False).
        scale: `"sqrt_n"`, or the constant c of the norm.
        order: `norm_act` or `act_norm`.
        gain_exponent: The exponent k >= 0 of the gains.
        gains: One gain per block instead of the power law.
        init: `orthogonal`, `xavier_normal` or `kaiming`.
        bias: Whether linear maps have biases.
        eps: Added to the mean square in the norm; keep it at most 1e-12 with large exponents.
        sync_stats: Whether batch statistics are those of all processes.
        track_running_stats: Whether evaluation uses running statistics, which makes predictions
            independent of the batch; otherwise it uses its own batch.
        rescale_logits: Whether logits are multiplied by one over the last gain, `L^k`, so that
            they have the same size at any depth (order `norm_act`; behind `act_norm` they have it
            anyway).
        skip: Factor of each block's input added to its output, from the second block on.
        learnable_gains: Whether gains are trained, from their values here.
        momentum: Weight of the newest batch in running statistics.
        checkpoint_segments: Number of segments of blocks whose inner activations are recomputed in
            the backward pass instead of stored; 0 stores all. About sqrt(depth) saves most.
        generator: Source of randomness of the weights, default the global one.

    Raises:
        ValueError: For an argument out of range, naming the allowed values; in `forward` for inputs
            of another size, for a batch of one where batch statistics are needed, and for a feature
            that an eps-free norm would divide by zero.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        depth: int = 40,
        width: int = 64,
        activation: str = "sin",
        norm: str = "bn",
        center: bool = True,
        scale: Scale = "sqrt_n",
        order: str = "norm_act",
        gain_exponent: float = 0.5,
        gains: Sequence[float] | None = None,
        init: str = "orthogonal",
        bias: bool = True,
        eps: float = 0.0,
        sync_stats: bool = False,
        track_running_stats: bool = True,
        rescale_logits: bool = False,
        skip: float = 0.0,
        learnable_gains: bool = False,
        momentum: float = 0.1,
        checkpoint_segments: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        for name, value in (
            ("in_dim", in_dim),
            ("out_dim", out_dim),
            ("depth", depth),
            ("width", width),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if checkpoint_segments < 0:
            raise ValueError(f"checkpoint_segments must be at least 0, got {checkpoint_segments}")
        if not 0 <= skip < math.inf:
            raise ValueError(f"skip must be at least 0, got {skip}")
        _check_exponent(gain_exponent)
        spec = activation_spec(activation)
        if gains is None:
            gains = power_law_gains(depth, gain_exponent)
        elif len(gains) != depth:
            raise ValueError(f"gains needs one number per block: depth={depth}, got {len(gains)}")
        elif not all(0 < gain < math.inf for gain in gains):
            raise ValueError("gains must be finite numbers above 0")
        self.in_dim, self.out_dim, self.depth, self.width = in_dim, out_dim, depth, width
        self.order, self.rescale_logits = order, rescale_logits
        self.learnable_gains, self.checkpoint_segments = learnable_gains, checkpoint_segments
        self._gain_exponent = float(gain_exponent)
        self.blocks = nn.ModuleList(
            Block(
                in_dim if layer == 0 else width,
                width,
                activation,
                norm,
                center,
                scale,
                order,
                gain,
                bias,
                eps,
                sync_stats,
                track_running_stats,
                momentum,
                skip if layer else 0.0,
                learnable_gains,
                deferred=True,
            )
            for layer, gain in enumerate(gains)
        )
        self.head = nn.Linear(width, out_dim, bias=bias)
        initialise(self.linear_maps, init, spec.xavier_gain, generator)
        self._warned_batch = False
        moved = any(gain != 1.0 for gain in gains)
        if spec.homogeneous and moved and norm != "none" and activation != "identity":
            warnings.warn(
                f"gains have no effect with activation={activation!r}: act(a x) = a act(x), and "
                "the norm removes the factor; use sin, tanh or shaped_relu, or gain_exponent=0",
                stacklevel=2,
            )
        spread = eps if norm in ("bn", "bn_nocenter", "ln") else (eps or 1e-5)
        smallest = min(gains)
        if order == "norm_act" and norm != "none" and spread > 0.1 * smallest**2:
            # the variance behind a norm settles at 1 - eps / a_l^2, and at 0 once eps exceeds a_l^2
            warnings.warn(
                f"eps={spread:g} is not small beside the squared gain {smallest**2:.1e} of the "
                f"last of {depth} blocks, so the signal shrinks to nothing: use norm='bn' with "
                "eps at most 1e-12, a smaller gain_exponent or order='act_norm'",
                stacklevel=2,
            )

    # ------------------------------------------------------------------ parts

    @property
    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    @property
    def linear_maps(self) -> list[nn.Linear]:
        """The `depth + 1` linear maps in order."""
        return [*(block.linear for block in self._blocks), self.head]

    @property
    def gains(self) -> Tensor:
        """Present gains `(depth,)`."""
        return torch.stack([torch.as_tensor(block.gain).reshape(()) for block in self._blocks])

    @property
    def gain_exponent(self) -> float:
        """Exponent k of the power law; setting it moves all gains, as a curriculum does.

        Raises:
            ValueError: When set to a negative or infinite number, or while gains are learnable.
        """
        return self._gain_exponent

    @gain_exponent.setter
    def gain_exponent(self, value: float) -> None:
        _check_exponent(value)
        if self.learnable_gains:
            raise ValueError("gain_exponent cannot be moved while learnable_gains=True trains them")
        self._gain_exponent = float(value)
        for block, gain in zip(self._blocks, power_law_gains(self.depth, value), strict=True):
            block.gain = gain

    # ------------------------------------------------------------------ forward

    def forward(self, x: Tensor, return_hidden: bool = False) -> Tensor | tuple[Tensor, Hidden]:
        """Computes logits.

        Args:
            x: `(n, ...)`, flattened to `(n, in_dim)`.
            return_hidden: Whether hidden states are returned as well.

        Returns:
            Logits `(n, out_dim)`, with `return_hidden` also a `Hidden`.
        """
        x = self._checked_input(x)
        inputs = x
        states: list[tuple[Tensor, Tensor, Tensor]] = []
        if return_hidden:
            for block in self._blocks:
                fc, norm, act, x = block.states(x)
                states.append((fc, norm, act))
        elif self.checkpoint_segments and self.training and torch.is_grad_enabled():
            x = self._checkpointed(x)
        else:
            for block in self._blocks:
                x = block(x)
        logits: Tensor = self.head(x)
        if self.rescale_logits and self.order == "norm_act":
            last = self._blocks[-1].gain
            logits = logits / (last.detach() if isinstance(last, Tensor) else last)
        self._settle(inputs, logits)
        if not return_hidden:
            return logits
        return logits, Hidden(*(torch.stack(column) for column in zip(*states, strict=True)))

    def _checkpointed(self, x: Tensor) -> Tensor:
        """The blocks in segments that are run again in the backward pass."""

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            # running statistics move in the first run alone
            return nullcontext(), frozen_statistics(self)

        blocks = list(self.blocks)
        size = math.ceil(len(blocks) / self.checkpoint_segments)
        for start in range(0, len(blocks), size):
            segment = nn.Sequential(*blocks[start : start + size])
            x = checkpoint(segment, x, use_reentrant=False, context_fn=contexts)
        return x

    def _checked_input(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise TypeError(f"x must be floating point, got {x.dtype}: scale the inputs first")
        shape = tuple(x.shape)
        x = x.flatten(1)
        if x.ndim != 2 or x.shape[1] != self.in_dim:
            raise ValueError(
                f"x of shape {shape} has {math.prod(shape[1:])} features per sample, "
                f"the network was built with in_dim={self.in_dim}"
            )
        norm = self._blocks[0].norm
        if isinstance(norm, BatchNorm | nn.BatchNorm1d) and (
            self.training or not norm.track_running_stats
        ):
            synchronised = isinstance(norm, BatchNorm) and norm.sync
            self._check_batch(len(x), world_size() if synchronised else 1)
        return x

    def _check_batch(self, size: int, processes: int) -> None:
        if size < 2:
            raise ValueError(
                f"batch statistics need at least 2 samples, got {size}: use a larger batch, or "
                "evaluation mode with track_running_stats=True"
            )
        if self.training and size * processes < self.width and not self._warned_batch:
            self._warned_batch = True
            warnings.warn(
                f"batch of {size * processes} samples is smaller than width={self.width}: "
                "gradients grow exponentially with depth; use at least as many samples per device "
                "as features, or sync_stats=True over several devices",
                stacklevel=4,
            )

    @torch.no_grad()
    def _settle(self, x: Tensor, logits: Tensor) -> None:
        """Moves the running statistics; turns a division by zero into an error with its place."""
        check = not torch.compiler.is_compiling()
        first = self._blocks[0].norm
        if isinstance(first, BatchNorm):
            settle([block.norm for block in self._blocks], check)  # type: ignore[misc]
        elif check and isinstance(first, SampleNorm) and first.eps == 0:
            if bool(torch.isfinite(logits).all()):
                return
            self._find_zero_sample(x)

    def _find_zero_sample(self, x: Tensor) -> None:
        for layer, block in enumerate(self._blocks):
            fc, _, act, out = block.states(x)
            source = fc if self.order == "norm_act" else act
            lost = torch.isfinite(source).all(-1) & ~torch.isfinite(out).all(-1)
            if bool(lost.any()):
                raise ValueError(
                    f"sample {int(lost.nonzero()[0, 0])} has equal features in block {layer}, and "
                    "norm='ln' with eps=0 divides by their spread: drop it or set eps above 0"
                )
            x = out

    # ------------------------------------------------------------------ statistics

    @torch.no_grad()
    def refresh_statistics(self, batches: Iterable[Tensor]) -> int:
        """Replaces running statistics by their plain mean over batches, with the present weights.

        An exponential mean lags behind weights that still move, and a deep stack amplifies the lag.

        Args:
            batches: Inputs `(n, ...)`.

        Returns:
            Number of batches.
        """
        norms = [
            m
            for m in self.modules()
            if isinstance(m, BatchNorm | nn.BatchNorm1d) and m.track_running_stats
        ]
        before = [norm.momentum for norm in norms]
        training = self.training
        self.train()
        count = 0
        try:
            for count, x in enumerate(batches, start=1):
                for norm in norms:
                    norm.momentum = 1.0 / count
                self(x)
        finally:
            for norm, momentum in zip(norms, before, strict=True):
                norm.momentum = momentum
            self.train(training)
        return count


def _check_exponent(value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"gain_exponent must be a finite number of at least 0, got {value}")
