"""Linear regression: generated with a known spectrum, sklearn's diabetes table, or own arrays."""

from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules.base import Rows, SuiteDataModule, split
from lightning_modules.components.randomness import generator_from

__all__ = ["RegressionBatch", "RegressionStream"]


class RegressionBatch(NamedTuple):
    """One batch of a regression.

    Attributes:
        x: float32 (batch, d).
        y: float32 (batch,).
    """

    x: Tensor
    y: Tensor


class RegressionStream(SuiteDataModule):
    """Rows of a linear regression.

    | source | data |
    | --- | --- |
    | `gaussian` | x ~ N(0, diag(k^-exponent)), y = <x, theta*> + noise, generated from `seed` |
    | `diabetes` | 442 x 10, shipped with scikit-learn; columns scaled to mean square 1, y centred |
    | `npz` | arrays `x` (n, d) and `y` (n,) of the file `path` |

    After `setup`: `n_features`, `hessian` (d, d) = E[x x^T] and `solution` (d,), the least-squares
    optimum (true ones for `gaussian`, those of the training part otherwise).

    Args:
        source: one of the above.
        path: file of `npz`.
        size: rows of `gaussian`; a single epoch in order makes it a stream.
        dim: d of `gaussian`.
        exponent: decay of the spectrum of `gaussian`.
        label_noise: deviation of the labels of `gaussian`.
        target: theta* of `gaussian`: all ones, or zero as in the theory's noise-only runs.
        batch_size: rows per batch and device.
        seed: seed of data, splits and orders.
        num_workers: worker processes of each loader.
        sampling: how training batches are drawn.

    Raises:
        ValueError: an argument is out of range, or the file's arrays do not fit.
        FileNotFoundError: `path` is missing.
    """

    sources = ("gaussian", "diabetes", "npz")

    def __init__(
        self,
        source: str = "gaussian",
        path: str | None = None,
        size: int = 4000,
        dim: int = 32,
        exponent: float = 1.0,
        label_noise: float = 0.0,
        target: Literal["ones", "zero"] = "ones",
        batch_size: int = 1,
        seed: int = 0,
        num_workers: int = 0,
        sampling: str = "sequential",
    ) -> None:
        super().__init__(source, batch_size, seed, num_workers, None, sampling)
        for name, value in (("size", size), ("dim", dim)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if exponent < 0 or label_noise < 0:
            raise ValueError(
                f"exponent and label_noise must be >= 0, got {exponent} and {label_noise}"
            )
        if target not in ("ones", "zero"):
            raise ValueError(f"target must be ones or zero, got {target!r}")
        if (source == "npz") != (path is not None):
            raise ValueError(f"path belongs to source 'npz', got source '{source}' and path={path}")
        self.path, self.size, self.dim = path, size, dim
        self.exponent, self.label_noise, self.target = exponent, label_noise, target
        self.n_features = 0
        self.hessian = torch.zeros(0, 0)
        self.solution = torch.zeros(0)

    def setup(self, stage: str) -> None:
        """Generate or read, split, and work out the optimum."""
        if self.train_set is not None:
            return
        if self.source == "gaussian":
            scale = torch.arange(1, self.dim + 1).float().pow(-self.exponent / 2)
            self.solution = torch.ones(self.dim) if self.target == "ones" else torch.zeros(self.dim)
            held_out = max(64, self.size // 10)
            generator = generator_from(self.seed, "regression")
            x = torch.randn(self.size + held_out, self.dim, generator=generator) * scale
            noise = torch.randn(len(x), generator=generator) * self.label_noise
            y = x @ self.solution + noise
            self.hessian = torch.diag(scale.square())
            parts = [(x[: self.size], y[: self.size]), (x[self.size :], y[self.size :])]
        else:
            x, y = self._read()
            train, rest = split(len(y), [0.8], self.seed)
            centre = y[train].mean()
            scale = x[train].square().mean(0).sqrt().clamp_min(1e-12)
            x, y = x / scale, y - centre
            parts = [(x[train], y[train]), (x[rest], y[rest])]
            a = x[train].double()
            self.hessian = (a.T @ a / len(a)).float()
            solved = torch.linalg.lstsq(a, y[train].double()[:, None]).solution
            self.solution = solved[:, 0].float()
        self.n_features = int(x.shape[1])
        self.train_set = Rows(RegressionBatch, *parts[0])
        self.val_set = Rows(RegressionBatch, *parts[1])
        self.test_set = Rows(RegressionBatch, *parts[1])

    def _read(self) -> tuple[Tensor, Tensor]:
        if self.source == "diabetes":
            from sklearn.datasets import load_diabetes

            data = load_diabetes()
            return torch.from_numpy(data.data).float(), torch.from_numpy(data.target).float()
        path = Path(str(self.path)).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"path: there is no file {path}; it needs arrays x and y")
        with np.load(path, allow_pickle=False) as arrays:
            if not {"x", "y"} <= set(arrays.files):
                raise ValueError(f"{path} needs arrays x and y, it has {arrays.files}")
            x, y = (torch.from_numpy(np.asarray(arrays[k], dtype=np.float32)) for k in "xy")
        if x.dim() != 2 or y.shape != x.shape[:1]:
            raise ValueError(
                f"{path}: x must be (n, d) and y (n,), got {tuple(x.shape)}, {tuple(y.shape)}"
            )
        if not (torch.isfinite(x).all() and torch.isfinite(y).all()):
            raise ValueError(f"{path}: x and y must be finite")
        return x, y
