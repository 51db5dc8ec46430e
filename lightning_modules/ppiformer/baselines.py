"""Predictors without learning, to compare with: constant, random, unigram, BLOSUM62."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_modules.ppiformer.readout import MutationBatch, sum_points

# BLOSUM62 (Henikoff and Henikoff, 1992), rows and columns in the order ACDEFGHIKLMNPQRSTVWY
_BLOSUM62 = """
 4  0 -2 -1 -2  0 -2 -1 -1 -1 -1 -2 -1 -1 -1  1  0  0 -3 -2
 0  9 -3 -4 -2 -3 -3 -1 -3 -1 -1 -3 -3 -3 -3 -1 -1 -1 -2 -2
-2 -3  6  2 -3 -1 -1 -3 -1 -4 -3  1 -1  0 -2  0 -1 -3 -4 -3
-1 -4  2  5 -3 -2  0 -3  1 -3 -2  0 -1  2  0  0 -1 -2 -3 -2
-2 -2 -3 -3  6 -3 -1  0 -3  0  0 -3 -4 -3 -3 -2 -2 -1  1  3
 0 -3 -1 -2 -3  6 -2 -4 -2 -4 -3  0 -2 -2 -2  0 -2 -3 -2 -3
-2 -3 -1  0 -1 -2  8 -3 -1 -3 -2  1 -2  0  0 -1 -2 -3 -2  2
-1 -1 -3 -3  0 -4 -3  4 -3  2  1 -3 -3 -3 -3 -2 -1  3 -3 -1
-1 -3 -1  1 -3 -2 -1 -3  5 -2 -1  0 -1  1  2  0 -1 -2 -3 -2
-1 -1 -4 -3  0 -4 -3  2 -2  4  2 -3 -3 -2 -2 -2 -1  1 -2 -1
-1 -1 -3 -2  0 -3 -2  1 -1  2  5 -2 -2  0 -1 -1 -1  1 -1 -1
-2 -3  1  0 -3  0  1 -3  0 -3 -2  6 -2  0  0  1  0 -3 -4 -2
-1 -3 -1 -1 -4 -2 -2 -3 -1 -3 -2 -2  7 -1 -2 -1 -1 -2 -4 -3
-1 -3  0  2 -3 -2  0 -3  1 -2  0  0 -1  5  1  0 -1 -2 -2 -1
-1 -3 -2  0 -3 -2  0 -3  2 -2 -1  0 -2  1  5 -1 -1 -3 -3 -2
 1 -1  0  0 -2  0 -1 -2  0 -2 -1  1 -1  0 -1  4  1 -2 -3 -2
 0 -1 -1 -1 -2 -2 -2 -1 -1 -1 -1  0 -1 -1 -1  1  5  0 -2 -2
 0 -1 -3 -2 -1 -3 -3  3 -2  1  1 -3 -2 -2 -3 -2  0  4 -3 -1
-3 -2 -4 -3  1 -2 -2 -3 -3 -2 -1 -4 -4 -2 -3 -3 -2 -3 11  2
-2 -2 -3 -2  3 -3  2 -1 -2 -1 -1 -2 -3 -1 -2 -2 -2 -1  2  7
"""
BLOSUM62 = torch.tensor([[float(x) for x in row.split()] for row in _BLOSUM62.strip().split("\n")])

Predictor = Callable[[MutationBatch], Tensor]


def constant(value: float) -> Predictor:
    """The same ddG for every mutation, for example the training mean."""
    return lambda batch: torch.full((len(batch.mutation_graph),), value)


def unigram(counts: Tensor) -> Predictor:
    """Sum over points of log f(wild type) - log f(mutant).

    Args:
        counts: (20,) residue counts of the training interfaces.
    """
    log_frequency = torch.log(counts.double().clamp(min=1) / counts.sum())

    def predict(batch: MutationBatch) -> Tensor:
        wild = log_frequency[batch.types[batch.point_node].cpu()]
        return sum_points(wild - log_frequency[batch.point_type.cpu()], batch)

    return predict


def blosum62(batch: MutationBatch) -> Tensor:
    """Sum over points of s(wild, wild) - s(wild, mutant): unlikely exchanges are bad."""
    wild = batch.types[batch.point_node].cpu()
    return sum_points(BLOSUM62[wild, wild] - BLOSUM62[wild, batch.point_type.cpu()], batch)
