"""Watches the norms of gradients, group by group."""

from fnmatch import fnmatchcase

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_modules.components.sharding import full_sum

__all__ = ["GradientNorms", "gradient_norms"]


def gradient_norms(
    named_gradients: dict[str, Tensor], groups: dict[str, str] | None = None, depth: int = 1
) -> dict[str, Tensor]:
    """Return the L2 norm of all gradients in a group together, for every group and the total.

    Args:
        named_gradients: name of the parameter -> its gradient, dense, sparse or sharded.
        groups: name of a group -> pattern of parameter names (``*`` matches anything); a parameter
            belongs to the first that matches, and to ``other`` if there is none. ``None`` groups by
            the first ``depth`` parts of the name.
        depth: see ``groups``.

    Returns:
        Group (and ``total``) -> 0-d tensor, at least in float32.
    """
    squares: dict[str, list[Tensor]] = {}
    for name, gradient in named_gradients.items():
        if groups is None:
            # Without the last part, which is the parameter itself and not a module.
            group = ".".join(name.split(".")[:-1][:depth]) or name
        else:
            group = next((g for g, p in groups.items() if fnmatchcase(name, p)), "other")
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        values = values if values.dtype == torch.float64 else values.float()
        squares.setdefault(group, []).append(full_sum(values, torch.square))
    sums = {group: torch.stack(terms).sum() for group, terms in squares.items()}
    if sums:
        sums["total"] = torch.stack([s.double() for s in sums.values()]).sum().float()
    return {group: value.sqrt() for group, value in sums.items()}


class GradientNorms(Callback):
    """Logs ``grad_norm/<group>`` and ``grad_norm/total`` every ``log_every_n_steps``; only watches.

    The norms are those of the whole (accumulated, averaged over ranks, unscaled) gradient before
    clipping. With several optimisers each one's total is ``grad_norm/total/<index>``.

    Args:
        groups: name of a group -> pattern of parameter names, such as
            ``{"encoder": "network.encoder.*"}``; ``None`` makes one group per submodule.
        depth: number of leading parts of the parameter's name that make its group, if ``groups`` is
            not given: 1 for ``network``, 2 for ``network.encoder``.

    Raises:
        ValueError: for ``depth`` below 1.
    """

    def __init__(self, groups: dict[str, str] | None = None, depth: int = 2) -> None:
        super().__init__()
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.groups = groups
        self.depth = depth

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Log the norms of the gradients that this optimiser is about to use."""
        # Only in the steps that Lightning passes on to the loggers.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or (step + 1) % every:
            return
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        gradients = {
            name: parameter.grad.detach()
            for name, parameter in pl_module.named_parameters()
            if id(parameter) in mine and parameter.grad is not None
        }
        norms = gradient_norms(gradients, self.groups, self.depth)
        several = len(trainer.optimizers) > 1
        for group, norm in norms.items():
            suffix = ""
            if several and group == "total":
                suffix = f"/{[o is optimizer for o in trainer.optimizers].index(True)}"
            pl_module.log(f"grad_norm/{group}{suffix}", norm, on_step=True, on_epoch=False)
