"""A server's or relay's hands: what happens goes to its machine, and what that says is done.

The machine decides under the one lock. Whoever brought the event carries the instructions out;
frames go to the outbox, where each peer has a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from foreprop.core.frames import (
    CONTROL_PRIORITY,
    NO_TOKEN,
    FailSession,
    Finish,
    FrameSent,
    MessageReady,
    SendFrame,
)
from foreprop.core.peers import Peers
from foreprop.core.wire import Header
from foreprop.errors import InternalError, TransportError
from foreprop.link.connection import Connection
from foreprop.link.failure import Failure
from foreprop.link.outbox import Outbox
from foreprop.observe.trace import TraceRecorder

Doer = Callable[[Any], Sequence[object] | None]
"""Carries an instruction out; may return what follows from that."""


class Host(Protocol):
    """What the parts of a session need of their server."""

    @property
    def index(self) -> int:
        """The server's number."""

    @property
    def lock(self) -> threading.RLock:
        """The server's one lock."""

    @property
    def trace(self) -> TraceRecorder | None: ...
    def fail(self, failure: Failure) -> None: ...
    def broke(self, error: BaseException) -> None:
        """A thread has met an error that nobody expects."""

    def end(self) -> None: ...


class Machine(Protocol):
    """`ServerMachine` or `RelayMachine`."""

    def handle(self, event: Any) -> Sequence[object]: ...


class Executor:
    """``connections`` are by peer's number; sending threads' names begin with ``thread_name``.

    ``doers`` has one entry for each type of instruction; a feature adds those of its own.
    """

    def __init__(
        self,
        machine: Machine,
        host: Host,
        peers: Peers,
        connections: Mapping[int, Connection],
        thread_name: str,
    ) -> None:
        self.host = host
        self.lock = host.lock
        self.peers = peers
        self._machine = machine
        self._connections = connections
        self._messages: dict[int, bytes | memoryview] = {}
        self._next_token = 0
        self._outbox = Outbox(thread_name, self._transmit, self._next_after_sent, host.broke)
        self.doers: dict[type, Doer] = {
            SendFrame: self._outbox.submit,
            FailSession: self._fail,
            Finish: lambda _: host.end(),
        }
        self.payload_of: Callable[[SendFrame], memoryview] = _unknown_payload
        """Of a frame without a token, which is about to be sent."""
        self.on_sent: Callable[[SendFrame, int, int], None] | None = None
        """Told of each frame that has left, its size, and when it began; for traces."""

    # Deciding and doing.
    def dispatch(self, event: object) -> None:
        with self.lock:
            instructions = self._machine.handle(event)
        self.execute(instructions)

    def execute(self, instructions: Sequence[object]) -> None:
        while instructions:
            following: Sequence[object] = ()
            for instruction in instructions:
                following = self.doers[type(instruction)](instruction) or following
            instructions = following

    def _fail(self, decided: FailSession) -> None:
        """What a machine's decision to end the session is to all others."""
        if decided.rank < 0:
            failure = Failure(kind="TrainingLoopError", message=decided.reason, step=decided.step)
        else:
            peer = self.peers.name(decided.rank)
            failure = Failure(kind="PeerLost", message=decided.reason, peer=peer, step=decided.step)
        self.host.fail(failure)

    # Frames whose payload is at hand.
    def answer(self, peer: int, kind: int, about: Header, data: bytes | memoryview = b"") -> None:
        """Queue a frame for a peer, about the same slice and step."""
        self.send(peer, kind, about.step, CONTROL_PRIORITY, about.slice, data)

    def answer_all(self, kind: int, about: Header, data: bytes | memoryview = b"") -> None:
        for peer in range(self.peers.count):
            self.answer(peer, kind, about, data)

    def send(
        self,
        peer: int,
        kind: int,
        step: int,
        priority: int,
        slice_: int,
        data: bytes | memoryview,
        flags: int = 0,
    ) -> None:
        """Queue a frame for a peer; the payload waits here under a token."""
        with self.lock:
            token = self._next_token
            self._next_token += 1
            self._messages[token] = data
            event = MessageReady(peer, kind, step, priority, slice_, token, flags)
            instructions = self._machine.handle(event)
        self.execute(instructions)

    # The sending threads.
    def _transmit(self, frame: SendFrame) -> None:
        peer, kind, step, slice_, priority, flags, token = frame
        payload = self.payload_of(frame) if token == NO_TOKEN else self._take(token)
        trace = self.host.trace
        started_ns = trace.now_ns() if trace is not None else 0
        try:
            self._connections[peer].send(kind, flags, step, slice_, priority, payload)
        except TransportError:
            return  # the receiving thread reports the loss, with the peer's name
        if self.on_sent is not None:
            self.on_sent(frame, len(payload), started_ns)

    def _take(self, token: int) -> memoryview:
        return memoryview(self._messages.pop(token))

    def _next_after_sent(self, peer: int) -> list[SendFrame]:
        with self.lock:
            instructions = self._machine.handle(FrameSent(peer))
        frames: list[SendFrame] = []
        for instruction in instructions:
            if isinstance(instruction, SendFrame):
                frames.append(instruction)
            else:
                self.execute([instruction])
        return frames

    def sending_to(self) -> list[int]:
        return self._outbox.sending_to()

    def stop(self) -> None:
        """End the sending threads; the connections must be closed or idle."""
        self._outbox.stop()


def _unknown_payload(frame: SendFrame) -> memoryview:
    raise InternalError(f"nobody knows the payload of {frame!r}")
