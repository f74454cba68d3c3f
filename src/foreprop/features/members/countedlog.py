"""Counted sets on disk: whom a server's updates have counted, and whom a replay is to count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from foreprop.core.dealing import MemberChange
from foreprop.core.membership import CountedLog, CountedReplay
from foreprop.core.slicing import Shard, Slice
from foreprop.durable import read_regular
from foreprop.errors import ConfigError, StorageError

_ENDING = ".counted"
_MOST_BYTES = 1 << 30


class CountedFile:
    """Writes one server's log by lines, so that all but the last two steps outlive the process.

    All methods raise `StorageError` for a file that cannot be written.
    """

    def __init__(self, folder: str, index: int, session_id: str, log: CountedLog) -> None:
        self._log = log
        self._path = Path(folder) / f"server-{index}.{session_id}{_ENDING}"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO | None = self._path.open("w")
        except OSError as error:
            raise self._refused(error) from error
        self.write([log.head()])

    def _refused(self, error: OSError) -> StorageError:
        return StorageError(f"counted_log: {self._path} cannot be written: {error}")

    def write(self, lines: Sequence[str]) -> None:
        if lines and self._file is not None:
            try:
                self._file.write("".join(f"{line}\n" for line in lines))
                self._file.flush()
            except OSError as error:
                raise self._refused(error) from error

    def close(self) -> None:
        if self._file is not None:
            self.write(self._log.rest())
            self._file.close()
            self._file = None


def read_replay(folder: str, index: int, workers: int, slices: Sequence[int]) -> CountedReplay:
    """The log of the one session whose logs are in the folder; raises `ConfigError`."""
    found = sorted(Path(folder).glob(f"server-{index}.*{_ENDING}"))
    if len(found) != 1:
        raise ConfigError(
            f"counted_replay is {folder!r}, where there are {len(found)} logs of server {index};"
            " there must be one: give the folder that one session had as counted_log"
        )
    try:
        lines = read_regular(found[0], _MOST_BYTES).decode().splitlines()
    except (OSError, ValueError) as error:  # ValueError: no text, or too much of it
        raise ConfigError(f"counted_replay: {found[0]} cannot be read: {error}") from error
    try:
        return CountedReplay(lines, workers, slices)
    except ConfigError as error:
        raise ConfigError(f"{error}; the log is {found[0]}") from error


def read_left(folder: str, workers: int, pieces: Sequence[Slice | Shard]) -> list[MemberChange]:
    """Who left by all servers' logs, so that a replay deals its data as that session did.

    ``pieces`` are all slices and shards. Raises `ConfigError` if a log is not there.
    """
    found: dict[int, int] = {}
    for server in sorted({piece.server for piece in pieces}):
        own = [piece.number for piece in pieces if piece.server == server]
        for rank, step in read_replay(folder, server, workers, own).left.items():
            found[rank] = max(step, found.get(rank, step))
    return [MemberChange(rank, step) for rank, step in found.items()]
