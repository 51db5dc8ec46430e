"""Any module made private by a callback: what the optimiser sees, budgets, resume, ranks."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from callbacks import PrivacyBudget, PrivateGradients
from datamodules import RegressionStream
from lightning_modules.components.privacy import (
    BLT,
    BandedToeplitz,
    Dense,
    Identity,
    NoiseStream,
    NuToeplitz,
    SquareRoot,
    WhiteNoise,
)

FIXED = {"noise_seed": 7, "allow_deterministic_noise": True, "delta": 1e-3}


class Plain(LightningModule):
    """A user's module that knows neither of this library nor of privacy."""

    def __init__(self, penalty: float = 0.0, norm: bool = False, reduction: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(0)
        extra = [nn.BatchNorm1d(6)] if norm else []
        self.net = nn.Sequential(nn.Linear(4, 6), *extra, nn.Tanh(), nn.Linear(6, 1))
        self.penalty, self.reduction = penalty, reduction

    def training_step(self, batch, batch_idx: int) -> Tensor:
        errors = (self.net(batch.x)[:, 0] - batch.y).square()
        loss = errors.sum() if self.reduction == "sum" else errors.sum() / max(1, len(errors))
        if self.penalty:
            loss = loss + self.penalty * sum(p.square().sum() for p in self.parameters())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


class WithLosses(Plain):
    def example_losses(self, batch) -> Tensor:
        return (self.net(batch.x)[:, 0] - batch.y).square()


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Watch(Callback):
    """Keeps the gradients of every step and saves a checkpoint after one."""

    def __init__(self, save_after: int = 0, path: Path | None = None) -> None:
        self.gradients: list[Tensor] = []
        self.batches: list[int] = []
        self.epsilons: list[float] = []
        self.save_after, self.path = save_after, path

    def on_before_zero_grad(self, trainer, module, optimizer) -> None:
        grads = [p.grad for p in module.parameters()]
        if all(g is not None for g in grads):
            self.gradients.append(torch.cat([g.flatten() for g in grads]).clone())

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.batches.append(len(batch.y))
        if "privacy/epsilon" in trainer.callback_metrics:
            self.epsilons.append(float(trainer.callback_metrics["privacy/epsilon"]))
        if self.save_after and len(self.batches) == self.save_after:
            trainer.save_checkpoint(self.path)


def data(**change) -> RegressionStream:
    options = {"size": 40, "dim": 4, "batch_size": 8, "sampling": "fixed_order", "seed": 1}
    return RegressionStream(**{**options, **change})


def fit(module, private, stream=None, epochs: int = 2, ckpt=None, callbacks=(), **trainer):
    options = {
        "max_epochs": epochs,
        "accelerator": "cpu",
        "logger": False,
        "devices": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    built = Trainer(
        **{**options, **trainer}, callbacks=[*([private] if private else []), *callbacks]
    )
    built.fit(module, datamodule=stream or data(), ckpt_path=ckpt, weights_only=True)
    return built


def vector(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def fixed(strategy=None, **change) -> PrivateGradients:
    options = {
        "noise_multiplier": 0.8,
        "clip_norm": 0.5,
        "sampling": "fixed_order",
        "strategy": strategy,
        **FIXED,
    }
    return PrivateGradients(**{**options, **change})


@pytest.mark.parametrize(
    ("module", "clipping"),
    [
        (Plain, "ghost"),
        (Plain, "vmap"),
        (WithLosses, "ghost"),
        (WithLosses, "vmap"),
        (Manual, "ghost"),
    ],
    ids=lambda v: v if isinstance(v, str) else v.__name__,
)
def test_the_optimiser_sees_clipped_sum_plus_correlated_noise(module, clipping: str) -> None:
    strategy = SquareRoot(3)
    net, watch = module(), Watch()
    reference = WithLosses()
    trainer = fit(net, fixed(strategy, clipping=clipping), epochs=1, callbacks=[watch])
    assert trainer.global_step == 5
    noise = NoiseStream(strategy.correlator(5), WhiteNoise(37, 7))
    optimizer = reference.configure_optimizers()
    stream = data()
    stream.setup("fit")
    for batch in stream.train_dataloader():
        total = torch.zeros(37)
        for i in range(len(batch.y)):
            reference.zero_grad()
            one = type(batch)(batch.x[i : i + 1], batch.y[i : i + 1])
            reference.example_losses(one).sum().backward()
            g = torch.cat([p.grad.flatten() for p in reference.parameters()])
            total += g * min(1.0, 0.5 / float(g.norm()))
        total = (total + 0.8 * 0.5 * noise.step()) / 8
        place = 0
        for p in reference.parameters():
            p.grad = total[place : place + p.numel()].view(p.shape).clone()
            place += p.numel()
        optimizer.step()
    torch.testing.assert_close(vector(net), vector(reference), atol=1e-5, rtol=1e-5)


def test_empty_poisson_batches_step_and_add_noise() -> None:
    net, watch = Plain(), Watch()
    private = fixed(SquareRoot(2), sampling="poisson")
    stream = data(size=10, batch_size=1, sampling="poisson")  # p = 0.1: a third is empty
    trainer = fit(net, private, stream, callbacks=[watch], epochs=3)
    assert trainer.global_step == 30
    empty = watch.batches.index(0)
    assert private.privacy_spent().step == 30
    noise = NoiseStream(SquareRoot(2).correlator(30), WhiteNoise(37, 7))
    expected = [noise.step() for _ in range(empty + 1)][-1] * 0.8 * 0.5
    assert watch.gradients  # zero_grad comes after the step, so the list starts with step 0
    torch.testing.assert_close(watch.gradients[empty], expected)


@pytest.mark.parametrize(
    "strategy",
    [
        Identity(),
        SquareRoot(3),
        NuToeplitz(0.1),
        BLT([0.9, 0.5], [0.2, 0.2]),
        BandedToeplitz([1.0, 0.5], normalise_columns=True),
    ],
    ids=lambda s: type(s).__name__,
)
def test_resume_neither_repeats_nor_loses_noise(strategy, tmp_path: Path) -> None:
    path = tmp_path / "middle.ckpt"
    options = {"noise_seed": None, "allow_deterministic_noise": False}  # a fresh secret seed
    net = Plain()
    watch = Watch(save_after=7, path=path)
    fit(net, fixed(strategy, **options), epochs=3, callbacks=[watch])
    resumed = Plain()
    private = fixed(strategy, **options)
    fit(resumed, private, epochs=3, ckpt=path)
    assert torch.equal(vector(resumed), vector(net))
    assert private.privacy_spent().step == 15


def test_runs_have_fresh_noise_by_default() -> None:
    nets = [Plain(), Plain()]
    for net in nets:
        fit(net, fixed(noise_seed=None, allow_deterministic_noise=False), epochs=1)
    assert not torch.equal(vector(nets[0]), vector(nets[1]))


@pytest.mark.parametrize(
    ("change", "epochs", "message"),
    [
        ({"noise_multiplier": 0.9}, 3, "noise_multiplier=0.9 differs from 0.8"),
        ({"strategy": SquareRoot(4)}, 3, "planned with strategy="),
        ({"noise_seed": 8}, 3, "noise_seed=8 differs"),
        ({"clip_norm": 0.6}, 3, "planned with clip_norm=0.5, this run has 0.6"),
        ({"delta": 1e-4}, 3, "planned with delta=0.001"),
        ({}, 4, "planned with n=15, this run has 20"),
    ],
)
def test_resume_with_other_settings_is_refused(change, epochs, message, tmp_path: Path) -> None:
    path = tmp_path / "middle.ckpt"
    fit(Plain(), fixed(SquareRoot(3)), epochs=3, callbacks=[Watch(2, path)])
    with pytest.raises(MisconfigurationException, match=message):
        fit(Plain(), fixed(**{"strategy": SquareRoot(3), **change}), epochs=epochs, ckpt=path)


def test_a_dataset_of_another_size_is_refused_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "middle.ckpt"
    fit(Plain(), fixed(), callbacks=[Watch(2, path)])
    with pytest.raises(
        MisconfigurationException, match="planned with examples=40, this run has 39"
    ):
        fit(Plain(), fixed(), data(size=39), ckpt=path)


def test_a_finished_budget_cannot_be_trained_on() -> None:
    private, net = fixed(), Plain()
    fit(net, private)
    with pytest.raises(MisconfigurationException, match=r"planned for 10 steps and is spent"):
        fit(net, private)
    with pytest.raises(MisconfigurationException, match="planned with n=10, this run has 15"):
        fit(net, private, epochs=3)


@pytest.mark.parametrize(
    "sampling",
    ["poisson", "cyclic_poisson", "fixed_order", "balls_in_bins", "shuffle", "sequential"],
)
def test_epsilon_is_logged_and_ends_at_the_target(sampling: str) -> None:
    private = fixed(SquareRoot(3), noise_multiplier=None, target_epsilon=1.5, sampling=sampling)
    watch = Watch()
    stream = data(size=48, sampling=sampling)
    budget = PrivacyBudget(points=12)
    fit(Plain(), private, stream, callbacks=[budget, watch])
    assert len(watch.epsilons) == 12
    assert all(a <= b + 1e-6 for a, b in pairwise(watch.epsilons))
    assert watch.epsilons[0] < 0.9 * watch.epsilons[-1]
    assert 1.5 * 0.998 < watch.epsilons[-1] <= 1.5 + 1e-6  # logged in float32
    spent = private.privacy_spent()
    assert (spent.step, spent.steps, spent.delta) == (12, 12, 1e-3)
    assert spent.epsilon <= 1.5
    if sampling == "cyclic_poisson":
        assert stream.train_dataloader() is not None
    assert "zeroing out one of 48 examples" in private.statement()


def test_default_delta_depends_on_the_number_of_examples() -> None:
    private = fixed(delta=None)
    fit(Plain(), private)
    assert private.privacy_spent().delta == pytest.approx(1 / 400)


def test_budget_stops_before_it_is_exceeded() -> None:
    with pytest.raises(MisconfigurationException, match=r"stop_at=0\.5 does not allow step 1"):
        fit(Plain(), fixed(), callbacks=[PrivacyBudget(stop_at=0.5)])
    private, budget = fixed(sampling="poisson"), PrivacyBudget(points=20, stop_at=5.0)
    trainer = fit(Plain(), private, data(sampling="poisson"), epochs=8, callbacks=[budget])
    spent = private.privacy_spent()
    assert trainer.global_step < 40
    assert spent.epsilon <= 5.0 < private.privacy_spent(ahead=1).epsilon
    with pytest.raises(MisconfigurationException, match=r"leave out trainer\.min_epochs"):
        fit(
            Plain(),
            fixed(sampling="poisson"),
            data(sampling="poisson"),
            epochs=8,
            callbacks=[budget],
            min_epochs=8,
        )


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"gradient_clip_val": 1.0}, "gradient_clip_val=1.0"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        ({"precision": "bf16-true"}, "precision=bf16-true"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        ({"max_epochs": -1}, "set trainer.max_epochs or trainer.max_steps"),
    ],
)
def test_trainer_settings_that_break_the_guarantee(trainer: dict, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        fit(Plain(), fixed(), **trainer)


def test_modules_and_data_that_break_the_guarantee() -> None:
    with pytest.raises(MisconfigurationException, match=r"layer net\.1 normalises over the batch"):
        fit(Plain(norm=True), fixed())
    with pytest.raises(MisconfigurationException, match="does not come from its layer alone"):
        fit(Plain(penalty=0.1), fixed(clipping="ghost"))
    mean, total = Plain(), Plain(reduction="sum")
    fit(mean, fixed())
    fit(total, fixed(loss_reduction="sum"))
    torch.testing.assert_close(vector(mean), vector(total))
    with pytest.raises(
        MisconfigurationException,
        match=r"by 'shuffle': set data\.sampling=poisson",
    ):
        fit(Plain(), fixed(sampling="poisson"), data(sampling="shuffle"))
    with pytest.raises(ValueError, match="made for 3 steps, the run has 10"):
        fit(Plain(), fixed(Dense([[1.0, 0, 0], [0.5, 1, 0], [0.2, 0.5, 1]])))
    with pytest.raises(MisconfigurationException, match="found nothing that spends privacy"):
        fit(Plain(), None, callbacks=[PrivacyBudget()])


def test_two_optimisers_and_skipped_steps_are_refused() -> None:
    class Two(Manual):
        def configure_optimizers(self):
            return [
                torch.optim.SGD(layer.parameters(), 0.1) for layer in (self.net[0], self.net[2])
            ]

    class Skips(Manual):
        def training_step(self, batch, batch_idx):
            return None

    class NoLoss(Plain):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(MisconfigurationException, match="the module has 2"):
        fit(Two(), fixed())
    with pytest.raises(MisconfigurationException, match="give the module a method example_losses"):
        fit(Manual(), fixed(clipping="vmap"))
    with pytest.raises(MisconfigurationException, match="without an optimiser step"):
        fit(Skips(), fixed())
    private = fixed()
    fit(NoLoss(), private)  # no loss is a zero gradient: the step is paid for all the same
    assert private.privacy_spent().step == 10


def test_a_plain_data_loader_is_refused() -> None:
    rows = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16))
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[fixed()],
    )
    with pytest.raises(MisconfigurationException, match="draws batches in its own way"):
        trainer.fit(Plain(), torch.utils.data.DataLoader(rows, batch_size=4))


def test_frozen_parameters_stay_and_get_no_noise() -> None:
    class Frozen(Plain):
        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    net = Frozen()
    net.net[0].requires_grad_(False)
    before = net.net[0].weight.clone()
    fit(net, fixed())
    assert torch.equal(net.net[0].weight, before)

    class Wrong(Frozen):
        configure_optimizers = Plain.configure_optimizers

    wrong = Wrong()
    wrong.net[0].requires_grad_(False)
    with pytest.raises(MisconfigurationException, match=r"net\.0\.weight is frozen"):
        fit(wrong, fixed())


def test_strategies_by_name_and_adam_as_post_processing() -> None:
    class WithAdam(Plain):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    for name in ("identity", "square_root", "optimised_blt", "tree"):
        private = fixed(name)
        fit(WithAdam(), private)
        assert private.privacy_spent().step == 10


def test_mixed_precision_clips_in_float32() -> None:
    net = Plain()
    watch = Watch()
    trainer = fit(net, fixed(SquareRoot(3)), callbacks=[watch], precision="bf16-mixed")
    assert trainer.global_step == 10
    assert all(g.dtype == torch.float32 and torch.isfinite(g).all() for g in watch.gradients)
    exact = Plain()
    fit(exact, fixed(SquareRoot(3)))
    torch.testing.assert_close(vector(net), vector(exact), atol=0.02, rtol=0)


def test_loggers_get_every_point_of_the_budget(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path, name="", version="")
    fit(Plain(), fixed(), callbacks=[PrivacyBudget(points=5)], logger=logger, log_every_n_steps=50)
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("privacy/epsilon")
    values = [float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]]
    assert len(values) == 6  # every second of ten steps, and the end of the first epoch
    assert values == sorted(values)


class Sharded(WithLosses):
    """Split over ranks by FSDP2 if the strategy has a mesh."""

    def configure_model(self) -> None:
        from lightning_modules.components.sharding import shard_blocks

        shard_blocks(self.net, self.device_mesh, ["0", "2"])


def on_ranks(strategy: str) -> list[float]:
    if strategy == "fsdp2":
        from lightning.pytorch.strategies import ModelParallelStrategy

        chosen = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        net = Sharded()
    else:
        chosen, net = strategy, Plain()
    private = fixed(SquareRoot(3), sampling="poisson", noise_multiplier=None, target_epsilon=8.0)
    stream = data(size=64, batch_size=2, sampling="poisson")  # 4 over both ranks
    fit(net, private, stream, devices=2, strategy=chosen)
    from lightning_modules.components.sharding import full

    return torch.cat([full(p.detach()).flatten() for p in net.parameters()]).tolist()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_equal_one_process(strategy: str, ranks) -> None:
    private = fixed(SquareRoot(3), sampling="poisson", noise_multiplier=None, target_epsilon=8.0)
    net = Plain()
    fit(net, private, data(size=64, batch_size=4, sampling="poisson"))
    first, second = ranks(on_ranks, strategy)
    assert first == second
    torch.testing.assert_close(torch.tensor(first), vector(net), atol=1e-6, rtol=0)
