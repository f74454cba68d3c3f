"""Workers and servers: the core's machines, joined by simulated connections.

What `engine.worker` and `engine.server` do with threads, sockets and tensors is here a time after
which the machine is told that it has happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from foreprop.core.barrier import NormCombiner, StepBarrier, Tellers
from foreprop.core.collect import (
    AnswerSlice,
    DropPush,
    SliceSummed,
    SliceUpdated,
    SumSlice,
    UpdateSlice,
)
from foreprop.core.firstmembers import FirstMembers
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
)
from foreprop.core.membership import Members
from foreprop.core.norm import ZERO, SendNormPart
from foreprop.core.pushwindow import PushWindow, may_hold_back
from foreprop.core.sendqueue import ONE_LANE, LaneRule, Order, Reply, Turns, runs_ahead
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.staleness import Staleness, rule_of
from foreprop.core.wire import HEADER_BYTES, Flag, Kind
from foreprop.core.worker_machine import WorkerMachine
from foreprop.errors import ConfigError, InternalError
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.setting.links import wire_bytes
from foreprop_lab.simulate.connection import Clock, Connection, Loopback
from foreprop_lab.simulate.device import Synchronisation

if TYPE_CHECKING:
    from foreprop.core.codecfacts import Coded
    from foreprop_lab.simulate.coder import Coder
    from foreprop_lab.simulate.rowtables import Tables


@dataclass(slots=True, kw_only=True)
class Processor:
    """The processor of one process: its frames take turns, whichever thread they are for.

    A frame takes ``frame_s``, and ``byte_s`` for every byte, or ``row_byte_s`` for bytes of rows.
    """

    clock: Clock
    link_byte_s: float
    frame_s: float
    byte_s: float = 0.0
    row_byte_s: float | None = None
    _busy_until_s: float = 0.0

    def received_s(self, copies: int, size_bytes: int, *, of_rows: bool = False) -> float:
        """When it is done with the last of so many frames that came in one after the other."""
        begins_s = self.clock.now_s - self._passing_s(copies, size_bytes)
        return self._take(begins_s, copies, size_bytes, of_rows)

    def leaves_s(self, copies: int, size_bytes: int, *, of_rows: bool = False) -> float:
        """When to send the first of so many frames, so that the last leaves when it is done."""
        ends_s = self._take(self.clock.now_s, copies, size_bytes, of_rows)
        return max(self.clock.now_s, ends_s - self._passing_s(copies, size_bytes))

    def _take(self, begins_s: float, copies: int, size_bytes: int, of_rows: bool) -> float:
        byte_s = self.byte_s
        if of_rows and self.row_byte_s is not None:
            byte_s = self.row_byte_s
        takes_s = copies * (self.frame_s + size_bytes * byte_s)
        self._busy_until_s = max(self._busy_until_s, begins_s) + takes_s
        return self._busy_until_s

    def _passing_s(self, copies: int, size_bytes: int) -> float:
        return (copies - 1) * wire_bytes(size_bytes) * self.link_byte_s


Message = tuple[int, SendFrame]
"""The number of a sender, and its frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all workers and servers of a session agree on."""

    slices: Sequence[Slice]
    parameters: int
    order: Order
    reply: Reply
    members: Sequence[int]
    """The members of each crowd that pushes to a server: workers, or with local aggregation
    nodes. A crowd's one push is in when all its members' are."""
    servers: int
    push_window_bytes: int
    """See `foreprop.Config`."""
    bytes_per_elem: int
    """How many bytes an element has on the wire."""
    lanes: LaneRule
    at_once: int
    """To how many peers frames are under way at once (`core.sendqueue.Turns`)."""
    needs_norm: bool
    """Whether updates wait for the norm of all gradients (`core.barrier`)."""
    staleness: Staleness = 0
    """How many steps a worker may be ahead (`core.staleness`)."""
    backup_workers: int = 0
    """How many workers a slice is closed without (`core.firstmembers`)."""
    coded: Sequence[Coded] | None = None
    """What its codec makes of each slice; None for elements as they are."""
    tables: Tables | None = None
    """The arrays that are held row by row; they have no slices."""

    @property
    def workers(self) -> int:
        """How many push to a server, all together."""
        return sum(self.members)

    @property
    def busy_servers(self) -> list[int]:
        """The servers that have slices, or shards of tables."""
        if self.tables is not None:
            return list(range(self.servers))
        return sorted({piece.server for piece in self.slices})

    def turns(self, own: int, peers: int) -> Turns:
        """The turns of a process that is number ``own`` among its equals."""
        return ONE_LANE if self.lanes == "one" else Turns.after(own, peers, self.at_once)

    def window(self) -> PushWindow | None:
        """A worker's push window, as `engine.worker` makes it."""
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
        """A frame's size with the header; the payload is a slice, rows or nothing."""
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
        return self.tables is not None and self.tables.are_in(frame)

    def copies(self, crowd: int, frame: SendFrame) -> int:
        """How many of a crowd send or get a frame; about the norm servers talk to rank 0 only."""
        return 1 if frame.kind in (Kind.NORM, Kind.NORM_PART) else self.members[crowd]


class Site(NamedTuple):
    """What all processes of a session share."""

    clock: Clock
    hosts: Hosts
    agreement: Agreement


class Exchange:
    """The frames that a process sends, and those that it receives, one after the other.

    ``handle`` is called with `FrameSent` when the next frame to a peer may follow. With ``crowds``
    a peer stands for its crowd: each member sends what it sends, and is sent what it is sent.
    """

    def __init__(
        self,
        site: Site,
        processor: Processor | None,
        handle: Callable[[Any], None],
        *,
        crowds: bool = False,
    ) -> None:
        self.connections: dict[int, Connection | Loopback] = {}  # by the peer's number
        self._clock, self._hosts, self._agreement = site
        self._processor = processor
        self._handle = handle
        self._crowds = crowds
        self._coder = _coder(site.agreement, shared=crowds)

    def send(self, sender: int, frame: SendFrame) -> None:
        if self._coder is not None:
            encoded_s = self._coder.encoded_s(frame, self._clock.now_s)
            if encoded_s > self._clock.now_s:
                self._clock.at(encoded_s, self._pass_on, (sender, frame))
                return
        self._pass_on((sender, frame))

    def _pass_on(self, message: Message) -> None:
        if self._processor is None:
            self._hand_over(message)
            return
        frame = message[1]
        copies = self._agreement.copies(frame.peer, frame) if self._crowds else 1
        size_bytes, of_rows = self._agreement.frame_bytes(frame), self._agreement.has_rows(frame)
        leaves_s = self._processor.leaves_s(copies, size_bytes, of_rows=of_rows)
        self._clock.at(leaves_s, self._hand_over, message)

    def _hand_over(self, message: Message) -> None:
        frame = message[1]
        self.connections[frame.peer].send(message, self._agreement.frame_bytes(frame))

    def taken(self, peer: int) -> None:
        """Note that the kernel has taken a frame to this peer."""
        self._clock.at(self._clock.now_s + self._hosts.send_s, self._handle, FrameSent(peer))

    def take(self, message: Message, noticed: Callable[[Message], None]) -> None:
        """Call ``noticed`` with a frame that has arrived, when the process is done with it."""
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
    from foreprop_lab.simulate.coder import Coder

    return Coder(agreement.coded, shared=shared)


class ServedWorker(Synchronisation):
    def __init__(self, site: Site, rank: int, processor: Processor | None) -> None:
        agreement = site.agreement
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
        self._newer_than = 0
        """The last step of values that came too late to count (`members.departure`)."""
        self._owners = {piece.server for piece in agreement.slices}
        self._norms = NormCombiner(self._owners, from_all=agreement.backup_workers > 0)

    def is_complete(self, parameter: int) -> bool:
        return self._machine.is_complete(parameter)

    def start_step(self) -> None:
        if self._pulls:
            self._handle(PullsDue())

    def gradient_ready(self, parameter: int, step: int) -> None:
        flags = int(Flag.LATE) if step == self._newer_than + 1 > 1 else 0
        self._handle(GradientReady(parameter, step, flags))

    def receive(self, message: Message) -> None:
        self.exchange.take(message, self._on_frame)

    def _on_frame(self, message: Message) -> None:
        server, frame = message
        if frame.kind == Kind.NORM_PART:
            # the last part completes the norm, which goes to all servers
            if self._norms.add(server, frame.step, ZERO) is not None:
                for owner in sorted(self._owners):
                    norm = MessageReady(owner, Kind.NORM, frame.step, CONTROL_PRIORITY, 0, NO_TOKEN)
                    self._handle(norm)
            return
        if frame.flags & Flag.LATE:
            self._newer_than = max(self._newer_than, frame.step)
        event: Any = ReplyArrived(frame.slice, frame.step, server)
        if frame.kind == Kind.NOTIFY:
            event = NotifyArrived(frame.slice, frame.step, server, frame.flags)
        self._handle(event)

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
        self._done: dict[int, int] = {}
        """The last step of each slice's values."""

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
                backups = self._agreement.backup_workers
                pushes = len(instruction.ranks) if backups else self._workers
                takes_s = self._hosts.measuring_s(elems, pushes)
                self._clock.at(self._clock.now_s + takes_s, self._handle, SliceSummed(ZERO))
            elif type(instruction) is SendNormPart:
                part = (Kind.NORM_PART, instruction.step, CONTROL_PRIORITY, 0, NO_TOKEN)
                for rank in range(self._workers if self._agreement.backup_workers else 1):
                    self._handle(MessageReady(rank, *part))
            elif type(instruction) is AnswerSlice:
                slice_, step, priority, ranks, flags, _ = instruction
                if 0 < step < self._done.get(slice_, 0):
                    flags |= Flag.LATE
                for rank in ranks:
                    about = (step, priority, slice_, NO_TOKEN, flags)
                    self._handle(MessageReady(rank, Kind.REPLY, *about))
            elif type(instruction) is not DropPush:  # that takes no time
                raise InternalError(f"a simulated server cannot do {instruction!r}")

    def _update(self, update: UpdateSlice) -> None:
        some = self._agreement.staleness or self._agreement.backup_workers
        pushes = len(update.ranks) if some else self._workers
        if self._agreement.needs_norm:  # summed before
            pushes = 0
        takes_s = self._hosts.updating_s(self._elems(update.slice), pushes)
        self._clock.at(self._clock.now_s + takes_s, self._slice_updated, update)

    def _slice_updated(self, update: UpdateSlice) -> None:
        self._done[update.slice] = update.step
        self._handle(SliceUpdated())

    def _elems(self, slice_: int) -> int:
        return self._agreement.slices[slice_].elems


def _server_machine(agreement: Agreement, index: int) -> ServerMachine[Any]:
    workers = len(agreement.members)
    closing: Callable[..., Any] = rule_of(agreement.staleness)
    if agreement.backup_workers:
        if agreement.workers > workers:
            raise ConfigError(
                f"backup_workers is {agreement.backup_workers}, but a node stands for several: ask"
                " for symmetric=False (--every-node)"
            )
        closing = partial(FirstMembers, members=Members(workers, backups=agreement.backup_workers))
    barrier, owned = None, sum(piece.server == index for piece in agreement.slices)
    if agreement.needs_norm:
        told_by: Tellers = "any" if agreement.backup_workers else "rank 0"
        barrier = StepBarrier(owned, told_by=told_by)
    return ServerMachine(
        agreement.slices,
        index=index,
        workers=workers,
        order=agreement.order,
        reply=agreement.reply,
        names=[f"parameter {number}" for number in range(agreement.parameters)],
        barrier=barrier,
        turns=agreement.turns(index, workers),
        closing=closing,
    )
