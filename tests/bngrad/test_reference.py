"""Seeded cases of the published modules in double precision, and exact one-layer expectations."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lightning_modules.bngrad import DeepBNMLP, isometry_gap, orthogonality_gap
from lightning_modules.components.isometry import expected_log_norm, expected_one_layer_gap

REFERENCE = Path(__file__).parent / "reference"
CASES = json.loads((REFERENCE / "cases.json").read_text())
ONE_LAYER = json.loads((REFERENCE / "one_layer_gap.json").read_text())
# Zero eigenvalues that centring builds in are rounding noise in the reference; see its notes.
NOISE = 4.5


def close(actual: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=1e-10, atol=1e-12)


def build(case: dict, data: dict) -> DeepBNMLP:
    net = DeepBNMLP(
        case["in_dim"],
        case["out_dim"],
        depth=case["num_layers"],
        width=case["width"],
        activation=case["activation"],
        norm=case["norm"],
        center=case["center"],
        scale=case["row_scale"],
        order=case["order"],
        gain_exponent=case["gain_exponent"],
        init=case["init"],
        bias=case["bias"],
    ).double()
    with torch.no_grad():
        for i, layer in enumerate(net.linear_maps):
            layer.weight.copy_(torch.from_numpy(data[f"w{i}"]))
            if case["bias"]:
                layer.bias.copy_(torch.from_numpy(data[f"b{i}"]))
    return net


@pytest.mark.parametrize("name", CASES)
def test_case_of_the_published_modules(name):
    case, data = CASES[name], dict(np.load(REFERENCE / f"{name}.npz"))
    depth = case["num_layers"]
    net = build(case, data)
    logits, hidden = net(torch.from_numpy(data["x"]), return_hidden=True)
    loss = nn.functional.cross_entropy(logits, torch.from_numpy(data["y"]))
    loss.backward()
    close(logits, data["logits"])
    close(logits, data[f"h_fc_{depth}"])
    close(loss, data["loss"])
    for kind in ("fc", "norm", "act"):
        states = getattr(hidden, kind)
        for layer in range(depth):
            close(states[layer], data[f"h_{kind}_{layer}"])
        gaps, expected = isometry_gap(states).detach(), data[f"isogap_{kind}"]
        if name == "linear_center":
            compared = np.arange(depth) == 0 if kind == "fc" else np.zeros(depth, dtype=bool)
        else:
            compared = expected < NOISE
        close(gaps[compared], expected[compared])
    close(orthogonality_gap(hidden.fc), data["ortho_gap_fc"])
    for i, layer in enumerate(net.linear_maps):
        close(layer.weight.grad, data[f"gw{i}"])
        close(isometry_gap(layer.weight), data["isogap_w"][i])
        if case["bias"]:
            close(layer.bias.grad, data[f"gb{i}"])
        if case["norm"] == "torch_bn" and i < depth:
            close(net.blocks[i].norm.running_mean, data[f"running_mean_{i}"])
            close(net.blocks[i].norm.running_var, data[f"running_var_{i}"])
    torch.optim.SGD(net.parameters(), lr=case["lr"]).step()
    for i, layer in enumerate(net.linear_maps):
        close(layer.weight, data[f"w{i}_after"])
        if case["bias"]:
            close(layer.bias, data[f"b{i}_after"])


@pytest.mark.parametrize("name", ONE_LAYER)
def test_exact_gap_behind_one_random_layer(name):
    case = ONE_LAYER[name]
    eigenvalues = torch.tensor(case["eigs"], dtype=torch.float64)
    x = torch.diag(eigenvalues.sqrt())
    assert float(isometry_gap(x)) == pytest.approx(case["gap_in"], abs=1e-12)
    assert float(expected_log_norm(eigenvalues)) == pytest.approx(case["E_log_D"], abs=1e-8)
    gap = float(expected_one_layer_gap(x))
    assert gap == pytest.approx(case["gap_out_expected"], abs=1e-8)
    assert abs(gap - case["mc_mean"]) < 4 * case["mc_se"]
    if case["closed_form_d2"] is not None:
        assert float(expected_log_norm(eigenvalues)) == pytest.approx(
            case["closed_form_d2"], abs=1e-12
        )
