"""A worker's shell for rows: its pulls, and the parts that it pushes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from foreprop.core.manifest import Manifest
from foreprop.core.rows_machine import Shard
from foreprop.core.wire import Flag, Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.path.tensors import (
    DTYPES,
    bytes_of,
)
from foreprop.tables.parts import RowPart, encode_part, encode_pull, part_rows

_REQUESTS = 2**32
"""How many numbers requests have, before they begin again."""


_NO_PLACES = torch.empty(0, dtype=torch.int64)


class SendMessage(Protocol):
    def __call__(
        self,
        server: int,
        kind: Kind,
        step: int,
        priority: int,
        data: bytes,
        *,
        slice_: int,
        flags: int = 0,
    ) -> None: ...


@dataclass(slots=True, eq=False)
class Pull:
    """Rows that have been asked for."""

    parameter: int
    step: int
    numbers: torch.Tensor
    """Of the rows in the table, int64, ascending."""
    rows: torch.Tensor
    """As they come, in the same order."""
    missing: dict[int, int] = field(default_factory=dict)
    """The servers that have not answered yet, by request."""


@dataclass(slots=True)
class _Request:
    pull: Pull
    server: int
    places: torch.Tensor
    """Where the rows belong in the pull's."""
    arriving: torch.Tensor


class RowExchange:
    """Pushes and pulls of one worker. Any thread.

    ``priority_of`` is a parameter's priority; ``changed`` is told when a pull is complete.
    """

    def __init__(
        self,
        manifest: Manifest,
        shards: Sequence[Shard],
        *,
        send: SendMessage,
        priority_of: Callable[[int], int],
        changed: Callable[[], None],
    ) -> None:
        self.shards = shards
        self._servers = manifest.knobs.servers
        self._shards_of: dict[int, list[Shard]] = {}
        for shard in self.shards:
            self._shards_of.setdefault(shard.parameter, []).append(shard)
        self._dtypes = [DTYPES[info.dtype] for info in manifest.parameters]
        self._wire_dtypes = [DTYPES[dtype] for dtype in manifest.wire_dtypes()]
        self._part_elems = manifest.knobs.slice_elems
        self._send = send
        self._priority_of = priority_of
        self._changed = changed
        self._lock = threading.Lock()
        self._requests: dict[int, _Request] = {}
        self._next_request = 0

    def shards_of(self, parameter: int) -> Sequence[Shard]:
        return self._shards_of[parameter]

    # Pushing.
    def push(self, parameter: int, step: int, gradient: RowPart | None, *, flags: int) -> int:
        """Send a gradient's rows to their servers; returns the bytes. None: there is none.

        Row numbers are those in the table, ascending.
        """
        if gradient is None:
            for shard in self._shards_of[parameter]:
                self._tell(Kind.ROWS_PUSH, shard, step, b"", flags | Flag.NO_GRADIENT)
            return 0
        narrow = RowPart(gradient.numbers, gradient.rows.to(self._wire_dtypes[parameter]))
        return self._send_parts(Kind.ROWS_PUSH, parameter, step, narrow, flags)

    def send_values(self, parameter: int, step: int, table: torch.Tensor) -> None:
        """Rank 0: the whole table's values, that count from this step on."""
        numbers = torch.arange(len(table))
        self._send_parts(Kind.ROWS_VALUE, parameter, step, RowPart(numbers, table), 0)

    def _send_parts(self, kind: Kind, parameter: int, step: int, whole: RowPart, flags: int) -> int:
        sent_bytes = 0
        for shard in self._shards_of[parameter]:
            parts = self._parts(whole.numbers, shard) or [_NO_PLACES]
            for places in parts:
                rows = whole.rows.index_select(0, places)
                data = encode_part(RowPart(whole.numbers[places] // self._servers, rows))
                more = Flag.MORE if places is not parts[-1] else 0
                self._tell(kind, shard, step, data, flags | more)
                sent_bytes += len(data)
        return sent_bytes

    def _parts(self, numbers: torch.Tensor, shard: Shard) -> list[torch.Tensor]:
        """Which of these rows are the shard's, in parts of bounded size."""
        places = (numbers % self._servers == shard.server).nonzero()[:, 0]
        limit = part_rows(shard.row_elems, self._part_elems)
        return [places[start : start + limit] for start in range(0, len(places), limit)]

    def _tell(self, kind: Kind, shard: Shard, step: int, data: bytes, flags: int) -> None:
        priority = self._priority_of(shard.parameter)
        self._send(shard.server, kind, step, priority, data, slice_=shard.number, flags=flags)

    # Pulling.
    def pull(self, parameter: int, step: int, numbers: torch.Tensor, *, flags: int = 0) -> Pull:
        """Ask for rows as they are after ``step``; ``numbers`` ascend, int64.

        With ``Flag.ANEW`` a relay forgets what it has of that step.
        """
        shards = self._shards_of[parameter]
        rows = torch.empty(len(numbers), shards[0].row_elems, dtype=self._dtypes[parameter])
        pull = Pull(parameter, step, numbers, rows)
        asked = []
        with self._lock:  # before anything can be answered
            for shard in shards:
                for places in self._parts(numbers, shard):
                    asked.append((shard, places, self._register(pull, shard, places)))
        for shard, places, request in asked:
            data = encode_pull(shard.number, numbers[places] // self._servers)
            about = (Kind.ROWS_PULL, step, self._priority_of(parameter), data)
            self._send(shard.server, *about, slice_=request, flags=flags)
        return pull

    def _register(self, pull: Pull, shard: Shard, places: torch.Tensor) -> int:
        request = self._next_request
        self._next_request = (request + 1) % _REQUESTS
        # the values at the start come in full, so that all ranks begin with the same
        dtype = self._wire_dtypes[pull.parameter] if pull.step else pull.rows.dtype
        arriving = torch.empty(len(places), shard.row_elems, dtype=dtype)
        self._requests[request] = _Request(pull, shard.server, places, arriving)
        pull.missing[request] = shard.server
        return request

    # Receiving.
    def destination(self, server: int, header: Header) -> memoryview:
        """Where a reply's rows go; raises `RemoteProtocolError` for what nobody asked for."""
        request = self._requests.get(header.slice)
        if request is None or request.server != server or request.pull.step != header.step:
            raise RemoteProtocolError(
                f"server {server} sent rows for request {header.slice}, step {header.step}, which"
                " is not awaited"
            )
        return bytes_of(request.arriving)

    def arrived(self, header: Header) -> None:
        """A reply's rows are where `destination` said."""
        with self._lock:
            request = self._requests.pop(header.slice)
        request.pull.rows[request.places] = request.arriving.to(request.pull.rows.dtype)
        with self._lock:
            del request.pull.missing[header.slice]
            complete = not request.pull.missing
        if complete:
            self._changed()


def gradient_rows(gradient: torch.Tensor) -> RowPart:
    """A sparse gradient's rows, each row once, ascending."""
    merged = gradient.coalesce()
    return RowPart(merged.indices()[0], merged.values())
