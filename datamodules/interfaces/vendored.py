"""Backbone tables in one small file: the shipped real interfaces, and the cache of own files."""

import io
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

import numpy as np

from datamodules.interfaces.graphs import ResidueTable

_MISSING = -(2**15)
_COLUMNS = ("chain", "number", "insertion", "types")


def pack_tables(tables: Iterable[ResidueTable]) -> bytes:
    """Backbones in units of 0.001 A, the resolution of PDB files.

    C-alphas are stored as differences along the table, N and C relative to their C-alpha.
    """
    tables = list(tables)
    ca = np.rint(np.concatenate([t.ca for t in tables]) * 1000).astype(np.int32)
    around = []
    for name in ("n", "c"):
        atom = np.concatenate([getattr(t, name) for t in tables]) * 1000
        offset = np.where(np.isnan(atom), _MISSING, np.rint(np.nan_to_num(atom)) - ca)
        around.append(np.clip(offset, _MISSING, -_MISSING - 1).astype(np.int16))
    columns = {name: np.concatenate([getattr(t, name) for t in tables]) for name in _COLUMNS}
    columns["types"] = columns["types"].astype(np.uint8)
    columns["number"] = columns["number"].astype(np.int32)
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        name=np.array([t.name for t in tables]),
        size=np.array([len(t) for t in tables], dtype=np.int32),
        step=np.diff(ca, axis=0, prepend=np.zeros((1, 3), np.int32)).T.copy(),
        n=around[0].T.copy(),
        c=around[1].T.copy(),
        **columns,  # type: ignore[arg-type]
    )
    return buffer.getvalue()


def unpack_tables(data: bytes) -> dict[str, ResidueTable]:
    """Inverse of `pack_tables`, by name."""
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        content = {key: archive[key] for key in archive.files}
    ca = np.cumsum(content["step"].T, 0)

    def atom(name: str) -> np.ndarray:  # type: ignore[type-arg]
        offset = content[name].T.astype(np.int64)
        return np.where(offset == _MISSING, np.nan, (ca + offset) / 1000)

    n, c, ca = atom("n"), atom("c"), ca / 1000
    stop = np.cumsum(content["size"])
    tables = {}
    for name, start, end in zip(
        content["name"].tolist(), stop - content["size"], stop, strict=True
    ):
        rows = slice(int(start), int(end))
        tables[name] = ResidueTable(
            name,
            ca[rows],
            n[rows],
            c[rows],
            content["types"][rows].astype(np.int64),
            content["chain"][rows],
            content["number"][rows].astype(np.int64),
            content["insertion"][rows],
        )
    return tables


def asset(name: str) -> Path:
    """Path of a shipped file."""
    return Path(str(files("datamodules") / "assets" / "ppi_interfaces" / name))


def shipped_tables() -> dict[str, ResidueTable]:
    """The real interfaces that come with the package, 10 A, by name."""
    return unpack_tables(asset("interfaces.npz").read_bytes())
