"""The closed-form local step and the sum of the uploads as a compiled kernel for the processor.

The step in plain PyTorch reads and writes a block of rows about fifteen times. The kernel in
``assets/local_step.cpp`` needs two passes, and one more each for the upload and for putting the
personal rows back. It is compiled once per process, type and width, in about half a second, by the
machine's C++ compiler.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor

_SOURCE = Path(__file__).parent / "assets" / "local_step.cpp"
_TYPES = {torch.float32: "float", torch.float64: "double"}


class NativeStep:
    """The kernel's passes over the rows of a block.

    Args:
        library: The compiled kernel.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        self._score, self._update = library.score_rows, library.update_rows
        self._score.argtypes = [integer] * 2 + [pointer] * 7 + [real] * 3 + [pointer] * 2
        self._update.argtypes = [integer] * 2 + [pointer] * 7 + [real] * 7 + [pointer]
        self._collect = library.collect_rows
        self._collect.argtypes = [integer] * 2 + [pointer] * 6 + [real] + [pointer] * 2
        self._store = library.store_rows
        self._store.argtypes = [integer] * 2 + [pointer] * 5 + [integer, pointer]
        for function in (self._score, self._update, self._collect, self._store):
            function.restype = None

    def score(
        self,
        count: Tensor,
        step: Tensor,
        tables: tuple[Tensor, Tensor],
        vector: Tensor,
        bias: Tensor,
        scale: Tensor,
        weights: tuple[float, float, float],
        logits: Tensor,
        penalty: Tensor,
    ) -> None:
        """Fill ``logits`` ``(clients, rows)`` and ``penalty`` ``(clients,)``.

        Args:
            count: Rows of every client ``(clients,)`` int64.
            step: Relative step size, 0 for a client that has stopped ``(clients,)``.
            tables: ``D`` and ``C`` at the rows ``(clients, rows, width)``.
            vector: ``(clients, width)``.
            bias: ``(clients,)``.
            scale: Weight of every row in the regularisers ``(clients, rows)``.
            weights: Of independence, l1 and l2.
            logits: Written where a row exists and its client is active.
            penalty: Written where a client is active.
        """
        inputs = count, step, *tables, vector, bias, scale
        self._score(*scale.shape, *_pointers(*inputs), *weights, *_pointers(logits, penalty))

    def update(
        self,
        count: Tensor,
        step: Tensor,
        tables: tuple[Tensor, Tensor],
        vector: Tensor,
        slope: Tensor,
        scale: Tensor,
        rates: tuple[float, float],
        decays: tuple[float, float],
        weights: tuple[float, float, float],
        vector_gradient: Tensor,
    ) -> None:
        """Step both tables in place and fill ``vector_gradient`` ``(clients, width)``.

        Args:
            count: As in `score`.
            step: As in `score`.
            tables: As in `score`.
            vector: As in `score`.
            slope: Derivative of the loss by the logits ``(clients, rows)``.
            scale: As in `score`.
            rates: Step sizes of ``D`` and ``C``.
            decays: Weight decay of ``D`` and ``C``.
            weights: Of independence, l1 and l2.
            vector_gradient: Written where a client is active.
        """
        inputs = count, step, *tables, vector, slope, scale
        self._update(
            *scale.shape,
            *_pointers(*inputs),
            *rates,
            *decays,
            *weights,
            vector_gradient.data_ptr(),
        )

    def collect(
        self,
        count: Tensor,
        item: Tensor,
        start: Tensor,
        final: Tensor,
        decay: Tensor,
        weight: Tensor,
        threshold: float,
        total: Tensor,
    ) -> Tensor:
        """Add the weighted changes of the touched rows to ``total`` ``(items, width)``, float64.

        Args:
            count: Rows of every client ``(clients,)`` int64.
            item: ``(clients, rows)`` int64.
            start: ``C`` at the rows ``(clients, rows, width)``.
            final: ``C_i`` at the rows.
            decay: What an untouched entry was multiplied by ``(clients,)``.
            weight: Of every upload ``(clients,)`` float64.
            threshold: Entries up to this size count as zero.
            total: Added to in place.

        Returns:
            Non-zero entries at the rows, less those of an untouched copy ``(clients,)`` int64.
        """
        gained = torch.empty_like(count)
        inputs = count, item, start, final, decay, weight.contiguous()
        self._collect(*item.shape, *_pointers(*inputs), threshold, *_pointers(total, gained))
        return gained

    def store(
        self,
        count: Tensor,
        item: Tensor,
        client: Tensor,
        final: Tensor,
        decay: Tensor,
        tables: Tensor,
    ) -> None:
        """Shrink the whole ``tables[client]`` by ``decay``, then set their touched rows.

        Args:
            count: Rows of every client ``(clients,)`` int64.
            item: ``(clients, rows)`` int64.
            client: Position of every client in ``tables`` ``(clients,)`` int64.
            final: ``(clients, rows, width)``.
            decay: ``(clients,)``.
            tables: ``(all clients, items, width)``, changed in place.
        """
        inputs = count, item, client, final, decay
        self._store(*item.shape, *_pointers(*inputs), tables.shape[1], tables.data_ptr())


def _pointers(*tensors: Tensor) -> list[int]:
    return [x.data_ptr() for x in tensors]


@functools.cache
def native_step(dtype: torch.dtype, width: int) -> NativeStep | None:
    """Compile the kernel; ``None`` with one warning where that is not possible."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    reason = "no C++ compiler found (set CXX)"
    if compiler and dtype in _TYPES:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "local_step.so"
            options = ["-std=c++17", "-O3", "-march=native", "-fopenmp-simd", "-shared", "-fPIC"]
            macros = [f"-DREAL={_TYPES[dtype]}", f"-DWIDTH={width}"]
            command = [*compiler.split(), *options, *macros, str(_SOURCE), "-o", str(target)]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True)
                # The loaded library outlives its file.
                return NativeStep(ctypes.CDLL(str(target)))
            except (OSError, subprocess.CalledProcessError) as error:
                reason = (getattr(error, "stderr", None) or str(error)).strip().split("\n")[0]
    elif compiler:
        reason = f"there is no kernel for {dtype}"
    warnings.warn(f"compile=True: {reason}; continuing without the kernel", stacklevel=2)
    return None
