"""The two default loggers: a CSV file in the run's folder, and W&B online or offline."""

import netrc
import os
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

WandbMode = Literal["online", "offline", "disabled", "shared"]


def wandb_mode() -> WandbMode:
    """Online if the user is logged in, else offline; never asks, never uses the network.

    `WANDB_MODE` decides if set. A login is an API key or identity token in the environment, or a
    password for the W&B host in the netrc file.
    """
    mode = os.environ.get("WANDB_MODE")
    if mode in {"online", "offline", "disabled", "shared"}:
        return mode  # type: ignore[return-value]
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return "online"
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    named = os.environ.get("NETRC")
    candidates = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for path in candidates:
        try:
            login = netrc.netrc(str(path.expanduser())).authenticators(host or "")
        except (OSError, netrc.NetrcParseError):
            continue
        if login and login[2]:
            return "online"
    return "offline"


def default_loggers(
    folder: Path,
    config: dict[str, Any] | None = None,
    wandb: Literal["auto", "online", "offline", "none"] = "auto",
    project: str = "iclr24",
    entity: str | None = None,
    group: str | None = None,
    tags: list[str] | None = None,
) -> list[Logger]:
    """Build the CSV and the W&B logger of a run.

    The CSV logger stands first: the Trainer takes the folder of logs and checkpoints from it.

    Args:
        folder: The run's folder.
        config: Plain values to store as the W&B run's configuration.
        wandb: Whether W&B is online, offline or not used; `auto` is online if logged in.
        project: W&B project, unless `WANDB_PROJECT` names one.
        entity: W&B user or team.
        group: W&B group, as for the seeds of one experiment.
        tags: W&B tags.
    """
    folder.mkdir(parents=True, exist_ok=True)
    loggers: list[Logger] = [CSVLogger(folder, name="", version="")]
    mode = wandb_mode() if wandb == "auto" else wandb
    if mode == "none":
        return loggers
    if mode == "offline":
        rank_zero_info(
            f"W&B: offline, logging to {folder / 'wandb'}; "
            f"to upload: wandb login && wandb sync {folder}/wandb/offline-run-*"
        )
    wandb_logger = WandbLogger(
        save_dir=folder,
        project=os.environ.get("WANDB_PROJECT", project),
        # in a sweep the agent names the run; else the folder does
        name=None if os.environ.get("WANDB_SWEEP_ID") else "/".join(folder.parts[-2:]),
        mode=mode,
        config=config,
        entity=entity,
        group=group,
        tags=tags,
    )
    # W&B warns of this setting in every run, whatever its value
    getattr(wandb_logger, "_wandb_init", {}).pop("anonymous", None)
    return [*loggers, wandb_logger]
