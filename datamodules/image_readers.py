"""Readers of the file formats in which image classification sets are published.

Plain functions from a path to numpy arrays: idx (MNIST family), the pickles of the CIFAR "python
version" (in a folder or still inside their tar archive), ``.npz`` and ``.csv``.
"""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
CIFAR_FILES = {
    "cifar10": {
        "folder": "cifar-10-batches-py",
        "archive": "cifar-10-python.tar.gz",
        "labels": "labels",
        "train": [f"data_batch_{i}" for i in range(1, 6)],
        "test": ["test_batch"],
    },
    "cifar100": {
        "folder": "cifar-100-python",
        "archive": "cifar-100-python.tar.gz",
        "labels": "fine_labels",
        "train": ["train"],
        "test": ["test"],
    },
}
_IDX_TYPES: dict[int, np.dtype[Any]] = {
    0x08: np.dtype(np.uint8),
    0x09: np.dtype(np.int8),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}


class Arrays(NamedTuple):
    """Images or feature rows with their labels, as they are on disk.

    Attributes:
        x: ``(n, channels, height, width)`` or ``(n, features)``.
        y: ``(n,)``.
    """

    x: Array
    y: Array


def read_idx(path: Path) -> Array:
    """Reads one idx file, gzipped or not.

    Args:
        path: The file.

    Returns:
        The array in the shape that its header states.

    Raises:
        ValueError: If the header or the length is not that of an idx file.
    """
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _IDX_TYPES:
        raise ValueError(f"{path}: not an idx file (expected a header 00 00 <type> <dimensions>)")
    dtype, ndim = _IDX_TYPES[raw[2]], raw[3]
    start = 4 + 4 * ndim
    shape = tuple(np.frombuffer(raw[4:start], dtype=">u4").astype(int))
    expected = start + int(np.prod(shape)) * dtype.itemsize
    if len(raw) != expected:
        raise ValueError(
            f"{path}: truncated idx file: shape {shape} needs {expected} bytes, found {len(raw)}"
        )
    values = np.frombuffer(raw, dtype=dtype, offset=start).reshape(shape)
    return values.astype(dtype.newbyteorder("="))


def first_existing(folders: Iterable[Path], names: Iterable[str], what: str) -> Path:
    """Returns the first file that exists among ``folders`` x ``names``.

    Raises:
        FileNotFoundError: If none does; names every file name looked for and the format.
    """
    folders, names = list(folders), list(names)
    for folder in folders:
        for name in names:
            if (folder / name).is_file():
                return folder / name
    raise FileNotFoundError(
        f"path={str(folders[0])!r} has no {' or '.join(names)} ({what}); put the file there, "
        "or set download=true to fetch it"
    )


def read_mnist(folder: Path, part: str) -> Arrays:
    """Reads the images and labels of one part of an MNIST-like set.

    Args:
        folder: Folder with the idx files, or the one above ``raw`` or ``MNIST/raw``.
        part: ``"train"`` or ``"test"``.

    Returns:
        x uint8 ``(n, 1, height, width)`` and y uint8 ``(n,)``.
    """
    folders = [folder, *(folder / sub for sub in ("raw", "MNIST/raw", "FashionMNIST/raw"))]
    images, labels = IDX_FILES[part]
    x_path = first_existing(folders, [images, f"{images}.gz"], "idx images, gzipped or not")
    y_path = first_existing(folders, [labels, f"{labels}.gz"], "idx labels, gzipped or not")
    x, y = read_idx(x_path), read_idx(y_path)
    if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
        raise ValueError(f"{x_path} has shape {x.shape} and {y_path} has shape {y.shape}: no match")
    return Arrays(x[:, None], y)


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles numpy arrays and plain containers, and refuses everything else."""

    _allowed: ClassVar[set[tuple[str, str]]] = {
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
        *(
            (f"numpy.{core}.multiarray", name)
            for core in ("core", "_core")
            for name in ("_reconstruct", "scalar")
        ),
    }

    def find_class(self, module: str, name: str) -> Any:
        """Resolves a global of the pickle if it belongs to an array."""
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a CIFAR file")
        return super().find_class(module, name)


def _cifar_batch(handle: IO[bytes], name: str, label_key: str) -> Arrays:
    try:
        batch = _ArrayUnpickler(handle, encoding="latin1").load()
        x, y = np.asarray(batch["data"]), np.asarray(batch[label_key])
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError) as error:
        raise ValueError(
            f"{name}: not a CIFAR python batch with 'data' and {label_key!r} ({error})"
        ) from error
    if x.ndim != 2 or x.shape[1] != 3072 or len(x) != len(y):
        raise ValueError(f"{name}: 'data' has shape {x.shape}, expected ({len(y)}, 3072)")
    return Arrays(x.reshape(-1, 3, 32, 32).astype(np.uint8, copy=False), y)


def read_cifar(folder: Path, source: str, part: str) -> Arrays:
    """Reads one part of CIFAR-10 or CIFAR-100 (python version).

    Args:
        folder: Folder with the pickles, their parent, or the folder (or path) of the ``.tar.gz``.
        source: ``"cifar10"`` or ``"cifar100"`` (fine labels).
        part: ``"train"`` or ``"test"``.

    Returns:
        x uint8 ``(n, 3, 32, 32)`` and y ``(n,)``.
    """
    layout: dict[str, Any] = CIFAR_FILES[source]
    inside, archive, key = layout["folder"], layout["archive"], layout["labels"]
    tar = folder if folder.is_file() else folder / archive
    batches: list[Arrays] = []
    if tar.is_file():
        with tarfile.open(tar) as handle:
            for name in layout[part]:
                try:
                    member = handle.extractfile(f"{inside}/{name}")
                except KeyError as error:
                    raise ValueError(f"{tar}: no {inside}/{name} in the archive") from error
                assert member is not None
                batches.append(_cifar_batch(io.BytesIO(member.read()), f"{tar}:{name}", key))
    else:
        for name in layout[part]:
            what = f"pickle of the {source} python version; {archive} itself serves as well"
            path = first_existing([folder, folder / inside], [name], what)
            with path.open("rb") as file:
                batches.append(_cifar_batch(file, str(path), key))
    return Arrays(np.concatenate([b.x for b in batches]), np.concatenate([b.y for b in batches]))


def read_npz(path: Path) -> tuple[Arrays, Arrays | None]:
    """Reads ``x`` and ``y``, and ``x_test`` and ``y_test`` where present, from an ``.npz``.

    Returns:
        The set, and its own test part or ``None``. Images ``(n, h, w)`` gain a channel axis.

    Raises:
        ValueError: If an array is missing or the lengths differ.
    """
    _must_exist(path, ".npz with arrays x (n, features) and y (n,)")
    with np.load(path, allow_pickle=False) as archive:
        names = set(archive.files)
        if not {"x", "y"} <= names:
            raise ValueError(
                f"{path}: expected the arrays x (n, ...) and y (n,), found {sorted(names)}"
            )
        main = _checked(Arrays(archive["x"], archive["y"]), path)
        if not {"x_test", "y_test"} <= names:
            return main, None
        return main, _checked(Arrays(archive["x_test"], archive["y_test"]), path)


def read_csv(path: Path, label_column: str | int) -> Arrays:
    """Reads a table of numbers with one label column, compressed or not.

    Args:
        path: ``.csv``, ``.csv.gz``, ... (what pandas decompresses by name).
        label_column: Name in the header line, or position in a file without one (-1: the last).

    Returns:
        x float32 ``(n, features)`` and y ``(n,)`` (numbers or strings).

    Raises:
        ValueError: If the column is missing, a label is missing, or another column is not numeric.
    """
    import pandas as pd

    _must_exist(path, "CSV with one label column")
    by_position = isinstance(label_column, int)
    table = pd.read_csv(path, header=None if by_position else 0)
    columns = list(table.columns)
    if isinstance(label_column, int):
        if not -len(columns) <= label_column < len(columns):
            raise ValueError(f"label_column={label_column}: {path} has {len(columns)} columns")
        column = columns[label_column]
    elif label_column in columns:
        column = label_column
    else:
        raise ValueError(
            f"label_column={label_column!r} is not in {path}; columns: {columns[:10]}"
            f"{' ...' if len(columns) > 10 else ''} (a number counts columns without a header)"
        )
    features = table.drop(columns=[column])
    text = [str(c) for c in features.columns if not pd.api.types.is_numeric_dtype(features[c])]
    if text:
        raise ValueError(f"{path}: columns {text[:5]} are not numeric; encode or drop them")
    labels = table[column]
    if labels.isna().any():
        row = int(labels.isna().to_numpy().argmax())
        raise ValueError(
            f"{path}: {int(labels.isna().sum())} labels are missing, the first in data row {row}: "
            "drop these rows or fill them in"
        )
    values = labels.to_numpy() if pd.api.types.is_numeric_dtype(labels) else labels.astype(str)
    return _checked(Arrays(features.to_numpy(dtype=np.float32), np.asarray(values)), path)


def _must_exist(path: Path, what: str) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"path={str(path)!r} does not exist (expected: {what})")


def _checked(arrays: Arrays, path: Path) -> Arrays:
    x, y = arrays
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim not in (2, 4) or y.ndim != 1 or len(x) != len(y) or len(x) == 0:
        raise ValueError(
            f"{path}: x has shape {arrays.x.shape} and y {y.shape}; expected (n, features) or "
            "(n, channels, height, width) with y (n,)"
        )
    return Arrays(x, y)
