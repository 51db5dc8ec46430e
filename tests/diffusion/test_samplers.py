"""Ancestral, DDIM and EDM samplers: reference trajectories, diffusers, guidance."""

import numpy as np
import pytest
import torch

from lightning_modules.components.diffusion import (
    ADMUNet,
    AncestralSampler,
    DDIMSampler,
    EDMSampler,
    ExactScore,
    GaussianDiffusion,
    as_denoiser,
    classifier_free,
    classifier_gradient,
    karras_sigmas,
    named_betas,
    run_edm_sampler,
    run_sampler,
    zero_terminal_snr,
)


@pytest.fixture(scope="module")
def networks(reference, recipe):
    config = reference("unet.json")["adm_updown_new"]["config"]
    built = {}
    for channels in (3, 6):
        built[channels] = ADMUNet(**(config | {"out_channels": channels}))
        recipe(built[channels])
    return built


CASES = [
    "ddpm20_off",
    "ddpm20_uniform1.017",
    "ddpm20_linear_k0.0025_b1.0",
    "ddpm20_uniform1.017_noclip_linear",
    "ddpm10_fixed_small_1.01",
    "ddpm10_fixed_large_1.01",
    "ddim25_off",
    "ddim25_uniform1.004",
    "ddim25_eta1_uniform1.004",
    "ddpm10_classifier_mean_1.005",
]


@pytest.mark.parametrize("name", CASES)
def test_reference_trajectories(reference, draw, networks, name):
    case, want = reference("trajectories.json")["cases"][name], reference("trajectories.npz")
    variance = case.get("var", "LEARNED_RANGE").lower()
    diffusion = GaussianDiffusion.from_name(
        case.get("sched", "cosine"), respacing=case["resp"], variance=variance
    )
    clip = 1.0 if case.get("clip", True) else None
    if "ddim" in case:
        sampler = DDIMSampler(diffusion, eta=case["ddim"], clip=clip)
    else:
        sampler = AncestralSampler(diffusion, clip=clip)
    scales = torch.as_tensor(case["lam"], dtype=torch.float64).expand(diffusion.steps)
    stream = np.random.RandomState(1904)
    trajectory = []
    run_sampler(
        networks[6 if variance == "learned_range" else 3],
        sampler,
        draw(1903, (2, 3, 8, 8)),
        lambda step: torch.from_numpy(stream.standard_normal((2, 3, 8, 8)).astype(np.float32)),
        scales,
        (lambda x, t: -0.3 * (x - 0.5)) if case.get("cond") else None,
        observe=lambda index, step: trajectory.append(step),
    )
    for place, kept in enumerate(want[f"{name}/keep"]):
        for key, got in (("x", trajectory[kept].x), ("x0", trajectory[kept].x0)):
            wanted = want[f"{name}/{key}"][place]
            scale = 1.0 if clip else max(1.0, np.abs(wanted).max())
            np.testing.assert_allclose(got, wanted, atol=2e-4 * scale, rtol=0)


def mixture(mu, var, weight):
    def denoise(x, sigma):
        total = var + sigma**2
        distance = ((x[:, None] - mu) ** 2).sum(-1)
        logits = weight.log() - 0.5 * distance / total - 0.5 * mu.shape[1] * total.log()
        means = (var[:, None] * x[:, None] + sigma**2 * mu) / total[:, None]
        return (torch.softmax(logits, 1)[..., None] * means).sum(1)

    return denoise


def test_edm_reference(reference):
    cases, want = reference("edm.json"), reference("edm.npz")
    mu, var, weight, latents = (
        torch.from_numpy(want[name]) for name in ("mu", "var", "weight", "latents")
    )
    denoise = mixture(mu, var, weight)
    for name, case in cases.items():
        steps = case["num_steps"]
        sampler = EDMSampler(
            karras_sigmas(steps, case.get("sigma_min", 0.002), case.get("sigma_max", 80.0)),
            solver=case.get("solver", "heun"),
            scale_correction="note" not in case,
            churn=case.get("S_churn", 0),
            churn_min=case.get("S_min", 0),
            churn_max=case.get("S_max", np.inf),
            churn_noise=case.get("S_noise", 1),
        )
        if "nfe" in case:
            assert sampler.evaluations == case["nfe"]
        stream = np.random.RandomState(case.get("noise_seed", 0))
        got = run_edm_sampler(
            denoise,
            sampler,
            latents,
            lambda step, stream=stream: torch.from_numpy(stream.standard_normal((6, 2))),
            torch.full((steps,), case["eps_scaler"], dtype=torch.float64),
        )
        np.testing.assert_allclose(got, want[name], rtol=1e-10, atol=1e-10, err_msg=name)


def test_ancestral_equals_diffusers(networks, draw, monkeypatch):
    diffusers = pytest.importorskip("diffusers")
    from diffusers.schedulers import scheduling_ddpm

    x, scale = draw(9, (2, 3, 8, 8)), 1.017
    for variance in ("learned_range", "fixed_small"):
        diffusion = GaussianDiffusion.from_name("cosine", respacing="20", variance=variance)
        network = networks[6 if variance == "learned_range" else 3]
        scheduler = diffusers.DDPMScheduler(
            trained_betas=GaussianDiffusion.from_name("cosine").betas.numpy(),
            variance_type=variance,
            clip_sample=True,
        )
        scheduler.set_timesteps(timesteps=diffusion.timestep_map.flip(0).tolist())
        noises = [draw(100 + step, x.shape) for step in range(20)]
        ours = run_sampler(
            network,
            AncestralSampler(diffusion),
            x,
            noises.__getitem__,
            torch.full((20,), scale, dtype=torch.float64),
        )
        # Its noise comes from a generator: hand it ours instead.
        stream = iter(noises)
        monkeypatch.setattr(scheduling_ddpm, "randn_tensor", lambda *a, i=stream, **k: next(i))
        theirs = x
        with torch.no_grad():
            for t in scheduler.timesteps:
                output = network(theirs, t.expand(2)).clone()
                output[:, :3] /= scale
                theirs = scheduler.step(output, t, theirs).prev_sample
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def test_ddim_equals_diffusers(networks, draw):
    diffusers = pytest.importorskip("diffusers")
    x = draw(9, (2, 3, 8, 8))
    diffusion = GaussianDiffusion.from_name("linear", respacing="ddim25")
    scheduler = diffusers.DDIMScheduler(
        trained_betas=GaussianDiffusion.from_name("linear").betas.numpy(),
        timestep_spacing="leading",
        steps_offset=0,
        set_alpha_to_one=True,
        clip_sample=True,
    )
    scheduler.set_timesteps(25)
    assert scheduler.timesteps.flip(0).tolist() == diffusion.timestep_map.tolist()
    ours = run_sampler(networks[3], DDIMSampler(diffusion), x, scales=torch.full((25,), 1.004))
    results = []
    for reuse in (True, False):
        theirs = x
        with torch.no_grad():
            for t in scheduler.timesteps:
                output = networks[3](theirs, t.expand(2)) / 1.004
                theirs = scheduler.step(
                    output, t, theirs, use_clipped_model_output=reuse
                ).prev_sample
        results.append((ours - theirs).abs().max())
    assert results[0] < 2e-5
    assert results[1] > 0.05


@pytest.mark.parametrize("prediction", ["epsilon", "v", "sample"])
def test_predictions_give_one_sampler(draw, prediction):
    centres = draw(1, (5, 1, 2, 2))
    base = GaussianDiffusion.from_name("linear", respacing="ddim20")
    exact = ExactScore(centres, 0.3, GaussianDiffusion.from_name("linear"))
    x, scales = draw(2, (8, 1, 2, 2)), torch.full((20,), 1.01)
    want = run_sampler(exact, DDIMSampler(base, clip=None), x, scales=scales)
    other = GaussianDiffusion.from_name("linear", respacing="ddim20", prediction=prediction)
    full = GaussianDiffusion.from_name("linear", prediction=prediction)

    def model(inputs, t):
        return full.from_epsilon(exact(inputs, t), inputs, t)

    got = run_sampler(model, DDIMSampler(other, clip=None), x, scales=scales)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_exact_score_is_the_gradient_of_the_log_density(draw):
    diffusion = GaussianDiffusion.from_name("linear")
    centres = draw(1, (4, 1, 2, 1)).double()
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    exact = ExactScore(centres, 0.4, diffusion, weights, chunk=3)
    x = draw(2, (7, 1, 2, 1)).double().requires_grad_(True)
    t = torch.tensor([0, 10, 100, 300, 500, 800, 999])
    signal = diffusion.tables["alphas_cumprod"][t]
    spread = signal * 0.16 + 1 - signal
    gaps = x.flatten(1)[:, None] - signal.sqrt()[:, None, None] * centres.flatten(1)
    log_density = torch.logsumexp(
        weights.log() - 0.5 * (gaps**2).sum(-1) / spread[:, None] - spread.log()[:, None], 1
    )
    (score,) = torch.autograd.grad(log_density.sum(), x)
    want = -score * (1 - signal).sqrt()[:, None, None, None]
    torch.testing.assert_close(exact(x, t), want, rtol=1e-9, atol=1e-9)


def test_edm_on_a_discrete_model_finds_the_data(draw):
    diffusion = GaussianDiffusion.from_name("linear")
    centres = draw(1, (3, 1, 2, 1)) * 2
    model = ExactScore(centres, 0.01, diffusion)

    def rounded(x, t):
        return model(x, t.round())

    for solver, steps in (("heun", 30), ("euler", 60)):
        sampler = EDMSampler(karras_sigmas(steps, 0.02, 80.0), solver)
        got = run_edm_sampler(as_denoiser(rounded, diffusion), sampler, draw(2, (32, 1, 2, 1)))
        nearest = torch.cdist(got.flatten(1).float(), centres.flatten(1)).min(1).values
        assert float(nearest.max()) < 0.15


def test_classifier_free_guidance(draw):
    x, t = draw(1, (2, 2, 3, 3)), torch.zeros(2)
    condition, empty = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0])

    def model(x, t, c):
        return x * (1 + c[:, None, None, None])

    conditional, unconditional = model(x, t, condition), model(x, t, empty)
    at = {s: classifier_free(model, condition, empty, s)(x, t) for s in (0.0, 1.0, 3.0)}
    assert torch.equal(at[0.0], unconditional)
    assert torch.equal(at[1.0], conditional)
    torch.testing.assert_close(at[3.0], unconditional + 3 * (conditional - unconditional))
    half = classifier_free(model, condition, empty, 3.0, channels=1)(x, t)
    assert torch.equal(half[:, 1:], conditional[:, 1:])
    torch.testing.assert_close(half[:, :1], at[3.0][:, :1])
    full = classifier_free(model, condition, empty, 3.0, rescale=1.0)(x, t)
    torch.testing.assert_close(full.std((1, 2, 3)), conditional.std((1, 2, 3)))
    level = classifier_free(model, condition, empty, 3.0)(x, torch.zeros(()))
    assert torch.equal(level, at[3.0])  # one noise level for all, as EDM samplers give it
    with pytest.raises(ValueError, match="guidance scale"):
        classifier_free(model, condition, empty, -1.0)
    with pytest.raises(ValueError, match="rescale"):
        classifier_free(model, condition, empty, 1.0, rescale=2.0)


@pytest.mark.parametrize("prediction", ["v", "sample"])
def test_zero_terminal_snr(draw, prediction):
    """With the exact prediction of one point every sampler ends there; lambda spares step T'."""
    betas = zero_terminal_snr(named_betas("linear"))
    diffusion = GaussianDiffusion(betas, prediction).respace("10")
    assert float(diffusion.tables["alphas_cumprod"][-1]) == pytest.approx(0, abs=1e-12)
    x0, x = draw(1, (2, 1, 3, 3)).clamp(-1, 1), draw(2, (2, 1, 3, 3))
    signal = torch.from_numpy(np.cumprod(1 - betas)).clamp(min=0).float()[:, None, None, None]

    def model(x, t):
        root, noise = signal[t].sqrt(), (1 - signal[t]).sqrt()
        return x0 if prediction == "sample" else (root * x - x0) / noise

    scales = torch.ones(10, dtype=torch.float64)
    scales[3] = 1.01
    for sampler in (AncestralSampler(diffusion), DDIMSampler(diffusion)):
        for chosen in (None, scales):
            out = run_sampler(model, sampler, x, lambda step: draw(10 + step, x.shape), chosen)
            torch.testing.assert_close(out, x0, atol=2e-3, rtol=0)


def test_guidance_is_divided_once(draw):
    """DDIM with a classifier: dividing the re-derived noise again would scale twice."""
    diffusion = GaussianDiffusion.from_name("linear", respacing="ddim10")
    x, output, gradient = (draw(i, (2, 1, 2, 2)) for i in range(3))
    scale, index = torch.tensor(1.05), 5
    step = DDIMSampler(diffusion, clip=None).step(output, index, x, None, scale, gradient)
    noise = diffusion.tables["sqrt_one_minus_alphas_cumprod"][index].float()
    want = output / scale - noise * gradient
    torch.testing.assert_close(step.epsilon, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        step.x0, diffusion.x0_from_epsilon(x, index, want), atol=1e-4, rtol=1e-4
    )


def test_classifier_gradient(draw):
    weight = draw(1, (12, 3))

    def classifier(x, t):
        return x.flatten(1) @ weight

    labels, x = torch.tensor([0, 2]), draw(2, (2, 3, 2, 2))
    got = classifier_gradient(classifier, labels, 2.0)(x, torch.zeros(2))
    probability = torch.softmax(classifier(x, None), 1)
    want = 2 * (torch.eye(3)[labels] - probability) @ weight.T
    torch.testing.assert_close(got.flatten(1), want)
    guided = classifier_gradient(classifier, labels, 5.0)
    diffusion = GaussianDiffusion.from_name("linear", respacing="20")
    exact = ExactScore(torch.zeros(1, 3, 2, 2), 1.0, GaussianDiffusion.from_name("linear"))
    for sampler in (AncestralSampler(diffusion, clip=None), DDIMSampler(diffusion, clip=None)):
        args = (exact, sampler, x, lambda s: draw(50 + s, x.shape))
        free, steered = run_sampler(*args), run_sampler(*args, gradient=guided)
        chosen = [
            torch.softmax(classifier(r, None), 1)[[0, 1], labels].mean() for r in (free, steered)
        ]
        assert chosen[1] > chosen[0]


def test_non_finite_samples_stop():
    diffusion = GaussianDiffusion.from_name("cosine", respacing="ddim10")

    def model(x, t):
        return torch.full_like(x, float("nan"))

    with pytest.raises(FloatingPointError, match=r"step index 9 with epsilon scale 1\.01"):
        run_sampler(
            model, DDIMSampler(diffusion), torch.zeros(1, 1, 2, 2), scales=torch.full((10,), 1.01)
        )


def test_bad_sampler_arguments():
    diffusion = GaussianDiffusion.from_name("linear", respacing="ddim10")
    x = torch.zeros(1, 1, 2, 2)
    with pytest.raises(ValueError, match="one entry for each of the 10"):
        run_sampler(lambda x, t: x, DDIMSampler(diffusion), x, scales=torch.ones(9))
    with pytest.raises(ValueError, match="one entry for each of the 18"):
        run_edm_sampler(lambda x, s: x, EDMSampler(), x, scales=torch.ones(9))
    with pytest.raises(ValueError, match="solver"):
        EDMSampler(solver="rk4")
    with pytest.raises(ValueError, match="churn must be finite"):
        EDMSampler(churn=float("nan"))
    with pytest.raises(ValueError, match="decrease"):
        EDMSampler(torch.tensor([1.0, 2.0, 0.0]))
    with pytest.raises(ValueError, match="eta"):
        DDIMSampler(diffusion, eta=-1)
    with pytest.raises(ValueError, match="needs noise"):
        AncestralSampler(diffusion).step(x, 5, x, None)
    with pytest.raises(ValueError, match="log_variances"):
        AncestralSampler(diffusion, log_variances=torch.zeros(3))
