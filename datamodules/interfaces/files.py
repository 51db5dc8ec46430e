"""Interfaces from a user's files: folders, archives or single structures; tables kept on disk."""

import tarfile
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from datamodules.interfaces.extraction import extract
from datamodules.interfaces.graphs import ResidueTable, residue_table
from datamodules.interfaces.structure import Structure, parse_structure
from datamodules.interfaces.vendored import pack_tables, unpack_tables

ENDINGS = tuple(f".{end}{gz}" for end in ("pdb", "ent", "cif", "mmcif") for gz in ("", ".gz"))


def stem(filename: str) -> str:
    """`ab/1abc_A_B.pdb.gz` to `1abc_A_B`."""
    base = filename.replace("\\", "/").rsplit("/", 1)[-1]
    ending = next(end for end in sorted(ENDINGS, key=len, reverse=True) if base.endswith(end))
    return base.removesuffix(ending)


def structure_files(source: str | Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of all structure files of a folder (nested), archive or single file.

    Raises:
        FileNotFoundError: if `source` doesn't exist.
        ValueError: if it is no structure, folder, `.zip` or `.tar` archive, or holds no structure.
    """
    path = Path(source)
    found = 0
    if path.is_dir():
        for file in sorted(p for p in path.rglob("*") if p.name.endswith(ENDINGS)):
            found += 1
            yield file.name, file.read_bytes()
    elif not path.exists():
        raise FileNotFoundError(f"structures={str(source)!r} doesn't exist")
    elif path.name.endswith(ENDINGS):
        found = 1
        yield path.name, path.read_bytes()
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in sorted(n for n in archive.namelist() if n.endswith(ENDINGS)):
                found += 1
                yield name, archive.read(name)
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and member.name.endswith(ENDINGS):
                    content = archive.extractfile(member)
                    assert content is not None
                    found += 1
                    yield member.name, content.read()
    else:
        raise ValueError(
            f"structures={str(source)!r} is no structure file, folder, .zip or .tar archive"
        )
    if not found:
        raise ValueError(f"structures={str(source)!r} holds no file ending in .pdb, .ent or .cif")


def cut(structure: Structure, chains: Sequence[str] | None, radius: float) -> Structure:
    """The interface among the named chains, or among all chains of the structure."""
    return extract(structure, list(chains) if chains else structure.chains, radius)


def load_tables(
    source: str | Path,
    names: Sequence[str] | None = None,
    radius: float | None = None,
    chains: Sequence[str] | None = None,
    cache_dir: str | None = None,
) -> dict[str, ResidueTable]:
    """Residue tables of a user's structures, by interface name.

    Args:
        source: see `structure_files`. File stems are interface names, `<id>_<chain>_<chain>`.
        names: only these; an interface may also be cut out of a file `<id>`.
        radius: cut interfaces at this distance in A; None takes the files as interfaces.
        chains: chains to cut between; default those in the name, else all of the file.
        cache_dir: keep the tables here; the cache belongs to the source path, its time of change
            and these arguments.

    Raises:
        ValueError: if no interface could be read, or a wanted one is missing.
    """
    path = Path(source)
    cached: Path | None = None
    if cache_dir is not None and path.exists():
        identity = (str(path.resolve()), path.stat().st_mtime_ns, names, radius, chains)
        digest = blake2b(repr(identity).encode(), digest_size=8).hexdigest()
        cached = Path(cache_dir) / f"interfaces-{digest}.npz"
        if cached.is_file():
            return unpack_tables(cached.read_bytes())
    wanted = None if names is None else set(names)
    by_entry: dict[str, list[str]] = {}
    for name in wanted or ():
        by_entry.setdefault(name.split("_")[0], []).append(name)
    tables: dict[str, ResidueTable] = {}
    problems: list[str] = []
    for filename, data in structure_files(source):
        name = stem(filename)
        if wanted is None or name in wanted:
            jobs = [name]
        elif radius is not None and name in by_entry:
            jobs = by_entry[name]
        else:
            continue
        for job in jobs:
            try:
                structure = parse_structure(data, filename)
                if radius is not None:
                    sides = chains or (job.split("_")[1:] if job != name or "_" in name else None)
                    structure = cut(structure, sides, radius)
                table = residue_table(structure)
            except ValueError as error:
                problems.append(str(error))
                continue
            tables[job] = ResidueTable(**{**table.__dict__, "name": job})
    if not tables:
        raise ValueError(
            f"no interface could be read from {source}"
            + (f": {problems[0]}" if problems else f"; wanted {sorted(wanted or ())[:3]}")
        )
    if problems:
        warnings.warn(
            f"{len(problems)} structure(s) of {source} left out, first: {problems[0]}", stacklevel=2
        )
    missing = sorted((wanted or set()) - set(tables))
    if missing:
        raise ValueError(
            f"{len(missing)} interface(s) not found in {source}, first: {', '.join(missing[:3])}"
        )
    if cached is not None:
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_suffix(".partial")
        partial.write_bytes(pack_tables(tables.values()))
        partial.replace(cached)
    return tables
