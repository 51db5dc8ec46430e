"""The half of the LightningModule that draws samples: test, prediction, figures."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_modules.base import PaperModule
from lightning_modules.components.diffusion import (
    AncestralSampler,
    DDIMSampler,
    GaussianDiffusion,
    classifier_free,
    classifier_gradient,
    counter_normal,
)
from lightning_modules.components.randomness import seed_from
from lightning_modules.epsilon_scaling.baselines import analytic_log_variances, noise_energy
from lightning_modules.epsilon_scaling.batches import Images, ImagesInMemory, rows_of
from lightning_modules.epsilon_scaling.checks import check_images, check_labels
from lightning_modules.epsilon_scaling.exposure_bias import ExposureBias, measure_exposure_bias
from lightning_modules.epsilon_scaling.features import FEATURES, ClassifierFeatures, build_features
from lightning_modules.epsilon_scaling.generation import PositionNoise, SamplerSettings, generate
from lightning_modules.epsilon_scaling.lambda_search import golden_section_search, grid_search
from lightning_modules.epsilon_scaling.noisy_classifier import guiding_classifier
from lightning_modules.epsilon_scaling.pictures import (
    grid_figure,
    shown_in_figure,
    to_uint8,
    write_samples,
)
from lightning_modules.epsilon_scaling.quality import (
    FeatureRows,
    quality,
    read_reference,
    reference_distance,
)
from lightning_modules.epsilon_scaling.sample_metrics import inception_score
from lightning_modules.epsilon_scaling.schedule import EpsilonSchedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Samples(NamedTuple):
    """Result of `predict_step`.

    Attributes:
        images: uint8 ``(n, h, w, c)``.
        labels: int64 ``(n,)``, or None for an unconditional model.
    """

    images: Tensor
    labels: Tensor | None


class SamplesImages(PaperModule):
    """Draws samples with scaled noise; `EpsilonScaling` adds the arguments and the training."""

    image_shape: list[int] | None
    num_classes: int | None
    prediction: str
    guidance: str
    guidance_scale: float
    classifier_args: dict[str, Any] | None
    classifier_checkpoint: str | None
    analytic_variance: bool
    epsilon_scale: float
    epsilon_slope: float
    epsilon_list: list[float] | None
    skip_first: int
    compare: list[float]
    sample_seed: int
    samples_per_image: int
    feature_network: str
    reference: str
    preview_samples: int
    settings: SamplerSettings
    diffusion: GaussianDiffusion
    denoiser: nn.Module | None
    reference_rows: FeatureRows
    sample_rows: nn.ModuleList
    _hidden: dict[str, Any]
    _seen: int
    _checked_stage: str

    # ------------------------------------------------------------------ sampling

    def _datamodule(self) -> Any:
        data = getattr(self.trainer, "datamodule", None)
        if data is None or getattr(data, "train_set", None) is None:
            raise ValueError("the images of data.train_set are needed; give a datamodule")
        return data

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

    def _labels(self, batch: Images) -> Tensor | None:
        if self.num_classes is None:
            return None
        labels = getattr(batch, "y", None)
        if labels is None:
            raise ValueError(
                "num_classes is set, but the batch has no labels y; give labels or drop it"
            )
        assert isinstance(labels, Tensor)
        return labels

    def _check_once(self, batch: Images, stage: str) -> None:
        if self._checked_stage == stage:
            return
        check_images(batch.x)
        if self.image_shape is not None and list(batch.x.shape[1:]) != list(self.image_shape):
            raise ValueError(
                f"images of shape {list(batch.x.shape[1:])} for a model of {list(self.image_shape)}"
            )
        labels = self._labels(batch)
        if labels is not None and self.num_classes is not None:
            # Reads values, which would make an accelerator wait: not in every step.
            check_labels(labels, self.num_classes)
        self._checked_stage = stage

    def _positions(self, count: int) -> Tensor:
        """Places ``(count,)`` in the data set of this rank's next samples."""
        world = self.trainer.world_size
        places = (torch.arange(self._seen, self._seen + count)) * world + self.global_rank
        self._seen += count
        return places

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
        # Its weights take part in a gradient, which tensors made in inference mode cannot.
        with torch.inference_mode(False):
            if "classifier" not in self._hidden:
                classifier = guiding_classifier(
                    str(self.classifier_checkpoint), self.classifier_args, self.diffusion
                )
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
            batch = rows_of(self._datamodule().train_set, list(range(self._count(256))))
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
        features = build_features(self.feature_network, data.train_set)
        folder = self.trainer.log_dir
        if folder and self.trainer.is_global_zero:
            Path(folder).mkdir(parents=True, exist_ok=True)
            torch.save(features.state_dict(), Path(folder) / f"features_{self._feature_name}.pt")
        self._hidden["features"] = features.to(self.device).eval().requires_grad_(False)
        if self.reference in ("train", "test"):
            images = data.train_set if self.reference == "train" else data.test_set
        else:
            given = read_reference(self.reference)
            if isinstance(given, tuple):
                self._hidden["reference"] = given
                return
            images = ImagesInMemory(given)
        rank, world = self.trainer.global_rank, self.trainer.world_size
        places = list(range(rank, len(images), world))
        self.reference_rows.reset()
        for start in range(0, len(places), 512):
            batch = rows_of(images, places[start : start + 512])
            self.reference_rows.update(self.features(batch.x.to(self.device)))
        self._hidden["reference"] = self.reference_rows.compute()

    @property
    def _feature_name(self) -> str:
        folder, _, name = self.feature_network.rpartition(".")
        # an own class that is called Inception must not be reported as "fid"
        return f"own_{name.lower()}" if folder and name.lower() in FEATURES else name.lower()

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
            self._hidden["grids"].setdefault(schedule.describe(), shown_in_figure(images))

    def on_test_epoch_end(self) -> None:
        """Log the distances of every schedule."""
        for place, schedule in enumerate(self.test_schedules):
            rows = self.sample_rows[place]
            assert isinstance(rows, FeatureRows)
            suffix = f"@{schedule.describe()}" if place else ""
            generated = rows.compute()
            values = quality(self._hidden["reference"], generated, self._feature_name)
            features = self._hidden["features"]
            if isinstance(features, ClassifierFeatures):
                values[f"is_{self._feature_name}"] = inception_score(
                    features.probabilities(generated)
                )
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
        for chunk in torch.split(places, 512):
            labels = None
            if self.num_classes is not None:
                labels = (chunk % self.num_classes).to(self.device)
            rows.update(self.features(self.sample(chunk, labels, schedule, "search")))
        return reference_distance(self._hidden["reference"], rows.compute(), self._feature_name)

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

        A guiding classifier is left out.

        Args:
            x0: Images.
            labels: Their labels ``(n,)``; read by class-conditional models only, which take the
                classes in turn without them.

        Raises:
            ValueError: If the sampler works on noise levels.
        """
        if self.settings.is_edm:
            raise ValueError("exposure bias is measured with sampler 'ddim' or 'ancestral'")
        if self.num_classes is None:
            labels = None
        elif labels is None:
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
        self._check_once(batch, "predict")
        positions, labels = self._repeated(batch)
        images = to_uint8(self.sample(positions, labels))
        return Samples(images.cpu(), None if labels is None else labels.cpu())

    def write_predictions(self, predictions: list[Samples], folder: Path) -> list[Path]:
        """Write ``samples.npz`` and a grid of the first 256 as ``samples.png``."""
        labels = [each.labels for each in predictions if each.labels is not None]
        return write_samples(
            folder,
            torch.cat([each.images for each in predictions]),
            torch.cat(labels) if labels else None,
        )

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
        return {
            f"samples_{name}": grid_figure(grid, f"epsilon scale {name}")
            for name, grid in grids.items()
        }
