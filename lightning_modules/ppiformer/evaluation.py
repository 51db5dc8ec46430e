"""Metrics of ddG predictions per complex or protein, and of the two design case studies."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import pearsonr, rankdata, spearmanr
from sklearn.metrics import (
    average_precision_score,
    precision_score,
    recall_score,
    roc_auc_score,
)
from torch import Tensor

Floats = NDArray[np.float64]
METRICS = ("Spearman", "Pearson", "Precision", "Recall", "ROC AUC", "PR AUC", "MAE", "RMSE")
TRAINING_MEAN_DDG = 0.691834179286864
"""Mean label of the published training set (kcal/mol): prediction for a mutation outside."""


def correlation(predicted: Floats, target: Floats, kind: str = "spearman") -> float:
    """Rank or linear correlation; NaN with a warning for fewer than 3 rows or constant values."""
    if len(target) < 3 or np.ptp(target) == 0 or np.ptp(predicted) == 0:
        warnings.warn(
            f"{kind} correlation of {len(target)} row(s) is undefined "
            "(it needs 3 rows and values that differ); counted as NaN",
            stacklevel=2,
        )
        return float("nan")
    function = spearmanr if kind == "spearman" else pearsonr
    return float(function(target, predicted).statistic)


def group_metrics(predicted: Floats, target: Floats, threshold: float = 0.0) -> dict[str, float]:
    """The eight metrics of one complex or protein.

    Args:
        predicted: (mutations,) kcal/mol.
        target: (mutations,) kcal/mol.
        threshold: a mutation is positive if its ddG is below it.
    """
    positive = target < threshold
    chosen = predicted < threshold
    both = 0 < positive.sum() < len(positive)
    precision = recall = np.nan
    if len(target):
        precision = precision_score(positive, chosen, zero_division=0)
        recall = recall_score(positive, chosen, zero_division=0)
    result = {
        "Spearman": correlation(predicted, target, "spearman"),
        "Pearson": correlation(predicted, target, "pearson"),
        "Precision": float(precision),
        "Recall": float(recall),
        "ROC AUC": float(roc_auc_score(positive, -predicted)) if both else float("nan"),
        "PR AUC": float(average_precision_score(positive, -predicted)) if both else float("nan"),
        "MAE": float(np.abs(predicted - target).mean()),
        "RMSE": float(np.sqrt(np.square(predicted - target).mean())),
    }
    return result


def evaluate(
    predicted: Floats,
    target: Floats,
    group: Sequence[Any] | NDArray[Any],
    minimum: int = 1,
    threshold: float = 0.0,
) -> dict[str, Any]:
    """Metrics per group and their means.

    Args:
        predicted: (mutations,) kcal/mol.
        target: (mutations,) kcal/mol.
        group: (mutations,) complex or protein of every row. Rows are never joined by key: one
            mutation may have been measured several times.
        minimum: groups with fewer rows are left out.
        threshold: see `group_metrics`.

    Returns:
        `per_group` (group to metrics and `n`), `averaged` (plain mean over groups, NaN left out)
        and `rounded_then_averaged` (each value rounded to two decimals first, as published).

    Raises:
        ValueError: for lengths that differ or predictions that are not finite.
    """
    predicted, target = np.asarray(predicted, float), np.asarray(target, float)
    names = np.asarray(group)
    if not len(predicted) == len(target) == len(names):
        raise ValueError(
            f"predicted, target and group differ in length: "
            f"{len(predicted)}, {len(target)}, {len(names)}"
        )
    if not np.isfinite(predicted).all():
        raise ValueError(
            f"{int((~np.isfinite(predicted)).sum())} prediction(s) are not finite; "
            "impute missing ones first"
        )
    per_group: dict[Any, dict[str, float]] = {}
    for name in dict.fromkeys(names.tolist()):
        rows = names == name
        if rows.sum() >= minimum:
            per_group[name] = {"n": int(rows.sum())}
            per_group[name] |= group_metrics(predicted[rows], target[rows], threshold)

    def mean(values: list[float]) -> float:
        known = [value for value in values if not np.isnan(value)]
        return float(np.mean(known)) if known else float("nan")

    table = {name: [row[name] for row in per_group.values()] for name in METRICS}
    return {
        "per_group": per_group,
        "averaged": {name: mean(values) for name, values in table.items()},
        "rounded_then_averaged": {
            name: mean([float(np.round(value, 2)) for value in values])
            for name, values in table.items()
        },
    }


def design_table(
    mutations: Sequence[str],
    predicted: Sequence[float] | Floats,
    improving: Sequence[str],
    reported: Sequence[str] | None = None,
    top: Sequence[float] = (1, 0.05, 0.1),
) -> dict[str, float]:
    """How well the known improving mutations are ranked among all candidates.

    Args:
        mutations: (rows,) candidates; one may occur twice, rows are never joined by name.
        predicted: (rows,) ddG, lower is better.
        improving: mutations that count for the precision and the mean rank.
        reported: those whose ranks are listed, by default the same. In the staphylokinase study
            20 enhanced variants count, and ranks are listed for the six with at least twice the
            activity.
        top: cut-offs of the precision: 1 and more are counts, below 1 shares of the candidates.

    Returns:
        `P@k` in percent, the rank of each reported mutation in percent (the mean over its rows),
        and `mean_rank` of the improving rows.

    Raises:
        ValueError: if an improving mutation isn't among the candidates.
    """
    reported = improving if reported is None else reported
    values = np.asarray(predicted, dtype=float)
    known = set(mutations)
    missing = [name for name in (*improving, *reported) if name not in known]
    if missing:
        raise ValueError(f"no prediction for {missing[0]}, one of the known improving mutations")
    rank = 100 * rankdata(values) / len(values)
    wanted = set(improving)
    order = np.argsort(values, kind="stable")
    result: dict[str, float] = {}
    for cut in top:
        k = int(cut) if cut >= 1 else max(1, round(cut * len(values)))
        result[f"P@{k}"] = 100 * sum(mutations[i] in wanted for i in order[:k]) / k
    for name in dict.fromkeys(reported):
        rows = [i for i, mutation in enumerate(mutations) if mutation == name]
        result[name] = float(np.mean(rank[rows]))
    result["mean_rank"] = float(np.mean(rank[[name in wanted for name in mutations]]))
    return result


def impute(predicted: Tensor, inside: Tensor, value: float | None) -> Tensor:
    """Predictions with those of mutations outside the interface replaced by a constant or NaN."""
    fill = float("nan") if value is None else value
    return torch.where(inside, predicted, torch.full_like(predicted, fill))
