"""Two long-lived processes that stand for the ranks of a distributed run.

Starting a process costs seconds of imports; these import once and then take one job after the
other, each with a process group of its own.
"""

import importlib.util
import multiprocessing as mp
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _load(path: str, name: str) -> Callable[..., Any]:
    """Function `name` of the file `path`, however pytest imported that file."""
    key = f"rank_job_{abs(hash(path))}"
    if key not in sys.modules:
        specification = importlib.util.spec_from_file_location(key, path)
        module = importlib.util.module_from_spec(specification)
        sys.modules[key] = module
        specification.loader.exec_module(module)
    return getattr(sys.modules[key], name)


def _worker(rank: int, world_size: int, pipe: Any, search_path: list[str]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:] = search_path
    import torch

    torch.set_num_threads(1)
    import lightning.pytorch  # noqa: F401

    while (job := pipe.recv()) is not None:
        port, folder, path, name, args = job
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(rank),
            GLOBAL_RANK=str(rank),
            RANK=str(rank),
            NODE_RANK="0",
        )
        os.chdir(folder)
        try:
            pipe.send((True, _load(path, name)(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


class RankPool:
    """See the module.

    Args:
        world_size: Number of processes.
        timeout: Seconds that a rank may take for a job.
    """

    def __init__(self, world_size: int, timeout: float = 120.0) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self._workers: list[tuple[Any, Any]] = []

    def _start(self) -> None:
        context = mp.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world_size, theirs, list(sys.path))
            process = context.Process(target=_worker, args=arguments, daemon=True)
            process.start()
            self._workers.append((process, ours))

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results of `function(*args)` on every rank; raises if one fails or hangs."""
        if not self._workers:
            self._start()
        path = str(Path(function.__code__.co_filename).resolve())
        job = (_free_port(), os.getcwd(), path, function.__name__, args)
        for _, pipe in self._workers:
            pipe.send(job)
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + self.timeout
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        while waiting and all(good for good, _ in answers.values()):
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close(kill=True)
                late = sorted(waiting.values())
                raise TimeoutError(f"ranks {late} gave no answer within {self.timeout} s")
            for pipe in ready:
                answers[waiting.pop(pipe)] = pipe.recv()
        failed = [f"rank {r}:\n{text}" for r, (good, text) in answers.items() if not good]
        if failed:
            # a rank that failed alone leaves the others in a half-open group
            self.close(kill=True)
            raise AssertionError("\n".join(failed))
        return [answers[rank][1] for rank in range(self.world_size)]

    def close(self, kill: bool = False) -> None:
        """End the processes."""
        for process, pipe in self._workers:
            if kill:
                process.kill()
            else:
                pipe.send(None)
            process.join(10)
        self._workers = []
