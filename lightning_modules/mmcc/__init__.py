"""Privacy amplification by sampling for matrix mechanisms (conditional composition, MMCC)."""

from lightning_modules.components.privacy import (
    AmplifiedGuarantee,
    PoissonAccountant,
    best_split,
    conditional_probabilities,
    mmcc,
)
from lightning_modules.mmcc.compare import Compared, compare_mechanisms, format_table
from lightning_modules.mmcc.module import DPClassifier

__all__ = [
    "AmplifiedGuarantee",
    "Compared",
    "DPClassifier",
    "PoissonAccountant",
    "best_split",
    "compare_mechanisms",
    "conditional_probabilities",
    "format_table",
    "mmcc",
]
