"""The network: initialisation, depth, gains, statistics, and the published depth results."""

import math
import warnings

import pytest
import torch
from torch import nn

from lightning_modules.bngrad import Block, DeepBNMLP, isometry_gap
from lightning_modules.bngrad.activations import ACTIVATIONS
from lightning_modules.bngrad.initialisation import haar_orthogonal, initialise, retract
from lightning_modules.bngrad.norms import NORMS

DOUBLE = torch.float64


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradient_norms(net: DeepBNMLP, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    maps = net.linear_maps
    loss = nn.functional.cross_entropy(net(x), y)
    return torch.stack([g.norm() for g in torch.autograd.grad(loss, [m.weight for m in maps])])


# ---------------------------------------------------------------------- initialisation


def test_orthogonal_weights_are_uniform():
    q = haar_orthogonal(4000, 3, 3, seeded(0), DOUBLE)
    eye = torch.eye(3, dtype=DOUBLE).expand(4000, 3, 3)
    torch.testing.assert_close(q @ q.mT, eye, atol=1e-12, rtol=0)
    # without the signs of R the diagonal is biased; Haar: mean 0, mean square 1 / d, both signs
    diagonal = q.diagonal(dim1=-2, dim2=-1)
    assert diagonal.mean().abs() < 4 * math.sqrt(1 / 3 / 12000)
    assert abs(q.square().mean() - 1 / 3) < 1e-12
    trace = diagonal.sum(-1)
    assert abs(trace.square().mean() - 1) < 4 * trace.square().std() / math.sqrt(4000)
    assert abs((torch.linalg.det(q) > 0).double().mean() - 0.5) < 0.04


@pytest.mark.parametrize(("rows", "columns"), [(3, 8), (8, 3)])
def test_rectangular_weights_are_semi_orthogonal(rows, columns):
    q = haar_orthogonal(5, rows, columns, seeded(1), DOUBLE)
    short = q @ q.mT if rows < columns else q.mT @ q
    torch.testing.assert_close(short, torch.eye(3, dtype=DOUBLE).expand(5, 3, 3))


def test_low_precision_weights_are_drawn_in_single_precision():
    weight = haar_orthogonal(1, 32, 32, seeded(2), torch.bfloat16)[0].float()
    assert (weight @ weight.T - torch.eye(32)).abs().max() < 0.02


@pytest.mark.parametrize(("init", "fan"), [("xavier_normal", 350), ("kaiming", 400)])
def test_gaussian_weights(init, fan):
    layer = nn.Linear(400, 300)
    bias = layer.bias.clone()
    initialise([layer], init, 5 / 3, seeded(3))
    assert float(layer.weight.detach().std()) == pytest.approx(5 / 3 / math.sqrt(fan), rel=0.01)
    assert torch.equal(layer.bias, bias)


def test_retraction_gives_the_near_orthogonal_weight():
    torch.manual_seed(0)
    net = DeepBNMLP(5, 2, depth=4, width=8)
    before = [layer.weight.detach().clone() for layer in net.linear_maps]
    with torch.no_grad():
        for layer in net.linear_maps:
            layer.weight += 1e-3 * torch.randn_like(layer.weight)
    retract(net.linear_maps)
    for layer, weight in zip(net.linear_maps, before, strict=True):
        w = layer.weight.detach()
        gram = w @ w.T if len(w) <= w.shape[1] else w.T @ w
        torch.testing.assert_close(gram, torch.eye(len(gram)), atol=1e-5, rtol=0)
        assert (w - weight).abs().max() < 1e-2


# ---------------------------------------------------------------------- forward


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("order", ["norm_act", "act_norm"])
def test_every_norm_activation_and_order_runs(norm, order):
    torch.manual_seed(0)
    for activation in ACTIVATIONS:
        with warnings.catch_warnings(action="ignore"):
            # behind a ReLU a feature may be zero for all 16 samples
            net = DeepBNMLP(6, 3, 4, 8, activation, norm, order=order, eps=1e-6)
        X = torch.randn(16, 6)
        logits, hidden = net(X.view(16, 2, 3), return_hidden=True)
        assert logits.shape == (16, 3)
        assert hidden.fc.shape == hidden.norm.shape == hidden.act.shape == (4, 16, 8)
        logits.square().mean().backward()
        assert all(torch.isfinite(p.grad).all() for p in net.parameters() if p.grad is not None)
        # the block alone lets the norm's kernel multiply by the gain
        torch.testing.assert_close(
            hidden.act[-1] if order == "norm_act" else hidden.norm[-1],
            net.blocks[3](net.blocks[2](net.blocks[1](net.blocks[0](X)))),
            rtol=1e-5,
            atol=1e-6,
        )


def test_gains_follow_the_power_law_and_can_be_given_or_moved():
    net = DeepBNMLP(4, 2, depth=5, width=4, gain_exponent=0.4)
    expected = torch.arange(1, 6).float() ** -0.4
    torch.testing.assert_close(net.gains, expected)
    net.gain_exponent = 0.0
    assert net.gains.tolist() == [1.0] * 5
    given = DeepBNMLP(4, 2, depth=3, width=4, gains=[0.5, 0.25, 2.0])
    assert given.gains.tolist() == [0.5, 0.25, 2.0]
    x = torch.randn(8, 4)
    _, norm, act, out = given.blocks[2].states(x)
    torch.testing.assert_close(act, torch.sin(2.0 * norm))
    assert out is act
    with pytest.raises(ValueError, match=r"depth=3, got 2"):
        DeepBNMLP(4, 2, depth=3, width=4, gains=[1.0, 1.0])


def test_learnable_gains_start_at_the_power_law_and_get_a_gradient():
    net = DeepBNMLP(4, 2, depth=5, width=4, learnable_gains=True)
    torch.testing.assert_close(net.gains.detach(), torch.arange(1, 6).float() ** -0.5)
    net(torch.randn(8, 4)).square().mean().backward()
    assert all(block.gain.grad.abs() > 0 for block in net.blocks)
    with pytest.raises(ValueError, match="learnable_gains"):
        net.gain_exponent = 1.0


def test_rescaled_logits_have_one_size_at_any_depth():
    sizes = {}
    for rescale in (False, True):
        for depth in (10, 90):
            torch.manual_seed(0)
            net = DeepBNMLP(32, 10, depth, 32, rescale_logits=rescale, bias=False)
            sizes[rescale, depth] = float(net(torch.randn(64, 32)).detach().std())
    assert sizes[False, 90] < 0.5 * sizes[False, 10]
    assert sizes[True, 90] == pytest.approx(sizes[True, 10], rel=0.2)
    torch.manual_seed(0)
    behind = DeepBNMLP(8, 2, 9, 8, order="act_norm", rescale_logits=True)
    torch.manual_seed(0)
    plain = DeepBNMLP(8, 2, 9, 8, order="act_norm")
    x = torch.randn(16, 8)
    assert torch.equal(behind(x), plain(x))


def test_skip_makes_a_residual_network():
    torch.manual_seed(0)
    net = DeepBNMLP(6, 2, depth=2, width=6, skip=1.0)
    x = torch.randn(12, 6)
    first = net.blocks[0](x)
    assert net.blocks[0].skip == 0
    expected = net.head(
        net.blocks[1]._activate(net.blocks[1].norm(net.blocks[1].linear(first))) + first
    )
    torch.testing.assert_close(net(x), expected)


def test_block_alone_in_another_network():
    net = nn.Sequential(Block(5, 7, gain=0.5), nn.ReLU(), nn.Linear(7, 1))
    assert net(torch.randn(10, 5)).shape == (10, 1)
    with pytest.raises(ValueError, match="feature 0"):
        net(torch.ones(10, 5))


def test_checkpointed_segments_give_the_same_gradients_and_statistics():
    nets = []
    for segments in (0, 3):
        torch.manual_seed(0)
        nets.append(DeepBNMLP(6, 3, depth=8, width=8, checkpoint_segments=segments))
        x = torch.randn(16, 6, generator=seeded(5))
        nets[-1](x).square().mean().backward()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    for a, b in zip(nets[0].buffers(), nets[1].buffers(), strict=True):
        torch.testing.assert_close(a, b)


# ---------------------------------------------------------------------- statistics


def test_predictions_do_not_depend_on_the_batch():
    torch.manual_seed(0)
    net = DeepBNMLP(6, 3, depth=10, width=8)
    for _ in range(5):
        net(torch.randn(64, 6))
    x = torch.randn(20, 6)
    net.eval()
    torch.testing.assert_close(net(x)[4:5], net(x[4:5]))


@pytest.mark.parametrize("norm", ["bn", "bn_nocenter", "torch_bn"])
def test_refreshed_statistics_are_the_mean_over_batches(norm):
    torch.manual_seed(0)
    net = DeepBNMLP(6, 3, depth=3, width=8, norm=norm)
    net(5 * torch.randn(64, 6) + 2)  # stale
    batches = [torch.randn(32, 6) for _ in range(4)]
    assert net.eval().refresh_statistics(iter(batches)) == 4
    assert not net.training
    first = net.blocks[0]
    outputs = [first.linear(x).detach() for x in batches]
    if norm == "bn_nocenter":
        expected = torch.stack([h.square().mean(0) for h in outputs]).mean(0)
        torch.testing.assert_close(first.norm.running_square, expected)
    elif norm == "bn":
        expected = torch.stack([h.var(0, unbiased=False) for h in outputs]).mean(0)
        torch.testing.assert_close(first.norm.running_square, expected)
        assert float(first.norm.running_weight) == pytest.approx(1.0)
    else:
        expected = torch.stack([h.var(0) for h in outputs]).mean(0)
        torch.testing.assert_close(first.norm.running_var, expected)
        assert first.norm.momentum == 0.1


# ---------------------------------------------------------------------- depth


def figure_input(d: int, f: float, generator: torch.Generator) -> torch.Tensor:
    u, v = torch.rand(2, d, dtype=DOUBLE, generator=generator)
    return (1 - f) * torch.eye(d, dtype=DOUBLE) + f * torch.outer(u, v)


def linear_net(d: int, depth: int, seed: int, **options) -> DeepBNMLP:
    options = {"activation": "identity", "norm": "bn_nocenter", "gain_exponent": 0.0} | options
    net = DeepBNMLP(d, d, depth, d, bias=False, scale=1.0, **options).double()
    # drawn anew in double precision
    initialise(net.linear_maps, options.get("init", "orthogonal"), 1.0, seeded(seed))
    return net


def test_isometry_gap_contracts_at_the_predicted_rate():
    d = 16
    gaps = []
    with torch.no_grad():
        for seed in range(10):
            x = figure_input(d, 0.005, seeded(seed))
            _, hidden = linear_net(d, 60, seed)(x, return_hidden=True)
            gaps.append(isometry_gap(hidden.norm))
    mean = torch.stack(gaps).mean(0)[10:60].log().numpy()
    layers = torch.arange(len(mean)).double().numpy()
    slope = ((layers - layers.mean()) * (mean - mean.mean())).sum()
    slope /= ((layers - layers.mean()) ** 2).sum()
    assert slope == pytest.approx(math.log(1 - 2 / (d + 2)), rel=0.1)


def test_gradients_stay_bounded_for_orthogonal_and_explode_for_gaussian_weights():
    logs = {}
    for init in ("orthogonal", "xavier_normal"):
        norms = []
        for seed in range(5):
            net = linear_net(16, 500, seed, init=init)
            x = torch.randn(16, 16, dtype=DOUBLE, generator=seeded(100 + seed))
            y = torch.randint(16, (16,), generator=seeded(200 + seed))
            norms.append(gradient_norms(net, x, y)[1].log())
        logs[init] = float(torch.stack(norms).mean())
    assert logs["orthogonal"] < 0
    assert logs["xavier_normal"] > 8


def test_gradients_are_equal_at_all_depths_for_isometric_input():
    net = linear_net(12, 300, 0)
    x = haar_orthogonal(1, 12, 12, seeded(1), DOUBLE)[0]
    norms = gradient_norms(net, x, torch.arange(12) % 12)
    _, hidden = net(x, return_hidden=True)
    assert isometry_gap(hidden.norm).max() < 1e-10
    assert float(norms[0]) == pytest.approx(float(norms[150]), rel=1e-8)


def test_batch_smaller_than_width_explodes():
    logs = {}
    for n in (8, 16, 32):
        net = linear_net(16, 250, 0)
        x = torch.randn(n, 16, dtype=DOUBLE, generator=seeded(0))
        y = torch.randint(16, (n,), generator=seeded(1))
        with warnings.catch_warnings(action="ignore"):
            logs[n] = float(gradient_norms(net, x, y)[1].log())
    assert logs[8] > 5
    assert max(logs[16], logs[32]) < 1


def test_a_thousand_layers():
    torch.manual_seed(0)
    net = DeepBNMLP(100, 10, depth=1000, width=100, gain_exponent=0.5)
    x = torch.randn(100, 100, generator=seeded(1))
    norms = gradient_norms(net, x, torch.randint(10, (100,), generator=seeded(2)))
    assert len(norms) == 1001
    assert torch.isfinite(norms).all()
    assert norms.min() > 1e-3
    assert norms.max() < 1


def test_large_epsilon_with_large_exponent_loses_the_signal():
    with pytest.warns(UserWarning, match="eps=1e-05"):
        net = DeepBNMLP(16, 4, 500, 64, norm="torch_bn", gain_exponent=1.0)
    x = torch.randn(100, 16, generator=seeded(1))
    assert net(x).detach().std(0).max() < 1e-8
    exact = DeepBNMLP(16, 4, 500, 64, gain_exponent=1.0, bias=False)
    assert exact(x).std(0).min() > 1e-4
