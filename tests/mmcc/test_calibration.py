"""Noise for a target epsilon, and the comparison of mechanisms."""

import pytest

from lightning_modules.components.privacy import (
    CyclicPoissonAccountant,
    Identity,
    Participation,
    SquareRoot,
    calibrate,
    calibrate_cyclic,
    calibrate_gaussian,
    calibrate_poisson,
    gaussian_epsilon,
    grid_step,
    poisson,
)
from lightning_modules.mmcc import compare_mechanisms, format_table


@pytest.mark.parametrize(("bands", "target"), [(1, 2.0), (4, 0.5), (4, 4.0)])
def test_poisson_noise_is_enough_and_not_more(bands: int, target: float) -> None:
    def epsilon(sigma: float, step: float) -> float:
        return poisson(SquareRoot(bands), 300, 0.02, sigma, 1e-5, step=step).epsilon()

    sigma = calibrate(target, 1e-5, epsilon)
    assert epsilon(sigma, 1e-4) <= target
    assert epsilon(0.999 * sigma, 1e-4) > target


def test_cyclic_noise_is_enough_and_not_more() -> None:
    def epsilon(sigma: float, step: float) -> float:
        return CyclicPoissonAccountant(SquareRoot(4), 400, 0.02, sigma, 1e-5, step=step).epsilon()

    sigma = calibrate(1.0, 1e-5, epsilon)
    assert epsilon(sigma, 1e-4) <= 1.0 < epsilon(0.999 * sigma, 1e-4)


def test_gaussian_noise_is_exact() -> None:
    sens = SquareRoot(8).sensitivity(200, Participation(10, 20))
    sigma = calibrate_gaussian(1.5, 1e-5, sens)
    assert gaussian_epsilon(sens / sigma, 1e-5) == pytest.approx(1.5, abs=1e-9)
    assert gaussian_epsilon(sens / sigma, 1e-5) <= 1.5


def test_cyclic_poisson_reference_values() -> None:
    # measured before with another implementation: square root of unit norm, delta 1e-5
    for n, p, bands, sigma, expected in (
        (2000, 0.01, 4, 3.0, 1.192),
        (2000, 0.01, 16, 8.0, 0.837),
        (1000, 0.05, 8, 10.0, 1.781),
    ):
        norm = float(SquareRoot(bands).column_norms(n)[0])
        found = CyclicPoissonAccountant(SquareRoot(bands), n, p, sigma * norm, 1e-5, step=1e-3)
        assert found.epsilon() == pytest.approx(expected, abs=1e-3)
        assert found.epsilon(n // 2) < found.epsilon()


def test_one_band_makes_all_samplers_of_poisson_kind_equal() -> None:
    cyclic = CyclicPoissonAccountant(Identity(), 100, 0.05, 2.0, 1e-5, step=1e-3).epsilon()
    assert cyclic == poisson(Identity(), 100, 0.05, 2.0, 1e-5, step=1e-3).epsilon()


def test_comparison_covers_every_sampler_at_equal_epsilon() -> None:
    rows = compare_mechanisms(60, 0.05, 1.0, 1e-4, bands=3, tree=True, dense_limit=0)
    assert {row.sampling for row in rows} == {"poisson", "cyclic_poisson", "fixed_order"}
    by_name = {(r.sampling, r.name): r for r in rows}
    amplified = by_name["poisson", "square root, 3 bands"]
    plain = by_name["fixed_order", "square root, 3 bands"]
    assert amplified.sigma < plain.sigma
    assert amplified.rmse < plain.rmse
    assert ("fixed_order", "binary tree") in by_name
    text = format_table(rows)
    assert text.count("\n") == len(rows) + 1


def test_noise_on_a_grid_that_follows_sigma() -> None:
    # where single steps hardly leak a grid of 1e-3 would cost almost a percent of epsilon
    strategy, n, p, target = SquareRoot(4), 2000, 0.01, 0.5
    sigma = calibrate_poisson(strategy, n, p, target, 1e-5)
    step = grid_step(strategy, n, sigma)
    assert step < 3e-4
    assert poisson(strategy, n, p, sigma, 1e-5, step=step).epsilon() <= target
    assert poisson(strategy, n, p, 0.999 * sigma, 1e-5, step=2e-5).epsilon() > target
    cyclic = calibrate_cyclic(strategy, n, p, target, 1e-5)
    for factor, above in ((1.0, False), (0.999, True)):
        epsilon = CyclicPoissonAccountant(
            strategy, n, p, factor * cyclic, 1e-5, step=grid_step(strategy, n, cyclic)
        ).epsilon()
        assert (epsilon > target) == above
