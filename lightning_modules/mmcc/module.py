"""The classifier that is trained with an amplified matrix mechanism."""

from lightning_modules.components.privacy.classifier import Classifier

__all__ = ["DPClassifier"]


class DPClassifier(Classifier):
    """Image classifier of the DP-FTRL line of work, private by ``callbacks.PrivateGradients``.

    Everything private (sampling, clipping, noise, accounting) is the callback's; replace this
    module by any other and the guarantee stays. Arguments as for the base class.
    """
