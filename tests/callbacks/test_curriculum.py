"""Curriculum: what the training step sees, for every target, clock, resume and command line."""

import pickle

import jsonargparse
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from toy import ToyData

from callbacks import Curriculum
from callbacks.base import HasFigures, HasIteration, HasLossWeights, HasMonitor, HasPenalties
from callbacks.schedules import Linear, Plateau, Tanh


def double(clock: int) -> float:
    """A user's own schedule."""
    return 2.0 * clock


class Offset:
    """A user's own schedule with arguments."""

    def __init__(self, by: float = 1.0) -> None:
        self.by = by

    def __call__(self, clock: int) -> float:
        return clock + self.by


class Logged(Callback):
    """Collects a logged value after every batch."""

    def __init__(self, key: str) -> None:
        self.key, self.values = key, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.values.append(float(trainer.logged_metrics[self.key]))


def test_paper_module_keeps_the_protocols(watched) -> None:
    for protocol in (HasFigures, HasIteration, HasLossWeights, HasMonitor, HasPenalties):
        assert isinstance(watched(), protocol)
        assert not isinstance(LightningModule(), protocol)


def test_iteration_clock(fit, watched) -> None:
    module, logged = watched(), Logged("curriculum/extra")
    fit(module, Curriculum("loss_weights.extra", Linear(length=10)), logged)
    expected = [min(i / 10, 1) for i in range(14)]
    assert module.seen == expected
    assert logged.values == pytest.approx(expected)
    assert module.loss_weights == {"mse": 1.0, "extra": 1.0}


def test_epoch_clock_delay_and_initial(fit, watched) -> None:
    module = watched()
    curriculum = Curriculum("loss_weights.extra", double, clock="epoch", delay=1, initial=0.25)
    fit(module, curriculum, max_epochs=3)
    assert module.seen == [0.25] * 7 + [0.0] * 7 + [2.0] * 7
    held = Curriculum("loss_weights.extra", Offset(3.0), delay=2)
    assert [held.value_at(a) for a in range(4)] == [3, 3, 3, 4]


def test_epoch_clock_is_logged_once_an_epoch(fit, watched, tmp_path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    curriculum = Curriculum("loss_weights.extra", Offset(0.1), clock="epoch")
    fit(watched(), curriculum, max_epochs=3, logger=logger)
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("curriculum/extra")
    values = [float(v) for row in rows[1:] if (v := row.split(",")[column])]
    assert values == pytest.approx([0.1, 1.1, 2.1])


def test_clock_counts_batches_under_accumulation(fit, watched) -> None:
    module = watched()
    fit(module, Curriculum("loss_weights.extra", double), accumulate_grad_batches=2, max_epochs=1)
    assert module.seen == [0, 2, 4, 6, 8, 10, 12]


def test_the_objective_uses_the_value(fit, watched) -> None:
    module, loss, mse = watched(), Logged("train/loss"), Logged("train/mse")
    fit(module, Curriculum("loss_weights.extra", double), loss, mse, max_epochs=1)
    expected = [m * (1 + 2 * i) for i, m in enumerate(mse.values)]
    assert loss.values == pytest.approx(expected, rel=1e-5)


def test_relative_multiplies_with_the_constructed_value(fit, watched) -> None:
    module = watched(loss_weights={"extra": 0.2})
    curriculum = Curriculum("loss_weights.extra", Tanh(), relative=True, clock="epoch")
    fit(module, curriculum, max_epochs=3)
    expected = [0.2 * Tanh()(a) for a in range(3)]
    assert module.seen[::7] == pytest.approx(expected)
    # A second fit of the same objects starts from the same 0.2, not from the moved value.
    module.seen.clear()
    fit(module, curriculum, max_epochs=3)
    assert module.seen[::7] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("target", "watch", "expected"),
    [
        ("gain", lambda m: m.gain, [0.4, 0.9, 1.4, 1.9]),
        ("blocks", lambda m: m.blocks, [0, 1, 1, 2]),
        ("temperature", lambda m: m.temperature.item(), [0.4, 0.9, 1.4, 1.9]),
        ("net.2.p", lambda m: 10 * m.net[2].p, [0.4, 0.9, 1.4, 1.9]),
    ],
)
def test_other_targets(fit, watched, target, watch, expected) -> None:
    module = watched(dropout=0.1)
    module.watch = watch
    scale = 0.1 if target == "net.2.p" else 1.0
    curriculum = Curriculum(target, lambda clock: scale * (0.4 + 0.5 * clock))
    fit(module, curriculum, max_steps=4)
    assert module.seen == pytest.approx(expected)
    if target == "blocks":
        assert isinstance(module.blocks, int)


def test_a_moved_hyperparameter_is_in_the_checkpoint(fit, watched, tmp_path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="end", monitor=None)
    module = watched()
    curriculum = Curriculum("gain", Offset(0.5), clock="epoch", relative=True)
    trainer = fit(module, curriculum, saver, enable_checkpointing=True)
    assert module.gain == 1.5 * 3.0
    rebuilt = watched.load_from_checkpoint(tmp_path / "end.ckpt")
    assert rebuilt.gain == 4.5
    # Going on from the rebuilt module does not multiply twice.
    rebuilt.watch = lambda m: m.gain
    fresh = Curriculum("gain", Offset(0.5), clock="epoch", relative=True)
    fit(rebuilt, fresh, max_epochs=4, ckpt_path=tmp_path / "end.ckpt")
    assert rebuilt.seen == [2.5 * 3.0] * 7 + [3.5 * 3.0] * 7
    # A module built from its arguments is evaluated as it was trained.
    other = watched()
    tester = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        callbacks=[Curriculum("gain", Offset(0.5), clock="epoch", relative=True)],
        default_root_dir=tmp_path,
    )
    tester.test(other, ToyData(), ckpt_path=tmp_path / "end.ckpt", verbose=False)
    assert other.gain == 4.5
    assert trainer.current_epoch == 2


@pytest.mark.parametrize("clock", ["iteration", "epoch"])
@pytest.mark.parametrize("step", [7, 10])
def test_resume(fit, watched, tmp_path, clock: str, step: int) -> None:
    """At the end (7) and in the middle (10) of an epoch: same values as without interruption."""

    def curricula() -> list[Curriculum]:
        return [
            Curriculum("loss_weights.extra", Tanh(scale=3.0), clock, relative=True),
            Curriculum("loss_weights.mse", Offset(0.1), clock),
        ]

    whole = watched()
    fit(whole, *curricula(), max_epochs=3)
    saver = ModelCheckpoint(tmp_path, filename="x", monitor=None, every_n_train_steps=step)
    first = watched()
    fit(first, *curricula(), saver, max_steps=step, enable_checkpointing=True)
    second = watched()
    fit(second, *curricula(), max_epochs=3, ckpt_path=tmp_path / "x.ckpt")
    assert first.seen + second.seen == whole.seen
    assert torch.equal(whole.net[0].weight, second.net[0].weight)


def test_adaptive_schedule_is_in_the_checkpoint(fit, watched, tmp_path) -> None:
    def plateau() -> Curriculum:
        return Curriculum("loss_weights.extra", Plateau("val/loss", patience=0, min_delta=1e6))

    whole = watched()
    fit(whole, plateau(), max_epochs=4)
    assert whole.seen[::7] == [1.0, 1.0, 2.0, 4.0]
    saver = ModelCheckpoint(tmp_path, filename="x", monitor=None)
    fit(watched(), plateau(), saver, max_epochs=2, enable_checkpointing=True)
    second = watched()
    fit(second, plateau(), max_epochs=4, ckpt_path=tmp_path / "x.ckpt")
    assert second.seen[::7] == [2.0, 4.0]


def test_two_instances_have_two_states() -> None:
    a, b = Curriculum("loss_weights.a"), Curriculum("loss_weights.b")
    assert a.state_key != b.state_key
    assert pickle.loads(pickle.dumps(a)).state_key == a.state_key


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": ""}, "target must be a dotted path"),
        ({"target": "a", "clock": "step"}, "clock must be 'iteration' or 'epoch', got 'step'"),
        ({"target": "a", "delay": -1}, "delay must be at least 0, got -1"),
        ({"target": "a", "schedule": "saw"}, "schedule must be one of"),
    ],
)
def test_bad_arguments(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curriculum(**arguments)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("loss_weights.extr", r"no 'extr' in module\.loss_weights, it has extra, mse"),
        ("gian", "no 'gian' in module, Watched has no such attribute"),
        ("net.0.weight", "must be a number or a buffer with one element, got Parameter"),
        ("net.9.p", r"no '9' in module\.net"),
        ("training", "must be a number .* got bool"),
    ],
)
def test_bad_targets(fit, watched, target: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(watched(), Curriculum(target))


def test_conflicts(fit, watched) -> None:
    extra = Curriculum("loss_weights.extra")
    with pytest.raises(ValueError, match=r"two Curriculum callbacks have target='loss_weights.ex"):
        fit(watched(), extra, Curriculum("loss_weights.extra", "tanh", name="other"))
    with pytest.raises(ValueError, match="log as 'curriculum/extra'"):
        fit(watched(), extra, Curriculum("gain", name="extra"))
    with pytest.raises(ValueError, match="gave inf at iteration 0"):
        fit(watched(), Curriculum("gain", lambda clock: float("inf")))
    with pytest.raises(ValueError, match="use clock='epoch'"):
        fit(BoringModel(), Curriculum("hparams.x"))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("tanh", Tanh()(3)),
        ({"class_path": "callbacks.schedules.Linear", "init_args": {"length": 6}}, 0.5),
        (
            {
                "class_path": "callbacks.schedules.Piecewise",
                "init_args": {"points": [[0, 0.0], [6, 1.0]]},
            },
            0.5,
        ),
        ("math.sqrt", 3**0.5),
        ({"class_path": "fractions.Fraction", "init_args": {}}, None),
    ],
)
def test_yaml(schedule, expected) -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--callbacks", type=list[Callback])
    item = {
        "class_path": "callbacks.Curriculum",
        "init_args": {"target": "loss_weights.x", "schedule": schedule},
    }
    if expected is None:
        with pytest.raises((jsonargparse.ArgumentError, ValueError)):
            parser.instantiate(parser.parse_object({"callbacks": [item]}))
        return
    config = parser.parse_object({"callbacks": [item]})
    again = parser.parse_string(parser.dump(config))
    for parsed in (config, again):
        assert parser.instantiate(parsed).callbacks[0].value_at(3) == expected
