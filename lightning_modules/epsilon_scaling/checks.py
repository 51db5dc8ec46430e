"""What is refused at the door: arguments and batches."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_modules.components.diffusion.losses import LOSSES
from lightning_modules.epsilon_scaling.features import FEATURES
from lightning_modules.epsilon_scaling.timestep_sampling import TIMESTEP_SAMPLINGS

if TYPE_CHECKING:
    from lightning_modules.epsilon_scaling.module import EpsilonScaling


def check_images(x: Tensor, fields: str = "x") -> None:
    """Refuse images that are not scaled to [-1, 1].

    Raises:
        ValueError: If x is not ``(n, c, h, w)``, not finite or out of range.
    """
    if x.ndim != 4:
        raise ValueError(f"batch.{fields} must be images (n, c, h, w), got shape {tuple(x.shape)}")
    low, high = float(x.min()), float(x.max())
    if not (low == low and abs(low) != float("inf") and abs(high) != float("inf")):
        raise ValueError(f"batch.{fields} holds NaN or infinite pixels")
    if low < -1.01 or high > 1.01:
        hint = " (most likely 0..255 bytes)" if low >= 0 and high > 2 else ""
        raise ValueError(
            f"images must lie in [-1, 1], got [{low:g}, {high:g}]{hint}: "
            "set data.init_args.scaling to minus_one_one"
        )
    if low >= 0 and high > 0:
        warnings.warn(
            "all pixels are at least 0: diffusion expects [-1, 1] (scaling: minus_one_one)",
            stacklevel=2,
        )


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Refuse what is no class number.

    Raises:
        ValueError: If labels are no integers in [0, num_classes).
    """
    low, high = labels.min().item(), labels.max().item()
    if labels.is_floating_point() or low < 0 or high >= num_classes:
        raise ValueError(
            f"labels must be integers below num_classes = {num_classes}, "
            f"got {labels.dtype} from {low} to {high}"
        )


def check_arguments(module: EpsilonScaling, timestep_sampling: str) -> None:
    """Refuse arguments that are out of range or do not go together.

    Raises:
        ValueError: Names the argument and what is allowed.
    """
    edm = module.prediction == "edm"
    if module.loss not in LOSSES:
        raise ValueError(f"loss must be one of {LOSSES}, got {module.loss!r}")
    if timestep_sampling not in TIMESTEP_SAMPLINGS:
        allowed = sorted(TIMESTEP_SAMPLINGS)
        raise ValueError(f"timestep_sampling must be one of {allowed}, got {timestep_sampling!r}")
    if not 0 < module.timestep_share <= 1:
        raise ValueError(f"timestep_share must be in (0, 1], got {module.timestep_share}")
    if module.input_perturbation < 0:
        raise ValueError(f"input_perturbation must be at least 0, got {module.input_perturbation}")
    if not 0 <= module.label_dropout < 1:
        raise ValueError(f"label_dropout must be in [0, 1), got {module.label_dropout}")
    if module.guidance_scale < 0:
        raise ValueError(f"guidance_scale must be at least 0, got {module.guidance_scale}")
    if module.samples_per_image < 1:
        raise ValueError(f"samples_per_image must be at least 1, got {module.samples_per_image}")
    if module.num_classes is None and (
        module.label_dropout or module.guidance == "classifier_free"
    ):
        raise ValueError("label_dropout and classifier_free guidance need num_classes")
    if module.guidance == "classifier" and not module.classifier_checkpoint:
        raise ValueError(
            "classifier guidance needs classifier_checkpoint: one of NoisyClassifier, or a "
            "published one with its classifier_args"
        )
    if edm and not module.settings.is_edm:
        raise ValueError("prediction 'edm' needs sampler 'heun' or 'euler'")
    if module.settings.is_edm and module.prediction not in ("edm", "epsilon"):
        raise ValueError("samplers 'heun' and 'euler' need prediction 'edm' or 'epsilon'")
    if edm and module.diffusion.variance == "learned_range":
        raise ValueError("prediction 'edm' has no learned variance: use fixed_small")
    if module.analytic_variance and module.settings.sampler != "ancestral":
        raise ValueError("analytic_variance needs sampler 'ancestral'")
    if module.checkpoint and module.network != "unet":
        raise ValueError(f"checkpoint needs network 'unet', got {module.network!r}")
    if module.network == "exact" and module.diffusion.variance == "learned_range":
        raise ValueError("network 'exact' has no learned variance: use fixed_small")
    if module.feature_network not in FEATURES and "." not in module.feature_network:
        raise ValueError(
            f"feature_network must be one of {FEATURES} or a class path, "
            f"got {module.feature_network!r}"
        )
    if module.reference not in ("train", "test") and not module.reference.endswith(".npz"):
        raise ValueError(
            f"reference must be 'train', 'test' or the path of an .npz, got {module.reference!r}"
        )
