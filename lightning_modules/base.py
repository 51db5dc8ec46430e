"""The one base class of every method."""

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_modules.components.randomness import generator_from, global_seed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Penalty = Callable[[nn.Module], Tensor]


def spec(value: Any) -> Any:
    """Turn a class or a `functools.partial` of one into `{class_path, init_args}`.

    Anything else is returned as it is, containers included. The result can be stored in a
    checkpoint that loads with `weights_only=True` and built again by the command line's parser.

    Raises:
        TypeError: If `value` is a lambda or another function without an importable name.
    """
    arguments: dict[str, Any] = {}
    while isinstance(value, functools.partial):
        arguments = {**value.keywords, **arguments}
        value = value.func
    if isinstance(value, type):
        path = f"{value.__module__}.{value.__qualname__}"
        return {"class_path": path, "init_args": arguments}
    if callable(value) and not isinstance(value, nn.Module):
        name = getattr(value, "__qualname__", repr(value))
        if "<lambda>" in name or "<locals>" in name:
            raise TypeError(
                f"'{name}' cannot be stored in a checkpoint: "
                "pass a class or functools.partial(Class, argument=value) instead"
            )
    return value


class PaperModule(LightningModule):
    """Hyperparameters, objective, clock and randomness that all methods share.

    A subclass takes plain, typed arguments, hands `optimizer`, `lr_scheduler` and `loss_weights`
    on to this class, and gets for it: hyperparameters in the checkpoint so that
    `Class.load_from_checkpoint(path)` needs no further argument, an objective whose weights
    callbacks can move, an iteration counter that survives a resume, and generators whose draws
    depend on nothing but the seed and the position in training.

    Args:
        optimizer: Called with the trainable parameters; `None` takes `default_optimizer`.
        lr_scheduler: Called with the optimiser; `None` keeps the learning rate.
        lr_interval: Whether the scheduler counts optimiser steps or epochs.
        loss_weights: Weights of named terms of the objective; the others keep
            `default_loss_weights`.

    Raises:
        ValueError: If `loss_weights` names a term that the method does not have.
        TypeError: If an argument cannot be stored in a checkpoint, as a lambda.
    """

    monitor: str = "val/loss"
    """Metric by which checkpoints, early stopping and sweeps choose.

    A method whose arguments decide it sets it in its constructor.
    """
    mode: Literal["min", "max"] = "min"
    default_loss_weights: ClassVar[Mapping[str, float]] = {}

    training_iterations: Tensor

    def __init__(
        self,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["step", "epoch"] = "step",
        loss_weights: dict[str, float] | None = None,
    ) -> None:
        super().__init__()
        # Lightning collects the arguments of the whole chain of constructors; stored a second
        # time as plain values, so that loggers and checkpoints never see a class.
        self.save_hyperparameters()
        self.save_hyperparameters({name: spec(value) for name, value in self.hparams.items()})
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.lr_interval = lr_interval
        self.loss_weights: dict[str, float] = dict(self.default_loss_weights)
        for name, weight in (loss_weights or {}).items():
            if self.default_loss_weights and name not in self.default_loss_weights:
                raise ValueError(
                    f"loss_weights has no term '{name}': "
                    f"this method has {', '.join(sorted(self.default_loss_weights))}"
                )
            self.loss_weights[name] = float(weight)
        self._penalties: dict[str, Penalty] = {}
        self._batch_index = 0
        self._iterations = 0
        self.register_buffer("training_iterations", torch.zeros((), dtype=torch.int64))

    # ------------------------------------------------------------------ objective

    def objective(self, **terms: Tensor) -> Tensor:
        """Weighted sum of the named terms and of all registered penalties.

        Logs every term before weighting as `train/<term>` and the sum as `train/loss`.

        Args:
            **terms: Scalar tensors, means over the batch of this device.

        Returns:
            Scalar tensor, ready for `backward`.
        """
        values = dict(terms)
        for name, penalty in self._penalties.items():
            values[name] = penalty(self)
        if not values:
            raise ValueError("objective() needs at least one term, got none")
        total = sum(self.loss_weights.get(name, 1.0) * value for name, value in values.items())
        assert isinstance(total, Tensor)
        for name, value in values.items():
            self.log(f"train/{name}", value.detach())
        self.log("train/loss", total.detach(), prog_bar=True)
        return total

    def register_penalty(self, name: str, penalty: Penalty, weight: float = 1.0) -> None:
        """Add a penalty on the parameters as one more term of the objective.

        Args:
            name: Name of the term; its weight is `loss_weights[name]`. The same name again
                replaces the penalty.
            penalty: Called with this module, returns a scalar. Must be picklable.
            weight: Initial weight.

        Raises:
            ValueError: If the objective has a term of its own of this name.
        """
        if name in self.default_loss_weights:
            raise ValueError(f"the objective already has a term '{name}': choose another name")
        self._penalties[name] = penalty
        self.loss_weights[name] = weight

    # ------------------------------------------------------------------ optimisation

    def default_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Build the paper's choice of optimiser; a subclass overrides it."""
        return Adam(parameters, lr=1e-3)

    def configure_optimizers(self) -> Any:
        """Optimiser over all trainable parameters, with the scheduler if there is one."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        optimizer = (self.optimizer or self.default_optimizer)(parameters)
        if self.lr_scheduler is None:
            return optimizer
        scheduler = self.lr_scheduler(optimizer)
        by_metric = isinstance(scheduler, ReduceLROnPlateau)
        interval = "epoch" if by_metric else self.lr_interval
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": scheduler,
                "interval": interval,
                "monitor": self.monitor,
            },
        }

    # ------------------------------------------------------------------ clock and randomness

    @property
    def iteration(self) -> int:
        """Number of training batches finished before the present one; the clock of curricula."""
        return self._iterations

    def on_train_start(self) -> None:
        """Read the clock, which a checkpoint may have set."""
        self._iterations = int(self.training_iterations)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Advance the persistent clock; callbacks have seen the old value by now."""
        self._batch_index = batch_idx
        # counted at the start, so that a checkpoint written by a callback at the end of the
        # batch, which runs before the module's own hook, includes it
        self.training_iterations += 1
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Finish the iteration."""
        self._iterations += 1

    def on_validation_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Note the position for `generator`."""
        self._batch_index = batch_idx

    on_test_batch_start = on_validation_batch_start
    on_predict_batch_start = on_validation_batch_start

    def generator(
        self, purpose: str = "", device: torch.device | str | None = None
    ) -> torch.Generator:
        """Fresh generator seeded from (seed, stage, epoch, batch, rank, purpose).

        In training every batch has its own draws; in evaluation the epoch does not count, so that
        values of different epochs were made with the same noise.

        Args:
            purpose: Separates several uses within one batch.
            device: Device of the generator, default this module's.
        """
        trainer = self._trainer
        stage = trainer.state.stage.value if trainer and trainer.state.stage else ""
        epoch = trainer.current_epoch if trainer and trainer.training else -1
        key = (global_seed(), stage, epoch, self._batch_index, self.global_rank, purpose)
        return generator_from(*key, device=device if device is not None else self.device)

    # ------------------------------------------------------------------ checkpoints

    def set_hparam(self, name: str, value: Any) -> None:
        """Fix a hyperparameter that was `None` until the data were seen."""
        setattr(self, name, value)
        self.hparams[name] = value

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say which class to build, so that the path of the checkpoint alone is enough.

        A subclass that overrides this calls it.
        """
        hyperparameters = checkpoint.setdefault("hyper_parameters", {})
        hyperparameters.setdefault("_class_path", f"{type(self).__module__}.{type(self).__name__}")
        hyperparameters.setdefault("_instantiator", "lightning.pytorch.cli.instantiate_module")
        self._give_back_unfinished_batch(checkpoint)

    def _give_back_unfinished_batch(self, checkpoint: dict[str, Any]) -> None:
        """Count a batch that Ctrl-C or an error interrupted as not delivered: it comes again."""
        trainer = self._trainer
        if trainer is None or trainer.state.fn != "fit":
            return
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if progress.ready == progress.processed:
            return
        clock = checkpoint["state_dict"]["training_iterations"]
        checkpoint["state_dict"]["training_iterations"] = clock - 1
        for state in checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", []):
            if state.get("batches"):
                state["batches"] -= 1

    # ------------------------------------------------------------------ what a method may offer

    def figures(self) -> "dict[str, Figure]":
        """Figures of the present state, by name; the `Figures` callback saves and logs them."""
        return {}

    def write_predictions(self, predictions: list[Any], folder: Path) -> list[Path]:
        """Write the outputs of `predict_step` in the formats of the method's field.

        Args:
            predictions: One output of `predict_step` per batch of this rank.
            folder: Existing folder to write to.

        Returns:
            The files written. `predictions.pt` is written in any case.
        """
        return []
