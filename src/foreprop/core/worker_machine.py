"""The worker's side of the protocol as a state machine (P3Worker, P3 section 4.2).

Theory of operation. A parameter whose gradient is ready is cut into its slices, which enter the
send queue with the parameter's priority. At most one frame per server is in the hands of the
shell: after `FrameSent` the most urgent frame of *that* moment follows, so a decision is never
older than one frame. With more than few servers, a `core.pushwindow.PushWindow` keeps the worker
from running ahead of the others. A parameter is complete when all its slices have been answered,
and that is what its next use waits for.

Where servers may be lost (``outlives``), a slice has another owner after a loss (`core.takeover`).
The machine keeps each slice's unanswered push, as a frame, and sends it again where it was lost.

Rules: a slice is awaited from the moment its push is handed to the link; a reply for a slice that
is not awaited, or for another step, is the server's protocol error. Shutdown is a state: once
`Closing`, `Finish` comes as soon as the queue is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from foreprop.core.frames import (
    NO_TOKEN,
    RESTS,
    CameAfter,
    Closing,
    CompleteParameter,
    Finish,
    FrameSent,
    GradientReady,
    MessageReady,
    NotifyArrived,
    PrioritiesLearned,
    PullsDue,
    ReplyArrived,
    Round,
    SendFrame,
    SlicesGoOn,
    SlicesLost,
    ValuesAwaited,
    ValuesOffered,
)
from foreprop.core.pushwindow import PushWindow
from foreprop.core.sendqueue import USUAL_TURNS, Order, Reply, SendLanes, Turns
from foreprop.core.slicing import Packs, Slice
from foreprop.core.wire import ROUND_SHIFT, Flag, Kind
from foreprop.errors import InternalError, LocalProtocolError, RemoteProtocolError

WorkerInstruction = SendFrame | CompleteParameter | Finish

_NOT_AWAITED = -1
_UNCOUNTED = Flag.NO_GRADIENT | Flag.MEASURE
"""The flags of pushes that a window does not count: they take no room, or are answered only when
all have left."""


def _round_of(push: SendFrame) -> Round:
    return push.step, push.flags >> ROUND_SHIFT


def _may_leave(window: PushWindow, frame: SendFrame, is_short: bool) -> bool:
    server, kind, step, slice_, priority, flags, _ = frame
    if kind != Kind.PUSH or flags & Flag.MEASURE:
        return True
    return window.admits(server, step, priority, slice_, is_short=is_short)


class WorkerMachine:
    """Decides what a worker sends next and when a parameter is complete. Not thread-safe.

    A ``window`` needs the order "priority" and the reply "broadcast" (`core.pushwindow`). Servers
    take ``turns``. Each of the ``packs`` is as urgent as its most urgent parameter.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        *,
        parameters: int,
        order: Order,
        reply: Reply,
        window: PushWindow | None = None,
        turns: Turns = USUAL_TURNS,
        packs: Packs = (),
        outlives: bool = False,
    ) -> None:
        if window is not None and (order, reply) != ("priority", "broadcast"):
            raise InternalError(f"a push window with order={order!r}, reply={reply!r}")
        self._slices = slices
        self._window = window
        self._slices_of: list[list[Slice]] = [[] for _ in range(parameters)]
        for piece in slices:
            self._slices_of[piece.parameter].append(piece)
        self._packs = packs
        self._priority = list(range(parameters))
        self._urgency = list(self._priority)
        may_leave = partial(_may_leave, window) if window is not None else None
        self._lanes: SendLanes[SendFrame] = SendLanes(order, may_leave, turns=turns)
        self._reply = reply
        self._closing = False
        self.most_queued = 0  # the most frames that have ever waited after an event
        self._owner = [piece.server for piece in slices]
        self._outlives = outlives
        self._open: dict[int, SendFrame] = {}  # by slice, its unanswered push, if it may be lost
        self._claimed: set[int] = set()  # slices that may not be pushed yet to their owner
        self._answered_round = [(0, 0)] * len(slices if outlives else ())
        self._unchanged: set[int] = set()
        self._came_after = 0  # a newcomer: the step before its first one
        self._awaited_step = [_NOT_AWAITED] * len(slices)
        self._missing = [0] * parameters  # slices still to be answered
        self.awaited = 0  # how many slices have left and are not answered
        self._step = [0] * parameters
        self._notified: list[dict[int, None]] = [{} for _ in range(parameters)]
        self._announced: set[int] = set()  # slices, until they are answered
        self._pulled: set[int] = set()
        self._pulls: list[SendFrame] = []
        self._handlers: dict[type, Callable[[Any], Sequence[WorkerInstruction]]] = {
            GradientReady: self._on_gradient_ready,
            ValuesOffered: self._on_values_offered,
            ValuesAwaited: self._on_values_awaited,
            MessageReady: self._on_message_ready,
            FrameSent: self._on_frame_sent,
            ReplyArrived: self._on_reply_arrived,
            NotifyArrived: self._on_notify_arrived,
            PullsDue: self._on_pulls_due,
            PrioritiesLearned: self._on_priorities_learned,
            CameAfter: self._on_came_after,
            SlicesLost: self._on_slices_lost,
            SlicesGoOn: self._on_slices_go_on,
            Closing: self._on_closing,
        }

    def handle(self, event: Any) -> Sequence[WorkerInstruction]:
        """The only way state changes."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise InternalError(f"a worker does not know the event {event!r}")
        return handler(event)

    # Read-only views.
    def awaits(self, slice_: int, step: int) -> bool:
        """Whether a reply for this slice and step may land now."""
        known = 0 <= slice_ < len(self._slices)
        if not known or not 0 <= step == self._awaited_step[slice_]:
            return False
        return self._reply == "broadcast" or step == 0 or slice_ in self._pulled

    def is_complete(self, parameter: int) -> bool:
        return self._missing[parameter] == 0

    @property
    def queue_depth(self) -> int:
        return len(self._lanes)

    def priority_of(self, parameter: int) -> int:
        return self._priority[parameter]

    def step_of(self, parameter: int) -> int:
        return self._step[parameter]

    def missing_slices(self, parameter: int) -> list[tuple[Slice, bool | None]]:
        """What it waits for: unanswered slices, and whether each has left; None: it is copied."""
        if not self._missing[parameter]:
            return []
        queued = {frame.slice for frame in self._lanes.items() if frame.kind == Kind.PUSH}
        step = self._step[parameter]
        return [
            (piece._replace(server=self._owner[piece.number]), piece.number not in queued)
            for piece in self._slices_of[parameter]
            if self._awaited_step[piece.number] == step or piece.number in queued
        ]

    def owner_of(self, slice_: int) -> int:
        return self._owner[slice_]

    def claim(self, slice_: int) -> Round:
        """The last round of a slice whose answer is here."""
        answered = self._answered_round[slice_]
        if answered != (0, 0) or not self._came_after:
            return answered
        # a newcomer that has no answer yet; it pushes nothing of a slice that rests
        return (self._came_after, 0) if slice_ in self._open else RESTS

    def was_unchanged(self, slice_: int) -> bool:
        """Whether the last answer was that no rank had a gradient."""
        return slice_ in self._unchanged

    def is_lost(self, slice_: int, round_: Round) -> bool:
        """Whether a slice's push is lost, if its new owner goes on after this round."""
        push = self._open.get(slice_)
        return push is not None and _round_of(push) > round_

    # Handlers.
    def _on_gradient_ready(self, event: GradientReady) -> Sequence[WorkerInstruction]:
        parameter, step, flags, with_value = event
        if self._missing[parameter]:
            raise LocalProtocolError(
                f"parameter {parameter} has a gradient for step {step} while step"
                f" {self._step[parameter]} is pending"
            )
        pieces = self._slices_of[parameter]
        priority = self._urgency[parameter]
        self._missing[parameter] = len(pieces)
        self._step[parameter] = step
        push, owner = self._lanes.push, self._owner
        for index, _, _, _, _ in pieces:
            server = owner[index]
            frame = SendFrame(server, Kind.PUSH, step, index, priority, flags, NO_TOKEN)
            if self._outlives:
                self._open[index] = frame
                if index in self._claimed:
                    continue
            if with_value:
                value = SendFrame(server, Kind.VALUE, step, index, priority, 0, NO_TOKEN)
                push(server, step, priority, value)
            push(server, step, priority, frame)
            if self._reply == "pull":
                self._pulls.append(self._pull_frame(index))
        if not pieces:
            return [CompleteParameter(parameter, step)]
        return self._left(self._lanes.depart())

    def _on_values_offered(self, event: ValuesOffered) -> Sequence[WorkerInstruction]:
        for index, parameter, _, _, server in self._slices:
            priority = self._urgency[parameter]
            frame = SendFrame(server, Kind.VALUE, 0, index, priority, 0, NO_TOKEN)
            self._lanes.push(server, 0, priority, frame)
        return self._left(self._lanes.depart())

    def _on_values_awaited(self, event: ValuesAwaited) -> Sequence[WorkerInstruction]:
        done: list[WorkerInstruction] = []
        for parameter, pieces in enumerate(self._slices_of):
            self._missing[parameter], self._step[parameter] = len(pieces), event.step
            if not pieces:
                done.append(CompleteParameter(parameter, event.step))
            for piece in pieces:
                self.awaited += self._awaited_step[piece.number] == _NOT_AWAITED
                self._awaited_step[piece.number] = event.step
        return done

    def _on_message_ready(self, event: MessageReady) -> Sequence[WorkerInstruction]:
        server, kind, step, priority, slice_, token, flags = event
        frame = SendFrame(server, kind, step, slice_, priority, flags, token)
        self._lanes.push(server, step, priority, frame)
        return self._left(self._lanes.depart())

    def _on_frame_sent(self, event: FrameSent) -> Sequence[WorkerInstruction]:
        return self._left(self._lanes.sent(event.peer))

    def _on_reply_arrived(self, event: ReplyArrived) -> Sequence[WorkerInstruction]:
        slice_, step, server = event[:3]
        expected = self.awaits(slice_, step)
        if not expected or self._owner[slice_] != server:
            raise self._unexpected(slice_, step, server, "reply", expected)
        if self._outlives and (push := self._open.pop(slice_, None)) is not None:  # else the start
            self._answered_round[slice_] = _round_of(push)
            if event.flags & Flag.UNCHANGED:
                self._unchanged.add(slice_)
            else:
                self._unchanged.discard(slice_)
        done = self._answered(slice_)
        if self._window is None:
            return done
        self._window.answered(slice_)
        return [*done, *self._left(self._lanes.depart_to(server))]

    def _on_notify_arrived(self, event: NotifyArrived) -> Sequence[WorkerInstruction]:
        # as KVStore, which pulls an array when all its parts are announced (P3 section 4.2)
        slice_, step, server, flags = event
        known = self._reply == "notify" and 0 <= slice_ < len(self._slices)
        expected = known and 0 < step == self._awaited_step[slice_]
        if not expected or self._slices[slice_].server != server:
            raise self._unexpected(slice_, step, server, "notification", expected)
        if slice_ in self._announced:
            raise RemoteProtocolError(f"server {server} announced slice {slice_} twice")
        if flags & Flag.UNCHANGED:
            return self._answered(slice_)
        parameter = self._slices[slice_].parameter
        self._announced.add(slice_)
        self._notified[parameter][slice_] = None
        return self._pull_if_all_notified(parameter)

    def _pull_if_all_notified(self, parameter: int) -> Sequence[WorkerInstruction]:
        notified = self._notified[parameter]
        if not notified or len(notified) < self._missing[parameter]:
            return []
        for slice_ in notified:
            self._enqueue(self._pull_frame(slice_))
        notified.clear()
        return self._left(self._lanes.depart())

    def _pull_frame(self, slice_: int) -> SendFrame:
        piece = self._slices[slice_]
        priority = self._urgency[piece.parameter]
        step = self._step[piece.parameter]
        return SendFrame(piece.server, Kind.PULL, step, slice_, priority, 0, NO_TOKEN)

    def _on_pulls_due(self, _: PullsDue) -> Sequence[WorkerInstruction]:
        pulls, self._pulls = self._pulls, []
        for frame in pulls:
            self._enqueue(frame)
        return self._left(self._lanes.depart())

    def _on_priorities_learned(self, event: PrioritiesLearned) -> Sequence[WorkerInstruction]:
        if sorted(event.order) != list(range(len(self._priority))):
            raise LocalProtocolError("priorities must name every parameter once")
        for priority, parameter in enumerate(event.order):
            self._priority[parameter] = self._urgency[parameter] = priority
        for pack in self._packs:
            self._urgency[pack[0]] = min(self._priority[number] for number in pack)
        return []

    def _on_closing(self, _: Closing) -> Sequence[WorkerInstruction]:
        self._closing = True
        return self._left(self._lanes.depart())

    def _on_came_after(self, event: CameAfter) -> Sequence[WorkerInstruction]:
        self._came_after = event.step
        return []

    # Lost servers, and slices that move.
    def _on_slices_lost(self, event: SlicesLost) -> Sequence[WorkerInstruction]:
        if event.server is not None:
            self._lanes.forget(event.server)
            if self._window is not None:
                self._window.forget(event.server)
        for slice_, owner in event.owners.items():
            self._owner[slice_] = owner
            self._claimed.add(slice_)
        return self._left(self._lanes.depart())

    def _on_slices_go_on(self, event: SlicesGoOn) -> Sequence[WorkerInstruction]:
        for slice_, round_ in event.rounds.items():
            self._claimed.discard(slice_)
            if self.is_lost(slice_, round_):  # an average that is owed comes by itself
                self._awaited_step[slice_] = _NOT_AWAITED
                self._enqueue(self._open[slice_]._replace(peer=self._owner[slice_]))
        return self._left(self._lanes.depart())

    # Shared pieces.
    def _enqueue(self, frame: SendFrame) -> None:
        self._lanes.push(frame.peer, frame.step, frame.priority, frame)

    def _left(self, frames: list[SendFrame]) -> Sequence[WorkerInstruction]:
        self.most_queued = max(self.most_queued, self._lanes.queued)
        for frame in frames:
            if frame.kind == Kind.PUSH:
                self.awaited += self._awaited_step[frame.slice] == _NOT_AWAITED  # else once more
                self._awaited_step[frame.slice] = frame.step
                if self._window is not None and not frame.flags & _UNCOUNTED:
                    self._window.left(frame.peer, frame.step, frame.priority, frame.slice)
            elif frame.kind == Kind.PULL:
                self._pulled.add(frame.slice)
        if not frames and self._closing and self._lanes.idle:
            return [Finish()]
        return frames

    def _unexpected(
        self, slice_: int, step: int, server: int, what: str, expected: bool
    ) -> RemoteProtocolError:
        text = f"server {server} sent a {what} for slice {slice_}"
        if expected:
            owner = self._owner[slice_]
            return RemoteProtocolError(f"{text}, which belongs to server {owner}")
        known = 0 <= slice_ < len(self._slices)
        awaited = self._awaited_step[slice_] if known else _NOT_AWAITED
        other = awaited >= 0 and awaited != step
        why = f"step {awaited} is awaited" if other else "it is not awaited"
        return RemoteProtocolError(f"{text}, step {step}; {why}")

    def _answered(self, slice_: int) -> Sequence[WorkerInstruction]:
        parameter = self._slices[slice_].parameter
        self._awaited_step[slice_] = _NOT_AWAITED
        self.awaited -= 1
        if self._reply != "broadcast":
            self._announced.discard(slice_)
            self._pulled.discard(slice_)
        self._missing[parameter] -= 1
        if self._missing[parameter]:
            # a part that turned out unchanged may have been the last that others waited for
            return self._pull_if_all_notified(parameter)
        return [CompleteParameter(parameter, self._step[parameter])]
