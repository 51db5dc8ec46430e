"""Order, position, rank slices, splits and downloads of all data."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_modules.components.randomness import generator_from

Batch = TypeVar("Batch")


class BatchedDataset(Protocol):
    """Map-style data that gives a whole batch for a list of indices."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, indices: list[int]) -> Any:
        """Batch of these samples, in this order."""
        ...


class Order(Protocol):
    """Which samples make up which batch of one rank; a pure function of (seed, epoch)."""

    epoch: int

    def __len__(self) -> int:
        """Number of batches of an epoch on this rank."""
        ...

    def batches(self) -> Iterator[list[int]]:
        """Index lists of the present epoch, from its beginning."""
        ...


class GlobalOrder:
    """One order for all ranks, cut into global batches; rank r takes the r-th slice of each.

    Args:
        size: Number of samples.
        batch_size: Samples per batch and rank.
        seed: Seed of the order; with `shuffle=False` unused.
        rank: Rank of this process.
        world_size: Number of processes.
        shuffle: Whether each epoch has its own random order.

    Raises:
        ValueError: If there is not one full global batch.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
    ) -> None:
        if size < batch_size * world_size:
            raise ValueError(
                f"data.batch_size={batch_size} on {world_size} device(s) needs at least "
                f"{batch_size * world_size} training samples, got {size}: "
                f"choose at most {size // world_size}"
            )
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.rank, self.world_size, self.shuffle = rank, world_size, shuffle
        self.epoch = 0

    def __len__(self) -> int:
        return self.size // (self.batch_size * self.world_size)

    def permutation(self) -> Tensor:
        """Order of this epoch, int64 (size,)."""
        if not self.shuffle:
            return torch.arange(self.size)
        return torch.randperm(self.size, generator=generator_from(self.seed, "order", self.epoch))

    def batches(self) -> Iterator[list[int]]:
        """Index lists of this rank; the incomplete last global batch is left out."""
        count = len(self) * self.batch_size * self.world_size
        grid = self.permutation()[:count].view(len(self), self.world_size, self.batch_size)
        yield from grid[:, self.rank].tolist()


class EvaluationOrder:
    """Every sample exactly once over all ranks: rank r takes r, r + world, r + 2 world, ...

    All ranks have equally many batches, since sharded weights are gathered once a batch by all of
    them: a rank with one batch fewer splits one in two. (With batches of one sample it can't.)
    """

    def __init__(self, size: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        own = range(rank, size, world_size)
        self._batches = [
            own[start : start + batch_size] for start in range(0, len(own), batch_size)
        ]
        most = len(range(0, len(range(0, size, world_size)), batch_size))
        if len(self._batches) < most:
            for position, batch in reversed(list(enumerate(self._batches))):
                if len(batch) > 1:
                    half = len(batch) // 2
                    self._batches[position : position + 1] = [batch[:half], batch[half:]]
                    break
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._batches)

    def batches(self) -> Iterator[list[int]]:
        """Index lists of this rank; the last may be short."""
        yield from map(list, self._batches)


def _shuffled(size: int, batch_size: int, seed: int, rank: int, world_size: int) -> Order:
    return GlobalOrder(size, batch_size, seed, rank, world_size)


def _sequential(size: int, batch_size: int, seed: int, rank: int, world_size: int) -> Order:
    return GlobalOrder(size, batch_size, seed, rank, world_size, shuffle=False)


OrderFactory = Callable[[int, int, int, int, int], Order]
ORDERS: dict[str, OrderFactory | str] = {
    "shuffle": _shuffled,
    "sequential": _sequential,
    "fixed_order": "datamodules.sampling:FixedOrder",
    "poisson": "datamodules.sampling:PoissonOrder",
    "cyclic_poisson": "datamodules.sampling:CyclicPoissonOrder",
    "balls_in_bins": "datamodules.sampling:BallsInBinsOrder",
}
"""Name of a sampling scheme → function of (size, batch_size, seed, rank, world_size), or the
`module:function` where it is defined, imported when first used."""


class _OrderSampler:
    """Feeds an order to a `DataLoader`, skipping what was delivered before a resume."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.start = 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[list[int]]:
        start, self.start = self.start, 0
        for position, indices in enumerate(self.order.batches()):
            if position >= start:
                yield indices


class ResumableLoader(Generic[Batch]):
    """Loader that continues in the middle of an epoch after a resume.

    Lightning stores `state_dict()` of rank 0 in the checkpoint; since it counts global batches it
    is right for every rank and for any later number of ranks with the same global batch.

    Args:
        dataset: Data that give a batch for a list of indices. If they have `set_epoch`, it is
            called before each epoch; they must then be a pure function of (seed, epoch).
        order: Batches of this rank.
        num_workers: Worker processes; 0 loads in this one.
        pin_memory: Whether batches are copied to page-locked memory.
    """

    batch_sampler = None  # Lightning asks for it beside `sampler`

    def __init__(
        self,
        dataset: BatchedDataset,
        order: Order,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.dataset = dataset
        self.order = order
        self._sampler = _OrderSampler(order)
        self._delivered = 0
        self._loader: DataLoader[Batch] = DataLoader(
            dataset,  # type: ignore[arg-type]
            sampler=self._sampler,
            batch_size=None,
            num_workers=num_workers,
            pin_memory=pin_memory,
        )

    @property
    def sampler(self) -> "ResumableLoader[Batch]":
        """This loader: Lightning calls `set_epoch` on what stands here."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the order, and the data if they vary, of an epoch."""
        self.order.epoch = epoch
        vary = getattr(self.dataset, "set_epoch", None)
        if callable(vary):
            vary(epoch)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        self._delivered = self._sampler.start
        for batch in self._loader:
            self._delivered += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Number of batches of the present epoch that were delivered."""
        # a finished epoch starts again at 0
        return {"batches": self._delivered % max(len(self), 1)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Skip what the interrupted epoch had delivered."""
        self._sampler.start = self._delivered = int(state["batches"])


class Rows(Generic[Batch]):
    """Tensors with a common first dimension as a data set of batches.

    Args:
        batch_type: `NamedTuple` class of a batch, with one field per tensor.
        *tensors: Shapes `(size, ...)`.

    Raises:
        ValueError: If the first dimensions differ.
    """

    def __init__(self, batch_type: Callable[..., Batch], *tensors: Tensor) -> None:
        sizes = [len(tensor) for tensor in tensors]
        if len(set(sizes)) != 1:
            raise ValueError(f"tensors of one data set need one length, got {sizes}")
        self.batch_type = batch_type
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, indices: list[int]) -> Batch:
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return self.batch_type(*(tensor[rows] for tensor in self.tensors))


class Collated:
    """Ordinary map-style data set with a collate function as a data set of batches.

    Args:
        dataset: Gives one sample for an index.
        collate: Makes a batch of a list of samples.
    """

    def __init__(self, dataset: Sequence[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, indices: list[int]) -> Any:
        return self.collate([self.dataset[index] for index in indices])

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch on to data that vary."""
        vary = getattr(self.dataset, "set_epoch", None)
        if callable(vary):
            vary(epoch)


def split(size: int, fractions: Sequence[float], seed: int) -> list[Tensor]:
    """Cut a seeded permutation of `range(size)` into parts.

    Args:
        size: Number of samples.
        fractions: Share of each part but the last, which takes what is left.
        seed: Seed of the permutation.

    Returns:
        `len(fractions) + 1` disjoint int64 tensors that together hold every index once.

    Raises:
        ValueError: If a fraction is not in (0, 1), their sum is not below 1, or a part is empty.
    """
    if any(not 0 < fraction < 1 for fraction in fractions) or sum(fractions) >= 1:
        raise ValueError(f"split fractions must be in (0, 1) with a sum below 1, got {fractions}")
    order = torch.randperm(size, generator=generator_from(seed, "split"))
    counts = [round(size * fraction) for fraction in fractions]
    parts = list(torch.split(order, [*counts, size - sum(counts)]))
    if any(len(part) == 0 for part in parts):
        raise ValueError(f"{size} samples are too few for the split fractions {fractions}")
    return parts


def cache_folder() -> Path:
    """Folder of downloads: `$ICLR24_CACHE`, else the user's cache folder of the system."""
    import pooch

    return Path(os.environ.get("ICLR24_CACHE") or pooch.os_cache("iclr24"))


def fetch(url: str, sha256: str | None, folder: str | Path | None = None) -> Path:
    """Download a file once, with checksum and progress bar.

    Args:
        url: Address of the file.
        sha256: Its checksum in hexadecimal digits; `None` accepts any content.
        folder: Where to keep it, default `cache_folder()`.

    Returns:
        Path of the file. A file that is there already with the right checksum is not fetched.

    Raises:
        ConnectionError: If it can't be fetched; says where to put the file by hand.
        ValueError: If the content does not have the checksum.
    """
    import pooch
    import requests

    folder = Path(folder).expanduser() if folder else cache_folder()
    name = url.rstrip("/").rsplit("/", 1)[-1].split("?")[0]
    digest = f"sha256:{sha256}" if sha256 else None
    try:
        return Path(pooch.retrieve(url, digest, fname=name, path=folder, progressbar=True))
    except ValueError as error:
        raise ValueError(
            f"{url} has another content than expected (sha256 {sha256}): "
            "it changed at its source or was damaged on the way"
        ) from error
    except (requests.RequestException, OSError) as error:
        raise ConnectionError(
            f"could not download {url}: without a network, put the file at {folder / name}"
        ) from error


class SuiteDataModule(LightningDataModule):
    """Base of all data: builds every loader.

    A subclass sets any of `train_set`, `val_set`, `test_set` and `predict_set` in `setup`; each
    gives a batch for a list of indices (`Rows`, `Collated` or its own class). `prepare_data`
    downloads and writes, `setup` only reads.

    Args:
        source: Which data; each subclass lists its own.
        batch_size: Samples per batch **and device**; the global batch is `batch_size` times the
            number of devices.
        seed: Seed of splits and orders.
        num_workers: Worker processes of each loader.
        cache_dir: Folder of downloads, default the user's cache folder.
        sampling: How training batches are drawn, a key of `ORDERS`.

    Raises:
        ValueError: If an argument is out of range.
    """

    sources: tuple[str, ...] = ()
    """Allowed values of `source`; empty accepts any."""

    def __init__(
        self,
        source: str,
        batch_size: int = 32,
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
        sampling: str = "shuffle",
    ) -> None:
        super().__init__()
        if self.sources and source not in self.sources:
            raise ValueError(f"source must be one of {', '.join(self.sources)}, got '{source}'")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if num_workers < 0:
            raise ValueError(f"num_workers must be at least 0, got {num_workers}")
        if sampling not in ORDERS:
            raise ValueError(f"sampling must be one of {', '.join(ORDERS)}, got '{sampling}'")
        self.source = source
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.cache_dir = cache_dir
        self.sampling = sampling
        self.train_set: BatchedDataset | None = None
        self.val_set: BatchedDataset | None = None
        self.test_set: BatchedDataset | None = None
        self.predict_set: BatchedDataset | None = None

    def fetch(self, url: str, sha256: str | None) -> Path:
        """Download into this datamodule's cache folder; see `fetch`."""
        return fetch(url, sha256, self.cache_dir)

    def train_order(self, size: int, rank: int, world_size: int) -> Order:
        """Batches of training on one rank; a subclass with its own scheme overrides it."""
        factory = ORDERS[self.sampling]
        if isinstance(factory, str):
            import importlib

            module, _, name = factory.partition(":")
            factory = getattr(importlib.import_module(module), name)
        assert callable(factory)
        return factory(size, self.batch_size, self.seed, rank, world_size)  # type: ignore[no-any-return]

    def _ranks(self) -> tuple[int, int]:
        trainer = self.trainer
        return (trainer.global_rank, trainer.world_size) if trainer else (0, 1)

    def _loader(self, name: str, train: bool = False) -> ResumableLoader[Any]:
        dataset: BatchedDataset | None = getattr(self, f"{name}_set")
        if dataset is None:
            raise ValueError(f"{type(self).__name__} with source '{self.source}' has no {name} set")
        rank, world_size = self._ranks()
        size = len(dataset)
        order: Order = (
            self.train_order(size, rank, world_size)
            if train
            else EvaluationOrder(size, self.batch_size, rank, world_size)
        )
        pin_memory = torch.cuda.is_available()
        return ResumableLoader(dataset, order, self.num_workers, pin_memory)

    def train_dataloader(self) -> ResumableLoader[Any]:
        """Loader of `train_set`; drops the incomplete last global batch."""
        return self._loader("train", train=True)

    def val_dataloader(self) -> ResumableLoader[Any]:
        """Loader of `val_set`, every sample once."""
        return self._loader("val")

    def test_dataloader(self) -> ResumableLoader[Any]:
        """Loader of `test_set`, every sample once."""
        return self._loader("test")

    def predict_dataloader(self) -> ResumableLoader[Any]:
        """Loader of `predict_set`, else of `test_set`, every sample once."""
        return self._loader("predict" if self.predict_set is not None else "test")
