"""Curriculum: moves a coefficient of a method along a schedule while it trains."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from callbacks.base import HasIteration
from callbacks.schedules import Adaptive, Schedule, make_schedule

__all__ = ["Curriculum"]


class Curriculum(Callback):
    """Sets one number of the module before every training batch, and logs it.

    The value is a pure function of the clock: it is the same on every rank and right after a resume
    without any stored state. (`Adaptive` schedules are the exception, their state is in the
    checkpoint.) Several instances may run side by side, one for each target.

    The value at clock ``a`` is ``initial`` for ``a < delay`` and ``schedule(a - delay)`` from then
    on.

    Args:
        target: what is moved, as a dotted path from the module: ``loss_weights.<term>``, a
            hyperparameter (``gain_exponent``) or an attribute further down
            (``network.dropout.p``). It must be a number or a buffer with one element. Where the
            present value is an integer, the schedule's value is rounded.
        schedule: a short name (``tanh``), a schedule by class path
            (``callbacks.schedules.Linear``), or a callable of one's own, a function or an object,
            that maps the clock to a number.
        clock: ``"iteration"`` counts training batches (under gradient accumulation, each of them),
            ``"epoch"`` counts epochs.
        delay: ticks of the clock before the schedule starts.
        initial: value during the delay; ``None`` holds the schedule's value at 0.
        relative: multiply the schedule's value (and ``initial``) by the value that the target was
            constructed with, so that a schedule between 0 and 1 keeps the coefficient a
            hyperparameter of the module.
        name: the value is logged as ``curriculum/<name>``; the last part of ``target`` by default.

    Example:
        A weight that is 0 in the first epoch and then rises as ``0.1 * tanh(a / 10)``::

            trainer:
              callbacks:
                - class_path: callbacks.Curriculum
                  init_args:
                    target: loss_weights.independence
                    schedule:
                      class_path: callbacks.schedules.Tanh
                      init_args: {maximum: 0.1, scale: 10}
                    clock: epoch
                    delay: 1
                    initial: 0.0

    Raises:
        ValueError: for an unknown clock or schedule, a negative delay, an empty target; at the
            start of ``fit`` for a target that the module does not have or that is no number, and
            for two curricula with one target; in training for a value that is not finite.
    """

    def __init__(
        self,
        target: str,
        schedule: Schedule | Callable[[int], float] | str = "constant",
        clock: str = "iteration",
        delay: int = 0,
        initial: float | None = None,
        relative: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if not target or not all(target.split(".")):
            raise ValueError(
                f"target must be a dotted path such as 'loss_weights.term', got {target!r}"
            )
        if clock not in ("iteration", "epoch"):
            raise ValueError(f"clock must be 'iteration' or 'epoch', got {clock!r}")
        if delay < 0:
            raise ValueError(f"delay must be at least 0, got {delay}")
        self.target = target
        self.schedule = make_schedule(schedule)
        self.clock = clock
        self.delay = delay
        self.initial = initial
        self.relative = relative
        self.name = name or target.rsplit(".", 1)[-1]
        self._scale: float | None = None  # value of the target as constructed
        self._value: float | None = None  # value set last
        self._restored: dict[str, Any] = {}

    @property
    def state_key(self) -> str:
        """Key of this instance in the checkpoint; names what it moves."""
        return self._generate_state_key(target=self.target, name=self.name)

    def value_at(self, clock: int) -> float:
        """Return the value at ``clock``, without the factor of ``relative``."""
        if clock >= self.delay:
            return float(self.schedule(clock - self.delay))
        return float(self.schedule(0)) if self.initial is None else self.initial

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the target and remember what it was constructed with."""
        curricula = [c for c in trainer.callbacks if isinstance(c, Curriculum)]  # type: ignore[attr-defined]
        if sum(c.target == self.target for c in curricula) > 1:
            raise ValueError(
                f"two Curriculum callbacks have target={self.target!r}: remove one of them"
            )
        if sum(c.name == self.name for c in curricula) > 1:
            raise ValueError(
                f"two Curriculum callbacks log as 'curriculum/{self.name}': give one another name="
            )
        if self.clock == "iteration" and not isinstance(pl_module, HasIteration):
            raise ValueError(
                f"clock='iteration' needs a module with the property `iteration`; "
                f"{type(pl_module).__name__} has none: use clock='epoch'"
            )
        present = self._get(pl_module)
        if self._restored and self._restored["value"] == present:
            # The module was rebuilt from the checkpoint with the target already moved.
            self._scale = self._restored["scale"]
        if self._scale is None:
            self._scale = float(present)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set and log the value of this batch."""
        value = self._update(trainer, pl_module)
        per_epoch = self.clock == "epoch"
        pl_module.log(
            f"curriculum/{self.name}",
            value,
            on_step=not per_epoch,
            on_epoch=per_epoch,
            batch_size=1,
        )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the value before the module's own hook of the epoch reads it."""
        self._update(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the metrics to an adaptive schedule."""
        in_fit = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if in_fit and isinstance(self.schedule, Adaptive):
            self.schedule.observe({k: float(v) for k, v in trainer.callback_metrics.items()})

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Outside of ``fit``, set the value that the checkpoint was saved with."""
        # Evaluation has no objective, nor the terms that another callback adds to it.
        moved = self._restored and not self.target.startswith("loss_weights.")
        if trainer.state.fn != TrainerFn.FITTING and moved:
            self._set(pl_module, self._restored["value"])

    on_test_start = on_validation_start
    on_predict_start = on_validation_start

    def state_dict(self) -> dict[str, Any]:
        """Return the last value, for evaluation outside of ``fit``, and an adaptive state."""
        state: dict[str, Any] = {"value": self._value, "scale": self._scale}
        if isinstance(self.schedule, Adaptive):
            state["schedule"] = self.schedule.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a checkpoint."""
        self._restored = state_dict if state_dict["value"] is not None else {}
        if isinstance(self.schedule, Adaptive) and "schedule" in state_dict:
            self.schedule.load_state_dict(state_dict["schedule"])

    def _update(self, trainer: Trainer, pl_module: LightningModule) -> float:
        if self.clock == "epoch":
            clock = trainer.current_epoch
        else:
            assert isinstance(pl_module, HasIteration)
            clock = pl_module.iteration
        value = self.value_at(clock)
        if self.relative:
            assert self._scale is not None
            value *= self._scale
        if not math.isfinite(value):
            raise ValueError(
                f"the schedule of {self.target!r} gave {value} at {self.clock} {clock}: "
                "it must be a finite number"
            )
        return self._set(pl_module, value)

    def _parent(self, pl_module: LightningModule) -> tuple[Any, str]:
        """Return the object or mapping that holds the target, and the target's name in it."""
        *path, leaf = self.target.split(".")
        holder: Any = pl_module
        for i, part in enumerate([*path, leaf]):
            known = part in holder if isinstance(holder, Mapping) else hasattr(holder, part)
            if not known:
                where = ".".join(["module", *path[:i]])
                names = sorted(map(str, holder)) if isinstance(holder, Mapping) else None
                has = (
                    f"it has {', '.join(names) or 'none'}"
                    if names is not None
                    else (f"{type(holder).__name__} has no such attribute")
                )
                raise ValueError(f"target={self.target!r}: no {part!r} in {where}, {has}")
            if i < len(path):
                holder = holder[part] if isinstance(holder, Mapping) else getattr(holder, part)
        return holder, leaf

    def _get(self, pl_module: LightningModule) -> float | int | torch.Tensor:
        holder, leaf = self._parent(pl_module)
        present = holder[leaf] if isinstance(holder, Mapping) else getattr(holder, leaf)
        is_buffer = (
            isinstance(present, torch.Tensor)
            and not isinstance(present, torch.nn.Parameter)
            and present.numel() == 1
        )
        is_number = isinstance(present, int | float) and not isinstance(present, bool)
        if not (is_buffer or is_number):
            raise ValueError(
                f"target={self.target!r} must be a number or a buffer with one element, "
                f"got {type(present).__name__}"
            )
        return present  # type: ignore[no-any-return]

    def _set(self, pl_module: LightningModule, value: float) -> float:
        holder, leaf = self._parent(pl_module)
        present = self._get(pl_module)
        if isinstance(present, torch.Tensor):
            present.fill_(value)
        else:
            if isinstance(present, int):
                value = round(value)
            if isinstance(holder, dict):
                holder[leaf] = value
            else:
                setattr(holder, leaf, value)
        # A moved hyperparameter goes into the checkpoint, so that the method is rebuilt as trained.
        if holder is pl_module and leaf in pl_module.hparams:
            pl_module.hparams[leaf] = value
        self._value = float(value)
        return self._value
