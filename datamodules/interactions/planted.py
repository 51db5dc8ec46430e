"""Interactions with a known low-rank structure."""

from __future__ import annotations

import numpy as np
import pandas as pd


def planted_interactions(
    users: int = 240, items: int = 300, interactions: int = 22, rank: int = 4, seed: int = 0
) -> pd.DataFrame:
    """Users with hidden tastes choose the items of greatest utility.

    The utility of an item is ``2.4 <u, v> / 2`` plus the item's popularity plus Gumbel noise, with
    standard normal tastes, properties and popularities; a user takes the best items in random
    order.

    Args:
        users: Number of users.
        items: Number of items.
        interactions: Items of every user.
        rank: Number of hidden tastes.
        seed: Of the draw.

    Returns:
        A table with the columns ``user``, ``item``, ``rating`` (1) and ``time`` (the position).
    """
    if interactions >= items:
        raise ValueError(f"interactions must be below items={items}, got {interactions}")
    draw = np.random.default_rng(seed)
    tastes = draw.standard_normal((users, rank))
    properties = draw.standard_normal((items, rank))
    popularity = draw.standard_normal(items)
    utility = 2.4 * tastes @ properties.T / 2 + popularity + draw.gumbel(size=(users, items))
    best = np.argsort(-utility, axis=1)[:, :interactions]
    best = draw.permuted(best, axis=1)
    return pd.DataFrame(
        {
            "user": np.repeat(np.arange(users), interactions),
            "item": best.ravel(),
            "rating": 1.0,
            "time": np.tile(np.arange(interactions, dtype=np.float64), users),
        }
    )
