"""Orders, resumable loaders, splits and downloads."""

import hashlib
import http.server
import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from datamodules.base import (
    Collated,
    EvaluationOrder,
    GlobalOrder,
    ResumableLoader,
    Rows,
    fetch,
    split,
)


class Row(NamedTuple):
    value: torch.Tensor


def loader(size: int = 23, batch_size: int = 4, **arguments: int) -> ResumableLoader[Row]:
    return ResumableLoader(
        Rows(Row, torch.arange(size)), GlobalOrder(size, batch_size), **arguments
    )


def values(batches: Iterator[Row]) -> list[list[int]]:
    return [batch.value.tolist() for batch in batches]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_the_batches_of_one_process(world_size: int) -> None:
    whole = GlobalOrder(37, 8, seed=3)
    parts = [GlobalOrder(37, 8 // world_size, 3, r, world_size) for r in range(world_size)]
    for epoch in (0, 1):
        for order in (whole, *parts):
            order.epoch = epoch
        joined = [
            list(chain(*slices)) for slices in zip(*(p.batches() for p in parts), strict=True)
        ]
        assert joined == list(whole.batches())


def test_order_is_a_function_of_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        drawn = GlobalOrder(16, 4, seed)
        drawn.epoch = epoch
        return list(chain(*drawn.batches()))

    assert order(0, 1) == order(0, 1)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert sorted(order(5, 7)) == list(range(16))


@pytest.mark.parametrize("size", [1, 5, 8, 9, 10, 13, 26])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_sees_every_sample_once(size: int, world_size: int) -> None:
    orders = [EvaluationOrder(size, 2, rank, world_size) for rank in range(world_size)]
    seen = [index for order in orders for batch in order.batches() for index in batch]
    assert sorted(seen) == list(range(size))
    for order in orders:
        assert len(order) == len(list(order.batches()))
        assert all(batch for batch in order.batches())
    if size >= 2 * world_size:
        assert len({len(order) for order in orders}) == 1


def test_too_small_data_are_refused() -> None:
    with pytest.raises(ValueError, match=r"needs at least 32 training samples, got 20.*at most 10"):
        GlobalOrder(20, 16, world_size=2)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_loader_continues_where_it_stopped(num_workers: int, stop: int) -> None:
    whole = loader()
    whole.set_epoch(2)
    expected = values(iter(whole))
    first = loader(num_workers=num_workers)
    first.set_epoch(2)
    batches = iter(first)
    for _ in range(stop):
        next(batches)
    second = loader(num_workers=num_workers)
    second.load_state_dict(first.state_dict())
    second.set_epoch(2)
    if stop == len(whole):
        assert second.state_dict() == {"batches": 0}
        assert values(iter(second)) == expected
    else:
        assert values(iter(second)) == expected[stop:]
    second.set_epoch(3)
    assert len(values(iter(second))) == len(whole)


def test_epoch_reaches_data_that_vary() -> None:
    class Varying(list):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    data = Varying(range(8))
    loads = ResumableLoader(Collated(data, torch.tensor), GlobalOrder(8, 4))
    loads.set_epoch(6)
    assert data.epoch == 6
    assert [batch.tolist() for batch in loads] == list(loads.order.batches())


def test_rows_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one length, got \[3, 4\]"):
        Rows(Row, torch.zeros(3), torch.zeros(4))


def test_split_is_a_seeded_partition() -> None:
    parts = split(50, [0.6, 0.2], seed=1)
    assert [len(part) for part in parts] == [30, 10, 10]
    assert sorted(torch.cat(parts).tolist()) == list(range(50))
    again = split(50, [0.6, 0.2], seed=1)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    assert not torch.equal(parts[0], split(50, [0.6, 0.2], seed=2)[0])


@pytest.mark.parametrize("fractions", [[0.0], [1.0], [0.5, 0.6], [-0.1]])
def test_wrong_fractions_are_refused(fractions: list[float]) -> None:
    with pytest.raises(ValueError, match="split fractions must be in"):
        split(10, fractions, 0)
    with pytest.raises(ValueError, match="too few"):
        split(2, [0.1], 0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A file server on loopback."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "data.bin").write_bytes(b"content")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()


def test_fetch_downloads_once_and_checks(server: str, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"content").hexdigest()
    path = fetch(f"{server}/data.bin", digest, tmp_path / "cache")
    assert path.read_bytes() == b"content"
    # the file is there: no server is needed any more
    assert fetch("http://127.0.0.1:9/data.bin", digest, tmp_path / "cache") == path
    with pytest.raises(ValueError, match="another content than expected"):
        fetch(f"{server}/data.bin", "0" * 64, tmp_path / "other")
    assert not (tmp_path / "other" / "data.bin").exists()


def test_fetch_without_network_says_where_to_put_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match=f"put the file at {tmp_path}/data.bin"):
        fetch("http://127.0.0.1:9/data.bin", None, tmp_path)
