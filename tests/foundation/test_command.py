"""The command: run folders, errors in one line, exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lightning_modules.__main__ import main

CONFIG = {
    "seed_everything": 0,
    "trainer": {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
    "model": {"class_path": "toy.Toy", "init_args": {"dropout": 0.1}},
    "data": {"class_path": "toy.ToyData", "init_args": {"batch_size": 8}},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the toy's config."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path


def fit(*words: str) -> int:
    return main(["fit", "--config=toy.yaml", *words])


def start(*words: str) -> subprocess.Popen[str]:
    """The real command in a process of its own."""
    support = Path(__file__).parents[1] / "support"
    environment = {**os.environ, "PYTHONPATH": str(support)}
    command = [str(Path(sys.executable).with_name("iclr24")), *words]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--model.init_args.width=eight", "model.width: Expected an integer. Got value: eight"),
        ("--model.init_args.dropot=1", "'dropot' is not accepted (did you mean 'dropout'?)"),
        ("--model.init_args.dropout=2", "dropout must be in [0, 1), got 2.0"),
        ("--model.init_args.optimizer=Adan", "no class 'Adan' (did you mean 'Adam'?)"),
        ("--model.init_args.loss_weights={mze: 1}", "no term 'mze': this method has mse"),
        ("--model=Tooy", "model: there is no class 'Tooy'"),
        ("--data.init_args.source=web", "source must be one of generated, got 'web'"),
        ("--data.init_args.batch_size=0", "batch_size must be at least 1, got 0"),
        ("--data.init_args.sampling=x", "sampling must be one of shuffle, "),
        ("--trainer.max_epochs=x", "trainer.max_epochs: Expected an integer"),
        ("--trainer.max_epochz=3", "--trainer.max_epochz=3 (did you mean 'max_epochs'?)"),
        ("--trainer.callbacks+=Curiculum", "'Curiculum' (did you mean 'Curriculum'?)"),
        ("--config=fedrapp/default.yaml", "no config 'fedrapp/default.yaml'"),
        ("--ckpt_path=none.ckpt", "ckpt_path: there is no file none.ckpt"),
    ],
)
def test_wrong_argument(
    word: str, message: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fit(word) == 2
    (line,) = [x for x in capfd.readouterr().err.splitlines() if "Seed set" not in x]
    assert message in line
    assert line.startswith("iclr24: error: ")
    assert not (folder / "runs").exists()


def test_failure_while_running_says_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    assert fit("--data.init_args.batch_size=1000") == 1
    error = capfd.readouterr().err
    assert "batch_size=1000 on 1 device(s) needs at least 1000" in error
    assert "choose at most 70" in error
    assert "Traceback" not in error


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="batch_size=1000"):
        fit("--data.init_args.batch_size=1000", "--debug")


def test_unknown_command_and_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fti"]) == 2
    assert "did you mean 'fit'?" in capfd.readouterr().err
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    output = capfd.readouterr().out
    for command in ("fit", "validate", "test", "predict", "papers", "reproduce", "iclr24 0."):
        assert command in output


def test_listing_needs_neither_torch_nor_lightning() -> None:
    code = (
        "import sys; from lightning_modules.__main__ import main; main(['papers']); main([]);"
        "assert not {'torch', 'lightning', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_run_folder_holds_everything(folder: Path) -> None:
    assert fit("--trainer.logger=null", "--logger.wandb=none") == 0
    (run,) = (folder / "runs" / "toy").iterdir()
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "checkpoints", "metrics.csv"} <= names
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        "epoch=1-step=16.ckpt",
        "last.ckpt",
    }
    assert "ICLR24_RUN_DIR" not in os.environ


def test_run_that_failed_within_a_step_repeats_the_batch(folder: Path) -> None:
    from interrupt import InterruptedRunError

    from lightning_modules.cli import run_cli

    whole = run_cli(["fit", "--config=toy.yaml", "--trainer.default_root_dir=whole"])
    fail = '{"class_path": "interrupt.FailInStep", "init_args": {"after": 11}}'
    words = ["fit", "--config=toy.yaml", f"--trainer.callbacks+={fail}"]
    with pytest.raises(InterruptedRunError):
        run_cli([*words, "--trainer.default_root_dir=half"])
    last = folder / "half" / "checkpoints" / "last.ckpt"
    rest = run_cli(["fit", "--config=toy.yaml", f"--ckpt_path={last}"])
    assert rest.trainer.global_step == whole.trainer.global_step
    for name, value in whole.model.state_dict().items():
        assert torch.equal(rest.model.state_dict()[name], value), name


def test_refused_trainer_leaves_no_folder(folder: Path) -> None:
    assert fit("--trainer.accelerator=gpu") == 2
    assert not (folder / "runs" / "toy").exists()


@pytest.mark.parametrize("group", ["checkpoint", "early_stop"])
def test_metric_without_direction_is_refused(group: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert fit(f"--{group}.monitor=val/f1") == 2
    assert "monitor='val/f1' needs mode= as well" in capfd.readouterr().err


def test_two_runs_in_one_second_have_two_folders(folder: Path) -> None:
    for _ in range(2):
        assert fit("--trainer.max_steps=1", "--trainer.limit_val_batches=0") == 0
    assert len(list((folder / "runs" / "toy").iterdir())) == 2


def test_flags_beat_the_checkpoint_and_a_checkpoint_brings_its_config(folder: Path) -> None:
    from lightning_modules.cli import run_cli

    assert fit("--trainer.default_root_dir=run") == 0
    last = folder / "run" / "checkpoints" / "last.ckpt"
    cli = run_cli(["validate", f"--ckpt_path={last}", "--model.init_args.dropout=0.7"])
    assert cli.model.hparams["dropout"] == 0.7
    assert cli.datamodule.batch_size == 8
    cli = run_cli(["validate", f"--ckpt_path={last}"])
    assert cli.model.hparams["dropout"] == 0.1


def test_nothing_of_an_earlier_run_is_overwritten(folder: Path) -> None:
    words = ["--trainer.default_root_dir=run", "--trainer.logger=null", "--logger.wandb=none"]
    assert fit(*words) == 0
    metrics = (folder / "run" / "metrics.csv").read_text()
    assert fit(*words, "--seed_everything=1") == 0
    assert (folder / "run" / "metrics.1.csv").read_text() == metrics
    assert "seed_everything: 0" in (folder / "run" / "config.1.yaml").read_text()
    assert "seed_everything: 1" in (folder / "run" / "config.yaml").read_text()
    last = folder / "run" / "checkpoints" / "last.ckpt"
    assert main(["validate", f"--ckpt_path={last}"]) == 0
    assert not (folder / "run" / "metrics.2.csv").exists()


def test_local_config_wins_over_the_packaged_one(folder: Path) -> None:
    from lightning_modules.cli import find_config

    assert find_config("trainer/cpu.yaml") != "trainer/cpu.yaml"
    (folder / "trainer").mkdir()
    (folder / "trainer" / "cpu.yaml").write_text("max_epochs: 7")
    assert find_config("trainer/cpu.yaml") == "trainer/cpu.yaml"


def test_module_from_the_working_directory(folder: Path) -> None:
    (folder / "mine.py").write_text("from toy import Toy\n\nclass Mine(Toy):\n    pass\n")
    assert fit("--model.class_path=mine.Mine", "--trainer.max_steps=1") == 0


def test_hidden_package_is_named(folder: Path) -> None:
    (folder / "callbacks").mkdir()
    (folder / "callbacks" / "__init__.py").write_text("")
    run = subprocess.run(
        [sys.executable, "-m", "lightning_modules", "papers"], text=True, capture_output=True
    )
    assert run.returncode == 2
    assert f"{folder / 'callbacks'} hides the package 'callbacks'" in run.stderr
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_interrupted_run_saves_and_tells(name: str, code: int, folder: Path) -> None:
    kill = (
        f'{{"class_path": "interrupt.Kill", "init_args": {{"after": 5, "signal_name": "{name}"}}}}'
    )
    words = ["--config=toy.yaml", f"--trainer.callbacks+={kill}"]
    process = start("fit", *words, "--trainer.default_root_dir=run")
    _, error = process.communicate(timeout=120)
    assert process.returncode == code, error
    assert "Traceback" not in error
    assert torch.load(folder / "run" / "checkpoints" / "last.ckpt", weights_only=True)


def test_two_processes_share_one_run_folder(folder: Path) -> None:
    ranks = '{"class_path": "interrupt.WriteRank", "init_args": {"folder": "."}}'
    process = start(
        "fit",
        "--config=toy.yaml",
        "--trainer=trainer/ddp_cpu.yaml",
        "--trainer.logger=null",
        f"--trainer.callbacks+={ranks}",
    )
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert [(folder / f"rank{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
    (run,) = (folder / "runs" / "toy").iterdir()
    assert len(list((run / "wandb").glob("offline-run-*"))) == 1
