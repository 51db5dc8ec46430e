"""Which mechanism needs how much noise for the same guarantee, and what error that makes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lightning_modules.components.privacy.accountants import (
    calibrate_cyclic,
    calibrate_gaussian,
    calibrate_poisson,
)
from lightning_modules.components.privacy.dense_strategies import BinaryTree
from lightning_modules.components.privacy.optimise import rms_error
from lightning_modules.components.privacy.participation import Participation
from lightning_modules.components.privacy.power_series import prefix_workload
from lightning_modules.components.privacy.strategies import (
    Identity,
    NuToeplitz,
    OptimisedBandedToeplitz,
    OptimisedBLT,
    SquareRoot,
)
from lightning_modules.components.privacy.strategy import Strategy


@dataclass(frozen=True)
class Compared:
    """One row of the table.

    Attributes:
        name: strategy and sampler.
        sampling: ``poisson``, ``cyclic_poisson`` or ``fixed_order``; guarantees of different
            samplers are of different mechanisms and must not be mixed.
        accountant: theorem used.
        sigma: noise multiplier that reaches epsilon, before C^-1.
        rmse: ``sigma sqrt(mean_t ||B_t||^2)``, error of the prefix sums per coordinate.
        seconds: time of the calibration.
    """

    name: str
    sampling: str
    accountant: str
    sigma: float
    rmse: float
    seconds: float


def compare_mechanisms(
    n: int,
    p: float,
    epsilon: float,
    delta: float,
    bands: int = 4,
    nu: float = 0.01,
    tree: bool = False,
    dense_limit: int = 256,
) -> list[Compared]:
    """Calibrate every mechanism to (epsilon, delta) at the same expected batch size.

    Args:
        n: steps; an epoch is ``round(1 / p)`` of them.
        p: expected batch size over the number of examples.
        epsilon: target.
        delta: its failure probability.
        bands: width of the banded strategies.
        nu: damping of the nu strategies.
        tree: include the binary tree (dense; slow beyond a few hundred steps).
        dense_limit: strategies that aren't banded are amplified up to so many steps.
    """
    per_epoch = max(1, round(1.0 / p))
    schema = Participation(-(-n // per_epoch), per_epoch, fixed_order=True)
    banded: list[tuple[str, Strategy]] = [
        ("DP-SGD", Identity()),
        (f"square root, {bands} bands", SquareRoot(bands)),
        (f"nu={nu:g}, {bands} bands", NuToeplitz(nu, bands)),
        (f"optimised, {bands} bands", OptimisedBandedToeplitz(bands)),
    ]
    full: list[tuple[str, Strategy]] = [
        ("square root", SquareRoot()),
        (f"nu={nu:g}", NuToeplitz(nu)),
        ("BLT, 3 buffers", OptimisedBLT(3)),
    ]
    if tree:
        full.append(("binary tree", BinaryTree()))
    workload = prefix_workload(n)
    table: list[Compared] = []

    def add(
        name: str, sampling: str, accountant: str, strategy: Strategy, solve: Callable[[], float]
    ) -> None:
        started = time.perf_counter()
        sigma = solve()
        seconds = time.perf_counter() - started
        error = sigma * rms_error(np.asarray(strategy.inverse(n)), workload)
        table.append(Compared(name, sampling, accountant, sigma, error, seconds))

    for name, strategy in (*banded, *full):
        if (name, strategy) in banded or n <= dense_limit:
            solve = partial(calibrate_poisson, strategy, n, p, epsilon, delta)
            add(name, "poisson", "mmcc", strategy, solve)
        sens = strategy.sensitivity(n, schema)
        add(name, "fixed_order", "gaussian", strategy,
            partial(calibrate_gaussian, epsilon, delta, sens))  # fmt: skip
    for name, strategy in banded:
        if strategy.bands(n) * p <= 1.0:
            solve = partial(calibrate_cyclic, strategy, n, p, epsilon, delta)
            add(name, "cyclic_poisson", "cyclic", strategy, solve)
    return table


def format_table(rows: Sequence[Compared]) -> str:
    """The comparison as a Markdown table, best error first within each sampler."""
    lines = ["| sampling | strategy | sigma | RMSE | seconds |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda r: (r.sampling, r.rmse)):
        numbers = f"{row.sigma:.4g} | {row.rmse:.4g} | {row.seconds:.2f}"
        lines.append(f"| {row.sampling} | {row.name} | {numbers} |")
    return "\n".join(lines)
