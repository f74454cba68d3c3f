"""Where the programs' texts come from: clones that are on this machine already."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

from tests.programs.program import Program

VARIABLE = "PROGRAMS_DIR"


class NotHere(Exception):
    """The program's source is not on this machine; says how to get it."""


def folder() -> Path:
    """Clones are in ``owner/name`` below it; packages that programs import in ``site``."""
    return Path(os.environ.get(VARIABLE, "runs/programs/sources")).absolute()


def how_to_get(repository: str) -> str:
    return f"git clone https://github.com/{repository} {folder() / repository}"


def copy_out(program: Program, target: Path) -> None:
    """The files of ``program`` at its commit; raises `NotHere` if they cannot be had."""
    clone = folder() / program.repository
    if not clone.is_dir():
        raise NotHere(how_to_get(program.repository))
    if not _is_clone(clone):
        shutil.copytree(clone, target, dirs_exist_ok=True)
        return
    command = ["git", "-C", str(clone), "archive", program.commit, *program.taken]
    found = subprocess.run(command, capture_output=True, check=False)
    if found.returncode:
        raise NotHere(
            f"{clone} does not have {program.commit[:12]}: git -C {clone} fetch origin"
            f" {program.commit} ({found.stderr.decode().strip()[:200]})"
        )
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(target, filter="data")


def _is_clone(clone: Path) -> bool:
    return (clone / ".git").exists() or (clone / "HEAD").exists()
