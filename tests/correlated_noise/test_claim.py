"""The scaled-down claims; their definition serves the report as well."""

import pytest

pytestmark = pytest.mark.claim


def test_claims_are_met(lab) -> None:
    lab.run("correlated_noise")
    missed = [f"{c.name}: {c.value} ({c.bar})" for c in lab.claims if not c.met]
    assert not missed
    assert lab.figures
