"""The scaled-down claim of the paper, as `iclr24 reproduce rso` measures it."""

import pytest

pytestmark = pytest.mark.claim


def test_claim(lab):
    lab.run("rso")
    assert all(claim.met for claim in lab.claims), [c for c in lab.claims if not c.met]
    assert len(lab.claims) == 9
    print(*lab.notes)
