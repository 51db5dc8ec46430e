"""FedRAP: federated recommendation with additive personalisation."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_modules.components.closed_form import StepCounter, anchor
from lightning_modules.components.randomness import generator_from, global_seed
from lightning_modules.fedrap import ranks
from lightning_modules.fedrap.aggregation import ServerOptimizer
from lightning_modules.fedrap.arguments import check_at_least, check_choice, imported
from lightning_modules.fedrap.communication import Traffic
from lightning_modules.fedrap.federation import Federation
from lightning_modules.fedrap.figures import common_table
from lightning_modules.fedrap.local_training import LocalTraining
from lightning_modules.fedrap.objective import REDUCTIONS, REGULARISERS, SCOPES, Objective
from lightning_modules.fedrap.personal_store import STORES, LazyPersonal
from lightning_modules.fedrap.privacy import gaussian_epsilon, spent_epsilon
from lightning_modules.fedrap.recommender import RecommenderModule, RoundBatch
from lightning_modules.fedrap.schedule import Samples, shuffled_order
from lightning_modules.fedrap.settings import MODES, Federating, RoundReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PREFIX = "federation."


class FedRAP(RecommenderModule):
    """Federated recommendation with additive personalisation (arXiv 2301.09109).

    A user scores item ``j`` with ``<u_i, D_i[j] + C[j]> + b_i``. Only the common table ``C``
    travels; the personal table ``D_i``, the vector ``u_i`` and the bias ``b_i`` stay with the
    client. Every round the clients train all four by SGD on their own samples and the server
    averages their copies of ``C``. The objective pushes ``D_i`` and ``C`` apart
    (``loss_weights["independence"]``, lambda) and makes ``C`` sparse (``loss_weights["sparsity"]``,
    mu); over the rounds both grow when a curriculum callback moves them.

    One epoch is one round. The simulation trains all clients of a batch at once with gradients in
    closed form and gives the numbers of a loop over the clients. Under several ranks every rank
    holds the personal state of its own clients.

    Args:
        n_users: Number of clients; ``None`` asks the datamodule.
        n_items: Number of items; ``None`` asks the datamodule.
        width: Width ``k`` of the tables.
        mode: ``additive`` (FedRAP), ``global_only``, ``local_only``, ``no_independence``,
            ``no_sparsity``, ``central``, ``pfedrec`` or ``popularity``.
        lr_network: Step size of user vector and bias.
        lr_item: Step size of the common table, also of the personal one unless `lr_personal`.
        lr_personal: Step size of the personal table.
        weight_decay: Coupled weight decay of everything.
        wd_personal: Coupled weight decay of the personal table, default `weight_decay`.
        loss_weights: ``independence`` (lambda) and ``sparsity`` (mu), both at least 0.
        regulariser: Of ``C``: ``l1``, ``l2``, ``nuc``, ``inf``, ``none``.
        l1_mode: ``subgradient`` (never an exact zero), ``prox`` (clients soft-threshold their copy
            after every step by ``lr mu / (B k)``), ``server_prox`` (the server does it).
        regulariser_scope: ``batch`` rows or the whole ``table``.
        regulariser_reduction: ``mean`` or ``sum`` over rows and width.
        custom_objective: Replaces the objective: dotted path of a function as in
            `ClientObjective`, or of a class of such objects built without arguments.
        local_epochs: Most epochs of a client in a round.
        local_batch_size: Largest batch of a client.
        tolerance: A client stops early when its running loss changes by a smaller share.
        step_decay: Factor on step sizes after every batch of a round.
        round_decay: Factor on step sizes after every round.
        curriculum_applies: ``False`` keeps the constructor's weights in every round, whatever a
            curriculum callback sets (the released behaviour).
        compat: Saturating cross-entropy of probabilities as released, instead of from logits.
        server: ``mean``, ``weighted`` (by samples), ``fedadam``, ``median``.
        server_lr: Step size of the server.
        server_betas: Moment decays of FedAdam.
        server_adaptivity: Added to the root of FedAdam's second moment.
        dp_clip: Largest L2 norm of the change that a client uploads.
        dp_noise: Standard deviation of Gaussian noise on its entries, over `dp_clip`.
        dp_delta: Delta at which the spent epsilon is logged.
        dp_trust: ``local``: the adversary sees single uploads; ``central``: only their sum.
        common_std: Standard deviation of the first ``C``.
        personal_std: Standard deviation of the first ``D``; 0 starts without a personal view.
        store: ``dense``, or ``lazy`` to hold only touched rows of the personal tables.
        zero_threshold: Entries of ``C`` up to this size count as zero.
        block_rows: Rows trained at once; ``None`` chooses by device.
        compile: Take closed-form steps on the processor by a kernel that the machine's C++ compiler
            builds in under a second (a warning and plain PyTorch where there is none).
        top_k: Length of the lists, K of HR@K and NDCG@K.
        protocol: Which one chooses the best round: ``full`` ranks all items, ``sampled99`` as the
            paper among sampled negatives. Both are always logged.
        select_on: ``val``, or ``test`` only to reproduce selection on test data.

    Raises:
        ValueError: If an argument is out of range; in training if the loss of a client is not
            finite.
    """

    default_loss_weights: ClassVar[Mapping[str, float]] = {"independence": 0.1, "sparsity": 0.1}

    def __init__(
        self,
        n_users: int | None = None,
        n_items: int | None = None,
        width: int = 32,
        mode: str = "additive",
        lr_network: float = 0.5,
        lr_item: float = 200.0,
        lr_personal: float | None = None,
        weight_decay: float = 1e-4,
        wd_personal: float | None = None,
        loss_weights: dict[str, float] | None = None,
        regulariser: str = "l1",
        l1_mode: Literal["subgradient", "prox", "server_prox"] = "subgradient",
        regulariser_scope: str = "batch",
        regulariser_reduction: str = "mean",
        custom_objective: str | None = None,
        local_epochs: int = 10,
        local_batch_size: int = 2048,
        tolerance: float = 1e-4,
        step_decay: float = 0.95,
        round_decay: float = 0.97,
        curriculum_applies: bool = True,
        compat: bool = False,
        server: str = "mean",
        server_lr: float = 1.0,
        server_betas: tuple[float, float] = (0.9, 0.99),
        server_adaptivity: float = 1e-3,
        dp_clip: float | None = None,
        dp_noise: float = 0.0,
        dp_delta: float = 1e-5,
        dp_trust: Literal["local", "central"] = "local",
        common_std: float = 1.0,
        personal_std: float = 1.0,
        store: str = "dense",
        zero_threshold: float = 1e-4,
        block_rows: int | None = None,
        compile: bool = False,
        top_k: int = 10,
        protocol: Literal["full", "sampled99"] = "full",
        select_on: Literal["val", "test"] = "val",
    ) -> None:
        super().__init__(loss_weights=loss_weights)
        self.automatic_optimization = False
        self.n_users, self.n_items, self.width = n_users, n_items, width
        self.federation_mode = mode
        self.maximum_weights = dict(self.loss_weights)
        self.curriculum_applies = curriculum_applies
        self.local_batch_size = local_batch_size
        self.dp_noise, self.dp_delta, self.dp_trust = dp_noise, dp_delta, dp_trust
        self.common_std, self.personal_std = common_std, personal_std
        self.store = store
        check_choice("mode", mode, MODES)
        check_choice("regulariser", regulariser, REGULARISERS)
        check_choice("l1_mode", l1_mode, ("subgradient", "prox", "server_prox"))
        check_choice("regulariser_scope", regulariser_scope, SCOPES)
        check_choice("regulariser_reduction", regulariser_reduction, REDUCTIONS)
        check_choice("store", store, STORES)
        check_choice("dp_trust", dp_trust, ("local", "central"))
        check_choice("protocol", protocol, ("full", "sampled99"))
        check_choice("select_on", select_on, ("val", "test"))
        for name, value in self.loss_weights.items():
            check_at_least(f"loss_weights.{name}", value, 0.0)
        for name, number, least in (
            ("n_users", n_users, 1),
            ("n_items", n_items, 2),
            ("width", width, 1),
            ("local_epochs", local_epochs, 1),
            ("local_batch_size", local_batch_size, 1),
            ("top_k", top_k, 1),
            ("block_rows", block_rows, 1),
            ("lr_network", lr_network, 0.0),
            ("lr_item", lr_item, 0.0),
            ("lr_personal", lr_personal, 0.0),
            ("weight_decay", weight_decay, 0.0),
            ("wd_personal", wd_personal, 0.0),
            ("tolerance", tolerance, 0.0),
            ("dp_noise", dp_noise, 0.0),
            ("common_std", common_std, 0.0),
            ("personal_std", personal_std, 0.0),
            ("zero_threshold", zero_threshold, 0.0),
        ):
            check_at_least(name, number, least)
        for name, number in (
            ("step_decay", step_decay),
            ("round_decay", round_decay),
            ("server_lr", server_lr),
            ("server_adaptivity", server_adaptivity),
            ("dp_clip", dp_clip),
        ):
            if number is not None and not number > 0:
                raise ValueError(f"{name} must be above 0, got {number}")
        if not 0 < dp_delta < 1:
            raise ValueError(f"dp_delta must be in (0, 1), got {dp_delta}")
        if l1_mode != "subgradient" and regulariser != "l1":
            raise ValueError(f"l1_mode='{l1_mode}' needs regulariser='l1', got '{regulariser}'")
        if l1_mode == "prox" and lr_item * weight_decay >= 1:
            raise ValueError(
                f"l1_mode='prox' needs lr_item * weight_decay below 1, got {lr_item * weight_decay}"
            )
        lr_personal = lr_item if lr_personal is None else lr_personal
        wd_personal = weight_decay if wd_personal is None else wd_personal
        self.training_settings = LocalTraining(
            Objective(
                regulariser=regulariser,
                scope=regulariser_scope,
                reduction=regulariser_reduction,
                saturating=compat,
                proximal=l1_mode == "prox",
                custom=None if custom_objective is None else imported(custom_objective),
            ),
            lr_network=lr_network,
            lr_common=lr_item,
            lr_personal=lr_personal,
            decay_network=weight_decay,
            decay_common=weight_decay,
            decay_personal=wd_personal,
            epochs=local_epochs,
            tolerance=tolerance,
            step_decay=step_decay,
        )
        self.federating = Federating(
            mode,
            ServerOptimizer(server, server_lr, *server_betas, server_adaptivity),
            l1_mode == "server_prox",
            round_decay,
            dp_clip,
            dp_noise,
            zero_threshold,
            block_rows,
            compile,
        )
        monitored = "hr" if protocol == "full" else "hr_paper"
        self.monitor = f"{'val' if select_on == 'val' else 'val_on_test'}/{monitored}"
        self.anchor = anchor()
        self.round_traffic: Traffic | None = None
        self.configure_metrics(top_k)
        self.federation: Federation | None = None
        if n_users is not None and n_items is not None:
            self._build(0, 1)

    # ------------------------------------------------------------------ state

    def _build(self, rank: int, world_size: int) -> None:
        """All clients start from one draw; it depends on the seed alone."""
        assert self.n_users is not None
        assert self.n_items is not None
        draw = generator_from(global_seed(), "fedrap", "initial")
        shape = (self.n_items, self.width)
        bound = 1 / math.sqrt(self.width)
        common = torch.randn(shape, generator=draw) * self.common_std
        personal = torch.randn(shape, generator=draw) * self.personal_std
        vector = (torch.rand(self.width, generator=draw) * 2 - 1) * bound
        bias = (torch.rand(1, generator=draw) * 2 - 1) * bound
        self.federation = Federation(
            common,
            personal,
            vector,
            bias,
            self.n_users,
            self.federating,
            self.store,
            rank,
            world_size,
        ).to(self.device)
        # The clients' state differs between ranks and must not be broadcast.
        names = [name for name, _ in self.named_buffers() if name.startswith("federation.")]
        self._ddp_params_and_buffers_to_ignore = names
        self.per_rank_state = frozenset(
            name for name in names if name.removeprefix(_PREFIX) in ranks.PER_RANK
        )

    def setup(self, stage: str) -> None:
        """Ask the datamodule for the sizes and take this rank's clients."""
        data = getattr(self.trainer, "datamodule", None)
        for name in ("n_users", "n_items"):
            found = getattr(data, name, None)
            if getattr(self, name) is None:
                if not found:
                    raise ValueError(f"{name} is not known: the datamodule has none, give {name}=")
                self.set_hparam(name, found)
            elif found and found != getattr(self, name):
                raise ValueError(
                    f"the model has {name}={getattr(self, name)}, the data have {found}: "
                    "the checkpoint or argument belongs to other data"
                )
        self._place(self.trainer.global_rank, self.trainer.world_size)

    def _place(self, rank: int, world_size: int) -> None:
        """Hold the state of the clients of this rank, out of the state of all of them."""
        old = self.federation
        if old is not None and (old.rank, old.world_size) == (rank, world_size):
            return
        state = None if old is None else ranks.whole_state(old)
        self._build(rank, world_size)
        if state is not None:
            self._load_whole(state)

    def _load_whole(self, state: Mapping[str, Tensor]) -> None:
        assert self.federation is not None
        self.federation.load_state_dict(self._take_part(state))

    def _take_part(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of a state of all clients, with buffers of the right sizes for it."""
        assert self.federation is not None
        part = ranks.own_part(state, self.federation)
        self.federation.counts_before = part["item_counts"].to(self.device, copy=True)
        store = self.federation.personal
        if isinstance(store, LazyPersonal):
            # How many rows were touched is part of the state.
            store.key = torch.zeros_like(part[ranks.KEY], device=store.key.device)
            store.value = torch.zeros_like(part[ranks.VALUE], device=store.value.device)
        return part

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store all clients, whichever rank holds them."""
        super().on_save_checkpoint(checkpoint)
        if self.federation is None:
            return
        state = ranks.whole_state(self.federation)
        checkpoint["state_dict"].update({_PREFIX + name: x for name, x in state.items()})
        if self.federating.server.kind == "median":
            uploads = list(self.federation.stacked_uploads())
            if self.federation.world_size > 1:
                uploads = [ranks.concatenate_over_ranks(part) for part in uploads]
            checkpoint["fedrap_uploads"] = uploads

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take this rank's clients."""
        if self.federation is None:
            return
        stored = checkpoint["state_dict"]
        state = {
            name.removeprefix(_PREFIX): x for name, x in stored.items() if name.startswith(_PREFIX)
        }
        self._check_sizes(state)
        part = self._take_part(state)
        checkpoint["state_dict"] = {**stored, **{_PREFIX + name: x for name, x in part.items()}}
        if "fedrap_uploads" in checkpoint and not self.federation.rank:
            owner, item, rows = checkpoint["fedrap_uploads"]
            self.federation.uploads = [(owner, item, rows)] if len(owner) else []

    def _check_sizes(self, state: Mapping[str, Tensor]) -> None:
        found = {
            "n_items": state["common"].shape[0],
            "width": state["common"].shape[1],
            "n_users": state["round_clients"].shape[0],
        }
        wrong = [
            f"{name} is {size} in the checkpoint and {getattr(self, name)} here"
            for name, size in found.items()
            if size != getattr(self, name)
        ]
        if wrong:
            raise ValueError(f"the checkpoint does not fit: {', '.join(wrong)}")
        assert self.federation is not None
        if state["first_moment"].shape != self.federation.first_moment.shape:
            raise ValueError("the checkpoint does not fit: it was written with another server=")
        lazy = ranks.KEY in state
        if (lazy or "personal.table" in state) and lazy != (self.store == "lazy"):
            raise ValueError(
                "the checkpoint does not fit: it was written with "
                f"store='{'lazy' if lazy else 'dense'}', this is '{self.store}'"
            )

    # ------------------------------------------------------------------ training

    def configure_optimizers(self) -> Optimizer:
        """Steps are counted; the updates are in closed form."""
        return StepCounter([self.anchor])

    def on_train_start(self) -> None:
        """Refuse what has no effect on closed-form updates."""
        super().on_train_start()
        assert self.federation is not None
        self.federation.counts_before = self.federation.item_counts.clone()
        if self.dp_noise and self.dp_trust == "central":
            if self.federation.settings.server.kind == "median":
                raise ValueError(
                    "dp_trust='central' accounts for noise on a sum, not on server='median': "
                    "use server='mean' or 'fedadam', or dp_trust='local'"
                )
            ratio, sampling = self._participation()
            poisson = sampling == "poisson" and ratio < 1
            self.federation.expected_clients = (self.n_users or 0) * ratio if poisson else None
        if self._penalties:
            raise ValueError(
                "penalties registered by a callback do not reach the clients: "
                "use regulariser= of the model instead of the Regularization callback"
            )

    @torch.no_grad()
    def training_step(self, batch: RoundBatch, batch_idx: int) -> None:
        """Train some of the round's participants; after the last, average."""
        assert self.federation is not None
        federation = self.federation
        if len(batch.client):
            negatives = batch.negative.shape[1]
            counts = batch.offsets.diff() * (1 + negatives)
            position = torch.arange(len(batch.client), device=batch.client.device)
            position = position.repeat_interleave(counts)
            items = torch.cat([batch.positive[:, None], batch.negative], 1)
            label = torch.zeros_like(items)
            label[:, 0] = 1
            order = shuffled_order(
                position,
                batch.client,
                self.local_batch_size,
                self.training_settings.epochs,
                global_seed(),
                int(federation.rounds),
            )
            samples = Samples(position, items.reshape(-1), label.reshape(-1))
            federation.train_clients(batch.client, samples, order, self._local_training())
        self.optimizers().step()  # type: ignore[union-attr]
        if self.trainer.is_last_batch:
            self._finish_round()

    def _local_training(self) -> LocalTraining:
        weights = self.loss_weights if self.curriculum_applies else self.maximum_weights
        settings = self.training_settings
        objective = replace(
            settings.objective,
            independence=weights["independence"],
            sparsity=weights["sparsity"],
        )
        return replace(settings, objective=objective)

    def _finish_round(self) -> None:
        assert self.federation is not None
        federation = self.federation
        noise = None
        if self.dp_noise:
            key = (global_seed(), "fedrap", "noise", int(federation.rounds))
            noise = generator_from(*key, device=self.device)
        several = federation.world_size > 1
        if several:
            federation.item_counts.copy_(ranks.all_item_counts(federation))
        federation.counts_before = federation.item_counts.clone()
        report = federation.finish_round(
            noise,
            ranks.sum_over_ranks if several else None,
            ranks.concatenate_over_ranks if several else None,
        )
        self.round_traffic = report.traffic
        self._log_round(report)

    def _log_round(self, report: RoundReport) -> None:
        values = {
            "train/loss": report.loss,
            "train/clients": float(report.clients),
            "train/epochs_run": report.epochs_run,
            "train/sparsity": report.sparsity,
        }
        if self.dp_noise:
            values["train/epsilon"] = self.epsilon()
        finite = {name: value for name, value in values.items() if not math.isnan(value)}
        self.log_dict(finite, on_step=False, on_epoch=True, batch_size=1)

    def epsilon(self) -> float:
        """Privacy spent so far at `dp_delta` under `dp_trust`; infinite without noise."""
        assert self.federation is not None
        rounds = int(self.federation.rounds)
        if self.dp_trust == "local":
            # Two neighbouring clients' clipped uploads lie up to twice the clip apart.
            return gaussian_epsilon(self.dp_noise / 2, rounds, self.dp_delta)
        ratio, sampling = self._participation()
        clients = (self.n_users or 1) * ratio
        if sampling == "fixed":
            clients = int(clients)
        multiplier = self.dp_noise * math.sqrt(clients)
        return spent_epsilon(multiplier, ratio, rounds, self.dp_delta, sampling)

    def _participation(self) -> tuple[float, str]:
        """Share of the clients in a round, and how they are drawn, as the datamodule says."""
        data = getattr(self._trainer, "datamodule", None) if self._trainer else None
        ratio = float(getattr(data, "clients_sample_ratio", 1.0))
        return ratio, str(getattr(data, "participation", "fixed"))

    def on_fit_end(self) -> None:
        """Leave a whole model on rank 0."""
        if self.federation is not None and self.federation.world_size > 1:
            state = ranks.whole_state(self.federation)
            if self.global_rank == 0:
                self._build(0, 1)
                self._load_whole(state)

    # ------------------------------------------------------------------ evaluation

    def scores(self, client: Tensor) -> Tensor:
        """Logits ``(clients, items)`` of clients of this rank."""
        if self.federation is None:
            raise ValueError("the model has no sizes yet: give n_users and n_items, or fit it")
        return self.federation.scores(client)

    def on_predict_start(self) -> None:
        """Say which lists come from an untrained client."""
        assert self.federation is not None
        missing = int((~self.federation.taken_part).sum())
        if missing and self.federation_mode != "popularity":
            rank_zero_info(f"{missing} client(s) have never taken part: they score with C alone")

    def figures(self) -> "dict[str, Figure]":
        """Histogram of the entries of the common table, and norms of both views per item."""
        if self.federation is None:
            return {}
        table = self.federation.common.detach().cpu()
        return {"common_table": common_table(table, self.federation.item_counts.cpu())}
