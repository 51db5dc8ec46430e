"""Bytes that a federated method would have sent."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["CommunicationCost", "HasTraffic", "RoundTraffic"]


class RoundTraffic(Protocol):
    """Bytes of one round over all participants.

    Attributes:
        down: from the server, in the cheaper encoding of each message.
        up: to the server, likewise.
        dense: both directions if every table went dense.
        clients: number of participants.
    """

    @property
    def down(self) -> int: ...  # noqa: D102

    @property
    def up(self) -> int: ...  # noqa: D102

    @property
    def dense(self) -> int: ...  # noqa: D102

    @property
    def clients(self) -> int: ...  # noqa: D102


@runtime_checkable
class HasTraffic(Protocol):
    """Says after every round what it sent.

    Attributes:
        round_traffic: the last finished round, ``None`` before the first; read, then set to
            ``None`` by the callback.
    """

    round_traffic: RoundTraffic | None


class CommunicationCost(Callback):
    """Logs the traffic of every federated round and the sum so far.

    Logged after each round, in megabytes (10^6 bytes): ``traffic/down_mb``, ``traffic/up_mb``,
    ``traffic/total_mb`` (all rounds so far), ``traffic/per_client_mb``, and ``traffic/ratio``, what
    was sent over what dense tables would have cost. The sums are in the checkpoint.

    Raises:
        ValueError: At the start of ``fit`` for a module without ``round_traffic``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total_bytes = 0
        self.total_dense_bytes = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that there is something to count."""
        if not isinstance(pl_module, HasTraffic):
            raise ValueError(
                f"CommunicationCost needs a federated method with `round_traffic`; "
                f"{type(pl_module).__name__} has none: remove the callback"
            )

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count and log a round that has just ended."""
        assert isinstance(pl_module, HasTraffic)
        traffic = pl_module.round_traffic
        if traffic is None:
            return
        pl_module.round_traffic = None
        sent = traffic.down + traffic.up
        self.total_bytes += sent
        self.total_dense_bytes += traffic.dense
        values = {
            "traffic/down_mb": traffic.down / 1e6,
            "traffic/up_mb": traffic.up / 1e6,
            "traffic/total_mb": self.total_bytes / 1e6,
            "traffic/per_client_mb": sent / 1e6 / max(traffic.clients, 1),
        }
        if traffic.dense:
            values["traffic/ratio"] = sent / traffic.dense
        pl_module.log_dict(values, on_step=False, on_epoch=True, batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """Sums over all rounds."""
        return {"total_bytes": self.total_bytes, "total_dense_bytes": self.total_dense_bytes}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the sums."""
        self.total_bytes = int(state_dict["total_bytes"])
        self.total_dense_bytes = int(state_dict["total_dense_bytes"])
