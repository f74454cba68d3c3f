"""A relay's shards: its workers' rows are merged into one push, and none is fetched twice.

"Local aggregation" of sparse gradients (Parallax, section 5.3.2): the rows of all workers of the
node are added up in rank order, each touched row is pushed once. A pull asks the server for those
of its rows that nobody on this node has asked for as of the same step, or `Flag.ANEW` all of them;
it is answered when all are here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foreprop.core.frames import SERVER, FailSession, PeerLeft, PushArrived
from foreprop.core.manifest import Manifest
from foreprop.core.rows_machine import RowsMachine, RowsUpdated, UpdateRows
from foreprop.core.shards import Shard
from foreprop.core.wire import Flag, Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import Connection
from foreprop.path.executor import Executor
from foreprop.path.memory import bytes_of
from foreprop.path.slices import SettingsAt
from foreprop.path.tensors import DTYPES
from foreprop.tables.parts import (
    RowPart,
    encode_part,
    encode_pull,
    kept_limit_bytes,
    part_rows,
    sum_parts,
)
from foreprop.tables.service import ROW_KINDS, OwnShards
from foreprop.tables.table import RowIndex

_REQUESTS = 2**32
"""How many numbers requests have, before they begin again."""
_STEPS_KEPT = 2
"""A worker may ask for the next batch's rows while another still asks for this one's."""


@dataclass(slots=True)
class _RowFetch:
    """Rows that the server has been asked for."""

    number: int
    fetched: _Fetched
    step: int
    rows: torch.Tensor
    """As they come; bytes."""
    arrived: bool = False


@dataclass(slots=True, eq=False)
class _OpenPull:
    """One worker's pull."""

    worker: int
    header: Header
    requests: list[_RowFetch]
    """Which its rows come with."""
    sources: torch.Tensor
    """By row: which of these."""
    places: torch.Tensor
    """By row: where in that."""

    @property
    def complete(self) -> bool:
        return all(request.arrived for request in self.requests)


@dataclass(slots=True)
class _Fetched:
    """A shard's rows as of one step, as far as this node has asked for them."""

    index: RowIndex = field(default_factory=RowIndex)
    """Which rows those are, and their places: one request's after the other's."""
    requests: list[_RowFetch] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Of each request, the first place."""
    waiting: list[_OpenPull] = field(default_factory=list)

    def add(self, request: _RowFetch, numbers: torch.Tensor) -> None:
        """Rows that have no place yet."""
        self.starts.append(self.index.count)
        self.index.add(numbers)
        self.requests.append(request)

    def find(self, numbers: torch.Tensor) -> tuple[list[_RowFetch], torch.Tensor, torch.Tensor]:
        """Which requests these rows come with, by row which of those, and by row where in it."""
        places, starts = self.index.find(numbers), torch.tensor(self.starts, dtype=torch.int64)
        which = torch.searchsorted(starts, places, right=True) - 1
        used, sources = torch.unique(which, return_inverse=True)
        return [self.requests[i] for i in used.tolist()], sources, places - starts[which]


class RelayRows:
    """Owns rows: the shards of one server.

    ``settings_at`` gives the optimizer's numbers, as all workers of the node agree; it is called
    with the lock held.
    """

    kinds = ROW_KINDS | {Kind.ROWS_REPLY}

    def __init__(
        self,
        manifest: Manifest,
        shards: Sequence[Shard],
        executor: Executor,
        settings_at: SettingsAt,
    ) -> None:
        self._executor = executor
        self._settings_at = settings_at
        self._lock = executor.lock
        self._peers = executor.peers
        server = executor.host.index
        names = [info.name for info in manifest.parameters]
        self._machine = RowsMachine(shards, index=server, peers=executor.peers, names=names)
        self._shards = OwnShards(manifest, shards, server, "this relay's server")
        self._dtypes = [DTYPES[info.dtype] for info in manifest.parameters]
        self._wire_dtypes = [DTYPES[dtype] for dtype in manifest.wire_dtypes()]
        self._part_elems = manifest.knobs.slice_elems
        self._gradients: dict[tuple[int, int], dict[int, list[RowPart]]] = {}
        """By shard and step, and worker."""
        self._about: dict[tuple[int, int], tuple[int, int]] = {}
        """By shard and step: priority and flags of what is pushed on."""
        self._pushed: dict[int, int] = {}
        """By shard, the last step whose push has been passed on."""
        self._fetched: dict[int, dict[int, _Fetched]] = {}  # by shard and step
        self._requests: dict[int, _RowFetch] = {}
        self._next_request = 0

    def __contains__(self, number: int) -> bool:
        return number in self._shards

    # Frames.
    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.kind == Kind.ROWS_REPLY:
            request = self._requests.get(header.slice)
            if request is None or request.step != header.step:
                raise RemoteProtocolError(
                    f"rows for request {header.slice}, step {header.step}, which is not awaited"
                )
            return bytes_of(request.rows)
        return self._shards.room(header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.ROWS_REPLY:
            self._on_reply(header)
        elif header.kind == Kind.ROWS_PULL:
            self._on_pull(peer.number, header, payload)
        elif header.kind == Kind.ROWS_PUSH:
            self._on_push(peer.number, header, payload)
            peer.last_push = (header.slice, header.step)
        else:
            if self._peers.first_rank(peer.number) != 0:
                who = self._peers.name(peer.number)
                raise RemoteProtocolError(f"{who} sent parameter values; only rank 0 may")
            place = (header.step, header.priority, header.slice)
            self._executor.send(SERVER, Kind.ROWS_VALUE, *place, payload, header.flags)

    def kept_limit_bytes(self, number: int) -> int:
        """The longest part of a remote table; raises `RemoteProtocolError`."""
        return kept_limit_bytes(self._shards[number])

    # Pushes.
    def _on_push(self, worker: int, header: Header, payload: memoryview) -> None:
        key = number, step = header.slice, header.step
        part = None
        if len(payload):
            part = self._shards.gradient(header, payload, self._peers.name(worker))
        with self._lock:
            if part is not None:
                gradients = self._gradients.setdefault(key, {})
                gradients.setdefault(worker, []).append(part)
            if worker == 0 or key not in self._about:  # values have rank 0's priority, too
                self._about[key] = (header.priority, header.flags & Flag.VALUE_CHANGED)
            work: list[UpdateRows] = []
            if not header.flags & Flag.MORE:
                event = PushArrived(worker, number, step, header.priority, header.flags)
                work = self._decide(self._machine.handle(event))
        self._work(work)

    def _decide(self, instructions: Sequence[Any]) -> list[UpdateRows]:
        work: list[UpdateRows] = []
        for instruction in instructions:
            if isinstance(instruction, UpdateRows):
                work.append(instruction)
            elif isinstance(instruction, FailSession):
                self._executor.execute([instruction])
        return work

    def _work(self, work: list[UpdateRows]) -> None:
        while work:
            merged = work.pop(0)
            self._push_on(*merged)
            with self._lock:
                work += self._decide(self._machine.handle(RowsUpdated(merged.shard)))

    def _push_on(self, number: int, step: int, workers: Sequence[int]) -> None:
        """Merge what the workers have pushed, and push that."""
        with self._lock:
            if workers:
                self._settings_at(step)
            gradients = self._gradients.pop((number, step), {})
            priority, flags = self._about.pop((number, step))
        parts = [part for worker in workers for part in gradients.get(worker, ())]
        summed: Iterable[tuple[bytes, int]] = [(b"", Flag.NO_GRADIENT)]
        if workers:
            summed = self._sum(self._shards[number], parts)
        about = (SERVER, Kind.ROWS_PUSH, step, priority, number)
        for data, own_flags in summed:
            self._executor.send(*about, data, int(flags | own_flags))
        with self._lock:
            self._pushed[number] = step

    def _sum(self, shard: Shard, parts: Sequence[RowPart]) -> Iterator[tuple[bytes, int]]:
        """In parts of bounded size, each with `Flag.MORE` but the last."""
        wire_dtype = self._wire_dtypes[shard.parameter]
        total = sum_parts(parts, shard.row_elems, torch.promote_types(wire_dtype, torch.float32))
        limit = part_rows(shard.row_elems, self._part_elems)
        starts = range(0, max(1, len(total.numbers)), limit)
        for start in starts:
            some = slice(start, start + limit)
            part = RowPart(total.numbers[some], total.rows[some].to(wire_dtype))
            yield encode_part(part), Flag.MORE if start != starts[-1] else 0

    # Pulls.
    def _on_pull(self, worker: int, header: Header, payload: memoryview) -> None:
        shard, numbers = self._shards.pulled(payload)
        with self._lock:
            fetched = self._fetched_as_of(shard, header.step, anew=bool(header.flags & Flag.ANEW))
            new = numbers[fetched.index.find(numbers) < 0]
            request = self._register(shard, header.step, fetched, new) if len(new) else None
            waiting = _OpenPull(worker, header, *fetched.find(numbers))
            complete = waiting.complete  # by now; if not, who receives the last rows hands them out
            if not complete:
                fetched.waiting.append(waiting)
        if request is not None:
            data = encode_pull(shard.number, new)
            place = (header.step, header.priority, request.number)
            self._executor.send(SERVER, Kind.ROWS_PULL, *place, data)
        if complete:
            self._hand_out(waiting)

    def _fetched_as_of(self, shard: Shard, step: int, *, anew: bool) -> _Fetched:
        steps = self._fetched.setdefault(shard.number, {})
        if anew or step not in steps:
            steps[step] = _Fetched()
            for old in sorted(steps)[:-_STEPS_KEPT]:
                del steps[old]
        return steps[step]

    def _register(self, shard: Shard, step: int, fetched: _Fetched, new: torch.Tensor) -> _RowFetch:
        number = self._next_request
        self._next_request = (number + 1) % _REQUESTS
        # the values at the start come in full
        dtype = (self._wire_dtypes if step else self._dtypes)[shard.parameter]
        rows = torch.empty(len(new), shard.row_elems * dtype.itemsize, dtype=torch.uint8)
        self._requests[number] = request = _RowFetch(number, fetched, step, rows)
        fetched.add(request, new)
        return request

    def _on_reply(self, header: Header) -> None:
        with self._lock:
            request = self._requests.pop(header.slice)
            request.arrived = True
            fetched = request.fetched
            complete = [waiting for waiting in fetched.waiting if waiting.complete]
            fetched.waiting = [waiting for waiting in fetched.waiting if not waiting.complete]
        for waiting in complete:
            self._hand_out(waiting)

    def _hand_out(self, waiting: _OpenPull) -> None:
        _, _, _, step, slice_, priority, _ = waiting.header
        width = waiting.requests[0].rows.shape[1] if waiting.requests else 0
        rows = torch.empty(len(waiting.places), width, dtype=torch.uint8)
        for number, request in enumerate(waiting.requests):
            own = waiting.sources == number
            rows[own] = request.rows[waiting.places[own]]
        data = bytes(bytes_of(rows))
        self._executor.send(waiting.worker, Kind.ROWS_REPLY, step, priority, slice_, data)

    # Reports and the end.
    def rank_left(self, worker: int) -> None:
        with self._lock:
            self._decide(self._machine.handle(PeerLeft(worker)))

    def has_pushed(self, number: int, step: int) -> bool:
        """Whether the node's push of a shard of this server is with the server."""
        return number in self._shards and self._pushed.get(number, -1) >= step

    def describe_wait(self, number: int, step: int) -> str:
        return self._machine.describe_wait(number, step)

    def incomplete(self) -> list[tuple[int, int]]:
        return self._machine.incomplete()
