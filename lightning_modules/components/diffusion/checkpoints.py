"""Published ADM architectures and their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def unet_config(name: str) -> dict[str, Any]:
    """Constructor arguments of a published architecture.

    Raises:
        ValueError: If the name is unknown.
    """
    if name not in PUBLISHED:
        raise ValueError(f"architecture must be one of {sorted(PUBLISHED)}, got {name!r}")
    return dict(PUBLISHED[name])


_LSUN_64 = {
    "image_size": 64,
    "model_channels": 192,
    "num_res_blocks": 3,
    "attention_resolutions": (2, 4, 8),
    "dropout": 0.1,
    "channel_mult": (1, 2, 3, 4),
    "num_head_channels": 64,
    "use_new_attention_order": True,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "cifar10_32": {
        "image_size": 32,
        "model_channels": 128,
        "num_res_blocks": 3,
        "attention_resolutions": (2, 4),
        "dropout": 0.3,
        "channel_mult": (1, 2, 2, 2),
        "num_head_channels": 32,
        "use_new_attention_order": True,
    },
    "lsun_64": _LSUN_64,
    "imagenet_64": dict(_LSUN_64, num_classes=1000),
    "ffhq_128": {
        "image_size": 128,
        "model_channels": 256,
        "num_res_blocks": 3,
        "attention_resolutions": (4, 8, 16),
        "dropout": 0.1,
        "channel_mult": (1, 1, 2, 3, 4),
        "num_head_channels": 64,
        "use_new_attention_order": True,
    },
    "imagenet_128": {
        "image_size": 128,
        "model_channels": 256,
        "num_res_blocks": 2,
        "attention_resolutions": (4, 8, 16),
        "channel_mult": (1, 1, 2, 3, 4),
        "num_heads": 4,
        "num_classes": 1000,
    },
}
