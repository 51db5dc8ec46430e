"""Evaluation and prediction that all recommenders share."""

import csv
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_modules.base import PaperModule
from lightning_modules.fedrap import ranking


class RoundBatch(Protocol):
    """The fields of a training batch that are read: some clients with their samples."""

    client: Tensor
    offsets: Tensor
    positive: Tensor
    negative: Tensor


class HeldOutBatch(Protocol):
    """The fields of an evaluation batch that are read: some clients with a held-out item."""

    client: Tensor
    target: Tensor
    negative: Tensor
    offsets: Tensor
    seen: Tensor


class Recommendations(NamedTuple):
    """Top-K lists: ``client`` ``(n,)``, ``item`` and ``score`` (logit) ``(n, top_k)``."""

    client: Tensor
    item: Tensor
    score: Tensor


class RecommenderModule(PaperModule):
    """Evaluation and prediction of every recommender with one held-out item per client.

    Logs, for validation and test, ``hr`` and ``ndcg`` with all items as candidates (but those that
    the batch excludes), and ``hr_paper`` and ``ndcg_paper`` among the batch's sampled negatives.
    Each is a mean over users; ties count against the held-out item.

    A subclass implements `scores`.
    """

    monitor: str = "val/hr"
    mode: Literal["min", "max"] = "max"

    def configure_metrics(self, top_k: int) -> None:
        """Create the metrics."""
        self.top_k = top_k
        names = ("hr", "ndcg", "hr_paper", "ndcg_paper")
        self.metrics = nn.ModuleDict(
            {
                f"{stage}_{name}": MeanMetric()
                for stage in ("val", "heldout", "test")
                for name in names
            }
        )

    def scores(self, client: Tensor) -> Tensor:
        """Logits ``(clients, items)``."""
        raise NotImplementedError

    def _evaluate(self, batch: HeldOutBatch, stage: str, name: str) -> Tensor:
        logits = self.scores(batch.client)
        items = logits.shape[1]
        candidates = items - int(batch.offsets.diff().max()) if len(batch.client) else items
        if self.top_k >= candidates:
            raise ValueError(
                f"top_k={self.top_k} must be below the number of candidates, {candidates}"
            )
        excluded = ranking.excluded_mask(batch.offsets, batch.seen, items)
        ranks = {"": ranking.rank_in_catalogue(logits, batch.target, excluded)}
        if batch.negative.shape[1]:
            if self.top_k >= batch.negative.shape[1] + 1:
                raise ValueError(
                    f"top_k={self.top_k} must be below the number of sampled candidates, "
                    f"{batch.negative.shape[1] + 1}: raise eval_negatives or lower top_k"
                )
            ranks["_paper"] = ranking.rank_among(
                logits.gather(1, batch.target[:, None])[:, 0], logits.gather(1, batch.negative)
            )
        for suffix, rank in ranks.items():
            for metric, values in (
                ("hr", ranking.hits(rank, self.top_k)),
                ("ndcg", ranking.gains(rank, self.top_k)),
            ):
                key = f"{stage}_{metric}{suffix}"
                self.metrics[key].update(values.float())  # type: ignore[operator]
                self.log(
                    f"{name}/{metric}{suffix}",
                    self.metrics[key],  # type: ignore[arg-type]
                    on_step=False,
                    on_epoch=True,
                    batch_size=len(batch.client),
                    add_dataloader_idx=False,
                )
        return ranks[""]

    def validation_step(self, batch: HeldOutBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Rank the validation items; a second loader holds the test items (``val_on_test/``)."""
        if dataloader_idx:
            self._evaluate(batch, "heldout", "val_on_test")
        else:
            self._evaluate(batch, "val", "val")

    def test_step(self, batch: HeldOutBatch, batch_idx: int) -> None:
        """Rank the test items."""
        self._test_ranks.append((batch.target.cpu(), self._evaluate(batch, "test", "test").cpu()))

    def on_test_epoch_start(self) -> None:
        """Start collecting ranks for the interval."""
        self._test_ranks: list[tuple[Tensor, Tensor]] = []

    def on_test_epoch_end(self) -> None:
        """Bootstrap interval over users and hit rates of popular and rare targets."""
        if self.trainer.world_size > 1 or not self._test_ranks:
            return
        target, rank = (torch.cat(parts) for parts in zip(*self._test_ranks, strict=True))
        hit = ranking.hits(rank, self.top_k)
        low, high = ranking.bootstrap_interval(hit)
        values = {"test/hr_low": low, "test/hr_high": high}
        counts = getattr(getattr(self.trainer, "datamodule", None), "item_counts", None)
        if counts is not None:
            of_target = torch.as_tensor(counts)[target]
            rare = of_target <= of_target.median()
            for name, part in (("rare", rare), ("popular", ~rare)):
                if bool(part.any()):
                    values[f"test/hr_{name}"] = float(hit[part].mean())
        self.log_dict(values, batch_size=1)

    def predict_step(self, batch: HeldOutBatch, batch_idx: int) -> Recommendations:
        """Best ``top_k`` items of every client that are not excluded, with their logits."""
        unknown = int((batch.client < 0).sum())
        if unknown:
            rank_zero_warn(
                f"{unknown} user(s) without training data: they get the common table "
                "with the mean user vector"
            )
        logits = self.scores(batch.client)
        excluded = ranking.excluded_mask(batch.offsets, batch.seen, logits.shape[1])
        if self.top_k >= logits.shape[1] - int(excluded.sum(1).max()):
            raise ValueError(
                f"top_k={self.top_k} must be below the number of candidates, "
                f"{logits.shape[1] - int(excluded.sum(1).max())}"
            )
        best = logits.masked_fill(excluded, -math.inf).topk(self.top_k, dim=1)
        return Recommendations(batch.client, best.indices, best.values)

    def write_predictions(self, predictions: list[Any], folder: Path) -> list[Path]:
        """Write ``recommendations.csv``: user, rank, item, score, with the data's own ids."""
        data = getattr(self.trainer, "datamodule", None)
        users, items = getattr(data, "user_ids", None), getattr(data, "item_ids", None)
        asked = getattr(data, "predict_users", None)
        path = folder / "recommendations.csv"
        row = 0
        with path.open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(("user", "rank", "item", "score"))
            for part in predictions:
                for client, best, score in zip(
                    part.client.tolist(), part.item.tolist(), part.score.tolist(), strict=True
                ):
                    user = client if users is None else users[client]
                    if client < 0:
                        user = asked[row] if asked else "unknown"
                    row += 1
                    for place, (item, value) in enumerate(zip(best, score, strict=True), 1):
                        name = item if items is None else items[item]
                        writer.writerow((user, place, name, f"{value:.6g}"))
        return [path]
