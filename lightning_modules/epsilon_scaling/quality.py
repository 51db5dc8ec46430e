"""Torchmetrics collection of feature rows, from which all distances are computed."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_modules.epsilon_scaling.sample_metrics import (
    frechet_distance,
    kernel_distance,
    precision_recall,
    sliced_wasserstein,
)

NEIGHBOURS = 3


class FeatureRows(Metric):
    """Rows ``(n, d)`` gathered from all batches and ranks."""

    full_state_update = False
    rows: list[Tensor]

    def __init__(self) -> None:
        super().__init__(compute_on_cpu=True)
        self.add_state("rows", default=[], dist_reduce_fx="cat")

    def update(self, rows: Tensor) -> None:
        """Add rows ``(n, d)``."""
        self.rows.append(rows.detach().float())

    def compute(self) -> Tensor:
        """All rows, in no promised order."""
        if isinstance(self.rows, Tensor):
            return self.rows
        return torch.cat(self.rows)


def quality(reference: Tensor, generated: Tensor, name: str) -> dict[str, float]:
    """Distances of two sets of feature rows, named after the feature network.

    Returns:
        ``fd_<name>``, ``kd_<name>`` (kernel distance), ``sw_<name>`` (sliced Wasserstein),
        ``precision_<name>`` and ``recall_<name>``; the first two are called ``fid`` and ``kid``
        for Inception alone.
    """
    rename = {"fd_inception": "fid", "kd_inception": "kid"}
    neighbours = precision_recall(reference, generated, NEIGHBOURS)
    values = {
        f"fd_{name}": frechet_distance(reference, generated),
        f"kd_{name}": kernel_distance(reference, generated),
        f"sw_{name}": sliced_wasserstein(reference, generated),
        f"precision_{name}": neighbours.precision,
        f"recall_{name}": neighbours.recall,
    }
    return {rename.get(key, key): value for key, value in values.items()}
