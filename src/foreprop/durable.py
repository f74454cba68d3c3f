"""Files that are on the disk before anything names them, also after a power cut."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Literal


def write_file(
    path: Path, write: Callable[[BinaryIO], object], mode: Literal["wb", "xb"] = "wb"
) -> None:
    """It is on the disk afterwards, but for its name (`sync_folder`). Raises `OSError`."""
    with open(path, mode) as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """The names in it are on the disk afterwards."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
