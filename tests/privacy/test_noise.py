"""Noise that is the same for any number of ranks and after any interruption."""

import hashlib

import numpy as np
import pytest
import torch

from lightning_modules.components.privacy import (
    AntiPGD,
    BandedInverse,
    BinaryTree,
    Identity,
    NoiseStream,
    NuToeplitz,
    OptimisedBLT,
    Participation,
    SquareRoot,
    Strategy,
    WhiteNoise,
)
from lightning_modules.components.randomness import secret_generator

STRATEGIES = [
    Identity(),
    SquareRoot(4),
    NuToeplitz(0.1),
    OptimisedBLT(2),
    AntiPGD(0.1),
    BandedInverse(3),
    BinaryTree(),
]
SIZE, STEPS = 700, 12


def make(strategy: Strategy, rank: int = 0, world: int = 1, **options) -> NoiseStream:
    white = WhiteNoise(SIZE, 5, rank=rank, world=world, chunk=100, **options)
    return NoiseStream(strategy.correlator(STEPS), white)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_sharded_and_resumed_streams_are_bitwise_the_whole_one(strategy: Strategy) -> None:
    whole = make(strategy)
    parts = [make(strategy, rank, 3) for rank in range(3)]
    for t in range(STEPS):
        expected = whole.step()
        found = torch.zeros(SIZE)
        for part in parts:
            part.white.scatter_add(found, part.step())
        assert torch.equal(found, expected)
        if t == 6:  # continue from states in new objects
            resumed = make(strategy)
            resumed.load_state_dict(whole.state_dict())
            whole = resumed
            for rank, part in enumerate(parts):
                parts[rank] = make(strategy, rank, 3)
                parts[rank].load_state_dict(part.state_dict())


def test_memory_is_that_of_the_bands_or_buffers() -> None:
    for strategy, vectors in (
        (Identity(), 0),
        (SquareRoot(4), 3),
        (OptimisedBLT(3), 3),
        (NuToeplitz(0.1), 0),
        (BinaryTree(), 0),
    ):
        stream = make(strategy)
        for _ in range(5):
            stream.step()
        kept = sum(b.numel() for b in stream.state_dict()["buffers"].values())
        assert stream.correlator.memory == vectors
        assert kept == vectors * SIZE


def test_one_band_and_strong_damping_are_independent_noise_bit_for_bit() -> None:
    plain = make(Identity())
    one, damped = make(NuToeplitz(0.3, bands=1)), make(NuToeplitz(float(np.nextafter(1.0, 0.0))))
    for _ in range(STEPS):
        expected = plain.step()
        assert torch.equal(one.step(), expected)
        assert torch.equal(damped.step(), expected)


@pytest.mark.parametrize(
    "strategy", [SquareRoot(3), NuToeplitz(0.1), OptimisedBLT(2)], ids=lambda s: type(s).__name__
)
def test_empirical_covariance(strategy: Strategy) -> None:
    n, draws = 6, 20_000
    white = WhiteNoise(draws, 1, dtype=torch.float64)
    stream = NoiseStream(strategy.correlator(n), white)
    x = torch.stack([stream.step() for _ in range(n)]).numpy()
    expected = strategy.inverse(n) @ strategy.inverse(n).T
    found = x @ x.T / draws
    spread = np.sqrt((expected**2 + np.outer(np.diag(expected), np.diag(expected))) / draws)
    assert np.all(np.abs(found - expected) < 5 * spread)


def test_steps_chunks_and_seeds_have_their_own_noise() -> None:
    white = WhiteNoise(200, 3, chunk=100)
    first, second = white(0), white(1)
    assert torch.equal(first, white(0))
    assert not torch.equal(first, second)
    assert not torch.equal(first[:100], first[100:])
    assert not torch.equal(first, WhiteNoise(200, 4, chunk=100)(0))
    with pytest.raises(ValueError, match="float32 or float64"):
        WhiteNoise(10, 1, dtype=torch.bfloat16)


def test_no_step_beyond_the_plan() -> None:
    stream = make(SquareRoot(3))
    for _ in range(STEPS):
        stream.step()
    with pytest.raises(RuntimeError, match="calibrated for 12 steps"):
        stream.step()


def test_another_model_is_refused() -> None:
    stream = make(SquareRoot(3))
    stream.step()
    state = stream.state_dict()
    other = NoiseStream(SquareRoot(3).correlator(STEPS), WhiteNoise(SIZE + 1, 5))
    with pytest.raises(ValueError, match="700 coordinates, the trainable parameters have 701"):
        other.load_state_dict(state)


def test_a_neighbour_moves_the_strategy_transformed_stream_by_at_most_the_sensitivity() -> None:
    generator = np.random.default_rng(0)
    n, schema = 20, Participation(4, 5)
    for strategy in (SquareRoot(5), NuToeplitz(0.05), Identity()):
        bound = strategy.sensitivity(n, schema)
        for start in range(5):
            u = np.zeros((n, 7))
            rows = generator.normal(size=(len(range(start, n, 5)), 7))
            u[start::5] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
            assert np.linalg.norm(strategy.matrix(n) @ u) <= bound + 1e-12
        same = np.zeros((n, 1))
        same[::5] = 1.0
        assert np.linalg.norm(strategy.matrix(n) @ same) == pytest.approx(bound)


def test_secret_generators_keep_the_whole_key() -> None:
    # a seed of the CPU's generator is cut to 32 bits
    assert torch.equal(
        *(torch.randn(4, generator=torch.Generator().manual_seed(5 + k * 2**32)) for k in (0, 9))
    )
    key = (7, 3, 0)
    words = np.frombuffer(hashlib.shake_256(repr(key).encode()).digest(4 * 624), "<u4")
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    drawn = torch.empty(1000, dtype=torch.int32).random_(generator=secret_generator(*key))
    np.testing.assert_array_equal(drawn.numpy(), twister.random_raw(1000) & 0x7FFFFFFF)
    assert torch.equal(
        WhiteNoise(20, 7)(3), torch.empty(20).normal_(generator=secret_generator(7, 3, 0))
    )
