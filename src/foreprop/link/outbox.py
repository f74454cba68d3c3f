"""The consumers of P3's producer and consumer: threads that send, blocking (section 4.2)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from foreprop.core.frames import SendFrame

Transmit = Callable[[SendFrame], None]
Sent = Callable[[int], Sequence[SendFrame]]


class Outbox:
    """Sends what the state machine hands to the links, one frame at a time to each peer.

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
