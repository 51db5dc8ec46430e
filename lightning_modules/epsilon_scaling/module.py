"""The LightningModule: trains a diffusion model and samples it with scaled noise."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torchmetrics import MeanMetric

from lightning_modules.components.diffusion import (
    EDMPreconditioning,
    ExactScore,
    GaussianDiffusion,
    counter_normal,
    counter_uniform,
    edm_loss,
    load_adm_checkpoint,
    min_snr_weight,
    training_loss,
)
from lightning_modules.components.randomness import global_seed, seed_from
from lightning_modules.components.sharding import shard_blocks
from lightning_modules.epsilon_scaling.batches import Images, known_mixture, rows_of
from lightning_modules.epsilon_scaling.checks import check_arguments
from lightning_modules.epsilon_scaling.generation import SamplerSettings
from lightning_modules.epsilon_scaling.networks import BLOCKS, build_network, label_or_null
from lightning_modules.epsilon_scaling.quality import FeatureRows
from lightning_modules.epsilon_scaling.sampling import SamplesImages
from lightning_modules.epsilon_scaling.timestep_sampling import (
    TIMESTEP_SAMPLINGS,
    LossSecondMoment,
    stratified_timesteps,
)


class EpsilonScaling(SamplesImages):
    """Diffusion model whose sampler divides the predicted noise by lambda_t (ADM-ES).

    Training is that of ADM and knows nothing of lambda. Validation logs ``val/loss`` and the
    error of the noise by quarter of the timesteps (``val/mse_q1`` is the cleanest), both with
    fixed noise. Testing draws `samples_per_image` samples for every test image, with the same
    noise for every lambda in `compare`, and logs ``test/fd_<features>`` (Fréchet distance),
    ``kd`` (kernel distance), ``sw`` (sliced Wasserstein), ``precision``, ``recall`` and,
    with classifier features, ``is`` (Inception score of its probabilities); the name of another
    lambda follows after ``@``. Prediction draws samples, written as ``samples.npz`` (``arr_0``
    uint8 NHWC, ``arr_1`` labels) and ``samples.png``.

    Args:
        network: "mlp" (tiny images), "unet" (ADM) or "exact" (closed form for the mixture that
            the data are drawn from, or for one around the training images; nothing is trained).
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
        data_std: Width h of the mixture of network "exact" around the training images, or
            sigma_data of "edm".
        num_classes: Labels of a class-conditional model.
        label_dropout: Share of training samples with an empty label (classifier-free guidance).
        guidance: "none", "classifier" or "classifier_free".
        guidance_scale: Strength of the guidance.
        classifier_args: Constructor arguments of a published ADM classifier that guides.
        classifier_checkpoint: Its state dict, or a checkpoint of `NoisyClassifier`, which needs
            no arguments.
        sampler: "ddim", "ancestral", "heun" or "euler".
        respacing: Sampling steps, as "20", "10,15,20" or "ddim25".
        eta: Noise of DDIM.
        clip: Clamp of the predicted x_0; None for none.
        scale_direction: Whether DDIM's direction uses the scaled noise (ADM) or not (LDM).
        scale_correction: Whether Heun's second evaluation is scaled.
        edm_steps: Noise levels of the EDM samplers.
        sigma_min: Their smallest level.
        sigma_max: Their largest level.
        churn: Their added noise S_churn; 0 is deterministic.
        churn_min: S_min, the smallest noise level that gets it.
        churn_max: S_max, the largest.
        churn_noise: S_noise, factor of its standard deviation.
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
        reference: What the distances compare with: "train" or "test" images of the data, or an
            `.npz` with images (``arr_0``) or with published moments (``mu``, ``sigma``).
        preview_samples: Samples drawn as a figure after each validation.
        compile: Compile the network (never the sampler).
        optimizer: Default AdamW, learning rate 1e-4, no weight decay.
        lr_scheduler: Optional schedule of the learning rate.
        lr_interval: Whether the scheduler counts optimiser steps or epochs.
        loss_weights: Weights of ``mse`` and ``vb``.

    Raises:
        ValueError: If an argument is out of range or does not go with another.
    """

    monitor: str = "val/loss"
    mode: Literal["min", "max"] = "min"
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
        churn_min: float = 0.0,
        churn_max: float = math.inf,
        churn_noise: float = 1.0,
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
        reference: str = "train",
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
            churn_min,
            churn_max,
            churn_noise,
            time_shift_window,
        )
        self.diffusion = GaussianDiffusion.from_name(
            schedule,
            diffusion_steps,
            prediction="epsilon" if prediction == "edm" else prediction,
            variance=variance,
        )
        check_arguments(self, timestep_sampling)
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

    # ------------------------------------------------------------------ network

    def setup(self, stage: str) -> None:
        """Forget what was computed from other data or weights; refuse to train without weights."""
        if stage == "fit" and self.network == "exact":
            raise ValueError("network 'exact' has nothing to train: use test or predict")
        for name in ("features", "reference", "analytic"):
            self._hidden.pop(name, None)
        if self.network == "exact":
            self.denoiser = None  # its centres are the training images

    def configure_model(self) -> None:
        """Build the network once, and shard it under `ModelParallelStrategy`."""
        if self.denoiser is not None:
            return
        if self.device_mesh is not None and any(
            isinstance(callback, WeightAveraging)
            for callback in self.trainer.callbacks  # type: ignore[attr-defined]
        ):
            raise ValueError(
                "EMAWeightAveraging cannot copy sharded weights: remove it from trainer.callbacks "
                "or use strategy ddp"
            )
        if self.image_shape is None:
            self.set_hparam("image_shape", self._shape_of_data())
        assert self.image_shape is not None
        if self.network == "exact":
            self.denoiser = self._exact_score()
            return
        learned = self.diffusion.variance == "learned_range"
        channels = self.image_shape[0] * (2 if learned else 1)
        labels = self.num_classes
        if labels is not None and (self.label_dropout or self.guidance == "classifier_free"):
            labels += 1
        network = build_network(self.network, self.image_shape, channels, labels, self.network_args)
        if self.checkpoint:
            load_adm_checkpoint(self.checkpoint, network)
        shard_blocks(network, self.device_mesh, BLOCKS[self.network])
        if self.compiles:
            network.compile()
        self.denoiser = (
            EDMPreconditioning(network, self.data_std) if self.prediction == "edm" else network
        )

    def _exact_score(self) -> ExactScore:
        data = self._datamodule()
        mixture = known_mixture(data)
        if mixture is not None:
            self.set_hparam("data_std", mixture.std)
        centres = rows_of(data.train_set).x if mixture is None else mixture.centres
        return ExactScore(centres.to(self.device), self.data_std, self.diffusion)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the network before its weights arrive."""
        if self.image_shape is not None and self.network != "exact":
            self.configure_model()

    def _shape_of_data(self) -> list[int]:
        shape = list(rows_of(self._datamodule().train_set, [0]).x.shape[1:])
        if len(shape) != 3:
            raise ValueError(f"images must be (c, h, w), got {shape}: set flatten to false")
        return shape

    def default_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """AdamW as in the published training code."""
        return AdamW(parameters, lr=1e-4, weight_decay=0.0)

    # ------------------------------------------------------------------ training

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

    def _gathered(self, values: Tensor) -> Tensor:
        """Values ``(n,)`` of all ranks in the order of the global batch."""
        everywhere = self.all_gather(values)
        assert isinstance(everywhere, Tensor)
        return everywhere.flatten()

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
            self.timesteps.update(self._gathered(steps), self._gathered(losses))
        return self.objective(**{name: (part * weights).mean() for name, part in parts.items()})

    # ------------------------------------------------------------------ validation

    def on_validation_epoch_start(self) -> None:
        """Start counting samples."""
        self._seen = 0

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
