"""Differential privacy by correlated noise: strategies, accountants, noise, clipping, theory.

Everything here is plain NumPy and PyTorch. The noise is drawn by PyTorch's generators, which are
not cryptographic, and computed in floating point, which leaves side channels; treat the guarantee
as that of the mathematical mechanism.
"""

from lightning_modules.components.privacy.accountants import (
    Accountant,
    CyclicPoissonAccountant,
    GaussianAccountant,
    calibrate,
    calibrate_cyclic,
    calibrate_gaussian,
    calibrate_poisson,
    grid_step,
    poisson,
)
from lightning_modules.components.privacy.amplification import (
    AmplifiedGuarantee,
    PoissonAccountant,
    best_split,
    conditional_probabilities,
    mmcc,
)
from lightning_modules.components.privacy.clipping import ClippedSum, clipped_sum
from lightning_modules.components.privacy.dense_strategies import BinaryTree, Dense, OptimisedDense
from lightning_modules.components.privacy.gaussian import (
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    zcdp_epsilon,
)
from lightning_modules.components.privacy.ghost import GhostClipper
from lightning_modules.components.privacy.mixture import Mixture, bernoulli_sum
from lightning_modules.components.privacy.noise import NoiseStream, WhiteNoise
from lightning_modules.components.privacy.participation import Participation
from lightning_modules.components.privacy.pld import DiscreteLoss, PrivacyLoss, compose, discretise
from lightning_modules.components.privacy.strategies import (
    BLT,
    STRATEGIES,
    AntiPGD,
    BandedInverse,
    BandedToeplitz,
    Identity,
    NuToeplitz,
    OptimisedBandedToeplitz,
    OptimisedBLT,
    SquareRoot,
    parse_strategy,
)
from lightning_modules.components.privacy.strategy import Strategy

__all__ = [
    "BLT",
    "STRATEGIES",
    "Accountant",
    "AmplifiedGuarantee",
    "AntiPGD",
    "BandedInverse",
    "BandedToeplitz",
    "BinaryTree",
    "ClippedSum",
    "CyclicPoissonAccountant",
    "Dense",
    "DiscreteLoss",
    "GaussianAccountant",
    "GhostClipper",
    "Identity",
    "Mixture",
    "NoiseStream",
    "NuToeplitz",
    "OptimisedBLT",
    "OptimisedBandedToeplitz",
    "OptimisedDense",
    "Participation",
    "PoissonAccountant",
    "PrivacyLoss",
    "SquareRoot",
    "Strategy",
    "WhiteNoise",
    "bernoulli_sum",
    "best_split",
    "calibrate",
    "calibrate_cyclic",
    "calibrate_gaussian",
    "calibrate_poisson",
    "clipped_sum",
    "compose",
    "conditional_probabilities",
    "discretise",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_mu",
    "grid_step",
    "mmcc",
    "parse_strategy",
    "poisson",
    "zcdp_epsilon",
]
