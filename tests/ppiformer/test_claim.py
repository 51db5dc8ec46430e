"""The scaled-down claim: pre-training on interfaces ranks mutations and helps few labels."""

import pytest

pytestmark = pytest.mark.claim


def test_pretraining_ranks_mutations_and_helps_fine_tuning(lab):
    lab.run("ppiformer")
    assert len(lab.claims) == 3
    for claim in lab.claims:
        assert claim.met, f"{claim.name}: {claim.value} is not {claim.bar}"
