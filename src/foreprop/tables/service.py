"""A server's shell around `RowsMachine` and `RowStore`: what its receiving threads do with rows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from foreprop.core.barrier import StepBarrier
from foreprop.core.frames import (
    FailSession,
    InstallValue,
    NormArrived,
    PeerLeft,
    PullArrived,
    PushArrived,
    SendNormPart,
    ValueArrived,
)
from foreprop.core.manifest import Hyperparameters, Manifest
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
from foreprop.numerics.finite import check_finite
from foreprop.path.hyperparameters import scale_of
from foreprop.tables.parts import decode_pull, pulled_shard
from foreprop.tables.store import RowStore

ROW_KINDS = frozenset({Kind.ROWS_VALUE, Kind.ROWS_PUSH, Kind.ROWS_PULL})


class RowHost(Protocol):
    """What rows need of their server."""

    def answer_rows(self, answer: AnswerRows, data: bytes) -> None:
        """Queue a frame with the rows."""

    def fail_rows(self, failure: FailSession) -> None: ...
    def send_norm_part(self, told: SendNormPart) -> None:
        """Queue a frame to rank 0."""

    def settings_at(self, step: int) -> tuple[Hyperparameters, ...]:
        """The optimizer's, as all ranks agree. Called with the server's lock held."""


class RowServer:
    """The shards of one server. ``lock`` is the server's, ``barrier`` too, if there is one."""

    def __init__(
        self,
        manifest: Manifest,
        shards: Sequence[Shard],
        index: int,
        host: RowHost,
        lock: threading.RLock,
        barrier: StepBarrier | None = None,
    ) -> None:
        self._manifest = manifest
        names = [info.name for info in manifest.parameters]
        peers = manifest.peers()
        self._machine = RowsMachine(
            shards,
            index=index,
            workers=peers.count,
            names=names,
            barrier=barrier,
            peers=peers,
        )
        self._coefficient = 1.0
        """For the gradients of the step whose updates are under way."""
        self.store = RowStore(manifest, shards, index)
        self._wanted: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        """By rank and request: shard and row numbers of the pulls that are not answered yet."""
        self._host = host
        self._lock = lock

    def limit_bytes(self, header: Header) -> int:
        """The longest payload that this frame may have; raises `RemoteProtocolError`."""
        if header.kind == Kind.ROWS_PULL:  # the shard is in the payload
            return max(map(self.store.part_limit_bytes, self.store.numbers()), default=0)
        self._check_owned(header.slice)
        return self.store.part_limit_bytes(header.slice)

    def _check_owned(self, shard: int) -> None:
        if shard not in self.store:
            raise RemoteProtocolError(f"shard {shard} does not belong to this server")

    def on_frame(self, rank: int, header: Header, payload: memoryview) -> None:
        """A frame of one of `ROW_KINDS`."""
        number, step = header.slice, header.step
        with self._lock:
            instructions: Sequence[Any] = ()
            if header.kind == Kind.ROWS_PULL:
                instructions = self._on_pull(rank, header, payload)
            elif header.kind == Kind.ROWS_PUSH:
                if len(payload):
                    rows = self.store.put_gradient(number, rank, step, payload)
                    self._check_finite(rank, number, step, rows)
                if not header.flags & Flag.MORE:
                    event = PushArrived(rank, number, step, header.priority, header.flags)
                    instructions = self._machine.handle(event)
            else:
                self.store.put_value(number, payload)
                if not header.flags & Flag.MORE:
                    instructions = self._machine.handle(
                        ValueArrived(rank, number, step, header.priority)
                    )
            work = self._decide(instructions)
        self._work(work)

    def _check_finite(self, rank: int, number: int, step: int, rows: torch.Tensor) -> None:
        name = self._manifest.parameters[self.store.shard(number).parameter].name
        aggregation, whose = self._manifest.knobs.aggregation, self._manifest.peers().name(rank)
        check_finite(rows, aggregation, whose=whose, name=name, step=step)

    def _on_pull(self, rank: int, header: Header, payload: memoryview) -> Sequence[Any]:
        number = pulled_shard(payload)
        self._check_owned(number)
        numbers = decode_pull(payload, self.store.shard(number))
        self._wanted[rank, header.slice] = (number, numbers)
        pull = PullArrived(rank, number, header.step, header.priority, header.slice)
        return self._machine.handle(pull)

    def rank_left(self, rank: int) -> None:
        with self._lock:
            self._decide(self._machine.handle(PeerLeft(rank)))

    def use_norm(self, step: int, coefficient: float, *, skip: bool) -> None:
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
            elif isinstance(instruction, SendNormPart):
                self._host.send_norm_part(instruction)
            elif isinstance(instruction, AnswerRows):
                shard, numbers = self._wanted.pop((instruction.rank, instruction.request))
                rows = self.store.rows(shard, numbers, instruction.step)
                self._host.answer_rows(instruction, rows)
            elif isinstance(instruction, InstallValue):
                self.store.install_values(instruction.slice)
            else:
                self._host.fail_rows(instruction)
        return work

    def _work(self, work: list[UpdateRows | SumRows]) -> None:
        while work:
            instruction = work.pop(0)
            sums = isinstance(instruction, SumRows)
            event = self._sum(*instruction) if sums else self._update(*instruction)
            with self._lock:
                work += self._decide(self._machine.handle(event))

    def _sum(self, shard: int, step: int, ranks: Sequence[int]) -> RowsSummed:
        with self._lock:
            scale = scale_of(self._host.settings_at(step))
            gradients = self.store.take_gradients(shard, step, ranks)
        return RowsSummed(shard, self.store.aggregate(shard, gradients, scale))

    def _update(self, shard: int, step: int, ranks: Sequence[int]) -> RowsUpdated:
        with self._lock:
            groups = self._host.settings_at(step) if ranks else ()
            gradients = self.store.take_gradients(shard, step, ranks)
            coefficient = self._coefficient
        self.store.update(shard, gradients, groups, coefficient)
        return RowsUpdated(shard)

    # Optimizer state and reports.
    def export_state(self, shard: int) -> bytes:
        self._check_owned(shard)
        return self.store.export_state(shard)

    def describe_wait(self, shard: int, step: int) -> str:
        return self._machine.describe_wait(shard, step)

    def incomplete(self) -> list[tuple[int, int]]:
        return self._machine.incomplete()
