"""Files that are whole, also after a power cut, and in folders that others write to, too."""

from __future__ import annotations

import os
import stat
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


def replace_file(path: Path, data: bytes) -> None:
    """At every moment the old contents or the new ones are there. Raises `OSError`.

    Others may write into the folder: what they have put in the place of the new file is not
    followed, be it a link, and not waited for, be it a pipe.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    with open(partial, "xb") as file:
        file.write(data)
    partial.replace(path)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """What an ordinary file has. Raises `OSError` for anything else, a pipe say, and ValueError for
    more than so many bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no ordinary file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"{path} has more than {most_bytes} bytes")
    return data


def sync_folder(path: Path) -> None:
    """The names in it are on the disk afterwards."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
