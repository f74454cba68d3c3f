"""The consumer of P3's producer and consumer: one thread that sends, blocking (section 4.2)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from foreprop.core.worker import SendFrame

Transmit = Callable[[SendFrame], None]
Sent = Callable[[], SendFrame | None]


class Outbox:
    """Sends what the state machine hands to the link, one frame at a time.

    ``transmit`` blocks while the destination is full, and so the head waits; ``sent`` reports to
    the machine and returns the frame that is the most urgent by then, if any.
    """

    def __init__(
        self, name: str, transmit: Transmit, sent: Sent, failed: Callable[[BaseException], None]
    ) -> None:
        self._inbox: queue.SimpleQueue[SendFrame | None] = queue.SimpleQueue()
        self._transmit = transmit
        self._sent = sent
        self._failed = failed
        self.current: SendFrame | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, frame: SendFrame) -> None:
        self._inbox.put(frame)

    def stop(self) -> None:
        """End the thread after the frame under way; the streams must be closed or idle."""
        self._inbox.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while (frame := self._inbox.get()) is not None:
                while frame is not None:
                    self.current = frame
                    self._transmit(frame)
                    self.current = None
                    frame = self._sent()
        except BaseException as error:  # the session must learn of it, whatever it is
            self._failed(error)
