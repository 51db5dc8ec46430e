"""Curriculum, ranking, privacy accounting, hashing."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from torchmetrics.retrieval import RetrievalHitRate, RetrievalNormalizedDCG

from callbacks.curriculum import Curriculum
from lightning_modules.fedrap import privacy, ranking
from lightning_modules.fedrap.curriculum import coefficient_after, coefficient_in
from lightning_modules.fedrap.schedule import hash_words, shuffled_order

# ---------------------------------------------------------------- curriculum


def test_recorded_curricula(reference):
    recorded = json.loads((reference / "curriculum.json").read_text())
    assert set(recorded["values"]) == {"tanh", "sin", "frac", "square", "fixed"}
    for shape, values in recorded["values"].items():
        for column, maximum in enumerate((recorded["lambda_max"], recorded["mu_max"])):
            expected = [row[column] for row in values]
            ours = [coefficient_after(shape, a, maximum) for a in range(len(expected))]
            np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("shape", ["tanh", "sin", "frac", "square", "fixed"])
def test_the_shared_callback_gives_the_rounds_of_the_paper(shape):
    initial = None if shape == "fixed" else 0.0
    callback = Curriculum(
        "loss_weights.independence", shape, clock="epoch", delay=1, initial=initial
    )
    for a in range(40):
        assert callback.value_at(a) == pytest.approx(coefficient_in(shape, a, 1.0), abs=1e-15)


def test_unknown_curriculum_lists_the_valid_ones():
    with pytest.raises(ValueError, match="tanh, sin, square, frac, fixed"):
        coefficient_after("cubic", 1, 0.1)


# ---------------------------------------------------------------- ranking


@pytest.mark.parametrize("name", ["metrics", "metrics_ties"])
def test_recorded_metrics(reference, name):
    arrays = np.load(reference / f"{name}.npz")
    rank = ranking.rank_among(*(torch.from_numpy(arrays[f"{x}_score"]) for x in ("test", "neg")))
    k = int(arrays["k"])
    assert float(ranking.hits(rank, k).mean()) == pytest.approx(float(arrays["hr"]), abs=1e-12)
    assert float(ranking.gains(rank, k).mean()) == pytest.approx(float(arrays["ndcg"]), abs=1e-12)


def test_equal_to_the_retrieval_metrics_without_ties():
    scores = torch.rand(50, 40, generator=torch.Generator().manual_seed(0))
    target = torch.randint(40, (50,), generator=torch.Generator().manual_seed(1))
    rank = ranking.rank_in_catalogue(scores, target, torch.zeros(50, 40, dtype=torch.bool))
    relevant = torch.zeros(50, 40, dtype=torch.bool).scatter_(1, target[:, None], True)
    index = torch.arange(50)[:, None].expand(50, 40)
    for metric, ours in (
        (RetrievalHitRate(top_k=10), ranking.hits(rank, 10)),
        (RetrievalNormalizedDCG(top_k=10), ranking.gains(rank, 10)),
    ):
        theirs = metric(scores.flatten(), relevant.flatten(), indexes=index.flatten())
        assert float(theirs) == pytest.approx(float(ours.mean()), abs=1e-6)


def test_excluded_items_are_no_candidates_and_ties_count_against():
    scores = torch.tensor([[5.0, 4.0, 4.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    offsets, seen = torch.tensor([0, 1, 1]), torch.tensor([0])
    excluded = ranking.excluded_mask(offsets, seen, 4)
    assert ranking.rank_in_catalogue(scores, torch.tensor([1, 3]), excluded).tolist() == [2, 4]
    own = ranking.excluded_mask(torch.tensor([0, 1, 1]), torch.tensor([1]), 4)
    assert ranking.rank_in_catalogue(scores, torch.tensor([1, 3]), own).tolist() == [3, 4]


def test_random_scores_hit_at_chance_and_gain_is_below_hit():
    scores = torch.rand(4000, 100, generator=torch.Generator().manual_seed(0))
    rank = ranking.rank_among(scores[:, 0], scores[:, 1:])
    hit, gain = ranking.hits(rank, 10), ranking.gains(rank, 10)
    assert abs(float(hit.mean()) - 0.1) < 3 * math.sqrt(0.09 / 4000)
    assert bool((gain <= hit).all())
    assert 0 < float(gain.mean()) < float(hit.mean()) < 1
    low, high = ranking.bootstrap_interval(hit)
    assert low < float(hit.mean()) < high
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(0.09 / 4000), rel=0.2)


# ---------------------------------------------------------------- privacy


def delta_of_gaussian(epsilon, sigma):
    """Hockey-stick divergence by integration."""
    return quad(
        lambda x: max(norm.pdf(x, 1, sigma) - math.exp(epsilon) * norm.pdf(x, 0, sigma), 0.0),
        -30,
        60,
        limit=500,
        points=[0, 1, epsilon * sigma**2 + 0.5],
    )[0]


@pytest.mark.parametrize("sigma", [0.7, 1.0, 3.0])
def test_gaussian_mechanism_is_exact(sigma):
    epsilon = privacy.gaussian_epsilon(sigma, 1, 1e-3)
    assert delta_of_gaussian(epsilon, sigma) == pytest.approx(1e-3, rel=1e-4)
    # k compositions are one with the noise divided by sqrt(k)
    composed = privacy.gaussian_epsilon(2 * sigma, 4, 1e-3)
    assert composed == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize("order", [2, 5, 16])
def test_poisson_sampling_by_integration(order):
    sigma, ratio = 1.3, 0.2

    def integrand(x):
        density = norm.pdf(x, 0, sigma)
        mixed = (1 - ratio) + ratio * math.exp((2 * x - 1) / (2 * sigma**2))
        return density * mixed**order

    expected = math.log(quad(integrand, -40, 60, limit=500)[0]) / (order - 1)
    assert privacy.rdp_poisson(sigma, ratio, order) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("order", [2, 3, 8])
def test_fixed_size_bound_covers_a_replaced_client(order):
    """A client's upload turns from the clip into minus the clip: the furthest it can move."""
    sigma, ratio = 2.5, 0.1

    def log_mixture(x, shift):
        parts = norm.logpdf(x, [0, shift], sigma) + np.log([1 - ratio, ratio])
        return float(np.logaddexp(*parts))

    def integrand(x):
        return math.exp(order * log_mixture(x, 1) + (1 - order) * log_mixture(x, -1))

    moment = quad(integrand, -60, 60, limit=500)[0]
    exact = math.log(moment) / (order - 1)
    bound = privacy.rdp_fixed_size(sigma, ratio, order)
    unsampled = privacy.rdp_gaussian(sigma / 2, order)
    assert 0 < exact <= bound < unsampled
    assert privacy.rdp_fixed_size(sigma, 1.0, order) == unsampled
    # theorem 9 of Wang et al. by hand at order 2: one term, epsilon(2) = 2 / (2 (sigma / 2)^2)
    two = 4 / sigma**2
    first = ratio**2 * min(4 * math.expm1(two), 2 * math.exp(two))
    assert privacy.rdp_fixed_size(sigma, ratio, 2) == pytest.approx(math.log1p(first), rel=1e-12)


def test_sampling_helps_and_rounds_cost():
    full = privacy.spent_epsilon(2.0, 1.0, 10, 1e-5)
    sampled = privacy.spent_epsilon(2.0, 0.1, 10, 1e-5)
    fixed = privacy.spent_epsilon(2.0, 0.1, 10, 1e-5, "fixed")
    assert 0 < sampled < full
    assert sampled < fixed < privacy.spent_epsilon(2.0, 1.0, 10, 1e-5, "fixed")
    assert privacy.spent_epsilon(2.0, 0.1, 100, 1e-5) > sampled
    assert privacy.spent_epsilon(0.0, 0.1, 1, 1e-5) == math.inf
    assert privacy.spent_epsilon(2.0, 0.1, 0, 1e-5) == 0.0
    # q = 1 must agree with the unsampled mechanism, order by order
    assert privacy.rdp_poisson(2.0, 0.9999999, 8) == pytest.approx(8 / 8, rel=1e-4)


def test_known_value_of_a_common_setting():
    # noise 1.1, 256 of 60000, 60 epochs, delta 1e-5: 3.0 with the classic conversion
    steps, ratio = 60 * 60000 // 256, 256 / 60000
    classic = min(
        steps * privacy.rdp_poisson(1.1, ratio, a) + math.log(1e5) / (a - 1) for a in privacy.ORDERS
    )
    assert classic == pytest.approx(3.0, abs=0.1)
    assert classic - 0.6 < privacy.spent_epsilon(1.1, ratio, steps, 1e-5) < classic


# ---------------------------------------------------------------- order of the local batches


def test_shuffles_depend_on_the_client_and_not_on_its_company():
    identity = torch.tensor([3, 8, 11])
    client = torch.tensor([0] * 7 + [1] * 10 + [2] * 3)
    together = shuffled_order(client, identity, 4, 3, 5, 2)
    alone = shuffled_order(torch.zeros(10, dtype=torch.int64), identity[1:2], 4, 3, 5, 2)
    mine = client[together.sample] == 1
    assert torch.equal(together.sample[mine] - 7, alone.sample)
    assert torch.equal(together.slot[mine], alone.slot)
    for epoch in range(3):
        now = mine & (together.epoch == epoch)
        assert sorted((together.sample[now] - 7).tolist()) == list(range(10))
        assert together.slot[now].bincount().tolist() == [4, 4, 2]
    first, second = (together.sample[mine & (together.epoch == e)] for e in (0, 1))
    assert not torch.equal(first, second)
    later = shuffled_order(client, identity, 4, 3, 5, 3)
    assert not torch.equal(later.sample, together.sample)


def test_hash_is_even():
    words = hash_words(1, torch.arange(20000), 7)
    assert int(words.min()) >= 0
    assert words.unique().numel() == 20000
    counts = torch.bincount(words >> 59, minlength=16)
    assert float(((counts - 1250).double() ** 2 / 1250).sum()) < 40  # chi-square, 15 degrees
