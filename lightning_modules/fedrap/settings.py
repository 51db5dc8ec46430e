"""How the server and the rounds work, and what a round reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_modules.fedrap.aggregation import SERVERS, ServerOptimizer
from lightning_modules.fedrap.communication import Traffic

MODES = (
    "additive",
    "global_only",
    "local_only",
    "no_independence",
    "no_sparsity",
    "central",
    "pfedrec",
    "popularity",
)


@dataclass(frozen=True)
class Federating:
    """How the server and the rounds work.

    Args:
        mode: Which method: ``additive`` (FedRAP), ``global_only`` (shared table, personal user
            vector), ``local_only`` (nothing is sent), ``no_independence``, ``no_sparsity``,
            ``central`` (gradients of all clients summed in every step), ``pfedrec`` (personal score
            function, each client scores with its own fine-tuned table), ``popularity``.
        server: What is done with the uploads.
        server_prox: Soft-threshold the new common table (l1 without subgradient).
        round_decay: Factor on all step sizes after every round.
        clip: Largest L2 norm of an upload's change, ``None`` for no limit.
        noise: Standard deviation of the noise on every entry of an upload, over ``clip``.
        zero_threshold: Entries up to this size count as zero on the wire.
        block_rows: Padded rows that are trained at once; ``None`` chooses by device.
        compile: Take closed-form steps on the processor by a compiled kernel.
    """

    mode: str = "additive"
    server: ServerOptimizer = field(default_factory=ServerOptimizer)
    server_prox: bool = False
    round_decay: float = 0.97
    clip: float | None = None
    noise: float = 0.0
    zero_threshold: float = 1e-4
    block_rows: int | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got '{self.mode}'")
        if self.server.kind not in SERVERS:
            raise ValueError(
                f"server must be one of {', '.join(SERVERS)}, got '{self.server.kind}'"
            )
        if self.noise and self.clip is None:
            raise ValueError(f"dp_noise={self.noise} needs dp_clip, the largest norm of an upload")
        if self.clip is not None and self.server.kind == "weighted":
            raise ValueError(
                "dp_clip bounds what one client does to a plain mean: use server='mean', "
                "'fedadam' or 'median' instead of 'weighted'"
            )

    @property
    def personal(self) -> bool:
        """Whether clients train a personal table."""
        return self.mode not in ("global_only", "pfedrec", "popularity")

    @property
    def common(self) -> bool:
        """Whether there is a common table."""
        return self.mode not in ("local_only", "popularity")


class RoundReport(NamedTuple):
    """What a finished round tells: means over its participants and the traffic."""

    clients: int
    loss: float
    epochs_run: float
    sparsity: float
    traffic: Traffic
