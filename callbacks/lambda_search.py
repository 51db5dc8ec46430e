"""Chooses the scale of a sampler's noise before testing."""

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

__all__ = ["HasSampleDistance", "LambdaSearch"]


@runtime_checkable
class HasSampleDistance(Protocol):
    """Measures its samples at a scale, on the same noise for every call."""

    epsilon_scale: float

    def sample_distance(self, scale: float, samples: int) -> float:
        """Distance of `samples` samples, drawn with this scale, from the reference."""
        ...

    def search_scale(
        self, low: float, high: float, evaluations: int, candidates: Sequence[float], samples: int
    ) -> tuple[float, list[tuple[float, float]]]:
        """Best scale and every (scale, distance) tried; a grid if there are candidates."""
        ...


class LambdaSearch(Callback):
    """Sets ``epsilon_scale`` of the module to the best of a search, before each test.

    The search uses its own noise, but the same reference images as the test: the test's distance
    at the chosen scale is therefore slightly optimistic, and a line says so.

    Args:
        method: "golden" (golden section, for one minimum) or "grid".
        low: Lower end of the golden section.
        high: Upper end.
        evaluations: Runs of the golden section, at least 4.
        grid: Scales of the grid.
        samples: Samples of one evaluation over all ranks.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If the module cannot measure its samples.
    """

    def __init__(
        self,
        method: Literal["golden", "grid"] = "golden",
        low: float = 1.0,
        high: float = 1.06,
        evaluations: int = 8,
        grid: list[float] | None = None,
        samples: int = 2000,
    ) -> None:
        super().__init__()
        if method not in ("golden", "grid"):
            raise ValueError(f"method must be 'golden' or 'grid', got {method!r}")
        if not 0 < low < high:
            raise ValueError(f"need 0 < low < high, got {low} and {high}")
        if evaluations < 4:
            raise ValueError(f"evaluations must be at least 4, got {evaluations}")
        if method == "grid" and not grid:
            raise ValueError("method 'grid' needs grid, a list of scales")
        if samples < 2:
            raise ValueError(f"samples must be at least 2, got {samples}")
        self.method, self.low, self.high = method, low, high
        self.evaluations, self.grid, self.samples = evaluations, list(grid or []), samples
        self.tried: list[tuple[float, float]] = []

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search and set the scale."""
        if not isinstance(pl_module, HasSampleDistance):
            raise TypeError(
                f"LambdaSearch needs a module with search_scale, not {type(pl_module).__name__}"
            )
        candidates = self.grid if self.method == "grid" else []
        best, self.tried = pl_module.search_scale(
            self.low, self.high, self.evaluations, candidates, self.samples
        )
        pl_module.epsilon_scale = best
        rank_zero_info(
            f"epsilon_scale = {best:.5g}, the best of {len(self.tried)} on {self.samples} samples; "
            "chosen on the reference that the test uses"
        )
