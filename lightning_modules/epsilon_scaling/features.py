"""Feature networks in which samples are compared with data."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.epsilon_scaling.batches import rows_of

CLASSIFIER_IMAGES = 20000
"""Images that the classifier is trained on at most."""

FEATURES = ("classifier", "pixels", "inception")


class ClassifierFeatures(nn.Module):
    """ReLU hidden layer of a small classifier trained on the data that are compared.

    A stand-in for Inception features where their weights cannot be had. Distances in it are
    named after it and never "FID".

    Args:
        weight: ``(pixels, hidden)``.
        bias: ``(hidden,)``.
        out_weight: ``(hidden, classes)``.
        out_bias: ``(classes,)``.
    """

    def __init__(self, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor) -> None:
        super().__init__()
        self.num_features = weight.shape[1]
        for name, value in (
            ("weight", weight),
            ("bias", bias),
            ("out_weight", out_weight),
            ("out_bias", out_bias),
        ):
            self.register_buffer(name, value.float().clone())
        self.weight: Tensor
        self.bias: Tensor
        self.out_weight: Tensor
        self.out_bias: Tensor

    @classmethod
    def fit(
        cls, x: Tensor, y: Tensor, hidden: int = 64, iterations: int = 60, seed: int = 0
    ) -> ClassifierFeatures:
        """Train on images ``(n, c, h, w)`` and labels ``(n,)``; the same on every machine's ranks.

        Raises:
            ValueError: If there are fewer than two classes.
        """
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.neural_network import MLPClassifier
        from sklearn.utils._testing import ignore_warnings

        if len(torch.unique(y)) < 2:
            raise ValueError(
                "feature_network: classifier needs labelled images of two classes or more; "
                "use 'pixels', 'inception' or your own network"
            )
        model = MLPClassifier((hidden,), max_iter=iterations, random_state=seed)
        # Few iterations are meant: more overfit and make the distance noisier.
        with ignore_warnings(category=ConvergenceWarning):
            model.fit(x.flatten(1).cpu().numpy(), y.cpu().numpy())
        out_weight, out_bias = model.coefs_[1], model.intercepts_[1]
        if out_weight.shape[1] == 1:
            # Two classes have one logit in scikit-learn.
            out_weight = torch.tensor(out_weight).expand(-1, 2) * torch.tensor([0.0, 1.0])
            out_bias = torch.tensor([0.0, float(out_bias[0])])
        return cls(
            torch.as_tensor(model.coefs_[0]),
            torch.as_tensor(model.intercepts_[0]),
            torch.as_tensor(out_weight),
            torch.as_tensor(out_bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Features ``(n, hidden)`` of images ``(n, c, h, w)`` in [-1, 1]."""
        return torch.relu(x.flatten(1) @ self.weight + self.bias)

    def probabilities(self, rows: Tensor) -> Tensor:
        """Class probabilities ``(n, classes)`` of features ``(n, hidden)``."""
        return torch.softmax(rows.to(self.out_weight) @ self.out_weight + self.out_bias, dim=1)


class PixelFeatures(nn.Module):
    """The pixels themselves.

    Args:
        size: Number of pixel values of an image.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.num_features = size

    def forward(self, x: Tensor) -> Tensor:
        """Features ``(n, c * h * w)``."""
        return x.flatten(1)


class InceptionFeatures(nn.Module):
    """The 2048 pool features of the Inception network of FID, through torch-fidelity.

    Raises:
        ModuleNotFoundError: If torch-fidelity is missing.
    """

    num_features = 2048

    def __init__(self) -> None:
        super().__init__()
        try:
            import torch_fidelity  # type: ignore[import-not-found]  # noqa: F401
            from torchmetrics.image.fid import NoTrainInceptionV3
        except ImportError as error:
            raise ModuleNotFoundError(
                "feature_network: inception needs torch-fidelity and its downloaded weights: "
                "pip install torch-fidelity, or use feature_network: classifier"
            ) from error
        self.network: Any = NoTrainInceptionV3("inception-v3-compat", ["2048"])

    def forward(self, x: Tensor) -> Tensor:
        """Features ``(n, 2048)`` of images in [-1, 1]; grey images are repeated to RGB."""
        pixels = ((x + 1) * 127.5).clamp(0, 255).to(torch.uint8)
        if pixels.shape[1] == 1:
            pixels = pixels.expand(-1, 3, -1, -1)
        out: Tensor = self.network(pixels)
        return out


def build_features(name: str, train_set: Any) -> nn.Module:
    """Feature network by name or class path, trained on the data where it has to be.

    Args:
        name: One of `FEATURES`, or the class path of a module that is built without arguments.
        train_set: Labelled training images.

    Raises:
        ValueError: If the images have no labels for a classifier.
    """
    if name == "pixels":
        return PixelFeatures(rows_of(train_set, [0]).x[0].numel())
    if name == "inception":
        return InceptionFeatures()
    if name == "classifier":
        batch = rows_of(train_set, list(range(min(len(train_set), CLASSIFIER_IMAGES))))
        if getattr(batch, "y", None) is None:
            raise ValueError("feature_network: classifier needs labels y; use 'pixels'")
        return ClassifierFeatures.fit(batch.x, batch.y)
    module, _, attribute = name.rpartition(".")
    built: nn.Module = getattr(import_module(module), attribute)()
    return built
