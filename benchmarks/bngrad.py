"""Speed of the layer-wise monitor and of deep training steps, beside the plain way of doing each.

python benchmarks/bngrad.py [--compile]
"""

import argparse
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_modules.bngrad import DeepBNMLP, isometry_gap
from lightning_modules.bngrad.activations import Sine
from lightning_modules.bngrad.figures import NETWORK_ROLES
from lightning_modules.bngrad.initialisation import haar_orthogonal
from lightning_modules.components.isometry import batched_isometry_gap
from lightning_modules.components.propagation import measure_signals

DEPTH, WIDTH, BATCH = 200, 100, 100


def seconds(function: Callable[[], object], repeats: int = 5) -> float:
    """CPU seconds of one call, the smallest of several."""
    function()
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        function()
        best = min(best, time.process_time() - start)
    return best


def layer_loop(net: DeepBNMLP, x: Tensor, y: Tensor) -> list[tuple[float, ...]]:
    """The same measurements the plain way: singular values layer by layer, `.item()` each."""
    logits, hidden = net(x, return_hidden=True)
    loss = F.cross_entropy(logits, y)
    gradients = torch.autograd.grad(loss, [layer.weight for layer in net.linear_maps])
    rows = []
    for layer, *states, gradient in zip(net.linear_maps, *hidden, gradients, strict=False):
        gaps = [isometry_gap(m.detach().double()).item() for m in (layer.weight, *states)]
        rows.append((*gaps, gradient.norm().item()))
    return rows


def measure(norm: str, x: Tensor, y: Tensor) -> None:
    """Reports a whole measurement, and how much of it each part takes on both sides."""
    net = DeepBNMLP(WIDTH, 10, DEPTH, WIDTH, norm=norm)
    weights = [layer.weight for layer in net.linear_maps]
    with torch.no_grad():
        hidden = net(x, return_hidden=True)[1]
        matrices = torch.cat([torch.stack(weights[:DEPTH]), *hidden])

    def loss() -> Tensor:
        return F.cross_entropy(net(x), y)

    ours = seconds(lambda: measure_signals(net, loss, NETWORK_ROLES))
    theirs = seconds(lambda: layer_loop(net, x, y), 3)
    common = seconds(lambda: torch.autograd.grad(loss(), weights))
    gaps = seconds(lambda: [batched_isometry_gap(m, x.dtype) for m in matrices.split(50)])
    loop = seconds(lambda: [isometry_gap(m.double()).item() for m in matrices], 3)
    report(f"measure every layer, {norm}, against a loop over layers", ours, theirs)
    report("  of it forward and backward pass, the same on both sides", common, common)
    report(f"  of it the gaps of {len(matrices)} matrices", gaps, loop)
    report("  all but forward and backward pass", ours - common, theirs - common)


def plain_sequential(depth: int, width: int) -> nn.Sequential:
    """The layers of the default network without gains, from the framework's modules alone."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.BatchNorm1d(width), Sine()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def train_step(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def report(name: str, ours: float, theirs: float) -> None:
    print(f"{name:58s} {1e3 * ours:8.1f} ms {1e3 * theirs:8.1f} ms   {theirs / ours:5.2f} x")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true", help="also compile the block")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, WIDTH), torch.randint(10, (BATCH,))
    print(
        f"{DEPTH} layers of {WIDTH} x {WIDTH}, batch {BATCH}, {torch.get_num_threads()} thread(s)"
    )
    print(f"{'':58s} {'ours':>11s} {'plain':>11s}   plain / ours")

    for norm in ("bn_nocenter", "bn"):
        measure(norm, x, y)
    plain = seconds(train_step(plain_sequential(DEPTH, WIDTH), x, y))
    for name, options in (
        ("training step, default (bn), against nn.Sequential", {}),
        ("training step, default without running statistics", {"track_running_stats": False}),
        ("training step, bn_nocenter", {"norm": "bn_nocenter"}),
        ("training step, torch_bn", {"norm": "torch_bn"}),
    ):
        report(
            name, seconds(train_step(DeepBNMLP(WIDTH, 10, DEPTH, WIDTH, **options), x, y)), plain
        )
    if arguments.compile:
        net = DeepBNMLP(WIDTH, 10, DEPTH, WIDTH)
        for block in net.blocks:
            block.compile()
        start = time.perf_counter()
        step = train_step(net, x, y)
        step()
        print(f"first compiled step: {time.perf_counter() - start:.1f} s")
        report("training step, default, blocks compiled", seconds(step), plain)
    ours = seconds(lambda: haar_orthogonal(DEPTH, WIDTH, WIDTH))
    theirs = seconds(lambda: [nn.init.orthogonal_(torch.empty(WIDTH, WIDTH)) for _ in range(DEPTH)])
    report("draw weights, one batched QR against a call per layer", ours, theirs)


if __name__ == "__main__":
    main()
