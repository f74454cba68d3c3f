"""What hosts and launcher say to each other, line by line.

A host's standard output is a sequence of records, one per line: workers' lines and `News`. A line
that does not begin with the mark is from somebody else (a shell's start-up file, say). A host's
standard input brings one `Task`, then commands, one per line; its end means that the launcher is
gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

PROTOCOL = 3
"""Changes when a launcher and a host of different versions would not understand each other."""

MARK = b"\x1e"  # ASCII's record separator
_OUT, _ERR, _NEWS = b"o", b"e", b"n"

END = b"end"
"""End the workers: SIGTERM, and SIGKILL after the task's grace."""
KILL = b"kill"
"""End them at once."""
ALIVE = b""
"""The launcher is still there."""
SERVERS = b"servers"
"""Say where the servers of the workers' session are: another worker may join it there."""
START = b"start"
"""``start PORT SECRET``: begin, with the rendezvous at this port of the first host, and with the
job's secret, in hexadecimal. It goes to standard input, and no further than to a file in memory."""

BEAT_S = 10.0
"""How often the launcher says that it is alive, at least."""
SILENCE_S = 60.0
"""How long a host hears nothing before it takes its launcher to be gone."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of a host that joins a running session: there torchrun could only count its own."""

    node_rank: int
    nodes: int
    first_rank: int
    world_size: int


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a host is to run, and where."""

    protocol: int = PROTOCOL
    host: str
    directory: str
    environment: dict[str, str]
    arguments: list[str]
    """torchrun's arguments, but for the port."""
    port: int | None
    """The rendezvous's port; None if this host is to choose a free one."""
    grace_s: float
    place: Place | None = None
    """The host's ranks; None if all hosts start together, and torchrun counts."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The host can start; the rendezvous would be at ``port``, the task's or a free one."""

    port: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The host cannot run the task."""

    reason: str


class WorkerFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A worker has ended with another code than 0; negative: the signal that killed it."""

    rank: int
    code: int
    step: int | None = None
    """The step that it had reached, if it has said so (`foreprop.checkpoint` does)."""
    lost: str = ""
    """The peer that it had lost, if it ended for that: another worker has failed before."""


class Serving(msgspec.Struct, frozen=True, kw_only=True, tag="serving"):
    """The answer to `SERVERS`: HOST:PORT of each; none if no session runs, or it has named none."""

    addresses: list[str]


News = Ready | Refused | WorkerFailed | Serving
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


LIMIT_BYTES = 65_536


class LineSplitter:
    """Bytes in, whole lines out, without their ends.

    A line that overwrites itself (a progress bar's carriage returns) is what a terminal would show
    of it in the end. One without end is passed on in pieces of ``limit_bytes``.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = [piece for line in whole for piece in self._pieces(_shown(line))]
        if len(self._rest) > self._limit_bytes:
            # as shown, or a progress bar would be kept from its beginning
            *pieces, self._rest = self._pieces(_shown(self._rest))
            lines += pieces
        return lines

    def _pieces(self, line: bytes) -> list[bytes]:
        step = self._limit_bytes
        return [line[start : start + step] for start in range(0, len(line), step)] or [line]

    def finish(self) -> list[bytes]:
        """The rest that had no line end: one line, or none."""
        rest, self._rest = _shown(self._rest), b""
        return [rest] if rest else []


def _shown(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
