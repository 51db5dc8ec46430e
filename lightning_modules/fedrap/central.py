"""Central baselines: what all data in one place would give."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

from lightning_modules.fedrap.networks import NETWORKS, CentralScorer
from lightning_modules.fedrap.recommender import RecommenderModule, RoundBatch


class CentralRecommender(RecommenderModule):
    """Matrix factorisation, GMF, BPR, NeuMF or LightGCN, trained by Adam on all users together.

    Takes the same data as `FedRAP`: a batch is the samples of a group of users. ``mf``, ``gmf`` and
    ``neumf`` minimise binary cross-entropy, ``bpr`` and ``lightgcn`` the pairwise loss
    ``-log sigmoid(z_positive - z_negative)``.

    Args:
        network: ``mf``, ``gmf``, ``bpr``, ``neumf`` or ``lightgcn``.
        n_users: Number of users; ``None`` asks the datamodule.
        n_items: Number of items; ``None`` asks the datamodule.
        width: Width of the embeddings.
        layers: Propagation steps of LightGCN.
        embedding_decay: Weight of half the mean squared norm of the embeddings used in a batch.
        optimizer: Default Adam with step size 0.01.
        lr_scheduler: Scheduler.
        top_k: Length of the lists, K of HR@K and NDCG@K.

    Raises:
        ValueError: If an argument is out of range.
    """

    scorer: CentralScorer | None
    graph_names: ClassVar[tuple[str, ...]] = ("lightgcn",)

    def __init__(
        self,
        network: str = "mf",
        n_users: int | None = None,
        n_items: int | None = None,
        width: int = 32,
        layers: int = 2,
        embedding_decay: float = 1e-4,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        top_k: int = 10,
    ) -> None:
        super().__init__(optimizer=optimizer, lr_scheduler=lr_scheduler)
        if network not in NETWORKS:
            raise ValueError(f"network must be one of {', '.join(NETWORKS)}, got '{network}'")
        for name, number in (("width", width), ("layers", layers), ("top_k", top_k)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        if embedding_decay < 0:
            raise ValueError(f"embedding_decay must be at least 0, got {embedding_decay}")
        self.network, self.n_users, self.n_items = network, n_users, n_items
        self.width, self.layers, self.embedding_decay = width, layers, embedding_decay
        self.configure_metrics(top_k)
        self.scorer = None
        if n_users is not None and n_items is not None:
            self._build()

    def _build(self) -> None:
        assert self.n_users is not None
        assert self.n_items is not None
        self.scorer = CentralScorer(
            self.network, self.n_users, self.n_items, self.width, self.layers
        )

    def setup(self, stage: str) -> None:
        """Ask the datamodule for the sizes and, for LightGCN, the training graph."""
        data = getattr(self.trainer, "datamodule", None)
        for name in ("n_users", "n_items"):
            found = getattr(data, name, None)
            if getattr(self, name) is None:
                if not found:
                    raise ValueError(f"{name} is not known: the datamodule has none, give {name}=")
                self.set_hparam(name, found)
        if self.scorer is None:
            self._build()
        assert self.scorer is not None
        if self.network in self.graph_names and not self.scorer.edge_index.numel():
            training = getattr(data, "train_set", None)
            if training is None:
                raise ValueError("LightGCN needs a datamodule with the training interactions")
            whole = training[list(range(len(training)))]
            user = whole.client.repeat_interleave(whole.offsets.diff())
            edges = torch.unique(torch.stack([user, whole.positive]), dim=1).to(self.device)
            self.scorer.set_graph(edges[0], edges[1])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The number of edges is part of the state."""
        stored = checkpoint["state_dict"].get("scorer.edge_index")
        if self.scorer is not None and stored is not None:
            self.scorer.edge_index = torch.zeros_like(stored, device=self.device)

    def default_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Adam, as the baselines were published with."""
        return Adam(parameters, lr=0.01)

    def training_step(self, batch: RoundBatch, batch_idx: int) -> Tensor:
        """Loss on the samples of a group of users."""
        assert self.scorer is not None
        user = batch.client.repeat_interleave(batch.offsets.diff())
        items = torch.cat([batch.positive[:, None], batch.negative], 1)
        logits = self.scorer.pairs(user[:, None], items)
        if self.network in ("bpr", "lightgcn"):
            data_term = F.softplus(logits[:, 1:] - logits[:, :1]).mean()
        else:
            target = torch.zeros_like(logits)
            target[:, 0] = 1
            data_term = F.binary_cross_entropy_with_logits(logits, target)
        name = "bpr" if self.network in ("bpr", "lightgcn") else "bce"
        terms = {name: data_term}
        if self.embedding_decay:
            terms["decay"] = self.embedding_decay * self._squared_norm(user, batch)
        return self.objective(**terms)

    def _squared_norm(self, user: Tensor, batch: RoundBatch) -> Tensor:
        assert self.scorer is not None
        if self.network == "lightgcn":
            table = self.scorer.graph.embedding
            used = [user, batch.positive + self.scorer.n_users]
            return torch.stack([table(x).square().sum(-1).mean() / 2 for x in used]).sum()
        pairs = [(self.scorer.user, user), (self.scorer.item, batch.positive)]
        return torch.stack([table(x).square().sum(-1).mean() / 2 for table, x in pairs]).sum()

    def scores(self, client: Tensor) -> Tensor:
        """Logits ``(users, items)``; an unknown user has the mean of all known ones' scores."""
        if self.scorer is None:
            raise ValueError("the model has no sizes yet: give n_users and n_items, or fit it")
        logits = self.scorer.all_items(client.clamp_min(0))
        if bool((client < 0).any()):
            everyone = torch.arange(self.scorer.n_users, device=client.device)
            parts = [self.scorer.all_items(part).sum(0) for part in torch.split(everyone, 64)]
            logits[client < 0] = torch.stack(parts).sum(0) / self.scorer.n_users
        return logits
