"""The end of a worker's session: goodbyes in order, or the first error, which all are to know."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from foreprop.config import Config
from foreprop.core.wire import Header, Kind
from foreprop.engine.connection import Connection
from foreprop.engine.progress import Progress
from foreprop.errors import (
    ForepropError,
    InternalError,
    PeerLost,
    RemoteProtocolError,
    StepTimeout,
    TransportError,
    failure_of,
    own_error,
)

_NAMED_S = 2.0
"""A server says so long after `step_timeout_s` who has not closed the session."""
_CAUSE_S = 1.0
"""How long after a connection's end another server may still tell the reason."""
GOODBYE_S = 1.0


class Losses:
    """Decides what becomes of a session that loses a server: by default it ends."""

    def outlives(self, peer: Connection) -> bool:
        """Whether the session goes on without this server."""
        return False

    def cut(self, peer: Connection) -> None:
        """End a connection for this side; its receiving thread then says that it is lost."""
        peer.stream.close()

    def undelivered(self, server: int) -> bool:
        """Whether the session goes on without a server that has not taken a frame."""
        return False


class Ending:
    """Learns what becomes of a worker's connections, and ends them.

    ``begin_closing`` has the queue sent off, after which ``finished`` is set; ``stop_sending`` ends
    the sending threads. ``names`` are the servers'. ``describe_last`` gives, of a parameter or of
    any (`NOTHING`), the step and what it waited for.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        names: Sequence[str],
        progress: Progress,
        *,
        rank: int,
        config: Config,
        begin_closing: Callable[[], None],
        stop_sending: Callable[[], None],
        describe_last: Callable[[int], tuple[int, str]],
    ) -> None:
        self.finished = threading.Event()
        self.losses = Losses()
        """What keeps the session going without a server; composition may put another here."""
        self._silent: dict[int, str] = {}
        self._connections = connections
        self._servers = names
        self._progress = progress
        self._rank = rank
        self._config = config
        self._begin_closing = begin_closing
        self._stop_sending = stop_sending
        self._describe_last = describe_last
        self._closing = False
        self._close_timeout: StepTimeout | None = None
        """What kept the others from leaving, too."""
        self.failed = threading.Event()
        self._goodbyes: list[threading.Thread] = []
        self.threads = [
            threading.Thread(
                target=peer.receive,
                args=(self,),
                name=f"foreprop-receive-{peer.number}",
                daemon=True,
            )
            for peer in connections
        ]

    def start(self) -> None:
        """Receive from now on."""
        for thread in self.threads:
            thread.start()

    # What becomes of connections. In their receiving threads.
    def refusal(self, peer: Connection, header: Header) -> RemoteProtocolError:
        kind, size_bytes = Kind(header.kind).name, header.payload_bytes
        if size_bytes:
            return RemoteProtocolError(f"{kind} of {size_bytes} bytes; at most 0")
        return RemoteProtocolError(f"server {peer.number} sent {kind}")

    def on_refused(self, peer: Connection, error: RemoteProtocolError) -> None:
        self.fail(RemoteProtocolError(f"{self._servers[peer.number]} broke the protocol: {error}"))

    def on_error(self, peer: Connection, error: BaseException) -> None:
        self.broke(error)

    def on_lost(self, peer: Connection, why: str) -> None:
        """End the session for a lost server, unless another says who took that along."""
        silent = self._silent.pop(peer.number, "")
        if self.losses.outlives(peer):
            return
        if self._closing or self.failed.wait(_CAUSE_S):
            return
        why = why or f"its connection to rank {self._rank} closed"
        why = silent or f"{self._servers[peer.number]} is gone: {why}"
        step, what = self._describe_last(self._progress.awaited)
        self.fail(
            PeerLost(
                f"{why}; rank {self._rank} was waiting for {what}",
                peer=f"server {peer.number}",
                step=step,
            )
        )

    def lose_silent(self, server: int, why: str) -> None:
        """Give up a server that is stopped or cut off, which no connection tells. Any thread."""
        self._silent[server] = why
        self.losses.cut(self._connections[server])

    def fail(self, error: ForepropError) -> None:
        """Keep the first error, and give up all connections: nothing more is coming."""
        if self._closing and isinstance(error, StepTimeout):
            self._close_timeout = error
        if not self._closing:
            self._progress.keep(error)
        self.failed.set()
        self.finished.set()
        self._progress.notify()

    def broke(self, error: BaseException) -> None:
        if isinstance(error, ForepropError):
            # a broken connection is told better by its receiving end, which may know the cause
            if not isinstance(error, TransportError) or not self.failed.wait(2 * _CAUSE_S):
                self.fail(error)
        else:
            wrapped = InternalError(f"rank {self._rank}: {error!r}")
            wrapped.__cause__ = error
            self.fail(wrapped)

    # The end.
    def give_up(self, error: BaseException) -> None:
        """Tell the servers, and by them all ranks, why this rank goes on no more.

        What is asked of this engine from now on raises the error; it has still to be closed.
        """
        if self._closing or self._progress.error is not None:
            return
        self._progress.keep(own_error(error, self._rank))
        self._progress.notify()
        for server in range(len(self._connections)):
            self._say_goodbye(server, error)

    def close(self, failure: BaseException | None = None) -> None:
        """Send what is queued, say goodbye and wait until all ranks have, or say why not.

        Idempotent. Raises `StepTimeout` for ranks that do not come within ``step_timeout_s``.
        """
        if self._closing:
            return
        self._closing = True
        error = failure or self._progress.error
        if error is None:
            self._begin_closing()
            self.finished.wait(self._config.step_timeout_s)
        for server in range(len(self._connections)):
            self._say_goodbye(server, error)
        deadline = time.monotonic() + 2 * GOODBYE_S
        for goodbye in self._goodbyes:
            goodbye.join(max(0.0, deadline - time.monotonic()))
        if error is None:
            self._await_the_end()
        self.abort()
        if self._close_timeout is not None and error is None:
            raise self._close_timeout

    def _await_the_end(self) -> None:
        """Wait for the servers' end: they close when all workers have left, or say who has not."""
        limit_s, started = self._config.step_timeout_s, time.monotonic()
        report_at, deadline = started + self._config.stall_report_s, started + limit_s + _NAMED_S
        silent = self._join_receivers(min(report_at, deadline))
        if silent and report_at < deadline:
            self._progress.report("is done and waits for ranks that have not closed their session")
            silent = self._join_receivers(deadline)
        if silent and self._close_timeout is None:
            names = " and ".join(self._servers[server] for server in silent)
            self._close_timeout = StepTimeout(
                f"rank {self._rank} has closed its session and waited {limit_s:g} s"
                f" (step_timeout_s) for {names}, which does not answer"
            )

    def _join_receivers(self, deadline: float) -> list[int]:
        """Wait for receiving threads; returns the servers whose connections are still there."""
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [server for server, thread in enumerate(self.threads) if thread.is_alive()]

    def abort(self) -> None:
        self._closing = True
        for peer in self._connections:
            peer.stream.close()
        self._stop_sending()
        for thread in self.threads:
            if thread.ident is not None:
                thread.join()

    def _say_goodbye(self, server: int, error: BaseException | None) -> None:
        data = b""
        if error is not None:
            data = failure_of(error, by=f"rank {self._rank}").encode()
        kind = Kind.BYE if error is None else Kind.FAILURE
        peer = self._connections[server]
        goodbye = peer.start_sending_past_queue("foreprop-goodbye", kind, data)
        if error is None:
            goodbye.join(self._config.step_timeout_s)
        else:
            self._goodbyes.append(goodbye)
