"""Schedules and respacing against reference values."""

import numpy as np
import pytest
import torch

from lightning_modules.components.diffusion import (
    VPSDE,
    GaussianDiffusion,
    karras_sigmas,
    named_betas,
    scaled_linear_betas,
    spaced_timesteps,
    zero_terminal_snr,
)

TABLES = [
    "alphas_cumprod",
    "posterior_variance",
    "posterior_log_variance_clipped",
    "posterior_mean_coef1",
    "posterior_mean_coef2",
    "sqrt_recip_alphas_cumprod",
    "sqrt_recipm1_alphas_cumprod",
]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_tables(reference, schedule):
    want = reference("schedules.npz")
    diffusion = GaussianDiffusion.from_name(schedule)
    index = want[f"{schedule}/index"]
    np.testing.assert_allclose(
        diffusion.betas.numpy()[index], want[f"{schedule}/betas"], rtol=1e-12
    )
    for table in TABLES:
        got = diffusion.tables[table].numpy()[index]
        np.testing.assert_allclose(got, want[f"{schedule}/{table}"], rtol=1e-12, atol=0)
    np.testing.assert_allclose(diffusion.betas.sum(), want[f"{schedule}/sum_betas"], rtol=1e-12)
    np.testing.assert_allclose(
        diffusion.tables["posterior_variance"].sum(),
        want[f"{schedule}/sum_posterior_variance"],
        rtol=1e-12,
    )


def test_respacing(reference):
    want = reference("schedules.npz")
    names = [name for name in want.files if name.startswith("respace/")]
    assert len(names) == 8
    for name in names:
        total, spec = name.split("/")[1].split("_")
        assert spaced_timesteps(int(total), spec) == want[name].tolist()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_respaced_tables(reference, schedule):
    want = reference("schedules.npz")
    diffusion = GaussianDiffusion.from_name(schedule, respacing="20")
    prefix = f"respace20/{schedule}"
    assert diffusion.timestep_map.tolist() == want[f"{prefix}/timestep_map"].tolist()
    np.testing.assert_allclose(diffusion.betas, want[f"{prefix}/betas"], rtol=1e-12)
    for table in TABLES[:2] + TABLES[3:5]:
        np.testing.assert_allclose(
            diffusion.tables[table], want[f"{prefix}/{table}"], rtol=1e-12, atol=0
        )


def test_respacing_twice_keeps_original_indices():
    once = GaussianDiffusion.from_name("linear", respacing="100")
    twice = once.respace("10")
    assert set(twice.timestep_map.tolist()) <= set(once.timestep_map.tolist())
    np.testing.assert_allclose(
        twice.tables["alphas_cumprod"],
        GaussianDiffusion.from_name("linear").tables["alphas_cumprod"][twice.timestep_map],
        rtol=1e-12,
    )
    assert twice.original_steps == 1000


@pytest.mark.parametrize(
    ("total", "spacing", "message"),
    [
        (10, "11", "choose 1 to 10"),
        (1000, "ddim300", "no whole stride takes 300"),
        (1000, "ddimx", "whole number"),
        (1000, "some", "'10,15,20'"),
        (10, "0", "choose 1 to 10"),
    ],
)
def test_impossible_respacing(total, spacing, message):
    with pytest.raises(ValueError, match=message):
        spaced_timesteps(total, spacing)


def test_karras_grid():
    sigmas = karras_sigmas(18)
    assert sigmas.shape == (19,)
    assert sigmas.dtype == torch.float64
    assert sigmas[0] == pytest.approx(80)
    assert sigmas[17] == pytest.approx(0.002)
    assert sigmas[18] == 0
    assert (sigmas.diff() < 0).all()


def test_vp_sde_marginals():
    sde = VPSDE()
    t = torch.tensor([0.02, 0.5, 1.0])
    torch.testing.assert_close(
        sde.alpha(t), torch.tensor([0.997014, 0.281183, 0.00657159]), rtol=2e-6, atol=0
    )
    assert float(sde.sigma(t)[0]) == pytest.approx(0.0772150, rel=2e-6)
    tiny = torch.tensor([1e-3])
    exact = float(sde.sigma(tiny.double()))
    assert float(sde.sigma(tiny)) == pytest.approx(exact, rel=1e-6)
    half = (sde.alpha(t) / sde.sigma(t)).log()
    torch.testing.assert_close(sde.time(half), t, rtol=1e-4, atol=1e-5)


def test_stable_diffusion_schedules_equal_diffusers():
    diffusers = pytest.importorskip("diffusers")
    for rescale in (False, True):
        other = diffusers.DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            rescale_betas_zero_snr=rescale,
        )
        betas = scaled_linear_betas()
        betas = zero_terminal_snr(betas) if rescale else betas
        np.testing.assert_allclose(betas, other.betas.double(), rtol=2e-4, atol=1e-7)


def test_unknown_schedule():
    with pytest.raises(ValueError, match="cosine"):
        named_betas("cosin")
