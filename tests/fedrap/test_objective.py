"""Loss and gradients of one batch."""

import numpy as np
import pytest
import torch

from lightning_modules.fedrap.local_training import LocalTraining, autograd_gradients, train_block
from lightning_modules.fedrap.objective import (
    Objective,
    client_loss,
    cross_entropy,
    cross_entropy_slope,
)
from lightning_modules.fedrap.schedule import Order, Samples, build_blocks


@pytest.mark.parametrize("regulariser", ["l1", "l2", "none", "nuc", "inf"])
@pytest.mark.parametrize("saturating", [True, False])
def test_recorded_loss_and_gradients(reference, regulariser, saturating):
    arrays = np.load(reference / "loss_grad.npz")
    leaves = [torch.from_numpy(arrays[x]).requires_grad_(True) for x in "DCub"]
    independence, sparsity = arrays["lambda_mu"]
    objective = Objective(independence, sparsity, regulariser, saturating=saturating)
    items, labels = (torch.from_numpy(arrays[x]) for x in ("items", "labels"))
    loss = client_loss(items, labels, *leaves, objective)
    assert loss.item() == pytest.approx(float(arrays[f"{regulariser}_loss"]), abs=1e-12)
    for name, grad in zip("DCub", torch.autograd.grad(loss, leaves), strict=True):
        np.testing.assert_allclose(grad, arrays[f"{regulariser}_grad_{name}"], atol=1e-12)


@pytest.mark.parametrize("regulariser", ["l1", "l2", "none"])
@pytest.mark.parametrize("scope", ["batch", "table"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("saturating", [True, False])
def test_closed_form_step_equals_autograd(regulariser, scope, reduction, saturating):
    draw = torch.Generator().manual_seed(1)
    client = torch.arange(3).repeat_interleave(12)
    item = torch.randint(9, (36,), generator=draw)
    label = (item % 2).double()
    every = torch.arange(36)
    (block,) = build_blocks(
        Samples(client, item, label),
        Order(None, torch.zeros_like(every), every),
        3,
        9,
        all_rows=scope == "table",
    )
    tables = [torch.randn(*block.item.shape, 4, generator=draw).double() for _ in "DC"]
    vector, bias = (torch.randn(3, *s, generator=draw).double() for s in ((4,), ()))
    objective = Objective(0.3, 0.2, regulariser, scope, reduction, saturating)
    training = LocalTraining(objective, 0.1, 0.2, 0.3, 0.0, 0.0, 0.0, epochs=1)
    result = train_block(block, *tables, vector, bias, training)
    ((weight, positive),) = block.batches(0, torch.float64)
    grads = autograd_gradients(*tables, vector, bias, weight, positive, block.mask, objective)
    inside = block.mask[..., None]
    for new, old, grad, rate in (
        (result.personal * inside, tables[0] * inside, grads.personal, 0.3),
        (result.common * inside, tables[1] * inside, grads.common, 0.2),
        (result.vector, vector, grads.vector, 0.1),
        (result.bias, bias, grads.bias, 0.1),
    ):
        torch.testing.assert_close(new, old - rate * grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.loss, grads.loss, rtol=0, atol=1e-12)


def test_independence_pushes_the_views_in_opposite_directions():
    draw = torch.Generator().manual_seed(0)
    d, c = (torch.randn(6, 2, generator=draw).double().requires_grad_(True) for _ in "DC")
    items, labels = torch.tensor([0, 3, 3, 5]), torch.tensor([1.0, 0.0, 0.0, 1.0]).double()
    u, b = torch.randn(2, generator=draw).double(), torch.zeros(1).double()
    with_term, without = (
        torch.autograd.grad(client_loss(items, labels, d, c, u, b, Objective(x, 0.0)), (d, c))
        for x in (0.7, 0.0)
    )
    on_d, on_c = (x - y for x, y in zip(with_term, without, strict=True))
    assert float(on_d.abs().max()) > 1e-3
    torch.testing.assert_close(on_d, -on_c)


def test_saturated_probability_has_no_gradient_only_in_the_released_form():
    logits = torch.tensor([[200.0]])
    wrong = torch.ones(1, 1), torch.zeros(1, 1)  # one row, labelled 0
    assert float(cross_entropy_slope(logits, *wrong, saturating=True)) == 0.0
    assert float(cross_entropy_slope(logits, *wrong, saturating=False)) == 1.0
    assert float(cross_entropy(logits, *wrong, saturating=True)) == 100.0
    assert float(cross_entropy(logits, *wrong, saturating=False)) == 200.0
