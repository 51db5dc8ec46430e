"""Search of the best scale."""

import pytest

from lightning_modules.epsilon_scaling import golden_section_search, grid_search


def parabola(scale):
    return (scale - 1.0173) ** 2


def test_golden_section_closes_in():
    found = golden_section_search(parabola, 1.0, 1.06, evaluations=16)
    assert found.best == pytest.approx(1.0173, abs=2e-4)
    assert len(found.tried) == 16
    assert found.value == min(value for _, value in found.tried)


def test_minimum_at_an_end():
    assert golden_section_search(lambda s: s, 1.0, 1.06, 6).best == 1.0
    assert golden_section_search(lambda s: -s, 1.0, 1.06, 6).best == 1.06


def test_grid():
    found = grid_search(parabola, [1.0, 1.01, 1.02, 1.03])
    assert found.best == 1.02
    assert [scale for scale, _ in found.tried] == [1.0, 1.01, 1.02, 1.03]


def test_bad_searches():
    with pytest.raises(ValueError, match="low < high"):
        golden_section_search(parabola, 1.1, 1.0)
    with pytest.raises(ValueError, match="at least 4"):
        golden_section_search(parabola, 1.0, 1.1, 3)
    with pytest.raises(ValueError, match="positive epsilon scales"):
        grid_search(parabola, [])
    with pytest.raises(ValueError, match="positive epsilon scales"):
        grid_search(parabola, [1.0, 0.0])
