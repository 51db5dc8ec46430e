"""The reader of offline runs reads what W&B writes, also over the borders of blocks."""

import struct
from pathlib import Path

import pytest
from offline_wandb import read_offline_run, read_payloads


def test_a_run(tmp_path: Path) -> None:
    import wandb

    long_text = "x" * 100_000  # longer than three blocks
    run = wandb.init(
        mode="offline",
        dir=tmp_path,
        project="reader",
        config={"model": {"width": 8, "layers": [1, 2]}, "text": long_text},
    )
    for step in range(300):
        run.log({"train/loss": 1.0 / (step + 1), "nested": {"value": step}})
    run.summary["best"] = 0.5
    run_id = run.id
    wandb.finish(exit_code=3)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    read = read_offline_run(folder)
    assert (read.run_id, read.project, read.exit_code) == (run_id, "reader", 3)
    assert read.config["model"] == {"width": 8, "layers": [1, 2]}
    assert read.config["text"] == long_text
    assert read.column("train/loss") == [1.0 / (step + 1) for step in range(300)]
    assert read.summary["best"] == 0.5
    # The file of a killed run is cut off anywhere.
    (file,) = folder.glob("*.wandb")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) - 4000])
    cut = read_offline_run(file, wait=0)
    assert cut.exit_code is None
    assert cut.column("train/loss") == read.column("train/loss")[: len(cut.history)]


def _framed(payload: bytes, kind: int) -> bytes:
    return struct.pack("<IHB", 0, len(payload), kind) + payload


def test_blocks() -> None:
    """The last 6 bytes of a block stay empty; fragments are joined."""
    block = 32_768
    first = b"a" * (block - 7 - 7 - 6)
    data = b":W&B\0\0\0" + _framed(first, 1) + b"\0" * 6
    assert len(data) == block
    second = b"b" * (block - 7)
    data += _framed(second, 2) + _framed(b"c", 4) + _framed(b"", 1)
    assert list(read_payloads(data)) == [first, second + b"c", b""]
    assert list(read_payloads(data[: block + 100])) == [first]


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \.wandb file"):
        read_offline_run(tmp_path)
    (tmp_path / "a.wandb").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"does not start as a \.wandb file"):
        read_offline_run(tmp_path)
    (tmp_path / "b.wandb").write_bytes(b"")
    with pytest.raises(ValueError, match=r"several \.wandb files"):
        read_offline_run(tmp_path)
