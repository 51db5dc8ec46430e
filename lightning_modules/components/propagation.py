"""How a signal goes through any network and how its gradient comes back, layer by layer."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.components.isometry import (
    batched_isometry_gap,
    expected_one_layer_gap,
    nonzero_isometry_gap,
)
from lightning_modules.components.sharding import full

__all__ = ["ROLES", "LayerSignals", "Roles", "measure_signals", "undisturbed"]

ROLES = ("fc", "norm", "act")
_NORMS = ("BatchNorm", "LayerNorm", "GroupNorm", "RMSNorm", "InstanceNorm", "SampleNorm")
_MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Roles:
    r"""Which submodules of a network are its linear maps, norms and activations.

    Each is a regular expression that has to match the whole name of a submodule. If it has a group
    that matches a number, as in ``blocks\.(\d+)\.linear``, that number is the layer; otherwise
    calls are numbered in the order in which they happen, per role.

    Attributes:
        linear: Maps with a ``weight``; ``None`` takes all linear maps and convolutions.
        norm: Norms; ``None`` takes all modules whose class is a common norm.
        activation: Activations; ``None`` takes all modules of ``torch.nn.modules.activation``.
    """

    linear: str | None = None
    norm: str | None = None
    activation: str | None = None

    def select(
        self, modules: Mapping[str, nn.Module], role: str
    ) -> dict[str, tuple[nn.Module, int | None]]:
        """Returns name -> (submodule, layer if the name tells it) of a role.

        Args:
            modules: All submodules by name.
            role: One of ``ROLES``.

        Raises:
            ValueError: If a pattern is no regular expression or matches no submodule.
        """
        pattern = {"fc": self.linear, "norm": self.norm, "act": self.activation}[role]
        if pattern is None:
            return {n: (m, None) for n, m in modules.items() if _has_role(m, role)}
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
        found: dict[str, tuple[nn.Module, int | None]] = {}
        for name, submodule in modules.items():
            match = compiled.fullmatch(name)
            if match:
                number = str(match.group(1)) if compiled.groups else ""
                found[name] = (submodule, int(number) if number.isdigit() else None)
        if not found:
            names = [name for name in modules if name]
            raise ValueError(
                f"pattern {pattern!r} matches no submodule; there are {', '.join(names[:8])}"
                f"{', ...' if len(names) > 8 else ''}"
            )
        return found


def _has_role(module: nn.Module, role: str) -> bool:
    if role == "fc":
        return isinstance(module, _MAPS)
    if role == "norm":
        return type(module).__name__.endswith(tuple(_NORMS)) or isinstance(
            module, nn.modules.batchnorm._NormBase
        )
    return type(module).__module__ == "torch.nn.modules.activation" and not isinstance(
        module, nn.MultiheadAttention
    )


@dataclass
class LayerSignals:
    """What was measured, one entry per layer; NaN where a layer has no such part.

    Attributes:
        layers: Numbers of the layers.
        names: Name of each layer's linear map, empty where there is none.
        columns: ``weight_gap``, ``fc_gap``, ``norm_gap``, ``act_gap`` and ``grad_norm`` (Frobenius
            norm of the gradient of the loss by the weight); on request ``weight_gap_nonzero`` and
            so on, and ``predicted_gap``, the exact mean of ``norm_gap`` for a Haar-orthogonal map.
        samples: Number of rows of the measured activations.
    """

    layers: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    columns: dict[str, list[float]] = field(default_factory=dict)
    samples: int = 0


class _Recorder:
    """Forward hooks that keep a copy of what a role's modules put out (and the maps take in)."""

    def __init__(self, inputs: bool) -> None:
        self.inputs = inputs
        self.active = True
        self.outputs: dict[str, dict[int, tuple[str, Tensor]]] = {role: {} for role in ROLES}
        self.linear_inputs: dict[int, Tensor] = {}
        self.dtypes: set[torch.dtype] = set()
        self.linear_modules: dict[int, tuple[str, nn.Module]] = {}

    def hook(self, role: str, name: str, layer: int | None) -> Callable[..., None]:
        def keep(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            value = _first_tensor(output)
            if value is None or not self.active:
                return
            taken = self.outputs[role]
            number = len(taken) if layer is None else layer
            if number in taken:
                return  # a layer that runs again (weight sharing) is measured at its first run
            self.dtypes.add(value.dtype)
            # a copy: the next module may work in place
            taken[number] = (name, _rows(value))
            if role == "fc":
                self.linear_modules[number] = (name, module)
                first = _first_tensor(arguments)
                if self.inputs and first is not None:
                    self.linear_inputs[number] = _rows(first)

        return keep


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, tuple | list):
        return next((t for item in value if (t := _first_tensor(item)) is not None), None)
    return None


def _rows(value: Tensor) -> Tensor:
    """A copy with one row per sample."""
    value = full(value.detach())
    return value.reshape(len(value), -1).clone()


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Leaves a module as it was: buffers, metrics, ``.grad``, training flags, random generators.

    Running statistics, spectral-norm vectors, counters and the states of torchmetrics may move
    inside; all of it is put back. Draws inside are the same each time.
    """
    from torchmetrics import Metric

    modules = list(module.modules())
    buffers = [
        (owner, name, value, value.clone())
        for owner in modules
        for name, value in owner._buffers.items()
        if value is not None
    ]
    metrics = [
        (metric, {k: copy.deepcopy(metric.__dict__[k]) for k in _state_names(metric)})
        for metric in modules
        if isinstance(metric, Metric)
    ]
    gradients = [(p, p.grad) for p in module.parameters()]
    flags = [(m, m.training) for m in modules]
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(0)
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            with torch.no_grad():
                for owner, name, value, saved in buffers:
                    owner._buffers[name] = value.copy_(saved)
            for metric, state in metrics:
                metric.__dict__.update(state)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for submodule, flag in flags:
                if submodule.training != flag:  # setting an attribute of a module is slow
                    submodule.training = flag


def _state_names(metric: Any) -> list[str]:
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    return [name for name in names if name in metric.__dict__]


def measure_signals(
    module: nn.Module,
    loss: Callable[[], Tensor],
    roles: Roles | None = None,
    nonzero: bool = False,
    predict: bool = False,
) -> LayerSignals:
    """Runs a loss forward and backward once and measures every layer that the roles name.

    Rows of an activation are samples; further axes are flattened into features. Gaps are in float64
    and batched over layers of one shape. The module is left as it was, see ``undisturbed``; only
    the gradient of the named weights is computed. Sharded parameters (FSDP2) are gathered one at a
    time; call it on every rank then.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> x = torch.randn(4, 8)
        >>> signals = measure_signals(net, lambda: net(x).square().mean())
        >>> len(signals.columns["grad_norm"])
        2

    Args:
        module: Any network, in the mode (training or evaluation) in which it is to be measured.
        loss: Runs the network and returns a scalar.
        roles: What to measure.
        nonzero: Whether the spread of the non-zero spectrum is measured as well: finite where a
            zero is built in, as behind a norm that subtracts the batch mean.
        predict: Whether ``predicted_gap`` is computed where a map is square and has as many rows.

    Raises:
        ValueError: If a pattern matches nothing, or nothing ran that it matches.
    """
    roles = roles or Roles()
    recorder = _Recorder(inputs=predict)
    with ExitStack() as stack:
        stack.enter_context(undisturbed(module))
        modules = dict(module.named_modules())
        for role in ROLES:
            for name, (submodule, layer) in roles.select(modules, role).items():
                hook = recorder.hook(role, name, layer)
                stack.callback(submodule.register_forward_hook(hook).remove)
        stack.enter_context(torch.enable_grad())
        if "torch._dynamo" in sys.modules:
            # compiled code would not run the hooks; where nothing was compiled, spare the import
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        value = loss()
        recorder.active = False  # activation checkpointing runs layers again in the backward pass
        if not any(recorder.outputs.values()):
            raise ValueError("nothing to measure: no linear map, norm or activation ran")
        maps = {
            layer: submodule
            for layer, (_, submodule) in recorder.linear_modules.items()
            if isinstance(getattr(submodule, "weight", None), Tensor)
        }
        norms = _gradient_norms(value, module, maps)
        # read after the backward pass, which frees the gathered copies of sharded weights
        weights: dict[int, Tensor] = {layer: m.weight for layer, m in maps.items()}  # type: ignore[misc]
    return _collect(recorder, weights, norms, nonzero, predict)


def _gradient_norms(
    loss: Tensor, module: nn.Module, maps: dict[int, nn.Module]
) -> dict[int, Tensor]:
    gradients: dict[int, Tensor | None]
    if any(hasattr(parameter, "full_tensor") for parameter in module.parameters()):
        # the leaves of a sharded network are gathered copies: only backward reaches the shards
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {layer: _leaf(m).grad for layer, m in maps.items()}
    else:
        leaves = {layer: _leaf(m) for layer, m in maps.items()}
        wanted = {layer: leaf for layer, leaf in leaves.items() if leaf.requires_grad}
        if not wanted:
            return {}
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        gradients = dict(zip(wanted, found, strict=True))
    return {layer: _norm(g.detach()) for layer, g in gradients.items() if g is not None}


def _norm(gradient: Tensor) -> Tensor:
    """Frobenius norm in float64; of a sharded gradient, without gathering it."""
    if hasattr(gradient, "full_tensor"):
        return full(gradient.double().square().sum()).sqrt()
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm


def _leaf(module: nn.Module) -> Tensor:
    """The parameter behind a weight, which a parametrization may compute anew at every access."""
    if nn.utils.parametrize.is_parametrized(module, "weight"):
        original: Tensor = module.parametrizations["weight"].original  # type: ignore[index, union-attr]
        return original
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight


def _collect(
    recorder: _Recorder,
    weights: dict[int, Tensor],
    norms: dict[int, Tensor],
    nonzero: bool,
    predict: bool,
) -> LayerSignals:
    numbers = sorted({n for outputs in recorder.outputs.values() for n in outputs})
    matrices: dict[str, dict[int, Tensor]] = {
        "weight": {n: full(w.detach()).flatten(1) for n, w in weights.items() if w.ndim >= 2}
    }
    for role in ROLES:
        matrices[role] = {n: rows for n, (_, rows) in recorder.outputs[role].items()}
    columns: dict[str, dict[int, float]] = {}
    # the coarsest type of all: under autocast, outputs of maps are coarser than those of norms
    coarsest = max(recorder.dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    types = dict.fromkeys(ROLES, coarsest)
    types["weight"] = max(
        (w.dtype for w in weights.values()), key=lambda t: torch.finfo(t).eps, default=coarsest
    )
    for role, found in matrices.items():
        columns[f"{role}_gap"] = _by_shape(found, batched_isometry_gap, types[role])
    columns["grad_norm"] = {}
    if norms:
        values = torch.stack(list(norms.values())).tolist()
        columns["grad_norm"] = dict(zip(norms, values, strict=True))
    if nonzero:
        for role, found in matrices.items():
            columns[f"{role}_gap_nonzero"] = _by_shape(found, nonzero_isometry_gap, types[role])
    if predict:
        square = {
            n: x
            for n, x in recorder.linear_inputs.items()
            if x.shape[0] == x.shape[1] and n in weights and weights[n].shape[0] == x.shape[1]
        }
        columns["predicted_gap"] = _by_shape(square, expected_one_layer_gap, coarsest)
    sizes = [len(rows) for found in list(matrices.values())[1:] for rows in found.values()]
    return LayerSignals(
        layers=numbers,
        names=[recorder.linear_modules.get(n, ("",))[0] for n in numbers],
        columns={
            name: [values.get(n, float("nan")) for n in numbers] for name, values in columns.items()
        },
        samples=max(sizes, default=0),
    )


def _by_shape(
    matrices: dict[int, Tensor],
    function: Callable[[Tensor, torch.dtype], Tensor],
    computed_in: torch.dtype,
) -> dict[int, float]:
    """Applies a batched function to all matrices of one shape together."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, matrix in matrices.items():
        groups.setdefault(tuple(matrix.shape), []).append(number)
    result: dict[int, float] = {}
    for group in groups.values():
        first = matrices[group[0]]
        # on a CPU a few megabytes at a time, which stay in its cache
        budget = 2**22 if first.device.type == "cpu" else 2**28
        size = max(1, budget // (8 * max(first.numel(), 1)))
        for start in range(0, len(group), size):
            part = group[start : start + size]
            # stacks and converts in one pass
            stack = first.new_empty((len(part), *first.shape), dtype=torch.float64)
            torch._foreach_copy_(list(stack.unbind()), [matrices[n] for n in part])
            values = function(stack, computed_in)
            result.update(zip(part, values.tolist(), strict=True))
    return result
