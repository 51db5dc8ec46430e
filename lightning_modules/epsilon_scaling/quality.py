"""Torchmetrics collection of feature rows, from which all distances are computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_modules.epsilon_scaling.sample_metrics import (
    frechet_distance,
    frechet_from_moments,
    kernel_distance,
    moments,
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


def read_reference(path: str | Path) -> tuple[Tensor, Tensor] | Tensor:
    """Reference of an `.npz`: moments ``mu``, ``sigma``, or images ``arr_0`` in [-1, 1].

    Returns:
        ``(d,)`` and ``(d, d)`` float64 moments of Inception features, or float32 images
        ``(n, c, h, w)``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it holds neither.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"reference={str(path)!r} does not exist: give an .npz, 'train' or 'test'"
        )
    with np.load(path) as arrays:
        if "mu" in arrays and "sigma" in arrays:
            return torch.from_numpy(arrays["mu"]).double(), torch.from_numpy(
                arrays["sigma"]
            ).double()
        if "arr_0" in arrays:
            images = torch.from_numpy(arrays["arr_0"])
            if images.dtype != torch.uint8 or images.ndim != 4:
                raise ValueError(
                    f"{path}: arr_0 must be uint8 (n, h, w, c), got {images.dtype} "
                    f"{tuple(images.shape)}"
                )
            return images.permute(0, 3, 1, 2).float() / 127.5 - 1
        raise ValueError(
            f"{path} holds {', '.join(arrays.files)}: a reference has mu and sigma, or arr_0"
        )


def reference_distance(
    reference: Tensor | tuple[Tensor, Tensor], generated: Tensor, name: str
) -> float:
    """Fréchet distance of rows ``(m, d)`` from reference rows or moments.

    Raises:
        ValueError: If the moments belong to another feature network than `name`.
    """
    if isinstance(reference, Tensor):
        return frechet_distance(reference, generated)
    if len(reference[0]) != generated.shape[1]:
        raise ValueError(
            f"the reference has moments of {len(reference[0])} features, feature_network "
            f"{name!r} gives {generated.shape[1]}; published moments need 'inception'"
        )
    mean, covariance = (each.to(generated.device) for each in reference)
    return float(frechet_from_moments(mean, covariance, *moments(generated)))


def quality(
    reference: Tensor | tuple[Tensor, Tensor], generated: Tensor, name: str
) -> dict[str, float]:
    """Distances of two sets of feature rows, named after the feature network.

    Args:
        reference: ``(n, d)`` rows; or moments, which give the Fréchet distance alone.
        generated: ``(m, d)`` rows.
        name: Of the feature network.

    Returns:
        ``fd_<name>``, ``kd_<name>`` (kernel distance), ``sw_<name>`` (sliced Wasserstein),
        ``precision_<name>`` and ``recall_<name>``; the first two are called ``fid`` and ``kid``
        for Inception alone.

    Raises:
        ValueError: If the moments belong to another feature network.
    """
    rename = {"fd_inception": "fid", "kd_inception": "kid"}
    values = {f"fd_{name}": reference_distance(reference, generated, name)}
    if isinstance(reference, Tensor):
        neighbours = precision_recall(reference, generated, NEIGHBOURS)
        values |= {
            f"kd_{name}": kernel_distance(reference, generated),
            f"sw_{name}": sliced_wasserstein(reference, generated),
            f"precision_{name}": neighbours.precision,
            f"recall_{name}": neighbours.recall,
        }
    return {rename.get(key, key): value for key, value in values.items()}
