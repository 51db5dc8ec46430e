"""The scaled-down claims of the papers: measured in a `Lab`, reported as HTML and JSON.

Each room defines `reproduce(lab)` in its `claims.py`; that one definition serves this command,
the tests and the documentation.
"""

import argparse
import html
import importlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_modules.papers import Card, select

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Claim:
    """One number and the bar it has to pass.

    Attributes:
        name: What the number is.
        value: What was measured.
        at_least: Lower bar, if any.
        at_most: Upper bar, if any.
        published: What the paper says, in words.
    """

    name: str
    value: float
    at_least: float | None
    at_most: float | None
    published: str | None

    @property
    def met(self) -> bool:
        """Whether the value is a number within the bars."""
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        return math.isfinite(self.value) and low <= self.value <= high

    @property
    def bar(self) -> str:
        """The bar in words, as `>= 0.5`."""
        low = f">= {self.at_least:g}" if self.at_least is not None else ""
        high = f"<= {self.at_most:g}" if self.at_most is not None else ""
        return " and ".join(part for part in (low, high) if part)


@dataclass
class Run:
    """A finished training run.

    Attributes:
        trainer: Its trainer.
        model: The module with its last weights.
        datamodule: The data.
        metrics: Last value of every logged metric.
    """

    trainer: "Trainer"
    model: "LightningModule"
    datamodule: "LightningDataModule"
    metrics: dict[str, float]


class Lab:
    """Where the claims of one paper are measured.

    Args:
        folder: Where runs and figures are written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.claims: list[Claim] = []
        self.figures: list[Path] = []
        self.notes: list[str] = []
        self._runs = 0

    def run(self, paper: str) -> None:
        """Measure all claims of a paper."""
        importlib.import_module(f"lightning_modules.{paper}.claims").reproduce(self)
        if not self.claims:
            raise RuntimeError(f"{paper}: reproduce(lab) made no claim")

    def build(self, class_path: str, **arguments: Any) -> Any:
        """Build an object by class path; a datamodule is also prepared and set up."""
        from lightning.pytorch import LightningDataModule

        module, _, name = class_path.rpartition(".")
        built = getattr(importlib.import_module(module), name)(**arguments)
        if isinstance(built, LightningDataModule):
            built.prepare_data()
            built.setup("fit")
        return built

    def fit(self, config: str, *words: str) -> Run:
        """Train through the command line, in this process and without loggers.

        Args:
            config: Config file or packaged name.
            *words: Further command-line words, as `--trainer.max_epochs=2`.
        """
        from lightning_modules.cli import run_cli

        self._runs += 1
        cli = run_cli(
            [
                "fit",
                f"--config={config}",
                f"--trainer.default_root_dir={self.folder / f'run-{self._runs}'}",
                "--trainer.logger=false",
                "--trainer.enable_progress_bar=false",
                "--trainer.enable_model_summary=false",
                *words,
            ]
        )
        metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
        return Run(cli.trainer, cli.model, cli.datamodule, metrics)

    def claim(
        self,
        name: str,
        value: float,
        at_least: float | None = None,
        at_most: float | None = None,
        published: str | None = None,
    ) -> None:
        """Record a number with its bar.

        Raises:
            ValueError: If there is no bar: a claim that cannot fail is none.
        """
        if at_least is None and at_most is None:
            raise ValueError(f"claim '{name}' needs at_least or at_most")
        self.claims.append(Claim(name, float(value), at_least, at_most, published))

    def figure(self, name: str, figure: "Figure") -> None:
        """Save a figure as `<name>.png`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name}.png"
        figure.savefig(path, dpi=150, bbox_inches="tight")
        self.figures.append(path)

    def note(self, text: str) -> None:
        """Add a sentence to the report."""
        self.notes.append(text)


@dataclass
class Result:
    """What became of the claims of one paper."""

    card: Card
    seconds: float
    lab: Lab
    error: str | None

    @property
    def met(self) -> bool:
        """Whether every claim was measured and met."""
        return self.error is None and all(claim.met for claim in self.lab.claims)

    def as_json(self, root: Path) -> dict[str, Any]:
        """Plain values of the report."""
        result: dict[str, Any] = {
            "paper": self.card.name,
            "seconds": round(self.seconds, 1),
            "claims": [
                {
                    "name": claim.name,
                    "published": claim.published,
                    "value": claim.value if math.isfinite(claim.value) else None,
                    "bar": claim.bar,
                    "met": claim.met,
                }
                for claim in self.lab.claims
            ],
            "figures": [str(path.relative_to(root)) for path in self.lab.figures],
            "notes": self.lab.notes,
        }
        if self.error:
            result["error"] = self.error
        return result


def reproduce_command(words: Sequence[str]) -> int:
    """Run `iclr24 reproduce`; returns 1 if a claim is not met."""
    parser = argparse.ArgumentParser(
        prog="iclr24 reproduce",
        description="Measure the scaled-down claims of the papers on their embedded data.",
    )
    parser.add_argument("paper", nargs="*", help="only these (default: all)")
    parser.add_argument("--output", default="reproduction", help="folder of the report")
    arguments = parser.parse_args(list(words))
    chosen = select(arguments.paper)
    root = Path(arguments.output)
    root.mkdir(parents=True, exist_ok=True)
    results = []
    for card in chosen:
        print(f"{card.name}: measuring", flush=True)
        result = _measure(card, root)
        text = json.dumps(result.as_json(root), indent=2, ensure_ascii=False)
        (root / f"{card.name}.json").write_text(text, encoding="utf-8")
        results.append(result)
        for claim in result.lab.claims:
            state = "met " if claim.met else "MISS"
            print(f"  {state}  {claim.name}: {claim.value:.4g} ({claim.bar})")
        if result.error:
            print(f"  ERROR {result.error}")
        # written after each paper, so that nothing is lost by an interruption
        (root / "index.html").write_text(report(results, root), encoding="utf-8")
    print(f"report: {root / 'index.html'}")
    return 0 if all(result.met for result in results) else 1


def _measure(card: Card, root: Path) -> Result:
    from lightning_modules.cli import quiet
    from lightning_modules.errors import explain_failure

    lab = Lab(root / card.name)
    start = time.perf_counter()
    error = None
    try:
        with quiet():
            lab.run(card.name)
    except Exception as failure:
        error = explain_failure(failure)
    return Result(card, time.perf_counter() - start, lab, error)


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c2733; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .4rem .8rem .4rem 0; border-bottom: 1px solid #d8dee4; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
.met { color: #0a6b3d; font-weight: 600; } .missed { color: #a4161a; font-weight: 600; }
img { max-width: 100%; } .quiet { color: #5b6875; }
"""


def report(results: Sequence[Result], root: Path) -> str:
    """The report as one HTML page."""
    esc = html.escape
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f"<title>Claims of the papers</title><style>{_STYLE}</style></head><body>",
        "<h1>Claims of the papers, scaled down</h1>",
    ]
    for result in results:
        card = result.card
        parts.append(f'<h2 id="{card.name}">{esc(card.title)}</h2>')
        parts.append(f"<p>{esc(card.claim)}</p><p class='quiet'>{esc(card.paper)}; ")
        parts.append(f"{result.seconds:.0f} s</p>")
        if result.error:
            parts.append(f"<p class='missed'>Failed: {esc(result.error)}</p>")
        parts.append("<table><tr><th>claim<th>paper<th>ours<th>bar<th></tr>")
        for claim in result.lab.claims:
            state = "met" if claim.met else "missed"
            parts.append(
                f"<tr><td>{esc(claim.name)}<td>{esc(claim.published or '–')}"
                f"<td class='number'>{claim.value:.4g}<td class='number'>{esc(claim.bar)}"
                f"<td class='{state}'>{state}</tr>"
            )
        parts.append("</table>")
        parts += [f"<p>{esc(note)}</p>" for note in result.lab.notes]
        for path in result.lab.figures:
            source = esc(str(path.relative_to(root)))
            parts.append(f"<p><img src='{source}' alt='{esc(path.stem)}'></p>")
    parts.append("</body></html>")
    return "\n".join(parts)
