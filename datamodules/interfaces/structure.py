"""Protein structures as arrays: reading PDB and mmCIF files, writing PDB files."""

import gzip
import io
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
"""One-letter codes in the order of all residue-type numbers."""

# fmt: off
THREE_LETTER = (
    "ALA", "CYS", "ASP", "GLU", "PHE", "GLY", "HIS", "ILE", "LYS", "LEU",
    "MET", "ASN", "PRO", "GLN", "ARG", "SER", "THR", "VAL", "TRP", "TYR",
)
# fmt: on
TYPE_OF = {name: number for number, name in enumerate(THREE_LETTER)}

Alternates = Literal["best", "all"]
Strings = NDArray[np.str_]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Structure:
    """Heavy atoms of the standard residues of one model.

    Attributes:
        name: file stem or entry id.
        position: (atoms, 3) in A.
        atom: (atoms,) atom names.
        residue: (atoms,) int64, residue type 0 to 19.
        chain: (atoms,) chain ids, of any length.
        number: (atoms,) int64 residue numbers.
        insertion: (atoms,) insertion codes, upper case, empty if none.
        element: (atoms,) element symbols, upper case.
        resolution: in A, NaN if unknown.
        method: experimental method in lower case, empty if unknown.
        dates: deposition and revision dates as given in the file.
    """

    name: str
    position: Floats
    atom: Strings
    residue: Integers
    chain: Strings
    number: Integers
    insertion: Strings
    element: Strings
    resolution: float = float("nan")
    method: str = ""
    dates: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.number)

    @property
    def chains(self) -> list[str]:
        """Chain ids in the order of the file."""
        return list(dict.fromkeys(self.chain.tolist()))

    def select(self, keep: NDArray[np.bool_]) -> "Structure":
        """The atoms where `keep` (atoms,) is true."""
        names = ("position", "atom", "residue", "chain", "number", "insertion", "element")
        return replace(self, **{name: getattr(self, name)[keep] for name in names})

    def residue_rows(self) -> Integers:
        """(atoms,) int64: residues numbered by first appearance of (chain, number, insertion)."""
        seen: dict[tuple[str, int, str], int] = {}
        keys = zip(self.chain.tolist(), self.number.tolist(), self.insertion.tolist(), strict=True)
        return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)


def read_structure(path: str | Path, alternates: Alternates = "best") -> Structure:
    """Read a `.pdb`, `.ent`, `.cif` or `.mmcif` file, plain or gzipped.

    Args:
        path: the file.
        alternates: of alternate locations keep the one of highest occupancy (the first on ties),
            or `all`, as the original extraction does.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the format is unknown, a coordinate is not a number or no residue is left.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"structure file {path} doesn't exist")
    data = path.read_bytes()
    return parse_structure(data, path.name, alternates)


def parse_structure(data: bytes, filename: str, alternates: Alternates = "best") -> Structure:
    """Parse the content of a structure file; see `read_structure`."""
    base = filename.rsplit("/", 1)[-1]
    if base.endswith(".gz"):
        data, base = gzip.decompress(data), base[:-3]
    stem, _, extension = base.rpartition(".")
    if extension in ("pdb", "ent"):
        return parse_pdb(data, stem, alternates)
    if extension in ("cif", "mmcif"):
        return parse_mmcif(data.decode(), stem, alternates)
    raise ValueError(
        f"{filename}: structure files end in .pdb, .ent, .cif or .mmcif, with or without .gz"
    )


def parse_pdb(data: bytes, name: str, alternates: Alternates = "best") -> Structure:
    """Parse PDB records by their fixed columns, the first model only."""
    lines = data.split(b"\n")
    models = sum(line.startswith(b"MODEL ") for line in lines)
    if models > 1:
        warnings.warn(f"{name} has {models} models; only the first is used", stacklevel=3)
        end = next((i for i, line in enumerate(lines) if line.startswith(b"ENDMDL")), len(lines))
        lines = lines[:end]
    atoms = [line[:80].ljust(80) for line in lines if line.startswith(b"ATOM  ")]
    if not atoms:
        raise ValueError(f"{name} has no ATOM records: a protein structure is needed")
    table = np.array(atoms, dtype="S80").view("S1").reshape(len(atoms), 80)

    def column(first: int, last: int) -> Strings:
        width = last - first + 1
        cut = np.ascontiguousarray(table[:, first - 1 : last]).view(f"S{width}")[:, 0]
        return np.char.strip(cut.astype(f"U{width}"))

    def numbers(text: Strings, what: str) -> Floats:
        try:
            return text.astype(np.float64)
        except ValueError:
            for row, value in enumerate(text.tolist()):
                try:
                    float(value)
                except ValueError:
                    record = atoms[row][:27].decode()
                    raise ValueError(
                        f"{name}: {what} {value!r} of record {record!r} is not a number"
                    ) from None
            raise

    header = _pdb_header(lines)
    occupancy = column(55, 60)
    occupancy[occupancy == ""] = "1"
    return _assemble(
        name,
        np.stack([numbers(column(*c), "coordinate") for c in ((31, 38), (39, 46), (47, 54))], 1),
        column(13, 16),
        column(18, 20),
        column(22, 22),
        numbers(column(23, 26), "residue number").astype(np.int64),
        column(27, 27),
        column(77, 78),
        column(17, 17),
        numbers(occupancy, "occupancy"),
        *header,
        alternates,
    )


def _pdb_header(lines: list[bytes]) -> tuple[float, str, tuple[str, ...]]:
    resolution, method, dates = float("nan"), "", []
    for line in lines:
        if line.startswith(b"ATOM"):
            break
        text = line.decode("ascii", "replace")
        if text.startswith("EXPDTA"):
            method = text[10:79].strip().lower()
        elif text.startswith("HEADER"):
            dates.append(text[50:59].strip())
        elif text.startswith("REMARK   2 RESOLUTION."):
            words = text.split()
            try:
                resolution = float(words[3])
            except (IndexError, ValueError):
                resolution = float("nan")
        elif text.startswith("REMARK   3  RESOLUTION:"):
            word = text.split(":")[1].split()[0]
            resolution = float("nan") if word == "None" else float(word)
        elif text.startswith(("REMARK   3  DEPOSITION DATE:", "REMARK   3  RELEASE DATE:")):
            dates.append(text.split(":")[1].strip())
        elif text.startswith("REMARK   3  STRUCTURE METHOD:"):
            method = text.split(":", 1)[1].strip().lower()
    return resolution, method, tuple(date for date in dates if date)


def parse_mmcif(text: str, name: str, alternates: Alternates = "best") -> Structure:
    """Parse an mmCIF file with author chain ids and numbers, the first model only.

    Raises:
        ImportError: if Biopython is missing.
        ValueError: if there is no atom table.
    """
    try:
        from Bio.PDB.MMCIF2Dict import MMCIF2Dict
    except ModuleNotFoundError as error:
        raise ImportError("mmCIF files need Biopython: pip install 'iclr24[ppiformer]'") from error
    entry = MMCIF2Dict(io.StringIO(text))  # type: ignore[no-untyped-call]
    if "_atom_site.Cartn_x" not in entry:
        raise ValueError(f"{name} has no _atom_site table: a protein structure is needed")

    def column(*keys: str) -> Strings:
        for key in keys:
            if f"_atom_site.{key}" in entry:
                return np.array(entry[f"_atom_site.{key}"], dtype=np.str_)
        raise ValueError(f"{name} has no _atom_site.{keys[0]}")

    model = column("pdbx_PDB_model_num") if "_atom_site.pdbx_PDB_model_num" in entry else None
    keep = column("group_PDB") == "ATOM"
    if model is not None:
        if len(set(model.tolist())) > 1:
            warnings.warn(
                f"{name} has {len(set(model.tolist()))} models; only the first is used",
                stacklevel=3,
            )
        keep &= model == model[0]

    def blank(values: Strings) -> Strings:
        return np.where((values == "?") | (values == "."), "", values)

    first = {
        key: (entry.get(key) or [""])[0]
        for key in (
            "_exptl.method",
            "_refine.ls_d_res_high",
            "_em_3d_reconstruction.resolution",
            "_pdbx_database_status.recvd_initial_deposition_date",
        )
    }
    resolution = float("nan")
    for key in ("_refine.ls_d_res_high", "_em_3d_reconstruction.resolution"):
        try:
            resolution = float(first[key])
            break
        except ValueError:
            continue
    position = np.stack([column(f"Cartn_{axis}") for axis in "xyz"], 1)[keep].astype(np.float64)
    occupancy = column("occupancy")[keep].astype(np.float64)
    return _assemble(
        name,
        position,
        column("auth_atom_id", "label_atom_id")[keep],
        column("auth_comp_id", "label_comp_id")[keep],
        column("auth_asym_id", "label_asym_id")[keep],
        column("auth_seq_id", "label_seq_id")[keep].astype(np.int64),
        blank(column("pdbx_PDB_ins_code"))[keep],
        column("type_symbol")[keep],
        blank(column("label_alt_id"))[keep],
        occupancy,
        resolution,
        first["_exptl.method"].lower(),
        tuple(v for k, v in first.items() if k.endswith("date") and v),
        alternates,
    )


def _assemble(
    name: str,
    position: Floats,
    atom: Strings,
    residue: Strings,
    chain: Strings,
    number: Integers,
    insertion: Strings,
    element: Strings,
    alternate: Strings,
    occupancy: Floats,
    resolution: float,
    method: str,
    dates: tuple[str, ...],
    alternates: Alternates,
) -> Structure:
    """Keep standard residues and heavy atoms; of alternate locations the highest occupancy."""
    if not np.isfinite(position).all():
        row = int(np.flatnonzero(~np.isfinite(position).all(1))[0])
        raise ValueError(
            f"{name}: atom {atom[row]} of {residue[row]} {chain[row]}:{number[row]}"
            f"{insertion[row]} has a coordinate that is not finite"
        )
    bare = np.char.lstrip(atom, "0123456789")
    element = np.where(element == "", np.array([a[:1] for a in bare.tolist()]), element)
    element = np.char.upper(element)
    standard = np.isin(residue, THREE_LETTER)
    keep = standard & ~np.isin(element, ("H", "D"))
    if not keep.any():
        raise ValueError(f"{name} has no heavy atom of a standard residue")
    rows = np.flatnonzero(keep)
    if alternates == "best" and (alternate[rows] != "").any():
        rows = _without_alternates(rows, atom, residue, chain, number, insertion, occupancy)
    return Structure(
        name,
        position[rows],
        atom[rows],
        np.array([TYPE_OF[code] for code in residue[rows].tolist()], dtype=np.int64),
        chain[rows],
        number[rows],
        np.char.upper(insertion[rows]),
        element[rows],
        resolution,
        method,
        dates,
    )


def _without_alternates(
    rows: Integers,
    atom: Strings,
    residue: Strings,
    chain: Strings,
    number: Integers,
    insertion: Strings,
    occupancy: Floats,
) -> Integers:
    """Of atoms with one name in one residue the one of highest occupancy, the first on ties."""
    kind: dict[tuple[str, int, str], tuple[float, str]] = {}
    for row in rows.tolist():
        # two residue types at one position: the one with the better occupied atom
        place = (str(chain[row]), int(number[row]), str(insertion[row]))
        if place not in kind or occupancy[row] > kind[place][0]:
            kind[place] = (float(occupancy[row]), str(residue[row]))
    best: dict[tuple[str, int, str, str], int] = {}
    for row in rows.tolist():
        place = (str(chain[row]), int(number[row]), str(insertion[row]))
        if kind[place][1] != residue[row]:
            continue
        key = (*place, str(atom[row]))
        if key not in best or occupancy[row] > occupancy[best[key]]:
            best[key] = row
    return np.array(sorted(best.values()), dtype=np.int64)


def pdb_text(structure: Structure, remarks: Iterable[str] = ()) -> str:
    """PDB records of a structure; each remark becomes a `REMARK   3` line.

    Raises:
        ValueError: for a chain id of more than one character, which the format can't hold.
    """
    long = [chain for chain in structure.chains if len(chain) != 1]
    if long:
        raise ValueError(
            f"{structure.name}: chain id {long[0]!r} doesn't fit into a PDB file; rename the chain"
        )
    lines = [f"REMARK   3  {remark}".ljust(80) for remark in remarks]
    columns = zip(
        structure.atom.tolist(),
        structure.residue.tolist(),
        structure.chain.tolist(),
        structure.number.tolist(),
        structure.insertion.tolist(),
        structure.element.tolist(),
        structure.position.tolist(),
        strict=True,
    )
    for serial, (atom, residue, chain, number, insertion, element, (x, y, z)) in enumerate(columns):
        padded = atom if len(atom) == 4 or len(element) == 2 else f" {atom}"
        lines.append(
            f"ATOM  {(serial + 1) % 100000:5d} {padded:<4} {THREE_LETTER[residue]} {chain}"
            f"{number:4d}{insertion or ' '}   {x:8.3f}{y:8.3f}{z:8.3f}{1.0:6.2f}{0.0:6.2f}"
            f"          {element:>2}  "
        )
    return "\n".join([*lines, "END", ""])
