"""Local aggregation of tables: a node's relay pushes and fetches each row once.

What `relays.rows` does with row numbers is here their number: the rows that k workers of a node ask
for are as many as k workers touch together. A worker's are there when all that have been asked for
until then are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from foreprop.core.frames import SERVER, MessageReady, Peers, PushArrived, SendFrame
from foreprop.core.rows_machine import RowsMachine, RowsUpdated, UpdateRows
from foreprop.core.wire import Flag, Kind
from foreprop.errors import InternalError
from foreprop.simulate.processor import Processor
from foreprop.simulate.relayed import Relay
from foreprop.simulate.rowtables import Tables
from foreprop.simulate.served import Message, Site


@dataclass(slots=True)
class _Fetched:
    """Of a shard, as of one step."""

    pulled_rows: int = 0
    """By all workers, some of them several times."""
    asked_rows: int = 0
    """Of the server: each once."""
    requests: int = 0
    answers: int = 0
    waiting: list[tuple[int, SendFrame]] = field(default_factory=list)
    """Pulls, with the number of answers that they wait for."""


class RowRelay(Relay):
    """Of one node and one server, whose shards it has beside its slices."""

    def __init__(
        self,
        site: Site,
        *,
        node: int,
        server: int,
        workers: Peers,
        processor: Processor | None,
        tables: Tables,
    ) -> None:
        super().__init__(site, node=node, server=server, workers=workers, processor=processor)
        self._tables = tables
        self._shards = {shard.number: shard for shard in tables.shards if shard.server == server}
        names = [f"parameter {number}" for number in range(site.agreement.parameters)]
        self._rows = RowsMachine(tables.shards, index=server, peers=workers, names=names)
        self._priorities: dict[int, int] = {}  # by shard
        self._fetched: dict[tuple[int, int], _Fetched] = {}  # by shard and step

    # From a worker.
    def _on_frame(self, message: Message) -> None:
        rank, frame = message
        worker = self._workers.number_of(rank)
        if frame.kind == Kind.ROWS_PUSH:
            self._priorities[frame.slice] = frame.priority
            if not frame.flags & Flag.MORE:
                about = (frame.slice, frame.step, frame.priority, frame.flags)
                self._decide(self._rows.handle(PushArrived(worker, *about)))
        elif frame.kind == Kind.ROWS_PULL:
            self._on_pull(frame._replace(peer=worker))
        else:
            super()._on_frame(message)

    def _decide(self, instructions: Any) -> None:
        for instruction in instructions:
            if type(instruction) is not UpdateRows:
                raise InternalError(f"a simulated relay of rows cannot do {instruction!r}")
            shard = self._shards[instruction.shard]
            elems = self._tables.touched_rows(shard) * shard.row_elems
            takes_s = self._hosts.summing_s(elems, self._workers.count)
            self._clock.at(self._clock.now_s + takes_s, self._push_on, instruction)

    def _push_on(self, merged: UpdateRows) -> None:
        shard = self._shards[merged.shard]
        touched = self._tables.touched_rows(shard, self._workers.count)
        priority = self._priorities[merged.shard]
        for rows, flags in self._tables.pushes(shard, touched):
            about = (merged.step, priority, merged.shard, rows, flags)
            self._handle(MessageReady(SERVER, Kind.ROWS_PUSH, *about))
        self._decide(self._rows.handle(RowsUpdated(merged.shard)))

    def _on_pull(self, pull: SendFrame) -> None:
        """Ask for those of its rows that nobody has asked for as of this step."""
        shard, key = self._shards[pull.slice], (pull.slice, pull.step)
        self._fetched.pop((pull.slice, pull.step - 2), None)  # another one may still want the last
        fetched = self._fetched.setdefault(key, _Fetched())
        fetched.pulled_rows += pull.token
        workers = fetched.pulled_rows / max(1, self._tables.touched_rows(shard))
        new = self._tables.touched_rows(shard, workers) - fetched.asked_rows
        if new > 0:
            fetched.asked_rows += new
            fetched.requests += 1
            about = (pull.step, pull.priority, pull.slice, new)
            self._handle(MessageReady(SERVER, Kind.ROWS_PULL, *about))
        if fetched.answers == fetched.requests:
            self._hand_out(pull)
        else:
            fetched.waiting.append((fetched.requests, pull))

    # From the server.
    def _on_answer(self, message: Message) -> None:
        frame = message[1]
        if frame.kind != Kind.ROWS_REPLY:
            super()._on_answer(message)
            return
        fetched = self._fetched[frame.slice, frame.step]
        fetched.answers += 1
        due = [pull for answers, pull in fetched.waiting if answers <= fetched.answers]
        fetched.waiting = [each for each in fetched.waiting if each[0] > fetched.answers]
        for pull in due:
            self._hand_out(pull)

    def _hand_out(self, pull: SendFrame) -> None:
        about = (pull.step, pull.priority, pull.slice, pull.token)
        self._handle(MessageReady(pull.peer, Kind.ROWS_REPLY, *about))
