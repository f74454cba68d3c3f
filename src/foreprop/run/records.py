"""What hosts and launcher say to each other.

A host's standard output is a sequence of records, one per line: workers' lines and `News`. A line
that does not begin with the mark is from somebody else (a shell's start-up file, say). A host's
standard input brings one `Task`, then commands, one per line; its end means that the launcher is
gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

PROTOCOL = 1
"""Changes when a launcher and a host of different versions would not understand each other."""

MARK = b"\x1e"  # ASCII's record separator
_OUT, _ERR, _NEWS = b"o", b"e", b"n"

END = b"end"
"""End the workers: SIGTERM, and SIGKILL after the task's grace."""
KILL = b"kill"
"""End them at once."""
ALIVE = b""
"""The launcher is still there."""
START = b"start"
"""``start PORT``: begin, with the rendezvous at this port of the first host."""

BEAT_S = 10.0
"""How often the launcher says that it is alive, at least."""
SILENCE_S = 60.0
"""After a silence as long as this a host takes its launcher to be gone."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a host is to run, and where."""

    protocol: int = PROTOCOL
    host: str
    directory: str
    environment: dict[str, str]
    arguments: list[str]
    """torchrun's, but for the port."""
    port: int | None
    """None if this host is to choose a free one."""
    grace_s: float


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The host could start. ``port``: the task's, or a free one."""

    port: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The host cannot run the task."""

    reason: str


class WorkerFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A worker has ended with another code than 0; negative: the signal that killed it."""

    rank: int
    code: int


News = Ready | Refused | WorkerFailed
Stream = Literal["out", "err"]


class Output(NamedTuple):
    """A line that a worker has printed."""

    stream: Stream
    rank: int
    text: bytes


def encode_output(stream: Stream, rank: int, lines: Iterable[bytes]) -> bytes:
    kind = _OUT if stream == "out" else _ERR
    head = MARK + kind + b"%d " % rank
    return b"".join(head + line + b"\n" for line in lines)


def encode_news(news: News) -> bytes:
    return MARK + _NEWS + msgspec.json.encode(news) + b"\n"


def decode(line: bytes) -> Output | News | None:
    """The record of a line without its end; None if it is none of ours."""
    if not line.startswith(MARK):
        return None
    kind, body = line[1:2], line[2:]
    try:
        if kind == _NEWS:
            news: News = msgspec.json.decode(body, type=News)
            return news
        rank, _, text = body.partition(b" ")
        if kind in (_OUT, _ERR):
            return Output("out" if kind == _OUT else "err", int(rank), text)
    except (msgspec.MsgspecError, ValueError):
        pass
    return None
