"""Batch-normalised networks of any depth without gradient explosion (arXiv 2310.02012)."""

from lightning_modules.bngrad.block import Block
from lightning_modules.bngrad.module import BNGrad
from lightning_modules.bngrad.network import DeepBNMLP, Hidden, power_law_gains
from lightning_modules.components.isometry import (
    expected_one_layer_gap,
    isometry_gap,
    nonzero_isometry_gap,
    orthogonality_gap,
)

__all__ = [
    "BNGrad",
    "Block",
    "DeepBNMLP",
    "Hidden",
    "expected_one_layer_gap",
    "isometry_gap",
    "nonzero_isometry_gap",
    "orthogonality_gap",
    "power_law_gains",
]
