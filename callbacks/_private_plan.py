"""What a private run depends on, and which theorem covers it."""

import math
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_modules.components.privacy.accountants import (
    Accountant,
    CyclicPoissonAccountant,
    GaussianAccountant,
    calibrate_cyclic,
    calibrate_gaussian,
    calibrate_poisson,
    grid_step,
    poisson,
)
from lightning_modules.components.privacy.participation import Participation
from lightning_modules.components.privacy.strategy import Strategy


def make_plan(
    trainer: Trainer,
    strategy: Strategy,
    *,
    size: int,
    sampling: str,
    delta: float | None,
    **settings: Any,
) -> dict[str, Any]:
    """Everything the guarantee depends on, as plain values; equal in a resumed run.

    Args:
        trainer: at the start of training, with its loader.
        strategy: strategy matrix.
        size: number of trainable parameters.
        sampling: declared scheme, which the loader must follow.
        delta: failure probability, default 1 / (10 * examples).
        **settings: further values to keep.

    Raises:
        MisconfigurationException: the loader draws otherwise, or training has no end.
    """
    order: Any = getattr(trainer.train_dataloader, "order", None)
    scheme = getattr(order, "scheme", None)
    if scheme is None and hasattr(order, "shuffle") and hasattr(order, "world_size"):
        scheme = "shuffle" if order.shuffle else "sequential"
    if scheme != sampling:
        what = f"draws batches by '{scheme}'" if scheme else "draws batches in its own way"
        raise MisconfigurationException(
            f"PrivateGradients accounts for sampling='{sampling}' but the data loader {what}: set "
            f"data.sampling={sampling} (a SuiteDataModule has all of them) or declare the "
            "loader's own scheme here"
        )
    steps = trainer.estimated_stepping_batches
    if not math.isfinite(steps) or steps < 1:
        raise MisconfigurationException(
            "noise is calibrated for a number of steps known before training: set "
            "trainer.max_epochs or trainer.max_steps"
        )
    if sampling == "cyclic_poisson" and trainer.num_training_batches != len(order):
        raise MisconfigurationException(
            f"an epoch of {trainer.num_training_batches} instead of {len(order)} steps breaks the "
            "turns of the groups, which go on from epoch to epoch: leave out "
            "trainer.limit_train_batches and overfit_batches, or use sampling=poisson"
        )
    n, examples = int(steps), int(order.size)
    if delta is None:
        delta = 1.0 / (10 * examples)
    if delta >= 1.0 / examples:
        rank_zero_warn(
            f"delta={delta:g} is at least 1/{examples}, one over the number of examples: releasing "
            "one example at random would satisfy such a guarantee"
        )
    per_epoch = min(int(trainer.num_training_batches), n)
    return {
        "n": n,
        "examples": examples,
        "expected": int(getattr(order, "expected", 0) or order.batch_size * order.world_size),
        "per_epoch": per_epoch,
        "epochs": math.ceil(n / per_epoch),
        "delta": delta,
        "sampling": sampling,
        "strategy": strategy.describe(),
        "groups": strategy.bands(n) if sampling == "cyclic_poisson" else 0,
        "size": size,
        **settings,
    }


def participation(plan: dict[str, Any]) -> Participation:
    """How often an example takes part under the schemes without amplification."""
    if plan["sampling"] == "shuffle":  # once an epoch, anywhere in it
        return Participation(plan["epochs"], 1)
    return Participation(plan["epochs"], plan["per_epoch"], fixed_order=True)


def account(plan: dict[str, Any], strategy: Strategy, sigma: float) -> Accountant:
    """Accountant of the plan's sampling scheme."""
    n, delta, p = plan["n"], plan["delta"], plan["expected"] / plan["examples"]
    if plan["sampling"] not in ("poisson", "cyclic_poisson"):
        return GaussianAccountant(strategy, n, participation(plan), sigma, delta)
    step = grid_step(strategy, n, sigma)
    if plan["sampling"] == "poisson":
        return poisson(strategy, n, p, sigma, delta, plan["delta1"], plan["tail"], step)
    return CyclicPoissonAccountant(strategy, n, p, sigma, delta, plan["groups"], step)


def calibrated(plan: dict[str, Any], strategy: Strategy, target_epsilon: float) -> float:
    """Noise multiplier that reaches the target at the end of the plan."""
    n, delta, p = plan["n"], plan["delta"], plan["expected"] / plan["examples"]
    if plan["sampling"] == "poisson":
        return calibrate_poisson(
            strategy, n, p, target_epsilon, delta, plan["delta1"], plan["tail"]
        )
    if plan["sampling"] == "cyclic_poisson":
        return calibrate_cyclic(strategy, n, p, target_epsilon, delta, plan["groups"])
    sens = strategy.sensitivity(n, participation(plan))
    return calibrate_gaussian(target_epsilon, delta, sens)
