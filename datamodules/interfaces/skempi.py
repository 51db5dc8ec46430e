"""Tables of measured affinities: SKEMPI v2.0 and a user's own CSV."""

import gzip
import math
import warnings
from pathlib import Path
from typing import Literal

import pandas as pd

KCAL_PER_MOL = 8.314 / 4184 * 298.15
"""R T at 298.15 K in kcal/mol, with the constants of the published labels."""

EXCLUDED = ("1KBH",)
"""Structures left out: an NMR ensemble."""

Numbering = Literal["pdb", "cleaned"]
COLUMN: dict[str, str] = {"pdb": "Mutation(s)_PDB", "cleaned": "Mutation(s)_cleaned"}


def ddg_from_affinities(mutant: float, wild: float) -> float:
    """Change of the binding free energy in kcal/mol; negative = the mutant binds better.

    Args:
        mutant: dissociation constant in M.
        wild: the same of the wild type.

    Raises:
        ValueError: for an affinity that isn't positive.
    """
    for name, value in (("mutant", mutant), ("wild-type", wild)):
        if not value > 0:
            raise ValueError(f"the {name} affinity must be positive (in M), got {value}")
    return KCAL_PER_MOL * (math.log(mutant) - math.log(wild))


def interface_name(complex_name: str) -> str:
    """`1AHW_AB_C` to `1AHW_A_B_C`: the joined interface over all chains."""
    entry, *partners = complex_name.split("_")
    return "_".join([entry, *(chain for partner in partners for chain in partner)])


def partners_of(complex_name: str) -> tuple[str, ...]:
    """Chains of each binding side of `1AHW_AB_C`: `("AB", "C")`."""
    return tuple(complex_name.split("_")[1:])


def _read_table(path: str | Path) -> pd.DataFrame:
    """A CSV with `,` or `;`, whichever the header line has more of."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"label table {path} doesn't exist")
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        header = file.readline()
    if header.count(",") == header.count(";") == 0:
        raise ValueError(
            f"{path}: the header line has neither ',' nor ';': {header.strip()[:60]!r}"
        )
    separator = ";" if header.count(";") > header.count(",") else ","
    hint = "quote mutations of several points (\"KA27A,RA59A\") or separate columns by ';'"
    try:
        table: pd.DataFrame = pd.read_csv(path, sep=separator)
    except pd.errors.ParserError as error:
        reason = str(error).strip().removeprefix("Error tokenizing data. C error: ")
        raise ValueError(f"{path}: {reason}; {hint}") from None
    if not isinstance(table.index, pd.RangeIndex):
        # pandas takes the surplus for row names and shifts all columns
        raise ValueError(f"{path}: the first rows have more fields than the header; {hint}")
    return table


def read_skempi(path: str | Path, numbering: Numbering = "pdb") -> pd.DataFrame:
    """SKEMPI v2.0 as a table of labels.

    Rows without both affinities and the excluded structures are left out, repeats with another
    affinity stay.

    Args:
        path: `skempi_v2.csv`, plain or gzipped.
        numbering: `pdb` for structures with their original numbers, `cleaned` for the files that
            come with SKEMPI. The wrong one drops or misplaces labels.

    Returns:
        Columns `complex`, `interface`, `mutation`, `ddg` (kcal/mol) and `protein` (first partner).

    Raises:
        ValueError: if columns are missing or an affinity isn't positive.
    """
    if numbering not in COLUMN:
        raise ValueError(f"numbering must be 'pdb' or 'cleaned', got {numbering!r}")
    table = _read_table(path)
    wanted = ["#Pdb", COLUMN[numbering], "Affinity_mut_parsed", "Affinity_wt_parsed", "Protein 1"]
    missing = [name for name in wanted if name not in table.columns]
    if missing:
        raise ValueError(f"{path} lacks the SKEMPI column(s) {', '.join(missing)}")
    mutant = pd.to_numeric(table["Affinity_mut_parsed"], errors="coerce")
    wild = pd.to_numeric(table["Affinity_wt_parsed"], errors="coerce")
    excluded = table["#Pdb"].str.split("_").str[0].isin(EXCLUDED)
    keep = mutant.notna() & wild.notna() & ~excluded
    bad = keep & ~((mutant > 0) & (wild > 0))
    if bad.any():
        row = int(bad.to_numpy().argmax())
        raise ValueError(
            f"{path}, line {row + 2}: affinities must be positive, "
            f"got mutant {mutant[row]} and wild type {wild[row]}"
        )
    table, mutant, wild = table[keep], mutant[keep], wild[keep]
    ddg = [ddg_from_affinities(m, w) for m, w in zip(mutant, wild, strict=True)]
    return pd.DataFrame(
        {
            "complex": table["#Pdb"].to_numpy(),
            "interface": [interface_name(name) for name in table["#Pdb"]],
            "mutation": table[COLUMN[numbering]].to_numpy(),
            "ddg": ddg,
            "protein": table["Protein 1"].to_numpy(),
        }
    )


def read_labels(
    path: str | Path,
    complex_column: str | None = None,
    mutation_column: str | None = None,
    ddg_column: str | None = None,
    numbering: Numbering = "pdb",
) -> pd.DataFrame:
    """A user's table of ddG labels, or SKEMPI if it has SKEMPI's columns.

    Args:
        path: CSV, `,` or `;`.
        complex_column: interface names; default `ppi`, `interface` or `#Pdb`.
        mutation_column: mutation strings; default by `numbering`, or `mutation`.
        ddg_column: kcal/mol; default `ddG` or `ddg`. Missing: no labels (NaN).
        numbering: see `read_skempi`.

    Returns:
        Columns `complex`, `interface`, `mutation`, `ddg`, `protein`, and `fold` if the file has it.

    Raises:
        ValueError: if a column is missing or a label isn't a number.
    """
    table = _read_table(path)
    if "Affinity_mut_parsed" in table.columns and ddg_column is None:
        return read_skempi(path, numbering)

    def column(given: str | None, *defaults: str) -> str | None:
        if given is not None:
            if given not in table.columns:
                raise ValueError(f"{path} has no column {given!r}; it has {list(table.columns)}")
            return given
        return next((name for name in defaults if name in table.columns), None)

    names = column(complex_column, "ppi", "interface", "complex", "#Pdb")
    mutations = column(
        mutation_column, COLUMN[numbering], "mutation", "mutstr", "Mutation(s)", "Mutation(s)_PDB"
    )
    values = column(ddg_column, "ddG", "ddg")
    if names is None or mutations is None:
        raise ValueError(
            f"{path} needs a column of interfaces and one of mutations; set complex_column and "
            f"mutation_column (it has {', '.join(table.columns)})"
        )
    ddg = [float("nan")] * len(table)
    if values is not None:
        numbers = pd.to_numeric(table[values], errors="coerce")
        bad = (numbers.isna() & table[values].notna()).to_numpy()
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(
                f"{path}, line {row + 2}: {values} {table[values][row]!r} is no number"
            )
        ddg = numbers.tolist()
    origin = table["#Pdb"] if "#Pdb" in table.columns else table[names]
    result = pd.DataFrame(
        {
            "complex": origin.to_numpy(),
            "interface": table[names].to_numpy(),
            "mutation": table[mutations].to_numpy(),
            "ddg": ddg,
            "protein": (table["protein"] if "protein" in table.columns else origin).to_numpy(),
        }
    )
    if "fold" in table.columns:
        result["fold"] = table["fold"].astype(str).to_numpy()
    return result


def report_match(matched: int, total: int, skipped: list[str], what: str) -> None:
    """Warn when many labels find no residue: most often the wrong numbering column."""
    if not skipped:
        return
    rate = matched / max(total, 1)
    hint = ""
    if rate < 0.9:
        other = "Mutation(s)_cleaned or Mutation(s)_PDB"
        hint = f"; if the files are numbered otherwise, choose the other column ({other})"
    warnings.warn(
        f"{what}: {matched} of {total} labels ({rate:.0%}) fit the structures, "
        f"first not fitting: {skipped[0]}{hint}",
        stacklevel=3,
    )
