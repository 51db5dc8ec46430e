"""Closed forms, sensitivities, optimised strategies and streams against reference values."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_modules.components.privacy import (
    BLT,
    AntiPGD,
    BandedInverse,
    BandedToeplitz,
    BinaryTree,
    Dense,
    Identity,
    NuToeplitz,
    OptimisedBandedToeplitz,
    OptimisedBLT,
    OptimisedDense,
    Participation,
    SquareRoot,
    Strategy,
    theory,
)
from lightning_modules.components.privacy.optimise import (
    _log_loss,
    buffered_coefficients,
    buffered_inverse,
    max_loss,
    mean_loss,
    optimise_banded,
    optimise_buffers,
    rms_error,
    tree_gram,
    workload_errors,
)
from lightning_modules.components.privacy.power_series import (
    nu_noise_coefficients,
    nu_sensitivity,
    nu_sensitivity_limit,
    nu_strategy_coefficients,
    prefix_workload,
    series_inverse,
)
from lightning_modules.correlated_noise import choose_nu, proxy_error, trajectory
from lightning_modules.correlated_noise.regression import correlate

FOLDER = Path(__file__).parent / "reference"
GOLDEN = json.loads((FOLDER / "closed_forms.json").read_text())
STREAMS = np.load(FOLDER / "streams.npz")

EVERY: list[Strategy] = [
    Identity(),
    NuToeplitz(0.05),
    NuToeplitz(0.05, 6),
    SquareRoot(),
    SquareRoot(5),
    AntiPGD(),
    AntiPGD(0.1),
    BandedInverse(4),
    BandedToeplitz([0.9, 0.4, 0.2]),
    BandedToeplitz([1.0, 0.6], normalise_columns=True),
    BLT([0.95, 0.5], [0.2, 0.3]),
    OptimisedBLT(2),
    OptimisedBLT(3, nu=0.05),
    OptimisedBandedToeplitz(4),
    OptimisedDense(),
    BinaryTree(),
    Dense(
        [[1.0 if i == j else 0.3 / (i - j) if j < i else 0.0 for j in range(24)] for i in range(24)]
    ),
]


def stream(strategy: Strategy, white: np.ndarray) -> np.ndarray:
    correlator = strategy.correlator(len(white))
    z = torch.from_numpy(white)
    return torch.stack([correlator.step(lambda t: z[t]) for _ in range(len(white))]).numpy()


@pytest.mark.parametrize("case", GOLDEN["nu"], ids=lambda c: f"nu{c['nu']}")
def test_nu_family(case: dict) -> None:
    nu = case["nu"]
    np.testing.assert_allclose(nu_noise_coefficients(nu, 16), case["beta"], atol=1e-14)
    np.testing.assert_allclose(nu_strategy_coefficients(nu, 16), case["inv"], atol=1e-14)
    for n, gamma in case["gamma_T"].items():
        assert nu_sensitivity(nu, int(n)) == pytest.approx(gamma, abs=1e-12)
    if case["gamma_inf"] is None:
        assert nu_sensitivity_limit(nu) == np.inf
    else:
        assert nu_sensitivity_limit(nu) == pytest.approx(case["gamma_inf"], abs=1e-12)
        reach = int(30 / nu)
        assert nu_sensitivity(nu, reach) == pytest.approx(case["gamma_inf"], abs=1e-9)


@pytest.mark.parametrize("nu", [0.0, 0.001, 0.3])
def test_noise_and_strategy_are_inverse_power_series(nu: float) -> None:
    product = np.convolve(nu_noise_coefficients(nu, 2000), nu_strategy_coefficients(nu, 2000))
    np.testing.assert_allclose(product[:2000], np.eye(1, 2000)[0], atol=1e-14)
    inverse = series_inverse(nu_noise_coefficients(nu, 300), 300)
    np.testing.assert_allclose(inverse, nu_strategy_coefficients(nu, 300), atol=1e-13)


@pytest.mark.parametrize("case", GOLDEN["mean_estimation"], ids=lambda c: f"eta{c['eta']}")
def test_mean_estimation(case: dict) -> None:
    eta, options = case["eta"], {"clip_norm": case["G"], "rho": case["rho"]}
    best = theory.mean_estimation_optimum(eta, **options)
    assert best == pytest.approx(case["dp_ftrl_opt"], rel=1e-12)
    assert theory.mean_estimation_sgd(eta, **options) == pytest.approx(case["dp_sgd"], rel=1e-12)
    numeric = theory.privacy_risk(eta, 1.0, theory.nu_spectrum(eta), **options)
    assert numeric == pytest.approx(best, rel=1e-10)


@pytest.mark.parametrize("case", GOLDEN["quadratic"])
def test_quadratics(case: dict) -> None:
    eta, lam = case["eta"], case["lam"]
    found = theory.privacy_risk(eta, lam, theory.nu_spectrum(case["nu"]))
    assert found == pytest.approx(case["dp_part_ftrl"], rel=1e-9)
    assert theory.privacy_risk(eta, lam) == pytest.approx(case["dp_part_sgd"], rel=1e-9)
    assert theory.gradient_risk(eta, lam) == pytest.approx(case["sgd_part_unit"], rel=1e-9)


def test_nothing_beats_nu_equal_to_the_learning_rate_in_mean_estimation() -> None:
    eta, generator = 0.1, np.random.default_rng(0)
    base, best = theory.nu_spectrum(eta), theory.mean_estimation_optimum(eta)
    for _ in range(10):
        a = generator.normal(size=5) * 0.2
        risk = theory.privacy_risk(
            eta, 1.0, lambda w, a=a: base(w) * np.exp(a @ np.cos(np.arange(1, 6) * w))
        )
        assert risk > best
    for nu in (0.02, 0.2):
        assert theory.privacy_risk(eta, 1.0, theory.nu_spectrum(nu)) > best


def test_finite_filters_agree_with_their_closed_forms() -> None:
    nu = 0.2
    damped = theory.taps_spectrum([1.0, -(1 - nu)])
    assert theory.sensitivity_limit(damped) ** 2 == pytest.approx(1 / (1 - (1 - nu) ** 2))
    long = theory.taps_spectrum(nu_noise_coefficients(nu, 200))
    assert theory.privacy_risk(0.1, 1.0, long) == pytest.approx(
        theory.privacy_risk(0.1, 1.0, theory.nu_spectrum(nu)), rel=1e-9
    )
    assert theory.finite_sensitivity([1.0, -1.0], 50) == pytest.approx(np.sqrt(50))
    eigenvalues = 1.0 / np.arange(1, 9)
    assert theory.effective_dimension(eigenvalues) == pytest.approx(eigenvalues.sum())
    assert theory.predicted_excess_risk(eigenvalues, 0.05) == pytest.approx(0.0504, abs=5e-5)
    assert theory.predicted_excess_risk(eigenvalues, 0.05, nu=0.05) == pytest.approx(
        0.00747, abs=5e-6
    )


@pytest.mark.parametrize("case", GOLDEN["minsep_sensitivity"])
def test_sensitivity_at_minimum_separation(case: dict) -> None:
    schema = Participation(case["max_participations"], case["min_sep"])
    found = NuToeplitz(case["nu"]).sensitivity(case["n"], schema)
    assert found == pytest.approx(case["sensitivity"], abs=1e-12)
    dense = Dense(NuToeplitz(case["nu"]).matrix(case["n"]).tolist())
    assert dense.sensitivity(case["n"], schema) >= case["sensitivity"] - 1e-12


def test_sensitivity_of_a_dense_matrix() -> None:
    case = GOLDEN["dense_fixed_epoch"]
    strategy = Dense(case["C"])
    for epochs, gap in ((3, 4), (4, 3)):
        found = strategy.sensitivity(12, Participation(epochs, gap, fixed_order=True))
        assert found == pytest.approx(case[f"epochs{epochs}"], abs=1e-10)
    assert strategy.sensitivity(12) == pytest.approx(case["single"], abs=1e-10)
    bound = strategy.sensitivity(12, Participation(3, 4))
    assert bound == pytest.approx(case["minsep4_k3_upper"], abs=1e-10)


def brute_force(matrix: np.ndarray, schema: Participation) -> float:
    n = len(matrix)
    best = 0.0
    for size in range(1, schema.max_participations + 1):
        for steps in itertools.combinations(range(n), size):
            gaps = np.diff(steps)
            allowed = (
                gaps == schema.min_separation
                if schema.fixed_order
                else (gaps >= schema.min_separation)
            )
            if np.all(allowed):
                best = max(best, float(np.linalg.norm(matrix[:, list(steps)].sum(1))))
    return best


@pytest.mark.parametrize("gap", [1, 3, 4])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_sensitivity_against_all_patterns(gap: int, most: int) -> None:
    n = 12
    for strategy in (NuToeplitz(0.1), SquareRoot(3), AntiPGD(0.2), Identity()):
        schema = Participation(most, gap)
        exact = brute_force(strategy.matrix(n), schema)
        assert strategy.sensitivity(n, schema) == pytest.approx(exact, abs=1e-12)
        fixed = Participation(most, gap, fixed_order=True)
        dense = Dense(strategy.matrix(n).tolist())
        assert dense.sensitivity(n, fixed) == pytest.approx(
            brute_force(strategy.matrix(n), fixed), abs=1e-12
        )
    random = np.tril(np.random.default_rng(gap).uniform(0.1, 1.0, (n, n)))
    dense = Dense(random.tolist())
    assert (
        dense.sensitivity(n, Participation(most, gap))
        >= brute_force(random, Participation(most, gap)) - 1e-12
    )
    banded = Dense(SquareRoot(gap).matrix(n).tolist())  # exact: bands no wider than the separation
    assert banded.sensitivity(n, Participation(most, gap)) == pytest.approx(
        brute_force(SquareRoot(gap).matrix(n), Participation(most, gap)), abs=1e-12
    )


def test_sensitivity_of_several_participations_is_not_a_square_root_law() -> None:
    schema = Participation(16, 20)
    for nu, expected in ((0.001, 12.84), (0.01, 8.82), (0.05, 5.63)):
        assert NuToeplitz(nu).sensitivity(320, schema) == pytest.approx(expected, abs=5e-3)
    assert Identity().sensitivity(320, schema) == pytest.approx(4.0)
    cut = NuToeplitz(0.01, 8)
    assert cut.sensitivity(320) < NuToeplitz(0.01).sensitivity(320)  # of the coefficients in use


@pytest.mark.parametrize("case", GOLDEN["optimised_banded_toeplitz"])
def test_optimised_banded(case: dict) -> None:
    n, bands = case["n"], case["bands"]
    assert mean_loss(case["coef"], n) == pytest.approx(case["mean_loss"], rel=1e-9)
    assert max_loss(case["coef"], n) == pytest.approx(case["max_loss"], rel=1e-9)
    start = mean_loss(nu_strategy_coefficients(0.0, bands), n)
    assert start == pytest.approx(case["mean_loss_sqrt_init"], rel=1e-9)
    assert mean_loss(optimise_banded(n, bands), n) <= 1.001 * case["mean_loss"]


@pytest.mark.parametrize("case", GOLDEN["blt"])
def test_buffers(case: dict) -> None:
    decay, scale, n = case["buf_decay"], case["output_scale"], case["n"]
    c = buffered_coefficients(decay, scale, n)
    np.testing.assert_allclose(c[:16], case["coefs16"], atol=1e-9)
    np.testing.assert_allclose(series_inverse(c, n)[:16], case["inv_coefs16"], atol=1e-9)
    inverse_decay, inverse_scale = buffered_inverse(decay, scale)
    np.testing.assert_allclose(inverse_decay, case["inv_buf_decay"], atol=1e-9)
    np.testing.assert_allclose(inverse_scale, case["inv_output_scale"], atol=1e-9)
    assert c @ c == pytest.approx(case["sens2"], abs=1e-9)
    assert workload_errors(c, n).max() == pytest.approx(case["max_err"], abs=1e-9)
    assert max_loss(c, n) == pytest.approx(case["max_loss"], abs=1e-9)
    root = nu_strategy_coefficients(0.0, n)
    assert max_loss(root, n) == pytest.approx(case["sqrt_factorisation_max_loss"], abs=1e-9)
    ours = buffered_coefficients(*optimise_buffers(n, case["buffers"]), n)
    assert mean_loss(ours, n) < mean_loss(c, n)
    assert max_loss(ours, n) < 1.03 * case["max_loss"]


def test_analytic_gradient_of_the_loss() -> None:
    c = nu_strategy_coefficients(0.1, 9)
    workload, shifts = np.cumsum(0.5 ** np.arange(9)), (0, 4)
    _, gradient = _log_loss(c, 9, workload, shifts)
    for k in range(9):
        step = np.eye(1, 9, k)[0] * 1e-6
        numeric = (
            _log_loss(c + step, 9, workload, shifts)[0]
            - _log_loss(c - step, 9, workload, shifts)[0]
        ) / 2e-6
        assert gradient[k] == pytest.approx(numeric, rel=1e-6, abs=1e-9)


def test_dense_optimum_is_a_minimum_and_the_tree_keeps_its_gram() -> None:
    n, workload = 16, prefix_workload(16)
    best = OptimisedDense()
    assert np.linalg.norm(best.matrix(n), axis=0).max() == pytest.approx(1.0)
    error = best.sensitivity(n) * rms_error(best.inverse(n), workload)
    generator = np.random.default_rng(0)
    for _ in range(5):
        other = np.tril(best.matrix(n) + 0.02 * generator.normal(size=(n, n)))
        dense = Dense(other.tolist())
        assert dense.sensitivity(n) * rms_error(dense.inverse(n), workload) > error
    for strategy in (SquareRoot(), BinaryTree(), Identity(), OptimisedBLT(3)):
        assert strategy.sensitivity(n) * rms_error(strategy.inverse(n), workload) > error
    for size in (5, 16, 23):
        c = BinaryTree().matrix(size)
        assert np.all(np.triu(c, 1) == 0)
        assert np.all(c >= 0)
        np.testing.assert_allclose(c.T @ c, tree_gram(size), atol=1e-12)


@pytest.mark.parametrize("nu", ["0", "0.01", "0.1"])
def test_nu_streams(nu: str) -> None:
    for strategy in (NuToeplitz(float(nu)), NuToeplitz(float(nu), 32)):
        found = stream(strategy, STREAMS["z"])
        np.testing.assert_allclose(found, STREAMS[f"nu_{nu}"], atol=1e-10)


def test_banded_and_buffered_streams() -> None:
    z, coefficients = STREAMS["z"], STREAMS["banded_coef"]
    found = stream(BandedToeplitz(coefficients.tolist()), z)
    np.testing.assert_allclose(found, STREAMS["banded"], atol=1e-10)
    unit = (coefficients / np.linalg.norm(coefficients)).tolist()
    found = stream(BandedToeplitz(unit, normalise_columns=True), z)
    np.testing.assert_allclose(found, STREAMS["banded_colnorm"], atol=1e-10)
    blt = BLT(STREAMS["blt3_buf_decay"].tolist(), STREAMS["blt3_output_scale"].tolist())
    np.testing.assert_allclose(stream(blt, z), STREAMS["blt3"], atol=1e-10)


@pytest.mark.parametrize("strategy", EVERY, ids=lambda s: s.describe()[:40])
def test_every_stream_is_the_dense_inverse(strategy: Strategy) -> None:
    n = 24
    white = STREAMS["z"][:n]
    np.testing.assert_allclose(stream(strategy, white), strategy.inverse(n) @ white, atol=1e-10)
    np.testing.assert_allclose(strategy.inverse(n) @ strategy.matrix(n), np.eye(n), atol=1e-9)
    np.testing.assert_allclose(
        strategy.column_norms(n), np.linalg.norm(strategy.matrix(n), axis=0), atol=1e-12
    )
    assert strategy.sensitivity(n) == pytest.approx(strategy.column_norms(n).max(), rel=1e-9)


@pytest.mark.parametrize("name", ["sgd", "nu0.05"])
def test_regression_trajectories(name: str) -> None:
    beta = nu_noise_coefficients(0.05, 40) if name != "sgd" else np.array([1.0])
    gamma = np.linalg.norm(series_inverse(beta, 40))
    noise = correlate(beta, STREAMS["lr_w"]) * gamma / np.sqrt(2.0)
    found = trajectory(STREAMS["lr_x"], STREAMS["lr_xi"], noise, 0.1)
    np.testing.assert_allclose(found, STREAMS[f"lr_theta_{name}"], atol=1e-12)


def test_choice_of_nu_reads_no_data() -> None:
    once = choose_nu(128, momentum=0.9)
    often = choose_nu(320, Participation(16, 20), momentum=0.9)
    assert once <= often
    assert proxy_error(NuToeplitz(often), 320, Participation(16, 20), 0.9) < proxy_error(
        Identity(), 320, Participation(16, 20), 0.9
    )


def test_workload_of_momentum_and_cooldown() -> None:
    gradients = np.random.default_rng(0).normal(size=6)
    rates = np.array([1.0, 1.0, 1.0, 0.8, 0.5, 0.2])
    velocity, theta, path = 0.0, 0.0, []
    for g, rate in zip(gradients, rates, strict=True):
        velocity = 0.9 * velocity + g
        theta += rate * velocity
        path.append(theta)
    np.testing.assert_allclose(prefix_workload(6, 0.9, rates) @ gradients, path, atol=1e-12)
