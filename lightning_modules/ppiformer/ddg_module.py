"""Fine-tuning of PPIformer to measured changes of the binding free energy."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightning_modules.ppiformer.losses import DDG_LOSSES, ddg_loss, mean_over_ranks
from lightning_modules.ppiformer.module import PPIformer
from lightning_modules.ppiformer.readout import reversed_mutations


class DDGPPIformer(PPIformer):
    """Fine-tuning of `PPIformer` to measured ddG with the same network and no new head.

    The log-odds of the masked residues are fitted to ddG (kcal/mol). Start from a pre-trained
    checkpoint with `weights`. Validation and testing are those of `PPIformer`; `val/spearman` is
    the mean over complexes.

    Args:
        ddg_loss: `mse` (published), `l1`, `huber` or `rank`.
        reverse: add the reverse of every mutation, from mutant to wild type in the mutant's
            context, with the negated label. Changes nothing for antisymmetric read-outs without
            unpaired terms; meant for the others.
        encoder_gradient: factor of the gradient into the encoder; a schedule from 0 to 1 keeps it
            fixed at first. The same under any strategy, since no parameter is switched off.
        **kwargs: see `PPIformer`. Here the learning rate is 3e-4 and loss weights are those of
            `ddg` (1) and `masked` (0: masked modelling as a second term is off).

    Raises:
        ValueError: for arguments out of range.
    """

    monitor: str = "val/spearman"
    mode: Literal["min", "max"] = "max"
    default_loss_weights: ClassVar[dict[str, float]] = {"ddg": 1.0, "masked": 0.0}

    def __init__(
        self,
        ddg_loss: Literal["mse", "l1", "huber", "rank"] = "mse",
        reverse: bool = False,
        encoder_gradient: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if ddg_loss not in DDG_LOSSES:
            raise ValueError(f"ddg_loss must be one of {', '.join(DDG_LOSSES)}, got {ddg_loss!r}")
        if not 0 <= encoder_gradient <= 1:
            raise ValueError(f"encoder_gradient must be in [0, 1], got {encoder_gradient}")
        self.ddg_loss = ddg_loss
        self.reverse = reverse
        self.encoder_gradient = encoder_gradient
        for part in (self.network.head, self.network.affine):
            if part is not None:
                part.requires_grad_(True)
        if self.network.head is not None and self.loss_weights["masked"] == 0:
            # a read-out from embeddings gives the classifier no gradient
            self.network.classifier.requires_grad_(False)

    def default_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Adam, 3e-4, as in the published fine-tuning."""
        return torch.optim.Adam(parameters, lr=3e-4)

    def _scaled(self, embedding: Tensor) -> Tensor:
        factor = self.encoder_gradient
        return embedding * factor + embedding.detach() * (1 - factor)

    def _loss(self, batch: Any, target: Tensor, inside: Tensor) -> tuple[Tensor, int]:
        transform = None if self.encoder_gradient == 1.0 else self._scaled
        predicted = self.network.ddg(batch, transform=transform)[0]
        return ddg_loss(predicted[inside], target[inside], self.ddg_loss)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Fit the log-odds of every mutation to its label."""
        inside = batch.inside & torch.isfinite(batch.ddg)
        total, count = self._loss(batch, batch.ddg, inside)
        if self.reverse:
            more, further = self._loss(reversed_mutations(batch), -batch.ddg, inside)
            total, count = total + more, count + further
        terms = {"ddg": mean_over_ranks(total, count, self._world_size)}
        if self.loss_weights["masked"] > 0:
            terms["masked"] = self.masked_term(batch)
        return self.objective(**terms)
