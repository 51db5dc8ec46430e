"""The base class of the methods."""

from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from lightning.pytorch import Trainer
from toy import Toy, ToyBatch, ToyData

from lightning_modules import base
from lightning_modules.base import PaperModule, spec


def small_trainer(folder: Path, **arguments: object) -> Trainer:
    return Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, "enable_checkpointing": False, **arguments},
    )


@pytest.mark.parametrize("weights_only", [True, None])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"optimizer": torch.optim.SGD},
        {"optimizer": partial(torch.optim.SGD, lr=0.1), "width": 5},
        {
            "optimizer": partial(torch.optim.SGD, lr=0.1),
            "lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=2),
        },
    ],
)
def test_module_built_in_python_loads_from_its_path(
    arguments: dict, weights_only: bool | None, tmp_path: Path
) -> None:
    module = Toy(**arguments)
    trainer = small_trainer(tmp_path)
    trainer.fit(module, ToyData(batch_size=8))
    path = tmp_path / "toy.ckpt"
    trainer.save_checkpoint(path)
    loaded = Toy.load_from_checkpoint(path, weights_only=weights_only)
    for name, value in module.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
    override = Toy.load_from_checkpoint(path, dropout=0.5)
    assert override.net[2].p == 0.5
    optimizer = loaded.configure_optimizers()
    if "lr_scheduler" in arguments:
        assert optimizer["lr_scheduler"]["scheduler"].step_size == 2
        optimizer = optimizer["optimizer"]
    expected = torch.optim.SGD if arguments.get("optimizer") else torch.optim.Adam
    assert type(optimizer) is expected


def test_lambda_is_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"functools\.partial"):
        Toy(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def test_spec_merges_nested_partials() -> None:
    inner = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    value = spec(partial(inner, lr=0.2))
    assert value["class_path"] == "torch.optim.sgd.SGD"
    assert value["init_args"] == {"lr": 0.2, "momentum": 0.9}
    assert spec([1, "a"]) == [1, "a"]


def test_objective_weights_terms_and_penalties(tmp_path: Path) -> None:
    class Two(Toy):
        default_loss_weights = MappingProxyType({"mse": 2.0, "size": 0.5})

        def training_step(self, batch: ToyBatch, batch_idx: int) -> torch.Tensor:
            total = self.objective(mse=torch.tensor(3.0), size=torch.tensor(4.0))
            self.seen = float(total)
            return total + 0 * self.net(batch.x).sum()

    module = Two(loss_weights={"size": 1.0})
    module.register_penalty("sum", _ten, weight=0.1)
    trainer = small_trainer(tmp_path, max_steps=1)
    trainer.fit(module, ToyData(batch_size=8))
    assert module.seen == pytest.approx(2 * 3 + 1 * 4 + 0.1 * 10)
    logged = trainer.callback_metrics
    assert float(logged["train/mse"]) == 3.0
    assert float(logged["train/sum"]) == 10.0
    assert float(logged["train/loss"]) == pytest.approx(module.seen)
    with pytest.raises(ValueError, match="already has a term 'mse'"):
        module.register_penalty("mse", _ten)


def _ten(module: torch.nn.Module) -> torch.Tensor:
    return torch.tensor(10.0)


def test_iteration_counts_batches_whatever_the_accumulation(tmp_path: Path) -> None:
    seen = []

    class Counted(Toy):
        def training_step(self, batch: ToyBatch, batch_idx: int) -> torch.Tensor:
            seen.append(self.iteration)
            return super().training_step(batch, batch_idx)

    module = Counted()
    small_trainer(tmp_path, max_epochs=2, accumulate_grad_batches=4).fit(
        module, ToyData(batch_size=8)
    )
    assert seen == list(range(16))
    assert int(module.training_iterations) == 16


def test_draws_depend_on_the_position_alone(tmp_path: Path) -> None:
    draws: dict[str, list[float]] = {"train": [], "val": []}

    class Noisy(Toy):
        def training_step(self, batch: ToyBatch, batch_idx: int) -> torch.Tensor:
            draws["train"].append(float(torch.rand((), generator=self.generator("noise"))))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: ToyBatch, batch_idx: int) -> None:
            draws["val"].append(float(torch.rand((), generator=self.generator("noise"))))
            super().validation_step(batch, batch_idx)

    for _ in range(2):
        torch.rand(7)
        trainer = small_trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0)
        trainer.fit(Noisy(), ToyData(batch_size=8))
    assert draws["train"][:16] == draws["train"][16:]
    assert len(set(draws["train"])) == 16
    # the same noise in every epoch of validation
    assert draws["val"][:4] == draws["val"][4:8]
    assert len(set(draws["val"])) == 4


def test_scheduler_steps_by_the_interval(tmp_path: Path) -> None:
    scheduler = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    for interval, factor in (("step", 0.5**8), ("epoch", 0.5)):
        module = Toy(
            optimizer=partial(torch.optim.SGD, lr=1.0),
            lr_scheduler=scheduler,
            lr_interval=interval,
        )
        trainer = small_trainer(tmp_path)
        trainer.fit(module, ToyData(batch_size=8))
        assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(factor)


def test_plateau_scheduler_watches_the_monitor() -> None:
    module = Toy(lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    config = module.configure_optimizers()["lr_scheduler"]
    assert (config["monitor"], config["interval"]) == ("val/loss", "epoch")


def test_set_hparam_reaches_the_checkpoint() -> None:
    module = Toy()
    module.set_hparam("width", 3)
    assert module.width == 3
    assert module.hparams["width"] == 3


def test_public_names_resolve_and_suggest() -> None:
    import lightning_modules

    assert lightning_modules.PaperModule is PaperModule is base.PaperModule
    with pytest.raises(AttributeError, match="did you mean 'PaperModule'"):
        _ = lightning_modules.PaperModul
