"""Training without gradients under a Trainer that counts, saves and stops by optimiser steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class StepCounter(Optimizer):
    """Do-nothing optimiser: one `step` per batch moves the Trainer's `global_step`.

    A method with closed-form updates uses manual optimisation, keeps its state in buffers,
    registers `self.anchor = anchor()` and calls `self.optimizers().step()` once per batch. Only
    then are step counts, checkpoints, `max_steps`, resume and DDP all right.

    Args:
        parameters: The anchor parameter.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Evaluate the closure, if any, and change nothing."""
        return closure() if closure is not None else None


def anchor() -> nn.Parameter:
    """Empty parameter that gives DDP and the optimiser something to hold."""
    return nn.Parameter(torch.zeros(0))
