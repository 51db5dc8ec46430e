"""What would make the printed guarantee false without a sign: each is refused."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics import MeanMetric

from callbacks import PrivateGradients
from datamodules import RegressionStream
from lightning_modules.bngrad.norms import BatchNorm


class Net(LightningModule):
    """Regression with dropout."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 6), norm or nn.Identity()
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))[:, 0]

    def training_step(self, batch, batch_idx: int) -> Tensor:
        return self.reduce((self(batch.x) - batch.y).square())

    def reduce(self, errors: Tensor) -> Tensor:
        return errors.sum() / max(1, len(errors))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scored(Net):
    """With a training metric."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = MeanMetric()

    def reduce(self, errors: Tensor) -> Tensor:
        self.seen.update(errors.detach())
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return super().reduce(errors)


class Coupled(Net):
    """Examples with large errors lower the weight of all others."""

    def reduce(self, errors: Tensor) -> Tensor:
        return (errors * errors.softmax(0)).sum()


class FeatureMean(Net):
    """Batch statistics without a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Batches(Callback):
    """Keeps the targets of every batch; saves a checkpoint after some."""

    def __init__(self, save_after: int = 0, path: Path | None = None) -> None:
        self.targets: list[Tensor] = []
        self.save_after, self.path = save_after, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.targets.append(batch.y.clone())
        if len(self.targets) == self.save_after:
            trainer.save_checkpoint(self.path)


def fit(module, private, sampling="poisson", ckpt=None, callbacks=(), **options) -> Trainer:
    stream = RegressionStream(size=48, dim=4, batch_size=8, sampling=sampling, seed=1)
    settings = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    trainer = Trainer(**{**settings, **options}, callbacks=[private, *callbacks])
    trainer.fit(module, datamodule=stream, ckpt_path=ckpt, weights_only=True)
    return trainer


def private(**change) -> PrivateGradients:
    return PrivateGradients(**{"noise_multiplier": 1.0, "delta": 1e-3, **change})


def test_batch_normalisation_of_any_make_is_refused() -> None:
    for norm in (nn.BatchNorm1d(6), BatchNorm(6)):
        with pytest.raises(MisconfigurationException, match="layer norm normalises over the batch"):
            fit(Net(norm), private())


@pytest.mark.parametrize("net", [Coupled, FeatureMean])
def test_examples_that_change_each_other_are_refused(net) -> None:
    with pytest.raises(MisconfigurationException, match="depends on the others in its batch"):
        fit(net(), private(clipping="ghost"))
    # batches of one have nothing to mix
    assert fit(net(), private(clipping="vmap")).global_step == 12


def test_the_check_leaves_no_trace() -> None:
    class Unchecked(PrivateGradients):
        def on_train_batch_start(self, *args) -> None:
            super().on_train_batch_start(*args)
            self._clipper._separate = True

    nets, seen = [Scored(), Scored()], []
    for net, kind in zip(nets, (PrivateGradients, Unchecked), strict=True):
        torch.manual_seed(3)
        callback = kind(
            noise_multiplier=1.0, delta=1e-3, noise_seed=1, allow_deterministic_noise=True
        )
        fit(net, callback, max_epochs=1)
        seen.append(net.trainer.callback_metrics["seen"])
    assert torch.equal(*(torch.cat([p.flatten() for p in n.parameters()]) for n in nets))
    assert torch.equal(*seen)


def test_a_step_that_vmap_cannot_run_is_explained() -> None:
    with pytest.raises(MisconfigurationException, match=r"give the module .*example_losses"):
        fit(Scored(), private(clipping="vmap"))


def test_shortened_epochs_break_the_turns_of_cyclic_groups() -> None:
    options = {"strategy": "square_root(bands=4)", "sampling": "cyclic_poisson"}
    with pytest.raises(MisconfigurationException, match="an epoch of 5 instead of 6 steps"):
        fit(Net(), private(**options), "cyclic_poisson", limit_train_batches=5)
    assert fit(Net(), private(**options), "cyclic_poisson").global_step == 12


def test_parameters_without_noise_are_refused() -> None:
    class Unfreeze(Callback):
        def on_train_epoch_start(self, trainer, module) -> None:
            if trainer.current_epoch == 1:
                trainer.optimizers[0].add_param_group({"params": module.first.parameters()})

    class Part(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.last.parameters(), lr=0.1)

    with pytest.raises(MisconfigurationException, match="further parameters after training"):
        fit(Part(), private(), callbacks=[Unfreeze()])

    class Hidden(Net):
        def configure_optimizers(self):
            self.__dict__["hidden"] = nn.Parameter(torch.zeros(3))
            return torch.optim.SGD([*self.parameters(), self.__dict__["hidden"]], lr=0.1)

    with pytest.raises(MisconfigurationException, match="1 parameters of the optimiser are not"):
        fit(Hidden(), private())


def test_training_on_from_a_run_without_privacy_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plain.ckpt"
    fit(Net(), Batches(save_after=3, path=path))
    with pytest.raises(MisconfigurationException, match="noise has taken 0 steps, the trainer 3"):
        fit(Net(), private(), ckpt=path)


def test_a_delta_that_means_nothing_and_a_sweep_are_said_to_be_so(monkeypatch) -> None:
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    with (
        pytest.warns(UserWarning, match="at least 1/48, one over the number of examples"),
        pytest.warns(UserWarning, match="this run belongs to a sweep"),
    ):
        fit(Net(), private(delta=0.03), max_epochs=1)


def test_the_choice_of_batches_is_as_secret_as_the_noise(tmp_path: Path) -> None:
    path = tmp_path / "middle.ckpt"
    first, second, resumed = Batches(save_after=8, path=path), Batches(), Batches()
    fit(Net(), private(), callbacks=[first])
    fit(Net(), private(), callbacks=[second])
    fit(Net(), private(), ckpt=path, callbacks=[resumed])

    def same(a: list[Tensor], b: list[Tensor]) -> bool:
        return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    assert not same(first.targets, second.targets)
    assert same(first.targets[8:], resumed.targets)
