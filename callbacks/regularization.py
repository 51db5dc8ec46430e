"""Penalties on parameters, as further terms of the objective."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from callbacks.base import HasLossWeights, HasPenalties
from lightning_modules.components.sharding import full, full_sum

__all__ = [
    "ParameterPenalty",
    "Regularization",
    "group_lasso",
    "l1",
    "l2",
    "orthogonality",
    "spectral_norm",
]

Kind = Literal["l1", "l2", "group_lasso", "orthogonality", "spectral_norm"]


def _wide(x: Tensor) -> Tensor:
    # Sums over a million bfloat16 entries stop growing early.
    return x if x.dtype == torch.float64 else x.float()


def l1(parameter: Tensor) -> Tensor:
    """Sum of absolute values; a 0-d tensor in float32 (float64 for float64)."""
    return full_sum(parameter, lambda x: _wide(x).abs())


def l2(parameter: Tensor) -> Tensor:
    """Sum of squares, without the factor 1/2 of weight decay."""
    return full_sum(parameter, lambda x: _wide(x).square())


def group_lasso(parameter: Tensor, dim: int = 0) -> Tensor:
    """Group lasso of Yuan and Lin (2006): ``sum_g sqrt(|g|) ||w_g||_2``.

    Args:
        parameter: any shape.
        dim: one group per index of this dimension. 0, the default, makes the weights into one
            output unit (or the filter of one channel) a group, so that whole units vanish.

    Returns:
        0-d tensor. Its gradient at a group that is all zero is zero.
    """
    groups = _wide(full(parameter)).movedim(dim, 0).reshape(parameter.shape[dim], -1)
    norms: Tensor = torch.linalg.vector_norm(groups, dim=1)
    size: float = groups.shape[1]
    return norms.sum() * math.sqrt(size)


def orthogonality(parameter: Tensor) -> Tensor:
    """Squared Frobenius distance of the rows from orthonormality, ``||W W^T - I||_F^2``.

    Dimensions after the first are flattened, as for the filters of a convolution. A matrix of m
    rows and n < m columns cannot have orthonormal rows; its minimum, m - n, is at orthonormal
    columns.

    Args:
        parameter: (rows, ...).

    Returns:
        0-d tensor.
    """
    matrix = _wide(full(parameter)).flatten(1)
    rows, columns = matrix.shape
    # ||W W^T - I_m||^2 - ||W^T W - I_n||^2 = m - n, so the smaller Gram matrix is enough.
    gram = matrix @ matrix.T if rows <= columns else matrix.T @ matrix
    eye = torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
    distance: Tensor = (gram - eye).square().sum()
    return distance + max(rows - columns, 0)


def spectral_norm(parameter: Tensor) -> Tensor:
    """Largest singular value of the matrix with the dimensions after the first flattened.

    Exact, by a singular value decomposition of every matrix in every step.
    """
    norm: Tensor = torch.linalg.matrix_norm(_wide(full(parameter)).flatten(1), ord=2)
    return norm


_PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "l1": l1,
    "l2": l2,
    "group_lasso": group_lasso,
    "orthogonality": orthogonality,
    "spectral_norm": spectral_norm,
}
_NEEDS_MATRICES = ("group_lasso", "orthogonality", "spectral_norm")


@dataclass(frozen=True)
class ParameterPenalty:
    """Sum of one penalty over the trainable parameters whose names match.

    It keeps names and not parameters, so it can be pickled with the module, and goes on to work
    when parameters are sharded, frozen or replaced.

    Args:
        kind: which penalty.
        include: patterns (``*`` matches anything, dots too); a parameter needs one that matches.
        exclude: patterns of parameters that are left out all the same.

    Raises:
        ValueError: for an unknown kind; when called, if no trainable parameter matches.
    """

    kind: Kind
    include: tuple[str, ...] = ("*.weight",)
    exclude: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.kind not in _PENALTIES:
            raise ValueError(f"kind must be one of {', '.join(_PENALTIES)}, got {self.kind!r}")

    def select(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters of ``module`` that the penalty is on, by name."""
        chosen = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
            and any(fnmatchcase(name, pattern) for pattern in self.include)
            and not any(fnmatchcase(name, pattern) for pattern in self.exclude)
            and (parameter.ndim > 1 or self.kind not in _NEEDS_MATRICES)
        }
        if not chosen:
            names = [name for name, p in module.named_parameters() if p.requires_grad]
            what = "matrix among the trainable" if self.kind in _NEEDS_MATRICES else "trainable"
            listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise ValueError(
                f"no {what} parameters matches {list(self.include)} "
                f"(without {list(self.exclude)}) for kind={self.kind!r}; there are: {listed}"
            )
        return chosen

    def __call__(self, module: nn.Module) -> Tensor:
        """Return the sum, a 0-d tensor in float32 (float64 for float64 parameters)."""
        penalty = _PENALTIES[self.kind]
        parameters = self.select(module)
        device = next(iter(parameters.values())).device
        with torch.autocast(device.type, enabled=False):
            terms = [penalty(parameter) for parameter in parameters.values()]
            return torch.stack(terms).sum()


class Regularization(Callback):
    """Adds ``weight * penalty`` on chosen parameters to the objective of the method.

    It is a term of the objective, not an edit of gradients: so it is logged (``train/<name>``),
    its strength does not depend on gradient accumulation, loss scaling or the number of devices,
    and its coefficient is ``loss_weights[name]``, which `Curriculum` can move.

    Args:
        kind: ``l1`` (sum of absolute values), ``l2`` (sum of squares), ``group_lasso`` (whole
            output units vanish together), ``orthogonality`` (``||W W^T - I||_F^2``) or
            ``spectral_norm`` (largest singular value). The last three are on matrices only
            (dimensions after the first flattened) and pass over vectors that match.
        weight: coefficient of the term, at least 0.
        parameters: name patterns of the parameters (``*`` matches anything, dots too).
        exclude: name patterns of parameters to leave out.
        name: name of the term; ``kind`` by default. Two instances need two names.

    Example:
        ::

            trainer:
              callbacks:
                - class_path: callbacks.Regularization
                  init_args:
                    kind: orthogonality
                    weight: 0.001
                    parameters: ["network.layers.*.weight"]

    Raises:
        ValueError: for an unknown kind, a negative weight or no patterns; at the start of ``fit``
            for patterns that match no trainable parameter; after the first batch for a method that
            does not build its loss with ``objective`` (a warning under manual optimisation).
        TypeError: at the start of ``fit`` for a module without ``register_penalty``.
    """

    def __init__(
        self,
        kind: Kind = "l2",
        weight: float = 1e-4,
        parameters: str | list[str] = "*.weight",
        exclude: str | list[str] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if not weight >= 0:
            raise ValueError(f"weight must be at least 0, got {weight}")
        include = (parameters,) if isinstance(parameters, str) else tuple(parameters)
        if not include:
            raise ValueError("parameters must have at least one pattern, got an empty list")
        without = (exclude,) if isinstance(exclude, str) else tuple(exclude or ())
        self.penalty = ParameterPenalty(kind, include, without)
        self.weight = weight
        self.name = name or kind
        self._registered = False
        self._checked = False

    @property
    def state_key(self) -> str:
        """Key of this instance in the checkpoint; names the term."""
        return self._generate_state_key(name=self.name)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register the term with the module."""
        if stage != "fit":
            return
        if not isinstance(pl_module, HasPenalties) or not isinstance(pl_module, HasLossWeights):
            raise TypeError(
                f"Regularization needs a module with register_penalty and loss_weights, "
                f"such as a PaperModule; {type(pl_module).__name__} has not both"
            )
        # A second `fit` of the same module and callback finds its term in place.
        if not (self._registered and self.name in pl_module.loss_weights):
            pl_module.register_penalty(self.name, self.penalty, self.weight)
            self._registered = True

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the patterns match something, now that the network is built."""
        self.penalty.select(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notice, after the first batch, a method whose loss has no place for further terms."""
        if self._checked:
            return
        self._checked = True
        if f"train/{self.name}" in trainer.callback_metrics:
            return
        message = (
            f"the penalty {self.name!r} had no effect: {type(pl_module).__name__} "
            "did not build its loss with objective()"
        )
        if pl_module.automatic_optimization:
            raise ValueError(message)
        rank_zero_warn(f"{message} in the first batch")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out that the term was registered: another process has another module."""
        return {**self.__dict__, "_registered": False}
