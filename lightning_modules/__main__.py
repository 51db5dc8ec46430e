"""The command `iclr24`; imports torch and lightning only for what needs them."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_modules.errors import (
    FAILURE,
    UserError,
    exit_code,
    explain_failure,
    nearest,
)

USAGE = """\
usage: iclr24 COMMAND [options]

commands:
  fit        train a method:        iclr24 fit --config fedrap/default.yaml
  validate   evaluate on the validation data (with --ckpt_path, a trained model)
  test       evaluate on the test data
  predict    apply a trained model, write its predictions
  papers     list the methods, their claims, data and configs
  reproduce  run the scaled-down claims of the papers and write a report

Every config is looked up as a file first, then among the packaged ones.
iclr24 COMMAND --help explains a command, iclr24 fit --model.help FedRAP the options of a method;
--debug shows the traceback of an error.
"""
TRAINER_COMMANDS = ("fit", "validate", "test", "predict")


def guard_packages() -> None:
    """Check that no package of the user hides one of ours.

    Raises:
        UserError: Naming the folder that hides the package.
    """
    import callbacks
    import configs
    import datamodules
    import lightning_modules

    home = Path(lightning_modules.__path__[0]).parent
    for package in (callbacks, configs, datamodules):
        folder = Path(package.__path__[0])
        if folder.parent != home:
            raise UserError(
                f"the folder {folder} hides the package '{package.__name__}' of iclr24: rename it"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name; default those of the process.

    Returns:
        Exit code: 0, 2 bad argument, 1 failure, 130 Ctrl-C, 143 SIGTERM.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    # appended, so that a user's own modules are found and ours still win
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    command = words[0] if words else "--help"
    try:
        if command in {"-h", "--help", "help"}:
            print(USAGE, end="")
            return 0
        if command == "--version":
            from importlib.metadata import version

            print(f"iclr24 {version('iclr24')}")
            return 0
        guard_packages()
        if command == "papers":
            from lightning_modules.papers import papers_command

            return papers_command(words[1:])
        if command == "reproduce":
            from lightning_modules.reproduce import reproduce_command

            return reproduce_command(words[1:])
        if command in TRAINER_COMMANDS:
            from lightning_modules.cli import run_cli

            run_cli(words, from_process=argv is None)
            return 0
        known = [*TRAINER_COMMANDS, "papers", "reproduce"]
        raise UserError(
            f"there is no command '{command}'{nearest(command, known)}: use {', '.join(known)}"
        )
    except BaseException as error:
        if debug:
            raise
        return _report(error)


def _report(error: BaseException) -> int:
    """Say in one line what went wrong, tell W&B, and return the exit code."""
    code = exit_code(error)
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None and code:
        wandb.finish(exit_code=code)
    if not isinstance(error, SystemExit | KeyboardInterrupt):
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        where = f" (rank {rank})" if rank else ""
        print(f"iclr24: error{where}: {explain_failure(error)}", file=sys.stderr)
        if code == FAILURE:
            print("iclr24: --debug shows where", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
