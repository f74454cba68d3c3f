"""A relay's shards: its workers' rows are merged into one push, and none is fetched twice.

"Local aggregation" of sparse gradients (Parallax, section 5.3.2): the rows of all workers of the
node are added up in rank order, and each touched row is pushed once.

A worker's pull becomes a request to the server for those of its rows that nobody on this node has
asked for as of the same step; with `Flag.ANEW`, for all of them. The pull is answered when all of
its rows are here. Fetched rows have *places*: one request's lie after the other's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foreprop.core.closing import AllMembers
from foreprop.core.frames import SERVER, FailSession, PeerLeft, PushArrived
from foreprop.core.manifest import Manifest
from foreprop.core.rows_machine import RowsMachine, RowsUpdated, UpdateRows
from foreprop.core.slicing import Shard, part_rows
from foreprop.core.wire import Flag, Header, Kind
from foreprop.engine.connection import Connection
from foreprop.engine.executor import Executor
from foreprop.engine.memory import bytes_of
from foreprop.engine.slices import SettingsAt
from foreprop.engine.tensors import DTYPES
from foreprop.errors import RemoteProtocolError
from foreprop.features.tables.parts import (
    REQUESTS,
    RowCodecs,
    RowPart,
    encode_part,
    encode_pull,
    kept_limit_bytes,
    sum_parts,
)
from foreprop.features.tables.rowtable import RowIndex, lazy_zeros
from foreprop.features.tables.service import ROW_KINDS, OwnShards

_STEPS_KEPT = 2  # one worker may ask for the next batch's rows, while another asks for this one's


@dataclass(slots=True, eq=False)
class _OpenPull:
    worker: int
    header: Header
    places: torch.Tensor
    awaited: set[int]  # the requests with which some of its rows still come


@dataclass(slots=True, eq=False)
class _Fetched:
    """A shard's rows as of one step, as far as this node has asked for them."""

    parameter: int
    step: int
    dtype: torch.dtype  # of the elements
    memory: torch.Tensor  # the rows' bytes as they come, by place
    index: RowIndex = field(default_factory=RowIndex)  # rows by number, to places
    asked: dict[int, range] = field(default_factory=dict)  # places, by request under way
    waiting: list[_OpenPull] = field(default_factory=list)

    def awaited(self, places: torch.Tensor) -> set[int]:
        """The requests under way with which rows of these places come."""
        return {
            request
            for request, own in self.asked.items()
            if bool(((places >= own.start) & (places < own.stop)).any())
        }


class RelayRows:
    """Receives the node's rows, and the server's, of the shards of one server.

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
        self._machine: RowsMachine[AllMembers] = RowsMachine(
            [],
            shards,
            index=server,
            workers=executor.peers.count,
            order=manifest.knobs.order,
            names=[info.name for info in manifest.parameters],
            peers=executor.peers,
            closing=AllMembers,
        )
        self.describe_wait, self.incomplete = self._machine.describe_wait, self._machine.incomplete
        uncoded = RowCodecs(manifest, inside_node=True)
        self._shards = OwnShards(manifest, shards, server, "this relay's server", uncoded)
        self._codecs = RowCodecs(manifest)  # towards the server
        self._codes: dict[int, memoryview] = {}  # rows that come as a code, by request
        self._dtypes = [DTYPES[info.dtype] for info in manifest.parameters]
        self._wire_dtypes = [DTYPES[dtype] for dtype in manifest.wire_dtypes()]
        self._part_elems = manifest.knobs.slice_elems
        # by shard and step: each worker's gradients, and the priority and flags of the push
        self._gradients: dict[tuple[int, int], dict[int, list[RowPart]]] = {}
        self._priorities: dict[tuple[int, int], tuple[int, int]] = {}
        self._pushed: dict[int, int] = {}  # the last step that was pushed on, by shard
        self._fetched: dict[int, dict[int, _Fetched]] = {}  # by shard and step
        self._requests: dict[int, _Fetched] = {}
        self._request_numbers = itertools.count()

    def __contains__(self, number: int) -> bool:
        return number in self._shards

    # Frames.
    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.kind == Kind.ROWS_REPLY:
            fetched = self._requests.get(header.slice)
            if fetched is None or fetched.step != header.step:
                raise RemoteProtocolError(
                    f"rows for request {header.slice}, step {header.step}, which is not awaited"
                )
            places = fetched.asked[header.slice]
            whole = bytes_of(fetched.memory[places.start : places.stop])
            if not self._codecs.is_code(fetched.parameter, header.payload_bytes, len(whole)):
                return whole
            self._codes[header.slice] = memoryview(bytearray(header.payload_bytes))
            return self._codes[header.slice]
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
            _, flags, _, step, slice_, priority, _ = header
            kind = Kind.ROWS_VALUE
            self._executor.send(SERVER, kind, step, priority, slice_, payload, flags)

    def kept_limit_bytes(self, number: int) -> int:
        """The longest part of a remote table; raises `RemoteProtocolError` for another shard."""
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
            if worker == 0 or key not in self._priorities:  # values have rank 0's priority, too
                self._priorities[key] = (header.priority, header.flags & Flag.VALUE_CHANGED)
            due: list[UpdateRows] = []
            if not header.flags & Flag.MORE:
                event = PushArrived(worker, number, step, header.priority, header.flags)
                due = self._execute(self._machine.handle(event))
        while due:
            update = due.pop(0)
            self._push_on(update)
            with self._lock:
                due += self._execute(self._machine.handle(RowsUpdated(update.shard)))

    def _execute(self, instructions: Sequence[Any]) -> list[UpdateRows]:
        """Fail the session if that is to be; returns the shards that are to be pushed on."""
        for instruction in instructions:
            if isinstance(instruction, FailSession):
                self._executor.execute([instruction])
        return [each for each in instructions if isinstance(each, UpdateRows)]

    def _push_on(self, update: UpdateRows) -> None:
        number, step, workers, _ = update
        with self._lock:
            if workers:
                self._settings_at(step, ())
            gradients = self._gradients.pop((number, step), {})
            priority, flags = self._priorities.pop((number, step))
        parts = [part for worker in workers for part in gradients.get(worker, ())]
        summed: Iterable[tuple[bytes, int]] = [(b"", Flag.NO_GRADIENT)]
        if workers:
            summed = self._sum(self._shards[number], parts)
        send, kind = self._executor.send, Kind.ROWS_PUSH
        for data, own_flags in summed:
            send(SERVER, kind, step, priority, number, data, int(flags | own_flags))
        with self._lock:
            self._pushed[number] = step

    def _sum(self, shard: Shard, parts: Sequence[RowPart]) -> Iterator[tuple[bytes, int]]:
        """The sum in parts of bounded size, each with `Flag.MORE` but the last."""
        wire_dtype = self._wire_dtypes[shard.parameter]
        total = sum_parts(parts, shard.row_elems, torch.promote_types(wire_dtype, torch.float32))
        limit = part_rows(shard.row_elems, self._part_elems)
        numbers, rows = torch.split(total.numbers, limit), torch.split(total.rows, limit)
        for some, own in zip(numbers, rows, strict=True):
            more = Flag.MORE if some is not numbers[-1] else 0
            narrow = own.to(wire_dtype)
            code = self._codecs.encoded(shard.parameter, narrow)
            yield encode_part(RowPart(some, narrow), code), more

    # Pulls.
    def _on_pull(self, worker: int, header: Header, payload: memoryview) -> None:
        shard, numbers = self._shards.pulled(payload)
        with self._lock:
            fetched = self._fetched_as_of(shard, header.step, anew=bool(header.flags & Flag.ANEW))
            new = numbers[fetched.index.find(numbers) < 0]
            if len(new):
                request = next(self._request_numbers) % REQUESTS
                start = fetched.index.count
                fetched.index.add(new)
                fetched.asked[request] = range(start, fetched.index.count)
                self._requests[request] = fetched
            places = fetched.index.find(numbers)
            pull = _OpenPull(worker, header, places, fetched.awaited(places))
            complete = not pull.awaited  # if not, who receives the last rows hands them out
            if not complete:
                fetched.waiting.append(pull)
        if len(new):
            data, step, priority = encode_pull(shard.number, new), header.step, header.priority
            self._executor.send(SERVER, Kind.ROWS_PULL, step, priority, request, data)
        if complete:
            self._hand_out(pull, fetched)

    def _fetched_as_of(self, shard: Shard, step: int, *, anew: bool) -> _Fetched:
        steps = self._fetched.setdefault(shard.number, {})
        if anew or step not in steps:
            # the values at the start come in full
            dtype = (self._wire_dtypes if step else self._dtypes)[shard.parameter]
            shape = (shard.rows, shard.row_elems * dtype.itemsize)
            memory = lazy_zeros(shape, torch.uint8)
            steps[step] = _Fetched(shard.parameter, step, dtype, memory)
            for old in sorted(steps)[:-_STEPS_KEPT]:
                del steps[old]
        return steps[step]

    def _on_reply(self, header: Header) -> None:
        with self._lock:
            fetched = self._requests.pop(header.slice)
            code = self._codes.pop(header.slice, None)
            if code is not None:
                own = fetched.asked[header.slice]
                rows = fetched.memory[own.start : own.stop].view(-1)
                self._codecs.decode(code, rows.view(fetched.dtype))
            del fetched.asked[header.slice]
            for pull in fetched.waiting:
                pull.awaited.discard(header.slice)
            complete = [pull for pull in fetched.waiting if not pull.awaited]
            fetched.waiting = [pull for pull in fetched.waiting if pull.awaited]
        for pull in complete:
            self._hand_out(pull, fetched)

    def _hand_out(self, pull: _OpenPull, fetched: _Fetched) -> None:
        _, _, _, step, slice_, priority, _ = pull.header
        data = bytes(bytes_of(fetched.memory.index_select(0, pull.places)))
        self._executor.send(pull.worker, Kind.ROWS_REPLY, step, priority, slice_, data)

    # Reports and the end.
    def rank_left(self, worker: int) -> None:
        with self._lock:
            self._execute(self._machine.handle(PeerLeft(worker)))

    def has_pushed(self, number: int, step: int) -> bool:
        """Whether the node's push is with the server; False for another server's shard."""
        return number in self._shards and self._pushed.get(number, -1) >= step
