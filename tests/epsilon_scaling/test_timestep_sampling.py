"""Timesteps of training: uniform, loss-aware, evenly spread."""

import pytest
import torch

from lightning_modules.epsilon_scaling.timestep_sampling import (
    LossSecondMoment,
    UniformTimesteps,
    stratified_timesteps,
)


def test_uniform_covers_all_steps_alike():
    uniform = (torch.arange(10_000).double() + 0.5) / 10_000
    steps, weights = UniformTimesteps(100).draw(uniform)
    assert torch.equal(steps.bincount(), torch.full((100,), 100))
    assert (weights == 1).all()
    few, _ = UniformTimesteps(100).draw(uniform, share=0.25)
    assert few.max() == 24


def test_evaluation_steps_are_spread_evenly():
    counts = stratified_timesteps(torch.arange(1000), 10).bincount(minlength=10)
    assert counts.min() >= 98
    assert counts.max() <= 102


def test_loss_second_moment():
    sampler = LossSecondMoment(4, history=3)
    steps = torch.tensor([0, 1, 2, 3]).repeat(2)
    sampler.update(steps, torch.ones(8))
    assert torch.equal(sampler.probabilities(), torch.full((4,), 0.25, dtype=torch.float64))
    sampler.update(torch.arange(4), torch.ones(4))
    # a full ring forgets its oldest: the last three losses of step 2 are 3
    sampler.update(torch.tensor([2, 2, 2]), torch.tensor([3.0, 3.0, 3.0]))
    want = torch.tensor([1, 1, 3, 1]).double() / 6 * 0.999 + 0.001 / 4
    torch.testing.assert_close(sampler.probabilities(), want)
    drawn, weights = sampler.draw((torch.arange(6000).double() + 0.5) / 6000)
    frequency = drawn.bincount(minlength=4) / 6000
    torch.testing.assert_close(frequency.double(), want, atol=1e-3, rtol=0)
    # importance weights keep the mean of any function of the step
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert float((weights * values[drawn]).mean()) == pytest.approx(2.5, rel=2e-3)


def test_more_losses_than_memory_keep_the_newest():
    sampler = LossSecondMoment(2, history=2)
    sampler.update(torch.tensor([0, 0, 0, 0, 1]), torch.tensor([9.0, 9.0, 1.0, 2.0, 5.0]))
    assert sorted(sampler.losses[0].tolist()) == [1.0, 2.0]
    assert sampler.counts.tolist() == [4, 1]
