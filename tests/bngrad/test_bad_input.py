"""What a user can get wrong, and the line that says so."""

import re
import warnings

import pytest
import torch

from lightning_modules import BNGrad
from lightning_modules.bngrad import Block, DeepBNMLP
from lightning_modules.bngrad.diagnosis import check_batch, divergence_message, unpack
from lightning_modules.bngrad.norms import BatchNorm, build_norm, settle


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"in_dim": 0}, "in_dim must be at least 1"),
        ({"activation": "gelu"}, "activation must be one of identity, sin, .*got 'gelu'"),
        ({"norm": "batch"}, "norm must be one of bn, bn_nocenter, ln, torch_bn, none, got 'batch'"),
        ({"order": "act"}, "order must be one of norm_act, act_norm, got 'act'"),
        (
            {"init": "normal"},
            "init must be one of orthogonal, xavier_normal, kaiming, got 'normal'",
        ),
        ({"scale": -1.0}, "scale must be 'sqrt_n' or a finite number above 0, got -1.0"),
        ({"eps": -1e-5}, "eps must be at least 0"),
        ({"gain_exponent": -0.5}, "gain_exponent must be a finite number of at least 0, got -0.5"),
        ({"gains": [1.0, 0.0]}, "gains must be finite numbers above 0"),
        ({"gains": [1.0]}, "one number per block: depth=2, got 1"),
        ({"skip": -1.0}, "skip must be at least 0"),
        ({"momentum": 0.0}, r"momentum must be in \(0, 1\], got 0.0"),
        ({"checkpoint_segments": -1}, "checkpoint_segments must be at least 0"),
        ({"norm": "torch_bn", "sync_stats": True}, "torch_bn synchronises by"),
    ],
)
def test_arguments_of_the_network(arguments, message):
    with pytest.raises(ValueError, match=message):
        DeepBNMLP(**{"in_dim": 4, "out_dim": 2, "depth": 2, "width": 4} | arguments)


@pytest.mark.parametrize("sizes", [{}, {"in_dim": 4, "out_dim": 2}])
def test_the_module_checks_before_it_sees_data(sizes):
    for arguments, message in (
        ({"activation": "gelu"}, "activation"),
        ({"init": "normal"}, "init"),
        ({"depth": 0}, "depth"),
        ({"task": "ranking"}, "task must be classification or regression, got 'ranking'"),
        ({"refresh_batches": -1}, "refresh_batches"),
        ({"loss_weights": {"mse": 1.0}}, "no term 'mse'"),
    ):
        with pytest.raises(ValueError, match=message):
            BNGrad(**sizes, **arguments)


def test_batch_of_one_needs_running_statistics():
    net = DeepBNMLP(4, 2, depth=2, width=4)
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
        net(torch.randn(1, 4))
    assert net.eval()(torch.randn(1, 4)).shape == (1, 2)
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
        DeepBNMLP(4, 2, depth=2, width=4, track_running_stats=False).eval()(torch.randn(1, 4))
    with pytest.raises(ValueError, match="at least 2 samples"):
        DeepBNMLP(4, 2, depth=2, width=4, norm="torch_bn")(torch.randn(1, 4))
    assert DeepBNMLP(4, 2, depth=2, width=4, norm="ln")(torch.randn(1, 4)).shape == (1, 2)


def test_batch_smaller_than_width_warns_once_with_both_numbers():
    net = DeepBNMLP(4, 2, depth=2, width=16)
    with pytest.warns(UserWarning, match="batch of 8 samples is smaller than width=16"):
        net(torch.randn(8, 4))
    with warnings.catch_warnings(action="error"):
        net(torch.randn(8, 4))
        DeepBNMLP(4, 2, depth=2, width=16, norm="ln")(torch.randn(8, 4))
        DeepBNMLP(4, 2, depth=2, width=16).eval()(torch.randn(8, 4))


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_gains_in_front_of_a_homogeneous_activation_warn(activation):
    with pytest.warns(UserWarning, match=f"no effect with activation='{activation}'"):
        DeepBNMLP(4, 2, depth=3, width=4, activation=activation)
    with warnings.catch_warnings(action="error"):
        DeepBNMLP(4, 2, depth=3, width=4, activation=activation, gain_exponent=0.0)
        DeepBNMLP(4, 2, depth=3, width=4, activation=activation, norm="none")
        DeepBNMLP(4, 2, depth=3, width=4, activation="shaped_relu")


@pytest.mark.parametrize("center", [True, False])
def test_zero_features_are_named(center):
    net = DeepBNMLP(4, 2, depth=3, width=4, center=center)
    x = torch.randn(8, 4)
    with torch.no_grad():
        net.blocks[1].linear.weight[2] = 0
        net.blocks[1].linear.bias[2] = 0.3 if center else 0.0
    what = "is the same" if center else "is zero"
    with pytest.raises(ValueError, match=f"feature 2 of block 1 {what} for all samples"):
        net(x)
    forgiving = DeepBNMLP(4, 2, depth=3, width=4, center=center, eps=1e-5)
    forgiving.load_state_dict(net.state_dict())
    assert torch.isfinite(forgiving(x)).all()
    # several processes take another way through the statistics
    norm = BatchNorm(4, center=center)
    *_, norm.pending = norm._from_sums(x)
    settle([norm])
    dead = x.clone()
    dead[:, 3] = 0.1 if center else 0.0
    *_, norm.pending = norm._from_sums(dead)
    with pytest.raises(ValueError, match="feature 3"):
        settle([norm])


def test_zero_samples_of_layer_normalisation_are_named():
    net = DeepBNMLP(4, 2, depth=3, width=4, norm="ln", bias=False)
    x = torch.randn(8, 4)
    x[5] = 0
    with pytest.raises(ValueError, match="sample 5 has equal features in block 0"):
        net(x)


def test_inputs_of_another_shape_or_type():
    net = DeepBNMLP(64, 2, depth=2, width=4)
    with pytest.raises(ValueError, match=r"\(9, 28, 28\) has 784 features .* in_dim=64"):
        net(torch.randn(9, 28, 28))
    with pytest.raises(TypeError, match=r"floating point, got torch\.uint8"):
        net(torch.zeros(9, 64, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("x", "y", "task", "message"),
    [
        (
            torch.full((3, 2), torch.nan),
            torch.zeros(3).long(),
            "classification",
            "first in sample 0",
        ),
        (torch.ones(3, 2), torch.zeros(3), "classification", "task=regression"),
        (torch.ones(3, 2), torch.tensor([0, 1, 4]), "classification", r"\[0, 4\], out_dim=4"),
        (torch.ones(3, 2), torch.tensor([0, -1, 2]), "classification", r"\[-1, 2\]"),
        (torch.ones(3, 2), torch.zeros(3, 4).long(), "classification", r"needs \(3,\)"),
        (torch.ones(3, 2), torch.zeros(3, 1), "regression", r"needs \(3, 4\)"),
    ],
)
def test_batches(x, y, task, message):
    with pytest.raises(ValueError, match=message):
        check_batch(x, y, 4, task)


def test_forms_of_a_batch():
    x, y = torch.ones(2, 3), torch.zeros(2)
    for batch in ((x, y), [x, y], {"x": x, "y": y}):
        assert unpack(batch) == (x, y)
    assert unpack(x) == (x, None)
    with pytest.raises(TypeError, match=re.escape("must be (x, y) or a dictionary")):
        unpack("x")


def test_divergence_names_the_layer_of_the_largest_gradient():
    net = DeepBNMLP(4, 2, depth=3, width=4)
    assert "no step before" in divergence_message(net, float("nan"), 0)
    for i, layer in enumerate(net.linear_maps):
        layer.weight.grad = torch.full_like(layer.weight, 1.0 if i != 2 else 5.0)
    text = divergence_message(net, float("nan"), 7)
    assert "loss is nan at iteration 7" in text
    assert "linear map 2 (norm 20)" in text
    for hint in ("gain_exponent (now 0.5)", "width=4", "eps (now 0)"):
        assert hint in text


def test_block_and_norm():
    with pytest.raises(ValueError, match=r"skip=1\.0 needs equal sizes, got 3 and 4"):
        Block(3, 4, skip=1.0)
    with pytest.raises(ValueError, match="norm must be one of"):
        build_norm("x", 3)
