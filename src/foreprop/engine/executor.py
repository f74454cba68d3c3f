"""Carries out what a process's machine decides; workers, servers and relays alike.

The machine decides under the one lock. Whoever brought the event carries the instructions out;
frames go to the outbox, where each peer has a thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from foreprop.core.wire import Header, Kind
from foreprop.engine.connection import EMPTY, Connection
from foreprop.errors import Failure, InternalError, TransportError

if TYPE_CHECKING:
    from foreprop.engine.trace import TraceRecorder

Transmit = Callable[[SendFrame], None]
Follow = Callable[[int], Sequence[SendFrame]]
Payload = Callable[[SendFrame], memoryview]
"""Gives the payload of a frame that is about to be sent, in its sending thread."""
Encode = Callable[[SendFrame, memoryview], memoryview]
"""Gives the bytes that cross for a frame and its payload, in the same thread."""
Sent = Callable[[SendFrame, int, int], None]
"""Told of a frame that has left, its bytes, and when it began, in ns."""


class Outbox:
    """Sends what the state machine hands to the links, one frame at a time to each peer.

    Its threads are the consumers of P3's producer and consumer (section 4.2).
    ``transmit`` blocks while the destination is full; ``sent`` reports to the machine and returns
    the frames that may follow, to that peer or to others. Each peer has a thread of its own, so
    that a full one does not hold up the others.
    """

    def __init__(
        self, name: str, transmit: Transmit, sent: Follow, failed: Callable[[BaseException], None]
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


@dataclass(slots=True, eq=False)
class _Lane:
    inbox: queue.SimpleQueue[SendFrame | None] = field(default_factory=queue.SimpleQueue)
    current: SendFrame | None = None
    thread: threading.Thread = field(init=False)


Doer = Callable[[Any], Sequence[object] | None]
"""Carries an instruction out; may return what follows from that."""


class Host(Protocol):
    """What the parts of a session need of their server or worker."""

    @property
    def index(self) -> int:
        """The server's number, or the worker's rank."""

    @property
    def lock(self) -> threading.RLock:
        """The one lock under which is decided."""

    @property
    def trace(self) -> TraceRecorder | None: ...
    def fail(self, failure: Failure) -> None: ...
    def broke(self, error: BaseException) -> None:
        """Told of an error in a thread that nobody expects."""

    def end(self) -> None: ...


class Pipeline:
    """What happens to frames as they leave, by kind; composition names its stages once.

    A frame has its payload from one source, without which it is empty, may be encoded by one codec,
    and somebody is told of when it has left. A stage that does not fit is a defect.
    """

    def __init__(
        self,
        *,
        payload: Mapping[Kind, Payload],
        encode: Mapping[Kind, Encode] | None = None,
        sent: Mapping[Kind, Sent] | None = None,
    ) -> None:
        self.payload: dict[int, Payload] = {int(kind): each for kind, each in payload.items()}
        self.sent: dict[int, Sent] = {int(kind): each for kind, each in (sent or {}).items()}
        for kind, each in (encode or {}).items():
            if kind not in self.payload:
                raise InternalError(f"{kind.name} is encoded and has no payload")
            self.payload[kind] = _encoding(self.payload[kind], each)


def _encoding(payload: Payload, encode: Encode) -> Payload:
    return lambda frame: encode(frame, payload(frame))


NOTHING_LEAVES = Pipeline(payload={})
"""What an executor has before composition ends: only frames whose payload is at hand leave."""


class Executor:
    """Hands events to the machine, does what it says, and sends its frames.

    ``connections`` are by peer's number; sending threads' names begin with ``thread_name``.
    ``handle`` is the machine's, to be called with the lock held. ``doers`` has one entry for each
    type of instruction; a feature adds those of its own. ``undelivered`` learns of frames that a
    broken connection has not taken: by default nobody, for the receiving thread reports the loss,
    with the peer's name.
    """

    def __init__(
        self,
        handle: Callable[[Any], Sequence[object]],
        host: Host,
        peers: Peers,
        connections: Mapping[int, Connection],
        thread_name: str,
        undelivered: Callable[[int, TransportError], None] | None = None,
        carry: Callable[..., None] | None = None,
    ) -> None:
        """``carry`` takes frames whose payload is at hand; without it they pass the machine."""
        self.host = host
        self._carry = carry
        self.lock = host.lock
        self.peers = peers
        self.handle = handle
        self._connections = connections
        self._undelivered = undelivered
        self._messages: dict[int, tuple[memoryview, Callable[[], None] | None]] = {}
        self._next_token = 0
        self._outbox = Outbox(thread_name, self._transmit, self._next_after_sent, host.broke)
        self.sending_to, self.stop = self._outbox.sending_to, self._outbox.stop
        self.doers: dict[type, Doer] = {
            SendFrame: self._outbox.submit,
            FailSession: self._fail,
            Finish: lambda _: host.end(),
        }
        self.pipeline = NOTHING_LEAVES

    def use(self, pipeline: Pipeline) -> None:
        """Set the pipeline of all frames, once and before the first."""
        if self.pipeline is not NOTHING_LEAVES:
            raise InternalError("a pipeline stays as it is")
        self.pipeline = pipeline

    # Deciding and doing.
    def dispatch(self, event: object) -> None:
        with self.lock:
            instructions = self.handle(event)
        self.execute(instructions)

    def execute(self, instructions: Sequence[object]) -> None:
        while instructions:
            following: Sequence[object] = ()
            for instruction in instructions:
                told = self.doers[type(instruction)](instruction)
                if told:
                    following = [*following, *told] if following else told
            instructions = following

    def _fail(self, decided: FailSession) -> None:
        """End the session, as the machine has decided, with the error that all are told."""
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
        left: Callable[[], None] | None = None,
    ) -> None:
        """Queue a frame; ``left`` is called when its payload has been sent, or the peer is lost."""
        if self._carry is not None:
            self._carry(peer, kind, step, priority, slice_, data, flags)
            if left is not None:
                left()
            return
        with self.lock:
            token = self._next_token
            self._next_token += 1
            self._messages[token] = (memoryview(data), left)
            event = MessageReady(peer, kind, step, priority, slice_, token, flags)
            instructions = self.handle(event)
        self.execute(instructions)

    # The sending threads.
    def _transmit(self, frame: SendFrame) -> None:
        peer, kind, step, slice_, priority, flags, token = frame
        payload, left = self._messages.pop(token, (EMPTY, None))
        if token == NO_TOKEN and (payload_of := self.pipeline.payload.get(kind)) is not None:
            payload = payload_of(frame)
        trace = self.host.trace
        started_ns = trace.now_ns() if trace is not None else 0
        try:
            self._connections[peer].send(kind, flags, step, slice_, priority, payload)
        except TransportError as error:
            if self._undelivered is not None:
                self._undelivered(peer, error)
            return
        finally:
            if left is not None:
                left()
        sent = self.pipeline.sent.get(kind)
        if sent is not None:
            sent(frame, len(payload), started_ns)

    def _next_after_sent(self, peer: int) -> list[SendFrame]:
        with self.lock:
            instructions = self.handle(FrameSent(peer))
        frames: list[SendFrame] = []
        for instruction in instructions:
            if isinstance(instruction, SendFrame):
                frames.append(instruction)
            else:
                self.execute([instruction])
        return frames
