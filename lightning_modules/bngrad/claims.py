"""The scaled-down claims: bounded gradients at any depth, vanishing gap, training with gain."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_modules.bngrad.figures import depth_figure
from lightning_modules.bngrad.initialisation import initialise
from lightning_modules.bngrad.network import DeepBNMLP
from lightning_modules.components.isometry import expected_one_layer_gap, isometry_gap

if TYPE_CHECKING:
    from lightning_modules.reproduce import Lab

SEEDS = 3
LINEAR: dict[str, Any] = {
    "activation": "identity", "norm": "bn_nocenter", "gain_exponent": 0.0, "bias": False,
    "scale": 1.0,
}  # fmt: skip


def build(width: int, depth: int, seed: int, **options: Any) -> DeepBNMLP:
    """A network in double precision, its weights drawn in it."""
    net = DeepBNMLP(width, width, depth, width, **options).double()
    gaussian_gain = 1.0
    generator = torch.Generator().manual_seed(seed)
    initialise(net.linear_maps, options.get("init", "orthogonal"), gaussian_gain, generator)
    return net


def log_gradient(net: DeepBNMLP, seed: int) -> float:
    """Logarithm of the gradient norm of the second map, on as many Gaussian inputs as features."""
    generator = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(net.width, net.in_dim, dtype=torch.float64, generator=generator)
    y = torch.randint(net.out_dim, (net.width,), generator=generator)
    logits = net(x)
    assert isinstance(logits, Tensor)
    loss = F.cross_entropy(logits, y)
    (gradient,) = torch.autograd.grad(loss, [net.linear_maps[1].weight])
    return float(gradient.norm().log())


def depth_sweep(width: int, depths: tuple[int, ...], **options: Any) -> dict[int, float]:
    """Mean over seeds of `log_gradient` for each depth."""
    return {
        depth: sum(log_gradient(build(width, depth, s, **options), s) for s in range(SEEDS)) / SEEDS
        for depth in depths
    }


def near_identity(lab: Lab, width: int, seed: int) -> Tensor:
    """The input of the isometry figure, float64 `(width, width)`."""
    generator = torch.Generator().manual_seed(seed)
    x: Tensor = lab.build(
        "datamodules.isometry_inputs.isometry_input",
        source="near_identity", width=width, generator=generator,
    )  # fmt: skip
    return x


@torch.no_grad()
def gap_curves(lab: Lab, width: int, depth: int, seeds: int) -> tuple[Tensor, Tensor]:
    """Gaps `(seeds, depth + 1)` of input and norms, and exact means `(seeds, depth)` one ahead."""
    gaps, predicted = [], []
    for seed in range(seeds):
        x = near_identity(lab, width, seed)
        _, hidden = build(width, depth, seed, **LINEAR)(x, return_hidden=True)
        states = torch.cat([x[None], hidden.norm])
        gaps.append(isometry_gap(states))
        predicted.append(expected_one_layer_gap(states[:-1]))
    return torch.stack(gaps), torch.stack(predicted)


@torch.no_grad()
def accuracy(run: Any, part: str) -> float:
    """Share of correct predictions of a finished run on one part of its data."""
    dataset = getattr(run.datamodule, f"{part}_set")
    rows = dataset[list(range(len(dataset)))]
    logits = run.model.eval()(rows.x)
    return float((logits.argmax(-1) == rows.y).double().mean())


def reproduce(lab: Lab) -> None:
    """Measures every claim; about half a minute on one core."""
    gradients = {
        "orthogonal": depth_sweep(16, (10, 50, 200, 500), **LINEAR),
        "Gaussian": depth_sweep(16, (10, 50, 200, 500), **LINEAR, init="xavier_normal"),
        "orthogonal, sin, no gain": depth_sweep(32, (20, 100, 300), gain_exponent=0.0),
        "orthogonal, sin, gain exponent 0.5": depth_sweep(32, (20, 100, 300), gain_exponent=0.5),
    }
    flat, gaussian, without, with_gain = gradients.values()
    lab.claim(
        "log-gradient at depth 500, orthogonal and linear, minus that at depth 10",
        flat[500] - flat[10], at_least=-1.0, at_most=1.0,
        published="gradients bounded independently of depth (flat up to 1000 layers)",
    )  # fmt: skip
    lab.claim(
        "log-gradient at depth 500, Gaussian weights, minus that at depth 10",
        gaussian[500] - gaussian[10], at_least=8.0,
        published="Gaussian weights explode exponentially in depth",
    )  # fmt: skip
    lab.claim(
        "log-gradient of sin without gain, depth 300 minus depth 20",
        without[300] - without[20], at_least=10.0,
        published="non-linear activations explode without shaping",
    )  # fmt: skip
    # the logits shrink like L^-k, and the gradient with them
    normalised = with_gain[300] - with_gain[20] + 0.5 * math.log(300 / 20)
    lab.claim(
        "the same with gain exponent 0.5, plus 0.5 log L", normalised, at_least=-1.0, at_most=1.0,
        published="bounded with gain exponent 0.4",
    )  # fmt: skip

    gaps, predicted = gap_curves(lab, width=50, depth=100, seeds=4)
    mean = gaps.mean(0)
    constant = 0.015 * 50**2 * (1 + 50 * mean[0])
    bound = mean[0] * torch.exp(-torch.arange(101) / constant)
    lab.claim(
        "isometry gap over the bound with C = 0.015, largest over 100 layers",
        float((mean / bound)[1:].max()), at_most=1.0,
        published="the gap decays at least as fast as the bound",
    )  # fmt: skip
    slope = float((mean[60] / mean[10]).log() / 50)
    lab.claim(
        "rate of decay over the exact rate near isometry, log(1 - 2 / (d + 2))",
        slope / math.log(1 - 2 / 52), at_least=0.9, at_most=1.1,
        published=None,
    )  # fmt: skip
    lab.figure(
        "gradients_and_gap_against_depth",
        depth_figure(gradients, {"measured, d = 50": mean.tolist()}, bound.tolist(),
                     predicted.mean(0).tolist()),
    )  # fmt: skip

    torch.manual_seed(0)
    deep = DeepBNMLP(100, 10, depth=1000, width=100, gain_exponent=0.5)
    logits = deep(torch.randn(100, 100))
    assert isinstance(logits, Tensor)
    loss = F.cross_entropy(logits, torch.randint(10, (100,)))
    weights = [layer.weight for layer in deep.linear_maps]
    norms = torch.stack([g.norm() for g in torch.autograd.grad(loss, weights)])
    lab.claim("smallest gradient norm of 1000 layers", float(norms.min()), at_least=1e-3,
              published="trains at depth 1000")  # fmt: skip
    lab.claim("largest gradient norm of 1000 layers", float(norms.max()), at_most=1.0,
              published="trains at depth 1000")  # fmt: skip

    common = ("--trainer.callbacks=[]", "--data.init_args.val_fraction=0.0")
    gain = lab.fit("bngrad/default.yaml", *common)
    lab.claim(
        "training accuracy, 40 layers with gain exponent 0.5", accuracy(gain, "train"),
        at_least=0.95, published="deep networks train with activation shaping",
    )  # fmt: skip
    lab.claim("test accuracy of the same", accuracy(gain, "test"), at_least=0.93, published=None)
    for name, config in (
        ("training accuracy without gain", "no_gain"),
        ("training accuracy, ReLU with Gaussian weights", "gaussian_relu"),
    ):
        run = lab.fit("bngrad/default.yaml", f"--config=bngrad/{config}.yaml", *common)
        lab.claim(name, accuracy(run, "train"), at_most=0.70, published="fails to train at depth")
    model: Any = gain.model
    figures = model.figures()
    lab.figure("signal_through_depth", figures["signal_through_depth"])
    lab.note(
        "150 SGD steps on the digits of scikit-learn, width 64, batches of 100; the paper trains "
        "on CIFAR and MNIST for up to 1000 epochs."
    )
