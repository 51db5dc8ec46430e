"""Which timesteps training draws: uniform, or in proportion to the size of their losses."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def stratified_timesteps(positions: Tensor, steps: int) -> Tensor:
    """Fixed, evenly spread timesteps ``(n,)`` for evaluation, by position in the data set."""
    golden = 0.6180339887498949
    return ((positions.double() * golden) % 1 * steps).long()


class UniformTimesteps(nn.Module):
    """All steps alike.

    Args:
        steps: Number T of steps.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def draw(self, uniform: Tensor, share: float = 1.0) -> tuple[Tensor, Tensor]:
        """Timesteps ``(n,)`` and importance weights ``(n,)`` of uniform numbers in [0, 1).

        Args:
            uniform: ``(n,)`` float64.
            share: Only the first (cleanest) share of the steps is drawn.
        """
        count = max(1, round(self.steps * share))
        return (uniform * count).long().clamp(max=count - 1), torch.ones_like(uniform).float()

    def update(self, timesteps: Tensor, losses: Tensor) -> None:
        """Learn from the losses ``(n,)`` of these timesteps: nothing here."""


class LossSecondMoment(UniformTimesteps):
    """Steps in proportion to the root mean square of their last losses.

    Uniform until every step has a full history; then with a small uniform share, and importance
    weights 1 / (T p_t) that keep the loss unbiased. The state is in buffers: give all ranks the
    losses of the whole global batch, in one order, and they stay equal.

    Args:
        steps: Number T of steps.
        history: Losses remembered per step.
        uniform_share: Share of uniform draws.
    """

    def __init__(self, steps: int, history: int = 10, uniform_share: float = 0.001) -> None:
        super().__init__(steps)
        self.history, self.uniform_share = history, uniform_share
        self.register_buffer("losses", torch.zeros(steps, history, dtype=torch.float64))
        self.register_buffer("counts", torch.zeros(steps, dtype=torch.int64))
        self.losses: Tensor
        self.counts: Tensor

    def probabilities(self) -> Tensor:
        """Chance of each step ``(T,)`` float64."""
        if not bool((self.counts >= self.history).all()):
            return torch.full((self.steps,), 1 / self.steps, dtype=torch.float64)
        size = (self.losses**2).mean(1).sqrt().cpu()
        return size / size.sum() * (1 - self.uniform_share) + self.uniform_share / self.steps

    def draw(self, uniform: Tensor, share: float = 1.0) -> tuple[Tensor, Tensor]:
        """Timesteps and importance weights; see `UniformTimesteps.draw`."""
        chance = self.probabilities()
        count = max(1, round(self.steps * share))
        chance = chance[:count] / chance[:count].sum()
        drawn = torch.searchsorted(chance.cumsum(0), uniform.cpu(), right=True)
        drawn = drawn.clamp(max=count - 1)
        return drawn, (1 / (count * chance[drawn])).float()

    @torch.no_grad()
    def update(self, timesteps: Tensor, losses: Tensor) -> None:
        """Remember losses ``(n,)`` in the ring of each timestep ``(n,)``."""
        steps, order = timesteps.to(self.counts.device).sort(stable=True)
        values = losses.to(self.losses)[order]
        present, times = torch.unique_consecutive(steps, return_counts=True)
        first = times.cumsum(0) - times
        number = torch.arange(len(steps), device=steps.device) - first.repeat_interleave(times)
        # Only the newest of a step fit into its ring.
        fits = number >= times.repeat_interleave(times) - self.history
        place = (self.counts[steps] + number) % self.history
        self.losses[steps[fits], place[fits]] = values[fits]
        self.counts[present] += times


TIMESTEP_SAMPLINGS: dict[str, type[UniformTimesteps]] = {
    "uniform": UniformTimesteps,
    "loss_second_moment": LossSecondMoment,
}
