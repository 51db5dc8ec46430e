"""The divisors: uniform, linear, listed, and the wrapper of a model."""

import warnings

import pytest
import torch

from lightning_modules.components.diffusion import DDIMSampler, GaussianDiffusion, run_sampler
from lightning_modules.epsilon_scaling import EpsilonSchedule, ScaledModel


def test_uniform_linear_and_listed():
    assert EpsilonSchedule(1.017).scales(20).tolist() == [1.017] * 20
    linear = EpsilonSchedule(1.0, 0.0025).scales(20)
    torch.testing.assert_close(linear, 1 + 0.0025 * torch.arange(20, dtype=torch.float64))
    assert EpsilonSchedule.of([1.0, 1.1]).scales(2).tolist() == [1.0, 1.1]
    assert EpsilonSchedule.of(torch.tensor([1.0, 1.1])).values is not None
    assert EpsilonSchedule.of(1.02).offset == 1.02
    assert EpsilonSchedule(1.02, skip_first=2).scales(4).tolist() == [1.02, 1.02, 1.0, 1.0]


@pytest.mark.parametrize(("slope", "offset"), [(0.0008, 1.0034), (0.0025, 0.98725)])
def test_linear_schedule_of_equal_mean(slope, offset):
    """The published k and b for 20 steps of LSUN have mean 1.011."""
    schedule = EpsilonSchedule.with_mean(1.011, slope, 20)
    assert schedule.offset == pytest.approx(offset, abs=1e-10)
    assert float(schedule.scales(20).mean()) == pytest.approx(1.011)


def test_names():
    assert EpsilonSchedule(1.017).describe() == "1.017"
    assert EpsilonSchedule(1.0, 0.0025).describe() == "0.0025t+1"
    assert EpsilonSchedule.of([1.0, 1.1]).describe() == "list2"
    assert EpsilonSchedule(1.01, skip_first=1).describe() == "1.01-skip1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"offset": 0.0}, "must be positive, got 0"),
        ({"offset": float("nan")}, "offset must be finite"),
        ({"slope": float("inf")}, "slope must be finite"),
        ({"values": (1.0, -1.0)}, "positive, got -1"),
        ({"values": (1.0, float("nan"))}, "positive, got nan"),
        ({"skip_first": -1}, "skip_first"),
    ],
)
def test_bad_schedules(arguments, message):
    with pytest.raises(ValueError, match=message):
        EpsilonSchedule(**arguments)


def test_schedules_that_do_not_fit_the_steps():
    with pytest.raises(ValueError, match="lists 2 values, but the sampler takes 20"):
        EpsilonSchedule.of([1.0, 1.1]).scales(20)
    with pytest.raises(ValueError, match=r"epsilon scale -0\.9 at step 19"):
        EpsilonSchedule(1.0, -0.1).scales(20)
    with pytest.warns(UserWarning, match="outside the usual"):
        EpsilonSchedule(1.3).scales(20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EpsilonSchedule(1.2).scales(20)
        EpsilonSchedule(0.9).scales(20)


def test_scale_one_is_bit_identical(gaussian_model, draw):
    x = draw(0, (4, 1, 8, 8))
    diffusion = GaussianDiffusion.from_name("linear", respacing="20")
    plain = run_sampler(gaussian_model, DDIMSampler(diffusion), x)
    one = EpsilonSchedule()
    assert one.scales_or_none(20) is None
    wrapped = run_sampler(ScaledModel(gaussian_model, diffusion, 1.0), DDIMSampler(diffusion), x)
    divided = run_sampler(gaussian_model, DDIMSampler(diffusion), x, scales=one.scales(20))
    assert torch.equal(plain, wrapped)
    assert torch.equal(plain, divided)


@pytest.mark.parametrize("prediction", ["v", "sample"])
def test_scale_one_is_bit_identical_for_other_predictions(draw, prediction):
    diffusion = GaussianDiffusion.from_name("linear", respacing="20", prediction=prediction)
    wrapped = ScaledModel(lambda x, t: 0.3 * x, diffusion, EpsilonSchedule())
    x, t = draw(0, (4, 1, 8, 8)), diffusion.timestep_map[[3, 5, 0, 19]]
    assert torch.equal(wrapped(x, t), 0.3 * x)


def test_shift_of_the_predicted_sample(gaussian_model, draw):
    """x0(lambda) - x0(1) = sqrt(1 / abar - 1) eps (1 - 1 / lambda)."""
    diffusion = GaussianDiffusion.from_name("linear", respacing="20")
    x = draw(0, (4, 1, 8, 8)).double()
    for index in (0, 7, 19):
        epsilon = gaussian_model.double()(x, diffusion.model_timesteps(index, x))
        base = diffusion.predict(epsilon, x, index, clip=None).x0
        scaled = diffusion.predict(epsilon, x, index, torch.tensor(1.02).double(), None).x0
        signal = diffusion.tables["alphas_cumprod"][index]
        want = (1 / signal - 1).sqrt() * epsilon * (1 - 1 / torch.tensor(1.02).double())
        torch.testing.assert_close(scaled - base, want, rtol=1e-7, atol=1e-9)
    gaussian_model.float()


@pytest.mark.parametrize("prediction", ["epsilon", "v", "sample"])
def test_wrapper_equals_scaling_in_the_sampler(gaussian_model, draw, prediction):
    """Any prediction type, a learned variance untouched, an index by respaced step."""
    full = GaussianDiffusion.from_name("linear", prediction=prediction, variance="learned_range")
    process = full.respace("20")
    schedule = EpsilonSchedule(1.0, 0.002)

    def model(x, t):
        mean = full.from_epsilon(gaussian_model(x, t), x, t)
        return torch.cat([mean, x * 0.1], dim=1)

    x = draw(0, (4, 1, 8, 8))
    sampler = DDIMSampler(process, clip=None)
    want = run_sampler(model, sampler, x, scales=schedule.scales(20))
    got = run_sampler(ScaledModel(model, process, schedule), sampler, x)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-4)
    wrapped = ScaledModel(model, process, schedule)
    t = process.timestep_map[[3]].expand(4)
    assert torch.equal(wrapped(x, t)[:, 1:], x * 0.1)
    with pytest.raises(ValueError, match="timestep 1 is not among"):
        wrapped(x, torch.ones(4, dtype=torch.long))


def test_steps_use_the_respaced_index(draw):
    """A schedule that scales the last step alone changes the last step alone."""
    diffusion = GaussianDiffusion.from_name("linear", respacing="10")
    values = [1.1] + [1.0] * 9
    trajectories = {}
    for name, scales in (("plain", None), ("last", torch.tensor(values))):
        steps = []
        run_sampler(
            lambda x, t: 0.5 * x,
            DDIMSampler(diffusion),
            draw(0, (1, 1, 2, 2)),
            scales=scales,
            observe=lambda index, step, steps=steps: steps.append(step.x),
        )
        trajectories[name] = steps
    same = [torch.equal(*pair) for pair in zip(*trajectories.values(), strict=True)]
    assert same == [True] * 9 + [False]
