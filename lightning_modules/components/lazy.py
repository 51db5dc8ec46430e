"""Public names of a package that are imported when they are first used."""

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str], extras: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build the `__getattr__`, `__dir__` and `__all__` of a package with lazy public names.

    Args:
        package: Name of the package, its `__name__`.
        modules: Public name → submodule of the package that defines it.
        extras: Submodule → extra of `pyproject.toml` that it needs.

    Returns:
        The three objects to bind at module level. Looking up an unknown name raises an
        `AttributeError` that suggests the nearest one; a missing optional dependency raises an
        `ImportError` that names the extra to install.
    """

    def getattr_(name: str) -> Any:
        if name not in modules:
            if name.startswith("_"):
                raise AttributeError(name)
            near = difflib.get_close_matches(name, modules, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(sorted(modules))}"
            raise AttributeError(f"'{package}' has no '{name}': {hint}")
        try:
            module = importlib.import_module(f"{package}.{modules[name]}")
        except ModuleNotFoundError as error:
            extra = (extras or {}).get(modules[name].split(".")[0])
            missing = error.name or ""
            if extra is None or missing.split(".")[0] in {package, "callbacks", "datamodules"}:
                raise
            raise ImportError(
                f"{name} needs the package '{missing}': pip install 'iclr24[{extra}]'"
            ) from error
        return getattr(module, name)

    return getattr_, lambda: sorted(modules), sorted(modules)
