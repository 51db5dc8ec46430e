"""The Lightning side of very deep batch-normalised networks."""

import warnings
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torchmetrics import MeanMetric, MeanSquaredError, Metric
from torchmetrics.classification import MulticlassAccuracy

from lightning_modules.base import PaperModule
from lightning_modules.bngrad.diagnosis import check_batch, divergence_message, unpack
from lightning_modules.bngrad.initialisation import retract
from lightning_modules.bngrad.network import DeepBNMLP
from lightning_modules.components.sharding import shard_blocks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BNGrad", "ClassPrediction", "ValuePrediction"]


class ClassPrediction(NamedTuple):
    """Output of `predict_step` for classification: logits `(n, classes)` and class `(n,)`."""

    logits: Tensor
    label: Tensor


class ValuePrediction(NamedTuple):
    """Output of `predict_step` for regression: `(n,)`, or `(n, out_dim)` for several outputs."""

    value: Tensor


class BNGrad(PaperModule):
    """Plain network of tens to a thousand layers that trains without exploding gradients.

    Cross-entropy (or squared error) over a `DeepBNMLP`. Batches are `(x, y)`, or a dictionary with
    these keys: x float `(n, ...)`, y int64 `(n,)` classes or float values.

    Logs `train/loss`, `train/acc`, `val/acc`, `val/loss`, `test/acc` and `test/loss`; for
    regression `mse` in place of `acc`, and the monitored metric is then `val/mse`. Accuracy is
    correct over seen, over all samples and ranks.

    `gain_exponent` is a number that `callbacks.Curriculum` can move.

    Args:
        in_dim: Features of a sample, flattened; `None` asks the data for `n_features`.
        out_dim: Classes or outputs; `None` asks the data for `n_classes`, or is 1 for regression.
        depth: Number of hidden blocks.
        width: Features of each. Batches should have at least as many samples.
        activation: `identity`, `sin`, `tanh`, `selu`, `relu`, `leaky_relu` or `shaped_relu`.
        norm: `bn`, `bn_nocenter`, `ln`, `torch_bn` or `none`.
        center: Whether the norm subtracts the mean.
        scale: `sqrt_n`, or the constant norm of a feature.
        order: `norm_act` or `act_norm`.
        gain_exponent: Exponent k of the gains (l + 1)^-k in front of the activations.
        gains: One gain per block instead.
        learnable_gains: Whether gains are trained, from these values.
        init: `orthogonal`, `xavier_normal` or `kaiming`.
        bias: Whether linear maps have biases.
        eps: Added to the mean square in the norm.
        sync_stats: Whether batch statistics of `bn` and `bn_nocenter` are those of all devices.
        track_running_stats: Whether evaluation uses running statistics.
        momentum: Weight of the newest batch in them.
        refresh_batches: Number of training batches over which running statistics are averaged anew
            before each validation in `fit`; 0 keeps the exponential mean.
        retract_every: Number of batches after which hidden weights are put back on the orthogonal
            matrices; 0 for never.
        rescale_logits: Whether logits are multiplied by one over the last gain.
        skip: Factor of each block's input added to its output; 1 is a residual network.
        task: `classification` or `regression`.
        checkpoint_segments: Segments recomputed in the backward pass to save memory; 0 for none.
        compile_blocks: Whether each block is compiled (all share one graph).
        optimizer: Default plain SGD with learning rate 0.1.
        lr_scheduler: Default none.
        lr_interval: See `PaperModule`.
        loss_weights: Weight of the term `prediction` and of penalties.

    Raises:
        ValueError: For an argument out of range, at setup if the data do not say their sizes or
            contradict `in_dim` or `out_dim`, for labels out of range, and for input that is not
            finite.
        FloatingPointError: When the loss is not finite; names the layer of the largest gradient.
    """

    default_loss_weights: ClassVar[dict[str, float]] = {"prediction": 1.0}
    monitor: str = "val/acc"
    mode: Literal["min", "max"] = "max"

    network: DeepBNMLP

    def __init__(
        self,
        in_dim: int | None = None,
        out_dim: int | None = None,
        depth: int = 40,
        width: int = 64,
        activation: str = "sin",
        norm: str = "bn",
        center: bool = True,
        scale: float | Literal["sqrt_n"] = "sqrt_n",
        order: str = "norm_act",
        gain_exponent: float = 0.5,
        gains: list[float] | None = None,
        learnable_gains: bool = False,
        init: str = "orthogonal",
        bias: bool = True,
        eps: float = 0.0,
        sync_stats: bool = True,
        track_running_stats: bool = True,
        momentum: float = 0.1,
        refresh_batches: int = 0,
        retract_every: int = 0,
        rescale_logits: bool = False,
        skip: float = 0.0,
        task: Literal["classification", "regression"] = "classification",
        checkpoint_segments: int = 0,
        compile_blocks: bool = False,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["step", "epoch"] = "step",
        loss_weights: dict[str, float] | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval, loss_weights)
        if task not in ("classification", "regression"):
            raise ValueError(f"task must be classification or regression, got {task!r}")
        if refresh_batches < 0:
            raise ValueError(f"refresh_batches must be at least 0, got {refresh_batches}")
        if retract_every < 0:
            raise ValueError(f"retract_every must be at least 0, got {retract_every}")
        self.in_dim, self.out_dim = in_dim, out_dim
        self.retract_every = retract_every
        self.task, self.refresh_batches = task, refresh_batches
        self.compile_blocks = compile_blocks
        self.network_arguments: dict[str, Any] = {
            "depth": depth, "width": width, "activation": activation, "norm": norm,
            "center": center, "scale": scale, "order": order, "gain_exponent": gain_exponent,
            "gains": gains, "learnable_gains": learnable_gains, "init": init, "bias": bias,
            "eps": eps, "sync_stats": sync_stats and norm in ("bn", "bn_nocenter"),
            "track_running_stats": track_running_stats, "momentum": momentum,
            "rescale_logits": rescale_logits, "skip": skip,
            "checkpoint_segments": checkpoint_segments,
        }  # fmt: skip
        if task == "regression":
            self.monitor, self.mode = "val/mse", "min"
        self._checked: set[str] = set()
        self._probe: tuple[Tensor, Tensor] | None = None
        self._initial_signals: dict[str, Any] = {}
        if in_dim is not None and out_dim is not None:
            self._build(in_dim, out_dim)
        else:  # a check of the arguments that does not wait for the data
            cheap = {**self.network_arguments, "init": "kaiming" if init == "orthogonal" else init}
            with torch.device("meta"), warnings.catch_warnings(action="ignore"):
                DeepBNMLP(in_dim or 1, out_dim or 1, **cheap)

    # ------------------------------------------------------------------ building

    def _build(self, in_dim: int, out_dim: int) -> None:
        self.network = DeepBNMLP(in_dim, out_dim, **self.network_arguments)
        if self.compile_blocks:
            for block in self.network.blocks:
                block.compile()
        for stage in ("train", "val", "test"):
            score: Metric = (
                MeanSquaredError(num_outputs=out_dim)
                if self.task == "regression"
                else MulticlassAccuracy(max(out_dim, 2), average="micro")
            )
            # of training, so that an interrupted epoch resumes with what it had counted
            score.persistent(stage == "train")
            setattr(self, f"{stage}_score", score)
            if stage != "train":
                setattr(self, f"{stage}_loss", MeanMetric())

    @property
    def gain_exponent(self) -> float:
        """Exponent of the gains; set by a curriculum."""
        return float(self.network_arguments["gain_exponent"])

    @gain_exponent.setter
    def gain_exponent(self, value: float) -> None:
        if "network" in self._modules:
            self.network.gain_exponent = value
        self.network_arguments["gain_exponent"] = value

    def setup(self, stage: str) -> None:
        """Take sizes from the data where they were left open, and compare where they were not."""
        data = getattr(self.trainer, "datamodule", None)
        features, outputs = getattr(data, "n_features", None), getattr(data, "n_classes", None)
        if self.task == "regression":
            outputs = None
            if self.out_dim is None:
                self.set_hparam("out_dim", 1)
        for name, found, attribute in (
            ("in_dim", features, "n_features"), ("out_dim", outputs, "n_classes")
        ):  # fmt: skip
            given = getattr(self, name)
            if given is None and not isinstance(found, int):
                raise ValueError(
                    f"{name}=None needs data with the attribute {attribute}: give {name}"
                )
            if given is None:
                self.set_hparam(name, found)
            elif found is not None and (found > given if name == "out_dim" else found != given):
                raise ValueError(f"{name}={given}, but the data have {attribute}={found}")
        if "network" not in self._modules:
            assert self.in_dim is not None
            assert self.out_dim is not None
            self._build(self.in_dim, self.out_dim)

    def configure_model(self) -> None:
        """Shard the blocks under `ModelParallelStrategy`."""
        if self.retract_every and self.device_mesh is not None:
            raise ValueError("retract_every needs whole weights: use ddp, or set it to 0 for FSDP2")
        if "network" in self._modules:
            shard_blocks(self.network, self.device_mesh, "blocks.*")

    def default_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Plain SGD, as in the paper."""
        return SGD(parameters, lr=0.1)

    # ------------------------------------------------------------------ steps

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(n, out_dim)` of inputs `(n, ...)`."""
        logits: Tensor = self.network(x)
        return logits

    def _inputs_and_targets(self, batch: Any, stage: str) -> tuple[Tensor, Tensor]:
        x, y = unpack(batch)
        if y is None:
            raise ValueError("a batch needs x and y, got x alone")
        if stage not in self._checked:
            # reads values back from the device, so once per stage
            check_batch(x, y, self.network.out_dim, self.task)
            self._checked.add(stage)
        return x, y

    def _loss(self, logits: Tensor, y: Tensor) -> Tensor:
        if self.task == "regression":
            return F.mse_loss(logits.view_as(y), y.to(logits.dtype))
        return F.cross_entropy(logits, y)

    def probe_loss(self, batch: Any) -> Tensor:
        """Loss of a batch without logging; what `callbacks.SignalPropagation` differentiates."""
        x, y = self._inputs_and_targets(batch, "probe")
        return self._loss(self.network(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Mean loss of the batch."""
        x, y = self._inputs_and_targets(batch, "train")
        if self._probe is None:
            rows = slice(0, self.network.width)
            self._probe = (x[rows].detach().clone(), y[rows].clone())
        logits = self.network(x)
        loss = self._loss(logits, y)
        if not bool(torch.isfinite(loss)):
            raise FloatingPointError(divergence_message(self.network, float(loss), self.iteration))
        self._score("train", logits, y)
        return self.objective(prediction=loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Retract hidden weights, if asked for."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.retract_every and self.iteration % self.retract_every == 0:
            retract(self.network.linear_maps[:-1])

    def _score(self, stage: str, logits: Tensor, y: Tensor) -> None:
        score: Metric = getattr(self, f"{stage}_score")
        regression = self.task == "regression"
        logits = logits.detach().float()
        score.update(logits.view_as(y) if regression else logits, y)
        self.log(f"{stage}/{'mse' if regression else 'acc'}", score, on_step=False, on_epoch=True)

    def _evaluate(self, stage: str, batch: Any) -> None:
        x, y = self._inputs_and_targets(batch, stage)
        logits = self.network(x)
        mean: Metric = getattr(self, f"{stage}_loss")
        mean.update(self._loss(logits, y), weight=len(y))
        self.log(f"{stage}/loss", mean)
        self._score(stage, logits, y)

    def on_validation_start(self) -> None:
        """Average the running statistics anew, if asked for."""
        if not self.refresh_batches or self.trainer.state.fn != "fit":
            return
        if self.trainer.sanity_checking:
            return
        data = getattr(self.trainer, "datamodule", None)
        loader = data.train_dataloader() if data is not None else self.trainer.train_dataloader
        batches = islice(iter(loader), self.refresh_batches)  # type: ignore[arg-type]
        self.network.refresh_statistics(unpack(batch)[0].to(self.device) for batch in batches)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Count correct predictions."""
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Count correct predictions."""
        self._evaluate("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> ClassPrediction | ValuePrediction:
        """Logits and class, or values, of a batch `(x, y)`, `{"x": x}` or `x`."""
        logits = self.network(unpack(batch)[0])
        if self.task == "regression":
            return ValuePrediction(logits.squeeze(-1) if self.network.out_dim == 1 else logits)
        return ClassPrediction(logits, logits.argmax(-1))

    def write_predictions(self, predictions: list[Any], folder: Path) -> list[Path]:
        """Write `predictions.csv`: class, its probability and the logits, or the values."""
        import pandas as pd

        if not predictions:
            return []
        if self.task == "regression":
            values = (
                torch.cat([p.value for p in predictions])
                .float()
                .cpu()
                .view(-1, self.network.out_dim)
            )
            table = pd.DataFrame(
                values.numpy(), columns=[f"value_{i}" for i in range(values.shape[1])]
            )
        else:
            logits = torch.cat([p.logits for p in predictions]).float().cpu()
            table = pd.DataFrame(
                logits.numpy(), columns=[f"logit_{i}" for i in range(logits.shape[1])]
            )
            table.insert(0, "probability", logits.softmax(-1).amax(-1).numpy())
            table.insert(0, "label", logits.argmax(-1).numpy())
        path = folder / "predictions.csv"
        table.to_csv(path, index=False)
        return [path]

    # ------------------------------------------------------------------ figures

    def figures(self) -> "dict[str, Figure]":
        """Gap and gradient against depth: now, and at initialisation with and without gain."""
        if self._probe is None:
            return {}
        from lightning_modules.bngrad.figures import network_signals, propagation_figure

        x, y = self._probe
        if not self._initial_signals and not self.network_arguments["learnable_gains"]:
            assert self.in_dim is not None
            assert self.out_dim is not None
            own = {**self.network_arguments, "sync_stats": False}
            variants = {"initialisation": own}
            if bool((self.network.gains != 1).any()):
                variants = {
                    "initialisation, with gain": own,
                    "initialisation, without gain": {**own, "gain_exponent": 0.0, "gains": None},
                }
            for label, arguments in variants.items():
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    fresh = DeepBNMLP(self.in_dim, self.out_dim, **arguments).to(x.device, x.dtype)
                signals = network_signals(fresh, x, lambda out: self._loss(out, y))
                self._initial_signals[label] = signals
        now = network_signals(self.network, x, lambda out: self._loss(out, y))
        curves = {**self._initial_signals, "now": now}
        return {"signal_through_depth": propagation_figure(curves)}
