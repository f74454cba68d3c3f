"""A disk that is full, or whose power is cut, at any chosen operation of a module that writes."""

from __future__ import annotations

import builtins
import errno
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foreprop import durable


class PowerCut(BaseException):
    """From here on the process does nothing any more."""


class Disk:
    """Stands for modules' ``open`` and ``os``; trouble begins with operation number ``at``.

    ``cut``: nothing after that happens, and what was not synced is lost. Otherwise the disk is
    full: nothing more can be written, but files can be removed and renamed.
    """

    def __init__(self, at: int | None = None, *, cut: bool = False) -> None:
        self.done = 0
        self._at = at
        self._cut = cut
        self._unsynced: dict[int, int] = {}
        """By descriptor, another one of the same file, wherever that is renamed to."""
        self._never_synced: list[int] = []
        """The others of files that were closed so."""
        self.fired = False

    def stand_for(self, patch: pytest.MonkeyPatch, module: ModuleType) -> None:
        """Of all that this module writes, also by `foreprop.durable`."""
        for each in (module, durable):
            patch.setattr(each, "open", self.open, raising=False)
            patch.setattr(each, "os", self)

    def act(self, *, writes: bool = True) -> None:
        self.done += 1
        if self._at is None or self.done < self._at or not (writes or self._cut):
            return
        if self._cut and not self.fired:
            for descriptor in (*self._never_synced, *self._unsynced.values()):
                os.ftruncate(descriptor, 0)
        self.fired = True
        raise PowerCut if self._cut else OSError(errno.ENOSPC, "No space left on device")

    def open(self, path: Path, mode: str | int) -> Any:
        if isinstance(mode, int):
            return os.open(path, mode)  # the folder, to be synced
        if "r" in mode:
            return builtins.open(path, mode)
        self.act()
        file = builtins.open(path, mode)  # noqa: SIM115
        if file.fileno() in self._unsynced:
            self._never_synced.append(self._unsynced[file.fileno()])
        self._unsynced[file.fileno()] = os.dup(file.fileno())
        return File(self, file)

    def fsync(self, descriptor: int) -> None:
        self.act()
        if descriptor in self._unsynced:
            os.close(self._unsynced.pop(descriptor))

    def replace(self, source: Path, target: Path) -> None:
        self.act(writes=False)
        os.replace(source, target)

    def rename(self, source: Path, target: Path) -> None:
        self.act(writes=False)
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        self.act(writes=False)
        os.unlink(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def __del__(self) -> None:
        for descriptor in (*self._never_synced, *self._unsynced.values()):
            os.close(descriptor)


class File:
    def __init__(self, disk: Disk, file: Any) -> None:
        self._disk, self._file = disk, file

    def write(self, data: bytes) -> int:
        half = memoryview(data).cast("B")
        self._file.write(half[: len(half) // 2])
        self._disk.act()
        self._file.write(half[len(half) // 2 :])
        return len(half)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
