"""What a rank is told, and what it tells, as lines among those that the script prints.

Lines, because a rank may be on a machine that shares no files with this one.
"""

from __future__ import annotations

import math
import os
import sys

import msgspec

MARK = b"\x1fforeprop-compare "
"""Begins a line of ours. No script prints it by chance."""
_CHUNK = 64
"""Steps in a line: a line stays below what a pipe takes at once, so nothing gets between."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is to do with the script. ``module``: it is a module's name."""

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
    """Who takes part, in one line."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True, tag="chunk"):
    """Consecutive steps. ``seconds``: from each one's end to the next one's end."""

    rank: int
    losses: list[float | None]
    """None: not a number, or no backward pass."""
    seconds: list[float]


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """How a rank's run went; the last of its lines."""

    rank: int
    steps: int
    """That it has made."""
    error: str = ""
    is_ready: bool = False
    """Whether it had come as far as ``parallelize``."""
    digest: str = ""
    """SHA-256 of the parameters."""
    interface: str = ""
    sent_bytes: int | None = None
    """Over that interface, in the steps that count. None but of one rank of each machine."""
    waited_s: float | None = None
    """By foreprop's own counters, in the steps that count."""
    cpu_share: float | None = None
    """How much of that time the machine's processors were busy; as ``sent_bytes``."""


Told = Began | Chunk | Ended


class Teller:
    """Writes records to ``descriptor``, behind what has been printed so far."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def tell(self, *records: Told) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        for record in records:
            line = b"\n" + MARK + msgspec.json.encode(record) + b"\n"
            while line:
                line = line[os.write(self._descriptor, line) :]


def chunks(rank: int, losses: list[float], seconds: list[float]) -> list[Chunk]:
    """``losses`` of all steps, ``seconds`` from the second step on."""
    told = [loss if math.isfinite(loss) else None for loss in losses]
    return [
        Chunk(
            rank=rank,
            losses=told[start : start + _CHUNK],
            seconds=seconds[start : start + _CHUNK],
        )
        for start in range(0, len(losses), _CHUNK)
    ]


def maybe_decode(line: bytes) -> Told | None:
    """None for a line of somebody else."""
    if not line.startswith(MARK):
        return None
    try:
        told: Told = msgspec.json.decode(line.removeprefix(MARK), type=Told)
    except msgspec.MsgspecError:
        return None
    return told
