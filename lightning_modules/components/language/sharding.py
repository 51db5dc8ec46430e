"""FSDP2 for language models: shard every transformer block, then the root."""

from typing import Any

import torch
from torch import nn

from lightning_modules.components.language.logprobs import unwrap


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a `transformers` model: classes it names as not to be split."""
    inner: Any = unwrap(model)
    names: set[str] = set()
    for module in inner.modules():  # a reward model holds its backbone
        names |= set(getattr(module, "_no_split_modules", None) or [])
    return [module for module in model.modules() if type(module).__name__ in names]


def shard_language_model(model: nn.Module, mesh: Any, dtype: torch.dtype | None = None) -> None:
    """Shard in place over the `data_parallel` dimension of a device mesh.

    Call it in `configure_model` before any optimiser exists, for the frozen reference as well. What
    is sharded already is left alone, and without a mesh nothing happens.

    Args:
        model: Causal language model, with or without adapters.
        mesh: `LightningModule.device_mesh`, one of its dimensions, or None.
        dtype: Compute dtype of parameters; None keeps the stored one. Reductions are in float32.
    """
    if mesh is None:
        return
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if isinstance(model, FSDPModule):
        return
    if "data_parallel" in (getattr(mesh, "mesh_dim_names", None) or ()):
        mesh = mesh["data_parallel"]
    options: dict[str, Any] = {"mesh": mesh}
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in transformer_blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
