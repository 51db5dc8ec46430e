"""Load published ADM checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn


def load_adm_state(network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state dict with the published names, strictly.

    Attention order cannot be seen in shapes: the network's configuration decides.

    Raises:
        ValueError: If names or shapes differ; lists the first ten of each and likely options.
    """
    own = network.state_dict()
    missing = sorted(own.keys() - state.keys())
    unexpected = sorted(state.keys() - own.keys())
    wrong = [
        f"{name} {tuple(state[name].shape)} (network {tuple(own[name].shape)})"
        for name in sorted(own.keys() & state.keys())
        if own[name].shape != state[name].shape
    ]
    if missing or unexpected or wrong:
        kinds = {"missing": missing, "unexpected": unexpected, "other shape": wrong}
        listed = "; ".join(
            f"{len(names)} {kind}: {', '.join(names[:10])}{' ...' if len(names) > 10 else ''}"
            for kind, names in kinds.items()
            if names
        )
        raise ValueError(
            f"checkpoint does not fit the network: {listed}. Check attention_resolutions "
            "(downsampling factors), resblock_updown, use_scale_shift_norm, num_classes, "
            "num_res_blocks, channel_mult and out_channels (doubled for a learned variance)"
        )
    network.load_state_dict(state, strict=True)


def load_adm_checkpoint(path: str | Path, network: nn.Module) -> nn.Module:
    """Load a published ``.pt`` file (a plain state dict) into a network and return it.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it does not fit.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    state = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(state, Mapping) and "state_dict" in state:
        state = state["state_dict"]
    load_adm_state(network, state)
    return network
