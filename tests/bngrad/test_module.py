"""The Lightning side: tasks, curricula, checkpoints, predictions."""

import math
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Curriculum
from callbacks.schedules import Linear
from datamodules import Images, IsometryInputs
from lightning_modules import BNGrad
from lightning_modules.bngrad import isometry_gap


def trainer(folder: Path, **arguments) -> Trainer:
    options = {
        "max_epochs": 1, "logger": False, "enable_checkpointing": False, "accelerator": "cpu",
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder,
        "use_distributed_sampler": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return Trainer(**{**options, **arguments})


class Table(LightningDataModule):
    """A user's own regression table, with batches as dictionaries."""

    n_features = 3

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        x = torch.randn(256, 3, generator=torch.Generator().manual_seed(0))
        self.rows = [{"x": a, "y": a[0] - 2 * a[1]} for a in x]

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=64)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def test_regression_on_a_table_of_dictionaries(tmp_path):
    torch.manual_seed(0)
    module = BNGrad(depth=5, width=16, task="regression")
    assert (module.monitor, module.mode) == ("val/mse", "min")
    run = trainer(tmp_path, max_epochs=30)
    run.fit(module, Table())
    assert run.callback_metrics["val/mse"] < 0.5  # the variance of y is 5
    predictions = run.predict(module, Table())
    assert predictions[0].value.shape == (64,)
    (path,) = module.write_predictions(predictions, tmp_path)
    assert len(path.read_text().splitlines()) == 257
    assert module.hparams["in_dim"] == 3
    assert module.hparams["out_dim"] == 1


def test_loss_is_plain_cross_entropy_and_accuracy_is_correct_over_seen(tmp_path):
    torch.manual_seed(0)
    module = BNGrad(depth=3, width=16)
    data = Images(batch_size=128, seed=0)
    run = trainer(tmp_path, max_epochs=2)
    run.fit(module, data)
    with torch.no_grad():
        rows = data.val_set[list(range(len(data.val_set)))]
        logits = module.eval()(rows.x)
        accuracy = (logits.argmax(-1) == rows.y).double().mean()
        loss = torch.nn.functional.cross_entropy(logits, rows.y)
    assert float(run.callback_metrics["val/acc"]) == pytest.approx(float(accuracy))
    assert float(run.callback_metrics["val/loss"]) == pytest.approx(float(loss), rel=1e-5)
    batches = run.predict(module, data)
    (path,) = module.write_predictions(batches, tmp_path)
    assert path.read_text().splitlines()[0].startswith("label,probability,logit_0")
    figure = module.figures()["signal_through_depth"]
    assert [line.get_label() for line in figure.axes[0].lines] == [
        "initialisation, with gain", "initialisation, without gain", "now",
    ]  # fmt: skip
    plain = BNGrad(depth=3, width=16, gain_exponent=0.0)
    trainer(tmp_path, max_steps=1).fit(plain, data)
    lines = plain.figures()["signal_through_depth"].axes[0].lines
    assert [line.get_label() for line in lines] == ["initialisation", "now"]


def test_checkpoint_alone_rebuilds_the_module(tmp_path):
    module = BNGrad(depth=3, width=16, gain_exponent=0.25, gains=None, norm="bn_nocenter")
    run = trainer(tmp_path)
    run.fit(module, Images(batch_size=128))
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = BNGrad.load_from_checkpoint(tmp_path / "a.ckpt")
    x = torch.randn(5, 64)
    assert torch.equal(again.eval()(x), module.eval()(x))


def test_curriculum_moves_the_gain_exponent(tmp_path):
    module = BNGrad(in_dim=64, out_dim=10, depth=4, width=16, gain_exponent=1.0)
    anneal = Curriculum("gain_exponent", Linear(length=4, start=1.0, end=0.0))
    run = trainer(tmp_path, max_steps=3, callbacks=[anneal])
    run.fit(module, Images(batch_size=128))
    assert module.network.gain_exponent == module.gain_exponent == pytest.approx(0.5)
    torch.testing.assert_close(module.network.gains, torch.arange(1, 5) ** -0.5)
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = BNGrad.load_from_checkpoint(tmp_path / "a.ckpt")
    assert torch.equal(again.network.gains, module.network.gains)


def test_learnable_gains_are_trained(tmp_path):
    module = BNGrad(in_dim=64, out_dim=10, depth=4, width=16, learnable_gains=True)
    before = module.network.gains.detach().clone()
    trainer(tmp_path, max_steps=5).fit(module, Images(batch_size=128))
    assert (module.network.gains - before).abs().min() > 1e-5


def test_refreshed_statistics_before_validation(tmp_path):
    norms = {}
    for batches in (0, 3):
        torch.manual_seed(0)
        module = BNGrad(in_dim=64, out_dim=10, depth=3, width=16, refresh_batches=batches)
        data = Images(batch_size=128)
        trainer(tmp_path, max_epochs=1).fit(module, data)
        norms[batches] = module.network.blocks[0].norm
    assert torch.equal(norms[3].running_weight, torch.ones(()))
    inputs = [b.x for b, _ in zip(data.train_dataloader(), range(3), strict=False)]
    # weights no longer move, so the plain mean over the same batches comes out
    h = [module.network.blocks[0].linear(x).var(0, unbiased=False) for x in inputs]
    torch.testing.assert_close(norms[3].running_square, torch.stack(h).mean(0).detach())


def test_retraction_keeps_weights_orthogonal_in_training(tmp_path):
    gaps = {}
    for every in (0, 2):
        torch.manual_seed(0)
        module = BNGrad(in_dim=64, out_dim=10, depth=4, width=16, retract_every=every)
        trainer(tmp_path, max_steps=6).fit(module, Images(batch_size=128))
        weights = torch.stack([layer.weight for layer in module.network.linear_maps[1:-1]])
        gaps[every] = float(isometry_gap(weights.detach()).max())
    assert gaps[2] < 1e-10 < gaps[0]


def test_divergence_stops_with_a_hint(tmp_path):
    module = BNGrad(
        in_dim=64, out_dim=10, depth=30, width=16, gain_exponent=0.0,
        optimizer=torch.optim.SGD, norm="none", init="kaiming", activation="relu",
    )  # fmt: skip
    module.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=1e6)
    with pytest.raises(
        FloatingPointError, match=r"loss is (nan|inf) at iteration \d+; the largest"
    ):
        trainer(tmp_path, max_epochs=5).fit(module, Images(batch_size=128))


def test_sizes_that_contradict_the_data(tmp_path):
    for sizes, message in (
        ({"in_dim": 784}, "in_dim=784, but the data have n_features=64"),
        ({"out_dim": 3}, "out_dim=3, but the data have n_classes=10"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer(tmp_path).fit(BNGrad(depth=2, width=8, **sizes), Images())
    rows = TensorDataset(torch.randn(8, 3), torch.zeros(8).long())
    with pytest.raises(ValueError, match="in_dim=None needs data with the attribute n_features"):
        trainer(tmp_path).fit(BNGrad(depth=2, width=8), DataLoader(rows, batch_size=8))


def test_synthetic_inputs_run(tmp_path):
    module = BNGrad(depth=10, width=16, activation="identity", norm="bn_nocenter", gain_exponent=0)
    run = trainer(tmp_path)
    run.fit(module, IsometryInputs(width=16, matrices=3))
    assert math.isfinite(run.callback_metrics["train/loss"])


def test_compiled_blocks_are_marked_and_saved_plainly(tmp_path):
    module = BNGrad(in_dim=4, out_dim=2, depth=2, width=4, compile_blocks=True)
    plain = BNGrad(in_dim=4, out_dim=2, depth=2, width=4)
    assert all(block._compiled_call_impl is not None for block in module.network.blocks)
    assert module.state_dict().keys() == plain.state_dict().keys()
