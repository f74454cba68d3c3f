"""The task of a rank, and its reports: lines among those that the script prints."""

from __future__ import annotations

import math
import os
import sys

import msgspec

MARK = b"\x1fforeprop-compare "
"""Begins a line of ours; no script prints it by chance."""
_CHUNK = 64
"""Steps in a line. A pipe takes a line of so many at once, so that nothing gets into it."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is to do with the script, or, if ``module``, with the module of that name."""

    system: str
    steps: int
    warm_up: int
    seed: int | None
    module: bool = False
    backend: str | None = None
    find_unused: bool = False


class Began(msgspec.Struct, frozen=True, kw_only=True, tag="began"):
    """The script has called ``parallelize``."""

    rank: int
    about: str
    """The session, described in one line."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True, tag="chunk"):
    """Losses and times of consecutive steps."""

    rank: int
    losses: list[float | None]
    """The loss of each step; None if it is not a number, or without a backward pass."""
    seconds: list[float]
    """The time from each step's end to the next one's end."""


class RankEnd(msgspec.Struct, kw_only=True):
    """How a rank's run went."""

    steps: int = 0
    is_ready: bool = False
    """Whether it had come as far as ``parallelize``."""
    digest: str = ""
    """SHA-256 of the parameters."""
    interface: str = ""
    sent_bytes: int | None = None
    """The bytes sent there in the counted steps; None but from one rank of each machine."""
    waited_s: float | None = None
    """The time spent waiting for parameters in the counted steps, by foreprop's own counters."""
    cpu_share: float | None = None
    """How busy the machine's processors were in the counted steps; None like ``sent_bytes``."""


class Ended(RankEnd, kw_only=True, tag="ended"):
    """The last of a rank's lines."""

    rank: int
    error: str = ""


Record = Began | Chunk | Ended


class RecordWriter:
    """Writes records to ``descriptor``, behind what has been printed so far."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, *records: Record) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        for record in records:
            line = b"\n" + MARK + msgspec.json.encode(record) + b"\n"
            while line:
                line = line[os.write(self._descriptor, line) :]


def chunks(rank: int, losses: list[float], seconds: list[float]) -> list[Chunk]:
    """The records of ``losses`` of all steps, and ``seconds`` from the second step on."""
    numbers = [loss if math.isfinite(loss) else None for loss in losses]
    return [
        Chunk(
            rank=rank,
            losses=numbers[start : start + _CHUNK],
            seconds=seconds[start : start + _CHUNK],
        )
        for start in range(0, len(losses), _CHUNK)
    ]


def maybe_decode(line: bytes) -> Record | None:
    """The record that is in a line; None for a line of somebody else."""
    if not line.startswith(MARK):
        return None
    try:
        record: Record = msgspec.json.decode(line.removeprefix(MARK), type=Record)
    except msgspec.MsgspecError:
        return None
    return record
