"""Schedules: closed forms, ends, purity, and published values."""

import copy
import json
import math
import pickle
from pathlib import Path

import pytest

from callbacks.curriculum import Curriculum
from callbacks.schedules import (
    Constant,
    Cosine,
    Exponential,
    Inverse,
    Linear,
    Piecewise,
    Plateau,
    Polynomial,
    Sine,
    Square,
    Step,
    Tanh,
    make_schedule,
)

REFERENCE = json.loads((Path(__file__).parent / "reference" / "curriculum.json").read_text())

CLOSED_FORMS = [
    (Constant(0.3), lambda a: 0.3),
    (Linear(length=8, start=1.0, end=3.0), lambda a: 1 + 2 * min(a / 8, 1)),
    (
        Cosine(length=8, start=1.0, end=0.1),
        lambda a: 0.1 + 0.45 * (1 + math.cos(math.pi * min(a / 8, 1))),
    ),
    (Exponential(rate=0.9, start=2.0), lambda a: 2 * 0.9**a),
    (Exponential(rate=0.9, start=2.0, limit=1.0), lambda a: max(2 * 0.9**a, 1)),
    (Exponential(rate=1.5, start=2.0, limit=10.0), lambda a: min(2 * 1.5 ** min(a, 99), 10)),
    (Tanh(maximum=0.2, scale=3), lambda a: 0.2 * math.tanh(a / 3)),
    (Sine(maximum=0.2, scale=3), lambda a: 0.1 * (math.sin(a / 3) + 1)),
    (Square(maximum=2, minimum=1, half_period=3), lambda a: 2 if a % 6 < 3 else 1),
    (Step(every=4, start=8.0, factor=0.5), lambda a: 8 / 2 ** (a // 4)),
    (Inverse(maximum=0.4, scale=2), lambda a: 0.4 / (a / 2 + 1)),
    (Polynomial(start=0.5, power=0.25, limit=0.8), lambda a: min(0.5 * (a + 1) ** 0.25, 0.8)),
]


@pytest.mark.parametrize(
    ("schedule", "expected"), CLOSED_FORMS, ids=[repr(schedule) for schedule, _ in CLOSED_FORMS]
)
def test_closed_form(schedule, expected) -> None:
    clocks = [*range(30), 10_000]
    values = [schedule(a) for a in clocks]
    assert values == pytest.approx([expected(a) for a in clocks], rel=1e-14, abs=1e-15)
    # Pure: another order, a copy and a pickle give the same numbers.
    assert [schedule(a) for a in reversed(clocks)] == values[::-1]
    assert [pickle.loads(pickle.dumps(schedule))(a) for a in clocks] == values
    assert copy.deepcopy(schedule) == schedule
    with pytest.raises(AttributeError):
        schedule.maximum = 3.0


@pytest.mark.parametrize("kind", [Linear, Cosine])
def test_ends_are_exact(kind) -> None:
    schedule = kind(length=7, start=0.1, end=0.7)
    assert (schedule(0), schedule(7), schedule(8)) == (0.1, 0.7, 0.7)


def test_piecewise() -> None:
    points = [(2, 1.0), (4, 3.0), (8, 0.0)]
    lines = Piecewise(points)
    assert [lines(a) for a in range(10)] == [1, 1, 1, 2, 3, 2.25, 1.5, 0.75, 0, 0]
    stairs = Piecewise(points, interpolate=False)
    assert [stairs(a) for a in range(10)] == [1, 1, 1, 1, 3, 3, 3, 3, 0, 0]


def test_exponential_does_not_overflow_past_its_limit() -> None:
    assert Exponential(rate=10.0, limit=5.0)(10**6) == 5.0


@pytest.mark.parametrize("shape", ["tanh", "sin", "square", "frac", "fixed"])
@pytest.mark.parametrize("column", ["lambda_max", "mu_max"])
def test_fedrap_values(shape: str, column: str) -> None:
    """Values as set after round a, used in round a + 1; round 0 has 0, or ``fixed`` its maximum."""
    maximum = REFERENCE[column]
    after = [row[column == "mu_max"] for row in REFERENCE["values"][shape]]
    delay = 0 if shape == "fixed" else 1
    curriculum = Curriculum(
        "loss_weights.x", schedule=shape, clock="epoch", delay=delay, initial=0.0
    )
    used = [maximum * curriculum.value_at(a) for a in range(len(after) + delay)]
    assert used[0] == (maximum if shape == "fixed" else 0.0)
    assert used[delay:] == pytest.approx(after, rel=0, abs=1e-15)


def test_plateau() -> None:
    schedule = Plateau("val/loss", start=1.0, factor=2.0, patience=1, limit=3.0)
    values = []
    for metric in [5.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0]:
        schedule.observe({"val/loss": metric})
        values.append(schedule(0))
    assert values == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    again = Plateau("val/loss", start=1.0, factor=2.0, patience=1, limit=3.0)
    again.load_state_dict(pickle.loads(pickle.dumps(schedule.state_dict())))
    assert again.state_dict() == schedule.state_dict()
    rising = Plateau("val/acc", factor=0.5, patience=0, mode="max")
    for metric in [0.1, 0.2, 0.1]:
        rising.observe({"val/acc": metric})
    assert rising(0) == 0.5
    with pytest.raises(ValueError, match=r"monitor='val/acc' is not among .*val/loss"):
        rising.observe({"val/loss": 1.0})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Linear(length=0), "length must be .* got 0"),
        (lambda: Tanh(scale=-1), "scale must be .* got -1"),
        (lambda: Exponential(rate=float("nan")), "rate must be .* got nan"),
        (lambda: Piecewise([]), "points need"),
        (lambda: Piecewise([(3, 1.0), (3, 2.0)]), "rising clocks"),
        (lambda: Plateau("x", mode="least"), "mode must be 'min' or 'max', got 'least'"),
        (lambda: Plateau("x", patience=-1), "patience"),
        (lambda: make_schedule("tan"), "schedule must be one of constant, .*got 'tan'"),
        (lambda: make_schedule("linear"), r"needs arguments.*callbacks\.schedules\.Linear"),
    ],
)
def test_bad_arguments(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
    with pytest.raises(TypeError, match="callable"):
        make_schedule(3)
