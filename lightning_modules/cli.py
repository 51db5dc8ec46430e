"""The training commands: one `LightningCLI` for every method; knows modules, data and callbacks."""

import difflib
import importlib
import itertools
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

from lightning_modules.errors import UserError, explain_arguments

CONFIG_FLAGS = ("--config", "-c", "--model", "--data", "--trainer", "--logger")
CLASS_FLAGS = {
    "--model": "lightning_modules",
    "--model.help": "lightning_modules",
    "--data": "datamodules",
    "--data.help": "datamodules",
    "--trainer.callbacks": "callbacks",
    "--trainer.callbacks+": "callbacks",
}


class _Parser(LightningArgumentParser):
    """Parser that raises its errors instead of printing its usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(message) from ex


def packaged_configs() -> list[str]:
    """Names of the packaged configs, as `fedrap/default.yaml`."""
    root = Path(str(files("configs")))
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.yaml"))


def find_config(name: str) -> str:
    """Path of a config: a file here, else a packaged one.

    Raises:
        UserError: If there is neither; names the nearest packaged ones.
    """
    if Path(name).is_file():
        return name
    packaged = Path(str(files("configs"))) / name
    if packaged.is_file():
        return str(packaged)
    known = [n for n in packaged_configs() if not n.endswith("card.yaml")]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    raise UserError(
        f"no config '{name}': neither a file in {Path.cwd()} nor a packaged one"
        + (f"; the nearest packaged are {', '.join(near)}" if near else "")
    )


def expand_words(words: Sequence[str]) -> list[str]:
    """Rewrite command-line words: packaged configs to paths, short class names to full ones.

    `--ckpt_path` without `--config` puts the `config.yaml` of the checkpoint's run in front.
    """
    result: list[str] = []
    previous = ""
    for word in words:
        flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        owner = flag if equals else previous
        if owner in CONFIG_FLAGS and value.endswith((".yaml", ".yml")):
            value = find_config(value)
        elif owner in CLASS_FLAGS and value.isidentifier():
            package = CLASS_FLAGS[owner]
            if value in importlib.import_module(package).__all__:
                value = f"{package}.{value}"
        result.append(f"{flag}={value}" if equals else value if not flag else word)
        previous = word if word.startswith("-") and not equals else ""
    if not any(word.split("=")[0] in {"--config", "-c"} for word in result):
        checkpoint = _value_of("--ckpt_path", result)
        if checkpoint and (config := _config_of_run(Path(checkpoint))):
            # a run of its own: it must not write into the folder of the one it comes from
            result[1:1] = ["--config", str(config), "--trainer.default_root_dir=null"]
    return result


def _class_paths(words: Sequence[str]) -> list[str]:
    """Every class that the words or the config files among them name."""
    texts = [*words]
    for word in words:
        path = Path(word.rpartition("=")[2])
        if path.suffix in {".yaml", ".yml"} and path.is_file():
            texts.append(path.read_text(encoding="utf-8"))
    return re.findall(r"\b\w+(?:\.\w+)+\b", "\n".join(texts))


def _value_of(flag: str, words: Sequence[str]) -> str | None:
    for position, word in enumerate(words):
        if word == flag and position + 1 < len(words):
            return words[position + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _config_of_run(checkpoint: Path) -> Path | None:
    """The `config.yaml` beside a checkpoint's folder, if it is there."""
    for folder in checkpoint.absolute().parents[:2]:
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    return None


def _paper_of(class_path: str) -> str:
    """Room of a module by its class path, else the last part of the path in lower case."""
    module, _, name = class_path.rpartition(".")
    if module == "lightning_modules":
        from lightning_modules import PUBLIC_NAMES

        return PUBLIC_NAMES.get(name, name.lower()).split(".")[0]
    if module.startswith("lightning_modules."):
        return module.split(".")[1]
    return name.lower()


class SuiteCLI(LightningCLI):
    """`LightningCLI` with packaged configs, run folders, default loggers and one-line errors."""

    def __init__(self, args: ArgsType = None) -> None:
        super().__init__(
            model_class=LightningModule,
            datamodule_class=LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=_Parser,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            trainer_defaults={
                # the loaders slice by rank themselves; Lightning's sampler would shuffle
                "use_distributed_sampler": False,
                "log_every_n_steps": 10,
            },
            args=args,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Default callbacks, each with its own flags, whatever the user's list says."""
        from callbacks import Checkpoint, EarlyStop, Figures, StepSeed
        from callbacks.loggers import default_loggers

        parser.add_lightning_class_args(Checkpoint, "checkpoint")
        parser.add_lightning_class_args(EarlyStop, "early_stop")
        parser.add_lightning_class_args(Figures, "figures")
        parser.add_lightning_class_args(StepSeed, "step_seed")
        parser.add_function_arguments(default_loggers, "logger", skip={"folder", "config"})

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration alone: the user's flags beat what a checkpoint stored."""
        path = self.config.get(self.config.subcommand, {}).get("ckpt_path")
        if path and path not in {"best", "last", "hpc", "registry"} and not Path(path).exists():
            raise UserError(f"ckpt_path: there is no file {path}")

    def instantiate_classes(self) -> None:
        """Build module, data and trainer; what a constructor refuses is a bad argument."""
        try:
            super().instantiate_classes()
        except (ValueError, TypeError, ImportError, MisconfigurationException) as error:
            raise UserError(str(error)) from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Trainer with a run folder, the default loggers and whole-file checkpoints."""
        from callbacks.checkpoint import AtomicCheckpointIO
        from callbacks.loggers import default_loggers
        from callbacks.predictions import PredictionFiles

        config = self.config_init[self.subcommand]["trainer"]
        folder = run_folder(_paper_of(self._get(self.config, "model")["class_path"]), config)
        _keep_previous(folder)
        kwargs["default_root_dir"] = str(folder)
        if config.get("logger") is None and not config.get("fast_dev_run"):
            settings = self._get(self.config_init, "logger")
            kwargs["logger"] = default_loggers(folder, config=self._plain_config(), **settings)
        if config.get("plugins") is None and not _sharded(config.get("strategy")):
            kwargs["plugins"] = [AtomicCheckpointIO()]
        parser = self._parser(self.subcommand)
        callbacks = [
            self._get(self.config_init, key)
            for key in parser.callback_keys
            # beside enable_checkpointing=False a checkpoint callback is an error of the Trainer
            if key != "checkpoint" or config.get("enable_checkpointing") is not False
        ]
        trainer = self._instantiate_trainer({**config, **kwargs}, callbacks)
        if self.subcommand == "predict":
            trainer.callbacks.append(PredictionFiles())  # type: ignore[attr-defined]
        self._warn_of_unsplit_data(trainer)
        rank_zero_info(f"run folder: {folder}")
        if self.subcommand != "fit" and not self.config[self.subcommand].get("ckpt_path"):
            rank_zero_info(
                f"{self.subcommand} without --ckpt_path: the module is as its arguments build it"
            )
        return trainer

    def _plain_config(self) -> dict[str, Any]:
        """The configuration as plain values, for W&B."""
        import yaml

        parser = self._parser(self.subcommand)
        text = parser.dump(self.config[self.subcommand], skip_none=True)
        plain = yaml.safe_load(text)
        return {key: plain[key] for key in ("seed_everything", "model", "data") if key in plain}

    def _warn_of_unsplit_data(self, trainer: Trainer) -> None:
        from datamodules import SuiteDataModule

        if trainer.world_size > 1 and not isinstance(self.datamodule, SuiteDataModule):
            rank_zero_warn(
                f"{type(self.datamodule).__name__} is not split over the {trainer.world_size} "
                "devices: each sees all data; derive it from datamodules.SuiteDataModule or pass "
                "--trainer.use_distributed_sampler=true"
            )


_NOISE = (
    # the W&B folder stands in the run's folder before the first row is written
    ".*Experiment logs directory .* exists and is not empty.*",
    ".*The number of training batches .* is smaller than the logging interval.*",
    ".*isinstance\\(treespec, LeafSpec\\).*",
    ".*LightningCLI's args parameter.*",
    # a resumed run has a folder of its own
    ".*The dirpath has changed from.*",
    ".*Couldn't infer the batch indices fetched from your dataloader.*",
)


class _NoAdvertisements(logging.Filter):
    """Drops the tips by which Lightning recommends further products."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "Tip:" not in record.getMessage()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence messages that no user of the suite can act on."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    tips = _NoAdvertisements()
    logger.addFilter(tips)
    try:
        with warnings.catch_warnings():
            for message in _NOISE:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        logger.removeFilter(tips)


def _sharded(strategy: Any) -> bool:
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    return name in {"fsdp", "fsdp_cpu_offload", "FSDPStrategy"} or "ModelParallel" in name


@rank_zero_only
def _keep_previous(folder: Path) -> None:
    """Rename what an earlier run left in this folder and a new one would overwrite."""
    for name in ("config.yaml", "metrics.csv"):
        path = folder / name
        if path.exists():
            kept = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in itertools.count(1))
            path.rename(next(other for other in kept if not other.exists()))


def run_folder(paper: str, trainer_config: Any) -> Path:
    """Folder of this run, `runs/<paper>/<time>` unless `default_root_dir` is given.

    Every process of a run must agree: the first one puts the name into the environment that the
    processes it starts inherit; under torchrun the run's id takes the place of the time.
    """
    if given := trainer_config.get("default_root_dir"):
        return Path(given)
    if inherited := os.environ.get("ICLR24_RUN_DIR"):
        return Path(inherited)
    shared = _name_shared_by_ranks()
    name = shared or time.strftime("%Y-%m-%d_%H-%M-%S")
    folder = (Path("runs") / paper / name).absolute()
    if shared is None:
        # the folder is claimed by making it: two runs that start in one second have two
        for number in itertools.count(2):
            try:
                folder.mkdir(parents=True)
                break
            except FileExistsError:
                folder = folder.with_name(f"{name}_{number}")
    os.environ["ICLR24_RUN_DIR"] = str(folder)
    return folder


def _name_shared_by_ranks() -> str | None:
    """Name of the run where a cluster's launcher starts all ranks alike; they can't ask each other.

    Raises:
        UserError: Under torchrun without a name.
    """
    elastic = os.environ.get("TORCHELASTIC_RUN_ID")
    if elastic == "none":
        raise UserError("torchrun: pass --rdzv-id=NAME, or --trainer.default_root_dir=FOLDER")
    if elastic:
        return f"torchrun-{elastic}"
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_JOB_ID" in os.environ:
        return f"slurm-{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_STEP_ID', '0')}"
    return None


@contextmanager
def _own_run_folder() -> Iterator[None]:
    """Forget the run's folder at the end, so that the next run of this process has its own."""
    inherited = "LOCAL_RANK" in os.environ
    try:
        yield
    finally:
        folder = os.environ.get("ICLR24_RUN_DIR")
        if folder and not inherited:
            del os.environ["ICLR24_RUN_DIR"]
            with suppress(OSError):
                # claimed, but the Trainer was refused: rmdir leaves anything that is not empty
                Path(folder).rmdir()
                Path(folder).parent.rmdir()


def run_cli(words: Sequence[str], from_process: bool = False) -> SuiteCLI:
    """Run `fit`, `validate`, `test` or `predict` with command-line words.

    Args:
        words: Command and its flags.
        from_process: Whether the words are the process's own; then the ranks that a launcher
            starts run the same command.

    Returns:
        The finished command-line interface with its `trainer`, `model` and `datamodule`.

    Raises:
        UserError: If an argument is wrong.
    """
    expanded = expand_words(words)
    if from_process:
        # the launcher of further ranks starts `sys.argv` again
        sys.argv[1:] = [*words]
    with _own_run_folder(), quiet():
        try:
            return SuiteCLI(args=expanded)
        except UserError as error:
            raise UserError(explain_arguments(error, _class_paths(expanded))) from error
