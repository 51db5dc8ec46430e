"""The paper's claim, scaled down to digits: dividing the noise improves few-step sampling."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lightning_modules.components.diffusion import (
    DDIMSampler,
    ExactScore,
    GaussianDiffusion,
    run_sampler,
)
from lightning_modules.epsilon_scaling.closed_form import gaussian_trace
from lightning_modules.epsilon_scaling.exposure_bias import ExposureBias
from lightning_modules.epsilon_scaling.features import ClassifierFeatures
from lightning_modules.epsilon_scaling.generation import (
    PositionNoise,
    SamplerSettings,
    generate,
)
from lightning_modules.epsilon_scaling.pictures import image_grid, to_uint8
from lightning_modules.epsilon_scaling.sample_metrics import frechet_distance
from lightning_modules.epsilon_scaling.schedule import EpsilonSchedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_modules.epsilon_scaling.module import EpsilonScaling
    from lightning_modules.reproduce import Lab

STD = 0.15
SAMPLES = 1500
SCALES = (1.0, 1.006, 1.017, 1.025, 1.04)
TRAINED_SCALES = (1.0, 1.01, 1.017, 1.025, 1.04)


def digit_images(lab: Lab) -> tuple[Tensor, Tensor]:
    """All digits ``(1797, 1, 8, 8)`` in [-1, 1] and their labels."""
    data = lab.build("datamodules.Images", source="digits", scaling="minus_one_one", flatten=False)
    parts = [part[list(range(len(part)))] for part in (data.train_set, data.val_set, data.test_set)]
    # Without a validation part the test part stands in for it.
    unique = parts[:1] + parts[2:] if torch.equal(parts[1].x, parts[2].x) else parts
    return torch.cat([part.x for part in unique]), torch.cat([part.y for part in unique])


def exact_score(lab: Lab, images: Tensor, features: ClassifierFeatures) -> None:
    """No network at all: with the exact noise, what is left is the error of few steps."""
    full = GaussianDiffusion.from_name("linear")
    model = ExactScore(images, STD, full)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    # The exact sampler aims at digits with noise of this width, so that is the reference.
    reference = features(images + STD * noise)
    distance: dict[int, dict[float, float]] = {}
    for steps in (10, 20, 50):
        process = full.respace(str(steps))
        # Fewer sets where a run is long; all lambdas share them.
        seeds = range(3 if steps < 50 else 1)
        distance[steps] = {}
        for scale in SCALES:
            scales = EpsilonSchedule(scale).scales_or_none(steps)
            values = []
            for seed in seeds:
                start = PositionNoise(seed, torch.arange(SAMPLES), (1, 8, 8))(-1)
                samples = run_sampler(model, DDIMSampler(process, clip=None), start, scales=scales)
                values.append(frechet_distance(reference, features(samples)))
            distance[steps][scale] = float(np.mean(values))
    ten, twenty = distance[10], distance[20]
    lab.claim(
        "exact score, 10 steps: feature distance at 1.017 over that at 1",
        ten[1.017] / ten[1.0],
        at_most=0.75,
        published="FID 10.36 -> 5.15 on CIFAR-10 with 20 steps",
    )
    lab.claim(
        "exact score, 20 steps: feature distance at 1.017 over that at 1",
        twenty[1.017] / twenty[1.0],
        at_most=0.88,
    )
    best = [min(values, key=lambda scale: values[scale]) for values in distance.values()]
    lab.claim(
        "best scale falls with the number of steps (10, 20, 50): smallest fall",
        min(best[0] - best[1], best[1] - best[2]),
        at_least=0.001,
        published="b 1.011, 1.007, 1.006 on LSUN with 20, 50, 100 steps",
    )
    lab.note(
        "Exact score, best scale of "
        + ", ".join(f"{steps} steps {scale}" for steps, scale in zip(distance, best, strict=True))
        + f"; distance at 10 steps {ten[1.0]:.3f} -> {min(ten.values()):.3f}."
    )
    lab.figure("exact_score", _curves(distance, "exact score"))


def trained_network(lab: Lab, images: Tensor, features: ClassifierFeatures) -> None:
    """A small trained network, sampled on the same noise with and without scaling."""
    run = lab.fit(
        "epsilon_scaling/default.yaml",
        "--trainer.limit_val_batches=0",
        "--trainer.num_sanity_val_steps=0",
        "--model.init_args.preview_samples=0",
    )
    module: EpsilonScaling = run.model.eval()  # type: ignore[assignment]
    reference = features(images)
    distance: dict[int, dict[float, float]] = {}
    grids = {}
    for steps in (10, 20):
        module.settings = replace(module.settings, respacing=str(steps))
        distance[steps] = {}
        for scale in TRAINED_SCALES:
            samples = module.sample(torch.arange(SAMPLES), schedule=EpsilonSchedule(scale))
            distance[steps][scale] = frechet_distance(reference, features(samples))
            if steps == 10 and scale in (1.0, 1.025):
                grids[scale] = to_uint8(samples[:100])
    for steps, bar in ((10, 0.12), (20, 0.08)):
        values = distance[steps]
        lab.claim(
            f"trained network, {steps} DDIM steps: share of the distance gone at 1.025",
            1 - values[1.025] / values[1.0],
            at_least=bar,
            published="FID 23.92 -> 8.22 on LSUN tower with 20 steps",
        )
    lab.figure("trained_network", _curves(distance, "trained network"))
    lab.figure("samples", _samples(to_uint8(images[:100]), grids))
    bias = {scale: _bias(module, images, scale) for scale in (1.0, 1.025)}
    gap = {scale: float(curves.marginal_gap[0].abs()) for scale, curves in bias.items()}
    lab.claim(
        "trained network: variance missing from the samples at 1.025 over that at 1",
        gap[1.025] / gap[1.0],
        at_most=0.9,
    )
    lab.figure("noise_norms", _norms(bias))
    large = _ancestral(module, reference, features, "fixed_large")
    small = _ancestral(module, reference, features, "fixed_small")
    lab.claim(
        "trained network, 10 ancestral steps, small variance: share of the distance gone at 1.025",
        1 - small[1.025] / small[1.0],
        at_least=0.03,
    )
    lab.note(
        "Ancestral sampling with the large variance spreads its samples too much, and scaling does "
        f"not help there: {large[1.0]:.2f} -> {large[1.025]:.2f}."
    )


def _bias(module: EpsilonScaling, images: Tensor, scale: float) -> ExposureBias:
    module.settings = replace(module.settings, respacing="10")
    module.epsilon_scale = scale
    return module.exposure_bias(images)


def _ancestral(
    module: EpsilonScaling, reference: Tensor, features: ClassifierFeatures, variance: str
) -> dict[float, float]:
    assert module.denoiser is not None
    diffusion = GaussianDiffusion.from_name("linear", variance=variance)
    noise = PositionNoise(0, torch.arange(SAMPLES), (1, 8, 8))
    return {
        scale: frechet_distance(
            reference,
            features(
                generate(
                    module.denoiser,
                    diffusion,
                    SamplerSettings("ancestral", "10"),
                    EpsilonSchedule(scale),
                    noise,
                )
            ),
        )
        for scale in (1.0, 1.025)
    }


def gaussian_data(lab: Lab) -> None:
    """Closed form: the distance to Gaussian data over lambda."""

    def distance(steps: int, scale: float, kind: str, size: str = "small") -> float:
        diffusion = GaussianDiffusion.from_name(
            "linear", respacing=str(steps), variance=f"fixed_{size}"
        )
        scales = EpsilonSchedule(scale).scales(steps)
        return gaussian_trace(diffusion, 0.25, scales, kind).frechet / 0.25

    lab.claim(
        "Gaussian data, DDIM, 20 steps: distance at 1.017 over that at 1",
        distance(20, 1.017, "ddim") / distance(20, 1.0, "ddim"),
        at_most=0.06,
    )
    lab.claim(
        "Gaussian data, ancestral with large variance: scaling makes it worse (ratio)",
        distance(20, 1.017, "ancestral", "large") / distance(20, 1.0, "ancestral", "large"),
        at_least=1.0,
    )


def reproduce(lab: Lab) -> None:
    """Measure all claims."""
    images, labels = digit_images(lab)
    features = ClassifierFeatures.fit(images, labels)
    gaussian_data(lab)
    with torch.no_grad():
        exact_score(lab, images, features)
    trained_network(lab, images, features)


def _curves(distance: dict[int, dict[float, float]], title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5))
    axes = figure.add_subplot()
    for steps, values in distance.items():
        axes.plot(list(values), list(values.values()), marker="o", label=f"{steps} steps")
    axes.set_xlabel("epsilon scale")
    axes.set_ylabel("Fréchet distance, classifier features")
    axes.set_title(title)
    axes.legend()
    return figure


def _samples(data: Tensor, grids: dict[float, Tensor]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8))
    titled = {"data": data, **{f"10 steps, scale {scale}": grid for scale, grid in grids.items()}}
    for place, (title, images) in enumerate(titled.items()):
        axes = figure.add_subplot(1, len(titled), place + 1)
        axes.imshow(image_grid(images).numpy(), interpolation="nearest")
        axes.set_title(title)
        axes.axis("off")
    return figure


def _norms(bias: dict[float, ExposureBias]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5))
    axes = figure.add_subplot()
    for scale, curves in bias.items():
        axes.plot(curves.sampling_norm.numpy(), marker=".", label=f"sampling, scale {scale}")
    first = next(iter(bias.values()))
    axes.plot(first.training_norm.numpy(), color="black", label="true inputs")
    axes.axhline(first.noise_norm, linestyle=":", color="grey", label="true noise")
    axes.set_xlabel("step (0 = last, cleanest)")
    axes.set_ylabel("mean norm of the noise")
    axes.legend()
    return figure
