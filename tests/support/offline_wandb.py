"""Reader of the file that an offline W&B run writes; W&B itself no longer ships one."""

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FILE_HEADER = 7
_BLOCK = 32_768
_RECORD_HEADER = struct.Struct("<IHB")  # checksum, length, type
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    """What a run reported.

    Attributes:
        run_id: W&B's id of the run.
        project: its project.
        config: hyperparameters, as nested as they were logged.
        history: one dictionary per logged row, in the order logged.
        summary: last value of every key.
        exit_code: code of the process; ``None`` if the run was cut off.
    """

    run_id: str = ""
    project: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    def column(self, key: str) -> list[Any]:
        """All logged values of one key."""
        return [row[key] for row in self.history if key in row]


def read_payloads(data: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log that follows W&B's file header.

    The log is made of blocks of 32 KiB. A record never starts in the last 6 bytes of a block, and a
    longer one is split over blocks into a first, middle and last fragment. A fragment that was cut
    off by a kill ends the file.
    """
    position, fragments = _FILE_HEADER, b""
    while position < len(data):
        left = _BLOCK - position % _BLOCK
        if left < _RECORD_HEADER.size:
            position += left
            continue
        if position + _RECORD_HEADER.size > len(data):
            return
        _, length, kind = _RECORD_HEADER.unpack_from(data, position)
        position += _RECORD_HEADER.size
        piece = data[position : position + length]
        if len(piece) < length or kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            return
        position += length
        fragments = piece if kind in (_FULL, _FIRST) else fragments + piece
        if kind in (_FULL, _LAST):
            yield fragments


def _update(target: dict[str, Any], items: Any) -> None:
    """Set ``key`` or the path ``nested_key`` of every item to its JSON value."""
    for item in items:
        *path, leaf = list(item.nested_key) or [item.key]
        place = target
        for part in path:
            place = place.setdefault(part, {})
        place[leaf] = json.loads(item.value_json)


def read_offline_run(path: str | Path, wait: float = 10.0) -> OfflineRun:
    """Read ``run-<id>.wandb`` or the ``offline-run-…`` folder that holds it.

    Args:
        path: file or folder.
        wait: seconds to wait for the end of the run to appear: W&B's own process still writes for
            some hundredths of a second after ``wandb.finish`` has returned.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the folder holds several, or the file is not one of W&B's.
    """
    path = Path(path)
    if path.is_dir():
        found = sorted(path.glob("*.wandb"))
        if not found:
            raise FileNotFoundError(f"no .wandb file in {path}")
        if len(found) > 1:
            raise ValueError(f"several .wandb files in {path}: {', '.join(f.name for f in found)}")
        path = found[0]
    if path.read_bytes()[:4] != b":W&B":
        raise ValueError(f"{path} does not start as a .wandb file does")
    deadline = time.monotonic() + wait
    while (run := _parse(path.read_bytes())).exit_code is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return run


def _parse(data: bytes) -> OfflineRun:
    from wandb.proto.wandb_internal_pb2 import Record

    run = OfflineRun()
    for payload in read_payloads(data):
        record = Record.FromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.run_id, run.project = record.run.run_id, record.run.project
            _update(run.config, record.run.config.update)
        elif kind == "config":
            _update(run.config, record.config.update)
        elif kind == "summary":
            _update(run.summary, record.summary.update)
        elif kind == "history":
            row: dict[str, Any] = {}
            _update(row, record.history.item)
            run.history.append(row)
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run
