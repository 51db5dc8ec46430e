"""The parts of a private step that do not depend on the budget: checks, clipping, writing back."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from lightning_modules.components.privacy.clipping import ClippedSum, batch_size, clipped_sum
from lightning_modules.components.privacy.ghost import (
    GhostClipper,
    mixing_layers,
    unsupported_layers,
)


def check_trainer(trainer: Trainer) -> None:
    """Refuse what would break the guarantee without a sign.

    Raises:
        MisconfigurationException: names the setting and the fix.
    """
    if trainer.gradient_clip_val:
        raise MisconfigurationException(
            f"trainer.gradient_clip_val={trainer.gradient_clip_val} would clip the noisy sum: "
            "remove it, PrivateGradients.clip_norm bounds every example"
        )
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} joins batches that "
            "were sampled separately: set it to 1 and raise data.batch_size; chunk_size bounds "
            "the memory"
        )
    if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
        raise MisconfigurationException(
            "trainer.reload_dataloaders_every_n_epochs replaces the sampling that the guarantee "
            "was computed for: set it to 0"
        )
    if trainer.precision in ("16-mixed", "16-true", "bf16-true", "transformer-engine"):
        raise MisconfigurationException(
            f"trainer.precision={trainer.precision} rescales or rounds gradients: use 32-true or "
            "bf16-mixed"
        )


def check_module(module: LightningModule) -> None:
    """Refuse layers that mix examples.

    Raises:
        MisconfigurationException: names the layer and the fix.
    """
    mixing = mixing_layers(module)
    if mixing:
        raise MisconfigurationException(
            f"layer {mixing[0]} normalises over the batch, so one example changes the gradients of "
            "all others: replace batch normalisation by nn.GroupNorm or nn.LayerNorm"
        )


class Clipper:
    """Finds the sum of clipped per-example gradients of one batch.

    Args:
        module: the module in training.
        names: its parameters that the optimiser moves.
        clipping: "ghost", "vmap" or "auto".
        clip_norm: bound on every example's gradient.
        loss_reduction: how ``training_step`` reduces over the local batch.
        chunk_size: examples at once for vmap.
    """

    def __init__(
        self,
        module: LightningModule,
        names: list[str],
        clipping: Literal["auto", "ghost", "vmap"],
        clip_norm: float,
        loss_reduction: Literal["mean", "sum"],
        chunk_size: int | None,
    ) -> None:
        self.module, self.names = module, names
        self.clip_norm, self.loss_reduction, self.chunk_size = clip_norm, loss_reduction, chunk_size
        missing = unsupported_layers(module)
        if clipping == "ghost" and missing:
            raise MisconfigurationException(
                f"ghost clipping has no rule for {', '.join(missing)}: set clipping=vmap"
            )
        if (clipping == "vmap" or missing) and not (
            module.automatic_optimization or hasattr(module, "example_losses")
        ):
            raise MisconfigurationException(
                "clipping=vmap with manual optimisation cannot use training_step: give the module "
                "a method example_losses(batch) -> (batch,)"
            )
        self.ghost = None if clipping == "vmap" or missing else GhostClipper(module, names)
        self._checked = False
        self._separate = False

    def start(self) -> None:
        """A new batch begins."""
        if self.ghost is not None:
            self.ghost.start()

    def close(self) -> None:
        """Take the hooks off the module."""
        if self.ghost is not None:
            self.ghost.close()

    def clip(self, batch: Any, trainer: Trainer) -> ClippedSum:
        """Clipped sum of this rank's batch."""
        count = batch_size(batch)
        with torch.no_grad():
            if self.ghost is None:
                return self._by_vmap(batch, trainer)
            scale = float(count) if self.loss_reduction == "mean" else 1.0
            if not self._checked and count:
                self._check_complete(count, scale, trainer)
            total = self.ghost.clipped_sum(count, self.clip_norm, scale)
            if not self._separate and count > 1:
                self._check_separate(batch, count, trainer)
            return total

    def _by_vmap(self, batch: Any, trainer: Trainer) -> ClippedSum:
        losses = getattr(self.module, "example_losses", None)
        if losses is not None:
            return self._clipped(losses, batch)
        try:
            with self._silent():  # numbers under vmap have no value that could be logged
                return self._clipped(self._one_loss, batch)
        except RuntimeError as error:
            if not str(error).startswith("vmap"):
                raise
            raise MisconfigurationException(
                "clipping=vmap cannot run this training_step (it updates metrics, takes .item() "
                "or branches on data): give the module a method example_losses(batch) -> (batch,)"
            ) from error

    @contextmanager
    def _silent(self) -> Iterator[None]:
        """Let the module log nothing."""
        names = ("log", "log_dict")
        kept = {name: self.module.__dict__.get(name) for name in names}
        try:
            for name in names:
                object.__setattr__(self.module, name, _ignore)
            yield
        finally:
            for name, value in kept.items():
                if value is None:
                    object.__delattr__(self.module, name)
                else:
                    object.__setattr__(self.module, name, value)

    def _clipped(self, losses: Any, batch: Any) -> ClippedSum:
        with torch.enable_grad():
            return clipped_sum(
                self.module, losses, batch, self.clip_norm, self.names, self.chunk_size
            )

    def _loss(self, batch: Any) -> Any:
        output = self.module.training_step(batch, 0)
        return output["loss"] if isinstance(output, dict) else output

    def _one_loss(self, batch: Any) -> Tensor:
        loss = self._loss(batch)
        assert isinstance(loss, Tensor)
        return loss.reshape(1)

    def _check_separate(self, batch: Any, count: int, trainer: Trainer) -> None:
        """Other examples in the batch must not change an example's gradient.

        Runs the step twice with the same random numbers, the second time with the later half of
        the batch replaced by the earlier one, whose gradients must stay as long as they were.
        """
        self._separate = True
        if trainer.world_size > 1 or not self.module.automatic_optimization:
            return  # running the step again could communicate, or move the weights
        half = (count + 1) // 2
        rows = torch.arange(count) % half
        changed = pytree.tree_map(
            lambda x: x[rows.to(x.device)] if isinstance(x, Tensor) else x, batch
        )
        before, after = (self._norms_again(b, count)[:half] for b in (batch, changed))
        gap = (before.sqrt() - after.sqrt()).abs()
        if bool((gap > 1e-2 * before.sqrt() + 1e-5 * before.max().sqrt()).any()):
            raise MisconfigurationException(
                "the gradient of an example depends on the others in its batch (a loss that "
                "couples examples, batch statistics, a mean over something else than examples): "
                "take the mean over examples of losses of their own, or use clipping=vmap"
            )

    def _norms_again(self, batch: Any, count: int) -> Tensor:
        """Squared gradient norms of a further step, which leaves no trace in the module."""
        assert self.ghost is not None
        buffers = [(b, b.clone()) for b in self.module.buffers()]
        metrics = [m for m in self.module.modules() if isinstance(m, Metric)]
        states = [(m, copy.deepcopy(m.metric_state), m._update_count) for m in metrics]
        wanted = [p for n, p in self.module.named_parameters() if n in self.names]
        try:
            with self._silent(), isolate_rng(), torch.enable_grad():
                self.ghost.start()
                loss = self._loss(batch)
                if isinstance(loss, Tensor) and loss.requires_grad:
                    torch.autograd.grad(loss, wanted, allow_unused=True)
            return self.ghost.squared_norms(count)
        finally:
            for buffer, old in buffers:
                buffer.copy_(old)
            for metric, state, updates in states:
                for name, value in state.items():
                    setattr(metric, name, value)
                metric._update_count, metric._computed = updates, None

    def _check_complete(self, count: int, scale: float, trainer: Trainer) -> None:
        """The layers' gradients must add up to autograd's, or something escaped the clipping."""
        assert self.ghost is not None
        if trainer.world_size > 1:
            self._checked = True  # .grad is the mean over ranks by now
            return
        uses = list(self.ghost._uses)
        found = self.ghost.clipped_sum(count, float("inf"), scale).gradients
        self.ghost._uses.extend(uses)
        parameters = dict(self.module.named_parameters())
        for name in self.names:
            given = parameters[name].grad
            ours = found[name] / scale
            theirs = torch.zeros_like(ours) if given is None else given.float()
            gap = (ours - theirs).norm()
            if torch.isfinite(gap) and gap > 1e-2 * theirs.norm() + 1e-5:
                raise MisconfigurationException(
                    f"the gradient of {name} does not come from its layer alone (a penalty on "
                    "weights, or weights used outside of the layer's forward): move penalties to "
                    "the optimiser's weight_decay, or use clipping=vmap"
                )
        self._checked = True


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None


def flatten(clipped: ClippedSum, names: list[str]) -> Tensor:
    """All gradients in order of names, then examples, clipped and non-finite counts; float32."""
    parts = [clipped.gradients[name].flatten() for name in names]
    device = parts[0].device
    counts = torch.stack(
        [
            torch.tensor(float(clipped.examples), device=device),
            clipped.clipped.float(),
            clipped.nonfinite.float(),
        ]
    )
    return torch.cat([*parts, counts])


def write_gradients(vector: Tensor, parameters: dict[str, Tensor]) -> None:
    """Cut the vector into the parameters' gradients, sharded like the parameters."""
    place = 0
    for parameter in parameters.values():
        whole = vector[place : place + parameter.numel()].view(parameter.shape)
        place += parameter.numel()
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            from torch.distributed.tensor import distribute_tensor

            whole = distribute_tensor(whole, mesh, parameter.placements)  # type: ignore[attr-defined]
        gradient = whole.to(parameter.dtype)
        parameter.grad = gradient if mesh is not None else gradient.clone()
