"""Torchmetrics objects that keep rows instead of batch averages."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import MeanMetric, Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_modules.ppiformer.evaluation import Floats, evaluate


class Perplexity(MeanMetric):
    """exp of the mean of (rows,) cross entropies in nats."""

    def compute(self) -> Tensor:
        """Scalar tensor."""
        return super().compute().exp()


class GroupedDDG(Metric):
    """Metrics per complex over all rows of all ranks, computed once at the end of an epoch.

    Averages of per-batch correlations are another quantity: so rows are kept, not values.

    Args:
        minimum: groups with fewer mutations don't count. The published value in training is 10.
        thresholds: ddG below which a mutation counts as improving, for precision and recall.
    """

    full_state_update = False
    predicted: list[Tensor]
    target: list[Tensor]
    group: list[Tensor]

    def __init__(self, minimum: int = 1, thresholds: Sequence[float] = (0.0,)) -> None:
        super().__init__()
        self.minimum, self.thresholds = minimum, tuple(thresholds)
        for name in ("predicted", "target", "group"):
            self.add_state(name, default=[], dist_reduce_fx="cat")
        # of the last computation, over all ranks: what the means are taken of
        self.table: dict[str, Any] = {}

    def update(self, predicted: Tensor, target: Tensor, group: Tensor) -> None:
        """Add (rows,) predictions, labels and group numbers; rows with NaN don't count."""
        known = torch.isfinite(predicted) & torch.isfinite(target)
        self.predicted.append(predicted.detach()[known].float())
        self.target.append(target.detach()[known].float())
        self.group.append(group.detach()[known])

    def add_nothing(self, device: torch.device) -> None:
        """Make sure that every rank has something to gather, if only no rows."""
        empty = torch.zeros(0, device=device)
        self.update(empty, empty, empty.long())

    def rows(self) -> tuple[Floats, Floats, NDArray[np.int64]]:
        """All rows, sorted by group, label and prediction: independent of the order of ranks."""
        if not len(self.predicted):  # a list, or one tensor once ranks are gathered
            empty = np.zeros(0)
            return empty, empty, np.zeros(0, dtype=np.int64)
        columns = [dim_zero_cat(x).cpu() for x in (self.predicted, self.target, self.group)]
        p, t, g = columns[0].double().numpy(), columns[1].double().numpy(), columns[2].numpy()
        order = np.lexsort((p, t, g))
        return p[order], t[order], g[order]

    def compute(self) -> dict[str, Any]:
        """Means over groups under lower-case names, and `mutations` and `groups`.

        `table` then holds the whole result of `evaluate`.
        """
        predicted, target, group = self.rows()
        self.table = {}
        result: dict[str, Any] = {"mutations": float(len(target))}
        if not len(target):
            return result
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # small complexes: the mean leaves NaN out
            block = evaluate(predicted, target, group, self.minimum)
            extra = {
                value: evaluate(predicted, target, group, self.minimum, value)["averaged"]
                for value in self.thresholds
                if value != 0
            }
        self.table = block
        result["groups"] = float(len(block["per_group"]))
        if not block["per_group"]:
            return result
        result |= {name.lower().replace(" ", "_"): v for name, v in block["averaged"].items()}
        for value, metrics in extra.items():
            for name in ("Precision", "Recall"):
                result[f"{name.lower()}@{value:g}"] = metrics[name]
        return result
