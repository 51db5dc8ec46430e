"""Reference values of the accountant, and the limits it must reproduce exactly."""

import json
from pathlib import Path

import numpy as np
import pytest

from lightning_modules.components.privacy import (
    GaussianAccountant,
    Mixture,
    Participation,
    PoissonAccountant,
    SquareRoot,
    bernoulli_sum,
    best_split,
    conditional_probabilities,
    discretise,
    gaussian_delta,
    gaussian_epsilon,
    mmcc,
)
from lightning_modules.components.privacy.power_series import nu_strategy_coefficients, toeplitz

GOLDEN = json.loads((Path(__file__).parent / "reference" / "mmcc_golden.json").read_text())


def unit_square_root(bands: int) -> np.ndarray:
    c = nu_strategy_coefficients(0.0, bands)
    return c / np.linalg.norm(c)


@pytest.mark.parametrize("case", GOLDEN["mog_delta"])
def test_hockey_stick_of_a_mixture(case: dict) -> None:
    mixture = Mixture.build(case["sens"], case["w"], case["sigma"])
    found = float(mixture.hockey_stick(case["eps"], case["direction"]))
    assert found == pytest.approx(case["delta"], rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_discretised_loss_touches_the_exact_curve_at_grid_points(direction: str) -> None:
    mixture = Mixture.build([0.0, 0.7, 1.6], [0.8, 0.15, 0.05], 0.9)
    loss = getattr(discretise(mixture, 1e-2), direction)
    for k in (-20, -3, 0, 5, 40, 150):
        exact = float(mixture.hockey_stick(k * 1e-2, direction))
        assert loss.delta(k * 1e-2) == pytest.approx(exact, rel=1e-9, abs=1e-13)
        between = float(mixture.hockey_stick((k + 0.5) * 1e-2, direction))
        assert loss.delta((k + 0.5) * 1e-2) >= between - 1e-14
    assert loss.mass.sum() + loss.infinite == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("case", GOLDEN["identity"])
def test_identity_is_the_subsampled_gaussian(case: dict) -> None:
    found = mmcc([1.0], case["n"], case["p"], case["sigma"], case["delta"])
    assert found.delta1 == 0.0
    assert found.epsilon == pytest.approx(case["eps_dp_accounting"], abs=1e-6)
    assert found.eps_remove == pytest.approx(case["eps_remove"], abs=1e-6)
    assert found.eps_add == pytest.approx(case["eps_add"], abs=2e-5)


def test_identity_takes_the_path_of_the_subsampled_gaussian_bit_for_bit() -> None:
    direct = discretise(Mixture.build([0.0, 1.0], [0.9, 0.1], 1.3), 1e-3).self_compose(40)
    for strategy in ([1.0], np.eye(40)):
        found = mmcc(strategy, 40, 0.1, 1.3, 1e-5, step=1e-3)
        assert found.eps_remove == direct.remove.epsilon(1e-5)
        assert found.eps_add == direct.add.epsilon(1e-5)


@pytest.mark.parametrize("case", GOLDEN["mmcc"], ids=lambda c: c["name"])
def test_small_matrices(case: dict) -> None:
    c = np.array(case["C"])
    arguments = (case["p"], case["sigma"])
    accountant = PoissonAccountant(
        c, len(c), *arguments, case["delta"], case["delta1"], method="exact"
    )
    np.testing.assert_allclose(accountant.p_tilde, case["p_tilde"], atol=1e-10, rtol=0)
    conservative = conditional_probabilities(
        c, *arguments, case["delta1"], tail="conservative", method="exact"
    )
    np.testing.assert_allclose(conservative, case["p_tilde_conservative"], atol=1e-10, rtol=0)
    found = accountant.guarantee()
    assert found.epsilon == pytest.approx(case["eps_mmcc"], abs=1e-5)
    assert found.eps_remove == pytest.approx(case["eps_mmcc_remove"], abs=1e-5)
    assert found.eps_add == pytest.approx(case["eps_mmcc_add"], abs=1e-5)
    assert found.eps_rowwise_p == pytest.approx(case["eps_rowwise_p"], abs=1e-5)
    coarse = PoissonAccountant(
        c, len(c), *arguments, case["delta"], case["delta1"], step=1e-3
    ).epsilon()
    assert -1e-7 <= coarse - found.epsilon < 3e-5  # pessimistic for every grid


@pytest.mark.parametrize("case", GOLDEN["mmcc"][:3], ids=lambda c: c["name"])
def test_options_on_small_matrices(case: dict) -> None:
    c, n = np.array(case["C"]), len(case["C"])
    common = (c, n, case["p"], case["sigma"], case["delta"])
    robust = mmcc(*common, case["delta1"], tail="conservative", method="exact")
    assert robust.epsilon == pytest.approx(case["eps_conservative"], abs=1e-5)
    other = mmcc(*common, case["delta"] / 10, method="exact")
    assert other.epsilon == pytest.approx(case["eps_mmcc_delta1_tenth"], abs=1e-5)
    joint = mmcc(*common, case["delta1"], tail="joint", method="exact")
    assert joint.epsilon <= case["eps_mmcc"] + 1e-9


@pytest.mark.parametrize("name", sorted({c["name"] for c in GOLDEN["exact"]}))
def test_exact_mechanism_lies_between_the_yardstick_and_the_guarantee(name: str) -> None:
    cases = [c for c in GOLDEN["exact"] if c["name"] == name]
    first = cases[0]
    c = np.array(first["C"])
    accountant = PoissonAccountant(c, len(c), first["p"], first["sigma"], 1e-5, step=1e-3)
    loss = accountant.loss()
    for case in cases:
        if "delta_remove" in case and "eps" in case:
            for direction in ("remove", "add"):
                bound = getattr(loss, direction).delta(case["eps"]) + accountant.delta1
                assert bound >= case[f"delta_{direction}"]
    for case in cases:
        if "eps_at_delta_1e-5_remove" in case:
            exact = case["eps_at_delta_1e-5_remove"]
            found = accountant.guarantee()
            assert found.eps_rowwise_p <= exact <= found.eps_remove
            assert found.epsilon == pytest.approx(case["eps_mmcc_delta_1e-5"], abs=5e-5)
            assert found.eps_rowwise_p == pytest.approx(case["eps_rowwise_p_delta_1e-5"], abs=5e-5)


def true_delta(c: np.ndarray, p: float, sigma: float, epsilon: float, direction: str) -> float:
    """Hockey-stick of the whole mechanism at two steps, by the trapezoid rule."""
    chosen = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    weights = np.array([(1 - p) ** 2, p * (1 - p), p * (1 - p), p**2])
    means = chosen @ c.T
    axes = [np.linspace(-9 * sigma, top + 9 * sigma, 901) for top in means.max(0)]
    densities = [
        np.exp(-(((axis - means[:, [k]]) / sigma) ** 2) / 2) / (sigma * np.sqrt(2 * np.pi))
        for k, axis in enumerate(axes)
    ]
    with_example = np.einsum("k,ki,kj->ij", weights, *densities)
    without = np.outer(densities[0][0], densities[1][0])
    first, second = (with_example, without) if direction == "remove" else (without, with_example)
    cell = np.prod([axis[1] - axis[0] for axis in axes])
    return float(np.maximum(first - np.exp(epsilon) * second, 0.0).sum() * cell)


@pytest.mark.parametrize("tail", ["paper", "joint", "conservative"])
def test_never_below_the_true_mechanism(tail: str) -> None:
    generator = np.random.default_rng(12)
    for p in (0.02, 0.1, 0.3, 0.6, 0.9):
        c = np.tril(generator.uniform(0.0, 1.2, (2, 2))) + 0.1 * np.eye(2)
        sigma, delta = generator.uniform(0.5, 2.5), 10 ** generator.uniform(-5, -2)
        accountant = PoissonAccountant(c, 2, p, sigma, delta, tail=tail, step=1e-3)
        loss = accountant.loss()
        for direction in ("remove", "add"):
            epsilon = getattr(loss, direction).epsilon(delta - accountant.delta1)
            assert true_delta(c, p, sigma, epsilon, direction) <= delta * (1 + 1e-4)
    # and no more than that where it is tight: two steps that do not overlap
    apart = PoissonAccountant(np.diag([1.0, 0.7]), 2, 0.2, 0.9, 1e-3, tail=tail, step=1e-3)
    exact = max(true_delta(apart.matrix, 0.2, 0.9, apart.epsilon(), d) for d in ("remove", "add"))
    assert exact == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("case", GOLDEN["gaussian_limit"])
def test_certain_participation_is_the_gaussian_mechanism(case: dict) -> None:
    c = np.array(case["C"])
    found = mmcc(c, len(c), 1.0, case["sigma"], case["delta"])
    assert found.epsilon == pytest.approx(case["eps"], abs=1e-6)
    assert np.linalg.norm(c.sum(1)) / case["sigma"] == pytest.approx(case["mu"], rel=1e-12)
    column = unit_square_root(4)
    banded = mmcc(column, 9, 1.0, 2.0, 1e-5)
    mu = np.linalg.norm(toeplitz(column, 9).sum(1)) / 2.0
    assert banded.epsilon == pytest.approx(gaussian_epsilon(mu, 1e-5), abs=1e-12)


@pytest.mark.parametrize("case", GOLDEN["gaussian_single"])
def test_gaussian_curve(case: dict) -> None:
    assert gaussian_epsilon(1 / case["sigma"], case["delta"]) == pytest.approx(
        case["eps"], abs=1e-9
    )
    assert gaussian_delta(case["eps"], 1 / case["sigma"]) == pytest.approx(1e-5, rel=1e-9)


def test_banded_toeplitz_needs_few_distributions_and_equals_the_dense_path() -> None:
    column, n, b = unit_square_root(4), 20, 4
    short = PoissonAccountant(column, n, 0.05, 2.0, 1e-5, step=1e-3)
    dense = PoissonAccountant(toeplitz(column, n), n, 0.05, 2.0, 1e-5, step=1e-3)
    assert short.guarantee().distinct_rows <= 2 * b
    assert short.epsilon() == pytest.approx(dense.epsilon(), abs=1e-10)
    for t in (0, 1, 3, 7, 8, 19):
        assert short.epsilon(t) == pytest.approx(dense.epsilon(t), abs=1e-10)


@pytest.mark.parametrize(
    ("n", "p", "bands", "sigma", "measured"),
    [(2000, 0.01, 4, 8.0, 0.585), (2000, 0.01, 16, 8.0, 1.362), (1000, 0.05, 8, 30.0, 0.537)],
)
def test_long_runs_at_or_below_earlier_measurements(n, p, bands, sigma, measured) -> None:
    found = mmcc(unit_square_root(bands), n, p, sigma, 1e-5, step=1e-3)
    # tighter than the earlier value, whose row sums were rounded up more coarsely
    assert 0.96 * measured < found.epsilon <= measured + 5e-4
    assert found.eps_rowwise_p < found.epsilon
    assert found.distinct_rows <= 2 * bands


def test_monotone_in_every_parameter() -> None:
    def epsilon(bands=3, n=50, p=0.05, sigma=2.0, delta=1e-5) -> float:
        return mmcc(nu_strategy_coefficients(0.0, bands), n, p, sigma, delta, step=1e-3).epsilon

    base = epsilon()
    assert epsilon(sigma=2.2) < base < epsilon(p=0.06)
    assert epsilon(n=40) < base < epsilon(delta=1e-6)
    assert epsilon(bands=2) < base < epsilon(bands=4)


def test_scaling_strategy_and_noise_together_changes_nothing() -> None:
    c = toeplitz([1.0, 0.5, 0.3], 6)
    first = mmcc(c, 6, 0.1, 1.5, 1e-5).epsilon
    assert mmcc(4 * c, 6, 0.1, 6.0, 1e-5).epsilon == pytest.approx(first, abs=1e-9)
    assert mmcc(2 * np.eye(6), 6, 0.1, 2.0, 1e-5).epsilon == pytest.approx(
        mmcc(np.eye(6), 6, 0.1, 1.0, 1e-5).epsilon, abs=1e-12
    )


def test_nearly_tight_with_much_noise() -> None:
    # a small delta_1, so that the split of delta does not hide the limit
    ratios, excess = [], []
    for sigma in (10.0, 100.0, 1000.0):
        step = 1e-3 if sigma < 50 else 1e-4
        found = mmcc([1.0, 0.5, 0.375], 200, 0.1, sigma, 1e-5, 1e-8, step=step)
        ratios.append(found.epsilon / found.eps_rowwise_p)
        excess.append(found.p_tilde_max / 0.1)
    assert ratios[0] > ratios[1] > ratios[2] > 1.0
    assert ratios[2] < 1.01
    assert excess[0] > excess[1] > excess[2] > 1.0
    assert excess[2] < 1.02


def test_tail_bounds_are_ordered_and_never_below_p() -> None:
    c = toeplitz(unit_square_root(4), 7)
    found = {
        method: conditional_probabilities(c, 0.1, 1.5, 1e-6, method=method)
        for method in ("exact", "grid", "chernoff")
    }
    assert np.all(found["exact"] >= 0.1 - 1e-15)
    assert np.all(found["grid"] >= found["exact"] - 1e-12)
    assert np.all(found["chernoff"] >= found["exact"] - 1e-12)
    joint = conditional_probabilities(c, 0.1, 1.5, 1e-6, tail="joint", method="exact")
    assert np.all(joint <= found["exact"] + 1e-12)


def test_tiny_delta_by_tilting() -> None:
    # at p = 1 the composed losses are those of a Gaussian, known at any delta
    loss = discretise(Mixture.build([0.5], [1.0], 1.0), 1e-3)
    from lightning_modules.components.privacy.amplification import tilt_for

    tilt = tilt_for([(loss, 16)], 1e-14)
    found = loss.self_compose(16, tilt=tilt).epsilon(1e-14)
    assert found == pytest.approx(gaussian_epsilon(2.0, 1e-14), abs=2e-3)
    assert found >= gaussian_epsilon(2.0, 1e-14) - 1e-9
    small = mmcc([1.0], 100, 0.01, 2.0, 1e-12, step=1e-3).epsilon
    assert small > mmcc([1.0], 100, 0.01, 2.0, 1e-9, step=1e-3).epsilon


def test_samplers_are_not_interchangeable() -> None:
    # without amplification a Poisson example may be in all steps: more than any schema allows
    strategy = SquareRoot(4)
    poisson_all = mmcc(strategy.coefficients(100), 100, 1.0, 5.0, 1e-5).epsilon
    ten_times = GaussianAccountant(strategy, 100, Participation(10, 10), 5.0, 1e-5).epsilon()
    assert poisson_all > ten_times


def test_the_split_of_delta_can_be_chosen() -> None:
    column = unit_square_root(4)
    common = (column, 300, 0.05, 8.0, 1e-5)
    chosen = best_split(*common)
    best = mmcc(*common, chosen, step=1e-3).epsilon
    assert 0 < chosen < 1e-5
    for share in (0.01, 0.1, 0.5):
        assert best <= mmcc(*common, share * 1e-5, step=1e-3).epsilon + 1e-12


def test_rounded_row_sums_dominate_the_exact_ones() -> None:
    generator = np.random.default_rng(0)
    values, chances = generator.uniform(0.05, 1.0, 12), generator.uniform(0.05, 0.6, 12)
    points, mass, lost = bernoulli_sum(values, chances, exact_terms=12)
    coarse, weights, cut = bernoulli_sum(values, chances, exact_terms=0, step=2e-3)
    assert weights.sum() + cut == pytest.approx(1.0, abs=1e-14)
    assert mass.sum() + lost == pytest.approx(1.0, abs=1e-14)
    assert coarse.size < 600 < points.size
    for s in np.linspace(0.0, values.sum(), 200):
        exact, rounded = mass[points > s].sum() + lost, weights[coarse > s].sum() + cut
        assert rounded >= exact - 1e-14
    assert weights @ coarse == pytest.approx(mass @ points, rel=0.015)
    # far tails are moved to infinity, never dropped
    far = bernoulli_sum(np.ones(40), np.full(40, 1e-3), exact_terms=0)
    assert 0.0 < far[2] < 1e-19
    assert far[1].sum() + far[2] == pytest.approx(1.0, abs=1e-14)
