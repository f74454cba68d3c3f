"""The sending threads: one per peer, none waits for another, all end."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from foreprop.core.frames import NO_TOKEN, MessageReady, SendFrame, each_worker
from foreprop.core.wire import Kind
from foreprop.engine.executor import Executor, Outbox
from foreprop.errors import TransportError

WAIT_S = 10.0


def frame(peer: int, slice_: int = 0) -> SendFrame:
    return SendFrame(peer, Kind.PUSH, 1, slice_, 0, 0, NO_TOKEN)


class Wire:
    """The other side of an outbox: peers that can be full, and what the machine has queued."""

    def __init__(self) -> None:
        self.open: dict[int, threading.Event] = defaultdict(threading.Event)
        self.started: queue.SimpleQueue[SendFrame] = queue.SimpleQueue()
        self.sent: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.threads: dict[int, set[str]] = defaultdict(set)
        self.following: dict[int, deque[SendFrame]] = defaultdict(deque)
        self.failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.error: BaseException | None = None

    def transmit(self, frame: SendFrame) -> None:
        self.threads[frame.peer].add(threading.current_thread().name)
        self.started.put(frame)
        if self.error is not None:
            raise self.error
        assert self.open[frame.peer].wait(WAIT_S)

    def next_after_sent(self, peer: int) -> list[SendFrame]:
        self.sent.put(peer)
        return [self.following[peer].popleft()] if self.following[peer] else []


@contextmanager
def outbox(wire: Wire) -> Iterator[Outbox]:
    made = Outbox("test-send", wire.transmit, wire.next_after_sent, wire.failures.put)
    try:
        yield made
    finally:
        for event in list(wire.open.values()):
            event.set()
        made.stop()


def senders() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("test-send"))


def test_a_full_peer_does_not_hold_up_another() -> None:
    wire = Wire()
    wire.open[1].set()
    wire.following[1].extend(frame(1, slice_) for slice_ in (1, 2))
    with outbox(wire) as box:
        box.submit(frame(0))
        assert wire.started.get(timeout=WAIT_S) == frame(0)
        box.submit(frame(1))
        started = [wire.started.get(timeout=WAIT_S) for _ in range(3)]
        assert started == [frame(1), frame(1, 1), frame(1, 2)]
        assert [wire.sent.get(timeout=WAIT_S) for _ in range(3)] == [1, 1, 1]
        assert box.sending_to() == [0]
        wire.open[0].set()
        assert wire.sent.get(timeout=WAIT_S) == 0
    assert box.sending_to() == []
    assert wire.sent.empty()
    assert wire.failures.empty()


def test_a_peer_s_frames_leave_in_one_thread_and_in_order() -> None:
    wire = Wire()
    peers = range(3)
    for peer in peers:
        wire.open[peer].set()
    with outbox(wire) as box:
        assert senders() == []  # a thread begins with its peer's first frame
        for slice_ in range(20):
            for peer in peers:
                box.submit(frame(peer, slice_))
        for _ in range(60):
            wire.sent.get(timeout=WAIT_S)
        assert senders() == [f"test-send-{peer}" for peer in peers]
    started = [wire.started.get_nowait() for _ in range(60)]
    for peer in peers:
        assert [f for f in started if f.peer == peer] == [frame(peer, i) for i in range(20)]
    assert wire.threads == {peer: {f"test-send-{peer}"} for peer in peers}


def test_a_frame_that_has_left_may_make_way_for_other_peers() -> None:
    wire = Wire()
    wire.following[0].append(frame(1))
    wire.following[1].append(frame(0, 1))
    for peer in range(2):
        wire.open[peer].set()
    with outbox(wire) as box:
        box.submit(frame(0))
        started = [wire.started.get(timeout=WAIT_S) for _ in range(3)]
    assert started == [frame(0), frame(1), frame(0, 1)]
    assert wire.threads == {peer: {f"test-send-{peer}"} for peer in range(2)}


def test_stop_ends_all_threads_after_the_frames_under_way() -> None:
    wire = Wire()
    with outbox(wire) as box:
        for peer in range(3):
            box.submit(frame(peer))
        assert {wire.started.get(timeout=WAIT_S).peer for _ in range(3)} == {0, 1, 2}
        assert box.sending_to() == [0, 1, 2]
        stopping = threading.Thread(target=box.stop)
        stopping.start()
        for peer in (0, 1):
            wire.open[peer].set()
        assert {wire.sent.get(timeout=WAIT_S) for _ in range(2)} == {0, 1}
        assert stopping.is_alive()  # peer 2's frame is still under way
        wire.open[2].set()
        stopping.join(WAIT_S)
        assert not stopping.is_alive()
        assert senders() == []
        box.submit(frame(0, 1))  # too late: neither a thread that is gone nor a new one takes it
        box.submit(frame(7))
        assert senders() == []
        box.stop()
    assert wire.started.empty()
    assert wire.failures.empty()


def test_an_unused_outbox_has_no_threads() -> None:
    with outbox(Wire()):
        assert senders() == []


@pytest.mark.parametrize("error", [OSError("broken pipe"), KeyboardInterrupt(), KeyError("slice")])
def test_a_failure_of_any_kind_is_reported_and_other_peers_go_on(error: BaseException) -> None:
    wire = Wire()
    with outbox(wire) as box:
        box.submit(frame(1))
        assert wire.started.get(timeout=WAIT_S) == frame(1)
        wire.error = error
        box.submit(frame(0))
        assert wire.failures.get(timeout=WAIT_S) is error
        wire.error = None
        wire.open[1].set()
        assert wire.sent.get(timeout=WAIT_S) == 1
    assert wire.sent.empty()  # a frame that failed has not been sent
    assert wire.failures.empty()
    assert senders() == []


def test_a_failing_thread_may_stop_the_outbox_itself() -> None:
    wire = Wire()
    wire.error = OSError("broken pipe")
    stopped = threading.Event()

    def failed(error: BaseException) -> None:
        box.stop()
        stopped.set()

    box = Outbox("test-send", wire.transmit, wire.next_after_sent, failed)
    box.submit(frame(0))
    assert stopped.wait(WAIT_S)
    box.stop()
    assert senders() == []


def let_leave(event: Any) -> Sequence[object]:
    """What a machine decides that lets every frame leave at once."""
    if not isinstance(event, MessageReady):
        return []
    peer, kind, step, priority, slice_, token, flags = event
    return [SendFrame(peer, kind, step, slice_, priority, flags, token)]


def test_a_payload_is_let_go_of_when_it_has_left_and_when_it_cannot() -> None:
    said: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def send(peer: int, *about: Any) -> None:
        said.put((peer, bytes(about[-1]).decode()))
        if peer == 1:
            raise TransportError("it is gone")

    host: Any = SimpleNamespace(lock=threading.RLock(), trace=None, broke=said.put)
    connections: Any = {peer: SimpleNamespace(send=partial(send, peer)) for peer in (0, 1)}
    executor = Executor(let_leave, host, each_worker(2), connections, "test-send")
    for peer in (0, 1):
        executor.send(peer, Kind.REPLY, 1, 0, 0, b"data", left=partial(said.put, (peer, "left")))
        assert [said.get(timeout=WAIT_S) for _ in range(2)] == [(peer, "data"), (peer, "left")]
    executor.stop()
    assert said.empty()
