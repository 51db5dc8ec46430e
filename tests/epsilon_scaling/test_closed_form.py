"""Gaussian data: reference variances, the published directions of the effect, Monte Carlo."""

import numpy as np
import pytest
import torch

from lightning_modules.components.diffusion import (
    AncestralSampler,
    DDIMSampler,
    ExactScore,
    GaussianDiffusion,
    run_sampler,
)
from lightning_modules.epsilon_scaling import EpsilonSchedule, gaussian_trace
from lightning_modules.epsilon_scaling.closed_form import single_step_variance

S2 = 0.25


def schedule_of(name: str) -> EpsilonSchedule:
    if name == "1.0":
        return EpsilonSchedule()
    if name.startswith("u"):
        return EpsilonSchedule(float(name[1:]))
    slope, offset = name[1:].split("_b")
    return EpsilonSchedule(float(offset), float(slope))


def test_reference(reference):
    want, compared = reference("gaussian.npz"), 0
    for key in want.files:
        prefix, field = key.rsplit("/", 1)
        if field != "var":
            continue
        variance, schedule, mode, steps, scale = prefix.split("/")
        kind, size = mode.split("_")
        diffusion = GaussianDiffusion.from_name(schedule, respacing=steps, variance=f"fixed_{size}")
        got = gaussian_trace(
            diffusion,
            float(variance.removeprefix("s2_")),
            schedule_of(scale).scales(int(steps)),
            "ddim" if kind == "ddim" else "ancestral",
        )
        fields = zip(("var", "residual_var", "delta", "frechet1d"), got, strict=True)
        for name, value in fields:
            wanted = want[f"{prefix}/{name}"]
            scale_of = max(1.0, float(np.abs(wanted).max()))
            np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-12 * scale_of)
            compared += 1
    assert compared == 432


def relative_frechet(steps, scale, kind="ddim", direction=True, schedule="linear", size="small"):
    diffusion = GaussianDiffusion.from_name(
        schedule, respacing=str(steps), variance=f"fixed_{size}"
    )
    scales = EpsilonSchedule(scale).scales(steps)
    return gaussian_trace(diffusion, S2, scales, kind, direction).frechet / S2


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ((20, 1.0), 1.93e-2),
        ((20, 1.017), 9.9e-4),
        ((50, 1.0), 3.2e-3),
        ((50, 1.01), 1.4e-5),
        ((100, 1.0), 8.0e-4),
        ((100, 1.005), 1.1e-6),
        ((50, 1.0, "ancestral"), 1.29e-2),
        ((50, 1.10, "ancestral"), 2.4e-6),
        ((20, 1.0, "ancestral", True, "linear", "large"), 8.6e-3),
        ((20, 1.017, "ancestral", True, "linear", "large"), 1.2e-2),
        ((20, 1.005, "ddim", False), 1.3e-3),
        ((20, 1.017, "ddim", False), 6.4e-2),
        ((50, 1.002, "ddim", False), 1.3e-3),
        ((50, 1.005, "ddim", False), 3.6e-2),
    ],
)
def test_distances(arguments, want):
    assert relative_frechet(*arguments) == pytest.approx(want, rel=0.06)


def test_best_scale_falls_towards_one_with_more_steps():
    grid = np.arange(1.0, 1.06, 0.001)
    best = [min(grid, key=lambda s, n=n: relative_frechet(n, s)) for n in (10, 20, 50, 100)]
    assert best == sorted(best, reverse=True)
    assert best[-1] > 1.0


def test_large_variance_gets_worse():
    """Scaling corrects samples that spread too little; here they spread too much."""
    assert relative_frechet(20, 1.017, "ancestral", size="large") > relative_frechet(
        20, 1.0, "ancestral", size="large"
    )


def test_variants_of_ddim_need_scales_of_their_own():
    grid = np.arange(1.0, 1.04, 0.0005)
    adm, ldm = (min(grid, key=lambda s, d=d: relative_frechet(20, s, "ddim", d)) for d in (1, 0))
    assert 3 <= (adm - 1) / (ldm - 1) <= 5


def test_cosine_without_clipping_explodes_and_skipping_saves_it(draw):
    """abar of the last step is 2e-9; clipped samples stay finite and in range."""
    assert relative_frechet(20, 1.0, schedule="cosine") == pytest.approx(6e-3, rel=0.2)
    assert relative_frechet(20, 1.005, schedule="cosine") == pytest.approx(60, rel=0.1)
    diffusion = GaussianDiffusion.from_name("cosine", respacing="20")
    skipped = EpsilonSchedule(1.005, skip_first=1).scales(20)
    assert gaussian_trace(diffusion, S2, skipped, "ddim").frechet / S2 < 6e-3
    model = ExactScore(torch.zeros(1, 1, 2, 2), 0.5, GaussianDiffusion.from_name("cosine"))
    x = draw(0, (64, 1, 2, 2))
    clipped = run_sampler(
        model, DDIMSampler(diffusion, clip=1.0), x, scales=EpsilonSchedule(1.005).scales(20)
    )
    assert clipped.abs().max() <= 1.5


@pytest.mark.parametrize("kind", ["ancestral", "ddim", "ldm"])
def test_samplers_follow_the_closed_form(gaussian_model, draw, kind):
    """Variance of real samples, 64 x 4096 of them, against the recursion."""
    diffusion = GaussianDiffusion.from_name("linear", respacing="10")
    scales = EpsilonSchedule(1.01, 0.001).scales(10)
    if kind == "ancestral":
        sampler = AncestralSampler(diffusion, clip=None)
    else:
        sampler = DDIMSampler(diffusion, clip=None, scale_direction=kind == "ddim")
    variances = []
    run_sampler(
        gaussian_model,
        sampler,
        draw(0, (4096, 1, 8, 8)),
        lambda step: draw(100 + step, (4096, 1, 8, 8)),
        scales,
        observe=lambda index, step: variances.append(float(step.x.double().var())),
    )
    want = gaussian_trace(
        diffusion, S2, scales, "ancestral" if kind == "ancestral" else "ddim", kind != "ldm"
    )
    np.testing.assert_allclose(variances, want.variance[1:], rtol=0.015)


def test_excess_variance_of_one_step(draw):
    """The paper's account: an error e of x_0 adds (c1 e)^2 to the variance."""
    diffusion = GaussianDiffusion.from_name("linear", respacing="20")
    index, error, shape = 5, 0.3, (4096, 1, 8, 8)
    x0, noise = draw(0, shape) * 0.5, draw(1, shape)
    x = diffusion.q_sample(x0, index + 1, noise)
    wrong = x0 + error * draw(2, shape)
    step = AncestralSampler(diffusion, clip=None).step(
        diffusion.epsilon_from_x0(x, index + 1, wrong), index + 1, x, draw(3, shape)
    )
    signal = diffusion.tables["alphas_cumprod"][index].item()
    spread = float((step.x - signal**0.5 * x0).double().var())
    want = single_step_variance(diffusion, index, error)
    assert spread == pytest.approx(want, rel=0.01)
    assert want > 1 - signal


def test_bad_arguments():
    diffusion = GaussianDiffusion.from_name("linear", respacing="10")
    with pytest.raises(ValueError, match="kind"):
        gaussian_trace(diffusion, S2, kind="heun")
    learned = GaussianDiffusion.from_name("linear", respacing="10", variance="learned_range")
    with pytest.raises(ValueError, match="fixed_small"):
        gaussian_trace(learned, S2)
