"""Exposure bias of real samplers against the closed form."""

import numpy as np
import pytest
import torch

from lightning_modules.components.diffusion import AncestralSampler, DDIMSampler, GaussianDiffusion
from lightning_modules.epsilon_scaling import (
    EpsilonSchedule,
    PositionNoise,
    gaussian_trace,
    matched_schedule,
    measure_exposure_bias,
)

COUNT = 4096


@pytest.fixture(scope="module")
def measured(gaussian_model, draw):
    diffusion = GaussianDiffusion.from_name("linear", respacing="20")
    x0 = draw(7, (COUNT, 1, 8, 8)) * 0.5
    noise = PositionNoise(3, torch.arange(COUNT), (1, 8, 8))

    def measure(scale, kind="ancestral"):
        sampler = (
            AncestralSampler(diffusion, clip=None)
            if kind == "ancestral"
            else DDIMSampler(diffusion, clip=None)
        )
        scales = EpsilonSchedule(scale).scales_or_none(20)
        return measure_exposure_bias(gaussian_model, sampler, x0, noise, scales)

    return diffusion, measure


@pytest.mark.parametrize("scale", [1.0, 1.05])
def test_delta_follows_the_closed_form(measured, scale):
    diffusion, measure = measured
    got = measure(scale)
    want = gaussian_trace(diffusion, 0.25, EpsilonSchedule(scale).scales(20))
    # the recursion counts from the first step taken, the curves from the clean end
    np.testing.assert_allclose(got.delta.flip(0), want.delta, atol=2e-3)
    np.testing.assert_allclose(
        got.marginal_gap.flip(0),
        want.variance[1:] - (diffusion.tables["alphas_cumprod_prev"].flip(0).numpy() * -0.75 + 1),
        atol=8e-3,
    )


def test_scaling_closes_the_marginal_gap(measured):
    _, measure = measured
    plain, scaled = measure(1.0), measure(1.1)
    assert plain.marginal_gap[0] < -0.05
    assert abs(scaled.marginal_gap[0]) < 0.6 * abs(plain.marginal_gap[0])


def test_single_steps_are_nearly_free_of_bias(measured):
    """From a true x_(t+1) one step cannot drift as a whole run does."""
    _, measure = measured
    got = measure(1.0, "ddim")
    assert got.single_step_delta[5:].max() < 0.05
    assert got.single_step_delta.shape == got.delta.shape == (20,)


def test_norm_curves(measured):
    """At true inputs the exact model's noise has E eps^2 = (1 - abar) / (abar s^2 + 1 - abar)."""
    diffusion, measure = measured
    got = measure(1.0, "ddim")
    signal = diffusion.tables["alphas_cumprod"]
    spread = ((1 - signal) / (signal * 0.25 + 1 - signal)).sqrt()
    np.testing.assert_allclose(got.training_norm / 8, spread, rtol=0.01)
    assert got.noise_norm == pytest.approx(8, rel=0.01)
    matched = matched_schedule(got).scales(20)
    torch.testing.assert_close(matched, (got.sampling_norm / got.training_norm).clamp(0.9, 1.2))
