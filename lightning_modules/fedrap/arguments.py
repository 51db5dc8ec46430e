"""Checks of constructor arguments."""

from __future__ import annotations

import importlib

from lightning_modules.fedrap.objective import ClientObjective


def imported(path: str) -> ClientObjective:
    """Object of a dotted path; a class is built without arguments."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"custom_objective must be the dotted path of a function or class, "
            f"got '{path}': {error}"
        ) from error
    objective: ClientObjective = found() if isinstance(found, type) else found
    return objective


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not in the list."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got '{value}'")


def check_at_least(name: str, value: float | None, least: float) -> None:
    """Refuse a number below the least, and NaN."""
    if value is not None and not value >= least:
        raise ValueError(f"{name} must be at least {least:g}, got {value}")
