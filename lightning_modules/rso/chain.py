"""All stages of RSO from one YAML file: SFT, reward model, pairs, policy.

`python -m lightning_modules.rso.chain rso/pipeline/tiny.yaml --folder runs/rso`

Each stage is an ordinary command of the suite with its own config, so that each can also be run
alone. A stage that is done with the same words is not run again, and one that was interrupted goes
on from its last checkpoint.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

STAGES = ("sft", "reward", "pairs", "policy")
Runner = Callable[[list[str]], int]


def run_command(words: list[str]) -> int:
    """Run a command of the suite in a process of its own, so that it may use many devices."""
    return subprocess.run(
        [sys.executable, "-m", "lightning_modules", *words], check=False
    ).returncode


class RSOPipeline:
    """Runs the stages in order, each with what the earlier ones made.

    Args:
        stages: Stage to `{config: ..., words: [...]}`; a stage may be left out, then what it would
            have made must be there (or be given among the words of later stages).
        folder: Where every stage has its run folder.
        seed: Seed of all stages.
        run: Runs one command and returns its exit code.

    Raises:
        ValueError: A stage is unknown or has no config.
    """

    def __init__(
        self,
        stages: Mapping[str, Mapping[str, Any]],
        folder: str | Path,
        seed: int = 0,
        run: Runner = run_command,
    ) -> None:
        for name, stage in stages.items():
            if name not in STAGES:
                raise ValueError(f"stages has '{name}', known are {', '.join(STAGES)}")
            if "config" not in stage:
                raise ValueError(f"stage {name} needs config, e.g. rso/{name}.yaml")
            unknown = sorted(set(stage) - {"config", "words"})
            if unknown:
                raise ValueError(f"stage {name} has no option '{unknown[0]}': config and words")
        self.stages = {name: stages[name] for name in STAGES if name in stages}
        self.folder = Path(folder).absolute()
        self.seed = seed
        self.run_one = run

    @classmethod
    def from_yaml(cls, path: str, folder: str | None = None, run: Runner = run_command) -> Any:
        """From a file, or a packaged config of that name."""
        import yaml

        file = Path(path)
        if not file.is_file():
            file = Path(str(files("configs"))) / path
        if not file.is_file():
            raise ValueError(f"no config '{path}': neither a file nor a packaged one")
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
        return cls(values["stages"], folder or values["folder"], int(values.get("seed", 0)), run)

    def words(self, name: str) -> list[str]:
        """Command line of a stage."""
        stage = self.stages[name]
        model = self.folder / "sft" / "model"
        reward = self.folder / "reward" / "checkpoints" / "last.ckpt"
        pairs = self.folder / "pairs" / "pairs.jsonl"
        words = [
            "predict" if name == "pairs" else "fit",
            f"--config={stage['config']}",
            f"--seed_everything={self.seed}",
            f"--trainer.default_root_dir={self.folder / name}",
        ]
        if name == "sft":
            words.append(f"--model.init_args.export_to={model}")
        elif "sft" in self.stages:
            words.append(f"--model.init_args.backbone={model}")
        if name in ("pairs", "policy") and "reward" in self.stages:
            words.append(f"--model.init_args.reward={reward}")
        if name == "policy" and "pairs" in self.stages:
            words.append(f"--data.init_args.pairs_file={pairs}")
        return [*words, *(str(word) for word in stage.get("words", ()))]

    def run(self) -> list[str]:
        """Run what is not done yet.

        Returns:
            Names of the stages that were run.

        Raises:
            RuntimeError: A stage failed.
        """
        done: list[str] = []
        for name in self.stages:
            words = self.words(name)
            marker = self.folder / name / "done.json"
            # a stage is run again as soon as an earlier one was
            if not done and marker.exists() and json.loads(marker.read_text()) == words:
                continue
            last = self.folder / name / "checkpoints" / "last.ckpt"
            interrupted = not done and last.exists() and not marker.exists()
            code = self.run_one([*words, f"--ckpt_path={last}"] if interrupted else words)
            if code != 0:
                raise RuntimeError(f"stage {name} failed with exit code {code}")
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.write_text(json.dumps(words))
            done.append(name)
        return done


def main(words: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m lightning_modules.rso.chain")
    parser.add_argument("config", help="a YAML file, or a packaged one as rso/pipeline/tiny.yaml")
    parser.add_argument("--folder", help="where the stages run; default as in the file")
    arguments = parser.parse_args(words)
    try:
        ran = RSOPipeline.from_yaml(arguments.config, arguments.folder).run()
    except (ValueError, RuntimeError) as error:
        print(f"rso: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    print(f"rso: ran {', '.join(ran) or 'nothing, all stages were done'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
