"""Two processes equal one: loss-aware timesteps, label dropout, sharded U-Net, test metrics."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_modules import EpsilonScaling

SPECIFICATION = importlib.util.spec_from_file_location(
    "epsilon_scaling_rank_jobs", Path(__file__).parent / "rank_jobs.py"
)
jobs = importlib.util.module_from_spec(SPECIFICATION)
sys.modules[SPECIFICATION.name] = jobs
SPECIFICATION.loader.exec_module(jobs)


def assert_equal(first: dict, second: dict, tolerance: float) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_allclose(value, second[name], rtol=0, atol=tolerance, err_msg=name)


def test_loss_aware_training(ranks, tmp_path):
    """Noise, timesteps, dropped labels and the loss history agree for any number of ranks."""
    one = jobs.fit("mlp", "auto", 1, 32, str(tmp_path))
    first, second = ranks(jobs.fit, "mlp", "ddp", 2, 16, str(tmp_path))
    assert int(one["timesteps.counts"].sum()) == 12 * 32
    assert (one["timesteps.counts"] >= 10).all()
    assert_equal(first, second, 0)
    assert_equal(one, first, 1e-6)


def test_sharded_unet(ranks, tmp_path):
    """FSDP2 equals one process, and its checkpoint is an ordinary file."""
    one = jobs.fit("unet", "auto", 1, 8, str(tmp_path))
    first, _ = ranks(jobs.fit, "unet", "fsdp2", 2, 4, str(tmp_path))
    assert_equal(one, first, 2e-6)
    loaded = EpsilonScaling.load_from_checkpoint(tmp_path / "fsdp2.ckpt", map_location="cpu")
    assert loaded.image_shape == [1, 8, 8]
    weight = loaded.state_dict()["denoiser.out.2.weight"]
    np.testing.assert_array_equal(weight, first["denoiser.out.2.weight"])
    assert torch.isfinite(loaded.sample(torch.arange(2))).all()


def test_exposure_bias_is_the_mean_over_the_images_of_all_ranks(ranks, tmp_path):
    logged, own, counts = zip(*ranks(jobs.exposure_bias, str(tmp_path)), strict=True)
    assert sorted(counts) == [71, 72]
    np.testing.assert_array_equal(*logged)
    assert np.abs(own[0] - own[1]).max() > 1e-6
    np.testing.assert_allclose(logged[0], np.average(own, axis=0, weights=counts), rtol=1e-5)


def test_test_metrics(ranks, tmp_path):
    one = jobs.quality_values(1, 100, str(tmp_path))
    first, second = ranks(jobs.quality_values, 2, 50, str(tmp_path))
    assert "test/fd_pixels@1.02" in one
    for name, value in one.items():
        assert first[name] == pytest.approx(value, rel=1e-4, abs=1e-5)
        assert second[name] == pytest.approx(first[name], rel=1e-9)
