"""Sharded parameters (FSDP2) in methods that would rather not know about them."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["full", "full_sum", "shard_blocks"]


def full(x: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded; any other tensor as it is.

    A sharded parameter (``DTensor``) cannot be mixed with plain tensors, so everything that reads
    weights outside of the module that owns them (penalties, weight tying, spectra, figures) goes
    through here. It is differentiable, and collective: call it on every rank. For a sum over the
    entries ``full_sum`` needs no memory for the whole.

    Args:
        x: plain or sharded tensor, any shape.

    Returns:
        Plain tensor of the same (global) shape.
    """
    gather = getattr(x, "full_tensor", None)
    whole: Tensor = x if gather is None else gather()
    return whole


def full_sum(x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum a function of the entries of a tensor that may be sharded, without gathering it.

    Each rank sums over its own shard and gets the gradient of its own entries; the sums are then
    added up. It also holds for shards of unequal size and empty ones, where arithmetic on a
    ``DTensor`` gives gradients of the wrong shape. Collective: call it on every rank.

    Args:
        x: plain or sharded tensor, any shape.
        of: elementwise function.

    Returns:
        0-d plain tensor, the same on every rank.
    """
    to_local = getattr(x, "to_local", None)
    if to_local is None:
        return of(x).sum()
    part = of(to_local()).sum()
    whole = part.detach().clone()
    for dim, placement in enumerate(x.placements):  # type: ignore[attr-defined]
        if placement.is_shard():
            torch.distributed.all_reduce(whole, group=x.device_mesh.get_group(dim))  # type: ignore[attr-defined]
    return part + (whole - part.detach())


def shard_blocks(
    module: nn.Module, mesh: "DeviceMesh | None", pattern: str | Sequence[str]
) -> list[str]:
    """Shard the blocks of a network over the ranks, then the rest of it (``fully_shard``).

    Made for ``configure_model``, which may be called more than once: what is sharded already is
    left alone, and without a mesh (any strategy but ``ModelParallelStrategy``) nothing happens::

        def configure_model(self) -> None:
            shard_blocks(self.network, self.device_mesh, "encoder.layers.*")

    Args:
        module: network whose parameters are to be sharded.
        mesh: the ``device_mesh`` of the LightningModule; of its dimensions only ``data_parallel``
            is used if there is one of this name.
        pattern: names of the blocks, part by part: ``layers.*`` matches ``layers.0`` and not
            ``layers.0.linear``. Each block is gathered as a whole when it runs.

    Returns:
        Names of the blocks that were sharded by this call, inner ones first.

    Raises:
        ValueError: if a pattern matches no module.
    """
    if mesh is None:
        return []
    from torch.distributed.fsdp import FSDPModule, fully_shard

    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    blocks: dict[str, nn.Module] = {}
    for one in patterns:
        matched = {name: m for name, m in module.named_modules() if name and _matches(name, one)}
        if not matched:
            children = ", ".join(name for name, _ in module.named_children())
            raise ValueError(f"pattern={one!r} matches no block; the network has {children}")
        blocks.update(matched)
    names = mesh.mesh_dim_names or ()
    data_mesh = mesh["data_parallel"] if "data_parallel" in names else mesh
    done = []
    for name in sorted(blocks, key=lambda n: (-n.count("."), n)):
        if not isinstance(blocks[name], FSDPModule):
            fully_shard(blocks[name], mesh=data_mesh)
            done.append(name)
    if not isinstance(module, FSDPModule):
        fully_shard(module, mesh=data_mesh)
    return done


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
