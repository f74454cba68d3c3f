"""Wheel and sdist: built, checked as the package index does, and used where nothing else is.

The fresh environment gets links to what the package says that it needs, and to nothing more. So a
dependency that is not declared is missing there, and nothing is downloaded.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement

from foreprop.version import __version__
from tests.process.harness import ROOT

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(600)]

BUILD = ("hatchling", "hatch-fancy-pypi-readme")
"""What pyproject.toml's [build-system] names."""


def clean_environment() -> dict[str, str]:
    """Nothing of this checkout, of pip's settings, or of the launcher that may run this test."""
    foreign = ("PYTHON", "PIP_", "FOREPROP_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "OMP_NUM_THREADS": "1"}


def called(*command: str | Path, cwd: Path, fails: bool = False) -> str:
    """What a command prints; it must end well, or must not."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean_environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert (done.returncode != 0) is fails, done.stdout
    return done.stdout


def closure(names: Sequence[str]) -> set[str]:
    """Distributions that these need here, and themselves."""
    found: set[str] = set()
    todo = [Requirement(name) for name in names]
    while todo:
        wanted = todo.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if (wanted.marker and not wanted.marker.evaluate({"extra": ""})) or name in found:
            continue
        found.add(name)
        todo += map(Requirement, importlib.metadata.requires(name) or [])
    return found


def declared(wheel: Path) -> list[str]:
    """What a wheel says that it needs, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"foreprop-{__version__}.dist-info/METADATA").decode()
    wanted = re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)
    assert any(requirement.startswith("torch") for requirement in wanted)
    return [requirement for requirement in wanted if "extra ==" not in requirement]


def link_into(folder: Path, distributions: set[str]) -> None:
    for name in sorted(distributions):
        files = importlib.metadata.distribution(name).files or []
        tops = {PurePosixPath(file).parts[0] for file in files} - {"..", "__pycache__"}
        for top in tops:
            source = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            if not (folder / top).exists():
                (folder / top).symlink_to(source)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, and the wheel made out of it."""
    folder = tmp_path_factory.mktemp("dist")
    called(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def fresh(
    request: pytest.FixtureRequest,
    built: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """An environment's bin folder, with foreprop installed and what it says that it needs."""
    folder = tmp_path_factory.mktemp("fresh")
    called(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    needed = declared(built["wheel"])
    link_into(packages, closure([*needed, *(BUILD if request.param == "sdist" else ())]))
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-build-isolation"]
    called(*pip, built[request.param], cwd=folder)
    return folder / "bin"


def test_the_package_index_would_take_them(built: dict[str, Path], tmp_path: Path) -> None:
    told = called(sys.executable, "-m", "twine", "check", "--strict", *built.values(), cwd=tmp_path)
    assert told.count("PASSED") == 2


def test_the_wheel_is_the_product(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = wheel.namelist()
    assert {name.partition("/")[0] for name in names} == {
        "foreprop",
        f"foreprop-{__version__}.dist-info",
    }
    assert "foreprop/py.typed" in names
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "foreprop").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
        if path.suffix != ".sha256"  # of what the native plane was compiled from, in a clone
    }
    assert {name for name in names if name.startswith("foreprop/")} == sources


def test_the_sdist_has_what_a_contributor_needs(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = "README.md CITATION.cff SECURITY.md Makefile constraints.txt mkdocs.yml LICENSE"
    wanted += " docs/README.md lab/mkdocs.yml lab/docs/README.md"
    assert {*wanted.split(), "conftest.py", "scripts/check"} <= names
    assert not [name for name in names if name.startswith(("runs/", ".venv/", "dist/"))]


def test_it_is_used_where_nothing_else_is(fresh: Path, tmp_path: Path) -> None:
    where = called(
        fresh / "python", "-c", "import foreprop; print(foreprop.__file__)", cwd=tmp_path
    )
    assert Path(where.strip()).is_relative_to(fresh.parent)
    assert __version__ in called(fresh / "foreprop", "--version", cwd=tmp_path)
    setting = "--model resnet50 --nodes 8 --rate 10Gbit --compute 180ms".split()
    planned = called(fresh / "foreprop", "plan", *setting, "--json", cwd=tmp_path)
    assert json.loads(planned)
    assert "slice_elems" in called(fresh / "foreprop", "config", "--all", cwd=tmp_path)


def test_it_trains_where_nothing_else_is(fresh: Path, tmp_path: Path) -> None:
    script = shutil.copy(ROOT / "examples" / "train_transformer.py", tmp_path)
    torchrun = [fresh / "python", "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", Path(script), "--epochs", "1"]
    told = called(*command, cwd=tmp_path)
    assert "2 workers on 1 node, 1 server" in told
    assert len(set(re.findall(r"SHA-256 of the weights ([0-9a-f]{64})", told))) == 1


def test_what_needs_an_extra_says_so(fresh: Path, tmp_path: Path) -> None:
    setting = "--model resnet50 --nodes 8 --rate 10Gbit --compute 180ms".split()
    curves = ["--what-if", "nodes=2..8", "--out", "curves.png"]
    told = called(fresh / "foreprop", "plan", *setting, *curves, cwd=tmp_path, fails=True)
    assert "pip install '.[plots]' in a clone" in told
    assert "Traceback" not in told
    told = called(fresh / "foreprop", "demo", cwd=tmp_path, fails=True)
    assert told.endswith(
        "foreprop-lab, which is not installed: pip install ./lab in a clone of foreprop\n"
    )


def test_the_lab_s_wheel_has_its_commands_and_codecs(tmp_path: Path) -> None:
    build = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path)
    called(*build, ROOT / "lab", cwd=tmp_path)
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        (entries,) = (name for name in names if name.endswith("entry_points.txt"))
        points = wheel.read(entries).decode()
        assert "lab = foreprop_lab.commands:COMMANDS" in points
        assert "1bit = foreprop_lab.codecs.signs:OneBit" in points
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"foreprop_lab"}
