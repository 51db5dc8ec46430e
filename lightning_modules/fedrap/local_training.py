"""One federated round for a block of clients: minibatch SGD of all of them at once.

Clients are independent inside a round, so the loop over clients is bookkeeping. All rows that a
client touches in the round are gathered into a padded block ``(clients, rows, width)`` and every
local step is a handful of dense operations on it. Rows that a client never touches only feel weight
decay; they are followed by one factor per client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_modules.fedrap.native import NativeStep
from lightning_modules.fedrap.objective import (
    Objective,
    block_loss,
    cross_entropy,
    cross_entropy_slope,
    regulariser_rows,
)
from lightning_modules.fedrap.schedule import Block


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains inside a round.

    Args:
        objective: What a step minimises.
        lr_network: Step size of the user vector and bias.
        lr_common: Step size of the client's copy of the common table.
        lr_personal: Step size of the personal table.
        decay_network: Coupled weight decay of vector and bias.
        decay_common: Coupled weight decay of the common table.
        decay_personal: Coupled weight decay of the personal table.
        epochs: Most local epochs.
        tolerance: A client stops when its running loss changes by a smaller share than this.
        step_decay: Factor on all step sizes after every batch of the round.
        trains_personal: Whether the personal table exists.
        trains_common: Whether the common table is trained (otherwise it is left as it is).
    """

    objective: Objective = field(default_factory=Objective)
    lr_network: float = 0.5
    lr_common: float = 200.0
    lr_personal: float = 200.0
    decay_network: float = 1e-4
    decay_common: float = 1e-4
    decay_personal: float = 1e-4
    epochs: int = 10
    tolerance: float = 1e-4
    step_decay: float = 0.95
    trains_personal: bool = True
    trains_common: bool = True


class BlockResult(NamedTuple):
    """What a block of clients knows after its local training.

    ``personal`` and ``common`` are the final rows ``(clients, rows, width)``, ``vector``
    ``(clients, width)``, ``bias``, ``loss`` (running mean of the round) ``(clients,)``,
    ``epochs_run`` and ``steps`` ``(clients,)`` int64. An untouched entry ``x`` of the personal
    table ended at ``personal_decay * x`` and one of the common table at
    ``sign(x) * max(common_decay * |x| - common_shift, 0)``, all ``(clients,)``.
    """

    personal: Tensor
    common: Tensor
    vector: Tensor
    bias: Tensor
    loss: Tensor
    epochs_run: Tensor
    steps: Tensor
    personal_decay: Tensor
    common_decay: Tensor
    common_shift: Tensor


class _Batch(NamedTuple):
    """One local batch of every client, with what stays the same whenever it is fed again.

    ``share`` and ``positive_share`` are weight and positive weight over the batch size, ``scale``
    the weight of a row in the regularisers over their normaliser.
    """

    weight: Tensor
    positive: Tensor
    size: Tensor
    share: Tensor
    positive_share: Tensor
    scale: Tensor


def _prepared(
    weight: Tensor, positive: Tensor, mask: Tensor, width: int, objective: Objective
) -> _Batch:
    size = weight.sum(1)
    at_least_one = size.clamp_min(1.0)[:, None]
    rows, count = regulariser_rows(weight, mask, objective)
    scale = rows / (count * (width if objective.reduction == "mean" else 1))
    return _Batch(weight, positive, size, weight / at_least_one, positive / at_least_one, scale)


class _Gradients(NamedTuple):
    loss: Tensor
    personal: Tensor | None
    common: Tensor | None
    vector: Tensor
    bias: Tensor


def soft_threshold(values: Tensor, amount: Tensor | float) -> Tensor:
    """Proximal map of ``amount * |x|``: shrink towards zero, exactly zero inside."""
    return torch.sign(values) * (values.abs() - amount).clamp_min(0.0)


def train_block(
    block: Block,
    personal: Tensor,
    common: Tensor,
    vector: Tensor,
    bias: Tensor,
    settings: LocalTraining,
    kernel: NativeStep | None = None,
) -> BlockResult:
    """Train all clients of a block for one round, each on its own copy.

    Args:
        block: Rows and batches, see `Block`.
        personal: ``D_i`` at the block's rows ``(clients, rows, width)``; not changed.
        common: ``C`` at the block's rows ``(clients, rows, width)``; not changed.
        vector: ``u_i`` ``(clients, width)``.
        bias: ``b_i`` ``(clients,)``.
        settings: Step sizes, decay, epochs.
        kernel: Compiled closed-form step; ``None`` for plain PyTorch.

    Returns:
        The clients' state after the round; see `BlockResult`.
    """
    personal, common = personal.clone(), common.clone()
    clients, width = vector.shape
    take_step = _chosen_step(block, personal, settings, kernel)
    running_loss, running_rows = vector.new_zeros(clients), vector.new_zeros(clients)
    previous = vector.new_zeros(clients)
    alive = torch.ones(clients, dtype=torch.bool, device=vector.device)
    steps = torch.zeros(clients, dtype=torch.int64, device=vector.device)
    epochs_run = torch.zeros_like(steps)
    common_shift = torch.zeros_like(previous)
    step_sizes = vector.new_tensor(settings.step_decay).pow(
        torch.arange(settings.epochs * block.slots_per_epoch + 1, device=vector.device)
    )
    prepared: dict[int, _Batch] = {}
    for epoch in range(settings.epochs):
        for slot, (weight, positive) in enumerate(block.batches(epoch, vector.dtype)):
            batch = prepared.get(slot)
            if batch is None or batch.weight is not weight:
                batch = _prepared(weight, positive, block.mask, width, settings.objective)
                prepared[slot] = batch
            active = alive & (batch.size > 0)
            step = step_sizes[steps] * active
            loss, vector, bias = take_step(personal, common, vector, bias, batch, step)
            if settings.objective.proximal and settings.objective.mu:
                amount = step * settings.lr_common * settings.objective.mu
                amount = amount / (batch.size.clamp_min(1.0) * width)
                common = soft_threshold(common, amount[:, None, None])
                factor = 1 - step * (settings.lr_common * settings.decay_common)
                common_shift = common_shift * factor + amount
            steps += active
            fed = batch.size * active
            running_loss.addcmul_(loss, fed)
            running_rows += fed
        epochs_run += alive
        current = running_loss / running_rows.clamp_min(1.0)
        if epoch > 0:
            converged = (current - previous).abs() / previous.abs() < settings.tolerance
            alive = alive & ~converged
            if not bool(alive.any()):
                break
        previous = current
    return BlockResult(
        personal,
        common,
        vector,
        bias,
        running_loss / running_rows.clamp_min(1.0),
        epochs_run,
        steps,
        _total_decay(step_sizes, settings.lr_personal * settings.decay_personal)[steps],
        _total_decay(step_sizes, settings.lr_common * settings.decay_common)[steps],
        common_shift,
    )


def _total_decay(step_sizes: Tensor, rate: float) -> Tensor:
    """What an untouched entry has shrunk to after each number of steps."""
    return torch.cat([torch.ones_like(step_sizes[:1]), (1 - step_sizes * rate).cumprod(0)])


_Step = Callable[[Tensor, Tensor, Tensor, Tensor, "_Batch", Tensor], tuple[Tensor, Tensor, Tensor]]


def _chosen_step(
    block: Block, like: Tensor, settings: LocalTraining, kernel: NativeStep | None
) -> _Step:
    """The way of taking a step that knows the objective's gradient and is fastest.

    A step changes the two tables in place. It gives the loss before the step ``(clients,)``, the
    new vector and the new bias.
    """
    if not settings.objective.closed_form:
        return partial(_autograd_step, mask=block.mask, settings=settings)
    if kernel is not None:
        count = block.mask.sum(1)
        logits = torch.zeros_like(like[..., 0])
        return partial(_native_step, kernel=kernel, count=count, logits=logits, settings=settings)
    # Fresh memory costs more than the arithmetic on it: large results go into two scratch tables.
    scratch = torch.empty_like(like), torch.empty_like(like)
    return partial(_closed_form_step, scratch=scratch, settings=settings)


def _autograd_step(
    personal: Tensor,
    common: Tensor,
    vector: Tensor,
    bias: Tensor,
    batch: _Batch,
    step: Tensor,
    *,
    mask: Tensor,
    settings: LocalTraining,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = autograd_gradients(
        personal, common, vector, bias, batch.weight, batch.positive, mask, settings.objective
    )
    if settings.trains_personal and grads.personal is not None:
        rate = (step * settings.lr_personal)[:, None, None]
        personal.sub_(rate * (grads.personal + settings.decay_personal * personal))
    if settings.trains_common and grads.common is not None:
        rate = (step * settings.lr_common)[:, None, None]
        common.sub_(rate * (grads.common + settings.decay_common * common))
    return grads.loss, *_network_step(vector, bias, grads.vector, grads.bias, step, settings)


def _network_step(
    vector: Tensor,
    bias: Tensor,
    vector_gradient: Tensor,
    bias_gradient: Tensor,
    step: Tensor,
    settings: LocalTraining,
) -> tuple[Tensor, Tensor]:
    rate = step * settings.lr_network
    keep = 1 - rate * settings.decay_network
    return (
        torch.addcmul(vector * keep[:, None], vector_gradient, rate[:, None], value=-1),
        torch.addcmul(bias * keep, bias_gradient, rate, value=-1),
    )


def _native_step(
    personal: Tensor,
    common: Tensor,
    vector: Tensor,
    bias: Tensor,
    batch: _Batch,
    step: Tensor,
    *,
    kernel: NativeStep,
    count: Tensor,
    logits: Tensor,
    settings: LocalTraining,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_closed_form_step` in two passes over the rows."""
    objective = settings.objective
    mu = objective.mu if settings.trains_common else 0.0
    both = settings.trains_personal and settings.trains_common
    independence = objective.independence if both else 0.0
    l1, l2 = (mu, 0.0) if objective.regulariser == "l1" else (0.0, mu)
    tables, penalty = (personal, common), torch.zeros_like(bias)
    kernel.score(
        count,
        step,
        tables,
        vector,
        bias,
        batch.scale,
        (independence, l1, l2),
        logits,
        penalty,
    )
    shares = batch.share, batch.positive_share
    loss = cross_entropy(logits, *shares, objective.saturating).sum(1) + penalty
    slope = cross_entropy_slope(logits, *shares, objective.saturating)
    gradient = torch.zeros_like(vector)
    kernel.update(
        count,
        step,
        tables,
        vector,
        slope,
        batch.scale,
        (
            settings.lr_personal if settings.trains_personal else 0.0,
            settings.lr_common if settings.trains_common else 0.0,
        ),
        (settings.decay_personal, settings.decay_common),
        (independence, 0.0 if objective.proximal else l1, l2),
        gradient,
    )
    return loss, *_network_step(vector, bias, gradient, slope.sum(1), step, settings)


def _closed_form_step(
    personal: Tensor,
    common: Tensor,
    vector: Tensor,
    bias: Tensor,
    batch: _Batch,
    step: Tensor,
    *,
    scratch: tuple[Tensor, Tensor],
    settings: LocalTraining,
) -> tuple[Tensor, Tensor, Tensor]:
    objective, scale = settings.objective, batch.scale
    both = settings.trains_personal and settings.trains_common
    first, second = scratch
    view = common if not settings.trains_personal else torch.add(personal, common, out=first)
    logits = torch.bmm(view, vector[..., None])[..., 0] + bias[:, None]
    shares = batch.share, batch.positive_share
    loss = cross_entropy(logits, *shares, objective.saturating).sum(1)
    slope = cross_entropy_slope(logits, *shares, objective.saturating)
    vector_grad = torch.bmm(slope[:, None], view)[:, 0]
    apart = None
    if objective.independence and both:
        apart = torch.sub(personal, common, out=first)
        squares = torch.mul(apart, apart, out=second)
        loss = loss - objective.independence * torch.bmm(scale[:, None], squares).sum((1, 2))
    if objective.mu and settings.trains_common:
        if objective.regulariser == "l1":
            magnitude = torch.abs(common, out=second)
        else:
            magnitude = torch.mul(common, common, out=second)
        loss = loss + objective.mu * torch.bmm(scale[:, None], magnitude).sum((1, 2))

    if settings.trains_common:
        rate = step * settings.lr_common
        keep = (1 - rate * settings.decay_common)[:, None]
        sign = None
        if objective.mu and objective.regulariser == "l2":
            keep = keep - 2 * objective.mu * rate[:, None] * scale
        elif objective.mu and not objective.proximal:
            sign = torch.sign(common, out=second).mul_(objective.mu)
        push = None
        if apart is not None and sign is not None:
            push = sign.add_(apart, alpha=2 * objective.independence)
        elif apart is not None:
            push = torch.mul(apart, 2 * objective.independence, out=second)
        elif sign is not None:
            push = sign
        common.mul_(keep[..., None])
        if push is not None:
            common.addcmul_(push, (-rate[:, None] * scale)[..., None])
        common.baddbmm_((-rate[:, None] * slope)[..., None], vector[:, None])
    if settings.trains_personal:
        rate = step * settings.lr_personal
        if settings.decay_personal:
            personal.mul_((1 - rate * settings.decay_personal)[:, None, None])
        if apart is not None:
            personal.addcmul_(
                apart, (2 * objective.independence * rate[:, None] * scale)[..., None]
            )
        personal.baddbmm_((-rate[:, None] * slope)[..., None], vector[:, None])
    return loss, *_network_step(vector, bias, vector_grad, slope.sum(1), step, settings)


def autograd_gradients(
    personal: Tensor,
    common: Tensor,
    vector: Tensor,
    bias: Tensor,
    weight: Tensor,
    positive: Tensor,
    mask: Tensor,
    objective: Objective,
) -> _Gradients:
    """Loss and gradients of every client by autograd: any regulariser, any user objective."""
    with torch.enable_grad():
        leaves = tuple(x.detach().requires_grad_(True) for x in (personal, common, vector, bias))
        d, c, u, b = leaves
        loss = block_loss(d, c, u, b, weight, positive, mask, objective)
        if loss.shape != bias.shape:
            raise ValueError(
                f"objective: it must give one loss per client, shape {tuple(bias.shape)}; "
                f"got {tuple(loss.shape)}"
            )
        value = loss.detach()
        if objective.proximal and objective.custom is None and objective.mu:
            smooth = replace(objective, regulariser="none")
            loss = block_loss(d, c, u, b, weight, positive, mask, smooth)
        grads = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
    filled = [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, grads, strict=True)
    ]
    return _Gradients(value, *filled)
