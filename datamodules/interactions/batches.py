"""The batches of `Interactions`."""

from typing import NamedTuple

from torch import Tensor


class ClientRound(NamedTuple):
    """What some clients train on in one federated round.

    Attributes:
        client: Client numbers ``(clients,)`` int64, ascending.
        offsets: Where each client's positives begin and end ``(clients + 1,)`` int64.
        positive: Observed training items, repeats allowed ``(positives,)`` int64.
        negative: Items sampled for each positive, labelled 0 ``(positives, negatives)`` int64.
    """

    client: Tensor
    offsets: Tensor
    positive: Tensor
    negative: Tensor


class EvaluationBatch(NamedTuple):
    """Held-out items of some clients.

    Attributes:
        client: Client numbers ``(clients,)`` int64; -1 for a user without training data.
        target: The held-out item ``(clients,)`` int64.
        negative: Sampled items that the client never interacted with, the candidates of the
            paper's protocol ``(clients, negatives)`` int64.
        offsets: Where each client's items begin and end in ``seen`` ``(clients + 1,)`` int64.
        seen: Items that are no candidates when all items are ranked ``(sum of counts,)`` int64.
    """

    client: Tensor
    target: Tensor
    negative: Tensor
    offsets: Tensor
    seen: Tensor
