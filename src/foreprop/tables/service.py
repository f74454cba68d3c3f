"""A server's shell around `RowsMachine` and `RowStore`: what its receiving threads do with rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from foreprop.core.barrier import StepBarrier
from foreprop.core.frames import (
    InstallValue,
    NormArrived,
    PeerLeft,
    PullArrived,
    PushArrived,
    ValueArrived,
)
from foreprop.core.manifest import Manifest
from foreprop.core.rows_machine import (
    AnswerRows,
    RowsMachine,
    RowsSummed,
    RowsUpdated,
    SumRows,
    UpdateRows,
)
from foreprop.core.shards import Shard
from foreprop.core.wire import Flag, Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import Connection, bounded, exactly
from foreprop.numerics.finite import check_finite
from foreprop.path.executor import Executor
from foreprop.path.optimizer import scale_of
from foreprop.path.slices import SettingsAt
from foreprop.path.tensors import DTYPES
from foreprop.tables.parts import (
    KEPT_PULL_BYTES,
    RowPart,
    decode_part,
    decode_pull,
    part_limit_bytes,
    pulled_shard,
)
from foreprop.tables.store import RowStore

if TYPE_CHECKING:
    from foreprop.tables.rowcodecs import RowCodecs

ROW_KINDS = frozenset({Kind.ROWS_VALUE, Kind.ROWS_PUSH, Kind.ROWS_PULL})


class OwnShards:
    """One server's shards, as frames about rows speak of them; ``whose`` they are in messages."""

    def __init__(
        self,
        manifest: Manifest,
        shards: Sequence[Shard],
        server: int,
        whose: str,
        codecs: RowCodecs | None = None,
    ) -> None:
        self._by_number = {shard.number: shard for shard in shards if shard.server == server}
        self._infos = manifest.parameters
        self._wire_dtypes = manifest.wire_dtypes()
        self._checks_finite = manifest.knobs.aggregation.reports_nonfinite
        self._whose = whose
        self._codecs = codecs
        """Of pushed rows."""

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def __getitem__(self, number: int) -> Shard:
        """Raises `RemoteProtocolError` for another one's."""
        shard = self._by_number.get(number)
        if shard is None:
            raise RemoteProtocolError(f"shard {number} does not belong to {self._whose}")
        return shard

    def room(self, header: Header) -> memoryview:
        """For the payload of one of `ROW_KINDS`."""
        shards = [self[header.slice]] if header.kind != Kind.ROWS_PULL else self._by_number.values()
        limits = (part_limit_bytes(each, self._dtype_of(each).itemsize) for each in shards)
        return bounded(header, max(limits, default=0))  # a pull has its shard in the payload

    def _dtype_of(self, shard: Shard) -> torch.dtype:
        return DTYPES[self._infos[shard.parameter].dtype]

    def dtype_at(self, shard: Shard, step: int) -> torch.dtype:
        """What rows are answered in: the values at the start come in full."""
        return DTYPES[self._wire_dtypes[shard.parameter]] if step else self._dtype_of(shard)

    def values(self, header: Header, payload: memoryview) -> RowPart:
        """Rank 0's; raises `RemoteProtocolError`."""
        shard = self[header.slice]
        return decode_part(payload, shard, self._dtype_of(shard))

    def gradient(self, header: Header, payload: memoryview, whose: str) -> RowPart:
        """A part of a push; raises `RemoteProtocolError`, or what `check_finite` does."""
        shard = self[header.slice]
        dtype = DTYPES[self._wire_dtypes[shard.parameter]]
        part = decode_part(payload, shard, dtype, self._codecs)
        if self._checks_finite:
            check_finite(part.rows, whose, self._infos[shard.parameter].name, header.step)
        return part

    def pulled(self, payload: memoryview) -> tuple[Shard, torch.Tensor]:
        """Which rows a pull is about; raises `RemoteProtocolError`."""
        shard = self[pulled_shard(payload)]
        return shard, decode_pull(payload, shard)


class RowServer:
    """Owns rows and tables on one server: its shards.

    ``barrier`` is the server's, if there is one.
    """

    kinds = ROW_KINDS | {Kind.TABLE, Kind.TABLE_PULL}

    def __init__(
        self,
        manifest: Manifest,
        shards: Sequence[Shard],
        executor: Executor,
        settings_at: SettingsAt,
        barrier: StepBarrier | None = None,
    ) -> None:
        self._codecs: RowCodecs | None = None
        if manifest.knobs.compression:
            from foreprop.tables.rowcodecs import RowCodecs

            self._codecs = RowCodecs(manifest)
        about = (manifest, shards, executor.host.index, "this server")
        self._shards = OwnShards(*about, self._codecs)
        self._peers = executor.peers
        self._machine = RowsMachine(
            shards,
            index=executor.host.index,
            peers=self._peers,
            names=[info.name for info in manifest.parameters],
            barrier=barrier,
        )
        self._coefficient = 1.0
        """For the gradients of the step whose updates are under way."""
        self.store = RowStore(manifest, shards, executor.host.index)
        self._wanted: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        """By rank and request: shard and row numbers of the pulls that are not answered yet."""
        self._executor = executor
        self._settings_at = settings_at
        self._lock = executor.lock

    # Frames.
    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.kind == Kind.TABLE:
            return bounded(header, self.store.kept_limit_bytes(header.slice))
        if header.kind == Kind.TABLE_PULL:
            return exactly(header, KEPT_PULL_BYTES)
        return self._shards.room(header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.TABLE:
            self._on_table(peer, header, payload)
        elif header.kind == Kind.TABLE_PULL:
            with self._lock:
                data = self.store.export_kept(header.slice, payload)
            self._executor.answer(peer.number, Kind.TABLE_REPLY, header, data)
        else:
            self._on_rows(peer.number, header, payload)
            if header.kind == Kind.ROWS_PUSH:
                peer.last_push = (header.slice, header.step)

    def _on_table(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if peer.rank != 0:
            raise RemoteProtocolError(f"rank {peer.rank} sent a table's rows; only rank 0 may")
        with self._lock:
            anew = bool(header.flags & Flag.ANEW)
            self.store.import_kept(header.slice, payload, anew=anew)

    def _on_rows(self, rank: int, header: Header, payload: memoryview) -> None:
        number, step = header.slice, header.step
        with self._lock:
            instructions: Sequence[Any] = ()
            if header.kind == Kind.ROWS_PULL:
                instructions = self._on_pull(rank, header, payload)
            elif header.kind == Kind.ROWS_PUSH:
                if len(payload):
                    part = self._shards.gradient(header, payload, self._peers.name(rank))
                    self.store.put_gradient(number, rank, step, part)
                if not header.flags & Flag.MORE:
                    event = PushArrived(rank, number, step, header.priority, header.flags)
                    instructions = self._machine.handle(event)
            else:
                self.store.put_value(number, self._shards.values(header, payload))
                if not header.flags & Flag.MORE:
                    valued = ValueArrived(rank, number, step, header.priority)
                    instructions = self._machine.handle(valued)
            work = self._decide(instructions)
        self._work(work)

    def _on_pull(self, rank: int, header: Header, payload: memoryview) -> Sequence[Any]:
        shard, numbers = self._shards.pulled(payload)
        self._wanted[rank, header.slice] = (shard.number, numbers)
        pull = PullArrived(rank, shard.number, header.step, header.priority, header.slice)
        return self._machine.handle(pull)

    def rank_left(self, rank: int) -> None:
        with self._lock:
            self._decide(self._machine.handle(PeerLeft(rank)))

    def use_norm(self, step: int, coefficient: float, skip: bool) -> None:
        """The norm of this step is known: make its updates."""
        with self._lock:
            self._coefficient = coefficient
            work = self._decide(self._machine.handle(NormArrived(0, step, skip)))
        self._work(work)

    def _decide(self, instructions: Sequence[Any]) -> list[UpdateRows | SumRows]:
        """Do what must be done under the lock; returns the sums and updates, which need not be."""
        work: list[UpdateRows | SumRows] = []
        for instruction in instructions:
            if isinstance(instruction, (UpdateRows, SumRows)):
                work.append(instruction)
            elif isinstance(instruction, AnswerRows):
                self._answer(instruction)
            elif isinstance(instruction, InstallValue):
                self.store.install_values(instruction.slice)
            else:  # the barrier's, or the end of the session
                self._executor.execute([instruction])
        return work

    def _answer(self, answer: AnswerRows) -> None:
        peer, _, step, request, priority = answer
        shard, numbers = self._wanted.pop((peer, request))
        rows: bytes | memoryview = self.store.rows(shard, numbers, step)
        if self._codecs is not None and len(rows):
            dtype = self._shards.dtype_at(self._shards[shard], step)
            flat = torch.frombuffer(bytearray(rows), dtype=dtype)
            rows = self._codecs.encoded(self._shards[shard].parameter, flat)
        self._executor.send(peer, Kind.ROWS_REPLY, step, priority, request, rows)

    def _work(self, work: list[UpdateRows | SumRows]) -> None:
        while work:
            instruction = work.pop(0)
            sums = isinstance(instruction, SumRows)
            event = self._sum(*instruction) if sums else self._update(*instruction)
            with self._lock:
                work += self._decide(self._machine.handle(event))

    def _sum(self, shard: int, step: int, ranks: Sequence[int]) -> RowsSummed:
        with self._lock:
            scale = scale_of(self._settings_at(step))
            gradients = self.store.take_gradients(shard, step, ranks)
        return RowsSummed(shard, self.store.aggregate(shard, gradients, scale))

    def _update(self, shard: int, step: int, ranks: Sequence[int]) -> RowsUpdated:
        with self._lock:
            groups = self._settings_at(step) if ranks else ()
            gradients = self.store.take_gradients(shard, step, ranks)
            coefficient = self._coefficient
        self.store.update(shard, gradients, groups, coefficient)
        return RowsUpdated(shard)

    # What it waits for.
    def __contains__(self, number: int) -> bool:
        return number in self._shards

    def describe_wait(self, shard: int, step: int) -> str:
        return self._machine.describe_wait(shard, step)

    def incomplete(self) -> list[tuple[int, int]]:
        return self._machine.incomplete()
