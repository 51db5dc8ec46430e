"""Norms: gradients, scale, statistics for evaluation, and two processes against one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_modules.bngrad import DeepBNMLP
from lightning_modules.bngrad.norms import BatchNorm, SampleNorm, build_norm, frozen_statistics

VARIANTS = [
    (kind, center, scale, eps)
    for kind in (BatchNorm, SampleNorm)
    for center in (True, False)
    for scale in ("sqrt_n", 1.0)
    for eps in (0.0, 1e-3)
]


def batch(n: int = 6, d: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("kind", "center", "scale", "eps"), VARIANTS)
def test_values_and_gradients(kind, center, scale, eps):
    norm = kind(4, center=center, scale=scale, eps=eps).double()
    h = batch() + 0.3
    axis = 0 if kind is BatchNorm else 1
    size = h.shape[axis]
    inner = h - h.mean(axis, keepdim=True) if center else h
    c = size**0.5 if scale == "sqrt_n" else scale
    expected = c * inner / (inner.square().sum(axis, keepdim=True) + size * eps).sqrt()
    torch.testing.assert_close(norm(h), expected, rtol=1e-12, atol=1e-13)
    with frozen_statistics(norm):
        assert torch.autograd.gradcheck(norm, h.requires_grad_())


def test_framework_norm_is_the_framework_norm():
    norm = build_norm("torch_bn", 4)
    assert isinstance(norm, nn.BatchNorm1d)
    assert (norm.eps, norm.momentum, norm.affine) == (1e-5, 0.1, True)


def test_rows_of_the_gradient_are_orthogonal_to_those_of_the_weight():
    torch.manual_seed(0)
    for norm in ("bn", "bn_nocenter"):
        net = DeepBNMLP(12, 5, depth=6, width=8, norm=norm, bias=False).double()
        x, y = batch(20, 12), torch.randint(5, (20,))
        nn.functional.cross_entropy(net(x), y).backward()
        for block in net.blocks:
            w, g = block.linear.weight, block.linear.weight.grad
            assert (w * g).sum(1).abs().max() < 1e-15
            assert g.abs().max() > 1e-6


@pytest.mark.parametrize("scale", ["sqrt_n", 1.0])
@pytest.mark.parametrize("center", [True, False])
def test_running_statistics_of_one_batch_reproduce_it(center, scale):
    norm = BatchNorm(4, center=center, scale=scale).double()
    h = 3 * batch(10) + 1
    torch.testing.assert_close(norm.eval()(h), h)  # nothing seen yet: standard normal
    in_training = norm.train()(h)
    torch.testing.assert_close(norm.eval()(h), in_training)
    # a sample's output does not depend on the others
    torch.testing.assert_close(norm(h[3:4]), in_training[3:4])


def test_running_statistics_are_a_corrected_exponential_mean():
    norm = BatchNorm(3, center=True, momentum=0.25).double()
    batches = [batch(8, 3, seed) + seed for seed in range(5)]
    weights = torch.tensor([0.25 * 0.75 ** (4 - i) for i in range(5)], dtype=torch.float64)
    for h in batches:
        norm(h)
    means = torch.stack([h.mean(0) for h in batches])
    squares = torch.stack([h.var(0, unbiased=False) for h in batches])
    mean = (weights[:, None] * means).sum(0) / weights.sum()
    square = (weights[:, None] * squares).sum(0) / weights.sum()
    x = batch(2, 3, 99)
    torch.testing.assert_close(norm.eval()(x), (x - mean) / square.sqrt())
    norm.reset_statistics()
    torch.testing.assert_close(norm(x), x)


def test_without_running_statistics_evaluation_uses_its_batch():
    norm = BatchNorm(4, track_running_stats=False).double()
    h = batch()
    torch.testing.assert_close(norm.train()(h), norm.eval()(h))
    assert not list(norm.buffers())


def test_frozen_statistics():
    for norm in (BatchNorm(4), nn.BatchNorm1d(4)):
        norm(batch().float())
        before = {k: v.clone() for k, v in norm.state_dict().items()}
        with frozen_statistics(norm):
            norm(batch(seed=1).float())
        for name, value in norm.state_dict().items():
            assert torch.equal(value, before[name])
        norm(batch(seed=1).float())
        assert not torch.equal(next(iter(norm.buffers())), next(iter(before.values())))


def synchronised(center: bool, scale: str | float) -> list:
    """Job of one rank: unequal shares of one batch; returns output, gradients, statistics."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    h = (batch(10, 4, 3) + 0.2)[[slice(0, 6), slice(6, 10)][rank]].requires_grad_()
    norm = BatchNorm(4, center=center, scale=scale, sync=True).double()
    out = norm(h)
    weight = torch.linspace(-1, 1, 40, dtype=torch.float64).view(10, 4)
    (out.sin() * weight[[slice(0, 6), slice(6, 10)][rank]]).sum().backward()
    assert torch.autograd.gradcheck(norm.eval(), h)
    return [out.detach(), h.grad, [b.clone() for b in norm.buffers()]]


@pytest.mark.parametrize(("center", "scale"), [(True, "sqrt_n"), (False, "sqrt_n"), (True, 1.0)])
def test_two_processes_equal_one(ranks, center, scale):
    h = (batch(10, 4, 3) + 0.2).requires_grad_()
    norm = BatchNorm(4, center=center, scale=scale).double()
    out = norm(h)
    weight = torch.linspace(-1, 1, 40, dtype=torch.float64).view(10, 4)
    (out.sin() * weight).sum().backward()
    results = ranks(synchronised, center, scale)
    torch.testing.assert_close(torch.cat([r[0] for r in results]), out.detach(), atol=1e-13, rtol=0)
    torch.testing.assert_close(torch.cat([r[1] for r in results]), h.grad, atol=1e-13, rtol=0)
    for result in results:
        for theirs, ours in zip(result[2], norm.buffers(), strict=True):
            torch.testing.assert_close(theirs, ours, atol=1e-13, rtol=0)


def deep_gradient(depth: int, center: bool) -> list:
    """Job of one rank: averaged gradients of a deep network over two halves of a batch."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = DeepBNMLP(16, 4, depth=depth, width=16, center=center, sync_stats=True)
    net = nn.parallel.DistributedDataParallel(net.double())
    half = slice(0, 10) if dist.get_rank() == 0 else slice(10, 20)
    x, y = batch(20, 16)[half], (torch.arange(20) % 4)[half]
    nn.functional.cross_entropy(net(x), y).backward()
    return [p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize("center", [True, False])
def test_deep_network_on_two_processes_equals_one(ranks, center):
    torch.manual_seed(0)
    net = DeepBNMLP(16, 4, depth=30, width=16, center=center).double()
    nn.functional.cross_entropy(net(batch(20, 16)), torch.arange(20) % 4).backward()
    for gradients in ranks(deep_gradient, 30, center):
        for theirs, parameter in zip(gradients, net.parameters(), strict=True):
            torch.testing.assert_close(theirs, parameter.grad, atol=1e-12, rtol=1e-9)
