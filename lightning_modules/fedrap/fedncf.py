"""FedNCF: neural collaborative filtering whose user embeddings stay with the clients."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.optim import Adam, Optimizer

from lightning_modules.components.closed_form import StepCounter, anchor
from lightning_modules.components.randomness import global_seed, seed_from
from lightning_modules.fedrap.communication import Traffic
from lightning_modules.fedrap.networks import NeuralFusion
from lightning_modules.fedrap.objective import cross_entropy
from lightning_modules.fedrap.ranks import sum_over_ranks
from lightning_modules.fedrap.recommender import RecommenderModule, RoundBatch
from lightning_modules.fedrap.schedule import Block, Order, Samples, build_blocks


class FedNCF(RecommenderModule):
    """Federated neural collaborative filtering: a baseline of `FedRAP` on the same data.

    Clients train their user embeddings, their copies of the item embeddings they touch and of the
    network (GMF and MLP part, layers 64-128-64-32-16-8 at width 32) by Adam on all their samples;
    all but the user embeddings are averaged. The clients of a batch are trained at once.

    Args:
        n_users: Number of clients; ``None`` asks the datamodule.
        n_items: Number of items; ``None`` asks the datamodule.
        width: Width of all four embeddings.
        lr: Step size of the clients' Adam.
        local_epochs: Steps of a client in a round, each on all its samples.
        block_rows: Rows trained at once.
        top_k: Length of the lists, K of HR@K and NDCG@K.

    Raises:
        ValueError: If an argument is out of range or a loss is not finite.
    """

    user: Tensor
    item: Tensor
    head: Tensor
    round_user: Tensor
    round_item: Tensor
    round_head: Tensor
    round_client: Tensor

    def __init__(
        self,
        n_users: int | None = None,
        n_items: int | None = None,
        width: int = 32,
        lr: float = 0.01,
        local_epochs: int = 5,
        block_rows: int = 6144,
        top_k: int = 10,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        for name, number in (
            ("width", width),
            ("local_epochs", local_epochs),
            ("block_rows", block_rows),
            ("top_k", top_k),
        ):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        if not lr > 0:
            raise ValueError(f"lr must be above 0, got {lr}")
        self.n_users, self.n_items, self.width = n_users, n_items, width
        self.lr, self.local_epochs, self.block_rows = lr, local_epochs, block_rows
        self.configure_metrics(top_k)
        self.anchor = anchor()
        self.round_traffic: Traffic | None = None
        # Not registered: its parameters are a flat buffer, copied per client.
        object.__setattr__(self, "_network", NeuralFusion(width).requires_grad_(False))
        if n_users is not None and n_items is not None:
            self._build()

    def _build(self) -> None:
        assert self.n_users is not None
        assert self.n_items is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_from(global_seed(), "fedncf", "initial"))
            network = NeuralFusion(self.width)
            user = torch.randn(self.n_users, 2 * self.width) * 0.1
            item = torch.randn(self.n_items, 2 * self.width) * 0.1
        head = torch.nn.utils.parameters_to_vector(network.parameters()).detach()
        for name, value in (("user", user), ("item", item), ("head", head)):
            self.register_buffer(name, value.to(self.device))
        for name, like in (("user", user), ("item", item), ("head", head)):
            zeros = torch.zeros(like.shape, dtype=torch.float64, device=self.device)
            self.register_buffer(f"round_{name}", zeros)
        clients = torch.zeros(self.n_users, 2, dtype=torch.float64, device=self.device)
        self.register_buffer("round_client", clients)
        # Differ between ranks within a round; equal again after it.
        names = [name for name, _ in self.named_buffers() if name != "training_iterations"]
        self._ddp_params_and_buffers_to_ignore = names

    def setup(self, stage: str) -> None:
        """Ask the datamodule for the sizes."""
        data = getattr(self.trainer, "datamodule", None)
        missing = self.n_users is None or self.n_items is None
        for name in ("n_users", "n_items"):
            found = getattr(data, name, None)
            if getattr(self, name) is None:
                if not found:
                    raise ValueError(f"{name} is not known: the datamodule has none, give {name}=")
                self.set_hparam(name, found)
        if missing:
            self._build()

    def configure_optimizers(self) -> Optimizer:
        """Steps are counted; the clients have optimisers of their own."""
        return StepCounter([self.anchor])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the sums of an unfinished round together."""
        super().on_save_checkpoint(checkpoint)
        if torch.distributed.is_initialized() and hasattr(self, "user"):
            for name in ("round_user", "round_item", "round_head", "round_client"):
                checkpoint["state_dict"][name] = sum_over_ranks(getattr(self, name))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Sums over ranks so far count once."""
        if self._trainer is not None and self.global_rank:
            for name in ("round_user", "round_item", "round_head", "round_client"):
                state = checkpoint["state_dict"]
                state[name] = torch.zeros_like(state[name])

    def training_step(self, batch: RoundBatch, batch_idx: int) -> None:
        """Train some of the round's participants; after the last, average."""
        if len(batch.client):
            items = torch.cat([batch.positive[:, None], batch.negative], 1)
            label = torch.zeros_like(items)
            label[:, 0] = 1
            position = torch.arange(len(batch.client), device=items.device)
            position = position.repeat_interleave(batch.offsets.diff() * items.shape[1])
            samples = Samples(position, items.reshape(-1), label.reshape(-1))
            every = torch.arange(len(position), device=items.device)
            order = Order(None, torch.zeros_like(position), every)
            clients, rows = len(batch.client), len(self.item)
            for block in build_blocks(samples, order, clients, rows, self.block_rows):
                self._train_block(block, batch.client[block.client])
        self.optimizers().step()  # type: ignore[union-attr]
        if self.trainer.is_last_batch:
            self._finish_round()

    def _train_block(self, block: Block, client: Tensor) -> None:
        clients, width = len(client), self.width
        ((weight, positive),) = block.batches(0, self.item.dtype)
        start = self.item[block.item]
        user, item = self.user[client].clone(), start.clone()
        head = self.head.repeat(clients, 1)
        leaves = [user.requires_grad_(True), item.requires_grad_(True), head.requires_grad_(True)]
        optimizer = Adam(leaves, lr=self.lr)
        loss = weight.new_zeros(clients)
        with torch.enable_grad():
            for _ in range(self.local_epochs):
                logits = self._logits(head, user[:, None].expand(-1, item.shape[1], -1), item)
                terms = cross_entropy(logits, weight, positive, saturating=False)
                loss = terms.sum(1) / weight.sum(1)
                optimizer.zero_grad()
                loss.sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        if not bool(torch.isfinite(loss).all()):
            first = int(client[~torch.isfinite(loss)][0])
            raise ValueError(f"the loss of client {first} is not finite with lr={self.lr:g}")
        self.round_user[client] = user.detach().double()
        self.round_client[client, 0] = 1.0
        self.round_client[client, 1] = loss.detach().double()
        change = (item.detach() - start).double() * block.mask[..., None]
        self.round_item.index_add_(0, block.item.reshape(-1), change.view(-1, 2 * width))
        self.round_head += (head.detach() - self.head).double().sum(0)

    def _logits(self, head: Tensor, user: Tensor, item: Tensor) -> Tensor:
        """Every client's own network on its rows: ``(clients, rows)``."""
        network: NeuralFusion = self._network  # type: ignore[assignment]
        sizes = [p.numel() for p in network.parameters()]
        parts = torch.split(head, sizes, dim=-1)
        shaped = {
            name: part.view(*head.shape[:-1], *p.shape)
            for (name, p), part in zip(network.named_parameters(), parts, strict=True)
        }
        u, v = torch.split(user, self.width, -1), torch.split(item, self.width, -1)

        def one(parameters: dict[str, Tensor], *embeddings: Tensor) -> Tensor:
            return torch.as_tensor(functional_call(network, parameters, embeddings))

        return torch.as_tensor(vmap(one)(shaped, u[0], u[1], v[0], v[1]))

    def _finish_round(self) -> None:
        several = self.trainer.world_size > 1
        sums = {name: getattr(self, f"round_{name}") for name in ("user", "item", "head", "client")}
        if several:
            sums = {name: sum_over_ranks(value) for name, value in sums.items()}
        taking_part = sums["client"][:, 0] > 0
        count = int(taking_part.sum())
        if count:
            self.user[taking_part] = sums["user"][taking_part].to(self.user.dtype)
            self.item += (sums["item"] / count).to(self.item.dtype)
            self.head += (sums["head"] / count).to(self.head.dtype)
            loss = float(sums["client"][taking_part, 1].mean())
            self.log("train/loss", loss, on_step=False, on_epoch=True, batch_size=1)
        sent = count * (self.item.numel() + self.head.numel()) * self.item.element_size()
        self.round_traffic = Traffic(sent, sent, 2 * sent, count)
        for name in ("user", "item", "head", "client"):
            getattr(self, f"round_{name}").zero_()

    @torch.no_grad()
    def scores(self, client: Tensor) -> Tensor:
        """Logits ``(clients, items)``; an unknown user has the mean embedding."""
        if self.n_items is None or not hasattr(self, "user"):
            raise ValueError("the model has no sizes yet: give n_users and n_items, or fit it")
        mean = self.user.mean(0)
        parts = []
        for part in torch.split(client, max(1, math.ceil(2_000_000 / (self.n_items * 128)))):
            user = torch.where((part >= 0)[:, None], self.user[part.clamp_min(0)], mean)
            head = self.head.expand(len(part), -1)
            parts.append(
                self._logits(
                    head,
                    user[:, None].expand(-1, self.n_items, -1),
                    self.item.expand(len(part), -1, -1),
                )
            )
        return torch.cat(parts)
