"""Noise per step against the dense product, and a private step against Opacus.

`pip install opacus` for the peer; without it only our side is printed.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from lightning_modules.components.privacy import (
    GhostClipper,
    NoiseStream,
    Strategy,
    WhiteNoise,
    clipped_sum,
    parse_strategy,
)
from lightning_modules.components.privacy.networks import DPVGG, MLP

try:
    import opacus
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
        GradSampleModuleFastGradientClipping,
    )
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
except ImportError:
    opacus = None

SIZE, STEPS = 100_000, 256


def milliseconds(step: Callable[[], object], repeats: int) -> float:
    step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.min(times))


def noise() -> None:
    print(f"noise of one step, {SIZE} coordinates, run of {STEPS} steps; dense = row of C^-1 times")
    print("the stored white noise so far, at the middle of the run (vectors of the model's size)")
    stored = torch.randn(STEPS, SIZE)
    white = WhiteNoise(SIZE, 0)
    counter = iter(range(10**9))
    draw = milliseconds(lambda: white(next(counter)), 60)
    print(f"  drawing white noise alone                 {draw:7.3f} ms")
    for words in (
        "identity",
        "square_root(bands=4)",
        "square_root(bands=16)",
        "optimised_blt(buffers=4)",
        "nu(nu=0.05, bands=64)",
    ):
        strategy: Strategy = parse_strategy(words)
        now = STEPS // 2  # the average step
        row = torch.from_numpy(strategy.inverse(STEPS)[now, : now + 1]).float()
        stream = NoiseStream(strategy.correlator(STEPS), white)
        mine = milliseconds(stream.step, STEPS // 2)
        # timed in the same run: fresh white noise, then the product over the whole run's rows
        dense = milliseconds(lambda row=row: (white(0), row @ stored[: len(row)]), 20)
        memory = stream.correlator.memory
        print(
            f"  {words:30s} ours {mine:7.3f} ms, {memory:3d} vectors | dense {dense:7.3f} ms, "
            f"{STEPS} vectors | {dense / mine:5.1f} x"
        )


def ghost_step(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    names = [n for n, _ in net.named_parameters()]
    clipper = GhostClipper(net, names)
    size = sum(p.numel() for p in net.parameters())
    stream = NoiseStream(parse_strategy("identity").correlator(10**6), WhiteNoise(size, 0))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        clipper.start()
        F.cross_entropy(net(x), y).backward()
        gradients = clipper.clipped_sum(len(x), 1.0, float(len(x))).gradients
        apply(net, gradients, stream, len(x))
        optimizer.step()

    return step


def vmap_step(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    names = [n for n, _ in net.named_parameters()]
    size = sum(p.numel() for p in net.parameters())
    stream = NoiseStream(parse_strategy("identity").correlator(10**6), WhiteNoise(size, 0))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def losses(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(net(batch[0]), batch[1], reduction="none")

    def step() -> None:
        gradients = clipped_sum(net, losses, (x, y), 1.0, names).gradients
        apply(net, gradients, stream, len(x))
        optimizer.step()

    return step


def apply(net: nn.Module, gradients: dict, stream: NoiseStream, count: int) -> None:
    vector = torch.cat([g.flatten() for g in gradients.values()])
    stream.white.scatter_add(vector, stream.step())
    vector /= count
    place = 0
    for p in net.parameters():
        p.grad = vector[place : place + p.numel()].view(p.shape)
        place += p.numel()


def opacus_hooks(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    module = opacus.GradSampleModule(net)
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.01),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=len(x),
    )

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()

    return step


def opacus_ghost(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    module = GradSampleModuleFastGradientClipping(net, max_grad_norm=1.0, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(module.parameters(), lr=0.01),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=len(x),
    )
    criterion = DPLossFastGradientClipping(module, optimizer, nn.CrossEntropyLoss())

    def step() -> None:
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()

    return step


def steps() -> None:
    print("one private step (forward, backward, clip, noise, SGD), best of several, ms")
    cases = {
        "MLP 64-32-10, batch 72": (lambda: MLP(64, [32], 10), torch.randn(72, 64), 200),
        "MLP 784-512-512-10, batch 256": (
            lambda: MLP(784, [512, 512], 10),
            torch.randn(256, 784),
            15,
        ),
        "tanh VGG 32-64-128, batch 32": (
            lambda: DPVGG((3, 32, 32), 10),
            torch.randn(32, 3, 32, 32),
            3,
        ),
    }
    for name, (build, x, repeats) in cases.items():
        y = torch.randint(0, 10, (len(x),))
        ways = {"ours ghost": ghost_step, "ours vmap": vmap_step}
        if opacus is not None:
            ways |= {"Opacus hooks": opacus_hooks, "Opacus ghost": opacus_ghost}
        found = {}
        for way, make in ways.items():
            torch.manual_seed(0)
            found[way] = milliseconds(make(build(), x, y), repeats)
        text = ", ".join(f"{way} {value:.2f}" for way, value in found.items())
        if opacus is not None:
            best = min(found["Opacus hooks"], found["Opacus ghost"])
            text += f" | best of Opacus over ours (ghost): {best / found['ours ghost']:.2f} x"
        print(f"  {name}: {text}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    noise()
    steps()
