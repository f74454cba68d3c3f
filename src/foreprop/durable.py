"""Files that are whole, after a power cut and in folders that others write to. All raise `OSError`.

Others may put a link or a pipe where a file is expected: it is not followed, and not waited for.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Literal


def write_file(
    path: Path, write: Callable[[BinaryIO], object], mode: Literal["wb", "xb"] = "wb"
) -> None:
    """Write a file that is on the disk afterwards; its name is when `sync_folder` was called."""
    with open(path, mode) as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that at any time the old contents are there, or the new ones."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    with open(partial, "xb") as file:
        file.write(data)
    partial.replace(path)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The contents of an ordinary file; raises ValueError for more than ``most_bytes``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no ordinary file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"{path} has more than {most_bytes} bytes")
    return data


def sync_folder(path: Path) -> None:
    """Put the names of a folder's files on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
