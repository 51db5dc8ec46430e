"""Gradient norms: against norms by hand, and nothing else changes."""

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from callbacks import GradientNorms
from callbacks.gradient_norms import gradient_norms


def test_groups() -> None:
    gradients = {
        "net.0.weight": torch.tensor([[3.0]]),
        "net.0.bias": torch.tensor([4.0]),
        "net.1.weight": torch.tensor([12.0], dtype=torch.bfloat16),
        "scale": torch.tensor(84.0, dtype=torch.float64),
    }
    by_depth = {
        1: {"net": 13.0, "scale": 84.0, "total": 85.0},
        2: {"net.0": 5.0, "net.1": 12.0, "scale": 84.0, "total": 85.0},
    }
    for depth, expected in by_depth.items():
        norms = gradient_norms(gradients, depth=depth)
        assert {k: v.item() for k, v in norms.items()} == pytest.approx(expected)
    named = gradient_norms(gradients, {"first": "net.0.*", "weights": "*weight"})
    assert {k: v.item() for k, v in named.items()} == pytest.approx(
        {"first": 5.0, "weights": 12.0, "other": 84.0, "total": 85.0}
    )
    assert gradient_norms({}) == {}


def test_sparse_gradients() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    norm = gradient_norms({"table.weight": table.weight.grad})["table"]
    assert norm.item() == pytest.approx(table.weight.grad.to_dense().norm().item())


class ByHand(Callback):
    """The gradient's norm just before the optimiser's step."""

    def __init__(self) -> None:
        self.norms = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        gradients = [p.grad.flatten() for p in pl_module.parameters()]
        self.norms.append(torch.cat(gradients).norm().item())


@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 2}])
def test_in_training(fit, watched, memory, arguments) -> None:
    plain = watched()
    fit(plain, max_epochs=1, gradient_clip_val=0.1, **arguments)
    module, by_hand = watched(), ByHand()
    arguments = {**arguments, "max_epochs": 1, "gradient_clip_val": 0.1, "logger": memory}
    trainer = fit(module, GradientNorms(), by_hand, **arguments)
    totals = memory.column("grad_norm/total")
    assert totals == pytest.approx(by_hand.norms, rel=1e-5)
    assert len(totals) == trainer.global_step
    groups = {key for row in memory.rows for key in row if key.startswith("grad_norm/")}
    assert groups == {"grad_norm/net.0", "grad_norm/net.3", "grad_norm/total"}
    for a, b in zip(plain.parameters(), module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_follows_log_every_n_steps(fit, watched, memory) -> None:
    by_hand = ByHand()
    fit(watched(), GradientNorms(), by_hand, max_epochs=1, log_every_n_steps=3, logger=memory)
    assert [row["step"] for row in memory.rows if "grad_norm/total" in row] == [2, 5]
    assert memory.column("grad_norm/total") == pytest.approx(by_hand.norms[2::3], rel=1e-5)


def test_several_optimizers(fit, watched) -> None:
    class Two(watched):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 3)]

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            loss = nn.functional.mse_loss(self.net(batch.x), batch.y)
            self.manual_backward(loss)
            first.step()
            second.step()
            self.norms = [p.grad.norm() for p in self.parameters()]
            first.zero_grad()
            second.zero_grad()

    module = Two()
    logged = fit(module, GradientNorms(), max_steps=2).logged_metrics
    w0, b0, w1, b1 = module.norms
    assert logged["grad_norm/total/0"].item() == pytest.approx(torch.hypot(w0, b0).item())
    assert logged["grad_norm/total/1"].item() == pytest.approx(torch.hypot(w1, b1).item())
    assert logged["grad_norm/net.3"] == logged["grad_norm/total/1"]
    assert "grad_norm/total" not in logged


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        GradientNorms(depth=0)
