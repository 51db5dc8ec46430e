"""Differential privacy for any module: clipped gradients, correlated noise, calibrated sigma."""

import math
import os
import secrets
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from callbacks._private_plan import account, calibrated, make_plan
from callbacks._private_step import (
    Clipper,
    check_module,
    check_trainer,
    flatten,
    write_gradients,
)
from lightning_modules.components.privacy.accountants import Accountant
from lightning_modules.components.privacy.amplification import PoissonAccountant, Tail
from lightning_modules.components.privacy.noise import NoiseStream, WhiteNoise
from lightning_modules.components.privacy.strategies import Identity, parse_strategy
from lightning_modules.components.privacy.strategy import Strategy

__all__ = ["PrivacySpent", "PrivateGradients"]

Sampling = Literal[
    "poisson", "cyclic_poisson", "fixed_order", "balls_in_bins", "shuffle", "sequential"
]


class PrivacySpent(NamedTuple):
    """Guarantee of what was released so far.

    Attributes:
        epsilon: the first ``step`` steps are (epsilon, delta)-DP.
        delta: failure probability.
        step: optimiser steps taken.
        steps: planned steps, for which the noise was calibrated.
    """

    epsilon: float
    delta: float
    step: int
    steps: int


class PrivateGradients(Callback):
    """Makes training differentially private by replacing ``.grad`` before every optimiser step.

    The step sees ``(sum of clipped per-example gradients + sigma * clip_norm * (C^-1 Z)_t) /
    expected batch size``; what the optimiser, its momentum and its schedule do with it is
    post-processing. The module, the loop and the strategy stay the user's own, so this works for
    any module with one optimiser, automatic or manual, in one process, under DDP and under FSDP2.

    Guarantee: with respect to zeroing out one training example, with the batches of ``sampling``
    and every step's noisy gradient released, training is (epsilon, delta)-DP.

    How examples' gradients are found (``clipping``):

    - ``ghost``: from the layers' inputs and output gradients of the ordinary backward pass. Takes
      any ``training_step`` that returns the mean over examples of a loss in which examples do not
      mix; layers: linear, convolution, embedding, layer and group norm. In one process the first
      batch checks that the layers account for the whole gradient and, with automatic
      optimisation, that examples do not mix.
    - ``vmap``: ``torch.func`` on ``example_losses(batch) -> (batch,)`` of the module, or without
      that on ``training_step`` of batches of one. Any layer without state.
    - ``auto``: ghost if every trainable layer has a rule, else vmap.

    Args:
        clip_norm: bound on the L2 norm of every example's gradient.
        target_epsilon: the noise is calibrated to reach it at the end of training.
        noise_multiplier: instead of ``target_epsilon``: white noise deviation, in clip norms,
            before C^-1.
        delta: failure probability; default 1 / (10 * number of training examples).
        strategy: strategy matrix C: an object, or in words such as ``identity`` (DP-SGD),
            ``square_root(bands=4)``, ``nu(nu=0.05, bands=64)``, ``optimised_blt(buffers=3)`` or
            ``tree``; see ``lightning_modules.components.privacy.STRATEGIES``.
        sampling: how the datamodule draws batches; must agree with it.
        tail: bounds of the Poisson accountant, see ``PoissonAccountant``.
        delta1: part of delta that the Poisson accountant spends on them; default half.
        clipping: see above.
        loss_reduction: of ``training_step`` over the local batch, for ``ghost``. A wrong value
            makes the length at which gradients are clipped depend on the size of the batch.
        chunk_size: examples at once for ``vmap``.
        noise_seed: fixes the noise; only with ``allow_deterministic_noise``. Default: a fresh
            secret seed for every run, kept in the checkpoint so that a resumed run continues it.
        allow_deterministic_noise: states that reproducibility matters more here than privacy.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        clip_norm: float = 1.0,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        delta: float | None = None,
        strategy: Strategy | str | None = None,
        sampling: Sampling = "poisson",
        tail: Tail = "paper",
        delta1: float | None = None,
        clipping: Literal["auto", "ghost", "vmap"] = "auto",
        loss_reduction: Literal["mean", "sum"] = "mean",
        chunk_size: int | None = None,
        noise_seed: int | None = None,
        allow_deterministic_noise: bool = False,
    ) -> None:
        super().__init__()
        if not (clip_norm > 0 and math.isfinite(clip_norm)):
            raise ValueError(f"clip_norm must be positive and finite, got {clip_norm}")
        if (target_epsilon is None) == (noise_multiplier is None):
            raise ValueError(
                f"give exactly one of target_epsilon (got {target_epsilon}) and "
                f"noise_multiplier (got {noise_multiplier})"
            )
        if target_epsilon is not None and not (
            target_epsilon > 0 and math.isfinite(target_epsilon)
        ):
            raise ValueError(f"target_epsilon must be positive and finite, got {target_epsilon}")
        if noise_multiplier is not None and not (
            noise_multiplier > 0 and math.isfinite(noise_multiplier)
        ):
            raise ValueError(
                f"noise_multiplier must be positive and finite, got {noise_multiplier}"
            )
        if delta is not None and not 0.0 < delta < 1.0:
            raise ValueError(f"delta must be in (0, 1), got {delta}")
        if delta1 is not None and not 0.0 < delta1 < (delta or 1.0):
            raise ValueError(f"delta1 must be in (0, delta={delta}), got {delta1}")
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        for name, value, allowed in (
            ("sampling", sampling, Sampling.__args__),  # type: ignore[attr-defined]
            ("tail", tail, ("paper", "joint", "conservative")),
            ("clipping", clipping, ("auto", "ghost", "vmap")),
            ("loss_reduction", loss_reduction, ("mean", "sum")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        if noise_seed is not None and not allow_deterministic_noise:
            raise ValueError(
                "a fixed noise_seed lets two runs on neighbouring data cancel the noise: set "
                "allow_deterministic_noise=true if reproducibility matters more than privacy"
            )
        self.clip_norm = clip_norm
        self.target_epsilon = target_epsilon
        self.noise_multiplier = noise_multiplier
        self.delta = delta
        self.strategy = _strategy(strategy)
        self.sampling = sampling
        self.tail = tail
        self.delta1 = delta1
        self.clipping = clipping
        self.loss_reduction = loss_reduction
        self.chunk_size = chunk_size
        self.noise_seed = noise_seed
        self.accountant: Accountant | None = None
        self.sigma = noise_multiplier
        self._restored: dict[str, Any] | None = None
        self._plan: dict[str, Any] | None = None
        self._noise: NoiseStream | None = None
        self._clipper: Clipper | None = None
        self._batch: Any = None
        self._parameters: dict[str, Tensor] = {}

    # ------------------------------------------------------------------ before training

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse settings of the trainer that break the guarantee."""
        if stage == "fit":
            check_trainer(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan the run, calibrate the noise, continue what a checkpoint holds."""
        check_module(pl_module)
        if len(trainer.optimizers) != 1:
            raise MisconfigurationException(
                f"PrivateGradients adds one stream of noise to one optimiser, the module has "
                f"{len(trainer.optimizers)}: put all parameters into one optimiser with groups"
            )
        chosen = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
        self._parameters = {n: p for n, p in pl_module.named_parameters() if id(p) in chosen}
        if len(self._parameters) < len(chosen):
            raise MisconfigurationException(
                f"{len(chosen) - len(self._parameters)} parameters of the optimiser are not "
                "parameters of the module, so their gradients would stay as they are: assign "
                "them to the module"
            )
        frozen = [name for name, p in self._parameters.items() if not p.requires_grad]
        if frozen:
            raise MisconfigurationException(
                f"parameter {frozen[0]} is frozen but in the optimiser: leave frozen parameters "
                "out of it, they cannot be added later"
            )
        plan = make_plan(
            trainer,
            self.strategy,
            size=sum(p.numel() for p in self._parameters.values()),
            sampling=self.sampling,
            delta=self.delta,
            clip_norm=self.clip_norm,
            tail=self.tail,
            delta1=self.delta1,
        )
        restored = self._restored
        if restored is not None:
            self._check_same(restored["plan"], plan)
            old, self.sigma = restored["plan"], float(restored["sigma"])
            plan["seed"], plan["secret"] = old["seed"], old["secret"]
        elif self._plan is not None:
            self._check_same(self._plan, plan)
            plan["seed"], plan["secret"] = self._plan["seed"], self._plan["secret"]
        else:
            seed = secrets.randbits(62) if self.noise_seed is None else self.noise_seed
            plan["seed"] = int(trainer.strategy.broadcast(seed))
            # Amplification needs a secret choice of batches, and data.seed stands in a config.
            plan["secret"] = plan["seed"] if self.noise_seed is None else None
            if self.noise_seed is not None:
                rank_zero_warn(
                    "noise_seed is fixed: the noise can be computed by anyone who knows it, so "
                    "treat the result as not private"
                )
        self.delta = plan["delta"]
        self._calibrate(trainer, plan)
        assert self.sigma is not None
        self.accountant = account(plan, self.strategy, self.sigma)
        order: Any = trainer.train_dataloader.order  # type: ignore[union-attr]
        if self.sampling in ("poisson", "cyclic_poisson"):
            order.secret = plan["secret"]
        if self.sampling == "cyclic_poisson":
            order.groups = plan["groups"]
        if self._noise is None or restored is not None:
            white = WhiteNoise(plan["size"], plan["seed"], device=pl_module.device)
            self._noise = NoiseStream(self.strategy.correlator(plan["n"]), white)
            if restored is not None:
                self._noise.load_state_dict(restored["noise"])
        if not 0 <= self._noise.time - trainer.global_step <= 1 and self._noise.time < plan["n"]:
            raise MisconfigurationException(
                f"the noise has taken {self._noise.time} steps, the trainer {trainer.global_step}: "
                "resume with the checkpoint of the private run (ckpt_path), or start anew with a "
                "new PrivateGradients and weights of public data"
            )
        self._plan, self._restored = plan, None
        self._clipper = Clipper(
            pl_module,
            list(self._parameters),
            self.clipping,
            self.clip_norm,
            self.loss_reduction,
            self.chunk_size,
        )
        rank_zero_info(self.statement())
        if os.environ.get("WANDB_SWEEP_ID"):
            rank_zero_warn(
                "this run belongs to a sweep: every run of it uses the data, and the epsilon "
                "logged here covers this run alone"
            )

    def _check_same(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        for name, value in new.items():
            if name in old and old[name] != value:
                raise MisconfigurationException(
                    f"the privacy budget was planned with {name}={old[name]}, this run has "
                    f"{value}: continue with the same setting, or start a new run and add up its "
                    "epsilon"
                )
        if self.noise_seed is not None and old["seed"] != self.noise_seed:
            raise MisconfigurationException(
                f"noise_seed={self.noise_seed} differs from the seed in the checkpoint: resume "
                "with the same seed, or without one"
            )
        for name in ("target_epsilon", "noise_multiplier"):
            ours = getattr(self, name)
            if self._restored is not None and self._restored[name] != ours:
                raise MisconfigurationException(
                    f"{name}={ours} differs from {self._restored[name]} in the checkpoint: resume "
                    "with the same value"
                )

    def _calibrate(self, trainer: Trainer, plan: dict[str, Any]) -> None:
        """Sigma from the target, found on one rank and told to the others."""
        if self.sigma is None:
            assert self.target_epsilon is not None
            sigma = 0.0
            if trainer.is_global_zero:
                sigma = calibrated(plan, self.strategy, self.target_epsilon)
            self.sigma = float(trainer.strategy.broadcast(sigma))

    # ------------------------------------------------------------------ training

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch, record the layers."""
        assert self._noise is not None
        assert self._clipper is not None
        assert self._plan is not None
        if self._noise.time >= self._plan["n"]:
            raise MisconfigurationException(
                f"the privacy budget was planned for {self._plan['n']} steps and is spent: plan "
                "more steps (trainer.max_epochs or max_steps) before training"
            )
        self._batch = batch
        self._clipper.start()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Replace every gradient by the clipped, summed, noisy one."""
        assert self._noise is not None
        assert self._clipper is not None
        assert self._plan is not None
        assert self.sigma is not None
        if self._batch is None:
            raise MisconfigurationException(
                "the optimiser stepped twice on one batch: each batch pays for one step"
            )
        ours = {id(p) for p in self._parameters.values()}
        if any(id(p) not in ours for group in optimizer.param_groups for p in group["params"]):
            raise MisconfigurationException(
                "the optimiser was given further parameters after training started: noise was "
                "planned without them; unfreeze them before, in a run of its own"
            )
        clipped = self._clipper.clip(self._batch, trainer)
        self._batch = None
        vector = flatten(clipped, list(self._parameters))
        if trainer.world_size > 1:
            torch.distributed.all_reduce(vector)
        totals, count = vector[:-3], vector[-3:]
        # Every rank adds the same noise after the sum: averaging it over ranks would shrink it.
        self._noise.white.scatter_add(totals, self._noise.step(), self.sigma * self.clip_norm)
        totals /= self._plan["expected"]
        write_gradients(totals, self._parameters)
        examples = count[0].clamp_min(1.0)
        pl_module.log("privacy/clipped_fraction", count[1] / examples, batch_size=1)
        pl_module.log("privacy/nonfinite", count[2], reduce_fx="sum", batch_size=1)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Every batch must have paid for exactly one step."""
        if self._batch is not None:
            raise MisconfigurationException(
                "a batch passed without an optimiser step (training_step returned None, or manual "
                "optimisation skipped it): private training steps on every batch, empty ones too"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the hooks off the module."""
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Take the hooks off the module."""
        self._close()

    def _close(self) -> None:
        if self._clipper is not None:
            self._clipper.close()
            self._clipper = None
        self._batch = None

    # ------------------------------------------------------------------ what was spent

    def privacy_spent(self, ahead: int = 0) -> PrivacySpent:
        """Guarantee of the steps taken so far, or after ``ahead`` further ones.

        Raises:
            RuntimeError: training has not started.
        """
        if self.accountant is None or self._noise is None:
            raise RuntimeError("the privacy budget is known once training has started")
        step = min(self._noise.time + ahead, self.accountant.n)
        epsilon = self.accountant.epsilon(step)
        return PrivacySpent(epsilon, self.accountant.delta, step, self.accountant.n)

    def statement(self) -> str:
        """The guarantee of the whole run in one sentence."""
        assert self.accountant is not None
        assert self._plan is not None
        text = (
            f"privacy: ({self.accountant.epsilon():.4g}, {self.accountant.delta:.3g})-DP after "
            f"{self._plan['n']} steps for zeroing out one of {self._plan['examples']} examples, "
            f"sampling {self.sampling}, all noisy gradients released; strategy "
            f"{type(self.strategy).__name__}, sigma {self.sigma:.4g}, clip norm {self.clip_norm:g}"
        )
        if isinstance(self.accountant, PoissonAccountant) and self.accountant.delta1:
            text += f" (delta_1 = {self.accountant.delta1:.3g} pays for conditioning)"
        return text

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Plan, sigma, seed and the buffers of the noise: a resumed run continues the stream."""
        if self._restored is not None:
            return self._restored
        if self._noise is None:
            return {}
        return {
            "plan": self._plan,
            "sigma": self.sigma,
            "target_epsilon": self.target_epsilon,
            "noise_multiplier": self.noise_multiplier,
            "noise": self._noise.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the state until training starts and it can be compared with the settings."""
        self._restored = dict(state_dict) if state_dict else None


def _strategy(given: Strategy | str | None) -> Strategy:
    if given is None:
        return Identity()
    return given if isinstance(given, Strategy) else parse_strategy(given)
