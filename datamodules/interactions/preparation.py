"""From an interaction table to numbered clients and items, and to training and held-out parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from lightning.pytorch.utilities import rank_zero_warn

from datamodules.interactions.negatives import hash_words

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Interactions:
    """Numbered interactions, in the order of the file.

    Attributes:
        client: ``(rows,)`` numbers from 0 by first appearance.
        item: ``(rows,)`` numbers from 0 by first appearance.
        time: ``(rows,)``, NaN if unknown.
        user_ids: The user's own id of every client.
        item_ids: The user's own id of every item.
    """

    client: Ints
    item: Ints
    time: npt.NDArray[np.float64]
    user_ids: npt.NDArray[Any]
    item_ids: npt.NDArray[Any]


@dataclass(frozen=True)
class Split:
    """Training interactions and one held-out item of every client for validation and test."""

    client: Ints
    item: Ints
    validation: Ints
    test: Ints


def prepare(
    table: pd.DataFrame,
    min_interactions: int,
    first_only: bool,
    max_items: int | None = None,
    user_items: tuple[int, int] | None = None,
    max_users: int | None = None,
    seed: int = 0,
    warn_duplicates: bool = True,
) -> Interactions:
    """Drop, filter, subsample and number.

    Args:
        table: Columns ``user, item, rating, time``.
        min_interactions: Users with fewer rows (after removal of repeats, if they are removed and
            the format is known to have them) are dropped.
        first_only: Keep the first row of every (user, item).
        max_items: Keep only the items bought by most users.
        user_items: Then keep only users with so many distinct items (both ends included).
        max_users: Then keep so many users at random.
        seed: Of that choice.
        warn_duplicates: Whether removed repeats are worth a warning.

    Raises:
        ValueError: If nothing is left.
    """
    if not (table["rating"] > 0).any():
        raise ValueError(
            "no rating is above 0: implicit feedback needs positive ratings "
            "(is the rating column the right one?)"
        )
    table = table[table["rating"] > 0]
    if first_only and not warn_duplicates:
        table = _first_rows(table)
    counts = table.groupby("user", sort=False)["item"].transform("size")
    table = table[counts >= min_interactions]
    if table.empty:
        raise ValueError(
            f"min_interactions={min_interactions} leaves no user, "
            f"the most active one has {int(counts.max())} interactions"
        )
    if first_only and warn_duplicates:
        kept = _first_rows(table)
        if len(kept) < len(table):
            rank_zero_warn(
                f"{len(table) - len(kept)} repeated (user, item) rows dropped, "
                "the first of each is kept (target='repeat' keeps all)"
            )
        table = kept
    if max_items is not None:
        pairs = table.drop_duplicates(["user", "item"])
        popular = pairs["item"].value_counts(sort=False).reset_index()
        popular.columns = pd.Index(["item", "count"])
        popular = popular.sort_values(["count", "item"], ascending=[False, True])
        table = table[table["item"].isin(popular["item"].iloc[:max_items])]
    if user_items is not None:
        distinct = table.groupby("user", sort=False)["item"].transform("nunique")
        table = table[(distinct >= user_items[0]) & (distinct <= user_items[1])]
        if table.empty:
            raise ValueError(
                f"user_items={list(user_items)} leaves no user: the clients have between "
                f"{int(distinct.min())} and {int(distinct.max())} distinct items"
            )
    if max_users is not None:
        users = np.unique(table["user"].to_numpy())
        if len(users) > max_users:
            chosen = np.random.default_rng(seed).permutation(len(users))[:max_users]
            table = table[table["user"].isin(users[chosen])]
    client, user_ids = pd.factorize(table["user"])
    item, item_ids = pd.factorize(table["item"])
    return Interactions(
        client.astype(np.int64),
        item.astype(np.int64),
        table["time"].to_numpy(dtype=np.float64),
        np.asarray(user_ids),
        np.asarray(item_ids),
    )


def _first_rows(table: pd.DataFrame) -> pd.DataFrame:
    """First row of every (user, item) in time, the file's order among equal times."""
    if table["time"].isna().all():
        return table.drop_duplicates(["user", "item"])
    ordered = table.sort_values("time", kind="stable")
    return ordered.drop_duplicates(["user", "item"]).sort_index()


def leave_one_out(data: Interactions, by: str = "time", ties: str = "row", seed: int = 0) -> Split:
    """Hold out the latest interaction of every client for test, the second latest for validation.

    Args:
        data: Numbered interactions.
        by: ``time``, or ``random`` for two interactions at random.
        ties: Which of several interactions at one time is later: the one that comes later in the
            file (``row``) or a hash of (seed, row) (``random``). An order list sorted by product
            would otherwise always hold out the last product of the list.
        seed: Of both random choices.

    Raises:
        ValueError: If a client has fewer than three interactions, or the times tell nothing apart.
    """
    counts = np.bincount(data.client, minlength=len(data.user_ids))
    if (counts < 3).any():
        short = data.user_ids[counts < 3]
        names = ", ".join(str(name) for name in short[:5]) + (", ..." if len(short) > 5 else "")
        raise ValueError(
            f"{len(short)} user(s) have fewer than 3 interactions, one each for training, "
            f"validation and test: {names}; set min_interactions to at least 3 "
            "(with max_items, user_items)"
        )
    row = np.arange(len(data.client))
    scrambled = hash_words(seed, row)
    if by == "random":
        order = np.lexsort((scrambled, data.client))
    else:
        if np.isnan(data.time).any():
            raise ValueError(
                "split='time' needs a time for every interaction and there is none: "
                "name the time column, or use split='random' (with seed)"
            )
        if len(data.time) and (data.time == data.time[0]).all():
            raise ValueError(
                "split='time' needs different times and all are equal: use split='random'"
            )
        order = np.lexsort((row if ties == "row" else scrambled, data.time, data.client))
    last = np.cumsum(counts) - 1
    training = np.ones(len(order), dtype=bool)
    training[last] = training[last - 1] = False
    kept = np.sort(order[training])
    # Stable by client: the file's order within a client.
    kept = kept[np.argsort(data.client[kept], kind="stable")]
    return Split(
        data.client[kept], data.item[kept], data.item[order[last - 1]], data.item[order[last]]
    )
