"""The isometry gap, its invariances, and the exact effect of one random layer."""

import math

import pytest
import torch

from lightning_modules.bngrad import (
    expected_one_layer_gap,
    isometry_gap,
    nonzero_isometry_gap,
    orthogonality_gap,
)
from lightning_modules.bngrad.initialisation import haar_orthogonal
from lightning_modules.components.isometry import batched_isometry_gap, expected_log_norm

DOUBLE = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=generator(seed))


def normalised(h: torch.Tensor) -> torch.Tensor:
    return h / h.norm(dim=-2, keepdim=True)


def test_orthogonal_rows_have_gap_zero():
    rows = haar_orthogonal(5, 4, 9, generator(), DOUBLE) * 3.7
    assert isometry_gap(rows).max() < 1e-14
    assert orthogonality_gap(rows).max() < 1e-14


def test_closed_form_of_two_by_two():
    x = gaussian(100, 2, 2)
    gram = x @ x.mT
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    expected = (trace / 2).log() - torch.linalg.det(gram).log() / 2
    torch.testing.assert_close(isometry_gap(x), expected, rtol=1e-10, atol=1e-12)


def test_invariant_to_scale_and_rotation_and_sample_order():
    x = gaussian(7, 6, 9)
    rotation = haar_orthogonal(1, 9, 9, generator(1), DOUBLE)[0]
    for other in (1e-30 * x, 1e30 * x, x @ rotation, x.flip(-2)):
        torch.testing.assert_close(isometry_gap(other), isometry_gap(x), rtol=1e-9, atol=1e-12)


def test_never_grows_through_an_orthogonal_layer():
    x = gaussian(1000, 6, 6, seed=2)
    weights = haar_orthogonal(1000, 6, 6, generator(3), DOUBLE)
    before, after = isometry_gap(x), isometry_gap(normalised(x @ weights.mT))
    assert (after <= before + 1e-10).all()
    # the identity behind it: the change is the mean log of the squared feature norms
    lam = (x @ x.mT).diagonal(dim1=-2, dim2=-1).mean(-1)
    norms = (x @ weights.mT).square().sum(-2) / lam[:, None]
    torch.testing.assert_close(after, before + norms.log().mean(-1), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("d", [2, 3, 7])
def test_exact_mean_agrees_with_sampling(d):
    x = gaussian(d, d, seed=d)
    weights = haar_orthogonal(20000, d, d, generator(4), DOUBLE)
    samples = isometry_gap(normalised(x @ weights.mT))
    error = samples.std() / math.sqrt(len(samples))
    assert abs(samples.mean() - expected_one_layer_gap(x)) < 4 * error
    lam = torch.linalg.svdvals(x).square()
    lam = lam / lam.mean()
    row = (weights[:, 0].square() * (torch.eye(d, dtype=DOUBLE) @ lam)).sum(-1)
    variance = 2 * (lam - 1).square().sum() / (d * (d + 2))
    spread = (row - 1).square().std() / math.sqrt(len(row))
    assert abs(row.var() - variance) < 4 * spread


def test_exact_mean_of_two_eigenvalues():
    for a in (1.0, 1.3, 1.9, 1.999999):
        lam = torch.tensor([a, 2 - a], dtype=DOUBLE)
        closed = 2 * math.log((math.sqrt(a) + math.sqrt(2 - a)) / 2)
        assert float(expected_log_norm(lam)) == pytest.approx(closed, abs=1e-13)


def test_dependent_rows_are_infinite_and_other_matrices_of_the_batch_are_not():
    x = gaussian(4, 6, 8)
    x[1, 3] = x[1, 0]
    x[2] = 0
    for dtype in (torch.float64, torch.float32):
        for gap in (isometry_gap(x.to(dtype)), batched_isometry_gap(x.to(dtype))):
            assert torch.isinf(gap).tolist() == [False, True, True, False]
    assert torch.isfinite(nonzero_isometry_gap(x)[:2]).all()


def test_ill_conditioned_rows_stay_exact():
    left, right = haar_orthogonal(2, 5, 5, generator(5), DOUBLE)
    s = torch.tensor([1.0, 1e-1, 1e-3, 1e-6, 1e-10], dtype=DOUBLE)
    expected = s.square().mean().log() - 2 * s.log().mean()
    x = left @ torch.diag(s) @ right
    torch.testing.assert_close(isometry_gap(x), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(batched_isometry_gap(x), isometry_gap(x), rtol=1e-6, atol=0)


def test_entries_in_single_precision_are_taken_as_they_are_unless_said_otherwise():
    left, right = haar_orthogonal(2, 5, 5, generator(6), DOUBLE)
    s = torch.tensor([1.0, 0.5, 0.2, 0.1, 3e-7], dtype=DOUBLE)
    x = (left @ torch.diag(s) @ right).float()
    for gap in (isometry_gap, batched_isometry_gap):
        torch.testing.assert_close(gap(x), isometry_gap(x.double()))
        assert torch.isfinite(gap(x))
        assert torch.isinf(gap(x, computed_in=torch.float32))
    expected = s[:4].square().mean().log() - 2 * s[:4].log().mean()
    torch.testing.assert_close(nonzero_isometry_gap(x), expected, rtol=1e-5, atol=0)


def test_batched_gap_equals_that_of_singular_values():
    x = gaussian(50, 20, 30)
    torch.testing.assert_close(batched_isometry_gap(x), isometry_gap(x), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        batched_isometry_gap(x.view(5, 10, 20, 30)), isometry_gap(x).view(5, 10)
    )


def test_batched_gap_sees_a_zero_that_no_diagonal_entry_shows():
    """Centred columns have the left null vector (1, ..., 1); the right one may be any."""
    x = gaussian(2000, 16, 16, seed=9).float()
    centred = x - x.mean(-2, keepdim=True)
    # the right null vector has a tiny last entry: the last pivot of LU is then not small
    hidden = gaussian(200, 16, 16, seed=10)
    null = torch.nn.functional.normalize(gaussian(200, 16, 1, seed=11), dim=1)
    null[:, -1] *= 1e-6
    null = torch.nn.functional.normalize(null, dim=1)
    hidden -= hidden @ null @ null.mT
    for matrices in (centred, hidden.float()):
        gaps = batched_isometry_gap(matrices, computed_in=torch.float32)
        assert torch.isinf(gaps).all()
    wide = torch.cat([hidden[:, :, :-1], hidden[:, :, :-1]], dim=2)[:, :, :20].float()
    torch.testing.assert_close(
        batched_isometry_gap(wide, torch.float32), isometry_gap(wide, computed_in=torch.float32)
    )


@pytest.mark.parametrize("columns", [20, 26])
@pytest.mark.parametrize("decay", ["equal", "linear", "geometric", "tail", "spike"])
@pytest.mark.parametrize("computed_in", [None, torch.float32])
def test_batched_gap_decides_as_singular_values_do(columns, decay, computed_in):
    """Spectra whose smallest value is at 1/100 to 100 times the limit, closely around it too."""
    n = 20
    eps = torch.finfo(torch.float64).eps * columns if computed_in is None else 16 * 2.0**-23
    around = torch.cat([torch.logspace(-2, 2, 41), torch.linspace(0.9, 1.6, 36)]).double()
    # a tie would be decided by rounding
    around = around[(around - 1).abs() > 0.02]
    around = around if computed_in else around[(around < 0.3) | (around > 3)]
    least = eps * around[:, None]
    i = torch.arange(n, dtype=DOUBLE)
    s = {
        "equal": torch.where(i < n - 1, 1.0, least),
        "linear": 1 - i / (n - 1) * (1 - least),
        "geometric": least ** (i / (n - 1)),
        "tail": (least * 1.2 ** i.flip(0)).clamp_max(1.0),
        "spike": torch.where(i == 0, 1.0, least),
    }[decay]
    s[:, 0] = 1.0
    left = haar_orthogonal(len(s), n, n, generator(1), DOUBLE)
    right = haar_orthogonal(len(s), n, columns, generator(2), DOUBLE)
    x = 3e5 * left @ (s[..., None] * right)
    expected = isometry_gap(x, computed_in=computed_in)
    gap = batched_isometry_gap(x, computed_in)
    assert torch.isinf(gap).tolist() == torch.isinf(expected).tolist()
    assert 10 < torch.isinf(gap).sum() < len(gap) - 10
    if computed_in:  # near eps of float64 no algorithm has more digits
        torch.testing.assert_close(gap, expected, rtol=1e-10, atol=1e-9)


def test_rows_that_cancel_are_dependent_at_the_precision_of_the_computation():
    x = gaussian(3, 8, 12).float()
    x[1] -= x[1].mean(0)
    x[2] = 0
    assert torch.isinf(batched_isometry_gap(x, torch.float32)).tolist() == [False, True, True]
    gap = batched_isometry_gap(x[:2])  # as exact numbers they do not cancel
    torch.testing.assert_close(gap, isometry_gap(x[:2]), rtol=1e-8, atol=0)
    assert torch.isfinite(gap).all()


def test_more_rows_than_features():
    x = gaussian(5, 3)
    with pytest.raises(ValueError, match="n=5 rows in d=3"):
        isometry_gap(x)
    assert torch.isinf(isometry_gap(x, dim_check=False))
    assert torch.isinf(batched_isometry_gap(x))
    # the spectrum of the transpose is the non-zero one
    torch.testing.assert_close(nonzero_isometry_gap(x), isometry_gap(x.mT))


def test_entries_that_are_not_finite_give_nan_for_their_matrix_alone():
    x = gaussian(3, 4, 4)
    x[1, 0, 0] = torch.nan
    for gap in (isometry_gap(x), batched_isometry_gap(x)):
        assert torch.isnan(gap).tolist() == [False, True, False]


def test_orthogonality_gap_by_its_definition():
    x = gaussian(3, 4, 6)
    for one, gap in zip(x, orthogonality_gap(x), strict=True):
        expected = torch.linalg.norm(one @ one.T / one.square().sum() - torch.eye(4) / 4)
        assert float(gap) == pytest.approx(float(expected), rel=1e-12)


def test_gap_is_differentiable():
    x = gaussian(3, 5, seed=8).requires_grad_()
    assert torch.autograd.gradcheck(isometry_gap, x)


def test_square_input_is_needed_for_the_exact_mean():
    with pytest.raises(ValueError, match="n=3, d=5"):
        expected_one_layer_gap(gaussian(3, 5))
    with pytest.raises(ValueError, match="two axes"):
        isometry_gap(torch.ones(3))
