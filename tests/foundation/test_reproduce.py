"""The laboratory and its report."""

import json
from pathlib import Path

import pytest

from lightning_modules import papers, reproduce
from lightning_modules.__main__ import main
from lightning_modules.papers import Card
from lightning_modules.reproduce import Lab

CARD = Card("toy", "Toy", "A paper <1>", "It works", "generated", "toy.Toy", None, ())


def test_claim_needs_a_bar_and_knows_whether_it_is_met(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    with pytest.raises(ValueError, match="needs at_least or at_most"):
        lab.claim("free", 1.0)
    for value in (1.0, 1.5, 0.9, 2.1, float("nan")):
        lab.claim("x", value, at_least=1.0, at_most=2.0)
    assert [claim.met for claim in lab.claims] == [True, True, False, False, False]
    assert lab.claims[0].bar == ">= 1 and <= 2"


@pytest.mark.parametrize(("value", "code"), [(0.9, 0), (0.1, 1)])
def test_report(value: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(lab: Lab, paper: str) -> None:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots()
        axes.plot([0, 1])
        lab.figure("line", figure)
        plt.close(figure)
        lab.claim("accuracy", value, at_least=0.5, published="0.97")
        lab.note("measured <here>")

    monkeypatch.setattr(reproduce, "select", lambda names: [CARD])
    monkeypatch.setattr(Lab, "run", run)
    assert main(["reproduce", "toy", f"--output={tmp_path}"]) == code
    result = json.loads((tmp_path / "toy.json").read_text())
    assert result["claims"] == [
        {"name": "accuracy", "published": "0.97", "value": value, "bar": ">= 0.5", "met": not code}
    ]
    assert result["figures"] == ["toy/line.png"]
    assert (tmp_path / "toy" / "line.png").is_file()
    page = (tmp_path / "index.html").read_text()
    assert "measured &lt;here&gt;" in page
    assert "src='toy/line.png'" in page


def test_failure_of_one_paper_does_not_lose_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Card("other", "Other", "", "", "", "toy.Toy", None, ())

    def run(lab: Lab, paper: str) -> None:
        if paper == "toy":
            raise ValueError("no data")
        lab.claim("x", 1.0, at_least=0.0)

    monkeypatch.setattr(reproduce, "select", lambda names: [CARD, other])
    monkeypatch.setattr(Lab, "run", run)
    assert main(["reproduce", f"--output={tmp_path}"]) == 1
    assert json.loads((tmp_path / "toy.json").read_text())["error"] == "no data"
    assert json.loads((tmp_path / "other.json").read_text())["claims"][0]["met"]


def test_lab_builds_and_fits(lab: Lab, tmp_path: Path) -> None:
    data = lab.build("toy.ToyData", batch_size=8)
    assert len(data.train_set) == 70
    config = tmp_path / "toy.yaml"
    config.write_text(
        "{trainer: {max_epochs: 1, accelerator: cpu}, "
        "model: {class_path: toy.Toy}, data: {class_path: toy.ToyData}}"
    )
    run = lab.fit(str(config), "--trainer.max_epochs=2")
    assert run.trainer.current_epoch == 2
    assert run.metrics["val/loss"] > 0


def test_papers_lists_every_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["papers", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [card["name"] for card in listed] == [card.name for card in papers.cards()]
    assert main(["papers"]) == 0
    output = capsys.readouterr().out
    for card in papers.cards():
        assert card.claim in output
    assert main(["papers", "no_such"]) == 2


def test_readme_has_the_table_of_all_methods() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert papers.markdown_table(papers.cards()) in readme
