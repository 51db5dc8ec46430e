"""Counter-based noise: distribution, independence and the same numbers for any split."""

import numpy as np
import torch
from scipy import stats

from lightning_modules.components.diffusion import counter_normal, counter_uniform
from lightning_modules.components.randomness import seed_from


def test_normal_moments_and_distribution():
    drawn = counter_normal(seed_from(0, 1, "noise"), torch.arange(512), (3, 8, 9)).flatten()
    assert drawn.dtype == torch.float32
    assert torch.isfinite(drawn).all()
    assert stats.kstest(drawn.numpy(), "norm").pvalue > 1e-3
    assert abs(float(drawn.mean())) < 0.01
    assert abs(float(drawn.std()) - 1) < 0.01
    assert abs(float((drawn**4).mean()) - 3) < 0.1


def test_no_correlation_between_positions_keys_or_pixels():
    first = counter_normal(seed_from(0, 1), torch.arange(64), (256,))
    other = counter_normal(seed_from(0, 2), torch.arange(64), (256,))
    both = torch.cat([first, other]).numpy()
    correlation = np.corrcoef(both) - np.eye(128)
    assert np.abs(correlation).max() < 0.35
    assert abs(correlation.mean()) < 2e-3
    pixels = np.corrcoef(first.numpy().T) - np.eye(256)
    assert np.abs(pixels).max() < 0.7
    assert abs(pixels.mean()) < 2e-3


def test_same_numbers_for_any_split():
    key = seed_from(7, 3, "noise")
    whole = counter_normal(key, torch.arange(16), (3, 5))
    parts = [counter_normal(key, torch.arange(8) + 8 * rank, (3, 5)) for rank in range(2)]
    assert torch.equal(whole, torch.cat(parts))
    uniform = counter_uniform(key, torch.arange(16))
    assert torch.equal(uniform[8:], counter_uniform(key, torch.arange(8, 16)))


def test_uniform():
    drawn = counter_uniform(seed_from(1), torch.arange(20000))
    assert drawn.dtype == torch.float64
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert stats.kstest(drawn.numpy(), "uniform").pvalue > 1e-3


def test_keys_differ():
    keys = {seed_from(s, i, p) for s in range(20) for i in range(50) for p in ("t", "noise")}
    assert len(keys) == 2000
    assert all(0 <= key < 2**63 for key in keys)
