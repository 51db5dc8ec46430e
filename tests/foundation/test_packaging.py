"""The wheel holds everything that the suite needs, and works away from the source tree."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("lightning_modules", "datamodules", "callbacks", "configs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = (source / "dist").glob("*.whl")
    return path


def test_wheel_is_complete(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and path.suffix in {".py", ".yaml", ".npz", ".gz", ".typed"}:
                assert str(path.relative_to(ROOT)) in names
    top = {name.split("/")[0] for name in names}
    assert top == {*PACKAGES, next(name for name in top if name.endswith(".dist-info"))}


def test_wheel_works_away_from_the_source(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    environment = {**os.environ, "PYTHONPATH": str(target), "PYTHONSAFEPATH": "1"}
    code = (
        "import lightning_modules, sys; assert lightning_modules.__file__.startswith(sys.argv[1]);"
        "from lightning_modules.__main__ import main; main(['papers'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(target)],
        env=environment,
        cwd=tmp_path,
        text=True,
        capture_output=True,
        check=True,
    )
    assert "configs  " in run.stdout


def test_every_dependency_has_its_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    requirements = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        requirements += [r for r in extra if not r.startswith("iclr24[")]
    for requirement in requirements:
        lines = [line for line in text.splitlines() if f'"{requirement}"' in line]
        assert any("#" in line for line in lines), f"{requirement} has no reason beside it"
