"""Masking and masked loss."""

import json

import numpy as np
import pytest
import torch

from lightning_modules.ppiformer.losses import ddg_loss, masked_loss, mean_over_ranks
from lightning_modules.ppiformer.masking import mask_residues, masked_count
from lightning_modules.ppiformer.residues import PUBLISHED_CLASS_WEIGHTS, class_weights, one_hot


def test_masked_loss(reference):
    z = np.load(reference / "mlm_loss.npz")
    rows = torch.from_numpy(z["masked"])
    logits = torch.from_numpy(z["logits"])[rows]
    types, graph = torch.from_numpy(z["y"])[rows], torch.from_numpy(z["batch"])[rows]
    results = json.loads(str(z["results"]))
    assert len(results) == 8
    for setting, (loss, perplexity) in results.items():
        options = dict(part.split("=") for part in setting.split(","))
        weights = None
        tolerance = 1e-10
        if options["class_weights"] == "True":
            # the reference kept its weights in single precision
            weights, tolerance = class_weights("published").double(), 1e-7
        result = masked_loss(
            logits,
            types,
            graph,
            int(graph.max()) + 1,
            weights,
            float(options["label_smoothing"]),
            float(options["focal_gamma"]),
        )
        present = torch.unique(graph)
        assert result.per_graph[present].mean().item() == pytest.approx(loss, abs=tolerance)
        reference_perplexity = result.reference_perplexity[present].mean().item()
        assert reference_perplexity == pytest.approx(perplexity, abs=100 * tolerance)


def test_honest_perplexity_ignores_weights():
    logits = torch.zeros(5, 20)
    result = masked_loss(
        logits, torch.arange(5), torch.zeros(5).long(), 1, class_weights("published"), 0.05
    )
    assert result.cross_entropy.mean().exp().item() == pytest.approx(20)
    assert result.reference_perplexity.item() < 2


def test_focal_gradient_is_finite_for_certain_predictions():
    logits = torch.zeros(1, 20).index_fill_(1, torch.tensor([3]), 200.0).requires_grad_()
    loss = masked_loss(logits, torch.tensor([3]), torch.tensor([0]), 1, focal_gamma=0.5)
    loss.per_graph.sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_masking_statistics(reference):
    expected = json.loads((reference / "masking_stats.json").read_text())
    sizes = expected["n_per_chain"]
    chain = torch.repeat_interleave(torch.arange(3), torch.tensor(list(sizes.values())))
    types = torch.randint(20, (len(chain),), generator=torch.Generator().manual_seed(0))
    original = one_hot(types)
    draws, zeroed, equal, masked = 2000, 0, 0, 0
    counts = dict.fromkeys(expected["masked_counts"], 0)
    for draw in range(draws):
        m = mask_residues(types, chain, [0, len(chain)], [("test", draw)])
        chosen = torch.unique(chain[m.masked])
        assert len(chosen) == 1
        counts[f"{'ABC'[int(chosen)]}:{int(m.masked.sum())}"] += 1  # no other count may occur
        rows = m.features[m.masked]
        zeroed += int((rows.sum(1) == 0).sum())
        equal += int((rows * original[m.masked]).sum())
        masked += len(rows)
        assert torch.equal(m.features[~m.masked], original[~m.masked])
    for name, count in counts.items():
        share = expected["masked_counts"][name] / 3000
        assert abs(count / draws - share) < 3 * np.sqrt(2 / 9 * (1 / draws + 1 / 3000)), name
    for share, key in ((zeroed, "frac_zeroed"), (equal, "frac_equal_to_original")):
        p = expected[key]
        assert abs(share / masked - p) < 3 * np.sqrt(p * (1 - p) * (1 / masked + 1 / 80_000)), key


def test_masking_depends_on_the_key_alone():
    types = torch.randint(20, (60,), generator=torch.Generator().manual_seed(1))
    chain = torch.arange(60) // 10 % 2
    together = mask_residues(types, chain, [0, 20, 60], [("a",), ("b",)])
    alone = mask_residues(types[20:], chain[20:], [0, 40], [("b",)])
    assert torch.equal(together.masked[20:], alone.masked)
    assert torch.equal(together.features[20:], alone.features)


@pytest.mark.parametrize(("size", "expected"), [(1, 1), (2, 1), (3, 2), (5, 2), (7, 4)])
def test_half_is_rounded_to_even(size, expected):
    assert masked_count(0.5, size) == expected


def test_masking_options():
    types, chain = torch.arange(20), torch.arange(20) // 10
    m = mask_residues(types, chain, [0, 20], [(0,)], ratio=1.0, same_chain=False, bert=False)
    assert m.masked.all()
    assert m.features.abs().sum() == 0


def test_class_weights():
    assert sum(PUBLISHED_CLASS_WEIGHTS) == pytest.approx(1, abs=1e-6)
    assert class_weights(None) is None
    counts = torch.tensor([0.0, 10.0, *[5.0] * 18])
    weights = class_weights("inverse_frequency", counts)
    assert weights.sum().item() == pytest.approx(1)
    assert weights[2] / weights[1] == pytest.approx(2)
    assert weights[0] / weights[2] == pytest.approx(5)  # never seen counts as once
    flat = class_weights("published", power=0.0)
    assert torch.allclose(flat, torch.full((20,), 0.05))


def test_ddg_losses():
    predicted = torch.tensor([0.0, 2.0, 1.0])
    target = torch.tensor([1.0, 2.0, 4.0])
    assert ddg_loss(predicted, target, "mse") == (torch.tensor(10.0), 3)
    assert ddg_loss(predicted, target, "l1")[0].item() == 4
    assert ddg_loss(predicted, target, "huber")[0].item() == pytest.approx(0.5 + 2.5)
    total, pairs = ddg_loss(predicted, target, "rank")
    assert pairs == 3
    expected = np.log1p(np.exp(-np.array([2.0, 1.0, -1.0]))).sum()
    assert total.item() == pytest.approx(expected, rel=1e-6)
    assert mean_over_ranks(torch.tensor(6.0), 3).item() == 2
