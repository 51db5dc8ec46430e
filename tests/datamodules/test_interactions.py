"""Readers, splits, pools and negatives of interaction data."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch

from datamodules import Interactions
from datamodules.interactions.datasets import ParticipationOrder
from datamodules.interactions.negatives import ItemSets, draw_distinct
from datamodules.interactions.planted import planted_interactions
from datamodules.interactions.preparation import leave_one_out, prepare
from datamodules.interactions.readers import read_interactions, read_online_retail

ROWS = [(5, 30, 4, 100), (5, 31, 3, 90), (9, 30, 5, 10), (9, 32, 0, 20), (5, 33, 2, 110)]


def write(path, separator=",", header=None, rows=ROWS):
    lines = ([separator.join(header)] if header else []) + [
        separator.join(map(str, row)) for row in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("source", "separator", "header"),
    [
        ("movielens", "::", None),
        ("movielens", "\t", None),
        ("movielens", ",", None),
        ("movielens", ",", ["userId", "movieId", "rating", "timestamp"]),
        ("movielens", "\t", ["user_id:token", "item_id:token", "rating:float", "timestamp:float"]),
        ("amazon", ",", None),
    ],
)
def test_ratings_with_times(tmp_path, source, separator, header):
    table = read_interactions(source, write(tmp_path / "r.txt", separator, header))
    assert table["user"].astype(int).tolist() == [5, 5, 9, 9, 5]
    assert table["item"].astype(int).tolist() == [30, 31, 30, 32, 33]
    assert table["rating"].tolist() == [4, 3, 5, 0, 2]
    assert table["time"].tolist() == [100, 90, 10, 20, 110]


def test_formats_without_times_and_with_behaviours(tmp_path):
    rows = [(1, 7, 3, 0), (1, 8, 2, 0), (2, 9, 1, 0), (2, 7, 5, 0)]
    table = read_interactions("lastfm", write(tmp_path / "l", "\t", rows=rows))
    assert table["rating"].tolist() == [3, 2, 1, 5]
    assert table["time"].isna().all()
    headed = write(tmp_path / "h", "\t", ["userID", "artistID", "weight", "x"], rows)
    assert read_interactions("lastfm", headed).equals(table)
    for source in ("tenrec", "books"):
        file = write(tmp_path / source, ",", ["user_id", "item_id", "click", "like"], rows)
        table = read_interactions(source, file)
        assert table["time"].tolist() == [0, 1, 2, 0]  # first appearance of the item
    logs = [(1, 7, 3, "pv", 5), (1, 8, 3, "buy", 6), (2, 7, 3, "cart", 7), (2, 8, 3, "fav", 8)]
    table = read_interactions("behaviour", write(tmp_path / "b", rows=logs))
    assert table["rating"].tolist() == [1, 4, 2, 3]
    assert table["time"].tolist() == [5, 6, 7, 8]


def test_own_tables_with_a_column_mapping(tmp_path):
    frame = pd.DataFrame(
        {
            "who": ["a", "b", "a"],
            "what": ["x", "y", "y"],
            "at": ["2024-01-02", "2024-01-01", "2024-01-03"],
        }
    )
    columns = {"user": "who", "item": "what", "time": "at"}
    frame.to_csv(tmp_path / "t.csv", index=False, sep=";")
    frame.to_parquet(tmp_path / "t.parquet")
    text = read_interactions("csv", tmp_path / "t.csv", columns, ";")
    binary = read_interactions("parquet", tmp_path / "t.parquet", columns)
    for table in (text, binary):
        assert table["user"].tolist() == ["a", "b", "a"]
        assert table["rating"].tolist() == [1, 1, 1]
        assert table["time"].argsort().tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("source", "text", "options", "words"),
    [
        ("movielens", "1;2;3;4\n", {}, r"1 column\(s\) read with separator ','.*separator="),
        ("csv", "a\tb\n1\t2\n", {}, r"1 column\(s\) read"),
        ("movielens", "1,-2,3,4\n", {}, "item ids must be integers of at least 0, got -2"),
        ("movielens", "1.5,2,3,4\n", {}, "user ids must be integers of at least 0, got 1.5"),
        ("lastfm", "1\tbeatles\t3\n", {}, "item ids must be integers of at least 0, got 'beatles'"),
        ("amazon", "u,i,bad,4\n", {}, "rating must be a number in every row, got 'bad'"),
        ("amazon", "", {}, "is empty"),
        ("amazon", ",i,1,4\nu,i,1,4\n", {}, r"1 missing user id\(s\)"),
        ("behaviour", "1,2,3,look,5\n", {}, "unknown behaviour 'look'.*pv, cart, fav, buy"),
        ("csv", "user,thing\n1,2\n", {}, "columns: 'item' is missing.*user, thing"),
        ("csv", "user,item\n1,2,3\n1,4,3\n", {}, "rows have more fields than the header"),
        ("csv", "user,item\n1,2\n", {"columns": {"user": "u", "item": "item"}}, "no column 'u'"),
        ("csv", "user,item\n1,2\n", {"columns": {"use": "user"}}, "unknown key 'use'"),
    ],
)
def test_bad_files(tmp_path, source, text, options, words):
    (tmp_path / "f").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_interactions(source, tmp_path / "f", **options)


def test_missing_file_and_misplaced_arguments(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_interactions("amazon", tmp_path / "none")
    with pytest.raises(ValueError, match="columns is for source 'csv' or 'parquet'"):
        read_interactions("amazon", write(tmp_path / "a"), {"user": "x"})


def table_of(pairs, times=None, ratings=None):
    users, items = zip(*pairs, strict=True)
    count = len(pairs)
    return pd.DataFrame(
        {
            "user": users,
            "item": items,
            "rating": np.ones(count) if ratings is None else np.asarray(ratings, float),
            "time": np.arange(count, dtype=float) if times is None else np.asarray(times, float),
        }
    )


def test_preparation_filters_and_numbers_by_first_appearance():
    pairs = [("b", 9), ("a", 9), ("b", 7), ("c", 1), ("b", 9), ("a", 5), ("a", 6), ("b", 8)]
    table = table_of(pairs, ratings=[1, 1, 1, 1, 1, 1, 0, 1])
    with pytest.warns(UserWarning, match=r"1 repeated \(user, item\) rows dropped"):
        data = prepare(table, 2, first_only=True)
    assert data.user_ids.tolist() == ["b", "a"]  # "c" has one row
    assert data.item_ids.tolist() == [9, 7, 5, 8]  # 6 had rating 0
    assert data.client.tolist() == [0, 1, 0, 1, 0]
    assert data.item.tolist() == [0, 0, 1, 2, 3]
    kept = prepare(table, 2, first_only=False)
    assert len(kept.item) == 6
    with pytest.raises(ValueError, match="no rating is above 0"):
        prepare(table.assign(rating=0.0), 2, True)
    with pytest.raises(ValueError, match=r"min_interactions=9 leaves no user.* has 4"):
        prepare(table, 9, True)
    with pytest.raises(ValueError, match=r"user_items=\[8, 9\] leaves no user"):
        prepare(table, 1, False, user_items=(8, 9))


def test_split_by_time_breaks_ties_by_row():
    pairs = [(0, i) for i in range(5)] + [(1, i) for i in range(4)]
    data = prepare(table_of(pairs, times=[3, 5, 5, 1, 5, 9, 9, 9, 9]), 1, True)
    split = leave_one_out(data)
    assert split.test.tolist() == [4, 3]
    assert split.validation.tolist() == [2, 2]
    assert split.item.tolist() == [0, 1, 3, 0, 1]
    shuffled = {tuple(leave_one_out(data, ties="random", seed=s).test) for s in range(20)}
    assert len(shuffled) > 3
    first, again = (leave_one_out(data, by="random", seed=4) for _ in range(2))
    assert first.test.tolist() == again.test.tolist()
    with pytest.raises(ValueError, match=r"1 user\(s\) have fewer than 3 interactions.*: b"):
        leave_one_out(prepare(table_of([("a", i) for i in range(3)] + [("b", 1)]), 1, True))
    for times, words in (
        (np.full(9, np.nan), "there is none.*split='random'"),
        (np.ones(9), "all are equal: use split='random'"),
    ):
        with pytest.raises(ValueError, match=words):
            leave_one_out(prepare(table_of(pairs, times), 1, True))


def test_complement_and_distinct_draws():
    draw = np.random.default_rng(0)
    client, item = draw.integers(0, 6, 40), draw.integers(0, 15, 40)
    sets = ItemSets(client, item, 7, 15)
    for i in range(7):
        rest = np.setdiff1d(np.arange(15), item[client == i])
        found = sets.complement(np.full(len(rest), i), np.arange(len(rest)))
        assert found.tolist() == rest.tolist()
        assert sets.sizes()[i] == 15 - len(rest)
    space = np.full(30000, 5)
    drawn = draw_distinct(space, 2, 3, np.arange(30000))
    assert (drawn[:, 0] != drawn[:, 1]).all()
    pairs = np.bincount(np.sort(drawn, 1) @ [5, 1], minlength=25)
    pairs = pairs[pairs > 0]
    assert len(pairs) == 10
    assert ((pairs - 3000) ** 2 / 3000).sum() < 28  # chi-square, 9 degrees
    assert draw_distinct(np.array([4]), 4, 1).tolist()[0] != []
    assert sorted(draw_distinct(np.array([4]), 4, 1)[0].tolist()) == [0, 1, 2, 3]


def small(**options):
    data = Interactions(**{"source": "planted", "max_users": 40, "batch_size": 8, **options})
    data.prepare_data()
    data.setup()
    return data


def negatives(data, epoch=0):
    data.train_set.set_epoch(epoch)
    batch = data.train_set[list(range(data.n_users))]
    return batch, batch.client.repeat_interleave(batch.offsets.diff())


@pytest.mark.parametrize("pool", ["train_only", "unobserved"])
def test_pools(pool):
    data = small(negative_pool=pool)
    held_out = np.stack([data.val_set.target, data.test_set.target], 1)
    hits = 0
    for epoch in range(12):
        batch, owner = negatives(data, epoch)
        assert batch.negative.shape == (len(batch.positive), 4)
        assert bool((batch.negative.sort(1).values.diff(dim=1) > 0).all())
        for client in range(data.n_users):
            mine = owner == client
            drawn = set(batch.negative[mine].flatten().tolist())
            assert not drawn & set(batch.positive[mine].tolist())
            hits += len(drawn & set(held_out[client].tolist()))
    assert (hits > 0) == (pool == "train_only")


def test_negatives_depend_on_round_and_client_alone():
    data = small()
    batch, owner = negatives(data, 3)
    alone = data.train_set[[5]]
    assert torch.equal(alone.negative, batch.negative[owner == 5])
    other, _ = negatives(data, 4)
    assert not torch.equal(other.negative, batch.negative)
    again, _ = negatives(small(), 3)
    assert torch.equal(again.negative, batch.negative)


def test_candidates_are_unseen_and_drawn_once():
    data = small()
    observed = data.predict_set.seen
    assert np.array_equal(data.val_set.negative, data.test_set.negative)
    for client in range(data.n_users):
        candidates = data.test_set.negative[client]
        assert len(set(candidates.tolist())) == 99
        _, seen = observed.of(np.array([client]))
        assert not set(candidates.tolist()) & set(seen.tolist())
        batch = data.test_set[[client]]
        assert set(batch.seen.tolist()) == set(seen.tolist()) - {int(batch.target[0])}
        batch = data.val_set[[client]]
        hidden = {int(batch.target[0]), int(data.test_set.target[client])}
        assert set(batch.seen.tolist()) == set(seen.tolist()) - hidden


def test_repeat_keeps_every_line_and_ranks_all_items():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = Interactions(target="repeat", max_items=200, user_items=[10, 90], max_users=50)
        data.setup()
    batch = data.test_set[list(range(data.n_users))]
    assert len(batch.seen) == 0
    training = data.train_set[list(range(data.n_users))]
    owner = training.client.repeat_interleave(training.offsets.diff())
    key = owner * data.n_items + training.positive
    assert len(key.unique()) < len(key)
    again = torch.isin(batch.client * data.n_items + batch.target, key)
    assert 0.2 < float(again.double().mean()) < 0.9


def test_the_shop_has_its_documented_size():
    table = read_online_retail()
    assert len(table) == 387_841
    data = Interactions()
    data.setup()
    assert (data.n_users, data.n_items) == (3704, 3656)
    assert len(data.train_set.item) == 263_558 - 2 * 3704


def test_planted_users_take_their_items_once():
    table = planted_interactions()
    assert table.groupby("user")["item"].nunique().tolist() == [22] * 240
    assert planted_interactions(seed=1)["item"].tolist() != table["item"].tolist()


@pytest.mark.parametrize("poisson", [False, True])
def test_participants_are_a_function_of_the_round(poisson):
    def drawn(world, epoch, ratio=0.3):
        found = []
        for rank in range(world):
            order = ParticipationOrder(50, 4, ratio, poisson, 1, rank, world)
            order.epoch = epoch
            batches = list(order.batches())
            assert len(batches) == len(order)
            assert all(c % world == rank for batch in batches for c in batch)
            found += [c for batch in batches for c in batch]
        return sorted(found)

    assert drawn(1, 5) == drawn(3, 5)
    assert drawn(1, 5) != drawn(1, 6)
    counts = [len(drawn(1, e)) for e in range(40)]
    assert (len(set(counts)) > 1) == poisson
    assert 13 < np.mean(counts) < 17
    assert drawn(2, 0, 1.0) == list(range(50))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"source": "netflix"}, "source must be one of online_retail, planted, movielens"),
        ({"source": "movielens"}, "is a file format: give path="),
        ({"path": "x"}, "path is for a file format"),
        ({"negative_pool": "all"}, "negative_pool must be one of train_only, unobserved"),
        ({"clients_sample_ratio": 0.0}, r"clients_sample_ratio must be in \(0, 1\]"),
        ({"negatives": 0}, "negatives must be at least 1"),
        ({"user_items": [9, 3]}, "user_items must be"),
        ({"split": "order"}, "split must be one of time, random"),
    ],
)
def test_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        Interactions(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clients_sample_ratio": 0.01}, "of 40 clients gives 0 clients.*at least 0.025"),
        ({"eval_negatives": 290}, r"eval_negatives=290, but user \d+ has only \d+ .*or 0 "),
        ({"negatives": 290}, r"negatives=290, but user \d+ has only \d+ items.*choose at most"),
        ({"min_interactions": 50}, "min_interactions=50 leaves no user"),
    ],
)
def test_data_that_do_not_allow_it(options, words):
    with pytest.raises(ValueError, match=words):
        small(**options)
    if "eval_negatives" in options:
        assert small(eval_negatives=0).test_set[[0]].negative.shape == (1, 0)
