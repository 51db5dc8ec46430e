"""The scaled-down claims of the paper hold."""

import pytest

pytestmark = pytest.mark.claim


def test_claims(lab):
    lab.run("epsilon_scaling")
    missed = [
        f"{claim.name}: {claim.value:.4g} ({claim.bar})" for claim in lab.claims if not claim.met
    ]
    assert not missed
    assert len(lab.claims) == 9
