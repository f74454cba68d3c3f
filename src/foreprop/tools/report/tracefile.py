"""Read recorded traces: complete ones, and those of a process that died while it wrote.

A file may come from anywhere, so everything that is read is checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from foreprop.core.manifest import MOST_PROCESSES
from foreprop.durable import read_regular
from foreprop.engine.trace import ABOUT, ENDING
from foreprop.errors import ConfigError

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTrace:
    """One process of one session."""

    process: str
    """The process's name: ``worker 0`` or ``server 1``."""
    session: str
    number: int
    """The process's "pid" in the file."""
    about: Mapping[str, Any]
    """What is run, as a worker has described it; servers do not."""
    threads: Mapping[int, str]
    spans: Sequence[Event]
    """Chrome's "complete" events; "ts" and "dur" are microseconds."""
    written_s: float
    """When the file was last written."""

    @property
    def rank(self) -> int | None:
        return self._number("worker")

    def crosses(self, peer: int, about: Mapping[str, Any]) -> bool:
        """Whether frames to and from this peer pass a link between nodes; yes if not known."""
        here = self.node(about)
        if here is None or peer < 0:
            return True
        there = server_node(peer, about) if self.rank is not None else rank_node(peer, about)
        return here != there

    def node(self, about: Mapping[str, Any]) -> int | None:
        """The number of the process's node; None if that is not known."""
        if about and self.rank is not None:
            return rank_node(self.rank, about)
        server = self._number("server")
        return server_node(server, about) if about and server is not None else None

    def _number(self, kind: str) -> int | None:
        found, _, number = self.process.partition(" ")
        return int(number) if found == kind and number.isdecimal() else None


def rank_node(rank: int, about: Mapping[str, Any]) -> int:
    node: int = rank * about["nodes"] // about["ranks"]
    return node


def server_node(server: int, about: Mapping[str, Any]) -> int:
    # dedicated servers are on nodes of their own, after those of the workers
    if about.get("dedicated_servers"):
        return int(about["nodes"] + server)
    node: int = server * about["nodes"] // max(about["servers"], 1)
    return node


def read_folder(folder: Path) -> list[ProcessTrace]:
    """All traces of a folder, workers first; raises `ConfigError` if there are none."""
    found = [read_trace(path) for path in sorted(folder.glob(f"*{ENDING}"))]
    if not found:
        raise ConfigError(
            f"{folder} has no *{ENDING}: each process writes its own while it runs, if"
            " parallelize() had trace=FOLDER or FOREPROP_TRACE was set"
        )
    return sorted(found, key=lambda trace: (trace.session, trace.number))


def latest_session(traces: Sequence[ProcessTrace]) -> list[ProcessTrace]:
    session = max(traces, key=lambda trace: trace.written_s).session
    return [trace for trace in traces if trace.session == session]


_MOST = 2**53
_MOST_BYTES = 1 << 32
_Number = Annotated[int, msgspec.Meta(ge=-_MOST, le=_MOST)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
_Us = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_PROCESSES)]
_MOST_ELEMS = 2**36
"""The most elements of one parameter: 256 GB of float32."""


class _Args(msgspec.Struct):
    step: _Number
    bytes: _Size
    slice: _Number
    priority: _Number
    peer: _Number


class _Span(msgspec.Struct, tag_field="ph", tag="X"):
    cat: str
    name: str
    ts: _Us
    dur: _Us
    pid: _Number
    tid: _Number
    args: _Args


class _Note(msgspec.Struct, tag_field="ph", tag="M"):
    name: str
    pid: _Number
    args: dict[str, Any]
    tid: _Number | None = None


class _Parameter(msgspec.Struct):
    name: str
    shape: list[Annotated[int, msgspec.Meta(ge=0, le=_MOST_ELEMS)]]
    itemsize: Annotated[int, msgspec.Meta(ge=1, le=16)]

    def __post_init__(self) -> None:
        if math.prod(self.shape) > _MOST_ELEMS:
            raise ValueError(f"{self.name} has more than {_MOST_ELEMS:,} elements")


class _About(msgspec.Struct):
    """What `session.figures.facts_of` writes."""

    version: str
    torch: str
    ranks: _Count
    nodes: _Count
    servers: Annotated[int, msgspec.Meta(ge=0, le=MOST_PROCESSES)]
    architecture: str | None
    slice_elems: Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
    link_rate_bits_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e18)] | None
    wire_dtype: str | None
    parameters: list[_Parameter]
    dedicated_servers: Annotated[int, msgspec.Meta(ge=0, le=MOST_PROCESSES)] = 0


def read_trace(path: Path) -> ProcessTrace:
    """One process's trace; raises `ConfigError` if the file is no trace of ours."""
    try:
        data = read_regular(path, _MOST_BYTES)
        try:
            events = msgspec.json.decode(data)["traceEvents"]
        except msgspec.DecodeError:
            events = list(_whole_lines(data))
        for event in msgspec.convert(events, type=list[_Span | _Note]):
            if isinstance(event, _Note):
                msgspec.convert(event.args, type=_About if event.name == ABOUT else _Named)
        meta = {(e["name"], e.get("tid")): e["args"] for e in events if e["ph"] == "M"}
        process = str(meta[("process_name", None)]["name"])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # JSON that is damaged, or has something else where objects are due
        raise ConfigError(f"the trace {path} is damaged: {error!r}") from error
    return ProcessTrace(
        process=process,
        session=path.name.removesuffix(ENDING).rpartition(".")[2],
        number=events[0]["pid"],
        about=meta.get((ABOUT, None), {}),
        threads={tid: args["name"] for (_, tid), args in meta.items() if tid is not None},
        spans=[event for event in events if event["ph"] == "X"],
        written_s=path.stat().st_mtime,
    )


class _Named(msgspec.Struct):
    """A process's or thread's note."""

    name: str


def _whole_lines(data: bytes) -> Iterator[Any]:
    """The events of a file without its end, one to a line; the last one may be cut off."""
    _, *lines = data.split(b"\n")
    for number, line in enumerate(lines):
        try:
            if text := line.rstrip(b","):
                yield msgspec.json.decode(text)
        except msgspec.DecodeError:
            if number < len(lines) - 1:
                raise
