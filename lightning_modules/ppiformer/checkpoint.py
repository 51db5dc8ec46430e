"""Published weights: reading the files without their package, and the map of their names."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch import Tensor, nn

from lightning_modules.ppiformer.tensor_product import (
    PAIRS,
    basis_from_constants,
    rotation_constants,
)

BASIS = "encoder.basis:(1,1)"
_RENAMED = (
    (r"encoder\.edge_emb\.weight", "encoder.edge_embedding.weight"),
    (r"encoder\.norm\.transforms\.(\d)", r"encoder.norm.scale.\1"),
    (r"classifier\.lins\.0\.(weight|bias)", r"classifier.\1"),
    (r"(.*)\.0\.prenorm\.transforms\.(\d)", r"\1.attention.norm.scale.\2"),
    (r"(.*)\.1\.prenorm\.transforms\.(\d)", r"\1.feed_forward.norm.scale.\2"),
    (r"(.*)\.0\.to_q\.weights\.(\d)", r"\1.attention.query.\2.weight"),
    (r"(.*)\.0\.to_out\.weights\.(\d)", r"\1.attention.out.\2.weight"),
    (r"(.*)\.1\.project_in\.weights\.(\d)", r"\1.feed_forward.inner.\2.weight"),
    (r"(.*)\.1\.project_out\.weights\.(\d)", r"\1.feed_forward.out.\2.weight"),
    (r"(.*)\.to_xi\.weights\.(\d)", r"\1.receiver.\2.weight"),
    (r"(.*)\.to_xj\.weights\.(\d)", r"\1.sender.\2.weight"),
    (r"(.*)\.self_interact\.weights\.(\d)", r"\1.self_slot.\2.weight"),
    (r"(.*)\.to_out\.weights\.(\d)", r"\1.out.\2.weight"),
)
_RADIAL = re.compile(r"(.*)\.kernel_unary\.\((\d),(\d)\)\.rp\.(.*)")
_STACKED = {
    "0.weight": "weight_in",
    "0.bias": "bias_in",
    "2.gamma": "scale_in",
    "3.weight": "weight_hidden",
    "3.bias": "bias_hidden",
    "5.gamma": "scale_hidden",
}


def _module_path(name: str) -> str:
    name = name.replace("encoder.tp_in", "encoder.embed.product")
    name = re.sub(
        r"encoder\.layers\.blocks\.(\d+)\.0\.to_kv", r"encoder.blocks.\1.attention.product", name
    )
    return re.sub(r"encoder\.layers\.blocks\.(\d+)", r"encoder.blocks.\1", name)


def from_published(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename and stack the entries of an authors' state dict.

    Args:
        state: names as in the published files, with or without a ``model.`` prefix; further entries
            (optimiser-side buffers, metrics) under other prefixes are left out.

    Returns:
        Entries ``encoder.*`` and ``classifier.*`` for `PPIformer.load_state_dict`, the whole vector
        branch included; float64 where exactness matters (the rotation constants).

    Raises:
        ValueError: if there is no encoder, or a normalisation has a shift other than zero (not this
            architecture).
    """
    state = {key.removeprefix("model."): value for key, value in state.items()}
    state = {
        key: value for key, value in state.items() if key.startswith(("encoder.", "classifier."))
    }
    if BASIS not in state:
        raise ValueError(
            f"the checkpoint has no entry {BASIS!r}: it isn't a published PPIformer of degree 1"
        )
    result: dict[str, Tensor] = {"encoder.constants": rotation_constants(state[BASIS].double())}
    radial: dict[str, dict[str, dict[tuple[int, int], Tensor]]] = {}
    for key, value in state.items():
        if key.endswith(".beta"):
            if value.abs().max() > 0:
                raise ValueError(
                    f"{key} has a shift other than zero, which this architecture doesn't have"
                )
            continue
        if match := _RADIAL.fullmatch(key):
            prefix, inputs, outputs, part = match.groups()
            pair = (int(inputs), int(outputs))
            radial.setdefault(_module_path(prefix), {}).setdefault(part, {})[pair] = value
            continue
        if key == BASIS:
            continue
        for pattern, replacement in _RENAMED:
            if re.fullmatch(pattern, key):
                name = _module_path(re.sub(pattern, replacement, key))
                result[name] = value.squeeze(-1) if ".scale." in name else value
                break
    for prefix, parts in radial.items():
        for part, name in _STACKED.items():
            result[f"{prefix}.radial.{name}"] = torch.stack([parts[part][pair] for pair in PAIRS])
        width = {pair[0]: result[f"{prefix}.receiver.{pair[0]}.weight"].shape[0] for pair in PAIRS}
        for index, pair in enumerate(PAIRS):
            kernel = torch.cat([parts["6.weight"][pair], parts["6.bias"][pair][:, None]], dim=1)
            kernel = kernel.view(-1, width[pair[0]], kernel.shape[1])
            result[f"{prefix}.kernels.{index}"] = kernel.permute(1, 2, 0).contiguous()
    return result


def to_published(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `from_published` (normalisation shifts are written as zeros).

    Raises:
        ValueError: if the vector branch of the last layer is missing
            (``last_layer_scalar_only=True``).
    """
    if "encoder.norm.scale.1" not in state:
        raise ValueError("to_published needs the vector branch: use last_layer_scalar_only=False")

    def old_path(prefix: str) -> str:
        prefix = prefix.replace("encoder.embed.product", "encoder.tp_in")
        return re.sub(
            r"encoder\.blocks\.(\d+)\.attention\.product",
            r"encoder.layers.blocks.\1.0.to_kv",
            prefix,
        )

    inner = {"query": "0.to_q.weights", "out": "0.to_out.weights", "inner": "1.project_in.weights"}
    product = {
        "receiver": "to_xi",
        "sender": "to_xj",
        "self_slot": "self_interact",
        "out": "to_out",
    }
    result: dict[str, Tensor] = {BASIS: basis_from_constants(state["encoder.constants"])}
    for key, value in state.items():
        if match := re.fullmatch(r"(encoder\..*product)\.(\w+)\.(\d)\.weight", key):
            result[f"{old_path(match[1])}.{product[match[2]]}.weights.{match[3]}"] = value
        elif match := re.fullmatch(
            r"encoder\.blocks\.(\d+)\.(attention|feed_forward)\.(\w+)\.(\d)\.?\w*", key
        ):
            layer, part, name, degree = match.groups()
            base = f"encoder.layers.blocks.{layer}"
            if name == "scale" or ".norm." in key:
                continue
            target = (
                "1.project_out.weights" if (part, name) == ("feed_forward", "out") else inner[name]
            )
            result[f"{base}.{target}.{degree}"] = value
        elif match := re.fullmatch(r"(encoder\..*product)\.radial\.(\w+)", key):
            part = next(old for old, new in _STACKED.items() if new == match[2])
            for index, (i, o) in enumerate(PAIRS):
                name = f"{old_path(match[1])}.kernel_unary.({i},{o}).rp.{part}"
                result[name] = value[index]
                if part.endswith("gamma"):
                    result[name.replace("gamma", "beta")] = torch.zeros_like(value[index])
        elif match := re.fullmatch(r"(encoder\..*product)\.kernels\.(\d)", key):
            i, o = PAIRS[int(match[2])]
            flat = value.permute(2, 0, 1).flatten(0, 1)
            name = f"{old_path(match[1])}.kernel_unary.({i},{o}).rp.6"
            result[f"{name}.weight"], result[f"{name}.bias"] = (
                flat[:, :-1].contiguous(),
                flat[:, -1].contiguous(),
            )
        elif key == "encoder.edge_embedding.weight":
            result["encoder.edge_emb.weight"] = value
        elif key.startswith("classifier."):
            result[key.replace("classifier.", "classifier.lins.0.")] = value
    for key, value in state.items():
        if match := re.fullmatch(r"encoder\.norm\.scale\.(\d)", key):
            result[f"encoder.norm.transforms.{match[1]}"] = value[:, None]
        elif match := re.fullmatch(
            r"encoder\.blocks\.(\d+)\.(attention|feed_forward)\.norm\.scale\.(\d)", key
        ):
            part = 0 if match[2] == "attention" else 1
            result[f"encoder.layers.blocks.{match[1]}.{part}.prenorm.transforms.{match[3]}"] = (
                value[:, None]
            )
    return result


class _Stub:
    """Stands in for every class of the authors' packages that a checkpoint pickles."""

    def __new__(cls, *_: Any, **__: Any) -> _Stub:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> _Stub:
        return self

    def append(self, *_: Any) -> None: ...

    def extend(self, *_: Any) -> None: ...

    def __setitem__(self, *_: Any) -> None: ...


class _StubUnpickler(pickle.Unpickler):
    # Only what tensors are made of is looked up for real; nothing else in the file can run code.
    _ALLOWED = frozenset(
        {
            ("collections", "OrderedDict"),
            ("torch._utils", "_rebuild_tensor_v2"),
            ("torch._utils", "_rebuild_parameter"),
            ("torch", "Size"),
            ("torch", "device"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._ALLOWED or (module == "torch" and name.endswith("Storage")):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _Stub


def read_published(path: str | Path) -> dict[str, Tensor]:
    """The ``state_dict`` of an authors' ``.ckpt`` file, unknown classes replaced by stubs.

    Raises:
        ValueError: if the file is no PyTorch archive or has no ``state_dict``.
    """

    def load(file: IO[bytes], **options: Any) -> Any:
        return _StubUnpickler(file, encoding=options.get("encoding", "ASCII")).load()

    names = SimpleNamespace(Unpickler=_StubUnpickler, load=load, __name__="stub_pickle")
    try:
        content = torch.load(path, map_location="cpu", weights_only=False, pickle_module=names)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{path} can't be read as a PyTorch checkpoint: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(f"{path} has no state_dict; give a Lightning checkpoint (.ckpt)")
    return {key: value for key, value in content["state_dict"].items() if isinstance(value, Tensor)}


def is_published(state: Mapping[str, Tensor]) -> bool:
    """Whether the names are the authors' and not ours."""
    return any(key.removeprefix("model.") == BASIS for key in state)


def load_weights(
    module: nn.Module, state: Mapping[str, Tensor], source: str = "checkpoint"
) -> None:
    """Load encoder and classifier, ours or published; another architecture is an error.

    Surplus vector-branch weights of the last layer are accepted and dropped.

    Args:
        module: has ``encoder`` and ``classifier``.
        state: our names or the authors'.
        source: named in errors.

    Raises:
        ValueError: listing the first keys that are missing or have another shape.
    """
    if is_published(state):
        state = from_published(state)
    state = {key.removeprefix("network."): value for key, value in state.items()}
    wanted = {
        k: v for k, v in module.state_dict().items() if k.startswith(("encoder.", "classifier."))
    }
    unused = [
        key for key in state if key.startswith(("encoder.", "classifier.")) and key not in wanted
    ]
    problems = [f"{key} is missing" for key in wanted if key not in state]
    scalar_only = bool(getattr(module.encoder, "last_layer_scalar_only", False))
    chosen: dict[str, Tensor] = {}
    for key, value in wanted.items():
        if key not in state:
            continue
        found = state[key]
        if scalar_only and key.rsplit(".", 1)[-1].startswith(("weight_", "bias_", "scale_")):
            # The stacked radial networks of a scalar-only layer are the first two of the full four.
            found = found[: value.shape[0]]
        if found.shape != value.shape:
            problems.append(f"{key} has shape {tuple(found.shape)}, the model {tuple(value.shape)}")
        chosen[key] = found
    blocks = [int(m[1]) for key in wanted if (m := re.match(r"encoder\.blocks\.(\d+)\.", key))]
    last = f"encoder.blocks.{max(blocks, default=-1)}."
    for key in unused:
        if not (scalar_only and (key.startswith(last) or key == "encoder.norm.scale.1")):
            problems.append(f"{key} has no place in the model")
    if problems:
        shown = "; ".join(problems[:3])
        raise ValueError(
            f"{source} doesn't fit the model ({len(problems)} differences: {shown}); "
            "set channels, depth, heads, head_widths and radial_hidden as in its training"
        )
    module.load_state_dict(chosen, strict=False)


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The state dict of our checkpoint or of a published one.

    Raises:
        ValueError: if the file is neither.
    """
    if not Path(path).is_file():
        raise ValueError(f"checkpoint {path} doesn't exist")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return read_published(path)
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{path} can't be read as a PyTorch checkpoint: {error}") from error
    state = content.get("state_dict", content) if isinstance(content, dict) else {}
    prefixes = ("encoder.", "model.encoder.", "network.encoder.")
    if not any(key.startswith(prefixes) for key in state):
        raise ValueError(f"{path} has no encoder weights")
    return dict(state)


def average_weights(paths: Iterable[str | Path]) -> dict[str, Tensor]:
    """Mean of the weights of several checkpoints, for example one per fold.

    Raises:
        ValueError: for no path, or checkpoints with different names or shapes.
    """
    states = []
    for path in paths:
        state = read_weights(path)
        states.append(from_published(state) if is_published(state) else state)
    if not states:
        raise ValueError("paths is empty; give at least one checkpoint")
    first = states[0]
    for state in states[1:]:
        different = sorted(
            set(first) ^ set(state)
            or {key for key in first if first[key].shape != state[key].shape}
        )
        if different:
            raise ValueError(
                f"checkpoints differ; first differing keys: {', '.join(different[:3])}"
            )
    return {
        key: torch.stack([state[key] for state in states]).mean(0)
        if value.is_floating_point()
        else value
        for key, value in first.items()
    }
