"""Penalties: values against plain formulas, strength in training, choice of parameters."""

import pickle

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from toy import ToyData

from callbacks import Curriculum, Regularization
from callbacks.regularization import (
    ParameterPenalty,
    group_lasso,
    l1,
    l2,
    orthogonality,
    spectral_norm,
)

KINDS = ["l1", "l2", "group_lasso", "orthogonality", "spectral_norm"]


def _random(*shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5), (4, 3, 2, 2)])
def test_values(shape: tuple[int, ...]) -> None:
    weight = _random(*shape)
    matrix = weight.flatten(1)
    rows = [row.norm() for row in matrix]
    eye = torch.eye(len(matrix), dtype=torch.float64)
    expected = {
        l1: sum(abs(x) for x in weight.flatten().tolist()),
        l2: sum(x * x for x in weight.flatten().tolist()),
        group_lasso: sum(rows) * matrix.shape[1] ** 0.5,
        orthogonality: ((matrix @ matrix.T - eye) ** 2).sum(),
        spectral_norm: torch.linalg.svdvals(matrix)[0],
    }
    for penalty, value in expected.items():
        assert penalty(weight).item() == pytest.approx(float(value), rel=1e-12), penalty


@pytest.mark.parametrize("penalty", [l2, group_lasso, orthogonality, spectral_norm])
@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
def test_gradients(penalty, shape) -> None:
    assert torch.autograd.gradcheck(penalty, _random(*shape).requires_grad_())


def test_group_lasso_dimension_and_zero_groups() -> None:
    weight = torch.zeros(3, 2, requires_grad=True)
    group_lasso(weight).backward()
    assert torch.equal(weight.grad, torch.zeros(3, 2))
    columns = torch.tensor([[3.0, 0.0], [4.0, 0.0]])
    assert group_lasso(columns, dim=1).item() == pytest.approx(5 * 2**0.5)


def test_orthogonal_weights_have_no_penalty() -> None:
    weight = nn.init.orthogonal_(torch.empty(4, 9, dtype=torch.float64))
    assert orthogonality(weight).item() == pytest.approx(0, abs=1e-24)
    assert orthogonality(weight.T).item() == pytest.approx(5, abs=1e-12)


def test_sums_are_float32() -> None:
    weight = torch.full((1000, 1000), 0.01, dtype=torch.bfloat16)
    value = float(weight[0, 0])
    assert l1(weight).dtype == torch.float32
    assert l1(weight).item() == pytest.approx(1e6 * value, rel=1e-5)
    assert l2(weight).item() == pytest.approx(1e6 * value**2, rel=1e-5)
    linear = nn.Linear(64, 64)
    plain = ParameterPenalty("orthogonality")(nn.ModuleDict({"a": linear}))
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = ParameterPenalty("orthogonality")(nn.ModuleDict({"a": linear}))
    assert torch.equal(plain, under_autocast)


def _network() -> nn.ModuleDict:
    layers = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "norm": nn.LayerNorm(3)}
    layers["b"].requires_grad_(False)
    return nn.ModuleDict({**layers, "c": nn.Linear(3, 3)})


@pytest.mark.parametrize(
    ("penalty", "names"),
    [
        (ParameterPenalty("l2"), ["a.weight", "norm.weight", "c.weight"]),
        (ParameterPenalty("l2", ("*",), ("*.bias", "norm.*")), ["a.weight", "c.weight"]),
        (ParameterPenalty("l1", ("c.*", "a.bias")), ["a.bias", "c.weight", "c.bias"]),
        (ParameterPenalty("orthogonality"), ["a.weight", "c.weight"]),
        (ParameterPenalty("spectral_norm", ("*",)), ["a.weight", "c.weight"]),
    ],
)
def test_choice_of_parameters(penalty: ParameterPenalty, names: list[str]) -> None:
    network = _network()
    assert list(penalty.select(network)) == names
    assert pickle.loads(pickle.dumps(penalty)) == penalty
    assert penalty(network).ndim == 0
    network["b"].requires_grad_(True)
    assert ("b.weight" in penalty.select(network)) == ("*" in penalty.include[0][:1])


def _plain_training(module, weight: float, kind: str, batches: int, per_step: int) -> None:
    """The same training without Trainer: one step per ``per_step`` batches."""
    data = ToyData(batch_size=10)
    data.setup()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for i, batch in enumerate(data.train_dataloader()):
        if i == batches:
            break
        loss = nn.functional.mse_loss(module.net(batch.x), batch.y)
        for name, parameter in module.named_parameters():
            if name.endswith("weight"):
                extra = {
                    "l1": parameter.abs().sum(),
                    "l2": (parameter**2).sum(),
                    "group_lasso": parameter.shape[1] ** 0.5 * parameter.norm(dim=1).sum(),
                    "orthogonality": (parameter @ parameter.T - torch.eye(len(parameter)))
                    .square()
                    .sum(),
                    "spectral_norm": torch.linalg.svdvals(parameter).max(),
                }[kind]
                loss = loss + weight * extra
        (loss / per_step).backward()
        if (i + 1) % per_step == 0:
            optimizer.step()
            optimizer.zero_grad()


def _sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_step", [1, 2])
def test_strength_in_training(fit, watched, kind: str, per_step: int) -> None:
    """The same weights as a plain loop, also when gradients are accumulated."""
    expected = watched()
    _plain_training(expected, 0.03, kind, 6, per_step)
    module = watched()
    module.default_optimizer = _sgd
    fit(
        module,
        Regularization(kind, weight=0.03),
        accumulate_grad_batches=per_step,
        max_epochs=1,
        limit_train_batches=6,
    )
    for a, b in zip(expected.parameters(), module.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=2e-6)
    untouched = watched()
    untouched.default_optimizer = _sgd
    fit(untouched, max_epochs=1, limit_train_batches=6, accumulate_grad_batches=per_step)
    assert not torch.allclose(untouched.net[0].weight, module.net[0].weight, atol=1e-4)


def test_terms_are_logged_and_weighted(fit, watched) -> None:
    module = watched()
    trainer = fit(
        module,
        Regularization("l2", weight=0.5, parameters="net.0.weight"),
        Regularization("l1", weight=0.25, parameters=["net.3.*"], exclude="*.bias", name="sparse"),
        max_steps=1,
    )
    logged = {k: float(v) for k, v in trainer.logged_metrics.items()}
    start = watched()
    assert logged["train/l2"] == pytest.approx(start.net[0].weight.square().sum().item())
    assert logged["train/sparse"] == pytest.approx(start.net[3].weight.abs().sum().item())
    expected = (
        logged["train/mse"]
        + 0.5 * logged["train/extra"]
        + 0.5 * logged["train/l2"]
        + 0.25 * logged["train/sparse"]
    )
    assert logged["train/loss"] == pytest.approx(expected, rel=1e-5)


def test_curriculum_moves_the_strength(fit, watched) -> None:
    module = watched()
    module.watch = lambda m: m.loss_weights["l1"]
    fit(
        module,
        Regularization("l1", weight=0.1),
        Curriculum("loss_weights.l1", lambda clock: float(clock), relative=True),
        max_steps=3,
    )
    assert module.seen == pytest.approx([0.0, 0.1, 0.2])


def test_moved_strength_is_no_obstacle_to_evaluation(fit, watched, tmp_path) -> None:
    def callbacks() -> list[Callback]:
        return [Regularization("l1"), Curriculum("loss_weights.l1", "tanh", relative=True)]

    fit(watched(), *callbacks(), ModelCheckpoint(tmp_path, "x"), enable_checkpointing=True)
    tester = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        callbacks=callbacks(),
        default_root_dir=tmp_path,
    )
    (results,) = tester.test(watched(), ToyData(), ckpt_path=tmp_path / "x.ckpt", verbose=False)
    assert results["test/loss"] > 0


def _group_lasso_weight(module) -> float:
    return module.loss_weights["group_lasso"]


def test_module_with_penalty_is_picklable_and_fits_twice(fit, watched) -> None:
    module, callback = watched(), Regularization("group_lasso")
    trainer = fit(module, callback, max_steps=0)
    assert trainer.global_step == 0
    pickle.loads(pickle.dumps(module._penalties))
    module.watch = _group_lasso_weight
    fit(module, callback, max_steps=2)
    assert module.seen == [1e-4, 1e-4]
    other = watched()
    fit(other, callback, max_steps=1)
    assert other.loss_weights["group_lasso"] == 1e-4
    fit(watched(), pickle.loads(pickle.dumps(callback)), max_steps=1)


def test_a_method_without_objective_is_noticed(fit, watched) -> None:
    class Plain(watched):
        def training_step(self, batch, batch_idx):
            return nn.functional.mse_loss(self.net(batch.x), batch.y)

    class Manual(watched):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.optimizers().step()

    with pytest.raises(ValueError, match=r"'l2' had no effect: Plain did not .* objective\(\)"):
        fit(Plain(), Regularization())
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("callbacks.regularization.rank_zero_warn", told.append)
        fit(Manual(), Regularization(), max_steps=3)
    assert len(told) == 1
    assert "Manual did not build its loss with objective() in the first batch" in told[0]


def test_bad_arguments(fit, watched) -> None:
    with pytest.raises(ValueError, match=r"kind must be one of l1, .*got 'l3'"):
        Regularization("l3")
    with pytest.raises(ValueError, match="weight must be at least 0, got -1"):
        Regularization(weight=-1)
    with pytest.raises(ValueError, match="weight must be at least 0, got nan"):
        Regularization(weight=float("nan"))
    with pytest.raises(ValueError, match="at least one pattern"):
        Regularization(parameters=[])
    with pytest.raises(ValueError, match=r"matches \['net.5.\*'\].*net\.0\.weight"):
        fit(watched(), Regularization(parameters="net.5.*"))
    with pytest.raises(ValueError, match="no matrix"):
        fit(watched(), Regularization("orthogonality", parameters="*.bias"))
    with pytest.raises(ValueError, match="already has a term 'mse'"):
        fit(watched(), Regularization(name="mse"))
    with pytest.raises(TypeError, match="LightningModule has not both"):
        Regularization().setup(None, LightningModule(), "fit")
