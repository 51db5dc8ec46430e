"""Figures of signal propagation through depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_modules.bngrad.network import DeepBNMLP
from lightning_modules.bngrad.norms import frozen_statistics
from lightning_modules.components.propagation import LayerSignals, Roles, measure_signals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["NETWORK_ROLES", "depth_figure", "network_signals", "propagation_figure"]

NETWORK_ROLES = Roles(
    linear=r"blocks\.(\d+)\.linear|head",
    norm=r"blocks\.(\d+)\.norm",
    activation=r"blocks\.(\d+)\.activation",
)
COLOURS = ("#1b6ca8", "#d1495b", "#edae49", "#3a7d44", "#6c4ba3")


def network_signals(
    network: DeepBNMLP, x: Tensor, loss: Callable[[Tensor], Tensor]
) -> LayerSignals:
    """Measures a network in training mode on a batch; leaves it as it was.

    Args:
        network: The network.
        x: Inputs `(n, ...)`, at most `width` samples.
        loss: Scalar from logits.
    """
    training = network.training
    network.train()
    try:
        with frozen_statistics(network):
            return measure_signals(
                network, lambda: loss(network(x)), NETWORK_ROLES, nonzero=True, predict=True
            )
    finally:
        network.train(training)


def _finite(values: Sequence[float]) -> list[float]:
    return [v if math.isfinite(v) else math.nan for v in values]


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def propagation_figure(curves: Mapping[str, LayerSignals]) -> Figure:
    """Draws gradient norm and gap of the activations against the layer.

    The gap is that of the non-zero spectrum where the norm makes it infinite. The dashed line is
    the exact mean behind one Haar-orthogonal layer; it is drawn where the measured norm has a gap
    that it predicts (as many samples as features, no centring).

    Args:
        curves: Label -> signals.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    explained = False
    for (label, signals), colour in zip(curves.items(), COLOURS, strict=False):
        columns: dict[str, Any] = signals.columns
        norms = [math.log10(v) if v > 0 else math.nan for v in columns["grad_norm"]]
        left.plot(signals.layers, _finite(norms), color=colour, linewidth=2, label=label)
        gaps = columns["act_gap"]
        if not any(map(math.isfinite, gaps)):
            gaps = columns["act_gap_nonzero"]
        right.plot(signals.layers, _finite(gaps), color=colour, linewidth=2, label=label)
        predicted = [
            p if math.isfinite(g) else math.nan
            for p, g in zip(columns["predicted_gap"], columns["norm_gap"], strict=True)
        ]
        if any(map(math.isfinite, predicted)):
            right.plot(
                signals.layers, predicted, color=colour, linestyle="--", linewidth=1.2,
                label=None if explained else "exact mean behind a Haar layer",
            )  # fmt: skip
            explained = True
    left.set(xlabel="layer", ylabel=r"$\log_{10}\,\|\partial\,$loss$/\partial W_l\|_F$")
    left.set_title("Gradient through depth", loc="left", fontweight="bold")
    right.set(xlabel="layer", ylabel="isometry gap of the activations")
    right.set_title("Isometry gap through depth", loc="left", fontweight="bold")
    for axes in (left, right):
        _style(axes)
        axes.legend(frameon=False, fontsize=9)
    return figure


def depth_figure(
    gradients: Mapping[str, Mapping[int, float]],
    gaps: Mapping[str, Sequence[float]],
    bound: Sequence[float] | None = None,
    predicted: Sequence[float] | None = None,
) -> Figure:
    """Draws what the paper claims: log-gradient against total depth, gap against layer.

    Args:
        gradients: Label -> depth -> natural logarithm of a gradient norm.
        gaps: Label -> isometry gap behind layers 0, 1, 2, ...
        bound: The theorem's bound of the gap.
        predicted: Exact mean of each layer's gap given the measured one before it.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (label, points), colour in zip(gradients.items(), COLOURS, strict=False):
        left.plot(
            list(points), list(points.values()), "o-", color=colour, linewidth=2, markersize=4,
            label=label,
        )  # fmt: skip
    left.set(xlabel="depth", ylabel=r"$\log\,\|\partial\,$loss$/\partial W_1\|_F$")
    left.set_title("Gradient of an early layer against depth", loc="left", fontweight="bold")
    for (label, values), colour in zip(gaps.items(), COLOURS, strict=False):
        right.semilogy(range(len(values)), values, color=colour, linewidth=2, label=label)
    if predicted is not None:
        right.semilogy(
            range(1, len(predicted) + 1), predicted, "--", color="black", linewidth=1.2,
            label="exact mean, one layer ahead",
        )  # fmt: skip
    if bound is not None:
        right.semilogy(range(len(bound)), bound, ":", color="#777777", label="bound of the theorem")
    right.set(xlabel="layer", ylabel="isometry gap")
    right.set_title("Isometry gap against layer", loc="left", fontweight="bold")
    for axes in (left, right):
        _style(axes)
        axes.legend(frameon=False, fontsize=9)
    return figure
