"""Schedules: the value of a coefficient as a function of the time in training.

A schedule maps a clock (a count of iterations or of epochs, from 0) to a number. It is a frozen
dataclass without state, so it gives the same value on every rank, after a resume and in any order
of calls. `Adaptive` schedules, which look at metrics, are the exception; their state is stored in
the checkpoint.

Example:
    >>> Linear(start=0.0, end=1.0, length=4)(1)
    0.25
    >>> Piecewise(points=[(0, 0.0), (10, 1.0), (20, 0.5)])(15)
    0.75
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Adaptive",
    "Constant",
    "Cosine",
    "Exponential",
    "Inverse",
    "Linear",
    "Piecewise",
    "Plateau",
    "Polynomial",
    "Schedule",
    "Sine",
    "Square",
    "Step",
    "Tanh",
    "make_schedule",
]


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number above 0, got {value}")


def _between(start: float, end: float, share: float) -> float:
    # Not start + share * (end - start): that misses `end` by a rounding error at share = 1.
    return (1.0 - share) * start + share * end


class Schedule(ABC):
    """A number as a function of the clock; any other callable ``int -> float`` will do too."""

    @abstractmethod
    def __call__(self, clock: int) -> float:
        """Return the value at ``clock``, the count of iterations or epochs done before (>= 0)."""


@dataclass(frozen=True)
class Constant(Schedule):
    """Always ``value``."""

    value: float = 1.0

    def __call__(self, clock: int) -> float:
        """Return the constant."""
        return self.value


@dataclass(frozen=True)
class Linear(Schedule):
    """From ``start`` to ``end`` in ``length`` ticks of the clock, then ``end``."""

    length: int
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        _positive("length", self.length)

    def __call__(self, clock: int) -> float:
        """Return the value on the line."""
        return _between(self.start, self.end, min(clock / self.length, 1.0))


@dataclass(frozen=True)
class Cosine(Schedule):
    """From ``start`` to ``end`` along half a cosine in ``length`` ticks, then ``end``."""

    length: int
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        _positive("length", self.length)

    def __call__(self, clock: int) -> float:
        """Return ``start + (end - start) (1 - cos(pi clock / length)) / 2``."""
        share = min(clock / self.length, 1.0)
        return _between(self.start, self.end, (1.0 - math.cos(math.pi * share)) / 2.0)


@dataclass(frozen=True)
class Exponential(Schedule):
    """``start * rate**clock``, kept on the near side of ``limit`` if one is given.

    A ``rate`` below 1 decays towards (and stops at) ``limit``, one above 1 grows up to it.
    """

    rate: float
    start: float = 1.0
    limit: float | None = None

    def __post_init__(self) -> None:
        _positive("rate", self.rate)

    def __call__(self, clock: int) -> float:
        """Return the power."""
        try:
            value = self.start * self.rate**clock
        except OverflowError:
            value = math.copysign(math.inf, self.start)
        if self.limit is None:
            return value
        return min(value, self.limit) if self.limit > self.start else max(value, self.limit)


@dataclass(frozen=True)
class Tanh(Schedule):
    """``maximum * tanh(clock / scale)``: rises at once and saturates at ``maximum``."""

    maximum: float = 1.0
    scale: float = 10.0

    def __post_init__(self) -> None:
        _positive("scale", self.scale)

    def __call__(self, clock: int) -> float:
        """Return the saturating value."""
        return self.maximum * math.tanh(clock / self.scale)


@dataclass(frozen=True)
class Sine(Schedule):
    """``maximum * (sin(clock / scale) + 1) / 2``: swings between 0 and ``maximum``."""

    maximum: float = 1.0
    scale: float = 10.0

    def __post_init__(self) -> None:
        _positive("scale", self.scale)

    def __call__(self, clock: int) -> float:
        """Return the swinging value."""
        return self.maximum * (math.sin(clock / self.scale) + 1.0) / 2.0


@dataclass(frozen=True)
class Square(Schedule):
    """Square wave: ``maximum`` for ``half_period`` ticks, ``minimum`` for as many, and so on."""

    maximum: float = 1.0
    minimum: float = 0.0
    half_period: int = 5

    def __post_init__(self) -> None:
        _positive("half_period", self.half_period)

    def __call__(self, clock: int) -> float:
        """Return one of the two levels."""
        return self.minimum if clock // self.half_period % 2 else self.maximum


@dataclass(frozen=True)
class Step(Schedule):
    """``start * factor**k``, with ``k`` one more after every ``every`` ticks."""

    every: int
    start: float = 1.0
    factor: float = 0.5

    def __post_init__(self) -> None:
        _positive("every", self.every)

    def __call__(self, clock: int) -> float:
        """Return the value of the present stair."""
        return float(self.start * self.factor ** (clock // self.every))


@dataclass(frozen=True)
class Inverse(Schedule):
    """``maximum / (clock / scale + 1)``: ``maximum``, a half, a third, ..."""

    maximum: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        _positive("scale", self.scale)

    def __call__(self, clock: int) -> float:
        """Return the fraction."""
        return self.maximum / (clock / self.scale + 1.0)


@dataclass(frozen=True)
class Polynomial(Schedule):
    """``start * (clock + 1)**power``, at most ``limit``; the penalty growth of bilevel methods."""

    start: float = 1.0
    power: float = 0.5
    limit: float | None = None

    def __call__(self, clock: int) -> float:
        """Return the power, capped."""
        value = float(self.start * (clock + 1) ** self.power)
        return value if self.limit is None else min(value, self.limit)


@dataclass(frozen=True)
class Piecewise(Schedule):
    """Through the given ``points`` (clock, value); before the first and after the last, theirs.

    Args:
        points: pairs (clock, value) with rising clocks.
        interpolate: on straight lines between the points, or hold each value until the next point.
    """

    points: list[tuple[int, float]]
    interpolate: bool = True

    def __post_init__(self) -> None:
        clocks = [clock for clock, _ in self.points]
        if not clocks or any(b <= a for a, b in itertools.pairwise(clocks)):
            raise ValueError(f"points need at least one entry and rising clocks, got {self.points}")

    def __call__(self, clock: int) -> float:
        """Return the value between the two neighbouring points."""
        before_clock, before = self.points[0]
        for after_clock, after in self.points:
            if clock < after_clock:
                if not self.interpolate or after_clock == before_clock:
                    return float(before)
                share = (clock - before_clock) / (after_clock - before_clock)
                return _between(before, after, max(share, 0.0))
            before_clock, before = after_clock, after
        return float(before)


class Adaptive(Schedule):
    """Base of schedules that react to metrics; `Curriculum` puts their state in checkpoints."""

    @abstractmethod
    def observe(self, metrics: Mapping[str, float]) -> None:
        """Take in the logged metrics after a validation, the same ones on every rank."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers, strings, lists and dictionaries."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `state_dict` returned."""


class Plateau(Adaptive):
    """Multiplies its value by ``factor`` when a metric has stopped to improve.

    Args:
        monitor: name of the logged metric, such as ``val/loss``.
        start: value before the first change.
        factor: multiplier of a change.
        patience: validations without improvement that are let pass.
        mode: ``"min"`` if a smaller metric is better, ``"max"`` if a greater one is.
        limit: bound of the value, upper for ``factor`` above 1, lower for one below.
        min_delta: smallest change of the metric that counts as an improvement.

    Raises:
        ValueError: for a factor that is not above 0, a negative patience or an unknown mode.
    """

    def __init__(
        self,
        monitor: str,
        start: float = 1.0,
        factor: float = 2.0,
        patience: int = 3,
        mode: str = "min",
        limit: float | None = None,
        min_delta: float = 0.0,
    ) -> None:
        _positive("factor", factor)
        if patience < 0:
            raise ValueError(f"patience must be at least 0, got {patience}")
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', got {mode!r}")
        self.monitor, self.factor, self.patience = monitor, factor, patience
        self.mode, self.limit, self.min_delta = mode, limit, min_delta
        self.value = start
        self.best: float | None = None
        self.waited = 0

    def __call__(self, clock: int) -> float:
        """Return the present value, whatever the clock says."""
        return self.value

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Compare the metric with its best and change the value after too long a plateau.

        Raises:
            ValueError: if the metric was not logged.
        """
        if self.monitor not in metrics:
            raise ValueError(
                f"monitor={self.monitor!r} is not among the logged metrics: {sorted(metrics)}"
            )
        sign = 1.0 if self.mode == "min" else -1.0
        metric = metrics[self.monitor]
        if self.best is None or sign * (self.best - metric) > self.min_delta:
            self.best, self.waited = metric, 0
            return
        self.waited += 1
        if self.waited > self.patience:
            self.waited = 0
            self.value *= self.factor
            if self.limit is not None:
                bound = min if self.factor > 1 else max
                self.value = bound(self.value, self.limit)

    def state_dict(self) -> dict[str, Any]:
        """Return value, best metric and count of validations without improvement."""
        return {"value": self.value, "best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a stored state."""
        self.value, self.best, self.waited = state["value"], state["best"], state["waited"]


_SHORT_NAMES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "fixed": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "exponential": Exponential,
    "tanh": Tanh,
    "sine": Sine,
    "sin": Sine,
    "square": Square,
    "step": Step,
    "piecewise": Piecewise,
    "inverse": Inverse,
    "frac": Inverse,
    "polynomial": Polynomial,
}


def make_schedule(schedule: Callable[[int], float] | str) -> Callable[[int], float]:
    """Return the schedule of a short name, such as ``"tanh"``; callables are returned as they are.

    Raises:
        ValueError: for an unknown name, or one whose schedule has no default for an argument.
        TypeError: if ``schedule`` is neither a name nor callable.
    """
    if not isinstance(schedule, str):
        if not callable(schedule):
            raise TypeError(
                f"schedule must be a name, a Schedule or a callable int -> float, got {schedule!r}"
            )
        return schedule
    if schedule not in _SHORT_NAMES:
        raise ValueError(
            f"schedule must be one of {', '.join(_SHORT_NAMES)}, or a class_path, got {schedule!r}"
        )
    kind = _SHORT_NAMES[schedule]
    try:
        return kind()
    except TypeError:
        raise ValueError(
            f"schedule={schedule!r} needs arguments: give class_path: "
            f"callbacks.schedules.{kind.__name__} with its init_args"
        ) from None
