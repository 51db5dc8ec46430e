"""Analytic variances and the time-shift sampler."""

import pytest
import torch

from lightning_modules.components.diffusion import (
    AncestralSampler,
    GaussianDiffusion,
    counter_normal,
    run_sampler,
)
from lightning_modules.epsilon_scaling import analytic_log_variances, noise_energy, time_shift


def test_analytic_variances_are_exact_for_gaussian_data(gaussian_model, draw):
    """With them even ten ancestral steps give the data's variance; small and large miss it."""
    diffusion = GaussianDiffusion.from_name("linear", respacing="10")
    signal = diffusion.tables["alphas_cumprod"]
    x0, noise = draw(0, (512, 1, 8, 8)) * 0.5, draw(1, (512, 1, 8, 8))
    energy = noise_energy(
        gaussian_model, diffusion, [(x0[:256], noise[:256]), (x0[256:], noise[256:])]
    )
    exact = (1 - signal) / (signal * 0.25 + 1 - signal)
    torch.testing.assert_close(energy, exact, rtol=0.02, atol=0)
    errors = {}
    for name, log_variances in (
        ("analytic", analytic_log_variances(diffusion, exact)),
        ("small", None),
    ):
        sampler = AncestralSampler(diffusion, clip=None, log_variances=log_variances)
        samples = run_sampler(
            gaussian_model,
            sampler,
            draw(2, (4096, 1, 8, 8)),
            lambda step: draw(50 + step, (4096, 1, 8, 8)),
        )
        errors[name] = abs(float(samples.double().var()) - 0.25)
    assert errors["analytic"] < 0.01
    assert errors["small"] > 0.05
    with pytest.raises(ValueError, match="at least one batch"):
        noise_energy(gaussian_model, diffusion, [])


def test_time_shift_follows_the_samples_spread():
    diffusion = GaussianDiffusion.from_name("linear", respacing="10")
    noise = 1 - diffusion.training_signal
    index = 4
    planned = int(diffusion.timestep_map[index])
    unit = counter_normal(1, torch.arange(2), (1, 64, 64))
    unit = unit / unit.flatten(1).std(1)[:, None, None, None]
    wanted = torch.tensor([planned - 30, planned + 20])
    x = unit * noise[wanted].sqrt().float()[:, None, None, None]
    assert time_shift(diffusion, 100)(index, x).tolist() == wanted.tolist()
    narrow = time_shift(diffusion, 20)(index, x)
    assert narrow.tolist() == [planned - 10, planned + 10]
    assert time_shift(diffusion, 0)(index, x).tolist() == [planned, planned]
    top = time_shift(diffusion, 100)(9, x)
    assert top.tolist() == [999, 999]
    with pytest.raises(ValueError, match="window"):
        time_shift(diffusion, -1)
