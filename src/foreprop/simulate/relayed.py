"""Local aggregation: between a node's workers and each server a relay, the core's machine.

What a relay (`relays.relay`) does with threads and tensors is here a time, as in `simulate.served`.
"""

from __future__ import annotations

from typing import Any

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
from foreprop.core.wire import Kind
from foreprop.errors import InternalError
from foreprop.simulate.processor import Processor
from foreprop.simulate.served import Exchange, Message, Site


class Relay:
    """Of one node and one server; ``workers`` are the node's. Its sums take turns.

    ``processor``: of the process that all relays of a node are in.
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

    # For the connections.
    def receive(self, message: Message) -> None:
        """From a worker."""
        self.exchange.take(message, self._on_frame)

    def receive_answer(self, message: Message) -> None:
        """From the server."""
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
