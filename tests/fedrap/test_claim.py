"""The scaled-down claim, defined once in the room's `claims.py`."""

import pytest

pytestmark = [pytest.mark.claim, pytest.mark.timeout(600)]


def test_claims(lab):
    lab.run("fedrap")
    assert [c.name for c in lab.claims if not c.met] == []
    assert any("side by side" in note for note in lab.notes)
