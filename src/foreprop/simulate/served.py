"""Workers and servers: the core's machines, joined by simulated connections.

What `path.worker` and `path.server` do with threads, sockets and tensors is here a time after
which the machine is told that it has happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from foreprop.core.barrier import NormCombiner, StepBarrier
from foreprop.core.collect import SliceSummed, SliceUpdated, SumSlice, UpdateSlice
from foreprop.core.frames import (
    CONTROL_PRIORITY,
    NO_TOKEN,
    CompleteParameter,
    FrameSent,
    GradientReady,
    MessageReady,
    NormArrived,
    NotifyArrived,
    PullArrived,
    PullsDue,
    PushArrived,
    ReplyArrived,
    SendFrame,
    SendNormPart,
)
from foreprop.core.norm import ZERO
from foreprop.core.pushwindow import PushWindow, may_hold_back
from foreprop.core.sendqueue import ONE_LANE, LaneRule, Order, Reply, Turns, runs_ahead
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.staleness import Staleness, rule_of
from foreprop.core.wire import HEADER_BYTES, Flag, Kind
from foreprop.core.worker_machine import WorkerMachine
from foreprop.simulate.connection import Clock, Connection, Loopback
from foreprop.simulate.counted import CountedUpdates, LateAnswers, counting_machine
from foreprop.simulate.device import no_device
from foreprop.simulate.processor import Processor
from foreprop.workload.hosts import Hosts

if TYPE_CHECKING:
    from foreprop.core.codecfacts import Coded
    from foreprop.simulate.coder import Coder
    from foreprop.simulate.rowtables import Tables

Message = tuple[int, SendFrame]
"""A frame, with the number of who has sent it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all workers and servers of a session agree on."""

    slices: Sequence[Slice]
    parameters: int
    order: Order
    reply: Reply
    members: Sequence[int]
    """Of each crowd of who push to a server: workers, or with local aggregation nodes. A crowd's
    one push is in when all its members' are."""
    servers: int
    push_window_bytes: int
    """See `foreprop.Config`."""
    bytes_per_elem: int
    """On the wire."""
    lanes: LaneRule
    at_once: int
    """To so many peers frames are under way (`core.sendqueue.Turns`)."""
    needs_norm: bool
    """Updates wait for the norm of all gradients (`core.barrier`)."""
    staleness: Staleness = 0
    """How many steps a worker may be ahead (`core.staleness`)."""
    backup_workers: int = 0
    """How many workers a slice is closed without (`core.firstmembers`)."""
    coded: Sequence[Coded] | None = None
    """By slice, what its codec makes of it; None: no codec, elements as they are."""
    tables: Tables | None = None
    """What is held row by row; those arrays have no slices."""

    @property
    def workers(self) -> int:
        """Who push to a server, all together."""
        return sum(self.members)

    @property
    def busy_servers(self) -> list[int]:
        """Those that have slices, or shards of tables."""
        if self.tables is not None:
            return list(range(self.servers))
        return sorted({piece.server for piece in self.slices})

    def turns(self, own: int, peers: int) -> Turns:
        """Of a process that is number ``own`` among its equals."""
        return ONE_LANE if self.lanes == "one" else Turns.after(own, peers, self.at_once)

    def window(self) -> PushWindow | None:
        """A worker's, as `path.worker` makes it."""
        if self.lanes == "one" or self.staleness or runs_ahead(self.order, self.servers):
            return None
        if not may_hold_back(self.order, self.reply, needs_norm=self.needs_norm):
            return None
        sizes_bytes = [piece.elems * self.bytes_per_elem for piece in self.slices]
        if self.coded is not None:
            codes_bytes = [each.push_bytes for each in self.coded]
            sizes_bytes = list(map(min, sizes_bytes, codes_bytes))
        return PushWindow(sizes_bytes, self.push_window_bytes, servers=self.servers)

    def frame_bytes(self, frame: SendFrame) -> int:
        """With its header; the payload is a slice, rows, state or nothing."""
        is_empty = frame.flags & (Flag.NO_GRADIENT | Flag.UNCHANGED)
        if is_empty or frame.kind not in (Kind.PUSH, Kind.REPLY):
            rows_bytes = 0 if self.tables is None else self.tables.payload_bytes(frame)
            return HEADER_BYTES + rows_bytes
        if self.coded is not None:
            coded = self.coded[frame.slice]
            is_push = frame.kind == Kind.PUSH
            return HEADER_BYTES + (coded.push_bytes if is_push else coded.reply_bytes)
        return HEADER_BYTES + self.slices[frame.slice].elems * self.bytes_per_elem

    def has_rows(self, frame: SendFrame) -> bool:
        """Or their numbers."""
        return self.tables is not None and self.tables.are_in(frame)

    def copies(self, crowd: int, frame: SendFrame) -> int:
        """From or to how many of a crowd it goes; about the norm servers talk to rank 0 only."""
        return 1 if frame.kind in (Kind.NORM, Kind.NORM_PART) else self.members[crowd]


class Site(NamedTuple):
    """What all processes of a session share."""

    clock: Clock
    hosts: Hosts
    agreement: Agreement


class Exchange:
    """A process's frames: those that it sends, and those that it notices one after the other.

    ``handle`` is called with `FrameSent` when the next frame to a peer may follow. ``crowds``: a
    peer is one of a crowd, each of which is sent what it is, and has sent what it has.
    """

    def __init__(
        self,
        site: Site,
        processor: Processor | None,
        handle: Callable[[Any], None],
        *,
        crowds: bool = False,
    ) -> None:
        self.connections: dict[int, Connection | Loopback] = {}
        """By the peer's number."""
        self._clock, self._hosts, self._agreement = site
        self._processor = processor
        self._handle = handle
        self._crowds = crowds
        self._coder = _coder(site.agreement, shared=crowds)

    def send(self, sender: int, frame: SendFrame) -> None:
        if self._coder is not None:
            encoded_s = self._coder.encoded_s(frame, self._clock.now_s)
            if encoded_s > self._clock.now_s:
                self._clock.at(encoded_s, self._encoded, (sender, frame))
                return
        self._pass_on(sender, frame)

    def _encoded(self, message: Message) -> None:
        self._pass_on(*message)

    def _pass_on(self, sender: int, frame: SendFrame) -> None:
        if self._processor is None:
            self._hand_over((sender, frame))
            return
        copies = self._agreement.copies(frame.peer, frame) if self._crowds else 1
        size_bytes, of_rows = self._agreement.frame_bytes(frame), self._agreement.has_rows(frame)
        leaves_s = self._processor.leaves_s(copies, size_bytes, of_rows=of_rows)
        self._clock.at(leaves_s, self._hand_over, (sender, frame))

    def _hand_over(self, message: Message) -> None:
        frame = message[1]
        self.connections[frame.peer].send(message, self._agreement.frame_bytes(frame))

    def taken(self, peer: int) -> None:
        """By the kernel."""
        self._clock.at(self._clock.now_s + self._hosts.send_s, self._handle, FrameSent(peer))

    def take(self, message: Message, noticed: Callable[[Message], None]) -> None:
        """``noticed`` is called with it when the process has got there."""
        at_s = self._clock.now_s + self._hosts.receive_s
        sender, frame = message
        copies = self._agreement.copies(sender, frame) if self._crowds else 1
        if self._processor is not None:
            size_bytes = self._agreement.frame_bytes(frame)
            of_rows = self._agreement.has_rows(frame)
            at_s = max(at_s, self._processor.received_s(copies, size_bytes, of_rows=of_rows))
        if self._coder is not None:
            at_s = self._coder.decoded_s(*message, at_s, copies)
        self._clock.at(at_s, noticed, message)


def _coder(agreement: Agreement, *, shared: bool) -> Coder | None:
    if agreement.coded is None:
        return None
    from foreprop.simulate.coder import Coder

    return Coder(agreement.coded, shared=shared)


class ServedWorker:
    """A worker; see `device.Synchronisation`."""

    def __init__(self, site: Site, rank: int, processor: Processor | None) -> None:
        agreement = site.agreement
        self.look: Callable[[], None] = no_device
        self.proceed: Callable[[], None] = no_device
        self.exchange = Exchange(site, processor, self._handle)
        self._pulls = agreement.reply == "pull"
        self._rank = rank
        self._machine = WorkerMachine(
            agreement.slices,
            parameters=agreement.parameters,
            order=agreement.order,
            reply=agreement.reply,
            window=agreement.window(),
            turns=agreement.turns(rank, agreement.servers),
        )
        self._late = LateAnswers() if agreement.backup_workers else None
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
            self._handle(PullsDue())

    def gradient_ready(self, parameter: int, step: int) -> None:
        flags = 0 if self._late is None else self._late.flags_of(step)
        self._handle(GradientReady(parameter, step, flags))

    def end_step(self, step: int) -> bool:
        """Nobody has to be asked."""
        del step
        return True

    # For the connections.
    def receive(self, message: Message) -> None:
        self.exchange.take(message, self._on_frame)

    def _on_frame(self, message: Message) -> None:
        server, frame = message
        if frame.kind == Kind.NORM_PART:
            self._on_norm_part(server, frame.step)
            return
        if self._late is not None:
            self._late.note(frame)
        event: Any = ReplyArrived(frame.slice, frame.step, server)
        if frame.kind == Kind.NOTIFY:
            event = NotifyArrived(frame.slice, frame.step, server, frame.flags)
        self._handle(event)

    def _on_norm_part(self, server: int, step: int) -> None:
        """Rank 0: the last part makes the norm, which all servers are told."""
        if self._norms.add(server, step, ZERO) is not None:
            for owner in sorted(self._owners):
                told = MessageReady(owner, Kind.NORM, step, CONTROL_PRIORITY, 0, NO_TOKEN)
                self._handle(told)

    def _handle(self, event: Any) -> None:
        completed = False
        for instruction in self._machine.handle(event):
            if type(instruction) is SendFrame:
                self.exchange.send(self._rank, instruction)
            elif type(instruction) is CompleteParameter:
                completed = True
        if completed:
            self.look()


class Server:
    """A server, whose updates take time, one after the other."""

    def __init__(self, site: Site, index: int, processor: Processor | None) -> None:
        self.exchange = Exchange(site, processor, self._handle, crowds=True)
        agreement = site.agreement
        self._clock, self._hosts, self._agreement = site
        self._index = index
        self._workers = agreement.workers
        self._machine = _server_machine(agreement, index)
        self._counted = CountedUpdates(self._handle)

    # For the connections.
    def receive(self, message: Message) -> None:
        self.exchange.take(message, self._on_frame)

    def _on_frame(self, message: Message) -> None:
        rank, (_, kind, step, slice_, priority, flags, _) = message
        event: Any = PullArrived(rank, slice_, step, priority)
        if kind == Kind.PUSH:
            event = PushArrived(rank, slice_, step, priority, flags)
        elif kind == Kind.NORM:
            event = NormArrived(rank, step)
        self._handle(event)

    def _handle(self, event: Any) -> None:
        for instruction in self._machine.handle(event):
            if type(instruction) is SendFrame:
                self.exchange.send(self._index, instruction)
            elif type(instruction) is UpdateSlice:
                self._update(instruction)
            elif type(instruction) is SumSlice:
                elems = self._elems(instruction.slice)
                takes_s = self._hosts.measuring_s(elems, self._workers)
                self._clock.at(self._clock.now_s + takes_s, self._handle, SliceSummed(ZERO))
            elif type(instruction) is SendNormPart:
                told = (Kind.NORM_PART, instruction.step, CONTROL_PRIORITY, 0, NO_TOKEN)
                self._handle(MessageReady(0, *told))
            else:
                self._counted.do(instruction)

    def _update(self, update: UpdateSlice) -> None:
        pushes = self._pushes_in(update)
        takes_s = self._hosts.updating_s(self._elems(update.slice), pushes)
        self._clock.at(self._clock.now_s + takes_s, self._slice_updated, update)

    def _slice_updated(self, update: UpdateSlice) -> None:
        self._counted.done[update.slice] = update.step
        self._handle(SliceUpdated())

    def _pushes_in(self, update: UpdateSlice) -> int:
        """That it has to sum: none, if that was done before."""
        if self._agreement.staleness or self._agreement.backup_workers:
            return len(update.ranks)
        return 0 if self._agreement.needs_norm else self._workers

    def _elems(self, slice_: int) -> int:
        return self._agreement.slices[slice_].elems


def _server_machine(agreement: Agreement, index: int) -> ServerMachine[Any]:
    if agreement.backup_workers:
        return counting_machine(agreement, index)
    workers = len(agreement.members)
    names = [f"parameter {number}" for number in range(agreement.parameters)]
    owned = sum(piece.server == index for piece in agreement.slices)
    return ServerMachine(
        agreement.slices,
        index=index,
        workers=workers,
        order=agreement.order,
        reply=agreement.reply,
        names=names,
        barrier=StepBarrier(owned) if agreement.needs_norm else None,
        turns=agreement.turns(index, workers),
        closing=rule_of(agreement.staleness),
    )
