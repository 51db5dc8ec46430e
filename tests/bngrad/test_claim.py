"""The scaled-down claims hold."""

import pytest

pytestmark = pytest.mark.claim


def test_claims(lab):
    lab.run("bngrad")
    assert [f"{c.name}: {c.value:.4g}, {c.bar}" for c in lab.claims if not c.met] == []
    assert len(lab.claims) == 12
