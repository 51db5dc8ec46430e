"""What changes or watches training from outside a method; imported when first used."""

from lightning_modules.components.lazy import lazy_names

# public name -> module that defines it
PUBLIC_NAMES = {
    "Checkpoint": "checkpoint",
    "CommunicationCost": "communication_cost",
    "Curriculum": "curriculum",
    "EarlyStop": "early_stop",
    "ExposureBiasMonitor": "exposure_bias_monitor",
    "Figures": "figures",
    "GradientNorms": "gradient_norms",
    "IterativeRSO": "iterative_rso",
    "LambdaSearch": "lambda_search",
    "PredictionFiles": "predictions",
    "PrivacyBudget": "privacy_budget",
    "PrivateGradients": "private_gradients",
    "Regularization": "regularization",
    "RewardModelSelection": "reward_model_selection",
    "SignalPropagation": "signal_propagation",
    "StepSeed": "step_seed",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, PUBLIC_NAMES)
