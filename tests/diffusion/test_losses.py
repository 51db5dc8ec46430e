"""Training losses and the variational bound against reference values."""

import numpy as np
import pytest
import torch

from lightning_modules.components.diffusion import (
    ADMUNet,
    GaussianDiffusion,
    min_snr_weight,
    training_loss,
    variational_bound,
)
from lightning_modules.components.diffusion.losses import discretized_gaussian_log_likelihood


@pytest.fixture(scope="module")
def networks(reference, recipe):
    config = reference("unet.json")["adm_updown_new"]["config"]
    built = {}
    for channels in (3, 6):
        built[channels] = ADMUNet(**(config | {"out_channels": channels}))
        recipe(built[channels])
    return built


def cases():
    for schedule in ("linear", "cosine"):
        for loss in ("mse", "rescaled_mse", "kl", "rescaled_kl"):
            yield schedule, "learned_range", loss
        for variance in ("fixed_small", "fixed_large"):
            yield schedule, variance, "mse"
            yield schedule, variance, "kl"


@pytest.mark.parametrize(("schedule", "variance", "kind"), list(cases()))
def test_reference_losses(reference, draw, networks, schedule, variance, kind):
    want, key = reference("losses.npz"), f"{schedule}/{variance}/{kind}"
    network = networks[6 if variance == "learned_range" else 3]
    diffusion = GaussianDiffusion.from_name(schedule, variance=variance)
    x0, t = torch.from_numpy(want["x0"]), torch.from_numpy(want["t"])
    got = training_loss(diffusion, network, x0, t, draw(1902, (4, 3, 8, 8)), kind)
    tolerance = np.array([1e-5, 1e-5, 1e-5, 1e-4 if schedule == "cosine" else 1e-5])
    for name, value in {"loss": got.loss, **got.parts}.items():
        if f"{key}/{name}" in want.files:
            wanted = want[f"{key}/{name}"]
            assert (np.abs(value.detach().numpy() - wanted) <= tolerance * np.abs(wanted)).all()
    if f"{key}/grad_out2" in want.files:
        network.zero_grad()
        got.loss.mean().backward()
        gradient = network.out[2].weight.grad.flatten()[:64].numpy()
        wanted = want[f"{key}/grad_out2"]
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(
            gradient, wanted, atol=scale * (1e-4 if schedule == "cosine" else 1e-5), rtol=1e-4
        )


def test_bound_gradient_does_not_reach_the_noise_half(networks, draw):
    diffusion = GaussianDiffusion.from_name("linear", variance="learned_range")
    output = networks[6](draw(1, (4, 3, 8, 8)), torch.tensor([0, 3, 500, 999])).detach()
    output.requires_grad_(True)
    terms = training_loss(
        diffusion,
        lambda x, t: output,
        draw(2, (4, 3, 8, 8)).clamp(-1, 1),
        torch.tensor([0, 3, 500, 999]),
        draw(3, (4, 3, 8, 8)),
    )
    (gradient,) = torch.autograd.grad(terms.parts["vb"].sum(), output)
    assert (gradient[:, :3] == 0).all()
    assert (gradient[:, 3:] != 0).any()


def test_rescaled_mse_equals_mse_at_1000_steps(networks, draw):
    x0, noise = draw(2, (4, 3, 8, 8)).clamp(-1, 1), draw(3, (4, 3, 8, 8))
    for steps in (1000, 100):
        diffusion = GaussianDiffusion.from_name("linear", steps, variance="learned_range")
        t = torch.tensor([0, 5, 50, 99])
        losses = [
            training_loss(diffusion, networks[6], x0, t, noise, kind).loss
            for kind in ("mse", "rescaled_mse")
        ]
        assert torch.equal(*losses) == (steps == 1000)


def test_learned_variance_lies_between_its_bounds(draw):
    diffusion = GaussianDiffusion.from_name("cosine", variance="learned_range")
    x, t = (
        draw(1, (64, 3, 2, 2)),
        torch.randint(1000, (64,), generator=torch.Generator().manual_seed(0)),
    )
    fraction = torch.rand(64, 3, 2, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
    got = diffusion.log_variance(fraction, x, t)
    low = diffusion.gather("posterior_log_variance_clipped", t, x)
    high = diffusion.gather("log_betas", t, x)
    assert (got >= low - 1e-4).all()
    assert (got <= high + 1e-4).all()
    torch.testing.assert_close(diffusion.log_variance(torch.ones_like(x), x, t), high.expand_as(x))


def test_variational_bound(reference, networks):
    want = reference("trajectories.npz")
    x0 = torch.from_numpy(reference("losses.npz")["x0"])
    stream = np.random.RandomState(1905)

    def noise(step: int) -> torch.Tensor:
        return torch.from_numpy(stream.standard_normal((4, 3, 8, 8)).astype(np.float32))

    diffusion = GaussianDiffusion.from_name("cosine", respacing="10", variance="learned_range")
    got = variational_bound(diffusion, networks[6], x0, noise)
    for name, value in {
        "total_bpd": got.total,
        "prior_bpd": got.prior,
        "vb": got.vb,
        "xstart_mse": got.x0_mse,
        "mse": got.mse,
    }.items():
        wanted = want[f"vlb10/{name}"]
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def test_discretised_likelihood_sums_to_one():
    grid = torch.arange(256) / 127.5 - 1
    for mean, log_scale in ((0.1, -2.0), (-0.9, -1.0), (0.98, -3.0)):
        total = (
            discretized_gaussian_log_likelihood(
                grid.double(), torch.tensor(mean).double(), torch.tensor(log_scale).double()
            )
            .exp()
            .sum()
        )
        assert float(total) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("prediction", ["epsilon", "v", "sample"])
def test_a_perfect_network_has_no_loss(draw, prediction):
    diffusion = GaussianDiffusion.from_name("linear", prediction=prediction)
    x0, noise, t = draw(1, (4, 1, 4, 4)), draw(2, (4, 1, 4, 4)), torch.tensor([1, 10, 500, 900])
    target = diffusion.target(x0, noise, t)
    assert training_loss(diffusion, lambda x, s: target, x0, t, noise).loss.max() == 0
    x = diffusion.q_sample(x0, t, noise)
    torch.testing.assert_close(diffusion.to_epsilon(target, x, t), noise, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(
        diffusion.to_epsilon(diffusion.from_epsilon(noise, x, t), x, t), noise, atol=2e-4, rtol=1e-4
    )


def test_input_perturbation_changes_the_input_alone(draw):
    diffusion = GaussianDiffusion.from_name("linear")
    x0, noise, extra = (draw(i, (2, 1, 4, 4)) for i in range(3))
    t, seen = torch.tensor([10, 700]), []

    def model(x, s):
        seen.append(x)
        return noise

    loss = training_loss(
        diffusion, model, x0, t, noise, input_perturbation=0.1, perturbation_noise=extra
    )
    assert loss.loss.max() == 0
    torch.testing.assert_close(seen[0], diffusion.q_sample(x0, t, noise + 0.1 * extra))
    with pytest.raises(ValueError, match="perturbation_noise"):
        training_loss(diffusion, model, x0, t, noise, input_perturbation=0.1)


def test_bad_losses(networks, draw):
    x0, t = draw(1, (1, 3, 8, 8)), torch.tensor([1])
    with pytest.raises(ValueError, match="loss must be one of"):
        training_loss(GaussianDiffusion.from_name(), networks[3], x0, t, x0, "l1")
    with pytest.raises(ValueError, match="needs 3"):
        training_loss(GaussianDiffusion.from_name(), networks[6], x0, t, x0)


def test_min_snr_weight():
    diffusion = GaussianDiffusion.from_name("linear")
    signal = diffusion.tables["alphas_cumprod"]
    t = torch.tensor([0, 500, 999])
    snr = signal[t] / (1 - signal[t])
    torch.testing.assert_close(min_snr_weight(diffusion, t), (snr.clamp(max=5) / snr).float())
