"""Workers and servers: the core's machines, joined by simulated connections.

What `engine.worker` and `engine.server` do with threads, sockets and tensors is here a time after
which the machine is told that it has happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foreprop.core.barrier import NormCombiner, StepBarrier, TellNormPart
from foreprop.core.manifest import Reply
from foreprop.core.norm import ZERO
from foreprop.core.sendqueue import Order
from foreprop.core.server import (
    AnswerReady,
    NormArrived,
    PullArrived,
    PushArrived,
    ServerMachine,
    SliceSummed,
    SumSlice,
    UpdateFinished,
    UpdateSlice,
)
from foreprop.core.slicing import Slice
from foreprop.core.window import PushWindow, may_hold_back
from foreprop.core.wire import HEADER_BYTES, Flag, Kind
from foreprop.core.worker import (
    CONTROL_PRIORITY,
    NO_TOKEN,
    CompleteParameter,
    FrameSent,
    GradientReady,
    MessageReady,
    NotifyArrived,
    PullsDue,
    ReplyArrived,
    SendFrame,
    WorkerMachine,
)
from foreprop.errors import InternalError
from foreprop.simulate.clock import Clock
from foreprop.simulate.connection import Connection, Loopback
from foreprop.simulate.hosts import Hosts

Message = tuple[int, SendFrame]
"""A frame, with the number of who has sent it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all workers and servers of a session agree on."""

    slices: Sequence[Slice]
    parameters: int
    order: Order
    reply: Reply
    workers: int
    """Who push to a server: workers, or with local aggregation nodes."""
    servers: int
    push_window_bytes: int
    """See `foreprop.Config`."""
    bytes_per_elem: int
    """On the wire."""
    needs_norm: bool
    """Updates wait for the norm of all gradients (`core.barrier`)."""

    def window(self) -> PushWindow | None:
        """A worker's, as `engine.worker` makes it."""
        if not may_hold_back(self.order, self.reply, needs_norm=self.needs_norm):
            return None
        sizes_bytes = [piece.elems * self.bytes_per_elem for piece in self.slices]
        return PushWindow(sizes_bytes, self.push_window_bytes, servers=self.servers)

    def frame_bytes(self, frame: SendFrame) -> int:
        """With its header; the payload is a slice or nothing."""
        is_empty = frame.flags & (Flag.NO_GRADIENT | Flag.UNCHANGED)
        if is_empty or frame.kind not in (Kind.PUSH, Kind.REPLY):
            return HEADER_BYTES
        return HEADER_BYTES + self.slices[frame.slice].elems * self.bytes_per_elem


class Outlet:
    """Sends a process's frames; ``sent`` is called with the peer when the next one may follow."""

    def __init__(
        self, clock: Clock, agreement: Agreement, send_s: float, sent: Callable[[int], None]
    ) -> None:
        self.connections: dict[int, Connection | Loopback] = {}
        """By the peer's number."""
        self._clock = clock
        self._agreement = agreement
        self._send_s = send_s
        self._sent = sent

    def send(self, sender: int, frame: SendFrame) -> None:
        size_bytes = self._agreement.frame_bytes(frame)
        self.connections[frame.peer].send((sender, frame), size_bytes)

    def taken(self, peer: int) -> None:
        """By the kernel."""
        self._clock.at(self._clock.now_s + self._send_s, self._sent, peer)


class ServedWorker:
    """A worker; see `device.Synchronisation`."""

    def __init__(self, clock: Clock, agreement: Agreement, hosts: Hosts, rank: int) -> None:
        self.look: Callable[[], None] = _no_device
        self.proceed: Callable[[], None] = _no_device
        self.outlet = Outlet(clock, agreement, hosts.send_s, self._after_sent)
        self._clock = clock
        self._hosts = hosts
        self._pulls = agreement.reply == "pull"
        self._rank = rank
        self._machine = WorkerMachine(
            agreement.slices,
            parameters=agreement.parameters,
            order=agreement.order,
            reply=agreement.reply,
            window=agreement.window(),
        )
        self._owners = {piece.server for piece in agreement.slices}
        self._norms = NormCombiner(self._owners)

    # For the device.
    def is_complete(self, parameter: int) -> bool:
        return self._machine.is_complete(parameter)

    def needed(self, parameter: int) -> None:
        """What is pushed is answered, whether it is needed or not."""

    def waited(self, seconds: float) -> None:
        """Of no consequence."""

    def start_step(self) -> None:
        if self._pulls:
            self._do(self._machine.handle(PullsDue()))

    def gradient_ready(self, parameter: int, step: int) -> None:
        self._do(self._machine.handle(GradientReady(parameter, step)))

    def end_step(self, step: int) -> bool:
        """Nobody has to be asked."""
        del step
        return True

    # For the connections.
    def receive(self, message: Message) -> None:
        self._clock.at(self._clock.now_s + self._hosts.receive_s, self._on_frame, message)

    def _on_frame(self, message: Message) -> None:
        server, frame = message
        if frame.kind == Kind.NORM_PART:
            self._on_norm_part(server, frame.step)
            return
        event: Any = ReplyArrived(frame.slice, frame.step, server)
        if frame.kind == Kind.NOTIFY:
            event = NotifyArrived(frame.slice, frame.step, server, frame.flags)
        self._do(self._machine.handle(event))

    def _on_norm_part(self, server: int, step: int) -> None:
        """Rank 0: the last part makes the norm, which all servers are told."""
        if self._norms.add(server, step, ZERO) is not None:
            for owner in sorted(self._owners):
                told = MessageReady(owner, Kind.NORM, step, CONTROL_PRIORITY, 0, NO_TOKEN)
                self._do(self._machine.handle(told))

    def _after_sent(self, server: int) -> None:
        self._do(self._machine.handle(FrameSent(server)))

    def _do(self, instructions: Sequence[Any]) -> None:
        completed = False
        for instruction in instructions:
            if type(instruction) is SendFrame:
                self.outlet.send(self._rank, instruction)
            elif type(instruction) is CompleteParameter:
                completed = True
        if completed:
            self.look()


class Server:
    """A server, whose updates take time, one after the other."""

    def __init__(self, clock: Clock, agreement: Agreement, hosts: Hosts, index: int) -> None:
        self.outlet = Outlet(clock, agreement, hosts.send_s, self._after_sent)
        self._clock = clock
        self._agreement = agreement
        self._hosts = hosts
        self._index = index
        owned = sum(piece.server == index for piece in agreement.slices)
        self._machine = ServerMachine(
            agreement.slices,
            index=index,
            workers=agreement.workers,
            order=agreement.order,
            reply=agreement.reply,
            names=[f"parameter {number}" for number in range(agreement.parameters)],
            barrier=StepBarrier(owned) if agreement.needs_norm else None,
        )

    # For the connections.
    def receive(self, message: Message) -> None:
        self._clock.at(self._clock.now_s + self._hosts.receive_s, self._on_frame, message)

    def _on_frame(self, message: Message) -> None:
        rank, (_, kind, step, slice_, priority, flags, _) = message
        event: Any = PullArrived(rank, slice_, step, priority)
        if kind == Kind.PUSH:
            event = PushArrived(rank, slice_, step, priority, flags)
        elif kind == Kind.NORM:
            event = NormArrived(rank, step)
        self._do(self._machine.handle(event))

    def _after_sent(self, rank: int) -> None:
        self._do(self._machine.handle(FrameSent(rank)))

    def _summed(self, _: None) -> None:
        self._do(self._machine.handle(SliceSummed(ZERO)))

    def _updated(self, _: None) -> None:
        self._do(self._machine.handle(UpdateFinished()))

    def _do(self, instructions: Sequence[Any]) -> None:
        for instruction in instructions:
            if type(instruction) is SendFrame:
                self.outlet.send(self._index, instruction)
            elif type(instruction) is UpdateSlice:
                pushes = 0 if self._agreement.needs_norm else self._agreement.workers
                takes_s = self._hosts.updating_s(self._elems(instruction.slice), pushes)
                self._clock.at(self._clock.now_s + takes_s, self._updated)
            elif type(instruction) is SumSlice:
                elems = self._elems(instruction.slice)
                takes_s = self._hosts.measuring_s(elems, self._agreement.workers)
                self._clock.at(self._clock.now_s + takes_s, self._summed)
            elif type(instruction) is TellNormPart:
                told = (Kind.NORM_PART, instruction.step, CONTROL_PRIORITY, 0, NO_TOKEN)
                self._do(self._machine.handle(AnswerReady(0, *told)))
            else:
                raise InternalError(f"a simulated server cannot do {instruction!r}")

    def _elems(self, slice_: int) -> int:
        return self._agreement.slices[slice_].elems


def _no_device() -> None:
    """Until there is one."""
