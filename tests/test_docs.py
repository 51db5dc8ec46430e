"""The documentation builds without a warning, and what it shows works."""

import contextlib
import io
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import torch
import yaml
from lightning.pytorch import Callback

from lightning_modules.__main__ import TRAINER_COMMANDS
from lightning_modules.cli import find_config
from lightning_modules.papers import cards

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GUIDES = ["index", "getting-started", "own-data", "callbacks", "multi-gpu", "extending"]
PAGES = sorted(path.name for path in DOCS.glob("*.md"))


def blocks(page: str, language: str) -> list[str]:
    """Code blocks of a page in one language."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_strict_build(tmp_path: Path) -> None:
    """Every link leads somewhere; every page is in the menu, the guides first."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path / "site"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build(config)
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    menu = re.findall(r'<a class="reference internal"\s+href="([\w.-]+)\.html', index)
    methods = sorted(set(map(_stem, PAGES)) - set(GUIDES))
    assert menu == [*GUIDES[1:], *methods]
    for card in cards():
        assert f'<a href="{card.name}.html">{card.title}</a>' in index


def _stem(page: str) -> str:
    return page.removesuffix(".md")


def test_every_method_has_a_page() -> None:
    assert [card.name for card in cards() if f"{card.name}.md" not in PAGES] == []


@pytest.mark.parametrize("page", PAGES)
def test_pages(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert re.match(r"# \S", text), "a page starts with its title"
    assert len(re.findall(r"^```", text, re.MULTILINE)) % 2 == 0


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_what_exists(page: str) -> None:
    text = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    for line in re.findall(r"\biclr24 .*", text):
        command = line.split()[1]
        assert command in {*TRAINER_COMMANDS, "papers", "reproduce", "--version", "--help"}, line
        for flag, value in re.findall(r"--(config|trainer|logger)[ =](\w+/\w+\.yaml)", line):
            assert find_config(value), flag


def run_python(page: str) -> dict[str, Any]:
    """Names left by the Python blocks of a page, run one after the other."""
    names: dict[str, Any] = {"__name__": f"docs_{_stem(page).replace('-', '_')}"}
    module = types.ModuleType(names["__name__"])
    sys.modules[module.__name__] = module
    module.__dict__.update(names)
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), module.__dict__)
    return module.__dict__


@pytest.mark.parametrize("page", [f"{name}.md" for name in GUIDES])
def test_python_of_the_guides_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        names = run_python(page)
    if page == "callbacks.md":
        module = types.ModuleType("my_schedules")
        module.__dict__.update(Warmup=names["Warmup"])
        monkeypatch.setitem(sys.modules, "my_schedules", module)
        names["Warmup"].__module__ = "my_schedules"
        _check_callbacks(page)


def _check_callbacks(page: str) -> None:
    """All callbacks of the page's YAML are built as the command line builds them."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--callbacks", type=list[Callback])
    built = []
    for block in blocks(page, "yaml"):
        built += parser.instantiate(
            parser.parse_object({"callbacks": yaml.safe_load(block)["trainer"]["callbacks"]})
        ).callbacks
    assert len(built) == 5


@pytest.mark.parametrize("page", PAGES)
def test_yaml_can_be_read(page: str) -> None:
    for block in blocks(page, "yaml"):
        assert yaml.safe_load(block)


def test_card_of_the_guide_has_the_fields_of_a_card() -> None:
    (card,) = [b for b in map(yaml.safe_load, blocks("extending.md", "yaml")) if "paper" in b]
    assert set(card) == {"title", "paper", "claim", "data", "module", "extra"}
