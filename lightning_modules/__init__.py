"""ICLR 2024 methods as Lightning modules; every public name is imported when first used."""

from lightning_modules.components.lazy import lazy_names

# public name -> the room (sub-package) that defines it
PUBLIC_NAMES = {
    "CorrelatedNoiseClassifier": "correlated_noise",
    "DPClassifier": "mmcc",
    "LinearRegressionBench": "correlated_noise",
    "BNGrad": "bngrad",
    "FedRAP": "fedrap",
    "EpsilonScaling": "epsilon_scaling",
    "NoisyClassifier": "epsilon_scaling",
    "DDGPPIformer": "ppiformer",
    "PPIformer": "ppiformer",
    "PaperModule": "base",
    "RSO": "rso",
}

# room -> the extra that it needs
EXTRAS = {
    "epsilon_scaling": "epsilon_scaling",
    "ppiformer": "ppiformer",
    "rso": "rso",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, PUBLIC_NAMES, EXTRAS)
