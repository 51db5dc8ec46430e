"""`Interactions`: implicit feedback of many users, one user one client."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from datamodules.base import Order, ResumableLoader, SuiteDataModule
from datamodules.interactions import preparation
from datamodules.interactions.datasets import ClientRounds, HeldOut, ParticipationOrder
from datamodules.interactions.negatives import ItemSets, draw_distinct
from datamodules.interactions.planted import planted_interactions
from datamodules.interactions.readers import FORMATS, read_interactions, read_online_retail

__all__ = ["Interactions"]

EMBEDDED = ("online_retail", "planted")


class Interactions(SuiteDataModule):
    """Users, the items they interacted with, and one held-out item of each for validation and test.

    A training batch is a group of clients with their positives and freshly drawn negatives
    (`ClientRound`), an epoch is one federated round. An evaluation batch is a group of clients with
    their held-out item and its candidates (`EvaluationBatch`). Everything is a function of the seed
    and the round, whatever the batches, workers or ranks.

    **The pool of negatives decides what a result means.** With ``negative_pool='unobserved'``, as
    many papers have it, training negatives are never the held-out items. A model with free
    parameters for every user and item then learns which items were never used as negatives, and
    these are the answers. ``'train_only'`` draws from everything that is no training positive.

    Args:
        source: ``online_retail`` (purchases in a gift shop, shipped), ``planted`` (generated), or a
            file format: ``movielens``, ``amazon``, ``lastfm``, ``tenrec``, ``books``,
            ``behaviour``, ``csv``, ``parquet``.
        path: The file, for a format.
        columns: For ``csv`` and ``parquet``: ours -> the file's, of ``user, item, time, rating``.
        separator: Of a text file, if not the format's own.
        batch_size: Clients per batch and device; without influence on the result.
        seed: Of the splits, negatives, participants and subsample.
        num_workers: Worker processes.
        target: ``new`` holds out an item new to the user: repeats are dropped, items of the
            training part are no candidates. ``repeat`` keeps all interactions, holds out the
            latest, and ranks it among all items.
        split: ``time`` (latest and second latest) or ``random``.
        ties: Which of several interactions at one time is the later: ``row`` or ``random``.
        min_interactions: Users with fewer are dropped; ``None`` is 10, for ``books`` and
            ``tenrec`` 5.
        max_items: Keep only the items with most users.
        user_items: Then keep users with so many distinct items, ``[least, most]``.
        max_users: Then keep so many users at random.
        negative_pool: ``train_only`` or ``unobserved``, see above.
        negatives: Negatives of every positive.
        eval_negatives: Candidates beside the held-out item in the sampled protocol; 0 leaves only
            the ranking of all items.
        clients_sample_ratio: Share of clients that take part in a round.
        participation: ``fixed`` number of clients in every round, or ``poisson``.
        validate_on_test: Also evaluate the test items after every round (reproduction of selection
            on test; never do this otherwise).
        predict_users: Own ids of the users for `predict`, all by default.
        planted: Arguments of `planted_interactions` for source ``planted``.

    Raises:
        ValueError: If an argument is out of range, in `setup` if the data do not allow it.
        FileNotFoundError: If `path` is no file.
    """

    sources = (*EMBEDDED, *FORMATS)

    def __init__(
        self,
        source: str = "online_retail",
        path: str | None = None,
        columns: dict[str, str] | None = None,
        separator: str | None = None,
        batch_size: int = 64,
        seed: int = 0,
        num_workers: int = 0,
        target: Literal["new", "repeat"] = "new",
        split: Literal["time", "random"] = "time",
        ties: Literal["row", "random"] = "row",
        min_interactions: int | None = None,
        max_items: int | None = None,
        user_items: list[int] | None = None,
        max_users: int | None = None,
        negative_pool: Literal["train_only", "unobserved"] = "train_only",
        negatives: int = 4,
        eval_negatives: int = 99,
        clients_sample_ratio: float = 1.0,
        participation: Literal["fixed", "poisson"] = "fixed",
        validate_on_test: bool = False,
        predict_users: list[str] | None = None,
        planted: dict[str, int] | None = None,
    ) -> None:
        super().__init__(source, batch_size, seed, num_workers)
        choices: dict[str, tuple[str, tuple[str, ...]]] = {
            "target": (target, ("new", "repeat")),
            "split": (split, ("time", "random")),
            "ties": (ties, ("row", "random")),
            "negative_pool": (negative_pool, ("train_only", "unobserved")),
            "participation": (participation, ("fixed", "poisson")),
        }
        for name, (value, allowed) in choices.items():
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got '{value}'")
        if source in FORMATS and path is None:
            raise ValueError(f"source '{source}' is a file format: give path=")
        if source not in FORMATS and path is not None:
            raise ValueError(f"path is for a file format ({', '.join(FORMATS)}), got '{source}'")
        for name, number, least in (
            ("negatives", negatives, 1),
            ("eval_negatives", eval_negatives, 0),
            ("min_interactions", min_interactions, 0),
            ("max_items", max_items, 2),
            ("max_users", max_users, 1),
        ):
            if number is not None and number < least:
                raise ValueError(f"{name} must be at least {least}, got {number}")
        if user_items is not None and (len(user_items) != 2 or user_items[0] > user_items[1]):
            raise ValueError(f"user_items must be [least, most], got {user_items}")
        if not 0.0 < clients_sample_ratio <= 1.0:
            raise ValueError(f"clients_sample_ratio must be in (0, 1], got {clients_sample_ratio}")
        self.path, self.columns, self.separator = path, columns, separator
        self.target, self.split, self.ties = target, split, ties
        self.min_interactions = min_interactions
        self.max_items, self.user_items, self.max_users = max_items, user_items, max_users
        self.negative_pool, self.negatives = negative_pool, negatives
        self.eval_negatives = eval_negatives
        self.clients_sample_ratio, self.participation = clients_sample_ratio, participation
        self.validate_on_test = validate_on_test
        self.predict_users = predict_users
        self.planted = planted
        self.n_users = 0
        self.n_items = 0
        self.user_ids: np.ndarray[Any, Any] = np.zeros(0)
        self.item_ids: np.ndarray[Any, Any] = np.zeros(0)
        self.item_counts = np.zeros(0, dtype=np.int64)
        self._ready = False

    def prepare_data(self) -> None:
        """Nothing to download: the embedded data are shipped, other data are the user's own."""
        if self.path is not None and not Path(self.path).expanduser().is_file():
            raise FileNotFoundError(f"path: there is no file {self.path}")

    def setup(self, stage: str | None = None) -> None:
        """Read, split, and draw what is fixed."""
        if self._ready:
            return
        data = self._interactions()
        parts = preparation.leave_one_out(data, self.split, self.ties, self.seed)
        users, items = len(data.user_ids), len(data.item_ids)
        if int(users * self.clients_sample_ratio) < 1:
            raise ValueError(
                f"clients_sample_ratio={self.clients_sample_ratio} of {users} clients gives "
                f"0 clients in a round: choose at least {1 / users:.4g}"
            )
        everyone = np.arange(users)
        observed = ItemSets(data.client, data.item, users, items)
        trained = ItemSets(parts.client, parts.item, users, items)
        before_test = ItemSets(
            np.concatenate([parts.client, everyone]),
            np.concatenate([parts.item, parts.validation]),
            users,
            items,
        )
        forbidden = observed if self.negative_pool == "unobserved" else trained
        self._need(items - forbidden.sizes(), self.negatives, "negatives", data.user_ids)
        candidates = np.zeros((users, 0), dtype=np.int64)
        if self.eval_negatives:
            unseen = items - observed.sizes()
            self._need(unseen, self.eval_negatives, "eval_negatives", data.user_ids)
            rank = draw_distinct(unseen, self.eval_negatives, self.seed, -1, everyone)
            candidates = observed.complement(everyone[:, None], rank)
        nothing = ItemSets(everyone[:0], everyone[:0], users, items)
        repeat = self.target == "repeat"
        self.train_set = ClientRounds(
            parts.client, parts.item, forbidden, self.negatives, self.seed
        )
        self.val_set = HeldOut(parts.validation, candidates, nothing if repeat else trained)
        seen_at_test = nothing if repeat else before_test
        self.test_set = HeldOut(parts.test, candidates, seen_at_test)
        chosen = self._predicted(data.user_ids)
        self.predict_set = HeldOut(parts.test, candidates, nothing if repeat else observed, chosen)
        self.n_users, self.n_items = users, items
        self.user_ids, self.item_ids = data.user_ids, data.item_ids
        self.item_counts = np.bincount(parts.item, minlength=items)
        self._ready = True

    def _table(self) -> pd.DataFrame:
        if self.source == "online_retail":
            return read_online_retail()
        if self.source == "planted":
            return planted_interactions(**{"seed": self.seed, **(self.planted or {})})
        assert self.path is not None
        return read_interactions(self.source, self.path, self.columns, self.separator)

    def _interactions(self) -> preparation.Interactions:
        least = self.min_interactions
        if least is None:
            least = 5 if self.source in ("books", "tenrec") else 10
        bounds = (self.user_items[0], self.user_items[1]) if self.user_items else None
        return preparation.prepare(
            self._table(),
            least,
            self.target == "new",
            self.max_items,
            bounds,
            self.max_users,
            self.seed,
            warn_duplicates=self.source != "online_retail",
        )

    def _need(self, available: Any, needed: int, argument: str, user_ids: Any) -> None:
        if (available < needed).any():
            first = int(np.argmax(available < needed))
            other = " or 0 (rank all items only)" if argument == "eval_negatives" else ""
            raise ValueError(
                f"{argument}={needed}, but user {user_ids[first]} has only {available[first]} "
                f"items to draw from ({int((available < needed).sum())} such user(s)): "
                f"choose at most {int(available.min())}{other}"
            )

    def _predicted(self, user_ids: Any) -> Any:
        if self.predict_users is None:
            return None
        if self._ranks()[1] > 1:
            raise ValueError("predict_users works with one device: use --trainer.devices=1")
        number = {str(name): index for index, name in enumerate(user_ids)}
        return np.asarray([number.get(str(user), -1) for user in self.predict_users])

    def train_order(self, size: int, rank: int, world_size: int) -> Order:
        """Who takes part in each round."""
        return ParticipationOrder(
            size,
            self.batch_size,
            self.clients_sample_ratio,
            self.participation == "poisson",
            self.seed,
            rank,
            world_size,
        )

    def val_dataloader(self) -> Any:
        """Loader of the validation items, with `validate_on_test` also one of the test items."""
        loader: ResumableLoader[Any] = self._loader("val")
        return [loader, self._loader("test")] if self.validate_on_test else loader
