"""Fixtures of all tests."""

import os

# before torch is imported: two test processes share the cores, and forked workers must not inherit
# a pool of OpenMP threads
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    WANDB_CONSOLE="off",
    WANDB_DISABLE_GIT="true",
    WANDB_DISABLE_CODE="true",
    WANDB__DISABLE_STATS="true",
    WANDB_ERROR_REPORTING="false",
    MPLBACKEND="agg",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
)

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_modules.reproduce import Lab


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """A lab that writes to a temporary folder."""
    return Lab(tmp_path / "lab")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list]]:
    """Run a function on two processes: `ranks(function, *args)` gives both results.

    The function is module-level in an importable file, takes `(*args)` and finds the launcher's
    environment set, so that `Trainer(devices=2, strategy="ddp")` joins instead of launching.
    """
    from pool import RankPool

    pool = RankPool(2)
    yield pool.run
    pool.close()
