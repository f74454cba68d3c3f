"""A process's hands: what happens goes to its machine, and what that says is done.

The machine decides under the one lock. Whoever brought the event carries the instructions out;
frames go to the outbox, where each peer has a thread. Workers, servers and relays alike.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from foreprop.core.frames import (
    CONTROL_PRIORITY,
    NO_TOKEN,
    FailSession,
    Finish,
    FrameSent,
    MessageReady,
    Peers,
    SendFrame,
)
from foreprop.core.wire import Header
from foreprop.errors import Failure, InternalError, TransportError
from foreprop.link.connection import EMPTY, Connection
from foreprop.path.pipeline import NOTHING_LEAVES, Pipeline

if TYPE_CHECKING:
    from foreprop.observe.trace import TraceRecorder

Transmit = Callable[[SendFrame], None]
Sent = Callable[[int], Sequence[SendFrame]]


class Outbox:
    """Sends what the state machine hands to the links, one frame at a time to each peer.

    Its threads are the consumers of P3's producer and consumer (section 4.2).
    ``transmit`` blocks while the destination is full; ``sent`` reports to the machine and returns
    the frames that may follow, to that peer or to others. Each peer has a thread of its own, so
    that a full one does not hold up the others.
    """

    def __init__(
        self, name: str, transmit: Transmit, sent: Sent, failed: Callable[[BaseException], None]
    ) -> None:
        self._name = name
        self._transmit = transmit
        self._sent = sent
        self._failed = failed
        self._lock = threading.Lock()
        self._lanes: dict[int, _Lane] = {}
        self._stopped = False

    def submit(self, frame: SendFrame) -> None:
        lane = self._lanes.get(frame.peer) or self._open(frame.peer)
        lane.inbox.put(frame)

    def _open(self, peer: int) -> _Lane:
        with self._lock:
            lane = self._lanes.get(peer)
            if lane is None:
                lane = self._lanes[peer] = _Lane()
                lane.thread = threading.Thread(
                    target=self._run, args=(lane, peer), name=f"{self._name}-{peer}", daemon=True
                )
                if not self._stopped:
                    lane.thread.start()
            return lane

    def sending_to(self) -> list[int]:
        """The peers that a frame is under way to at this moment."""
        return sorted(peer for peer, lane in list(self._lanes.items()) if lane.current is not None)

    def stop(self) -> None:
        """End the threads after the frames under way; the streams must be closed or idle."""
        with self._lock:
            self._stopped = True
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.inbox.put(None)
        for lane in lanes:
            if lane.thread.is_alive() and threading.current_thread() is not lane.thread:
                lane.thread.join()

    def _run(self, lane: _Lane, peer: int) -> None:
        try:
            while (frame := lane.inbox.get()) is not None:
                while frame is not None:
                    lane.current = frame
                    self._transmit(frame)
                    lane.current = frame = None
                    for following in self._sent(peer):
                        if following.peer == peer:
                            frame = following
                        else:
                            self.submit(following)
        except BaseException as error:  # the session must learn of it, whatever it is
            self._failed(error)


class _Lane:
    __slots__ = ("current", "inbox", "thread")

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[SendFrame | None] = queue.SimpleQueue()
        self.current: SendFrame | None = None
        self.thread: threading.Thread


Doer = Callable[[Any], Sequence[object] | None]
"""Carries an instruction out; may return what follows from that."""


class Host(Protocol):
    """What the parts of a session need of their server, or worker."""

    @property
    def index(self) -> int:
        """The server's number, or the worker's rank."""

    @property
    def lock(self) -> threading.RLock:
        """The one lock of what is decided."""

    @property
    def trace(self) -> TraceRecorder | None: ...
    def fail(self, failure: Failure) -> None: ...
    def broke(self, error: BaseException) -> None:
        """A thread has met an error that nobody expects."""

    def end(self) -> None: ...


class Machine(Protocol):
    """`WorkerMachine` or `ServerMachine`."""

    def handle(self, event: Any) -> Sequence[object]: ...


class Executor:
    """``connections`` are by peer's number; sending threads' names begin with ``thread_name``.

    ``doers`` has one entry for each type of instruction; a feature adds those of its own.
    ``undelivered`` learns of frames that a broken connection has not taken: by default nobody, for
    the receiving thread reports the loss, with the peer's name.
    """

    def __init__(
        self,
        machine: Machine,
        host: Host,
        peers: Peers,
        connections: Mapping[int, Connection],
        thread_name: str,
        undelivered: Callable[[int, TransportError], None] | None = None,
    ) -> None:
        self.host = host
        self.lock = host.lock
        self.peers = peers
        self._machine = machine
        self._connections = connections
        self._undelivered = undelivered
        self._messages: dict[int, bytes | memoryview] = {}
        self._next_token = 0
        self._outbox = Outbox(thread_name, self._transmit, self._next_after_sent, host.broke)
        self.doers: dict[type, Doer] = {
            SendFrame: self._outbox.submit,
            FailSession: self._fail,
            Finish: lambda _: host.end(),
        }
        self.pipeline = NOTHING_LEAVES

    def use(self, pipeline: Pipeline) -> None:
        """For all frames, from the first on."""
        if self.pipeline is not NOTHING_LEAVES:
            raise InternalError("a pipeline stays as it is")
        self.pipeline = pipeline

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
        for peer in self.peers.present:
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
        if token == NO_TOKEN:
            payload_of = self.pipeline.payload.get(kind)
            payload = EMPTY if payload_of is None else payload_of(frame)
        else:
            payload = memoryview(self._messages.pop(token))
        trace = self.host.trace
        started_ns = trace.now_ns() if trace is not None else 0
        try:
            self._connections[peer].send(kind, flags, step, slice_, priority, payload)
        except TransportError as error:
            if self._undelivered is not None:
                self._undelivered(peer, error)
            return
        sent = self.pipeline.sent.get(kind)
        if sent is not None:
            sent(frame, len(payload), started_ns)

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
