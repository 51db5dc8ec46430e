"""Failures that a user can cause, as one line; and the exit code of each."""

import difflib
import inspect
import re
from collections.abc import Iterator

ARGUMENT_ERROR = 2
FAILURE = 1
INTERRUPTED = 130
TERMINATED = 143

_KEY = re.compile(r"Parser key \"([^\"]+)\"")
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
        current = current.__cause__ or current.__context__


def nearest(word: str, names: object) -> str:
    """Suggestion ` (did you mean 'name'?)`, or nothing."""
    near = difflib.get_close_matches(word, [str(name) for name in names], n=1)  # type: ignore[attr-defined]
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


def explain_arguments(message: str, error: BaseException | None) -> str:
    """One line for a refused command line or config.

    jsonargparse tries every alternative of a type and reports all of them with a dump of the
    config; the real cause is the innermost exception that is not such a wrapper, and the name of
    the argument is the longest dotted key on the way there.

    Args:
        message: What the parser says.
        error: The exception it came from, if any.

    Returns:
        `argument: what is wrong and what is allowed`.
    """
    key = ""
    innermost = ""
    cause: BaseException | None = None
    for link in chain(error) if error is not None else ():
        text = str(link)
        for found in _KEY.findall(text):
            if len(found) > len(key):
                key = found
        if text and not _WRAPPER.search(one_line(text)) and not isinstance(link, KeyError):
            innermost, cause = text, link
    line = one_line(innermost) or one_line(message)
    unknown = re.match(r"(?:Key|Option|Group key) '([^']+)' is not (?:accepted|expected)", line)
    if unknown:
        line += nearest(unknown[1].split(".")[-1], _known_parameters(message, error))
    elif match := re.search(r"Expected a dot import path string: (\w+)", line):
        line = f"there is no class '{match[1]}'" + nearest(match[1], _public_classes())
    if key and not line.startswith(key) and not isinstance(cause, (OSError, ConnectionError)):
        line = f"{key}: {line}"
    return line


def _public_classes() -> list[str]:
    import torch.optim

    import callbacks
    import datamodules
    import lightning_modules

    optimizers = [name for name in dir(torch.optim) if name[0].isupper()]
    return [*lightning_modules.__all__, *datamodules.__all__, *callbacks.__all__, *optimizers]


def _known_parameters(message: str, error: BaseException | None) -> set[str]:
    """Parameters of every class of ours that the failed parse speaks of."""
    import importlib

    texts = [message, *(str(link) for link in chain(error))] if error is not None else [message]
    names: set[str] = set()
    paths = re.findall(r"\b((?:lightning_modules|datamodules|callbacks|torch)(?:\.\w+)+)", "\n".join(texts))
    for path in set(paths):
        module, _, name = path.rpartition(".")
        try:
            cls = getattr(importlib.import_module(module), name)
            for base in inspect.getmro(cls):
                names.update(inspect.signature(base).parameters)
        except (ImportError, AttributeError, ValueError, TypeError):
            continue
    return names


def explain_failure(error: BaseException) -> str:
    """One line for an error while running."""
    text = one_line(str(error))
    if isinstance(error, UserError | ValueError | TypeError | OSError | ImportError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def exit_code(error: BaseException) -> int:
    """Exit code of the process that ended with this error."""
    kinds = {type(link).__name__ for link in chain(error)}
    if "SIGTERMException" in kinds:
        return TERMINATED
    if "KeyboardInterrupt" in kinds:
        return INTERRUPTED
    if isinstance(error, SystemExit):
        code = error.code
        return code if isinstance(code, int) else FAILURE if code else 0
    return FAILURE
