"""What changes or watches training from outside a method; imported when first used."""

from lightning_modules.components.lazy import lazy_names

# public name -> module that defines it
PUBLIC_NAMES = {
    "Checkpoint": "checkpoint",
    "EarlyStop": "early_stop",
    "PredictionFiles": "predictions",
    "StepSeed": "step_seed",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, PUBLIC_NAMES)
