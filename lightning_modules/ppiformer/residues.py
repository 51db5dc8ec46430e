"""The 20 residue types and the published class weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
"""One-letter codes in the order of all 20-component vectors here."""

# fmt: off
PUBLISHED_CLASS_WEIGHTS = (
    0.02610711, 0.14068244, 0.0361165, 0.03169744, 0.04441645,
    0.02823625, 0.07922916, 0.03454453, 0.03701476, 0.02115424,
    0.08276267, 0.04613354, 0.0444467, 0.04844361, 0.03427209,
    0.03127829, 0.0341901, 0.02913087, 0.12340829, 0.04673495,
)
# fmt: on
"""Normalised inverse frequencies of residue types in interfaces (sum 1)."""


def class_weights(
    choice: str | list[float] | None, frequencies: Tensor | None = None, power: float = 1.0
) -> Tensor | None:
    """Weights of the residue types in the masked loss.

    Args:
        choice: `None` (all 1), `"published"`, `"inverse_frequency"` or 20 numbers.
        frequencies: (20,) counts of residue types, for `"inverse_frequency"`.
        power: the weights are raised to it and normalised again; 0 makes them equal (1/20 each).

    Returns:
        (20,) float32 with sum 1 (as given for explicit numbers with power 1), or `None`.

    Raises:
        ValueError: for another choice, a wrong number of weights, or missing frequencies.
    """
    if choice is None:
        return None
    if choice == "published":
        weights = torch.tensor(PUBLISHED_CLASS_WEIGHTS, dtype=torch.float64)
    elif choice == "inverse_frequency":
        if frequencies is None:
            raise ValueError("class_weights='inverse_frequency' needs residue counts from the data")
        # a type that never occurs counts as seen once
        weights = 1.0 / frequencies.double().clamp(min=1.0)
        weights = weights / weights.sum()
    elif isinstance(choice, str):
        raise ValueError(
            "class_weights must be null, 'published', 'inverse_frequency' or 20 numbers, "
            f"got {choice!r}"
        )
    else:
        weights = torch.as_tensor(choice, dtype=torch.float64)
        if weights.shape != (20,) or not bool((weights > 0).all()):
            raise ValueError(f"class_weights needs 20 positive numbers, got {choice}")
    if power != 1.0:
        weights = weights**power
        weights = weights / weights.sum()
    return weights.float()


def one_hot(types: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(..., ) int64 to (..., 20)."""
    return functional.one_hot(types, 20).to(dtype)
