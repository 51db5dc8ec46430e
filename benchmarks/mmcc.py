"""Accountant against dp_accounting: the same problem, the same grid, epsilon and seconds.

`pip install dp-accounting` for the peer; without it only our side is printed. dp_accounting has no
matrix mechanisms: its mixture-of-Gaussians losses are composed by hand with our conditional
probabilities, as its documentation suggests.
"""

import time
from collections.abc import Callable

import numpy as np

from lightning_modules.components.privacy import PoissonAccountant, bernoulli_sum
from lightning_modules.components.privacy.power_series import nu_strategy_coefficients

try:
    from dp_accounting.pld import privacy_loss_distribution as peer
except ImportError:
    peer = None

DELTA, STEP = 1e-5, 1e-3


def timed(function: Callable[[], float], repeats: int = 1) -> tuple[float, float]:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        value = function()
        best = min(best, time.perf_counter() - start)
    return value, best


def unit_square_root(bands: int) -> np.ndarray:
    c = nu_strategy_coefficients(0.0, bands)
    return c / np.linalg.norm(c)


def ours(bands: int, n: int, p: float, sigma: float, step: float = STEP) -> float:
    return PoissonAccountant(unit_square_root(bands), n, p, sigma, DELTA, step=step).epsilon()


def theirs_identity(n: int, p: float, sigma: float) -> float:
    one = peer.from_gaussian_mechanism(sigma, value_discretization_interval=STEP, sampling_prob=p)
    return one.self_compose(n).get_epsilon_for_delta(DELTA)


def theirs_banded(bands: int, n: int, p: float, sigma: float, step: float = STEP) -> float:
    """Their mixture losses for the distinct rows of our analysis."""
    accountant = PoissonAccountant(unit_square_root(bands), n, p, sigma, DELTA, step=step)
    total = None
    for i, row in enumerate(accountant.matrix):
        used = np.nonzero(row)[0]
        points, mass, _ = bernoulli_sum(row[used], accountant.p_tilde[i, used])
        loss = peer.from_mixture_gaussian_mechanism(
            sigma, points.tolist(), mass.tolist(), value_discretization_interval=step
        )
        count = n - i if i == len(accountant.matrix) - 1 else 1
        part = loss.self_compose(count) if count > 1 else loss
        total = part if total is None else total.compose(part)
    return total.get_epsilon_for_delta(DELTA - accountant.delta1)


def line(name: str, mine: tuple[float, float], other: tuple[float, float] | None) -> None:
    text = f"{name:44s} ours eps {mine[0]:.6f} in {mine[1]:7.3f} s"
    if other:
        text += f" | dp_accounting eps {other[0]:.6f} in {other[1]:7.3f} s"
        text += f" | {other[1] / mine[1]:6.1f} x faster, eps {mine[0] - other[0]:+.1e}"
    print(text, flush=True)


def main() -> None:
    for n, p, sigma in ((1000, 0.01, 1.0), (2000, 0.01, 1.0)):
        mine = timed(lambda n=n, p=p, s=sigma: ours(1, n, p, s), 3)
        other = timed(lambda n=n, p=p, s=sigma: theirs_identity(n, p, s), 3) if peer else None
        line(f"identity, n={n}, p={p}, sigma={sigma}", mine, other)
    for n, bands, p, sigma in ((1000, 2, 0.01, 8.0), (2000, 2, 0.01, 8.0)):
        mine = timed(lambda n=n, b=bands, p=p, s=sigma: ours(b, n, p, s), 3)
        other = None
        if peer:
            other = timed(lambda n=n, b=bands, p=p, s=sigma: theirs_banded(b, n, p, s))
        line(f"{bands} bands, n={n}, p={p}, sigma={sigma}", mine, other)
    mine = timed(lambda: ours(4, 2000, 0.01, 8.0, 1e-4), 3)
    other = timed(lambda: theirs_banded(4, 2000, 0.01, 8.0, 1e-4)) if peer else None
    line("4 bands, n=2000, p=0.01, sigma=8.0, grid 1e-4", mine, other)
    for n, bands in ((2000, 4), (2000, 16), (2000, 32)):
        mine = timed(lambda n=n, b=bands: ours(b, n, 0.01, 8.0))
        line(f"{bands} bands, n={n}, p=0.01, sigma=8.0", mine, None)


if __name__ == "__main__":
    main()
