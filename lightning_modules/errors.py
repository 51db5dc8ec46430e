"""Failures that a user can cause, as one line; and the exit code of each."""

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator

ARGUMENT_ERROR = 2
FAILURE = 1
INTERRUPTED = 130
TERMINATED = 143

_KEY = re.compile(r'Parser key "([^"]+)"')
_WRAPPER = re.compile(r"Does not validate against any of the|^Parser key |^Validation failed")
_TYPE_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "list": "a list",
    "dict": "a mapping",
}


class UserError(Exception):
    """Something the user can put right; its text is one line that says how."""


def chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it was raised from, outermost first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)


def nearest(word: str, names: Iterable[str]) -> str:
    """Suggestion ` (did you mean 'name'?)`, or nothing."""
    near = difflib.get_close_matches(word, list(names), n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""


def one_line(text: str) -> str:
    """First line of a message with what is in all but plain words put into words."""
    text = text.strip()
    # jsonargparse lists the problems of every alternative of a union, one a line
    lines = [line.strip(" -") for line in text.splitlines() if line.strip(" -")]
    text = lines[0] if lines else ""
    text = re.sub(
        r"Expected a <class '(\w+)'>",
        lambda match: f"Expected {_TYPE_NAMES.get(match[1], match[1])}",
        text,
    )
    return re.sub(r"\s+", " ", text).rstrip(".")


def explain_arguments(error: BaseException, class_paths: Iterable[str] = ()) -> str:
    """One line for a refused command line or config.

    jsonargparse tries every alternative of a type and reports all of them with a dump of the
    config; the real cause is the innermost exception that is not such a wrapper, and the name of
    the argument is made of the keys on the way there.

    Args:
        error: What the parser or a constructor raised.
        class_paths: Classes that the configuration names; for suggestions.

    Returns:
        `argument: what is wrong and what is allowed`.
    """
    key = ""
    innermost = ""
    cause: BaseException = error
    for link in chain(error):
        text = str(link)
        if found := _KEY.match(text):
            inner = found[1]
            # an inner parser names its keys from its own root, and its error repeats its cause
            if inner.startswith(f"{key}."):
                key = inner
            elif not f".{key}".endswith(f".{inner}"):
                key = f"{key}.{inner}".lstrip(".")
        if text and not _WRAPPER.search(one_line(text)) and not isinstance(link, KeyError):
            innermost, cause = text, link
    line = one_line(innermost) or one_line(str(error))
    unknown = re.match(r"(?:Key|Option|Group key) '([^']+)' is not (?:accepted|expected)", line)
    if unknown:
        line += nearest(unknown[1].split(".")[-1], _parameters(class_paths))
    elif match := re.search(r"Expected a dot import path string: (\w+)", line):
        line = f"there is no class '{match[1]}'" + nearest(match[1], _public_classes())
    elif match := re.match(r"unrecognized arguments: --?(\S+)", line):
        word = match[1].partition("=")[0].split(".")[-1]
        line += nearest(word, _parameters([*class_paths, "lightning.pytorch.Trainer"]))
    elif line.startswith("the following arguments are required"):
        line += "; a method's config has them: --config PAPER/default.yaml (see iclr24 papers)"
    if key and not line.startswith(key) and not isinstance(cause, OSError):
        line = f"{key}: {line}"
    return line


def _public_classes() -> list[str]:
    import torch.optim

    import callbacks
    import datamodules
    import lightning_modules

    optimizers = [name for name in dir(torch.optim) if name[0].isupper()]
    return [*lightning_modules.__all__, *datamodules.__all__, *callbacks.__all__, *optimizers]


def _parameters(class_paths: Iterable[str]) -> set[str]:
    """Constructor arguments of these classes and their bases."""
    names: set[str] = set()
    for path in class_paths:
        module, _, name = path.rpartition(".")
        try:
            for base in inspect.getmro(getattr(importlib.import_module(module), name)):
                names.update(inspect.signature(base).parameters)
        except (ImportError, AttributeError, ValueError, TypeError):
            continue
    return names


def explain_failure(error: BaseException) -> str:
    """One line for an error while running."""
    text = one_line(str(error))
    known = UserError | ValueError | TypeError | OSError | ImportError
    if text and (isinstance(error, known) or is_misconfiguration(error)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_misconfiguration(error: BaseException) -> bool:
    """Whether Lightning or a callback refuses the settings of the run."""
    # by name: Lightning is imported only by what needs it
    return type(error).__name__ == "MisconfigurationException"


def exit_code(error: BaseException) -> int:
    """Exit code of the process that ended with this error."""
    kinds = {type(link).__name__ for link in chain(error)}
    if "SIGTERMException" in kinds:
        return TERMINATED
    if "KeyboardInterrupt" in kinds:
        return INTERRUPTED
    if isinstance(error, UserError) or is_misconfiguration(error):
        return ARGUMENT_ERROR
    if isinstance(error, SystemExit):
        code = error.code
        return code if isinstance(code, int) else FAILURE if code else 0
    return FAILURE
