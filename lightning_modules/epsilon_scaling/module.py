"""The LightningModule: trains a diffusion model and samples it with scaled noise."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torchmetrics import MeanMetric

from lightning_modules.base import PaperModule, global_seed
from lightning_modules.components.diffusion import (
    ADMClassifier,
    AncestralSampler,
    DDIMSampler,
    EDMPreconditioning,
    ExactScore,
    GaussianDiffusion,
    classifier_free,
    classifier_gradient,
    counter_normal,
    counter_uniform,
    edm_loss,
    load_adm_checkpoint,
    min_snr_weight,
    training_loss,
)
from lightning_modules.components.diffusion.losses import LOSSES
from lightning_modules.components.randomness import seed_from
from lightning_modules.components.sharding import shard_blocks
from lightning_modules.epsilon_scaling.baselines import analytic_log_variances, noise_energy
from lightning_modules.epsilon_scaling.exposure_bias import ExposureBias, measure_exposure_bias
from lightning_modules.epsilon_scaling.features import (
    FEATURES,
    ClassifierFeatures,
    InceptionFeatures,
    PixelFeatures,
)
from lightning_modules.epsilon_scaling.generation import (
    PositionNoise,
    SamplerSettings,
    generate,
    image_grid,
    to_uint8,
)
from lightning_modules.epsilon_scaling.lambda_search import golden_section_search, grid_search
from lightning_modules.epsilon_scaling.networks import BLOCKS, build_network, label_or_null
from lightning_modules.epsilon_scaling.quality import FeatureRows, quality
from lightning_modules.epsilon_scaling.schedule import EpsilonSchedule
from lightning_modules.epsilon_scaling.timestep_sampling import (
    TIMESTEP_SAMPLINGS,
    LossSecondMoment,
    stratified_timesteps,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Images(Protocol):
    """The fields of a batch that this module reads.

    Attributes:
        x: float32 ``(n, c, h, w)`` in [-1, 1].
        y: int64 ``(n,)`` class numbers; read by class-conditional models only.
    """

    x: Tensor
    y: Tensor


class Samples(NamedTuple):
    """Result of `predict_step`.

    Attributes:
        images: uint8 ``(n, h, w, c)``.
        labels: int64 ``(n,)``, or None for an unconditional model.
    """

    images: Tensor
    labels: Tensor | None


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


class EpsilonScaling(PaperModule):
    """Diffusion model whose sampler divides the predicted noise by lambda_t (ADM-ES).

    Training is that of ADM and knows nothing of lambda. Validation logs ``val/loss`` and the
    error of the noise by quarter of the timesteps (``val/mse_q1`` is the cleanest), both with
    fixed noise. Testing draws `samples_per_image` samples for every test image, with the same
    noise for every lambda in `compare`, and logs ``test/fd_<features>`` (Fréchet distance),
    ``kd`` (kernel distance), ``sw`` (sliced Wasserstein), ``precision`` and ``recall``; the name of
    another lambda follows after ``@``. Prediction draws samples, written as ``samples.npz``
    (``arr_0`` uint8 NHWC, ``arr_1`` labels) and ``samples.png``.

    Args:
        network: "mlp" (tiny images), "unet" (ADM) or "exact" (closed form for a mixture around
            the training images; nothing is trained).
        network_args: Further constructor arguments of the network.
        checkpoint: Published ADM state dict to start from (network "unet").
        image_shape: ``[c, h, w]``; asked of the data if None.
        schedule: Noise schedule, "linear", "cosine" or "scaled_linear".
        diffusion_steps: Length T of the training process.
        prediction: What the network predicts: "epsilon", "v", "sample", or "edm" for EDM's
            preconditioned denoiser with its loss and samplers.
        variance: "fixed_small", "fixed_large" or "learned_range".
        loss: "mse", "rescaled_mse", "kl" or "rescaled_kl".
        timestep_sampling: "uniform" or "loss_second_moment".
        timestep_share: Training draws from the cleanest share of the timesteps; a curriculum may
            move it.
        input_perturbation: gamma of the DDPM-IP rival; 0 is off.
        min_snr_gamma: Weight the noise loss by min(SNR, gamma) / SNR; None is off.
        data_std: Width h of the mixture of network "exact", or sigma_data of "edm".
        num_classes: Labels of a class-conditional model.
        label_dropout: Share of training samples with an empty label (classifier-free guidance).
        guidance: "none", "classifier" or "classifier_free".
        guidance_scale: Strength of the guidance.
        classifier_args: Constructor arguments of the ADM classifier that guides.
        classifier_checkpoint: Its published state dict.
        sampler: "ddim", "ancestral", "heun" or "euler".
        respacing: Sampling steps, as "20", "10,15,20" or "ddim25".
        eta: Noise of DDIM.
        clip: Clamp of the predicted x_0; None for none.
        scale_direction: Whether DDIM's direction uses the scaled noise (ADM) or not (LDM).
        scale_correction: Whether Heun's second evaluation is scaled.
        edm_steps: Noise levels of the EDM samplers.
        sigma_min: Their smallest level.
        sigma_max: Their largest level.
        churn: Their added noise S_churn.
        analytic_variance: Analytic-DPM variances for the ancestral sampler.
        time_shift_window: Window of the time-shift rival; 0 is off.
        epsilon_scale: b of lambda_t = k t + b; 1 is off.
        epsilon_slope: k.
        epsilon_list: One lambda per sampling step instead, index 0 the cleanest.
        skip_first: Noisiest steps left unscaled.
        compare: Further uniform lambdas that testing evaluates on the same noise.
        sample_seed: Seed of all sampling noise.
        samples_per_image: Samples drawn for each test or prediction image.
        feature_network: "classifier" (trained on the labelled training set), "pixels",
            "inception", or the class path of your own module with `num_features`.
        reference: Which images are the reference of the distances, "train" or "test".
        preview_samples: Samples drawn as a figure after each validation.
        compile: Compile the network (never the sampler).
        optimizer: Default AdamW, learning rate 1e-4, no weight decay.
        lr_scheduler: Optional schedule of the learning rate.
        lr_interval: Whether the scheduler counts optimiser steps or epochs.
        loss_weights: Weights of ``mse`` and ``vb``.

    Raises:
        ValueError: If an argument is out of range or does not go with another.
    """

    monitor: ClassVar[str] = "val/loss"
    mode: ClassVar[Literal["min", "max"]] = "min"
    default_loss_weights: ClassVar[dict[str, float]] = {"mse": 1.0, "vb": 1.0}

    def __init__(
        self,
        network: str = "mlp",
        network_args: dict[str, Any] | None = None,
        checkpoint: str | None = None,
        image_shape: list[int] | None = None,
        schedule: str = "linear",
        diffusion_steps: int = 1000,
        prediction: str = "epsilon",
        variance: str = "fixed_small",
        loss: str = "mse",
        timestep_sampling: str = "uniform",
        timestep_share: float = 1.0,
        input_perturbation: float = 0.0,
        min_snr_gamma: float | None = None,
        data_std: float = 0.15,
        num_classes: int | None = None,
        label_dropout: float = 0.0,
        guidance: Literal["none", "classifier", "classifier_free"] = "none",
        guidance_scale: float = 1.0,
        classifier_args: dict[str, Any] | None = None,
        classifier_checkpoint: str | None = None,
        sampler: str = "ddim",
        respacing: str = "20",
        eta: float = 0.0,
        clip: float | None = 1.0,
        scale_direction: bool = True,
        scale_correction: bool = True,
        edm_steps: int = 18,
        sigma_min: float = 0.002,
        sigma_max: float = 80.0,
        churn: float = 0.0,
        analytic_variance: bool = False,
        time_shift_window: int = 0,
        epsilon_scale: float = 1.0,
        epsilon_slope: float = 0.0,
        epsilon_list: list[float] | None = None,
        skip_first: int = 0,
        compare: list[float] | None = None,
        sample_seed: int = 0,
        samples_per_image: int = 1,
        feature_network: str = "classifier",
        reference: Literal["train", "test"] = "train",
        preview_samples: int = 0,
        compile: bool = False,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["step", "epoch"] = "step",
        loss_weights: dict[str, float] | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval, loss_weights)
        self.network, self.network_args = network, network_args
        self.checkpoint, self.image_shape = checkpoint, image_shape
        self.prediction, self.data_std = prediction, data_std
        self.loss = loss
        self.timestep_share = timestep_share
        self.input_perturbation, self.min_snr_gamma = input_perturbation, min_snr_gamma
        self.num_classes, self.label_dropout = num_classes, label_dropout
        self.guidance, self.guidance_scale = guidance, guidance_scale
        self.classifier_args = classifier_args
        self.classifier_checkpoint = classifier_checkpoint
        self.analytic_variance = analytic_variance
        self.epsilon_scale, self.epsilon_slope = epsilon_scale, epsilon_slope
        self.epsilon_list, self.skip_first = epsilon_list, skip_first
        self.compare = list(compare or [])
        self.sample_seed, self.samples_per_image = sample_seed, samples_per_image
        self.feature_network, self.reference = feature_network, reference
        self.preview_samples, self.compiles = preview_samples, compile
        self.settings = SamplerSettings(
            sampler,
            respacing,
            eta,
            clip,
            scale_direction,
            scale_correction,
            edm_steps,
            sigma_min,
            sigma_max,
            churn,
            time_shift_window,
        )
        self.diffusion = GaussianDiffusion.from_name(
            schedule,
            diffusion_steps,
            prediction="epsilon" if prediction == "edm" else prediction,
            variance=variance,
        )
        self._check_arguments(timestep_sampling)
        self.timesteps = TIMESTEP_SAMPLINGS[timestep_sampling](diffusion_steps)
        # Fails now, not after hours of training, if lambda does not fit the steps.
        self.epsilon_schedule.scales(self.settings.steps(self.diffusion))
        self.denoiser: nn.Module | None = None
        self._hidden: dict[str, Any] = {}
        self._seen = 0
        self._checked_stage = ""
        self.val_loss = MeanMetric()
        self.val_quarters = nn.ModuleList(MeanMetric() for _ in range(4))
        self.reference_rows = FeatureRows()
        self.sample_rows = nn.ModuleList(FeatureRows() for _ in self.test_schedules)
        if image_shape is not None and network != "exact":
            self.configure_model()

    def _check_arguments(self, timestep_sampling: str) -> None:
        edm = self.prediction == "edm"
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {LOSSES}, got {self.loss!r}")
        if timestep_sampling not in TIMESTEP_SAMPLINGS:
            allowed = sorted(TIMESTEP_SAMPLINGS)
            raise ValueError(f"timestep_sampling must be one of {allowed}, got {timestep_sampling!r}")
        if not 0 < self.timestep_share <= 1:
            raise ValueError(f"timestep_share must be in (0, 1], got {self.timestep_share}")
        if self.input_perturbation < 0:
            raise ValueError(
                f"input_perturbation must be at least 0, got {self.input_perturbation}"
            )
        if not 0 <= self.label_dropout < 1:
            raise ValueError(f"label_dropout must be in [0, 1), got {self.label_dropout}")
        if self.guidance_scale < 0:
            raise ValueError(f"guidance_scale must be at least 0, got {self.guidance_scale}")
        if self.samples_per_image < 1:
            raise ValueError(f"samples_per_image must be at least 1, got {self.samples_per_image}")
        if self.num_classes is None and (self.label_dropout or self.guidance == "classifier_free"):
            raise ValueError("label_dropout and classifier_free guidance need num_classes")
        if self.guidance == "classifier" and not (
            self.classifier_args and self.classifier_checkpoint
        ):
            raise ValueError("classifier guidance needs classifier_args and classifier_checkpoint")
        if edm and not self.settings.is_edm:
            raise ValueError("prediction 'edm' needs sampler 'heun' or 'euler'")
        if self.settings.is_edm and self.prediction not in ("edm", "epsilon"):
            raise ValueError("samplers 'heun' and 'euler' need prediction 'edm' or 'epsilon'")
        if edm and self.diffusion.variance == "learned_range":
            raise ValueError("prediction 'edm' has no learned variance: use fixed_small")
        if self.analytic_variance and self.settings.sampler != "ancestral":
            raise ValueError("analytic_variance needs sampler 'ancestral'")
        if self.checkpoint and self.network != "unet":
            raise ValueError(f"checkpoint needs network 'unet', got {self.network!r}")
        if self.network == "exact" and self.diffusion.variance == "learned_range":
            raise ValueError("network 'exact' has no learned variance: use fixed_small")
        if self.feature_network not in FEATURES and "." not in self.feature_network:
            raise ValueError(
                f"feature_network must be one of {FEATURES} or a class path, "
                f"got {self.feature_network!r}"
            )

    # ------------------------------------------------------------------ network

    def setup(self, stage: str) -> None:
        """Learn the shape of the images; refuse to train what has no weights."""
        if stage == "fit" and self.network == "exact":
            raise ValueError("network 'exact' has nothing to train: use test or predict")

    def configure_model(self) -> None:
        """Build the network once, and shard it under `ModelParallelStrategy`."""
        if self.denoiser is not None:
            return
        if self.device_mesh is not None and any(
            isinstance(callback, WeightAveraging) for callback in self.trainer.callbacks  # type: ignore[attr-defined]
        ):
            raise ValueError(
                "EMAWeightAveraging cannot copy sharded weights: remove it from trainer.callbacks "
                "or use strategy ddp"
            )
        if self.image_shape is None:
            self.set_hparam("image_shape", self._shape_of_data())
        assert self.image_shape is not None
        if self.network == "exact":
            images = _rows(self._datamodule().train_set).x
            self.denoiser = ExactScore(images.to(self.device), self.data_std, self.diffusion)
            return
        learned = self.diffusion.variance == "learned_range"
        channels = self.image_shape[0] * (2 if learned else 1)
        labels = self.num_classes
        if labels is not None and (self.label_dropout or self.guidance == "classifier_free"):
            labels += 1
        network = build_network(
            self.network, self.image_shape, channels, labels, self.network_args
        )
        if self.checkpoint:
            load_adm_checkpoint(self.checkpoint, network)
        shard_blocks(network, self.device_mesh, BLOCKS[self.network])
        if self.compiles:
            network.compile()
        self.denoiser = (
            EDMPreconditioning(network, self.data_std) if self.prediction == "edm" else network
        )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the network before its weights arrive."""
        if self.image_shape is not None and self.network != "exact":
            self.configure_model()

    def _datamodule(self) -> Any:
        data = getattr(self.trainer, "datamodule", None)
        if data is None or getattr(data, "train_set", None) is None:
            raise ValueError("the images of data.train_set are needed; give a datamodule")
        return data

    def _shape_of_data(self) -> list[int]:
        shape = list(_rows(self._datamodule().train_set, [0]).x.shape[1:])
        if len(shape) != 3:
            raise ValueError(f"images must be (c, h, w), got {shape}: set flatten to false")
        return shape

    def default_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """AdamW as in the published training code."""
        return AdamW(parameters, lr=1e-4, weight_decay=0.0)

    @property
    def epsilon_schedule(self) -> EpsilonSchedule:
        """The divisors of the present hyperparameters."""
        values = tuple(self.epsilon_list) if self.epsilon_list is not None else None
        return EpsilonSchedule(self.epsilon_scale, self.epsilon_slope, values, self.skip_first)

    @property
    def test_schedules(self) -> list[EpsilonSchedule]:
        """The module's own schedule first, then those compared with it."""
        others = [EpsilonSchedule(scale, skip_first=self.skip_first) for scale in self.compare]
        return [self.epsilon_schedule, *others]

    # ------------------------------------------------------------------ training

    def _labels(self, batch: Images) -> Tensor | None:
        if self.num_classes is None:
            return None
        labels = getattr(batch, "y", None)
        if labels is None:
            raise ValueError("num_classes is set, but the batch has no labels y; give labels or drop it")
        if labels.is_floating_point() or int(labels.min()) < 0 or int(labels.max()) >= self.num_classes:
            raise ValueError(
                f"labels must be integers below num_classes = {self.num_classes}, "
                f"got {labels.dtype} from {labels.min().item()} to {labels.max().item()}"
            )
        return labels

    def _check_once(self, batch: Images, stage: str) -> None:
        if self._checked_stage == stage:
            return
        check_images(batch.x)
        if self.image_shape is not None and list(batch.x.shape[1:]) != list(self.image_shape):
            raise ValueError(
                f"images of shape {list(batch.x.shape[1:])} for a model of {list(self.image_shape)}"
            )
        self._checked_stage = stage

    def _loss_terms(
        self,
        x0: Tensor,
        labels: Tensor | None,
        uniform: Tensor,
        steps: Tensor,
        noise: Tensor,
        extra: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Losses by name ``(n,)``, at `steps` (or at noise levels by `uniform` for "edm")."""
        assert self.denoiser is not None
        denoiser = self.denoiser
        arguments = () if labels is None else (labels,)
        if self.prediction == "edm":
            levels = (torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6)) * 1.2 - 1.2).to(x0)
            return {
                "mse": edm_loss(
                    lambda x, sigma: denoiser(x, sigma, *arguments),
                    x0,
                    levels,
                    noise,
                    self.data_std,
                )
            }
        terms = training_loss(
            self.diffusion,
            lambda x, t: denoiser(x, t, *arguments),
            x0,
            steps,
            noise,
            self.loss,
            self.input_perturbation if extra is not None else 0.0,
            extra,
        )
        parts = terms.parts or {"vb": terms.loss}
        if self.min_snr_gamma is not None and "mse" in parts:
            snr = min_snr_weight(self.diffusion, steps, self.min_snr_gamma).to(x0)
            parts = {**parts, "mse": parts["mse"] * snr}
        return parts

    def _weighted(self, parts: dict[str, Tensor]) -> Tensor:
        total = sum(self.loss_weights[name] * part for name, part in parts.items())
        assert isinstance(total, Tensor)
        return total

    def training_step(self, batch: Images, batch_idx: int) -> Tensor:
        """Loss at timesteps and noise that belong to the sample's place in the global batch."""
        self._check_once(batch, "train")
        x0, labels = batch.x, self._labels(batch)
        count = len(x0)
        positions = torch.arange(count) + count * self.global_rank
        key = partial(seed_from, global_seed(), "train", self.iteration)
        on_device = positions.to(x0.device)
        uniform = counter_uniform(key("t"), positions)
        noise = counter_normal(key("noise"), on_device, x0.shape[1:]).to(x0)
        extra = None
        if self.input_perturbation:
            extra = counter_normal(key("perturbation"), on_device, x0.shape[1:]).to(x0)
        if labels is not None and self.label_dropout:
            drop = (counter_uniform(key("label"), positions) < self.label_dropout).to(x0.device)
            labels = label_or_null(labels, drop, self.num_classes or 0)
        steps, weights = self.timesteps.draw(uniform, self.timestep_share)
        steps, weights = steps.to(x0.device), weights.to(x0)
        parts = self._loss_terms(x0, labels, uniform, steps, noise, extra)
        if isinstance(self.timesteps, LossSecondMoment):
            # All losses of the global batch in one order, so that the ranks stay equal.
            losses = self._weighted(parts).detach()
            self.timesteps.update(*(self.all_gather(each).flatten() for each in (steps, losses)))
        return self.objective(**{name: (part * weights).mean() for name, part in parts.items()})

    # ------------------------------------------------------------------ validation

    def on_validation_epoch_start(self) -> None:
        """Start counting samples."""
        self._seen = 0

    def _positions(self, count: int) -> Tensor:
        """Places ``(count,)`` in the data set of this rank's next samples."""
        world = self.trainer.world_size
        places = (torch.arange(self._seen, self._seen + count)) * world + self.global_rank
        self._seen += count
        return places

    def validation_step(self, batch: Images, batch_idx: int) -> None:
        """Loss at evenly spread timesteps and fixed noise for each image."""
        self._check_once(batch, "validate")
        x0, labels = batch.x, self._labels(batch)
        positions = self._positions(len(x0))
        steps = stratified_timesteps(positions, self.diffusion.steps)
        uniform = (steps.double() + 0.5) / self.diffusion.steps
        steps = steps.to(x0.device)
        key = seed_from("validation", "noise")
        noise = counter_normal(key, positions.to(x0.device), x0.shape[1:]).to(x0)
        parts = self._loss_terms(x0, labels, uniform, steps, noise)
        total = self._weighted(parts)
        self.val_loss.update(total)
        self.log("val/loss", self.val_loss, prog_bar=True, batch_size=len(x0))
        quarters = (steps * 4 // self.diffusion.steps).clamp(0, 3)
        first = next(iter(parts.values()))
        for quarter, metric in enumerate(self.val_quarters):
            assert isinstance(metric, MeanMetric)
            inside = first[quarters == quarter]
            if len(inside):
                metric.update(inside)
            self.log(f"val/mse_q{quarter + 1}", metric, batch_size=len(x0))

    # ------------------------------------------------------------------ sampling

    def _model(self, labels: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
        assert self.denoiser is not None, "the network is built by configure_model"
        denoiser = self.denoiser
        if labels is None:
            return denoiser
        if self.guidance == "classifier_free":
            empty = torch.full_like(labels, self.num_classes or 0)
            channels = (self.image_shape or [1])[0]
            return classifier_free(denoiser, labels, empty, self.guidance_scale, channels)
        return lambda x, t: denoiser(x, t, labels)

    def _gradient(self, labels: Tensor | None) -> Callable[[Tensor, Tensor], Tensor] | None:
        if self.guidance != "classifier":
            return None
        if labels is None:
            raise ValueError("classifier guidance needs num_classes and labels")
        if "classifier" not in self._hidden:
            classifier = ADMClassifier(**(self.classifier_args or {}))
            load_adm_checkpoint(str(self.classifier_checkpoint), classifier)
            self._hidden["classifier"] = classifier.eval().requires_grad_(False)
        classifier = self._hidden["classifier"].to(labels.device)
        return classifier_gradient(classifier, labels, self.guidance_scale)

    @torch.no_grad()
    def sample(
        self,
        positions: Tensor,
        labels: Tensor | None = None,
        schedule: EpsilonSchedule | None = None,
        purpose: str = "sample",
    ) -> Tensor:
        """Samples ``(n, c, h, w)`` in [-1, 1].

        Args:
            positions: ``(n,)`` int64 numbers of the samples; each has its own noise.
            labels: ``(n,)`` for a class-conditional model.
            schedule: Divisors; the module's own if None.
            purpose: Another set of noise for another use.
        """
        if self.denoiser is None:
            self.configure_model()
        assert self.image_shape is not None
        shape = (self.image_shape[0], self.image_shape[1], self.image_shape[2])
        seed = seed_from(self.sample_seed, purpose)
        noise = PositionNoise(seed, positions.to(self.device), shape)
        model = self._model(labels)
        return generate(
            model,
            self.diffusion,
            self.settings,
            self.epsilon_schedule if schedule is None else schedule,
            noise,
            self._gradient(labels),
            denoiser=model if self.prediction == "edm" else None,
            log_variances=self._analytic_variances() if self.analytic_variance else None,
        )

    def _analytic_variances(self) -> Tensor:
        if "analytic" not in self._hidden:
            batch = _rows(self._datamodule().train_set, list(range(self._count(256))))
            x0 = batch.x.to(self.device)
            labels = self._labels(batch)
            places = torch.arange(len(x0), device=self.device)
            noise = counter_normal(seed_from("analytic"), places, x0.shape[1:])
            process = self.diffusion.respace(self.settings.respacing)
            model = self._model(None if labels is None else labels.to(self.device))
            energy = noise_energy(model, process, [(x0, noise)])
            self._hidden["analytic"] = analytic_log_variances(process, energy)
        variances: Tensor = self._hidden["analytic"]
        return variances

    def _count(self, wanted: int) -> int:
        return min(wanted, len(self._datamodule().train_set))

    # ------------------------------------------------------------------ testing

    def on_test_start(self) -> None:
        """Forget the samples of an earlier test; prepare the reference."""
        self.prepare_reference()

    def on_test_epoch_start(self) -> None:
        """Start counting samples."""
        self._seen = 0
        if len(self.sample_rows) != len(self.test_schedules):
            self.sample_rows = nn.ModuleList(FeatureRows() for _ in self.test_schedules)
        for rows in self.sample_rows:
            assert isinstance(rows, FeatureRows)
            rows.reset()
        self._hidden["grids"] = {}

    def prepare_reference(self) -> None:
        """Build the feature network and the features of the reference images, once."""
        if "reference" in self._hidden:
            return
        data = self._datamodule()
        self._hidden["features"] = self._build_features(data)
        images = data.train_set if self.reference == "train" else data.test_set
        rank, world = self.trainer.global_rank, self.trainer.world_size
        places = list(range(rank, len(images), world))
        self.reference_rows.reset()
        for start in range(0, len(places), 512):
            batch = _rows(images, places[start : start + 512])
            self.reference_rows.update(self.features(batch.x.to(self.device)))
        self._hidden["reference"] = self.reference_rows.compute()

    def _build_features(self, data: Any) -> nn.Module:
        if self.feature_network == "pixels":
            features: nn.Module = PixelFeatures(_rows(data.train_set, [0]).x[0].numel())
        elif self.feature_network == "inception":
            features = InceptionFeatures()
        elif self.feature_network == "classifier":
            batch = _rows(data.train_set, list(range(self._count(20000))))
            if getattr(batch, "y", None) is None:
                raise ValueError("feature_network: classifier needs labels y; use 'pixels'")
            features = ClassifierFeatures.fit(batch.x, batch.y)
        else:
            from importlib import import_module

            module, _, name = self.feature_network.rpartition(".")
            features = getattr(import_module(module), name)()
        folder = self.trainer.log_dir
        if folder and self.trainer.is_global_zero:
            Path(folder).mkdir(parents=True, exist_ok=True)
            torch.save(features.state_dict(), Path(folder) / f"features_{self._feature_name}.pt")
        return features.to(self.device).eval().requires_grad_(False)

    @property
    def _feature_name(self) -> str:
        return self.feature_network.rpartition(".")[2].lower()

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Feature rows ``(n, d)`` of images."""
        rows: Tensor = self._hidden["features"](images)
        return rows

    def _repeated(self, batch: Images) -> tuple[Tensor, Tensor | None]:
        labels = self._labels(batch)
        base = self._positions(len(batch.x))
        copies = torch.arange(self.samples_per_image)
        positions = (base[:, None] * self.samples_per_image + copies).flatten()
        if labels is not None:
            labels = labels.repeat_interleave(self.samples_per_image)
        return positions, labels

    def test_step(self, batch: Images, batch_idx: int) -> None:
        """Samples for every schedule, on the same noise."""
        self._check_once(batch, "test")
        positions, labels = self._repeated(batch)
        for schedule, rows in zip(self.test_schedules, self.sample_rows, strict=True):
            images = self.sample(positions, labels, schedule)
            assert isinstance(rows, FeatureRows)
            rows.update(self.features(images))
            self._hidden["grids"].setdefault(schedule.describe(), to_uint8(images[:64]).cpu())

    def on_test_epoch_end(self) -> None:
        """Log the distances of every schedule."""
        for place, schedule in enumerate(self.test_schedules):
            rows = self.sample_rows[place]
            assert isinstance(rows, FeatureRows)
            suffix = f"@{schedule.describe()}" if place else ""
            values = quality(self._hidden["reference"], rows.compute(), self._feature_name)
            for name, value in values.items():
                self.log(f"test/{name}{suffix}", value, rank_zero_only=False)

    def sample_distance(self, scale: float, samples: int) -> float:
        """Fréchet distance at a uniform lambda, on noise kept for this purpose.

        The same noise for every call, so calls can be compared; collective, call on every rank.

        Args:
            scale: lambda.
            samples: Number of samples over all ranks.
        """
        self.prepare_reference()
        rows = FeatureRows().to(self.device)
        places = torch.arange(self.trainer.global_rank, samples, self.trainer.world_size)
        schedule = EpsilonSchedule(scale, skip_first=self.skip_first)
        for chunk in places.split(512):
            labels = None
            if self.num_classes is not None:
                labels = (chunk % self.num_classes).to(self.device)
            rows.update(self.features(self.sample(chunk, labels, schedule, "search")))
        values = quality(self._hidden["reference"], rows.compute(), "search")
        return values["fd_search"]

    def search_scale(
        self, low: float, high: float, evaluations: int, candidates: Sequence[float], samples: int
    ) -> tuple[float, list[tuple[float, float]]]:
        """Best uniform lambda: of the candidates, or by golden section in [low, high].

        The present schedule's slope and list are given up for it.
        """
        objective = partial(self.sample_distance, samples=samples)
        if candidates:
            found = grid_search(objective, candidates)
        else:
            found = golden_section_search(objective, low, high, evaluations)
        self.epsilon_slope, self.epsilon_list = 0.0, None
        return found.best, found.tried

    def exposure_bias(self, x0: Tensor, labels: Tensor | None = None) -> ExposureBias:
        """Exposure bias of the present sampler, measured from images ``(n, c, h, w)``.

        Raises:
            ValueError: If the sampler works on noise levels.
        """
        if self.settings.is_edm:
            raise ValueError("exposure bias is measured with sampler 'ddim' or 'ancestral'")
        if labels is None and self.num_classes is not None:
            labels = torch.arange(len(x0), device=x0.device) % self.num_classes
        process = self.diffusion.respace(self.settings.respacing)
        clip = self.settings.clip
        if self.settings.sampler == "ddim":
            sampler: DDIMSampler | AncestralSampler = DDIMSampler(
                process, self.settings.eta, clip, self.settings.scale_direction
            )
        else:
            sampler = AncestralSampler(process, clip)
        places = torch.arange(len(x0), device=x0.device)
        shape = (x0.shape[1], x0.shape[2], x0.shape[3])
        noise = PositionNoise(seed_from(self.sample_seed, "bias"), places, shape)
        scales = self.epsilon_schedule.scales_or_none(process.steps)
        return measure_exposure_bias(self._model(labels), sampler, x0, noise, scales)

    # ------------------------------------------------------------------ prediction

    def on_predict_epoch_start(self) -> None:
        """Start counting samples."""
        self._seen = 0

    def predict_step(self, batch: Images, batch_idx: int) -> Samples:
        """Samples, `samples_per_image` for each image (and its label) of the batch."""
        positions, labels = self._repeated(batch)
        images = to_uint8(self.sample(positions, labels))
        return Samples(images.cpu(), None if labels is None else labels.cpu())

    def write_predictions(self, predictions: list[Samples], folder: Path) -> list[Path]:
        """Write ``samples.npz`` and a grid of the first 256 as ``samples.png``."""
        import matplotlib.image
        import numpy as np

        images = torch.cat([each.images for each in predictions])
        arrays = {"arr_0": images.numpy()}
        labels = [each.labels for each in predictions if each.labels is not None]
        if labels:
            arrays["arr_1"] = torch.cat(labels).numpy()
        np.savez(folder / "samples.npz", **arrays)
        matplotlib.image.imsave(folder / "samples.png", image_grid(images[:256]).numpy())
        return [folder / "samples.npz", folder / "samples.png"]

    def figures(self) -> "dict[str, Figure]":
        """Samples per lambda after a test; a preview after validation if asked for."""
        grids: dict[str, Tensor] = dict(self._hidden.pop("grids", {}))
        if not grids and self.preview_samples and self.denoiser is not None:
            positions = torch.arange(self.preview_samples)
            labels = None
            if self.num_classes is not None:
                labels = (positions % self.num_classes).to(self.device)
            images = self.sample(positions, labels, purpose="preview")
            grids = {self.epsilon_schedule.describe(): to_uint8(images).cpu()}
        return {f"samples_{name}": _grid_figure(grid, name) for name, grid in grids.items()}


def _rows(dataset: Any, indices: list[int] | None = None) -> Any:
    """Batch of some or all samples of a data set."""
    return dataset[list(range(len(dataset))) if indices is None else indices]


def _grid_figure(images: Tensor, title: str) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 4.3))
    axes = figure.add_subplot()
    axes.imshow(image_grid(images).numpy(), interpolation="nearest")
    axes.set_title(f"epsilon scale {title}")
    axes.axis("off")
    return figure
