"""The files of `session.save_tables`: at every moment the last complete tables can be loaded.

Parts get names that no earlier save has used, and are on the disk before the index names them. The
index is replaced last, in one step; only then what it no longer names is removed. So whoever is
killed, or finds the disk full, at whatever moment, leaves the tables that were there before.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from foreprop.durable import sync_folder, write_file
from foreprop.errors import ConfigError, ForepropError, StorageError

INDEX = "tables.json"
_PART = re.compile(r"table-\d+-\d+(-[0-9a-f]{8})?\.pt")
_UNFINISHED = re.compile(re.escape(INDEX) + r"-[0-9a-f]{8}\.part")


class TableFolder:
    """One save into a folder, or one load from it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token = secrets.token_hex(4)
        self._written: list[str] = []
        self._replaced = False

    # Writing.
    def save(self, write_parts: Callable[[], Mapping[str, Any]]) -> None:
        """``write_parts`` calls `write_part` and returns what the index says of each table.

        Raises `StorageError` if the folder cannot be written; what was in it can still be loaded.
        """
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._remove_all_but(self._named_by_index())
            described = write_parts()
            self._replace_index(json.dumps({"tables": described}, indent=1).encode())
            sync_folder(self._path)
        except (ForepropError, OSError, RuntimeError) as error:  # torch's are the last
            if not self._replaced:
                self._remove(self._written)  # make room
            if isinstance(error, ForepropError):
                raise
            raise StorageError(
                f"cannot save tables in {self._path}: {error}; what was saved there before can"
                " still be loaded"
            ) from error
        self._remove_all_but(self._written)

    def write_part(self, table: int, number: int, parts: object) -> str:
        """Returns the file's name."""
        name = f"table-{table}-{number}-{self._token}.pt"
        self._write(name, lambda file: torch.save(parts, file))
        return name

    def _replace_index(self, data: bytes) -> None:
        """Whoever reads it sees all of it or none, also after a power cut."""
        unfinished = f"{INDEX}-{self._token}.part"
        self._write(unfinished, lambda file: file.write(data))
        sync_folder(self._path)  # the parts' names are there before the index that has them
        os.replace(self._path / unfinished, self._path / INDEX)
        self._replaced = True

    def _write(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        """A new file, which is on the disk afterwards."""
        self._written.append(name)
        write_file(self._path / name, write, "xb")

    def _remove_all_but(self, keep: Iterable[str] | None) -> None:
        """Of the files that a save has written; none if nobody knows which are needed."""
        if keep is None:
            return
        names = {path.name for path in self._path.iterdir()}
        ours = {name for name in names if _PART.fullmatch(name) or _UNFINISHED.fullmatch(name)}
        self._remove(ours.difference(keep))

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):  # it is only in the way
                os.unlink(self._path / name)

    # Reading.
    def _named_by_index(self) -> list[str] | None:
        """None if there is an index that cannot be read."""
        if not (self._path / INDEX).exists():
            return []
        try:
            tables = self.read_index()
            return [name for table in tables.values() for name in table["files"]]
        except ConfigError:
            return None

    def read_index(self) -> Mapping[str, Mapping[str, Any]]:
        """What was saved of each table, and its files' names; raises `ConfigError`."""
        try:
            found = json.loads((self._path / INDEX).read_text())["tables"]
            for table in found.values():
                _check_names(table["files"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{self._path} has no complete tables, as session.save_tables() writes them:"
                f" {error!r}"
            ) from error
        tables: Mapping[str, Mapping[str, Any]] = found
        return tables


def _check_names(names: list[str]) -> None:
    """Only files of this folder: an index may come from anywhere."""
    for name in names:
        if not _PART.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a part, as table-0-0-0123abcd.pt")
