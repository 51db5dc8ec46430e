"""The list of methods, read from their cards; imports neither torch nor lightning."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path


@dataclass(frozen=True)
class Card:
    """What a method is, in one line each.

    Attributes:
        name: Name of the room.
        title: Short name of the method.
        paper: Title and number of the paper.
        claim: What the paper claims and the suite shows.
        data: Embedded data, and the formats that can be read.
        module: Class path of the module.
        extra: Extra of the distribution that it needs.
        configs: Packaged configs.
    """

    name: str
    title: str
    paper: str
    claim: str
    data: str
    module: str
    extra: str | None
    configs: tuple[str, ...]


def cards() -> list[Card]:
    """Cards of all methods, by name."""
    import yaml

    found = []
    for path in sorted(Path(str(files("configs"))).glob("*/card.yaml")):
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
        names = sorted(p.name for p in path.parent.glob("*.yaml") if p.name != "card.yaml")
        configs = tuple(f"{path.parent.name}/{name}" for name in names)
        found.append(Card(name=path.parent.name, configs=configs, **fields))
    return found


def papers_command(words: Sequence[str]) -> int:
    """Run `iclr24 papers`."""
    parser = argparse.ArgumentParser(prog="iclr24 papers", description="List the methods.")
    parser.add_argument("paper", nargs="*", help="only these")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument("--markdown", action="store_true", help="print as a table for a README")
    arguments = parser.parse_args(list(words))
    chosen = select(arguments.paper)
    if arguments.json:
        print(json.dumps([asdict(card) for card in chosen], indent=2, ensure_ascii=False))
        return 0
    if arguments.markdown:
        print(markdown_table(chosen))
        return 0
    for card in chosen:
        extra = f"\n  needs    pip install 'iclr24[{card.extra}]'" if card.extra else ""
        print(
            f"{card.name}: {card.title}\n  paper    {card.paper}\n  claim    {card.claim}\n"
            f"  data     {card.data}\n  module   {card.module}{extra}\n"
            f"  configs  {', '.join(card.configs)}\n"
        )
    return 0


def markdown_table(chosen: Sequence[Card]) -> str:
    """Table of methods with links to their pages, relative to the root of the repository."""
    rows = ["| method | what it shows | data | config |", "| --- | --- | --- | --- |"]
    rows += [
        f"| [{card.title}](docs/{card.name}.md) | {card.claim} | {card.data} "
        f"| `{card.name}/default.yaml` |"
        for card in chosen
    ]
    return "\n".join(rows)


def select(names: Sequence[str]) -> list[Card]:
    """Cards of the named methods, of all if none is named.

    Raises:
        UserError: If there is no such method.
    """
    from lightning_modules.errors import UserError, nearest

    known = {card.name: card for card in cards()}
    for name in names:
        if name not in known:
            raise UserError(
                f"there is no paper '{name}'{nearest(name, known)}: use {', '.join(known)}"
            )
    return [known[name] for name in names] if names else list(known.values())
