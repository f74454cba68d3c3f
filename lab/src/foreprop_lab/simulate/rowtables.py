"""Tables in a simulation: touched rows are pushed to servers, and pulled a step ahead.

What `tables.exchange` and `tables.service` do with tensors is here a number of rows, which a frame
has as its token. `core.rows_machine` decides. On every worker a step touches the same share of a
table's rows, of which each server has an equal part. When a backward pass has ended, the rows of
the next batch are asked for, as `tables.lookahead` does for loaders from `shard`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from foreprop.core.closing import AllMembers
from foreprop.core.frames import MessageReady, PullArrived, PushArrived, SendFrame
from foreprop.core.rows_machine import (
    AnswerRows,
    RowsMachine,
    RowsUpdated,
    UpdateRows,
)
from foreprop.core.slicing import COUNT_BYTES, Shard, numbers_bytes, part_rows, plan_shards
from foreprop.core.wire import Flag, Kind
from foreprop.errors import InternalError
from foreprop_lab.simulate.served import Message, Processor, ServedWorker, Server, Site
from foreprop_lab.simulate.setting import SimulatedSetting

_ABOUT_ROWS = frozenset({Kind.ROWS_PUSH, Kind.ROWS_PULL, Kind.ROWS_REPLY})


class RowTable(NamedTuple):
    """An array that servers hold row by row."""

    parameter: int
    """The table's place among all arrays, in forward order."""
    rows: int
    row_elems: int
    alpha: float
    """The share of its rows that a worker touches in a step (Parallax, section 3.2)."""
    exponent: float | None = None
    """k workers touch the share alpha k^exponent together, as a text of k times the length has so
    many different words (Heaps' law). None: all rows are equally likely (`core.parallax`)."""

    def touched(self, workers: float) -> float:
        """The share of its rows that so many workers touch together."""
        if self.exponent is None:
            return 1 - math.pow(1 - self.alpha, workers)
        return min(1.0, self.alpha * math.pow(workers, self.exponent))


def tables_of(setting: SimulatedSetting) -> list[RowTable]:
    """The tables whose touched rows were counted, if the setting asks for ``rows``."""
    tables, counted = [], dict(setting.together)
    for number, array in setting.table_arrays.items():
        alpha, together = array.alpha or 0.0, counted.get(array.name)
        row_elems = -(-array.row_elems // setting.scale)
        exponent = None  # with which as many workers as a node has touch the share ``together``
        if together is not None and setting.workers_per_node > 1 and alpha:
            exponent = math.log(together / alpha) / math.log(setting.workers_per_node)
        tables.append(RowTable(number, array.rows, row_elems, alpha, exponent))
    return tables


class Tables:
    """A session's tables: which server has which rows, and how they travel."""

    def __init__(
        self,
        tables: Sequence[RowTable],
        *,
        servers: int,
        first_number: int,
        part_elems: int,
        bytes_per_elem: int,
    ) -> None:
        shapes = [(table.parameter, table.rows, table.row_elems) for table in tables]
        self.numbers = [table.parameter for table in tables]
        # nobody sends first values: training is under way when a simulation begins
        self.shards = plan_shards(
            shapes, servers=servers, first_number=first_number, remote=self.numbers
        )
        self._tables = {table.parameter: table for table in tables}
        self._first_number = first_number
        self._part_elems = part_elems
        self._bytes_per_elem = bytes_per_elem

    def shards_of(self, parameter: int) -> list[Shard]:
        return [shard for shard in self.shards if shard.parameter == parameter]

    def touched_rows(self, shard: Shard, workers: float = 1) -> int:
        return round(self._tables[shard.parameter].touched(workers) * shard.rows)

    def parts(self, shard: Shard, rows: int) -> list[int]:
        """The rows of each part; without any rows there is one part of 0."""
        size = part_rows(shard.row_elems, self._part_elems)
        return [min(size, rows - first) for first in range(0, rows, size)] or [0]

    def pushes(self, shard: Shard, rows: int) -> Iterator[tuple[int, int]]:
        """Rows and flags of the frames of one push."""
        parts = self.parts(shard, rows)
        for number, part in enumerate(parts, start=1):
            yield part, Flag.MORE if number < len(parts) else 0

    @staticmethod
    def are_in(frame: SendFrame) -> bool:
        return frame.kind in _ABOUT_ROWS

    def payload_bytes(self, frame: SendFrame) -> int:
        """The payload of a frame about rows; 0 for other frames."""
        if not self.are_in(frame):
            return 0
        rows = frame.token
        if frame.kind == Kind.ROWS_PULL:
            return COUNT_BYTES + numbers_bytes(rows)
        shard = self.shards[frame.slice - self._first_number]
        values_bytes = rows * shard.row_elems * self._bytes_per_elem
        return values_bytes + (numbers_bytes(rows) if frame.kind == Kind.ROWS_PUSH else 0)


class RowWorker(ServedWorker):
    """A worker that has tables."""

    def __init__(self, site: Site, rank: int, processor: Processor | None, tables: Tables) -> None:
        super().__init__(site, rank, processor)
        self._tables = tables
        self._awaited = dict.fromkeys(tables.numbers, 0)  # by table: parts of the next rows

    def is_complete(self, parameter: int) -> bool:
        awaited = self._awaited.get(parameter)
        return not awaited if awaited is not None else super().is_complete(parameter)

    def gradient_ready(self, parameter: int, step: int) -> None:
        if parameter not in self._awaited:
            super().gradient_ready(parameter, step)
            return
        for shard in self._tables.shards_of(parameter):
            for rows, flags in self._tables.pushes(shard, self._tables.touched_rows(shard)):
                about = (step, parameter, shard.number, rows, flags)
                self._handle(MessageReady(shard.server, Kind.ROWS_PUSH, *about))

    def end_step(self, step: int) -> bool:
        """Ask for the rows of the next batch."""
        for parameter in self._tables.numbers:
            shards = self._tables.shards_of(parameter)
            rows = [(s, self._tables.parts(s, self._tables.touched_rows(s))) for s in shards]
            self._awaited[parameter] = sum(bool(n) for _, parts in rows for n in parts)
            for shard, parts in rows:
                for part in filter(None, parts):
                    about = (step, parameter, shard.number, part)
                    self._handle(MessageReady(shard.server, Kind.ROWS_PULL, *about))
        return super().end_step(step)

    def _on_frame(self, message: Message) -> None:
        frame = message[1]
        if frame.kind != Kind.ROWS_REPLY:
            super()._on_frame(message)
            return
        self._awaited[frame.priority] -= 1  # which is the table's number
        if not self._awaited[frame.priority]:
            self.look()


class RowServer(Server):
    """A server that has a shard of each table; shards are updated at the same time as slices."""

    def __init__(self, site: Site, index: int, processor: Processor | None, tables: Tables) -> None:
        super().__init__(site, index, processor)
        self._tables = tables
        self._shards = {shard.number: shard for shard in tables.shards if shard.server == index}
        self._rows: RowsMachine[AllMembers] = RowsMachine(
            [],
            tables.shards,
            index=index,
            workers=site.agreement.workers,
            order=site.agreement.order,
            names=[f"parameter {number}" for number in range(site.agreement.parameters)],
            closing=AllMembers,
        )
        self._pushed_rows: dict[int, int] = {}  # by shard, of all pushes of the step

    def _on_frame(self, message: Message) -> None:
        rank, (_, kind, step, shard, priority, flags, rows) = message
        if kind == Kind.ROWS_PUSH:
            self._pushed_rows[shard] = self._pushed_rows.get(shard, 0) + rows
            if not flags & Flag.MORE:
                self._decide(self._rows.handle(PushArrived(rank, shard, step, priority, flags)))
        elif kind == Kind.ROWS_PULL:
            self._decide(self._rows.handle(PullArrived(rank, shard, step, priority, rows)))
        else:
            super()._on_frame(message)

    def _decide(self, instructions: Sequence[Any]) -> None:
        for instruction in instructions:
            if type(instruction) is UpdateRows:
                elems = self._pushed_rows.pop(instruction.shard)
                elems *= self._shards[instruction.shard].row_elems
                at_s = self._clock.now_s + self._hosts.updating_s(elems, 1)
                self._clock.at(at_s, self._updated, instruction.shard)
            elif type(instruction) is AnswerRows:
                rank, shard, step, rows, priority, _ = instruction
                about = (step, priority, shard, rows)
                self._handle(MessageReady(rank, Kind.ROWS_REPLY, *about))
            else:
                raise InternalError(f"a simulated server of rows cannot do {instruction!r}")

    def _updated(self, shard: int) -> None:
        self._decide(self._rows.handle(RowsUpdated(shard)))
