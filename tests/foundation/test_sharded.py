"""FSDP2 on two CPU processes equals one process, through the command line."""

import json
from pathlib import Path

import pytest
import torch
from toy import ShardedToy

from lightning_modules.cli import run_cli

PENALTY = {"class_path": "callbacks.Regularization", "init_args": {"kind": "l1", "weight": 0.01}}


def fit(folder: str, batch_size: int, *words: str) -> float:
    cli = run_cli(
        [
            "fit",
            "--model=toy.ShardedToy",
            "--data=toy.ToyData",
            f"--data.init_args.batch_size={batch_size}",
            # 33 validation rows: 17 and 16 on two ranks, so that one would have a batch fewer
            "--data.init_args.rows=110",
            f"--trainer.callbacks+={json.dumps(PENALTY)}",
            "--trainer.max_epochs=2",
            "--trainer.accelerator=cpu",
            "--trainer.logger=false",
            "--trainer.enable_progress_bar=false",
            "--trainer.enable_model_summary=false",
            f"--trainer.default_root_dir={folder}",
            *words,
        ]
    )
    return float(cli.trainer.callback_metrics["val/loss"])


def fit_sharded(folder: str, batch_size: int, *words: str) -> float:
    return fit(
        folder,
        batch_size,
        "--trainer=trainer/fsdp2.yaml",
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        "--trainer.strategy.init_args.data_parallel_size=2",
        *words,
    )


def test_sharded_training_equals_one_process_and_its_file_loads_in_one(
    tmp_path: Path, ranks
) -> None:
    expected = fit(str(tmp_path / "one"), 8)
    values = ranks(fit_sharded, str(tmp_path / "two"), 4)
    assert values == pytest.approx([expected] * 2, rel=1e-5)
    one, two = (
        ShardedToy.load_from_checkpoint(tmp_path / run / "checkpoints" / "last.ckpt")
        for run in ("one", "two")
    )
    for name, value in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], value, rtol=0, atol=1e-6)


def test_sharded_run_resumes_from_its_file(tmp_path: Path, ranks) -> None:
    whole = ranks(fit_sharded, str(tmp_path / "whole"), 4)
    ranks(fit_sharded, str(tmp_path / "half"), 4, "--trainer.max_epochs=1")
    last = tmp_path / "half" / "checkpoints" / "last.ckpt"
    resumed = ranks(fit_sharded, str(tmp_path / "rest"), 4, f"--ckpt_path={last}")
    assert resumed == whole
