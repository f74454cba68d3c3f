"""A relay's way to its server: frames pass the same machine and outbox as those to its workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from foreprop.core.frames import FailSession
from foreprop.core.manifest import Hyperparameters
from foreprop.core.peers import SERVER
from foreprop.core.wire import Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import Connection
from foreprop.path.executor import Executor


class Upward:
    """Passes frames on to the server, and knows who has asked for an answer."""

    def __init__(
        self,
        executor: Executor,
        settings_at: Callable[[int], tuple[Hyperparameters, ...]],
    ) -> None:
        self.answer = executor.send
        """Queue a frame for a worker."""
        self.settings_at = settings_at
        self._executor = executor
        self._lock = executor.lock
        self._askers: dict[tuple[int, int, int], deque[Connection]] = {}
        """By kind of the answer, slice and step."""

    def send_on(
        self,
        kind: int,
        step: int,
        priority: int,
        slice_: int,
        data: bytes | memoryview,
        flags: int = 0,
    ) -> None:
        """Queue a frame for the server."""
        self._executor.send(SERVER, kind, step, priority, slice_, data, flags)

    def pass_on(self, header: Header, payload: memoryview) -> None:
        place = (header.step, header.priority, header.slice)
        self.send_on(header.kind, *place, payload, header.flags)

    def fail_rows(self, failure: FailSession) -> None:
        self._executor.execute([failure])

    def ask(self, answer: Kind, peer: Connection, header: Header) -> None:
        """This worker is to get the server's answer about this slice and step."""
        with self._lock:
            self._askers.setdefault((answer, header.slice, header.step), deque()).append(peer)

    def asker(self, header: Header) -> Connection:
        """Who has asked for this answer: the first of those that have not got theirs."""
        with self._lock:
            askers = self._askers.get((header.kind, header.slice, header.step))
            if not askers:
                raise RemoteProtocolError(
                    f"server {self._executor.host.index} sent {Kind(header.kind).name} of slice"
                    f" {header.slice}, which nobody has asked for"
                )
            return askers.popleft()
