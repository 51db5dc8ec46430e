"""diffusers' schedulers and pipelines with scaled noise."""

import pytest
import torch

diffusers = pytest.importorskip("diffusers")

from lightning_modules.components.diffusion import (  # noqa: E402
    DDIMSampler,
    GaussianDiffusion,
    run_sampler,
)
from lightning_modules.epsilon_scaling import (  # noqa: E402
    EpsilonSchedule,
    ScaledScheduler,
    scale_pipeline,
)


def ddim(prediction="epsilon", clip=True):
    return diffusers.DDIMScheduler(
        trained_betas=GaussianDiffusion.from_name("linear").betas.numpy(),
        timestep_spacing="leading",
        steps_offset=0,
        set_alpha_to_one=True,
        clip_sample=clip,
        prediction_type=prediction,
    )


def run(scheduler, model, x, steps=25):
    scheduler.set_timesteps(steps)
    for t in scheduler.timesteps:
        x = scheduler.step(model(x, t.expand(len(x))), t, x).prev_sample
    return x


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_scaled_ddim_equals_ours(gaussian_model, draw, prediction):
    kind = prediction.removesuffix("_prediction")
    full = GaussianDiffusion.from_name("linear", prediction=kind)
    process, schedule = full.respace("ddim25"), EpsilonSchedule(1.0, 0.001)

    def model(x, t):
        return full.from_epsilon(gaussian_model(x, t), x, t)

    x = draw(0, (8, 1, 8, 8))
    ours = run_sampler(model, DDIMSampler(process), x, scales=schedule.scales(25))
    theirs = run(ScaledScheduler(ddim(prediction), schedule), model, x)
    torch.testing.assert_close(theirs, ours, atol=2e-4, rtol=0)
    plain = run_sampler(model, DDIMSampler(process), x)
    assert (ours - plain).abs().max() > 0.01


def test_scale_one_is_the_plain_scheduler(gaussian_model, draw):
    x = draw(0, (4, 1, 8, 8))
    plain, wrapped = ddim(clip=False), ScaledScheduler(ddim(clip=False), EpsilonSchedule())
    torch.testing.assert_close(run(wrapped, gaussian_model, x), run(plain, gaussian_model, x))


def test_other_solvers_take_the_wrapper(gaussian_model, draw):
    """The mean effect is the same: scaled noise gives samples of a larger spread."""
    x = draw(0, (256, 1, 8, 8))
    betas = GaussianDiffusion.from_name("linear").betas.numpy()
    for kind in (diffusers.DPMSolverMultistepScheduler, diffusers.PNDMScheduler):
        spreads = []
        for scale in (1.0, 1.03):
            scheduler = ScaledScheduler(kind(trained_betas=betas), EpsilonSchedule(scale))
            spreads.append(float(run(scheduler, gaussian_model, x, 10).std()))
        assert spreads[1] > 1.01 * spreads[0]


def test_pipeline(draw):
    network = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8,),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )
    pipeline = diffusers.DDIMPipeline(network, ddim())
    pipeline.set_progress_bar_config(disable=True)

    def images():
        generator = torch.Generator().manual_seed(0)
        return torch.from_numpy(
            pipeline(2, generator=generator, num_inference_steps=5, output_type="np").images
        )

    plain = images()
    assert scale_pipeline(pipeline, 1.1) is pipeline
    assert isinstance(pipeline.scheduler, ScaledScheduler)
    assert not torch.equal(images(), plain)
    scale_pipeline(pipeline, 1.2)
    assert not isinstance(pipeline.scheduler._scheduler, ScaledScheduler)
    scale_pipeline(pipeline, 1.0)
    assert torch.equal(images(), plain)


def test_bad_bridges():
    with pytest.raises(TypeError, match="diffusers scheduler"):
        ScaledScheduler(object(), EpsilonSchedule())
    with pytest.raises(TypeError, match="no scheduler"):
        scale_pipeline(object(), 1.0)
    with pytest.raises(RuntimeError, match="set_timesteps"):
        ScaledScheduler(ddim(), EpsilonSchedule()).step(None, 0, None)
    with pytest.raises(ValueError, match="lists 2 values"):
        ScaledScheduler(ddim(), EpsilonSchedule.of([1.0, 1.1])).set_timesteps(25)
    flow = diffusers.DDIMScheduler(prediction_type="epsilon")
    flow.register_to_config(prediction_type="flow")
    with pytest.raises(ValueError, match="prediction_type"):
        ScaledScheduler(flow, EpsilonSchedule())
