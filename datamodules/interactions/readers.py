"""Readers of the formats in which interaction logs are published.

Each gives a table with the columns ``user``, ``item``, ``rating`` and ``time``, in the order of the
file; ``time`` is ``NaN`` where the format has none.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

COLUMNS = ("user", "item", "rating", "time")
BEHAVIOURS = {"pv": 1.0, "cart": 2.0, "fav": 3.0, "buy": 4.0}
FORMATS = ("movielens", "amazon", "lastfm", "tenrec", "books", "behaviour", "csv", "parquet")
ASSETS = Path(__file__).parent.parent / "assets" / "online_retail"


def read_interactions(
    source: str,
    path: str | Path,
    columns: Mapping[str, str] | None = None,
    separator: str | None = None,
) -> pd.DataFrame:
    """Read a file of interactions.

    Args:
        source: One of `FORMATS`. ``movielens`` takes ``u.data`` (tab), ``ratings.dat`` (``::``),
            ``ratings.csv`` (comma, with or without header) and ``*.inter``; ``amazon`` the
            comma-separated ``user,item,rating,timestamp``; ``lastfm`` the first three tab-separated
            columns ``user, item, weight``; ``tenrec`` and ``books`` a table with a header and no
            times, where the order in which items first appear stands in for time; ``behaviour`` the
            log ``user,item,category,behaviour,timestamp``; ``csv`` and ``parquet`` any table with
            the names given in ``columns``.
        path: The file.
        columns: For ``csv`` and ``parquet``: our name -> the file's name, for ``user``, ``item``
            and, if there, ``time`` and ``rating``.
        separator: Of a text file, if it isn't the format's own.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file does not look like the format.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"path: there is no file {file}")
    if columns is not None and source not in ("csv", "parquet"):
        raise ValueError(f"columns is for source 'csv' or 'parquet', got source='{source}'")
    if source == "parquet":
        return _named(_read_parquet(file), columns, file)
    if source == "csv":
        table = pd.read_csv(file, sep=separator or ",", low_memory=False)
        _check_columns(table, 2, separator or ",", file)
        if not isinstance(table.index, pd.RangeIndex):
            # pandas takes the surplus for row names and shifts all columns
            raise ValueError(
                f"{file}: rows have more fields than the header names: quote fields that hold "
                f"{separator or ','!r}, or name every column"
            )
        return _named(table, columns, file)
    if source == "movielens":
        return _movielens(file, separator)
    if source == "amazon":
        table = _plain(file, separator or ",", header=None, needed=4)
        return _table(table[0], table[1], table[2], table[3], file)
    if source == "lastfm":
        table = _plain(file, separator or "\t", header=None, needed=3)
        if not _is_number(table.iloc[0, 2]):
            table = table.iloc[1:].reset_index(drop=True)
        return _table(table[0], table[1], table[2], None, file, integers=True)
    if source in ("tenrec", "books"):
        table = _plain(file, separator or ",", header=0, needed=2)
        first_seen = pd.factorize(table[1])[0]
        rating = table[2] if table.shape[1] > 2 else pd.Series(np.ones(len(table)))
        return _table(table[0], table[1], rating, pd.Series(first_seen), file, integers=True)
    if source == "behaviour":
        table = _plain(file, separator or ",", header=None, needed=5)
        kind = table[3].astype(str).str.strip()
        unknown = sorted(set(kind) - set(BEHAVIOURS))
        if unknown:
            raise ValueError(
                f"{file}: unknown behaviour '{unknown[0]}' in column 4, "
                f"known are {', '.join(BEHAVIOURS)}"
            )
        return _table(table[0], table[1], kind.map(BEHAVIOURS), table[4], file, integers=True)
    raise ValueError(f"source must be one of {', '.join(FORMATS)}, got '{source}'")


def read_online_retail(folder: Path = ASSETS) -> pd.DataFrame:
    """Read the vendored order lines of an online gift shop, all of them, ordered by customer."""
    with np.load(folder / "interactions.npz") as arrays:
        return pd.DataFrame(
            {
                "user": arrays["customer_id"].astype(np.int64),
                "item": arrays["item"].astype(np.int64),
                "rating": arrays["quantity"].astype(np.float64),
                "time": arrays["time"].astype(np.float64),
            }
        )


def _movielens(file: Path, separator: str | None) -> pd.DataFrame:
    first = _first_line(file)
    found = separator or next((s for s in ("::", "\t", ",") if s in first), ",")
    header = None if _is_number(re.split(re.escape(found), first)[0]) else 0
    table = _plain(file, found, header=header, needed=4)
    return _table(table[0], table[1], table[2], table[3], file, integers=True)


def _first_line(file: Path) -> str:
    if file.suffix == ".gz":
        with gzip.open(file, "rt", encoding="utf-8", errors="replace") as stream:
            return stream.readline().strip("\ufeff\r\n")
    with file.open(encoding="utf-8", errors="replace") as stream:
        return stream.readline().strip("\ufeff\r\n")


def _plain(file: Path, separator: str, header: int | None, needed: int) -> pd.DataFrame:
    """Columns by number."""
    if not _first_line(file):
        raise ValueError(f"{file} is empty: expected one interaction a line")
    engine: Any = "c" if len(separator) == 1 else "python"
    table = pd.read_csv(
        file,
        sep=separator if len(separator) == 1 else re.escape(separator),
        header=header,
        engine=engine,
        index_col=False,
    )
    _check_columns(table, needed, separator, file)
    table.columns = pd.RangeIndex(table.shape[1])
    return table


def _check_columns(table: pd.DataFrame, needed: int, separator: str, file: Path) -> None:
    if table.shape[1] < needed:
        raise ValueError(
            f"{file}: {table.shape[1]} column(s) read with separator {separator!r}, "
            f"need {needed}: give the right separator="
        )


def _read_parquet(file: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(file)
    except ImportError as error:
        raise ValueError(
            "source='parquet' needs the package pyarrow: pip install 'iclr24[parquet]'"
        ) from error


def _named(table: pd.DataFrame, columns: Mapping[str, str] | None, file: Path) -> pd.DataFrame:
    names = dict(columns or {name: name for name in COLUMNS if name in table.columns})
    unknown = sorted(set(names) - set(COLUMNS))
    if unknown:
        raise ValueError(f"columns: unknown key '{unknown[0]}', allowed are {', '.join(COLUMNS)}")
    for name in ("user", "item"):
        if name not in names:
            raise ValueError(
                f"columns: '{name}' is missing; {file} has the columns "
                f"{', '.join(map(str, table.columns))}"
            )
    for name, theirs in names.items():
        if theirs not in table.columns:
            raise ValueError(
                f"columns: {file} has no column '{theirs}' for '{name}', "
                f"it has {', '.join(map(str, table.columns))}"
            )
    rating = table[names["rating"]] if "rating" in names else pd.Series(np.ones(len(table)))
    time = table[names["time"]] if "time" in names else None
    return _table(table[names["user"]], table[names["item"]], rating, time, file)


def _table(
    user: Any, item: Any, rating: Any, time: Any, file: Path, integers: bool = False
) -> pd.DataFrame:
    """Check and name the four columns."""
    if len(user) == 0:
        raise ValueError(f"{file} has no interactions")
    identified = {
        name: _identifiers(values.reset_index(drop=True), name, file, integers)
        for name, values in (("user", user), ("item", item))
    }
    return pd.DataFrame(
        {
            **identified,
            "rating": _numbers(rating.reset_index(drop=True), "rating", file),
            "time": np.full(len(user), np.nan)
            if time is None
            else _numbers(time.reset_index(drop=True), "time", file),
        }
    )


def _identifiers(values: Any, name: str, file: Path, integers: bool) -> Any:
    """Numbers must be whole and not negative; text is taken as it is unless the format forbids."""
    if values.isna().any():
        raise ValueError(f"{file}: {int(values.isna().sum())} missing {name} id(s)")
    if not pd.api.types.is_numeric_dtype(values):
        if not integers:
            return values.astype(str)
        numbers = pd.to_numeric(values, errors="coerce")
        if numbers.isna().any():
            raise ValueError(
                f"{file}: {name} ids must be integers of at least 0, "
                f"got '{values[numbers.isna()].iloc[0]}'"
            )
        values = numbers
    wrong = (values < 0) | (values != np.floor(values))
    if wrong.any():
        raise ValueError(
            f"{file}: {name} ids must be integers of at least 0, got {values[wrong].iloc[0]}"
        )
    return values.astype(np.int64)


def _numbers(values: Any, name: str, file: Path) -> Any:
    if pd.api.types.is_datetime64_any_dtype(values):
        return values.astype("int64").astype(np.float64)
    numbers = pd.to_numeric(values, errors="coerce")
    if numbers.isna().any():
        dates = pd.to_datetime(values, errors="coerce") if name == "time" else None
        if dates is not None and not dates.isna().any():
            return dates.astype("int64").astype(np.float64)
        raise ValueError(
            f"{file}: {name} must be a number in every row, got {values[numbers.isna()].iloc[0]!r}"
        )
    return numbers.astype(np.float64)


def _is_number(text: Any) -> bool:
    try:
        float(text)
    except (TypeError, ValueError):
        return False
    return True
