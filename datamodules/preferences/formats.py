"""Preference, comparison, prompt and demonstration files in the forms in which people keep them."""

import bz2
import gzip
import json
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

Text = str | Sequence[Mapping[str, str]]
"""A text, or chat messages `{role, content}`."""
Kind = Literal["pairs", "prompts", "demonstrations"]

PROMPT = ("prompt", "input", "instruction", "question", "query")
RESPONSE = ("response", "completion", "output", "target", "summary", "answer")
LABEL = ("label", "preference", "choice")
NUMBERS = ("margin", "ref_chosen_logps", "ref_rejected_logps", "reward_chosen", "reward_rejected")
TURN = "\n\nAssistant:"
ACCEPTED = (
    "{prompt, chosen, rejected}, {chosen, rejected} with a common beginning, "
    "{prompt, output_1, output_2, label|preference}, {prompt}, {prompt, reference}, "
    "{prompt, response}"
)


class Example(NamedTuple):
    """One row as text.

    Attributes:
        index: Row in the file.
        prompt: Text or chat messages.
        chosen: Preferred response, demonstration, or reference answer; None for a bare prompt.
        rejected: The other response of a pair, else None.
        numbers: Optional columns, see `NUMBERS`.
    """

    index: int  # type: ignore[assignment]
    prompt: Text
    chosen: Text | None
    rejected: Text | None
    numbers: dict[str, float]


def read_rows(source: Any) -> list[dict[str, Any]]:
    """Rows of a file, a `datasets` object, or a list of dictionaries.

    Files: `.jsonl`/`.ndjson`, `.json` (a list), `.csv`, `.tsv`, `.parquet`, each but Parquet also
    compressed with gzip, bzip2 or xz.

    Raises:
        ValueError: The form is unknown, or a line is no JSON object.
        FileNotFoundError: There is no such file.
    """
    if not isinstance(source, str | Path):
        if hasattr(source, "to_list"):  # a `datasets.Dataset`
            return list(source.to_list())
        return [dict(row) for row in source]
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"source={str(source)!r}: there is no such file")
    names = [suffix.lower() for suffix in path.suffixes]
    packed = names.pop() if names and names[-1] in (".gz", ".bz2", ".xz") else ""
    form = names[-1] if names else ""
    if form == ".parquet":
        import pandas as pd

        return [_plain(row) for row in pd.read_parquet(path).to_dict("records")]
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    opener: Any = openers.get(packed, open)
    if form in (".csv", ".tsv"):
        import pandas as pd

        with opener(path, "rt", encoding="utf-8") as file:
            frame = pd.read_csv(file, sep="," if form == ".csv" else "\t", keep_default_na=False)
        return [_plain(row) for row in frame.to_dict("records")]
    with opener(path, "rt", encoding="utf-8") as file:
        if form == ".json":
            rows = json.load(file)
            if not isinstance(rows, list):
                raise ValueError(f"{path} must hold a JSON list of rows")
            return rows
        if form not in (".jsonl", ".ndjson"):
            raise ValueError(f"{path}: unknown form '{form}', use jsonl, json, csv, tsv or parquet")
        rows = []
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number}: no JSON ({error.msg})") from error
        return rows


def _plain(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Values of a data frame's row as Python lists and numbers."""
    return {str(k): v.tolist() if hasattr(v, "tolist") else v for k, v in row.items()}


def parse(rows: Sequence[Mapping[str, Any]], kind: Kind = "pairs") -> list[Example]:
    """Rows of any accepted form to examples.

    Args:
        rows: What `read_rows` gives.
        kind: What is wanted: `pairs`, `prompts` (with a reference answer where there is one) or
            `demonstrations`. Pairs also serve as prompts, and their chosen responses as
            demonstrations.

    Raises:
        ValueError: A column is missing, a label is out of range, or a pair is no pair.
    """
    if not rows:
        raise ValueError("the data hold no rows")
    base = label_base(rows)
    return [_example(index, row, kind, base) for index, row in enumerate(rows)]


def label_base(rows: Sequence[Mapping[str, Any]]) -> int:
    """Whether labels count from 0 or from 1: a whole file decides, since a 1 alone does not.

    Raises:
        ValueError: A label is none of 0, 1, 2, or both 0 and 2 occur.
    """
    seen: set[int] = set()
    for index, row in enumerate(rows):
        if "output_1" not in row or "output_2" not in row:
            continue
        value = _first(row, LABEL)
        if value is None:
            raise ValueError(
                f"row {index}: two outputs without label or preference, columns {sorted(row)}"
            )
        text = str(value).strip().removesuffix(".0")
        if text not in ("0", "1", "2") or isinstance(value, bool):
            raise ValueError(f"row {index}: label must be 1 or 2 (or 0 or 1), got {value!r}")
        seen.add(int(text))
        if {0, 2} <= seen:
            raise ValueError(
                f"row {index}: labels 0 and 2 in one file: count outputs from 0 or from 1"
            )
    return 0 if 0 in seen else 1


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if name in row and row[name] is not None), None)


def _example(index: int, row: Mapping[str, Any], kind: Kind, base: int) -> Example:
    numbers = {n: float(row[n]) for n in NUMBERS if row.get(n) is not None and row.get(n) != ""}
    prompt = _first(row, PROMPT)
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if "summaries" in row and "info" in row:  # comparisons of summaries with their post
        prompt = row["info"].get("post") or row["info"].get("article")
        chosen, rejected = _by_label(index, [s["text"] for s in row["summaries"]], row, base=0)
    elif "output_1" in row and "output_2" in row:
        chosen, rejected = _by_label(index, [row["output_1"], row["output_2"]], row, base)
    if chosen is not None and rejected is not None:
        if prompt is None:
            prompt, chosen, rejected = split_transcripts(chosen, rejected, index)
        if kind == "pairs" and chosen == rejected:
            raise ValueError(f"row {index}: chosen and rejected are equal")
        for name, text in (("chosen", chosen), ("rejected", rejected)):
            if not text:
                raise ValueError(f"row {index}: {name} is empty")
    elif kind == "pairs":
        raise ValueError(
            f"row {index}: no preference pair in the columns {sorted(row)}; accepted are {ACCEPTED}"
        )
    else:
        chosen = chosen if chosen is not None else _first(row, ("reference", *RESPONSE))
        rejected = None
    if prompt is None:
        raise ValueError(
            f"row {index}: no prompt in the columns {sorted(row)}; accepted are {ACCEPTED}"
        )
    if kind == "demonstrations" and not chosen:
        raise ValueError(
            f"row {index}: no response in the columns {sorted(row)}; accepted are {ACCEPTED}"
        )
    return Example(index, prompt, chosen, rejected, numbers)


def _by_label(
    index: int, texts: Sequence[Any], row: Mapping[str, Any], base: int
) -> tuple[Any, Any]:
    """Two outputs, the preferred one first; the label counts from `base`."""
    value = _first(row, LABEL)
    label = str(value).strip().removesuffix(".0")
    if len(texts) != 2 or label not in (str(base), str(base + 1)):
        raise ValueError(
            f"row {index}: label must be {base} or {base + 1} for two outputs, got {value!r}"
        )
    return (texts[0], texts[1]) if label == str(base) else (texts[1], texts[0])


def split_transcripts(chosen: Text, rejected: Text, index: int = 0) -> tuple[Text, Text, Text]:
    r"""Split two whole conversations into their common prompt and the two last answers.

    Strings are cut after the last common `\n\nAssistant:`; chat messages before the last message.

    Raises:
        ValueError: The two have no common beginning.
    """
    if isinstance(chosen, str) and isinstance(rejected, str):
        cut = chosen.rfind(TURN) + len(TURN)
        if cut < len(TURN) or chosen[:cut] != rejected[:cut]:
            # the two may have different numbers of turns: search the last common one
            shared = _common(chosen, rejected)
            cut = chosen.rfind(TURN, 0, shared) + len(TURN)
            if cut < len(TURN):
                raise ValueError(
                    f"row {index}: chosen and rejected have no common prompt up to an "
                    f"{TURN!r} turn: give a prompt column"
                )
        return chosen[:cut], chosen[cut:].strip(), rejected[cut:].strip()
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise ValueError(f"row {index}: chosen and rejected must both be text or both messages")
    same = 0
    for a, b in zip(chosen, rejected, strict=False):
        if dict(a) != dict(b):
            break
        same += 1
    if same == 0 or same == len(chosen) or same == len(rejected):
        raise ValueError(f"row {index}: chosen and rejected share no beginning, or are equal")
    return list(chosen[:same]), list(chosen[same:]), list(rejected[same:])


def _common(a: str, b: str) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
