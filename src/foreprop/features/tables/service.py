"""A server's shell around `RowStore`: what its receiving threads do with rows.

A machine (`core.rows_machine`) decides, under the lock. Answers and values that count at once are
handled there, too; sums and updates run outside the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from foreprop.core.frames import InstallValue, PullArrived, PushArrived, ValueArrived
from foreprop.core.manifest import Manifest
from foreprop.core.rows_machine import AnswerRows, RowsSummed, RowsUpdated, SumRows, UpdateRows
from foreprop.core.slicing import Shard
from foreprop.core.wire import Flag, Header, Kind
from foreprop.engine.connection import Connection, bounded, exactly
from foreprop.engine.executor import Executor
from foreprop.engine.optimizer import scale_of
from foreprop.engine.slices import SettingsAt, Updates
from foreprop.engine.tensors import DTYPES
from foreprop.errors import RemoteProtocolError
from foreprop.features.tables.parts import (
    KEPT_PULL_BYTES,
    RowCodecs,
    RowPart,
    decode_part,
    decode_pull,
    part_limit_bytes,
    pulled_shard,
)
from foreprop.features.tables.store import RowStore
from foreprop.params.finite import check_finite

ROW_KINDS = frozenset({Kind.ROWS_VALUE, Kind.ROWS_PUSH, Kind.ROWS_PULL})


class OwnShards:
    """One server's shards, by number, with what frames about their rows may carry.

    Other shards, and other payloads, raise `RemoteProtocolError`. ``codecs`` are those of pushed
    rows; ``whose`` the shards are in messages.
    """

    def __init__(
        self,
        manifest: Manifest,
        shards: Sequence[Shard],
        server: int,
        whose: str,
        codecs: RowCodecs,
    ) -> None:
        self._by_number = {shard.number: shard for shard in shards if shard.server == server}
        self._infos = manifest.parameters
        self._wire_dtypes = manifest.wire_dtypes()
        self._checks_finite = manifest.knobs.aggregation.reports_nonfinite
        self._whose = whose
        self._codecs = codecs

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def __getitem__(self, number: int) -> Shard:
        shard = self._by_number.get(number)
        if shard is None:
            raise RemoteProtocolError(f"shard {number} does not belong to {self._whose}")
        return shard

    def room(self, header: Header) -> memoryview:
        shards = [self[header.slice]] if header.kind != Kind.ROWS_PULL else self._by_number.values()
        limits = (part_limit_bytes(each, self._dtype_of(each).itemsize) for each in shards)
        return bounded(header, max(limits, default=0))  # a pull has its shard in the payload

    def _dtype_of(self, shard: Shard) -> torch.dtype:
        return DTYPES[self._infos[shard.parameter].dtype]

    def dtype_at(self, shard: Shard, step: int) -> torch.dtype:
        """The type in which rows are answered: the values at the start come in full."""
        return DTYPES[self._wire_dtypes[shard.parameter]] if step else self._dtype_of(shard)

    def values(self, header: Header, payload: memoryview) -> RowPart:
        shard = self[header.slice]
        return decode_part(payload, shard, self._dtype_of(shard))

    def gradient(self, header: Header, payload: memoryview, whose: str) -> RowPart:
        shard = self[header.slice]
        dtype = DTYPES[self._wire_dtypes[shard.parameter]]
        part = decode_part(payload, shard, dtype, self._codecs)
        if self._checks_finite:
            check_finite(part.rows, whose, self._infos[shard.parameter].name, header.step)
        return part

    def pulled(self, payload: memoryview) -> tuple[Shard, torch.Tensor]:
        """The shard and the rows that a pull is about."""
        shard = self[pulled_shard(payload)]
        return shard, decode_pull(payload, shard)


class RowServer:
    """Receives the rows of one server's shards, and updates them.

    ``updates`` has the norm's coefficient. ``counted`` is called, with the lock held, with the
    ranks that an update counts.
    """

    kinds = ROW_KINDS | {Kind.TABLE, Kind.TABLE_PULL}

    def __init__(
        self,
        manifest: Manifest,
        shards: Sequence[Shard],
        executor: Executor,
        updates: Updates,
        settings_at: SettingsAt,
        counted: Callable[[int, int, Sequence[int]], None] | None = None,
    ) -> None:
        index = executor.host.index
        self._codecs = RowCodecs(manifest)
        self._shards = OwnShards(manifest, shards, index, "this server", self._codecs)
        self._peers = executor.peers
        self._updates = updates
        self.store = RowStore(manifest, shards, index)
        # the row numbers of pulls that are not answered yet, by rank and request
        self._wanted: dict[tuple[int, int], torch.Tensor] = {}
        self._executor = executor
        self._settings_at = settings_at
        self._counted = counted
        self._lock = executor.lock
        executor.doers |= {UpdateRows: self._update, SumRows: self._sum, AnswerRows: self._answer}

    def __contains__(self, number: int) -> bool:
        return number in self._shards

    # Frames.
    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.kind == Kind.TABLE:
            return bounded(header, self.store.kept_limit_bytes(header.slice))
        if header.kind == Kind.TABLE_PULL:
            return exactly(header, KEPT_PULL_BYTES)
        return self._shards.room(header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.TABLE:
            if peer.rank != 0:
                raise RemoteProtocolError(f"rank {peer.rank} sent a table's rows; only rank 0 may")
            with self._lock:
                anew = bool(header.flags & Flag.ANEW)
                self.store.import_kept(header.slice, payload, anew=anew)
        elif header.kind == Kind.TABLE_PULL:
            with self._lock:
                data = self.store.export_kept(header.slice, payload)
            self._executor.answer(peer.number, Kind.TABLE_REPLY, header, data)
        else:
            self._on_rows(peer.number, header, payload)
            if header.kind == Kind.ROWS_PUSH:
                peer.last_push = (header.slice, header.step)

    def _on_rows(self, rank: int, header: Header, payload: memoryview) -> None:
        number, step = header.slice, header.step
        with self._lock:
            work: Sequence[Any] = ()
            if header.kind == Kind.ROWS_PULL:
                shard, numbers = self._shards.pulled(payload)
                self._wanted[rank, number] = numbers
                work = self._handle(PullArrived(rank, shard.number, step, header.priority, number))
            elif header.kind == Kind.ROWS_PUSH:
                if len(payload):
                    part = self._shards.gradient(header, payload, self._peers.name(rank))
                    self.store.put_gradient(number, rank, step, part)
                if not header.flags & Flag.MORE:
                    event = PushArrived(rank, number, step, header.priority, header.flags)
                    work = self._handle(event)
            else:
                self.store.put_value(number, self._shards.values(header, payload))
                if not header.flags & Flag.MORE:
                    work = self._handle(ValueArrived(rank, number, step, header.priority))
        self._executor.execute(work)

    def _handle(self, event: object) -> list[object]:
        """Have the machine decide; returns what need not be done under the lock."""
        rest: list[object] = []
        for instruction in self._executor.handle(event):
            if isinstance(instruction, AnswerRows):
                self._answer(instruction)
            elif isinstance(instruction, InstallValue):
                self.store.install_values(instruction.slice)
            else:
                rest.append(instruction)
        return rest

    def _answer(self, answer: AnswerRows) -> None:
        peer, number, step, request, priority, flags = answer
        with self._lock:
            numbers = self._wanted.pop((peer, request))
            rows: bytes | memoryview = self.store.rows(number, numbers, step)
        shard = self._shards[number]
        if shard.parameter in self._codecs and len(rows):
            flat = torch.frombuffer(bytearray(rows), dtype=self._shards.dtype_at(shard, step))
            rows = self._codecs.encoded(shard.parameter, flat)
        self._executor.send(peer, Kind.ROWS_REPLY, step, priority, request, rows, flags)

    def _sum(self, due: SumRows) -> Sequence[object]:
        number, step, ranks, counted = due
        with self._lock:
            scale = scale_of(self._settings_at(step, ranks))
            gradients = self.store.take_gradients(number, step, ranks)
        part = self.store.aggregate(number, gradients, scale, counted)
        with self._lock:
            return self._handle(RowsSummed(number, part))

    def _update(self, due: UpdateRows) -> Sequence[object]:
        number, step, ranks, counted = due
        with self._lock:
            if self._counted is not None:
                self._counted(number, step, counted or ())
            groups = self._settings_at(step, ranks) if ranks else ()
            gradients = self.store.take_gradients(number, step, ranks)
            coefficient = self._updates.coefficient
        self.store.update(number, gradients, groups, coefficient, counted=counted)
        with self._lock:
            return self._handle(RowsUpdated(number))
