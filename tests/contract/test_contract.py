"""The contract that every method keeps, whatever it does.

Each method brings `configs/<paper>/default.yaml` and `tests/<paper>/contract.yaml`, a second config
that makes the first one small: at least two epochs of at least three batches.
"""

import csv
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from interrupt import InterruptedRunError
from offline_wandb import read_offline_run
from torchmetrics import Metric

import configs
from lightning_modules.__main__ import main
from lightning_modules.cli import SuiteCLI, run_cli

ROOT = Path(__file__).parents[2]
CONFIGS = Path(configs.__path__[0])
PAPERS = sorted(path.parent.name for path in CONFIGS.glob("*/default.yaml"))
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]

# one worker keeps what the tests of one paper share
pytestmark = [
    pytest.mark.parametrize(
        "paper",
        [pytest.param(p, marks=pytest.mark.xdist_group(f"contract-{p}")) for p in PAPERS],
        scope="session",
    )
]


def words(paper: str, command: str, folder: Path, *more: str) -> list[str]:
    """Command line of the small run of a paper, without loggers."""
    return [
        command,
        f"--config={paper}/default.yaml",
        f"--config={ROOT / 'tests' / paper / 'contract.yaml'}",
        f"--trainer.default_root_dir={folder}",
        "--trainer.accelerator=cpu",
        "--trainer.logger=false",
        *QUIET,
        *more,
    ]


def callback(name: str, **arguments: object) -> str:
    """Word that adds a callback of `interrupt.py`."""
    value = {"class_path": f"interrupt.{name}", "init_args": arguments}
    return f"--trainer.callbacks+={json.dumps(value)}"


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    changed = [
        name
        for name in left
        if not torch.equal(torch.nan_to_num(left[name]), torch.nan_to_num(right[name]))
    ]
    assert not changed


@dataclass
class Trained:
    """A run through the command with its default loggers, and what it left."""

    paper: str
    folder: Path
    cli: SuiteCLI
    untrained: float
    weights: dict[str, torch.Tensor]

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints" / "last.ckpt"

    def rows(self, column: str) -> list[float]:
        with (self.folder / "metrics.csv").open() as file:
            return [float(row[column]) for row in csv.DictReader(file) if row.get(column)]


@pytest.fixture(scope="session")
def trained(paper: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    base = tmp_path_factory.mktemp(paper)
    fresh = run_cli(words(paper, "validate", base / "fresh"))
    untrained = float(fresh.trainer.callback_metrics[fresh.model.monitor])
    folder = base / "run"
    arguments = [word for word in words(paper, "fit", folder) if "logger=false" not in word]
    cli = run_cli(arguments)
    import wandb

    wandb.finish()
    return Trained(paper, folder, cli, untrained, weights(cli.model))


def test_fit_improves_the_monitored_metric_and_leaves_a_complete_run(trained: Trained) -> None:
    model = trained.cli.model
    values = trained.rows(model.monitor)
    assert len(values) >= 2, "the small run needs at least two validations"
    best = max(values) if model.mode == "max" else min(values)
    better = best > trained.untrained if model.mode == "max" else best < trained.untrained
    assert better, f"{model.monitor}: {values}, untrained {trained.untrained}"
    assert trained.last.is_file()
    assert list(trained.last.parent.glob("epoch=*.ckpt"))
    config = yaml.safe_load((trained.folder / "config.yaml").read_text())
    assert config["model"]["class_path"].startswith("lightning_modules.")
    assert not list(trained.folder.rglob("*.partial"))


def test_wandb_logs_offline(trained: Trained) -> None:
    (folder,) = (trained.folder / "wandb").glob("offline-run-*")
    run = read_offline_run(folder)
    assert run.exit_code == 0
    assert any(trained.cli.model.monitor in row for row in run.history)
    assert run.config["model"]["class_path"].startswith("lightning_modules.")


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_a_checkpoint_alone_is_enough(command: str, trained: Trained, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    cli = run_cli(
        [
            command,
            f"--ckpt_path={trained.last}",
            f"--trainer.default_root_dir={folder}",
            "--trainer.logger=false",
            *QUIET,
        ]
    )
    model = trained.cli.model
    if command == "validate":
        value = float(cli.trainer.callback_metrics[model.monitor])
        assert value == pytest.approx(trained.rows(model.monitor)[-1], rel=1e-5, abs=1e-7)
    elif command == "test":
        assert any(name.startswith("test/") for name in cli.trainer.callback_metrics)
    else:
        assert len(torch.load(folder / "predictions.pt", weights_only=False)) > 0


def test_load_from_checkpoint_needs_only_the_path(trained: Trained) -> None:
    cls = type(trained.cli.model)
    loaded = cls.load_from_checkpoint(trained.last, map_location="cpu")
    # running metrics of the unfinished epoch are in the file and were reset at its end
    running = [name for name, part in loaded.named_modules() if isinstance(part, Metric)]
    saved, expected = (
        {n: v for n, v in state.items() if not n.startswith(tuple(running))}
        for state in (weights(loaded), trained.weights)
    )
    assert_same(saved, expected)


@pytest.mark.parametrize("where", ["end", "middle"])
def test_resume_equals_an_uninterrupted_run(where: str, trained: Trained, tmp_path: Path) -> None:
    paper = trained.paper
    batches = len(trained.cli.datamodule.train_dataloader())
    assert batches >= 3, "the small run needs at least three batches an epoch"
    after = batches if where == "end" else batches + batches // 2
    checkpoint = tmp_path / "stopped.ckpt"
    stop = callback("Interrupt", after=after, path=str(checkpoint))
    with pytest.raises(InterruptedRunError):
        run_cli(words(paper, "fit", tmp_path / "first", stop))
    cli = run_cli(words(paper, "fit", tmp_path / "second", f"--ckpt_path={checkpoint}"))
    assert_same(weights(cli.model), trained.weights)


def test_killed_run_continues_to_the_same_weights(trained: Trained, tmp_path: Path) -> None:
    paper = trained.paper
    batches = len(trained.cli.datamodule.train_dataloader())
    kill = callback("Kill", after=batches + 2)
    arguments = words(paper, "fit", tmp_path, kill, "--checkpoint.every_n_train_steps=1")
    child = os.fork()
    if child == 0:
        try:
            run_cli(arguments)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the run ended before it was killed"
    last = tmp_path / "checkpoints" / "last.ckpt"
    cli = run_cli(words(paper, "fit", tmp_path / "second", f"--ckpt_path={last}"))
    assert_same(weights(cli.model), trained.weights)


def fit_on_ranks(paper: str, folder: str, batch_size: int) -> tuple[dict, float]:
    cli = run_cli(
        words(
            paper,
            "fit",
            Path(folder),
            "--trainer.strategy=ddp",
            "--trainer.devices=2",
            f"--data.init_args.batch_size={batch_size}",
        )
    )
    value = float(cli.trainer.callback_metrics[cli.model.monitor])
    return {name: value.numpy() for name, value in weights(cli.model).items()}, value


def test_two_ranks_equal_one_process(trained: Trained, tmp_path: Path, ranks) -> None:
    paper = trained.paper
    batch_size = trained.cli.datamodule.batch_size
    assert batch_size % 2 == 0, "two ranks share the batch of the small run"
    (first, value), (second, _) = ranks(fit_on_ranks, paper, str(tmp_path), batch_size // 2)
    sharded = getattr(trained.cli.model, "per_rank_state", frozenset())
    for name, expected in trained.weights.items():
        if name in sharded:
            continue
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        for rank in (first, second):
            actual = torch.from_numpy(rank[name])
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6 * scale, msg=name)
    expected_value = trained.rows(trained.cli.model.monitor)[-1]
    assert value == pytest.approx(expected_value, rel=1e-5, abs=1e-6)


def test_wrong_argument_is_one_clear_line(
    paper: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = main(words(paper, "fit", tmp_path / "run", "--model.init_args.no_such_argument=1"))
    lines = capfd.readouterr().err.strip().splitlines()
    assert code == 2
    assert len(lines) == 1
    assert "no_such_argument" in lines[0]
    assert not (tmp_path / "run").exists()


def test_every_config_of_the_paper_is_accepted(
    paper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {path.name for path in (CONFIGS / paper).glob("*.yaml")}
    assert {"card.yaml", "default.yaml", "paper.yaml", "sweep.yaml"} <= names
    for name in sorted(names - {"card.yaml", "sweep.yaml"}):
        assert main(["fit", f"--config={paper}/{name}", "--print_config"]) == 0, name
    capsys.readouterr()


def _choice(parameter: dict, pick: int) -> str:
    """First or last value of a parameter of a sweep, as the agent would write it."""
    if "values" in parameter:
        return str(parameter["values"][pick])
    return str(parameter["value"] if "value" in parameter else parameter[("min", "max")[pick]])


def test_sweep_names_real_arguments_and_the_monitored_metric(
    paper: str, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = yaml.safe_load((CONFIGS / paper / "sweep.yaml").read_text())
    assert sweep["command"][:3] == ["${env}", "iclr24", "fit"]
    assert f"--config={paper}/default.yaml" in sweep["command"]
    assert sweep["command"][-1] == "${args}"
    model = trained.cli.model
    goal = {"max": "maximize", "min": "minimize"}[model.mode]
    assert sweep["metric"] == {"name": model.monitor, "goal": goal}
    for pick in (0, -1):
        chosen = [f"--{name}={_choice(spec, pick)}" for name, spec in sweep["parameters"].items()]
        arguments = ["fit", f"--config={paper}/default.yaml", *chosen, "--print_config"]
        assert main(arguments) == 0, chosen
    capsys.readouterr()


def test_no_method_needs_a_package_of_another(paper: str) -> None:
    """The room imports neither another room nor data nor callbacks."""
    import ast

    room = ROOT / "lightning_modules" / paper
    shared = {"base", "components", "errors", "reproduce", paper}
    for path in room.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom) and node.level == 0
                else []
            )
            for name in names:
                parts = name.split(".")
                assert parts[0] not in {"datamodules", "callbacks"}, f"{path}: {name}"
                if parts[0] == "lightning_modules" and len(parts) > 1:
                    assert parts[1] in shared, f"{path}: {name}"
