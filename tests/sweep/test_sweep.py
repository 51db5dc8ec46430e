"""The real ``wandb sweep`` and ``wandb agent`` drive two-process runs of our command line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from stub_server import ENTITY, PROJECT, SWEEP, StubServer

SUPPORT = Path(__file__).parents[1] / "support"
JOBS = [
    {
        "model.init_args.lr": 0.05,
        "model.init_args.fail": False,
        "model.init_args.widths": [4, 4],
    },
    {
        "model.init_args.lr": 50.0,
        "model.init_args.fail": True,
        "model.init_args.widths": [8],
    },
    {
        "model.init_args.lr": 0.01,
        "model.init_args.fail": False,
        "model.init_args.widths": [2, 3],
    },
]
SWEEP_FILE = {
    "method": "grid",
    "metric": {"name": "val/loss", "goal": "minimize"},
    "parameters": {
        "model.init_args.lr": {"values": [0.05, 50.0, 0.01]},
        "model.init_args.fail": {"values": [False, True]},
        "model.init_args.widths": {"values": [[4, 4], [8], [2, 3]]},
    },
    "command": ["${env}", "iclr24", "fit", "--config=toy.yaml", "${args}"],
}
CONFIG = {
    "trainer": {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": "ddp",
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
    "model": {"class_path": "swept.Swept"},
    "data": {"class_path": "toy.ToyData", "init_args": {"batch_size": 5}},
}


def _environment(folder: Path, url: str) -> dict[str, str]:
    """Nothing of the caller's W&B or of a launcher; everything written stays in ``folder``."""
    foreign = ("WANDB", "ICLR24_", "PL_", "PYTEST_", "MASTER_", "LOCAL_RANK", "WORLD_SIZE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    places = ["WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "HOME"]
    for place in places:
        (folder / place.lower()).mkdir()
    return {
        **kept,
        **{place: str(folder / place.lower()) for place in places},
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")]),
        "PYTHONPATH": str(SUPPORT),
        "OMP_NUM_THREADS": "1",
        "WANDB_BASE_URL": url,
        "WANDB_API_KEY": "0" * 40,
        "WANDB_ENTITY": ENTITY,
        "WANDB_PROJECT": PROJECT,
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_CONSOLE": "off",
        "WANDB_DISABLE_GIT": "true",
        "WANDB_DISABLE_CODE": "true",
        "WANDB__DISABLE_STATS": "true",
    }


def _run(words: list[str], folder: Path, environment: dict[str, str], timeout: float) -> str:
    """Output of a command; at the timeout its whole process group is killed."""
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{' '.join(words)} took more than {timeout} s:\n{output}")
    assert process.returncode == 0, output
    return output


@pytest.mark.sweep
@pytest.mark.timeout(240)
def test_sweep_of_two_process_runs(tmp_path: Path) -> None:
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(SWEEP_FILE))
    wandb = [sys.executable, "-m", "wandb"]
    with StubServer(JOBS) as server:
        environment = _environment(tmp_path, server.url)
        _run([*wandb, "sweep", "sweep.yaml"], tmp_path, environment, 40)
        agent = [*wandb, "agent", f"{ENTITY}/{PROJECT}/{SWEEP}"]
        output = _run(agent, tmp_path, environment, 195)

    assert yaml.safe_load(server.sweep_config)["parameters"] == SWEEP_FILE["parameters"]
    # The failing job in the middle did not stop the agent; each job is one run at the server,
    # although two processes belong to it.
    runs = list(server.runs.values())
    assert [run.args for run in runs] == JOBS, output
    assert [run.sweep for run in runs] == [SWEEP] * 3
    assert [run.exit_code for run in runs] == [0, 1, 0], output
    assert "diverged with lr=50.0" in output

    # 70 training rows in global batches of 10: 7 batches in each of 2 epochs.
    for run in (runs[0], runs[2]):
        assert len(run.column("train/loss")) == 14
        assert len(run.column("val/loss")) == 2
        steps = [row["_step"] for row in run.history]
        assert len(set(steps)) == len(steps)
    assert len(runs[1].column("val/loss")) == 0
    for run in runs:
        stored = run.config["model"]["value"]["init_args"]
        assert stored["widths"] == run.args["model.init_args.widths"]
    swept = {run.args["model.init_args.lr"]: run for run in runs}

    # Both ranks of every run saw the swept values, in one folder for each run.
    folders = sorted(path.parent for path in tmp_path.glob("runs/*/*/config.yaml"))
    assert len(folders) == 3
    reports = []
    for folder in folders:
        first, second = (json.loads((folder / f"rank{r}.json").read_text()) for r in (0, 1))
        assert first == second
        assert first["world_size"] == 2
        reports.append(first)
        saved = yaml.safe_load((folder / "config.yaml").read_text())["model"]["init_args"]
        assert {key: saved[key] for key in ("lr", "fail", "widths")}.items() <= first.items()
        # The failed run, too, leaves what it had reached.
        assert (folder / "checkpoints" / "last.ckpt").is_file()
    for report in reports:
        args = swept[report["lr"]].args
        assert {name.rsplit(".", 1)[1]: value for name, value in args.items()}.items() <= (
            report.items()
        )
