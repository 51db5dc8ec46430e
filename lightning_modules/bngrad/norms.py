"""Normalisation over the batch or over the features, without epsilon and affine parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = [
    "NORMS",
    "BatchNorm",
    "SampleNorm",
    "build_norm",
    "frozen_statistics",
    "settle",
    "sum_over_ranks",
]

NORMS = ("bn", "bn_nocenter", "ln", "torch_bn", "none")
Scale = float | Literal["sqrt_n"]


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is the all-reduce of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


def world_size() -> int:
    """Number of processes of the default group, 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(x: Tensor) -> Tensor:
    """Sum of a tensor over all processes, with gradient; the tensor itself in a single process."""
    if world_size() == 1:
        return x
    total: Tensor = _SumOverRanks.apply(x)  # type: ignore[no-untyped-call]
    return total


def _check_scale(scale: Scale) -> None:
    if scale != "sqrt_n" and not (isinstance(scale, int | float) and 0 < scale < math.inf):
        raise ValueError(f"scale must be 'sqrt_n' or a finite number above 0, got {scale!r}")


class BatchStatistics(NamedTuple):
    """Of one batch: means `(width,)` if centred, inverse divisors `(width,)`, and its size."""

    mean: Tensor | None
    inverse: Tensor
    samples: float | Tensor


class BatchNorm(nn.Module):
    """Divides every feature by its norm over the batch.

        BN(H)[:, j] = c H[:, j] / ||H[:, j]||_2,    c = sqrt(n) or a constant

    With `center` the batch mean of each feature is subtracted first; with c = sqrt(n) that is the
    usual batch normalisation with eps = 0. There are no affine parameters.

    In training the statistics are those of the batch, of all processes together with `sync`. With
    `track_running_stats` an exponential mean of the squared divisor (and of the mean, if centred)
    is kept for evaluation. It is corrected for its start, so that a few steps are enough.
    Without it, evaluation uses its own batch and depends on the batch's composition.

    Args:
        width: Number of features.
        center: Whether the batch mean is subtracted.
        scale: `"sqrt_n"`, or the constant c.
        eps: Added to the mean square; 0 is exact, and an error for a feature that is zero.
        sync: Whether statistics are those of all processes.
        track_running_stats: Whether statistics are kept for evaluation.
        momentum: Weight of the newest batch in the running statistics.
        deferred: Whether the search for zero features and the running statistics of a
            batch are left to `settle`, which does both for many norms at once.

    Raises:
        ValueError: For an argument out of range; in `forward` for a single sample where batch
            statistics are needed and for a feature that is zero (constant, if centred).
    """

    running_mean: Tensor
    running_square: Tensor
    running_weight: Tensor

    def __init__(
        self,
        width: int,
        center: bool = True,
        scale: Scale = "sqrt_n",
        eps: float = 0.0,
        sync: bool = False,
        track_running_stats: bool = True,
        momentum: float = 0.1,
        deferred: bool = False,
    ) -> None:
        super().__init__()
        _check_scale(scale)
        if not 0 <= eps < math.inf:
            raise ValueError(f"eps must be at least 0, got {eps}")
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum must be in (0, 1], got {momentum}")
        self.width, self.center, self.scale, self.eps = width, center, scale, eps
        self.sync, self.track_running_stats = sync, track_running_stats
        self.momentum, self.deferred = momentum, deferred
        self.frozen = False
        self.pending: BatchStatistics | None = None
        if track_running_stats:
            if center:
                self.register_buffer("running_mean", torch.zeros(width))
            self.register_buffer("running_square", torch.zeros(width))
            # share of the running values that comes from data: 1 - (1 - momentum)^steps
            self.register_buffer("running_weight", torch.zeros(()))

    def forward(self, h: Tensor, gain: float | Tensor = 1.0) -> Tensor:
        """Normalises.

        Args:
            h: `(n, width)`.
            gain: Factor of the output, a number or one element.

        Returns:
            `(n, width)`.
        """
        if not self.training and self.track_running_stats:
            return self._with_running_statistics(h) * gain
        if h.shape[0] < 2:
            raise ValueError(
                f"batch statistics need at least 2 samples, got {h.shape[0]}: use a larger batch, "
                "or evaluation mode with track_running_stats=True"
            )
        if self.center and not (self.sync and world_size() > 1):
            # eps = 0 is allowed here; a constant feature gives 0 and is found by its statistics.
            # One kernel normalises and multiplies by gain and scale.
            count: float | Tensor = h.shape[0]
            factor = self._factor(count, gain)
            weight: Tensor | None = None
            if isinstance(factor, Tensor):
                weight = factor.expand(self.width).contiguous()  # the kernel reads it as an array
            elif factor != 1:
                wide = torch.promote_types(h.dtype, torch.float32)
                weight = h.new_full((self.width,), factor, dtype=wide)
            out, mean, inverse = torch.native_batch_norm(
                h, weight, None, None, None, True, 0.0, self.eps
            )
            statistics = BatchStatistics(mean.detach(), inverse.detach(), count)
        else:
            centred, inverse, statistics = self._from_sums(h)
            out = centred * (inverse * self._factor(statistics.samples, gain))
        self.pending = statistics
        if not self.deferred:
            settle([self])
        return out

    def _factor(self, count: float | Tensor, gain: float | Tensor) -> float | Tensor:
        """What a column of mean square 1 is multiplied by."""
        if self.scale == "sqrt_n":
            return gain
        c = float(self.scale)
        return gain * (c * torch.rsqrt(count) if isinstance(count, Tensor) else c / count**0.5)

    def _from_sums(self, h: Tensor) -> tuple[Tensor, Tensor, BatchStatistics]:
        """Input (centred), what its columns are multiplied by for mean square 1, and statistics.

        The sums may run over processes.
        """
        count: float | Tensor = h.shape[0]
        synchronise = self.sync and world_size() > 1
        mean = None
        if self.center:
            # two passes: the mean square minus the squared mean would cancel
            ones = h.new_full((1,), float(h.shape[0]))
            sums = sum_over_ranks(torch.cat([h.sum(0), ones]))
            count = sums[-1].detach()
            mean = sums[:-1] / count
            h = h - mean
            square = sum_over_ranks(h.square().sum(0)) / count
        elif synchronise:
            ones = h.new_full((1,), float(h.shape[0]))
            sums = sum_over_ranks(torch.cat([h.square().sum(0), ones]))
            count = sums[-1].detach()
            square = sums[:-1] / count
        else:
            square = h.square().mean(0)
        inverse = (square + self.eps).rsqrt()
        mean = mean.detach() if mean is not None else None
        return h, inverse, BatchStatistics(mean, inverse.detach(), count)

    def _with_running_statistics(self, h: Tensor) -> Tensor:
        # before the first training step the statistics are those of a standard normal
        weight = self.running_weight
        seen = weight.clamp_min(torch.finfo(weight.dtype).tiny)
        square = torch.where(
            weight > 0, self.running_square / seen, torch.ones_like(self.running_square)
        )
        if self.center:
            h = h - (self.running_mean / seen).to(h.dtype)
        return h * (square + self.eps).rsqrt().to(h.dtype)

    def zero_features(self, mean: Tensor | None, square: Tensor) -> Tensor:
        """Says which features of the last batch are zero (constant up to rounding, if centred).

        Args:
            mean: Batch means `(..., width)`, `None` without centring.
            square: Mean squares `(..., width)` behind the centring.
        """
        if mean is None:
            return square == 0
        # the mean of n equal numbers is off by rounding, which an eps-free norm would blow up
        resolution = 4 * torch.finfo(mean.dtype).eps
        return square <= (resolution * mean).square()

    def reset_statistics(self) -> None:
        """Forgets the running statistics."""
        if self.track_running_stats:
            for buffer in self.buffers():
                buffer.zero_()

    def extra_repr(self) -> str:
        """Shows the variant."""
        return f"{self.width}, center={self.center}, scale={self.scale}, eps={self.eps}"


def settle(norms: Sequence[BatchNorm], check: bool = True) -> None:
    """Looks for zero features of the last batch and moves running statistics, of all norms at once.

    Args:
        norms: Norms of one kind. Those without a batch since the last call are passed over.
        check: Whether zero features are looked for; needs one look at the values.

    Raises:
        ValueError: For a feature that is zero (constant, if centred) with eps=0; then no running
            statistic has moved.
    """
    positions = [i for i, norm in enumerate(norms) if norm.pending is not None]
    if not positions:
        return
    norms = [norms[i] for i in positions]
    first = norms[0]
    batches: list[BatchStatistics] = [norm.pending for norm in norms]  # type: ignore[misc]
    for norm in norms:
        norm.pending = None
    inverse = torch.stack([batch.inverse for batch in batches])
    # a feature without spread has the inverse 0 or inf, by the way it was computed
    empty = (inverse == 0) | torch.isinf(inverse)
    square = torch.where(empty, 0.0, inverse.square().reciprocal() - first.eps)
    means: list[Tensor] = [batch.mean for batch in batches if batch.mean is not None]
    if check and first.eps == 0:
        zero = first.zero_features(torch.stack(means) if first.center else None, square)
        if bool(zero.any()):
            index, feature = zero.nonzero()[0].tolist()
            where = f" of block {positions[index]}" if len(norms) > 1 else ""
            raise ValueError(zero_feature_message(feature, first.center, where))
    if not (first.training and first.track_running_stats) or first.frozen:
        return
    # what the mean square is divided by includes c, so that evaluation needs no batch size
    if first.scale != "sqrt_n":
        square = square * batches[0].samples / float(first.scale) ** 2
    dtype = first.running_square.dtype
    torch._foreach_lerp_(
        [norm.running_square for norm in norms], list(square.to(dtype).unbind()), first.momentum
    )
    if first.center:
        torch._foreach_lerp_(
            [norm.running_mean for norm in norms], [m.to(dtype) for m in means], first.momentum
        )
    weights = [norm.running_weight for norm in norms]
    torch._foreach_lerp_(
        weights, [torch.ones_like(first.running_weight)] * len(norms), first.momentum
    )


def zero_feature_message(feature: int, center: bool, where: str = "") -> str:
    """One line for a feature that an eps-free norm would divide by zero."""
    what = "is the same for all samples" if center else "is zero for all samples"
    return (
        f"feature {feature}{where} {what} of the batch, and a norm with eps=0 divides by its "
        "length: drop the feature, take a larger batch or set eps above 0"
    )


class SampleNorm(nn.Module):
    """The same norm along the features of each sample: layer normalisation without affine and eps.

    Args:
        width: Number of features.
        center: Whether the mean over the features is subtracted first.
        scale: `"sqrt_n"` (then c = sqrt(width)), or the constant c.
        eps: Added to the mean square.

    Raises:
        ValueError: For an argument out of range.
    """

    def __init__(
        self, width: int, center: bool = True, scale: Scale = "sqrt_n", eps: float = 0.0
    ) -> None:
        super().__init__()
        _check_scale(scale)
        if not 0 <= eps < math.inf:
            raise ValueError(f"eps must be at least 0, got {eps}")
        self.width, self.center, self.scale, self.eps = width, center, scale, eps

    def forward(self, h: Tensor) -> Tensor:
        """Normalises each row of `(n, width)`."""
        if self.center:
            out = torch.nn.functional.layer_norm(h, (self.width,), eps=self.eps)
        else:
            out = h * (h.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return out if self.scale == "sqrt_n" else out * (float(self.scale) / self.width**0.5)

    def extra_repr(self) -> str:
        """Shows the variant."""
        return f"{self.width}, center={self.center}, scale={self.scale}, eps={self.eps}"


def build_norm(
    norm: str,
    width: int,
    center: bool = True,
    scale: Scale = "sqrt_n",
    eps: float = 0.0,
    sync: bool = False,
    track_running_stats: bool = True,
    momentum: float = 0.1,
    deferred: bool = False,
) -> nn.Module:
    """Builds a norm by name.

    Args:
        norm: `bn`, `bn_nocenter` (`bn` with `center=False`), `ln`, `torch_bn` (the framework's,
            with affine parameters and eps 1e-5 unless `eps` is given) or `none`.
        width: Number of features.
        center: See `BatchNorm`.
        scale: See `BatchNorm`.
        eps: See `BatchNorm`.
        sync: See `BatchNorm`; `ln` and `none` have nothing to synchronise.
        track_running_stats: See `BatchNorm`.
        momentum: See `BatchNorm`.
        deferred: See `BatchNorm`.

    Raises:
        ValueError: If the name is unknown, or `torch_bn` is asked to synchronise.
    """
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {norm!r}")
    if norm == "none":
        return nn.Identity()
    if norm == "ln":
        return SampleNorm(width, center, scale, eps)
    if norm == "torch_bn":
        if sync:
            raise ValueError(
                "sync_stats=True is for norm bn and bn_nocenter; torch_bn synchronises by "
                "trainer.sync_batchnorm=true (GPUs only)"
            )
        return nn.BatchNorm1d(
            width, eps=eps or 1e-5, momentum=momentum, track_running_stats=track_running_stats
        )
    return BatchNorm(
        width, center and norm == "bn", scale, eps, sync, track_running_stats, momentum, deferred
    )


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Keeps every running statistic as it is, while training mode still uses the batch's own."""
    ours = [m for m in module.modules() if isinstance(m, BatchNorm)]
    theirs = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    before = [m.frozen for m in ours]
    saved = [[b.clone() for b in m.buffers()] for m in theirs]
    for norm in ours:
        norm.frozen = True
    try:
        yield
    finally:
        for norm, frozen in zip(ours, before, strict=True):
            norm.frozen = frozen
        for other, buffers in zip(theirs, saved, strict=True):
            for buffer, value in zip(other.buffers(), buffers, strict=True):
                buffer.copy_(value)
