"""The scoring networks of the baselines: matrix factorisation, GMF, NeuMF, LightGCN."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

NETWORKS = ("mf", "gmf", "bpr", "neumf", "lightgcn")
MLP_WIDTHS = (128, 64, 32, 16, 8)


class NeuralFusion(nn.Module):
    """Head of neural collaborative filtering: GMF and MLP parts, fused by one linear layer.

    The MLP sees user and item vectors side by side; with width 32 it has the layers
    64-128-64-32-16-8.

    Args:
        width: Width of all embeddings.
        hidden: Widths of the hidden layers.
    """

    def __init__(self, width: int = 32, hidden: tuple[int, ...] = MLP_WIDTHS) -> None:
        super().__init__()
        sizes = (2 * width, *hidden)
        layers: list[nn.Module] = []
        for inside, outside in itertools.pairwise(sizes):
            layers += [nn.Linear(inside, outside), nn.ReLU()]
        self.mlp = nn.Sequential(*layers)
        self.output = nn.Linear(width + hidden[-1], 1)

    def forward(
        self, user_gmf: Tensor, user_mlp: Tensor, item_gmf: Tensor, item_mlp: Tensor
    ) -> Tensor:
        """Logits ``(...)`` from four embeddings ``(..., width)``."""
        hidden = self.mlp(torch.cat([user_mlp, item_mlp], -1))
        fused = torch.cat([user_gmf * item_gmf, hidden], -1)
        return torch.as_tensor(self.output(fused)[..., 0])


class CentralScorer(nn.Module):
    """A recommender that sees all users.

    Args:
        name: ``mf`` and ``bpr`` (inner product and item bias), ``gmf`` (weighted inner product),
            ``neumf``, ``lightgcn`` (propagation over the graph of training interactions).
        n_users: Number of users.
        n_items: Number of items.
        width: Width of the embeddings.
        layers: Propagation steps of LightGCN.
    """

    edge_index: Tensor

    def __init__(self, name: str, n_users: int, n_items: int, width: int, layers: int = 2) -> None:
        super().__init__()
        self.name, self.n_users, self.n_items = name, n_users, n_items
        if name == "lightgcn":
            from torch_geometric.nn import LightGCN

            self.graph = LightGCN(n_users + n_items, width, layers)
        else:
            self.user = nn.Embedding(n_users, width)
            self.item = nn.Embedding(n_items, width)
            for table in (self.user, self.item):
                nn.init.normal_(table.weight, std=0.1)
        if name in ("mf", "bpr"):
            self.item_bias = nn.Embedding(n_items, 1)
            nn.init.zeros_(self.item_bias.weight)
        if name == "gmf":
            self.output = nn.Linear(width, 1)
        if name == "neumf":
            self.user_mlp = nn.Embedding(n_users, width)
            self.item_mlp = nn.Embedding(n_items, width)
            for table in (self.user_mlp, self.item_mlp):
                nn.init.normal_(table.weight, std=0.1)
            self.head = NeuralFusion(width)
        self.register_buffer("edge_index", torch.zeros(2, 0, dtype=torch.int64))

    def set_graph(self, user: Tensor, item: Tensor) -> None:
        """Take the training interactions as undirected edges between users and items."""
        item = item + self.n_users
        self.edge_index = torch.stack([torch.cat([user, item]), torch.cat([item, user])])

    def pairs(self, user: Tensor, item: Tensor) -> Tensor:
        """Logits of user-item pairs, broadcasting over both."""
        if self.name == "lightgcn":
            vectors = self.graph.get_embedding(self.edge_index)
            return torch.as_tensor((vectors[user] * vectors[item + self.n_users]).sum(-1))
        product = self.user(user) * self.item(item)
        if self.name == "gmf":
            return torch.as_tensor(self.output(product)[..., 0])
        if self.name == "neumf":
            user, item = torch.broadcast_tensors(user, item)  # type: ignore[no-untyped-call]
            return torch.as_tensor(
                self.head(
                    self.user(user), self.user_mlp(user), self.item(item), self.item_mlp(item)
                )
            )
        return torch.as_tensor(product.sum(-1) + self.item_bias(item)[..., 0])

    def all_items(self, user: Tensor) -> Tensor:
        """Logits ``(users, items)``."""
        items = torch.arange(self.n_items, device=user.device)
        if self.name == "lightgcn":
            vectors = self.graph.get_embedding(self.edge_index)
            return torch.as_tensor(vectors[user] @ vectors[self.n_users :].T)
        return self.pairs(user[:, None], items[None])
