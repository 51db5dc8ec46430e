"""A federation simulated in one process per rank: its state, a round, and its scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_modules.fedrap.aggregation import (
    TableProfile,
    median_change,
    shrink,
    untouched_nonzeros,
    untouched_sum,
    upload_change_norm,
    upload_nonzeros,
)
from lightning_modules.fedrap.communication import Traffic, encoded_bytes, sparsity
from lightning_modules.fedrap.local_training import (
    BlockResult,
    LocalTraining,
    soft_threshold,
    train_block,
)
from lightning_modules.fedrap.native import NativeStep, native_step
from lightning_modules.fedrap.personal_store import DensePersonal, LazyPersonal, Personal
from lightning_modules.fedrap.schedule import Block, Order, Samples, build_blocks
from lightning_modules.fedrap.settings import Federating, RoundReport

# Columns of the record that a round keeps of every client.
PRESENT, WEIGHT, SCALE, DECAY, SHIFT, LOSS, EPOCHS, NONZERO, THRESHOLD = range(9)


class Federation(nn.Module):
    """State of the server and of this rank's clients.

    Args:
        initial_common: ``C`` at the start ``(items, width)``.
        initial_personal: ``D`` that all clients start from ``(items, width)``.
        initial_vector: ``u`` that all clients start from ``(width,)``.
        initial_bias: ``b`` that all clients start from, scalar or ``(1,)``.
        clients: Number of clients of the federation.
        settings: Server and rounds.
        store: ``dense`` or ``lazy`` personal tables.
        rank: Rank of this process.
        world_size: Number of processes; client ``i`` lies on rank ``i % world_size``.

    Raises:
        ValueError: For settings that do not go together or tables that do not fit in memory.
    """

    common: Tensor
    vector: Tensor
    bias: Tensor
    taken_part: Tensor
    item_counts: Tensor
    round_rows: Tensor
    round_clients: Tensor
    round_nonzero: Tensor
    first_moment: Tensor
    second_moment: Tensor
    rounds: Tensor

    def __init__(
        self,
        initial_common: Tensor,
        initial_personal: Tensor,
        initial_vector: Tensor,
        initial_bias: Tensor,
        clients: int,
        settings: Federating | None = None,
        store: str = "dense",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__()
        self.settings = settings or Federating()
        self.clients, self.rank, self.world_size = clients, rank, world_size
        # Under central privacy with Poisson participation the number of participants is itself
        # private: the average divides by this constant and gets the noise of as many clients.
        self.expected_clients: float | None = None
        items, width = initial_common.shape
        local = len(range(rank, clients, world_size))
        mode = self.settings.mode
        self.personal: Personal | None = None
        if mode == "pfedrec":
            if store == "lazy":
                raise ValueError("store='lazy' does not go with mode='pfedrec': use 'dense'")
            self.personal = DensePersonal(initial_common, local)
        elif self.settings.personal:
            kind = LazyPersonal if store == "lazy" else DensePersonal
            self.personal = kind(initial_personal, local)
        common = initial_common if self.settings.common else torch.zeros_like(initial_common)
        adaptive = self.settings.server.kind == "fedadam"
        moments = (items, width) if adaptive else (0, width)
        # copies: a buffer must not share memory with the caller's tensors
        self.register_buffer("common", common.clone())
        self.register_buffer("vector", initial_vector.repeat(local, 1))
        self.register_buffer("bias", initial_bias.reshape(1).repeat(local))
        self.register_buffer("taken_part", torch.zeros(local, dtype=torch.bool))
        self.register_buffer("item_counts", torch.zeros(items, dtype=torch.int64))
        self.register_buffer("round_rows", torch.zeros(items, width, dtype=torch.float64))
        # How many uploads are not zero at an entry, beyond those of untouched copies.
        self.register_buffer("round_nonzero", torch.zeros(items, width, dtype=torch.int64))
        self.register_buffer("round_clients", torch.zeros(clients, 9, dtype=torch.float64))
        self.register_buffer("first_moment", torch.zeros(moments, dtype=common.dtype))
        self.register_buffer("second_moment", torch.zeros(moments, dtype=common.dtype))
        self.register_buffer("rounds", torch.zeros((), dtype=torch.int64))
        self.counts_before = self.item_counts.clone()  # without the present round
        self.uploads: list[tuple[Tensor, Tensor, Tensor]] = []  # only kept for the median
        self._profile: tuple[int, TableProfile] | None = None

    # ------------------------------------------------------------------ a round

    @torch.no_grad()
    def train_clients(
        self, client: Tensor, samples: Samples, order: Order, training: LocalTraining
    ) -> None:
        """Train some of the round's participants and take in their uploads.

        Args:
            client: Numbers of the clients, all of this rank ``(clients,)``.
            samples: Their samples, with ``samples.client`` a position in ``client``.
            order: How these are fed.
            training: Step sizes of the first round; they decay by `Federating.round_decay`.
        """
        positives = samples.item[samples.label > 0]
        self.item_counts += torch.bincount(positives, minlength=len(self.item_counts))
        present = torch.zeros_like(self.round_clients[client])
        present[:, PRESENT] = 1.0
        present[:, SCALE] = 1.0
        present[:, DECAY] = 1.0
        present[:, WEIGHT] = torch.bincount(samples.client, minlength=len(client))
        present[:, NONZERO] = self._profile_of_round().above(
            self.common.new_tensor([self.settings.zero_threshold])
        )
        self.round_clients[client] = present
        if self.settings.mode == "popularity":
            return
        training = self._in_this_round(training)
        for block in build_blocks(
            samples,
            order,
            len(client),
            len(self.common),
            self._block_rows(),
            training.objective.scope == "table",
        ):
            self._train_block(block, client[block.client], training)

    def _in_this_round(self, training: LocalTraining) -> LocalTraining:
        mode = self.settings.mode
        factor = self.settings.round_decay ** int(self.rounds)
        objective = training.objective
        if mode == "no_independence" or not (self.settings.personal and self.settings.common):
            objective = replace(objective, independence=0.0)
        if mode in ("no_sparsity", "pfedrec") or not self.settings.common:
            objective = replace(objective, sparsity=0.0)
        return replace(
            training,
            objective=objective,
            lr_network=training.lr_network * factor,
            lr_common=training.lr_common * factor,
            lr_personal=training.lr_personal * factor,
            epochs=1 if mode == "central" else training.epochs,
            trains_personal=self.settings.personal,
            trains_common=self.settings.common,
        )

    def _block_rows(self) -> int:
        if self.settings.block_rows is not None:
            return self.settings.block_rows
        if self.common.device.type != "cpu":
            return 1 << 20  # an accelerator wants large launches
        # Plain PyTorch wants a block in the core's cache. The kernel passes over it so seldom that
        # fewer calls are worth more.
        return 32768 if self.settings.compile else 6144

    def _kernel(self) -> NativeStep | None:
        if not self.settings.compile or self.common.device.type != "cpu":
            return None
        return native_step(self.common.dtype, self.common.shape[1])

    def _profile_of_round(self) -> TableProfile:
        number = int(self.rounds)
        if self._profile is None or self._profile[0] != number:
            self._profile = (number, TableProfile(self.common))
        return self._profile[1]

    def _train_block(self, block: Block, client: Tensor, training: LocalTraining) -> None:
        local = client // self.world_size
        start = self.common.index_select(0, block.item.view(-1)).view(*block.item.shape, -1)
        trains = self.settings.personal and self.personal is not None
        personal = self.personal.rows(local, block.item) if trains else torch.zeros_like(start)  # type: ignore[union-attr]
        own = training
        if self.settings.server_prox:
            # The clients leave the l1 term alone, the server takes it up after averaging.
            own = replace(training, objective=replace(training.objective, sparsity=0.0))
        vector, bias, kernel = self.vector[local], self.bias[local], self._kernel()
        result = train_block(block, personal, start, vector, bias, own, kernel)
        self._check_finite(result, client, training)
        self.vector[local], self.bias[local] = result.vector, result.bias
        self.taken_part[local] = True
        self.round_clients[client, LOSS] = result.loss.double()
        self.round_clients[client, EPOCHS] = result.epochs_run.double()
        if trains:
            assert self.personal is not None
            rows, decay = result.personal, result.personal_decay
            if kernel is not None and isinstance(self.personal, DensePersonal):
                tables = self.personal.table
                kernel.store(block.mask.sum(1), block.item, local, rows, decay, tables)
            else:
                self.personal.write(local, block.item, block.mask, rows, decay)
        if not self.settings.common:
            return
        if self.settings.mode == "pfedrec":
            assert isinstance(self.personal, DensePersonal)
            base = shrink(
                self.common,
                result.common_decay[:, None, None],
                result.common_shift[:, None, None],
            )
            self.personal.replace(local, base, block.item, block.mask, result.common)
        self._upload(block, client, start, result)
        if self.settings.server_prox and training.objective.mu:
            self._note_threshold(block, client, result, training)

    def _note_threshold(
        self, block: Block, client: Tensor, result: BlockResult, training: LocalTraining
    ) -> None:
        """Sum over the client's steps of ``lr mu / (B k)``, with its mean batch size."""
        decay = training.step_decay
        steps = result.steps.double()
        total = steps if decay == 1 else (1 - decay**steps) / (1 - decay)
        samples = self.round_clients[client, WEIGHT]
        size = samples / block.slots_per_epoch if block.slots_per_epoch > 1 else samples
        amount = total * training.lr_common * training.objective.mu
        self.round_clients[client, THRESHOLD] = amount / (size * self.common.shape[1])

    def _upload(self, block: Block, client: Tensor, start: Tensor, result: BlockResult) -> None:
        settings, profile = self.settings, self._profile_of_round()
        described = (start, result.common, block.mask, result.common_decay, result.common_shift)
        record = self.round_clients[client]
        record[:, DECAY] = result.common_decay.double()
        record[:, SHIFT] = result.common_shift.double()
        if settings.clip is not None:
            norm = upload_change_norm(profile, *described)
            record[:, SCALE] = (settings.clip / norm.clamp_min(1e-30)).clamp_max(1.0).double()
        weight = record[:, SCALE]
        if settings.server.kind == "weighted":
            weight = weight * record[:, WEIGHT]
        kernel, threshold = self._kernel(), settings.zero_threshold
        if kernel is None or settings.server.kind == "median" or result.common_shift.any():
            nonzero = upload_nonzeros(profile, *described, threshold)
            self._keep_upload(block, client, start, result, weight)
        else:
            nonzero = untouched_nonzeros(
                profile, result.common_decay, result.common_shift, threshold
            )
            nonzero += kernel.collect(
                block.mask.sum(1),
                block.item,
                start,
                result.common,
                result.common_decay,
                weight,
                threshold,
                self.round_rows,
            )
        # Noise leaves no entry at zero.
        record[:, NONZERO] = self.common.numel() if settings.noise else nonzero.double()
        self.round_clients[client] = record

    def _keep_upload(
        self, block: Block, client: Tensor, start: Tensor, result: BlockResult, weight: Tensor
    ) -> None:
        """Keep a block's uploads for the median, or add them up for the mean."""
        if self.settings.server.kind == "median":
            owner = client[:, None].expand_as(block.item)[block.mask]
            self.uploads.append((owner, block.item[block.mask], result.common[block.mask]))
            return
        untouched = shrink(
            start, result.common_decay[:, None, None], result.common_shift[:, None, None]
        )
        if bool((result.common_shift > 0).any()):
            gained = (result.common != 0).long() - (untouched != 0).long()
            gained = gained * block.mask[..., None]
            self.round_nonzero.index_add_(
                0, block.item.reshape(-1), gained.view(-1, gained.shape[-1])
            )
        change = (result.common - untouched).double() * weight[:, None, None]
        width = self.common.shape[1]
        self.round_rows.index_add_(
            0, block.item.reshape(-1), (change * block.mask[..., None]).view(-1, width)
        )

    def _check_finite(self, result: BlockResult, client: Tensor, training: LocalTraining) -> None:
        good = torch.isfinite(result.loss) & torch.isfinite(result.vector).all(1)
        if bool(good.all()):
            return
        first = int(client[~good][0])
        raise ValueError(
            f"the loss of client {first} is not finite in round {int(self.rounds)} with step sizes "
            f"lr_network={training.lr_network:g}, lr_item={training.lr_common:g}, "
            f"lr_personal={training.lr_personal:g}: lower them, or the independence weight "
            f"{training.objective.independence:g} (its term has no lower bound)"
        )

    @torch.no_grad()
    def finish_round(
        self,
        noise: torch.Generator | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> RoundReport:
        """Average the uploads, step the server, and start the next round.

        Args:
            noise: Source of the privacy noise, equal on all ranks.
            reduce: Sum over ranks; ``None`` with one process.
            gather: Concatenation over ranks along the first dimension; only for the median.
        """
        reduce = reduce or (lambda tensor: tensor)
        # Clients are disjoint over ranks, so that a sum puts their records together.
        records = reduce(self.round_clients.clone())
        taking_part = torch.nonzero(records[:, PRESENT])[:, 0]
        records = records[taking_part]
        before = int(
            self._profile_of_round().above(self.common.new_tensor([self.settings.zero_threshold]))
        )
        if self.settings.common and (len(records) or self.expected_clients):
            change = self._average(records, taking_part, noise, reduce, gather)
            silent = self._silent_entries(records, reduce)
            self.common = self.settings.server.apply(
                self.common, change, self.first_moment, self.second_moment
            )
            if silent is not None:
                self.common.masked_fill_(silent, 0.0)
            if self.settings.server_prox and len(records):
                self.common = soft_threshold(self.common, float(records[:, THRESHOLD].mean()))
        if isinstance(self.personal, LazyPersonal):
            self.personal.flush()
        report = RoundReport(
            len(records),
            float(records[:, LOSS].mean()) if len(records) else math.nan,
            float(records[:, EPOCHS].mean()) if len(records) else 0.0,
            sparsity(self.common, self.settings.zero_threshold),
            self._traffic(records, before),
        )
        self.round_rows.zero_()
        self.round_nonzero.zero_()
        self.round_clients.zero_()
        self.uploads = []
        self.rounds += 1
        return report

    def _average(
        self,
        records: Tensor,
        client: Tensor,
        noise: torch.Generator | None,
        reduce: Callable[[Tensor], Tensor],
        gather: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        settings, device = self.settings, self.common.device
        deviation = settings.noise * (settings.clip or 0.0)
        if settings.server.kind == "median":
            owner, item, rows = self.stacked_uploads()
            if gather is not None:
                owner, item, rows = gather(owner), gather(item), gather(rows)
            return median_change(
                self.common.double(),
                records[:, DECAY],
                records[:, SHIFT],
                torch.searchsorted(client, owner),
                item,
                rows.double(),
                records[:, SCALE],
                deviation,
                noise,
            )
        weight = records[:, WEIGHT] if settings.server.kind == "weighted" else records[:, PRESENT]
        total = float(self.expected_clients or weight.sum())
        share = weight * records[:, SCALE] / total
        change = untouched_sum(self.common, share, records[:, DECAY], records[:, SHIFT])
        rows = reduce(self.round_rows.clone())
        change = change + (rows if settings.mode == "central" else rows / total)
        if deviation:
            # The noise of all uploads together, averaged.
            squares = float(self.expected_clients or weight.square().sum())
            change = change + deviation * math.sqrt(squares) / total * torch.randn(
                change.shape, generator=noise, dtype=change.dtype, device=device
            )
        return change

    def _silent_entries(self, records: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Entries at which every upload is exactly zero, so that their average is.

        The sum over uploads is a difference of sums and would leave rounding errors there.
        """
        averages = self.settings.server.kind in ("mean", "weighted")
        as_sent = averages and self.settings.server.lr == 1.0 and not self.settings.noise
        shift = records[:, SHIFT]
        if not as_sent or not bool((shift > 0).any()) or bool((records[:, SCALE] < 1).any()):
            return None
        border = torch.sort(shift / records[:, DECAY]).values
        size = self.common.abs().double()
        untouched = torch.searchsorted(border, size.contiguous(), right=False)
        return (untouched + reduce(self.round_nonzero.clone())) == 0

    def stacked_uploads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Client, item and rows of all uploads that are kept for the median."""
        device = self.common.device
        if not self.uploads:
            none = torch.zeros(0, dtype=torch.int64, device=device)
            return none, none, self.common[:0]
        owner, item, rows = (torch.cat(parts) for parts in zip(*self.uploads, strict=True))
        return owner, item, rows

    def _traffic(self, records: Tensor, nonzeros_down: int) -> Traffic:
        clients, entries = len(records), self.common.numel()
        value = self.common.element_size()
        if not self.settings.common or not clients:
            return Traffic(0, 0, 0, clients)
        down = encoded_bytes(torch.tensor([nonzeros_down]), entries, value)
        up = encoded_bytes(records[:, NONZERO].long(), entries, value)
        return Traffic(int(down) * clients, int(up.sum()), 2 * entries * value * clients, clients)

    # ------------------------------------------------------------------ scores

    @torch.no_grad()
    def scores(self, client: Tensor, chunk: int = 64) -> Tensor:
        """Logits of all items.

        Args:
            client: Numbers of clients of this rank, -1 for a user without a state ``(clients,)``.
            chunk: Clients whose tables are looked at together.

        Returns:
            ``(clients, items)``. An unknown user gets the common table with the mean vector of all
            clients that took part, or the popularity if nothing is common.
        """
        if self.settings.mode == "popularity":
            return self.item_counts.to(self.common.dtype).expand(len(client), -1)
        return torch.cat(
            [self._scores(part) for part in torch.split(client, chunk)] or [self.common[:0, 0]]
        )

    def _scores(self, client: Tensor) -> Tensor:
        known = client >= 0
        local = client.clamp_min(0) // self.world_size
        vector, bias = self.vector[local], self.bias[local]
        if self.settings.mode == "pfedrec":
            assert self.personal is not None
            own = (known & self.taken_part[local])[:, None, None]
            table = torch.where(own, self.personal.tables(local), self.common)
            logits = torch.bmm(table, vector[..., None])[..., 0] + bias[:, None]
        else:
            logits = vector @ self.common.T + bias[:, None]
            if self.personal is not None:
                tables = self.personal.tables(local)
                logits = logits + torch.bmm(tables, vector[..., None])[..., 0]
        if not bool(known.all()):
            logits[~known] = self._cold_scores()
        return logits

    def _cold_scores(self) -> Tensor:
        if not self.settings.common or not bool(self.taken_part.any()):
            return self.item_counts.to(self.common.dtype)
        vector = self.vector[self.taken_part].mean(0)
        return self.common @ vector + self.bias[self.taken_part].mean()
