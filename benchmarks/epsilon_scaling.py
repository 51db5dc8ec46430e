"""Cost of Epsilon Scaling, our sampling loop beside diffusers', and the module beside plain torch.

`python benchmarks/epsilon_scaling.py`: about 30 s on one core. All ratios come from interleaved
runs in one process, by CPU time.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import time
import warnings
from collections.abc import Callable

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from datamodules import Images
from lightning_modules import EpsilonScaling
from lightning_modules.components.diffusion import (
    ADMUNet,
    DDIMSampler,
    GaussianDiffusion,
    counter_normal,
    run_sampler,
    training_loss,
)
from lightning_modules.components.diffusion.unet import count_parameters

warnings.filterwarnings("ignore")
STEPS = 10


def interleaved(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each run, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def overhead_of_scaling(network: ADMUNet, x: Tensor) -> None:
    """Extra time of a scaled step as a share of a whole step with the network."""
    diffusion = GaussianDiffusion.from_name("linear", respacing=f"ddim{STEPS}")
    sampler = DDIMSampler(diffusion)
    scale = torch.tensor(1.017)
    output = torch.randn_like(x)

    def steps(scale: Tensor | None) -> None:
        for _ in range(300):
            sampler.step(output, 5, x, None, scale)

    with torch.no_grad():
        took = interleaved({"plain": lambda: steps(None), "scaled": lambda: steps(scale)}, 9)
        t = torch.full((len(x),), 500)
        forward = interleaved({"network": lambda: network(x, t)}, 7)["network"]
    extra = (took["scaled"] - took["plain"]) / 300
    whole = took["plain"] / 300 + forward
    print(
        f"scaling: {extra * 1e6:.1f} us more in a step of {whole * 1e3:.1f} ms = "
        f"{100 * extra / whole:.3f} % (target 1 %)"
    )


def against_diffusers(network: ADMUNet, x: Tensor) -> None:
    """Steps per second of the loops, with one network, and with diffusers' U-Net of like size."""
    import diffusers

    diffusion = GaussianDiffusion.from_name("linear", respacing=f"ddim{STEPS}")
    scheduler = diffusers.DDIMScheduler(
        trained_betas=GaussianDiffusion.from_name("linear").betas.numpy(),
        timestep_spacing="leading",
        set_alpha_to_one=True,
    )
    scheduler.set_timesteps(STEPS)
    peer = diffusers.UNet2DModel(
        sample_size=x.shape[-1],
        in_channels=x.shape[1],
        out_channels=x.shape[1],
        block_out_channels=(64, 128),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).eval()
    sampler, scales = DDIMSampler(diffusion), torch.full((STEPS,), 1.017)

    def ours() -> Tensor:
        return run_sampler(network, sampler, x, scales=scales)

    def loop(model: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        sample = x
        with torch.no_grad():
            for t in scheduler.timesteps:
                output = model(sample, t.expand(len(x)))
                sample = scheduler.step(
                    output, t, sample, use_clipped_model_output=True
                ).prev_sample
        return sample

    took = interleaved(
        {
            "ours": ours,
            "diffusers loop, our network": lambda: loop(network),
            "diffusers loop and network": lambda: loop(lambda s, t: peer(s, t).sample),
        },
        5,
    )
    sizes = {"ours": count_parameters(network), "diffusers": count_parameters(peer)}
    print(
        f"networks: ours {sizes['ours'] / 1e6:.2f} M parameters, "
        f"diffusers {sizes['diffusers'] / 1e6:.2f} M; batch {tuple(x.shape)}"
    )
    for name, seconds in took.items():
        ratio = took[name] / took["ours"]
        print(f"{name}: {STEPS / seconds:.1f} steps/s ({ratio:.2f} times ours)")


def training_step() -> None:
    """A step of the module under the Trainer beside the same loss in a plain loop."""
    count, shape = 150, (1, 8, 8)
    data = Images("digits", scaling="minus_one_one", flatten=False, batch_size=128)
    data.setup("fit")
    arguments = {"network_args": {"width": 192, "blocks": 3}, "image_shape": [1, 8, 8]}
    batches = list(data.train_dataloader())

    def module() -> None:
        model = EpsilonScaling(**arguments)
        Trainer(
            accelerator="cpu",
            max_steps=count,
            max_epochs=-1,
            logger=False,
            limit_val_batches=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        ).fit(model, datamodule=data)

    def plain() -> None:
        model = EpsilonScaling(**arguments)
        network, diffusion = model.denoiser, model.diffusion
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, weight_decay=0.0)
        for step in range(count):
            x = batches[step % len(batches)].x
            t = torch.randint(0, 1000, (len(x),))
            loss = training_loss(diffusion, network, x, t, torch.randn_like(x)).loss.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    positions = torch.arange(128)
    took = interleaved({"module": module, "plain": plain}, 3)
    noise = interleaved({"noise": lambda: counter_normal(1, positions, shape)}, 50)["noise"]
    each = {name: seconds / count * 1e3 for name, seconds in took.items()}
    print(
        f"training step: {each['module']:.2f} ms in the module, {each['plain']:.2f} ms plain "
        f"({each['module'] / each['plain']:.2f} times); its own noise {noise * 1e3:.2f} ms"
    )


def main() -> None:
    """Run all three."""
    import logging

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = ADMUNet(
        image_size=16,
        model_channels=64,
        out_channels=3,
        num_res_blocks=2,
        attention_resolutions=(2,),
        channel_mult=(1, 2),
        num_head_channels=32,
        use_new_attention_order=True,
    ).eval()
    x = torch.randn(8, 3, 16, 16)
    overhead_of_scaling(network, x)
    against_diffusers(network, x)
    training_step()


if __name__ == "__main__":
    main()
