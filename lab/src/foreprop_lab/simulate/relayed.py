"""Local aggregation: between a node's workers and each server a relay, the core's machine.

What a relay (`nodes.relay`) does with threads and tensors is here a time, as in `simulate.served`.
Of a table a relay pushes and fetches each row once. Row numbers are here only counted: the rows
that k workers of a node ask for are as many as k workers touch together. A worker's rows are there
when all that have been asked for until then are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from foreprop.core.closing import AllMembers
from foreprop.core.collect import SliceUpdated, UpdateSlice
from foreprop.core.frames import (
    CONTROL_PRIORITY,
    NO_TOKEN,
    SERVER,
    MessageReady,
    NotifyArrived,
    Peers,
    PullArrived,
    PushArrived,
    ReplyArrived,
    SendFrame,
)
from foreprop.core.relay_machine import relay_machine
from foreprop.core.rows_machine import RowsMachine, RowsUpdated, UpdateRows
from foreprop.core.wire import Flag, Kind
from foreprop.errors import InternalError
from foreprop_lab.simulate.rowtables import Tables
from foreprop_lab.simulate.served import Exchange, Message, Processor, Site


class Relay:
    """The relay between a node's ``workers`` and one server; its sums take turns.

    All relays of a node are in one process, which has the ``processor``.
    """

    def __init__(
        self, site: Site, *, node: int, server: int, workers: Peers, processor: Processor | None
    ) -> None:
        self.exchange = Exchange(site, processor, self._handle)
        agreement = site.agreement
        self._clock, self._hosts, self._agreement = site
        self._node = node
        self._server = server
        self._workers = workers
        self._machine = relay_machine(
            agreement.slices,
            server=server,
            peers=workers,
            order=agreement.order,
            reply=agreement.reply,
            names=[f"parameter {number}" for number in range(agreement.parameters)],
        )

    def receive(self, message: Message) -> None:
        self.exchange.take(message, self._on_frame)

    def receive_answer(self, message: Message) -> None:
        self.exchange.take(message, self._on_answer)

    def _on_frame(self, message: Message) -> None:
        rank, (_, kind, step, slice_, priority, flags, _) = message
        worker = self._workers.number_of(rank)
        event: Any = PullArrived(worker, slice_, step, priority)
        if kind == Kind.PUSH:
            event = PushArrived(worker, slice_, step, priority, flags)
        elif kind == Kind.NORM:
            event = MessageReady(SERVER, Kind.NORM, step, CONTROL_PRIORITY, 0, NO_TOKEN)
        self._handle(event)

    def _on_answer(self, message: Message) -> None:
        _, (_, kind, step, slice_, priority, flags, _) = message
        event: Any = ReplyArrived(slice_, step, SERVER, priority, flags)
        if kind == Kind.NOTIFY:
            event = NotifyArrived(slice_, step, SERVER, flags)
        elif kind == Kind.NORM_PART:
            event = MessageReady(0, Kind.NORM_PART, step, CONTROL_PRIORITY, 0, NO_TOKEN)
        self._handle(event)

    def _handle(self, event: Any) -> None:
        for instruction in self._machine.handle(event):
            if type(instruction) is SendFrame:
                sender = self._node if instruction.peer == SERVER else self._server
                self.exchange.send(sender, instruction)
            elif type(instruction) is UpdateSlice:
                elems = self._agreement.slices[instruction.slice].elems
                takes_s = self._hosts.summing_s(elems, self._workers.count)
                self._clock.at(self._clock.now_s + takes_s, self._handle, SliceUpdated())
            else:
                raise InternalError(f"a simulated relay cannot do {instruction!r}")


@dataclass(slots=True)
class _Fetched:
    """How far the rows of a shard are in one step."""

    pulled_rows: int = 0
    """The rows that all workers pulled, some of them several times."""
    asked_rows: int = 0
    """The rows that the server was asked for, each once."""
    requests: int = 0
    answers: int = 0
    waiting: list[tuple[int, SendFrame]] = field(default_factory=list)
    """Pulls, with the number of answers that they wait for."""


class RowRelay(Relay):
    """A relay whose server has shards beside its slices."""

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
        self._rows: RowsMachine[AllMembers] = RowsMachine(
            [],
            tables.shards,
            index=server,
            workers=workers.count,
            order=site.agreement.order,
            names=[f"parameter {number}" for number in range(site.agreement.parameters)],
            peers=workers,
            closing=AllMembers,
        )
        self._priorities: dict[int, int] = {}  # by shard
        self._fetched: dict[tuple[int, int], _Fetched] = {}  # by shard and step

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
        """Ask the server for those of the rows that nobody has asked for in this step."""
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
