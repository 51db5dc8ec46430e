"""Sums of clipped per-example gradients: both ways against one backward pass per example."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules.components.privacy import GhostClipper, clipped_sum
from lightning_modules.components.privacy.ghost import mixing_layers, unsupported_layers
from lightning_modules.components.privacy.networks import DPVGG, MLP


class Text(nn.Module):
    """Embedding with padding, layer norm, linear over positions, weights tied to the output."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.norm = nn.LayerNorm(6)
        self.mix = nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.mix(torch.tanh(self.mix(self.embed(x)))))  # mix is used twice
        return self.out(h).mean(1)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.group = nn.GroupNorm(2, 4)
        self.second = nn.Conv2d(4, 6, 3, groups=2, dilation=2, padding=2, bias=False)
        self.line = nn.Conv1d(6, 3, 3, stride=2)
        self.out = nn.Linear(3, 11)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.second(self.group(self.first(x))))
        return self.out(self.line(h.flatten(2)).mean(2))


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (5, 7))
    return {
        "mlp": (MLP(12, [8, 8], 11), torch.randn(5, 3, 4)),
        "conv": (Conv(), torch.randn(5, 2, 9, 9)),
        "vgg": (DPVGG((3, 8, 8), 11, [4, 4], 8), torch.randn(5, 3, 8, 8)),
        "text": (Text(False), tokens),
        "tied": (Text(True), tokens),
    }


def one_by_one(net: nn.Module, x: Tensor, y: Tensor, clip: float) -> dict[str, Tensor]:
    total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for i in range(len(x)):
        net.zero_grad()
        F.cross_entropy(net(x[i : i + 1]), y[i : i + 1]).backward()
        norm = torch.stack([p.grad.square().sum() for p in net.parameters()]).sum().sqrt()
        for name, p in net.named_parameters():
            total[name] += p.grad * min(1.0, clip / float(norm))
    return total


def by_hooks(net: nn.Module, x: Tensor, y: Tensor, clip: float, reduction: str = "mean"):
    clipper = GhostClipper(net, [n for n, _ in net.named_parameters()])
    clipper.start()
    F.cross_entropy(net(x), y, reduction=reduction).backward()
    result = clipper.clipped_sum(len(x), clip, float(len(x)) if reduction == "mean" else 1.0)
    clipper.close()
    return result


@pytest.mark.parametrize("name", ["mlp", "conv", "vgg", "text", "tied"])
@pytest.mark.parametrize("clip", [0.3, 100.0])
def test_both_ways_equal_one_backward_per_example(name: str, clip: float) -> None:
    net, x = networks()[name]
    y = torch.tensor([1, 4, 10, 0, 7])
    expected = one_by_one(net, x, y, clip)
    names = list(expected)

    def losses(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1], reduction="none")

    vmapped = clipped_sum(net, losses, (x, y), clip, names)
    chunked = clipped_sum(net, losses, (x, y), clip, names, chunk_size=2)
    ghost = by_hooks(net, x, y, clip)
    summed = by_hooks(net, x, y, clip, "sum")
    for found in (vmapped, chunked, ghost, summed):
        assert found.examples == 5
        assert int(found.clipped) == (5 if clip < 1 else 0)
        for key in names:
            torch.testing.assert_close(found.gradients[key], expected[key], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("way", ["vmap", "ghost"])
def test_every_example_is_bounded_and_broken_ones_count_zero(way: str) -> None:
    net = MLP(4, [6], 3)
    names = [n for n, _ in net.named_parameters()]
    x, y = torch.randn(4, 4) * 100, torch.tensor([0, 1, 2, 0])

    def find(rows: Tensor, labels: Tensor):
        if way == "ghost":
            return by_hooks(net, rows, labels, 0.5)
        return clipped_sum(
            net,
            lambda b: F.cross_entropy(net(b[0]), b[1], reduction="none"),
            (rows, labels),
            0.5,
            names,
        )

    for i in range(4):
        one = find(x[i : i + 1], y[i : i + 1]).gradients
        assert torch.cat([g.flatten() for g in one.values()]).norm() <= 0.5
    broken = x.clone()
    broken[2, 0] = float("nan")
    found = find(broken, y)
    assert int(found.nonfinite) == 1
    keep = torch.tensor([0, 1, 3])
    clean = find(x[keep], y[keep])
    for name in names:
        torch.testing.assert_close(found.gradients[name], clean.gradients[name])


@pytest.mark.parametrize("name", ["mlp", "conv", "text"])
def test_an_empty_batch_gives_zero(name: str) -> None:
    net, x = networks()[name]
    y = torch.zeros(0, dtype=torch.int64)
    clipper = GhostClipper(net, [n for n, _ in net.named_parameters()])
    clipper.start()
    if name == "mlp":  # the others' pooling has no empty mean; no record is no gradient
        F.cross_entropy(net(x[:0]), y, reduction="sum").backward()
    found = clipper.clipped_sum(0, 1.0, 0.0)
    clipper.close()
    assert all(not g.any() for g in found.gradients.values())
    names = [n for n, _ in net.named_parameters()]
    other = clipped_sum(
        net, lambda b: F.cross_entropy(net(b[0]), b[1], reduction="none"), (x[:0], y), 1.0, names
    )
    assert other.examples == 0
    assert all(not g.any() for g in other.gradients.values())


def test_dropout_draws_a_mask_for_every_example() -> None:
    net = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 2))
    x = torch.ones(2, 4)
    found = []
    for rows in (slice(0, 1), slice(1, 2)):
        torch.manual_seed(3)
        both = clipped_sum(net, lambda b: net(b).sum(1), x, 1e6, ["2.weight"])
        torch.manual_seed(3)
        one = clipped_sum(net, lambda b: net(b).sum(1), x[rows], 1e6, ["2.weight"])
        found.append(torch.equal(both.gradients["2.weight"], 2 * one.gradients["2.weight"]))
    assert not all(found)


def test_a_reduced_loss_and_layers_without_a_rule_are_refused() -> None:
    net = MLP(4, [3], 2)
    with pytest.raises(ValueError, match=r"must have shape \(1,\), got \(\)"):
        clipped_sum(net, lambda b: net(b).mean(), torch.randn(3, 4), 1.0, ["layers.0.weight"])
    odd = nn.Sequential(nn.Linear(3, 3), nn.PReLU())
    assert unsupported_layers(odd) == ["1 (PReLU)"]
    with pytest.raises(ValueError, match="no rule for 1"):
        GhostClipper(odd, ["0.weight"])
    assert mixing_layers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) == ["1"]
    moved = nn.Linear(4, 2)
    clipper = GhostClipper(moved, ["weight", "bias"])
    clipper.start()
    moved(torch.randn(3, 4)).sum().backward()
    with pytest.raises(ValueError, match="saw 3 rows for 2 examples"):
        clipper.clipped_sum(2, 1.0, 1.0)
