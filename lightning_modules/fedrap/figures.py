"""Pictures of the common table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def common_table(common: Tensor, item_counts: Tensor) -> Figure:
    """Histogram of the entries, and the norm of every item by how often it was seen.

    Args:
        common: ``C`` ``(items, width)``.
        item_counts: Positives of every item so far ``(items,)``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3))
    left, right = figure.subplots(1, 2)
    left.hist(common.flatten().numpy(), bins=80)
    left.set(title="entries of the common table", xlabel="value")
    # Logarithms are taken by hand: typesetting a log axis costs more than a round.
    seen = (item_counts + 1).log10()
    right.scatter(seen.numpy(), common.norm(dim=1).numpy(), s=4)
    right.set(title="norm of an item by log10 of its count", xlabel="log10(1 + times seen)")
    figure.subplots_adjust(left=0.06, right=0.98, bottom=0.18, top=0.88)
    return figure
