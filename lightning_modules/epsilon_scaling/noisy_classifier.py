"""The LightningModule that trains the classifier of noisy images which guides a sampler."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torchmetrics import MeanMetric

from lightning_modules.base import PaperModule
from lightning_modules.components.diffusion import (
    ADMClassifier,
    GaussianDiffusion,
    counter_normal,
    counter_uniform,
    load_adm_checkpoint,
)
from lightning_modules.components.randomness import global_seed, seed_from
from lightning_modules.components.sharding import shard_blocks
from lightning_modules.epsilon_scaling.batches import Images, rows_of
from lightning_modules.epsilon_scaling.checks import check_images, check_labels
from lightning_modules.epsilon_scaling.timestep_sampling import (
    UniformTimesteps,
    stratified_timesteps,
)


class ClassProbabilities(NamedTuple):
    """Result of `predict_step`.

    Attributes:
        probabilities: ``(n, classes)`` of the clean images, at timestep 0.
    """

    probabilities: Tensor


class NoisyClassifier(PaperModule):
    """Classifier p(y | x_t, t) for classifier guidance of a diffusion model.

    Cross entropy at noisy images, t drawn uniformly for each sample. Validation and test log
    ``loss``, ``acc`` and ``acc_q1`` to ``acc_q4`` (accuracy by quarter of the timesteps, the
    first the cleanest) with evenly spread timesteps and fixed noise. A checkpoint is what
    `EpsilonScaling` takes as `classifier_checkpoint`.

    Args:
        network_args: Constructor arguments of `ADMClassifier`; image size, channels and classes
            come from the data.
        checkpoint: Published ADM classifier to start from.
        image_shape: ``[c, h, w]``; asked of the data if None.
        num_classes: Number of labels; asked of the data if None.
        schedule: Noise schedule of the diffusion model that is guided.
        diffusion_steps: Its number T of steps.
        optimizer: Default AdamW, learning rate 3e-4, weight decay 0.05.
        lr_scheduler: Optional schedule of the learning rate.
        lr_interval: Whether the scheduler counts optimiser steps or epochs.
        loss_weights: Weight of ``cross_entropy``.

    Raises:
        ValueError: If an argument is out of range or does not fit the network.
    """

    monitor: str = "val/loss"
    mode: Literal["min", "max"] = "min"
    default_loss_weights: ClassVar[dict[str, float]] = {"cross_entropy": 1.0}

    def __init__(
        self,
        network_args: dict[str, Any] | None = None,
        checkpoint: str | None = None,
        image_shape: list[int] | None = None,
        num_classes: int | None = None,
        schedule: str = "linear",
        diffusion_steps: int = 1000,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["step", "epoch"] = "step",
        loss_weights: dict[str, float] | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval, loss_weights)
        if num_classes is not None and num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, got {num_classes}")
        self.network_args, self.checkpoint = network_args, checkpoint
        self.image_shape, self.num_classes = image_shape, num_classes
        self.diffusion = GaussianDiffusion.from_name(schedule, diffusion_steps)
        self.timesteps = UniformTimesteps(diffusion_steps)
        self.classifier: nn.Module | None = None
        self.metrics = nn.ModuleDict(
            {
                f"{stage}_{name}": MeanMetric()
                for stage in ("val", "test")
                for name in ("loss", "acc", "acc_q1", "acc_q2", "acc_q3", "acc_q4")
            }
        )
        self._seen = 0
        self._checked_stage = ""
        if image_shape is not None and num_classes is not None:
            self.configure_model()

    def configure_model(self) -> None:
        """Build the classifier once, and shard it under `ModelParallelStrategy`."""
        if self.classifier is not None:
            return
        if self.image_shape is None or self.num_classes is None:
            self._ask_data()
        assert self.image_shape is not None
        assert self.num_classes is not None
        arguments = {
            "image_size": self.image_shape[-1],
            "in_channels": self.image_shape[0],
            "out_channels": self.num_classes,
        }
        try:
            classifier = ADMClassifier(**{**arguments, **(self.network_args or {})})
        except TypeError as error:
            raise ValueError(f"network_args: {error}") from error
        if self.checkpoint:
            load_adm_checkpoint(self.checkpoint, classifier)
        shard_blocks(classifier, self.device_mesh, ["input_blocks.*", "middle_block"])
        self.classifier = classifier

    def _ask_data(self) -> None:
        data = getattr(self.trainer, "datamodule", None)
        if data is None or getattr(data, "train_set", None) is None:
            raise ValueError("give image_shape and num_classes, or a datamodule")
        if self.image_shape is None:
            self.set_hparam("image_shape", list(rows_of(data.train_set, [0]).x.shape[1:]))
        if self.num_classes is None:
            classes = getattr(data, "n_classes", None)
            if classes is None:
                raise ValueError("the data do not say how many classes they have: give num_classes")
            self.set_hparam("num_classes", int(classes))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the classifier before its weights arrive."""
        if self.image_shape is not None and self.num_classes is not None:
            self.configure_model()

    def default_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """AdamW as for the published classifiers."""
        return AdamW(parameters, lr=3e-4, weight_decay=0.05)

    # ------------------------------------------------------------------ steps

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        """Logits ``(n, classes)`` of noisy images ``(n, c, h, w)``."""
        assert self.classifier is not None, "the network is built by configure_model"
        logits: Tensor = self.classifier(x, timesteps)
        return logits

    def _labels(self, batch: Images, stage: str) -> Tensor:
        labels = getattr(batch, "y", None)
        if labels is None:
            raise ValueError("a classifier needs labels, but the batch has no y")
        if self._checked_stage != stage:  # reads values: not in every step
            check_images(batch.x)
            check_labels(labels, self.num_classes or 0)
            self._checked_stage = stage
        assert isinstance(labels, Tensor)
        return labels

    def training_step(self, batch: Images, batch_idx: int) -> Tensor:
        """Cross entropy at noise that belongs to the sample's place in the global batch."""
        x0, labels = batch.x, self._labels(batch, "train")
        count = len(x0)
        positions = torch.arange(count) + count * self.global_rank
        key = seed_from(global_seed(), "classifier", self.iteration)
        steps, _ = self.timesteps.draw(counter_uniform(seed_from(key, "t"), positions))
        logits = self._noisy_logits(x0, steps, positions, seed_from(key, "noise"))
        return self.objective(cross_entropy=functional.cross_entropy(logits, labels))

    def _noisy_logits(self, x0: Tensor, steps: Tensor, positions: Tensor, key: int) -> Tensor:
        noise = counter_normal(key, positions.to(x0.device), x0.shape[1:]).to(x0)
        steps = steps.to(x0.device)
        logits: Tensor = self(self.diffusion.q_sample(x0, steps, noise), steps)
        return logits

    def _evaluate(self, batch: Images, stage: Literal["val", "test"]) -> None:
        x0, labels = batch.x, self._labels(batch, stage)
        places = torch.arange(self._seen, self._seen + len(x0))
        positions = places * self.trainer.world_size + self.global_rank
        self._seen += len(x0)
        steps = stratified_timesteps(positions, self.diffusion.steps)
        logits = self._noisy_logits(x0, steps, positions, seed_from("validation", "classifier"))
        right = (logits.argmax(1) == labels).float()
        quarters = (steps * 4 // self.diffusion.steps).to(right.device)
        values = {"loss": functional.cross_entropy(logits, labels, reduction="none"), "acc": right}
        values |= {f"acc_q{each + 1}": right[quarters == each] for each in range(4)}
        for name, value in values.items():
            metric = self.metrics[f"{stage}_{name}"]
            assert isinstance(metric, MeanMetric)
            if len(value):
                metric.update(value)
            self.log(f"{stage}/{name}", metric, batch_size=len(x0))

    def on_validation_epoch_start(self) -> None:
        """Start counting samples."""
        self._seen = 0

    def validation_step(self, batch: Images, batch_idx: int) -> None:
        """Loss and accuracy at fixed noise."""
        self._evaluate(batch, "val")

    def on_test_epoch_start(self) -> None:
        """Start counting samples."""
        self._seen = 0

    def test_step(self, batch: Images, batch_idx: int) -> None:
        """Loss and accuracy at fixed noise."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Images, batch_idx: int) -> ClassProbabilities:
        """Class probabilities of the images as they are."""
        check_images(batch.x)
        steps = torch.zeros(len(batch.x), dtype=torch.int64, device=batch.x.device)
        return ClassProbabilities(self(batch.x, steps).softmax(1))


def guiding_classifier(
    path: str, arguments: dict[str, Any] | None, diffusion: GaussianDiffusion
) -> nn.Module:
    """Classifier of a checkpoint.

    Args:
        path: Published state dict, or a checkpoint of `NoisyClassifier`.
        arguments: Constructor arguments of a published `ADMClassifier`; None for one of
            `NoisyClassifier`, which knows its own.
        diffusion: The process that it shall guide.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file does not fit, or it was trained on another noise schedule.
    """
    if arguments:
        return load_adm_checkpoint(path, ADMClassifier(**arguments))
    if not Path(path).is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    saved = torch.load(path, map_location="cpu", weights_only=True)
    own = saved.get("hyper_parameters", {}).get("_class_path", "")
    if not own.endswith(f".{NoisyClassifier.__name__}"):
        raise ValueError(
            f"{path} is no checkpoint of NoisyClassifier: a published classifier needs "
            "classifier_args"
        )
    trained = NoisyClassifier.load_from_checkpoint(path, map_location="cpu")
    if not torch.equal(trained.diffusion.betas, diffusion.betas):
        raise ValueError(
            f"{path} was trained on another noise schedule: its schedule and diffusion_steps "
            "must be those of the diffusion model"
        )
    assert trained.classifier is not None
    return trained.classifier
