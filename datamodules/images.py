"""Labelled images and feature tables: digits, MNIST and CIFAR families, own `.npz` and `.csv`."""

from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules.base import SuiteDataModule, split
from datamodules.image_readers import Arrays, read_cifar, read_csv, read_mnist, read_npz

__all__ = ["ImageBatch", "ImageRows", "Images"]

Scaling = Literal["standardise", "unit", "minus_one_one", "none"]
Targets = Literal["classes", "values"]

# mean and standard deviation per channel of the training part, pixels in [0, 1]
PUBLISHED_MOMENTS = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
# source -> (address, sha256) of every file
DOWNLOADS = {
    "mnist": [
        (
            f"{_MNIST}train-images-idx3-ubyte.gz",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        (
            f"{_MNIST}train-labels-idx1-ubyte.gz",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        (
            f"{_MNIST}t10k-images-idx3-ubyte.gz",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        (
            f"{_MNIST}t10k-labels-idx1-ubyte.gz",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ],
    "fashion_mnist": [
        (
            f"{_FASHION}train-images-idx3-ubyte.gz",
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        (
            f"{_FASHION}train-labels-idx1-ubyte.gz",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
        (
            f"{_FASHION}t10k-images-idx3-ubyte.gz",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        (
            f"{_FASHION}t10k-labels-idx1-ubyte.gz",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ],
    "cifar10": [
        (
            f"{_CIFAR}cifar-10-python.tar.gz",
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        )
    ],
    "cifar100": [
        (
            f"{_CIFAR}cifar-100-python.tar.gz",
            "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        )
    ],
}


class ImageBatch(NamedTuple):
    """One batch of images or feature rows.

    Attributes:
        x: float32 `(n, channels, height, width)`, or `(n, features)` for tables and with `flatten`.
        y: int64 `(n,)` class numbers; float32 `(n,)` with `targets: values`.
    """

    x: Tensor
    y: Tensor


class ImageRows:
    """Images kept as they are on disk (a byte a pixel), scaled when a batch is asked for.

    Args:
        x: `(size, channels, height, width)` or `(size, features)`, any number type.
        y: `(size,)`.
        multiply: Factor, broadcast against one sample.
        add: Added after the factor, broadcast against one sample.
        flatten: Whether a batch has one feature axis instead of channel, height and width.
    """

    def __init__(
        self, x: Tensor, y: Tensor, multiply: Tensor, add: Tensor, flatten: bool = False
    ) -> None:
        self.x, self.y = x, y
        self.multiply, self.add, self.flatten = multiply, add, flatten

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, indices: list[int]) -> ImageBatch:
        rows = torch.as_tensor(indices, dtype=torch.int64)
        x = torch.addcmul(self.add, self.x[rows].to(torch.float32), self.multiply)
        return ImageBatch(x.flatten(1) if self.flatten else x, self.y[rows])


class Images(SuiteDataModule):
    """Images with class labels, or any table of numbers with a label.

    | source | data | where from |
    | --- | --- | --- |
    | `digits` | 1797 images 1 x 8 x 8, 10 classes | shipped with scikit-learn |
    | `mnist`, `fashion_mnist` | 70000 images 1 x 28 x 28, 10 classes | idx files in `path` |
    | `cifar10`, `cifar100` | 60000 images 3 x 32 x 32 | pickles or `.tar.gz` in `path` |
    | `npz` | arrays `x`, `y` (optionally `x_test`, `y_test`) | the file `path` |
    | `csv` | numeric columns and a label column | the file `path` |

    Nothing is downloaded unless `download` is true. MNIST and CIFAR have their own test part; the
    others are split 80/20 by a permutation seeded with `seed`. `val_fraction` of the training part
    is held out for validation.

    After `setup` the attributes `n_features`, `n_classes` (`None` for values), `sample_shape` and
    `class_names` describe the data.

    Args:
        source: One of the sources above.
        path: Folder (`mnist` ... `cifar100`) or file (`npz`, `csv`).
        batch_size: Samples per batch and device.
        seed: Seed of splits and orders.
        scaling: `standardise` (published channel moments, else moments of the training part: per
            channel for images, per column for tables), `unit` (to [0, 1]), `minus_one_one` (to
            [-1, 1]) or `none` (numbers as stored).
        flatten: Whether images come as feature rows.
        val_fraction: Share of the training part held out for validation; 0 validates on the test
            part, as the papers do that report both splits every epoch.
        test_fraction: Share held out for testing by sources without a test part.
        targets: `classes` for labels, `values` for regression.
        label_column: `csv` only: name of the label's column, or its position in a file without a
            header line (-1: the last).
        n_classes: Number of classes, default the largest label plus one.
        download: Whether to fetch the files of MNIST and CIFAR (checksummed) into `cache_dir`.
        num_workers: Worker processes of each loader.
        cache_dir: Folder of downloads.
        sampling: How training batches are drawn.

    Raises:
        ValueError: If an argument is out of range, a value is not finite, a label is out of range
            or not a class number.
        FileNotFoundError: If a file is missing; names it and its format.
    """

    sources = ("digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "npz", "csv")

    def __init__(
        self,
        source: str = "digits",
        path: str | None = None,
        batch_size: int = 100,
        seed: int = 0,
        scaling: Scaling = "standardise",
        flatten: bool = True,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        targets: Targets = "classes",
        label_column: str | int = "label",
        n_classes: int | None = None,
        download: bool = False,
        num_workers: int = 0,
        cache_dir: str | None = None,
        sampling: str = "shuffle",
    ) -> None:
        super().__init__(source, batch_size, seed, num_workers, cache_dir, sampling)
        if scaling not in ("standardise", "unit", "minus_one_one", "none"):
            raise ValueError(
                f"scaling must be standardise, unit, minus_one_one or none, got '{scaling}'"
            )
        if targets not in ("classes", "values"):
            raise ValueError(f"targets must be classes or values, got '{targets}'")
        if not 0 <= val_fraction < 1:
            raise ValueError(f"val_fraction must be in [0, 1), got {val_fraction}")
        if not 0 < test_fraction < 1:
            raise ValueError(f"test_fraction must be in (0, 1), got {test_fraction}")
        if source != "digits" and path is None and not (download and source in DOWNLOADS):
            hint = " or set download=true" if source in DOWNLOADS else ""
            raise ValueError(f"source '{source}' needs path: give its folder or file{hint}")
        if download and source not in DOWNLOADS:
            raise ValueError(f"download=true has no address for source '{source}': give path")
        self.path = path
        self.scaling = scaling
        self.flatten = flatten
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.targets = targets
        self.label_column = label_column
        self.n_classes = n_classes
        self._given_classes = n_classes
        self.download = download
        self.n_features = 0
        self.sample_shape: tuple[int, ...] = ()
        self.class_names: list[str] | None = None

    # ------------------------------------------------------------------ files

    def prepare_data(self) -> None:
        """Download what `download` asks for."""
        if self.download and self.path is None:
            self._fetch_all()

    def _fetch_all(self) -> Path:
        # the two MNIST families name their files alike, so each has its own folder
        folder = None
        for url, digest in DOWNLOADS[self.source]:
            folder = self._fetch_into_own_folder(url, digest).parent
        assert folder is not None
        return folder

    def _fetch_into_own_folder(self, url: str, digest: str) -> Path:
        from datamodules.base import cache_folder

        before = self.cache_dir
        self.cache_dir = str(Path(before or cache_folder()) / self.source)
        try:
            return self.fetch(url, digest)
        finally:
            self.cache_dir = before

    def _read(self) -> tuple[Arrays, Arrays | None]:
        """Training and test part as stored; one part only where the source has no split."""
        if self.source == "digits":
            from sklearn.datasets import load_digits

            digits = load_digits()
            return Arrays(digits.images[:, None].astype(np.uint8), digits.target), None
        where = Path(self.path).expanduser() if self.path else self._fetch_all()
        if self.source == "npz":
            return read_npz(where)
        if self.source == "csv":
            return read_csv(where, self.label_column), None
        if not where.exists():
            raise FileNotFoundError(
                f"path={str(where)!r} does not exist: give the folder of the {self.source} files, "
                "or set download=true"
            )
        if self.source in CIFAR_SOURCES:
            parts = [read_cifar(where, self.source, part) for part in ("train", "test")]
        else:
            parts = [read_mnist(where, part) for part in ("train", "test")]
        return parts[0], parts[1]

    # ------------------------------------------------------------------ sets

    def setup(self, stage: str | None = None) -> None:
        """Read, check, split and scale; the same on every rank."""
        if self.train_set is not None:
            return
        main, test = self._read()
        self._check_finite(main, test)
        x, y = torch.from_numpy(np.ascontiguousarray(main.x)), self._labels(main.y)
        if test is None:
            train, test_rows = split(len(y), [1 - self.test_fraction], self.seed)
            x_test, y_test = x[test_rows], y[test_rows]
            x, y = x[train], y[train]
        else:
            if test.x.shape[1:] != main.x.shape[1:]:
                raise ValueError(
                    f"path={self.path!r}: samples of shape {main.x.shape[1:]} for training and "
                    f"{test.x.shape[1:]} for testing"
                )
            x_test, y_test = torch.from_numpy(np.ascontiguousarray(test.x)), self._labels(test.y)
        x_val, y_val = x_test, y_test
        if self.val_fraction:
            train, val = split(len(y), [1 - self.val_fraction], self.seed + 1)
            x_val, y_val, x, y = x[val], y[val], x[train], y[train]
        self.sample_shape = tuple(x.shape[1:])
        self.n_features = int(np.prod(self.sample_shape))
        self._count_classes(torch.cat([y, y_val, y_test]))
        multiply, add = self._affine(x)
        self.train_set = ImageRows(x, y, multiply, add, self.flatten)
        self.val_set = ImageRows(x_val, y_val, multiply, add, self.flatten)
        self.test_set = ImageRows(x_test, y_test, multiply, add, self.flatten)

    def _check_finite(self, *parts: Arrays | None) -> None:
        for part in parts:
            if part is None or not np.issubdtype(part.x.dtype, np.floating):
                continue
            rows = part.x.reshape(len(part.x), -1)
            bad = np.asarray(~np.isfinite(rows).all(axis=1))
            if bool(bad.any()):
                raise ValueError(
                    f"{self.path or self.source}: {int(bad.sum())} of {len(bad)} samples hold NaN "
                    f"or infinite values, the first is row {int(bad.argmax())}: drop or impute them"
                )

    def _labels(self, y: "np.ndarray") -> Tensor:  # type: ignore[type-arg]
        if self.targets == "values":
            if y.dtype.kind not in "iufb":
                raise ValueError(f"targets: values needs numbers, got labels of type {y.dtype}")
            values = torch.from_numpy(y.astype(np.float32))
            if not torch.isfinite(values).all():
                raise ValueError(f"{self.path or self.source}: a target value is not finite")
            return values
        if y.dtype.kind in "USO":
            texts = y.astype(str)
            if self.class_names is None:
                self.class_names = np.unique(texts).tolist()
            # a test part may lack some classes, but not have others
            unknown = sorted(set(texts.tolist()) - set(self.class_names))
            if unknown:
                raise ValueError(f"test labels {unknown[:5]} do not occur in training")
            codes = np.searchsorted(self.class_names, texts)
            return torch.from_numpy(codes.astype(np.int64))
        if y.dtype.kind not in "iub":
            raise ValueError(
                f"labels of type {y.dtype} are no class numbers: store integers, or set "
                "targets: values for regression"
            )
        labels = torch.from_numpy(y.astype(np.int64))
        if int(labels.min()) < 0:
            raise ValueError(f"labels must be at least 0, got {int(labels.min())}")
        return labels

    def _count_classes(self, y: Tensor) -> None:
        if self.targets == "values":
            self.n_classes = None
            return
        needed = int(y.max()) + 1
        if self._given_classes is not None and needed > self._given_classes:
            raise ValueError(
                f"labels go up to {needed - 1}, out of range for n_classes={self._given_classes}"
            )
        self.n_classes = self._given_classes or needed

    def _affine(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Factor and offset of the scaling, shaped to broadcast against one sample."""
        per_sample = (-1, 1, 1) if x.ndim == 4 else (-1,)
        one, zero = torch.ones(1).view(per_sample), torch.zeros(1).view(per_sample)
        if self.scaling == "none":
            return one, zero
        low, high = self._value_range(x)
        if self.scaling in ("unit", "minus_one_one"):
            width = (high - low) or 1.0
            scale, shift = (1.0, 0.0) if self.scaling == "unit" else (2.0, -1.0)
            return one * (scale / width), zero + (shift - scale * low / width)
        if self.source in PUBLISHED_MOMENTS:
            moments = torch.tensor(PUBLISHED_MOMENTS[self.source], dtype=torch.float64)
            mean, std = moments * high
        else:
            axes = (0, 2, 3) if x.ndim == 4 else (0,)
            mean, std = _moments(x, axes)
        # a constant channel or column carries nothing: it becomes 0 instead of 0 / 0
        std = torch.where(std > 0, std, torch.ones_like(std))
        return (1 / std).float().view(per_sample), (-mean / std).float().view(per_sample)

    def _value_range(self, x: Tensor) -> tuple[float, float]:
        if self.source == "digits":
            return 0.0, 16.0
        if x.dtype == torch.uint8:
            return 0.0, 255.0
        return float(x.min()), float(x.max())


CIFAR_SOURCES = ("cifar10", "cifar100")


def _moments(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over `axes` in double precision, a slice of rows at a time."""
    total: Tensor | float = 0.0
    squares: Tensor | float = 0.0
    chunks = torch.split(x, 4096)
    for chunk in chunks:
        total = total + chunk.double().sum(axes)
    count = x.numel() / max(x[0].numel() if len(axes) == 1 else x.shape[1], 1)
    mean = torch.as_tensor(total) / count
    shape = (1, -1, 1, 1) if x.ndim == 4 else (1, -1)
    for chunk in chunks:
        squares = squares + (chunk.double() - mean.view(shape)).square().sum(axes)
    return mean, (torch.as_tensor(squares) / count).sqrt()
