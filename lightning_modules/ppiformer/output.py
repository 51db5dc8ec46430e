"""Predictions as tables and figures: CSV, heat maps of a scan, a look at an interface."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lightning_modules.ppiformer.evaluation import METRICS
from lightning_modules.ppiformer.residues import RESIDUES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SINGLE = re.compile(rf"([{RESIDUES}]):?(.+?):?(-?\d+)([A-Za-z]?):?([{RESIDUES}])")


class Row(NamedTuple):
    """One predicted mutation; ddG and its spread over models in kcal/mol."""

    interface: str
    mutation: str
    ddg: float
    sd: float
    in_interface: bool
    measured: float


def rows_of(prediction: Mapping[str, Any]) -> list[Row]:
    """Rows of what `predict_step` returned; none for embeddings."""
    if "ddg" not in prediction:
        return []
    names = ("interface", "mutation", "ddg", "sd", "in_interface", "measured")
    columns = [prediction[name] for name in names]
    lists = [column if isinstance(column, list) else column.tolist() for column in columns]
    return [Row(*values) for values in zip(*lists, strict=True)]


def write_csv(rows: Iterable[Row], path: Path) -> Path:
    """Write rows in their order; unknown measurements are left empty."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["interface", "mutation", "ddg", "sd", "in_interface", "measured"])
        for row in rows:
            values: list[object] = [row.interface, row.mutation]
            values += [f"{v:.6f}" if v == v else "" for v in (row.ddg, row.sd)]
            values += [
                row.in_interface,
                f"{row.measured:.6f}" if row.measured == row.measured else "",
            ]
            writer.writerow(values)
    return path


def write_metrics(table: Mapping[str, Any], names: Sequence[str], path: Path) -> Path:
    """Write the metrics of every group and both means, that of rounded values as published.

    Args:
        table: from `evaluate`, groups numbered.
        names: of the groups by number; a number without a name stands for itself.
        path: CSV file.
    """
    rows = [
        (names[group] if group < len(names) else group, metrics)
        for group, metrics in table["per_group"].items()
    ]
    rows += [("mean", table["averaged"]), ("mean of rounded", table["rounded_then_averaged"])]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["group", "n", *METRICS])
        for name, metrics in rows:
            values = [metrics[key] for key in METRICS]
            writer.writerow(
                [name, metrics.get("n", ""), *(f"{v:.6f}" if v == v else "" for v in values)]
            )
    return path


def scan_matrix(rows: Sequence[Row]) -> tuple[list[str], np.ndarray[Any, np.dtype[np.float64]]]:
    """Single mutations as a (20, sites) matrix of ddG, NaN where there is none.

    Returns:
        Site names (`S C16`), in the order of first appearance, and the matrix with mutant types in
        rows. The wild type of each site is 0.
    """
    sites: dict[str, int] = {}
    cells: list[tuple[int, int, float]] = []
    for row in rows:
        if "," in row.mutation or (match := _SINGLE.fullmatch(row.mutation)) is None:
            continue
        wild, chain, number, insertion, mutant = match.groups()
        site = sites.setdefault(f"{wild} {chain}{number}{insertion}", len(sites))
        cells.append((RESIDUES.index(mutant), site, row.ddg))
        cells.append((RESIDUES.index(wild), site, 0.0))
    matrix = np.full((20, len(sites)), np.nan)
    for mutant_row, site, value in cells:
        matrix[mutant_row, site] = value
    return list(sites), matrix


def heat_map(rows: Sequence[Row], title: str = "") -> Figure | None:
    """Draw ddG of all single substitutions, sites across and mutants down; None without any."""
    sites, matrix = scan_matrix(rows)
    if not sites:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(4.0, 0.16 * len(sites) + 2), 4.2), layout="constrained")
    axes = figure.subplots()
    bound = max(float(np.nanmax(np.abs(matrix))), 1e-6)
    image = axes.imshow(matrix, cmap="RdBu_r", vmin=-bound, vmax=bound, aspect="auto")
    axes.set_xticks(range(len(sites)), sites, rotation=90, fontsize=8 if len(sites) <= 20 else 5)
    axes.set_yticks(range(20), list(RESIDUES), fontsize=6)
    axes.set_xlabel("wild type and residue")
    axes.set_ylabel("mutant")
    axes.set_title(title, fontsize=8)
    figure.colorbar(image, label="predicted ddG (kcal/mol), negative binds better")
    return figure


def interface_figure(
    position: ArrayLike,
    chain: ArrayLike,
    neighbors: ArrayLike,
    exists: ArrayLike,
    values: ArrayLike | None = None,
    title: str = "",
) -> Figure:
    """Two projections of an interface: residues by chain, edges between chains, optional values.

    Args:
        position: (residues, 3) in A.
        chain: (residues,) chain numbers.
        neighbors: (residues, k).
        exists: (residues, k).
        values: (residues,) shown as colour, for example the mean ddG of a scan.
        title: of the figure.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    points, side = np.asarray(position, dtype=float), np.asarray(chain)
    edges = np.argwhere(np.asarray(exists))
    other = np.asarray(neighbors)[edges[:, 0], edges[:, 1]]
    crossing = side[edges[:, 0]] != side[other]
    # principal axes: the contact plane is seen from the side and from above
    _, _, axes_of = np.linalg.svd(points - points.mean(0), full_matrices=False)
    flat = (points - points.mean(0)) @ axes_of.T
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for panel, (first, second) in zip(figure.subplots(1, 2), ((0, 1), (0, 2)), strict=True):
        plane = flat[:, [first, second]]
        ends = np.stack([plane[edges[crossing, 0]], plane[other[crossing]]], axis=1)
        panel.add_collection(LineCollection(list(ends), colors="0.8", linewidths=0.5, zorder=0))
        for number in np.unique(side):
            rows = side == number
            if values is None:
                panel.scatter(*plane[rows].T, s=18, label=f"chain {number}")
            else:
                panel.scatter(
                    *plane[rows].T,
                    s=22,
                    c=np.asarray(values)[rows],
                    cmap="viridis",
                    marker="os^Dv<>"[int(number) % 7],
                    vmin=float(np.nanmin(values)),
                    vmax=float(np.nanmax(values)),
                    label=f"chain {number}",
                )
        panel.set_xlabel(f"principal axis {first + 1} (A)")
        panel.set_ylabel(f"principal axis {second + 1} (A)")
        panel.set_aspect("equal", adjustable="datalim")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=7)
    figure.suptitle(title, fontsize=9)
    return figure


def scatter_figure(
    predicted: ArrayLike, target: ArrayLike, group: ArrayLike, summary: Mapping[str, float]
) -> Figure:
    """Predicted against measured ddG, one colour per complex."""
    from matplotlib.figure import Figure

    x, y = np.asarray(target), np.asarray(predicted)
    figure = Figure(figsize=(4.6, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.scatter(x, y, s=8, c=np.asarray(group) % 20, cmap="tab20", alpha=0.7)
    axes.axhline(0, color="0.8", lw=0.5)
    axes.axvline(0, color="0.8", lw=0.5)
    axes.set_xlabel("measured ddG (kcal/mol)")
    axes.set_ylabel("predicted ddG (kcal/mol)")
    axes.set_title(
        f"Spearman per complex {summary.get('spearman', float('nan')):.2f}, "
        f"RMSE {summary.get('rmse', float('nan')):.2f}",
        fontsize=8,
    )
    return figure
