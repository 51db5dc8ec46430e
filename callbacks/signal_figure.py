"""The figure of `SignalPropagation`: gap and gradient of every layer over training."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["log_or_nan", "signal_figure"]


def log_or_nan(value: float) -> float:
    """Natural logarithm of a positive number, NaN for any other."""
    return math.log(value) if value > 0 else math.nan


def signal_figure(rows: list[dict[str, float]]) -> "Figure":
    """Draw gap and gradient of every layer, a line per measurement, from light (early) to dark.

    Gaps are those behind the norm if most are finite, else behind the activation, else of the
    non-zero spectrum. The dashed line is the exact mean behind a Haar-orthogonal map, for the first
    measurement, where the measured gap is the one that it predicts.

    Args:
        rows: Rows of the table.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = sorted({int(row["step"]) for row in rows})
    shown = [steps[i] for i in sorted({round(k * (len(steps) - 1) / 11) for k in range(12)})]
    scale = Normalize(min(shown) - 0.25 * (max(shown) - min(shown) + 1), max(shown))
    colours = colormaps["YlGnBu"]
    column = _drawn_gap(rows)
    for step in shown:
        part = [row for row in rows if row["step"] == step]
        style: dict[str, Any] = {"color": colours(scale(step)), "linewidth": 1.8}
        layers = [row["layer"] for row in part]
        logs = [log_or_nan(row["grad_norm"]) / math.log(10) for row in part]
        left.plot(layers, logs, **style)
        right.plot(layers, [_finite(row[column]) for row in part], **style)
    first = [row for row in rows if row["step"] == shown[0]]
    predicted = [
        (row["layer"], row["predicted_gap"])
        for row in first
        if math.isfinite(row.get("predicted_gap", math.nan)) and math.isfinite(row["norm_gap"])
    ]
    if predicted:
        right.plot(
            *zip(*predicted, strict=True), "--", color="#d1495b", linewidth=1.5,
            label=f"exact mean behind a Haar layer (step {shown[0]})",
        )  # fmt: skip
        right.legend(frameon=False)
    left.set(xlabel="layer", ylabel=r"$\log_{10}$ norm of the gradient of the weight")
    left.set_title("Gradient through depth", loc="left", fontweight="bold")
    named = {"norm_gap": "the norm", "act_gap": "the activation", "fc_gap": "the linear map"}
    behind = named[column.removesuffix("_nonzero")]
    spectrum = " (non-zero spectrum)" if column.endswith("_nonzero") else ""
    right.set(xlabel="layer", ylabel=f"isometry gap behind {behind}{spectrum}")
    right.set_title("Isometry gap through depth", loc="left", fontweight="bold")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
    if len(shown) > 1:
        visible = ScalarMappable(Normalize(min(shown), max(shown)), cmap=colours)
        figure.colorbar(visible, ax=[left, right], label="step", pad=0.02, aspect=30)
    return figure


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _drawn_gap(rows: list[dict[str, float]]) -> str:
    candidates = ("norm_gap", "act_gap", "norm_gap_nonzero", "act_gap_nonzero")
    for name in candidates:
        measured = [row[name] for row in rows if not math.isnan(row.get(name, math.nan))]
        if measured and 2 * sum(map(math.isfinite, measured)) > len(measured):
            return name
    return "fc_gap"
