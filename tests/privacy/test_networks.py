"""Networks of private training."""

import pytest
import torch
from torch import nn

from lightning_modules import DPClassifier
from lightning_modules.components.privacy.ghost import mixing_layers, unsupported_layers
from lightning_modules.components.privacy.networks import DPVGG, MLP


def test_vgg_of_the_papers() -> None:
    torch.manual_seed(0)
    net = DPVGG((3, 32, 32), 10)
    assert [tuple(p.shape) for p in net.parameters() if p.dim() == 4] == [
        (32, 3, 3, 3), (32, 32, 3, 3), (64, 32, 3, 3), (64, 64, 3, 3), (128, 64, 3, 3),
        (128, 128, 3, 3),
    ]  # fmt: skip
    assert net.hidden.in_features == 4 * 4 * 128
    assert sum(p.numel() for p in net.parameters()) == 550_570
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert net(torch.randn(0, 3 * 32 * 32)).shape == (0, 10)
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            assert layer.weight.var().item() == pytest.approx(2 / layer.weight[0].numel(), rel=0.15)
        elif isinstance(layer, nn.Linear):
            assert layer.weight.var().item() == pytest.approx(2 / sum(layer.weight.shape), rel=0.15)
        if isinstance(layer, nn.Conv2d | nn.Linear):
            assert not layer.bias.any()
    assert not mixing_layers(net)
    assert not unsupported_layers(net)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="cannot be halved 3 times"):
        DPVGG((1, 28, 28), 10)
    with pytest.raises(ValueError, match="activation must be one of"):
        MLP(4, [3], 2, "gelu")
    with pytest.raises(ValueError, match="network=vgg takes inputs"):
        DPClassifier(network="vgg", sample_shape=[64], n_classes=10)
    built = DPClassifier(network="vgg", hidden=[4, 8], sample_shape=[1, 8, 8], n_classes=3)
    assert built(torch.randn(5, 1, 8, 8)).shape == (5, 3)
