"""A server's shell: who connects, who is lost, and how the session ends.

One thread accepts, and hears who has not greeted (`engine.entrance`); one per peer receives, and
one sends. Who joins is `engine.joining`'s; what the frames of a session are about, its services
know (`backends.composed`, or a relay's).
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from foreprop.config import LOGGER, Config
from foreprop.core.authentication import Subject
from foreprop.core.closing import RanksApart
from foreprop.core.frames import Peers, Stage
from foreprop.core.wire import Header, Kind
from foreprop.engine.connection import Connection, unexpected_bytes
from foreprop.engine.entrance import Entrance, Greeting, stream_of
from foreprop.engine.joining import Composer, GreetingRefused, Joining, Reception, StreamWrapper
from foreprop.engine.plane import Plane
from foreprop.engine.pulses import PULSE_S, Pulses, read_greeting
from foreprop.engine.stream import tune
from foreprop.engine.trace import TraceRecorder, trace_path
from foreprop.errors import Failure, ForepropError, RemoteProtocolError, StorageError, failure_of

_FAREWELL_S = 2.0
_MOST_POLL_S = PULSE_S
"""The longest time between two looks at who is awaited; each costs some processor time."""
_ACCEPT_AGAIN_S = 0.2
_JOIN_SHARE = 0.9
"""The share of the workers' time after which a server gives up: it knows who is missing."""
_FIRST_PROCESS = 1000
"""The number of the first server in traces; workers have their ranks."""


class StallReporter:
    """Reports, once per wait, the ranks that have not pushed what others have."""

    def __init__(
        self, name: str, find_stalled: Callable[[], tuple[int, int, str] | None], after_s: float
    ) -> None:
        """``find_stalled`` gives the slice, step and description of what is waited for."""
        self._name = name
        self._find_stalled = find_stalled
        self._after_s = after_s
        self._seen: tuple[int, int] | None = None
        self._since = 0.0
        self._reported = False

    def look(self) -> None:
        stalled = self._find_stalled()
        key = stalled[:2] if stalled else None
        now = time.monotonic()
        if stalled is None or key != self._seen:
            self._seen, self._since, self._reported = key, now, False
        elif not self._reported and now - self._since > self._after_s:
            self._reported = True
            where = self._name + (f", step {stalled[1]}" if stalled[1] else "")
            LOGGER.warning("%s: for %.0f s %s", where, now - self._since, stalled[2])


class Server:
    """One server of one session, over a listening socket or ready-made streams.

    ``composer`` makes a server or a relay of it; ``name`` is for messages, ``process`` and its
    number are for traces.
    """

    def __init__(
        self,
        *,
        index: int,
        session_id: str,
        config: Config,
        composer: Composer,
        world_size: int | None = None,
        wrap: StreamWrapper | None = None,
        name: str = "",
        process: str = "",
        process_id: int | None = None,
        plane: Plane | None = None,
        answers: Callable[[socket.socket], None] | None = None,
    ) -> None:
        """``plane`` carries slices, in a worker's process.

        ``answers`` takes a rank's pulse, and says for this process that it is there.
        """
        self.index = index
        self._plane, self._answers = plane, answers
        self.name = name or f"server {index}"
        self._config = config
        self._session_id = session_id
        self._join_limit_s = _JOIN_SHARE * config.join_timeout_s
        self._is_emulated = wrap is not None
        self.lock = threading.RLock()
        self._peers: dict[int, Connection] = {}  # by number
        self._reception = Reception(session_id, world_size)
        about = (composer, self._reception, config, wrap, session_id, self._peers)
        self._joining = Joining(self, self.name, *about)
        self._entrance = Entrance(
            self.name,
            index,
            Subject(session_id, process or f"server {index}", config.encryption is not None),
            config.secret_file,
            self._join_limit_s,
        )
        self._started_at_s = time.monotonic()
        self._looked_at_s = 0.0
        self._closing_since_s = 0.0
        self._done = threading.Event()
        self._wake = socket.socketpair()  # ends the wait for connections
        self._failure: Failure | None = None
        self._threads: list[threading.Thread] = []
        self._connections: list[Connection] = []
        self.trace: TraceRecorder | None = None
        if config.trace:
            process = process or self.name
            path = trace_path(Path(config.trace), process.replace(" ", "-"), session_id)
            number = _FIRST_PROCESS + index if process_id is None else process_id
            self.trace = TraceRecorder(path, process, number, config.trace_steps)

        self.pulses = Pulses(self.name, config, beats=answers is None)
        """The pulses of all ranks, which have greeted on their own connections before."""

    # Life.
    def run(self, listener: socket.socket) -> Failure | None:
        """Serve until every worker has left or the session has failed; returns the failure."""
        listener.setblocking(False)
        reporter = StallReporter(self.name, self.stalled, self._config.stall_report_s)
        selector = selectors.DefaultSelector()
        selector.register(listener, selectors.EVENT_READ, None)
        selector.register(self._wake[0], selectors.EVENT_READ, self._wake)
        self._entrance.open(selector)
        margin_s = (1 - _JOIN_SHARE) * self._config.join_timeout_s
        # short beside the times that are looked at
        poll_s = min(_MOST_POLL_S, self._config.stall_report_s / 4, margin_s / 2)
        while not self._done.is_set():
            self._look(reporter, poll_s)
            for key, _ in selector.select(poll_s):
                if key.data is None:
                    self._accept(listener)
                elif key.data is not self._wake and (whole := self._entrance.hear(key.data)):
                    self._admit(whole)
        while self._failure is not None and self._accept(listener):
            pass  # who has connected is to hear why the session has failed
        self._entrance.dismiss_all(self._failure)
        selector.close()
        listener.close()
        return self.wait()

    def _look(self, reporter: StallReporter, poll_s: float) -> None:
        """Do what is due now and then, however many strangers come."""
        now = time.monotonic()
        if now < self._looked_at_s + poll_s / 2:
            return
        self._looked_at_s = now
        self.pulses.look()
        reporter.look()
        self._check_joining()
        self._check_closing()
        self._joining.look()

    def _accept(self, listener: socket.socket) -> bool:
        """Accept a connection; returns whether there was one."""
        try:
            sock, address = listener.accept()
        except BlockingIOError:
            return False
        except OSError as error:  # too many descriptors, or gone before we looked
            LOGGER.warning("%s: accept: %s", self.name, error)
            time.sleep(_ACCEPT_AGAIN_S)
            return False
        unsent_bytes = None if self._config.lanes == "one" else self._config.unsent_bytes
        timeout_s = self._config.step_timeout_s
        try:
            tune(sock, unsent_bytes=unsent_bytes, timeout_s=timeout_s, emulated=self._is_emulated)
        except OSError:
            sock.close()
        else:
            self._entrance.arrive(sock, address[0])
        return True

    def _check_joining(self) -> None:
        """Give up on workers that do not come, and on strangers that say nothing."""
        limit_s, now = self._join_limit_s, time.monotonic()
        self._entrance.dismiss_silent()
        with self.lock:
            joined = dict(self._peers)
        if self._joining.work is None and now > self._started_at_s + limit_s:
            what, met = "rank 0", f"ranks {sorted(peer.rank for peer in joined.values())}"
            known = self._joining.known
            if known is not None:
                missing = [peer for peer in known.present if peer not in joined]
                what = ", ".join(map(known.name, missing)) or what
                met = known.listed(sorted(joined))
            if refused := self._entrance.refused:
                met += f"; it has refused a connection: {refused}"
            self.fail(
                Failure(
                    kind="StepTimeout",
                    message=f"{self.name} waited {limit_s:.1f} s (of join_timeout_s) for"
                    f" {what} to join; it has met {met}",
                )
            )

    def _check_closing(self) -> None:
        """Give up on workers that do not leave although others have."""
        with self.lock:
            open_workers = self._open_workers()
        now, limit_s = time.monotonic(), self._config.step_timeout_s
        if open_workers:
            self._closing_since_s = self._closing_since_s or now
        if open_workers and now > self._closing_since_s + limit_s:
            text = f"{self._describe_open_workers(open_workers)} {limit_s:g} s ago (step_timeout_s)"
            self.fail(Failure(kind="StepTimeout", message=f"{self.name}: {text}"))

    def _open_workers(self) -> list[int]:
        """The workers that have not closed the session, where others have."""
        open_workers = [number for number, peer in self._peers.items() if not peer.left]
        parted = any(peer.left and not peer.silent for peer in self._peers.values())
        return open_workers if self._joining.work is not None and parted else []

    def _describe_open_workers(self, open_workers: list[int]) -> str:
        known = self._joining.known or Peers(())
        gone = [number for number in self._peers if number not in open_workers]
        return f"{known.names(open_workers)} did not close the session; {known.names(gone)} did"

    def _admit(self, whole: Greeting) -> None:
        """Take in a connection that has greeted; the rest is said in a thread of its own."""
        if whole.header.kind == Kind.PULSE:
            self._hear_pulse(whole)
            return
        owners = self._joining.owners
        if self._plane is None:
            stream = stream_of(whole, self._config)
        else:
            stream = self._plane.server_stream(whole.sock, whole.name, self.index, whole.channel)
        peer = Connection(stream, owners, sender=self.index, whose="rank", give_up_s=_FAREWELL_S)
        # to encrypt takes a while: who has shown the secret may have a thread for that
        later = whole if self._config.encryption is not None else None
        if later is None and not self._greets(peer, whole):
            stream.close()
            return
        with self.lock:
            self._connections.append(peer)
        name = f"foreprop-server{self.index}-receive"
        thread = threading.Thread(target=self._receive, args=(peer, later), name=name, daemon=True)
        self._threads = [known for known in self._threads if known.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _hear_pulse(self, whole: Greeting) -> None:
        """Take in the connection of a rank's pulse, which has greeted on another one."""
        session_id, about = read_greeting(whole.payload)
        if not hmac.compare_digest(session_id, self._session_id.encode()):
            LOGGER.warning("%s: a stranger broke the protocol: PULSE of another session", self.name)
            whole.sock.close()
            return
        rank = whole.header.rank
        name = f"rank {rank} ({about} at {whole.address})"
        if self._answers is not None:
            self._answers(whole.sock)
        self.pulses.add(rank, whole.sock, name, self._lose_silent)

    def _lose_silent(self, rank: int, why: str) -> None:
        """Lose a worker that may be stopped, or cut off: its connection does not tell."""
        with self.lock:
            peer = self._reception.greeted.get(rank)
        if peer is None or peer.left or self._done.is_set():
            return
        self._lose(peer, "PeerLost", f"{why}; {self._describe_last(peer)}")

    def _greets(self, peer: Connection, whole: Greeting) -> bool:
        """Read a greeting; returns whether the peer stays, and tells who is refused."""
        try:
            stays = self._joining.greet(peer, whole.header, whole.payload)
        except RemoteProtocolError as error:
            self.on_refused(peer, error)
            return False
        if stays:
            self.pulses.drop(peer.rank)  # of the one before it in this place
        return stays

    def wait(self) -> Failure | None:
        """Block until the session has ended, then release everything."""
        self._done.wait()
        self._say_farewell()
        work = self._joining.end()
        if work is not None:
            work.close(self._failure)
        for peer in list(self._connections):
            peer.stream.close()
        if work is not None:
            work.stop()
        for thread in self._threads:
            thread.join()
        self.pulses.close()
        for end in self._wake:
            end.close()
        try:
            if self.trace is not None:
                self.trace.write()
        except StorageError as error:
            LOGGER.error("%s: %s", self.name, error)
        return self._failure

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait so long for the session's end; returns whether it has come."""
        return self._done.wait(timeout_s)

    def end(self) -> None:
        """End now, without telling anybody who has not been told."""
        self._done.set()
        for peer in list(self._peers.values()):
            peer.silent = True
        with contextlib.suppress(OSError):  # closed already: it has ended before
            self._wake[1].send(b"x", socket.MSG_DONTWAIT)

    # Receiving, and what becomes of connections. In their receiving threads.
    def _receive(self, peer: Connection, whole: Greeting | None) -> None:
        torch.set_grad_enabled(False)  # holds for this thread, which may have to update slices
        if whole is None or self._greets(peer, whole):
            peer.receive(self)
        if not peer.joined:
            with self.lock:  # first: who sees the end may come again at once, with the same rank
                self._reception.forget(peer)
                self._connections.remove(peer)
            peer.stream.close()
            return
        if not self._done.is_set():
            peer.stream.close()  # otherwise it is still told why the session has ended
        self._on_closed(peer)

    def refusal(self, peer: Connection, header: Header) -> RemoteProtocolError:
        if not peer.joined or self._joining.work is None:
            return self._joining.refusal(peer, header)
        if header.payload_bytes:
            return unexpected_bytes(header)
        return RemoteProtocolError(f"{self._name_of(peer)} sent {Kind(header.kind).name}")

    def on_lost(self, peer: Connection, why: str) -> None:
        """Only note why a stranger has gone: `_on_closed` tells of losses."""
        if why and not peer.joined:
            self._entrance.refused = why

    def on_refused(self, peer: Connection, error: RemoteProtocolError) -> None:
        """Give up a peer that breaks the rules; a stranger costs nobody anything."""
        if isinstance(error, RanksApart):
            self._lose(peer, "TrainingLoopError", str(error))
            return
        who = self._name_of(peer) if peer.joined else "a stranger"
        LOGGER.warning("%s: %s broke the protocol: %s", self.name, who, error)
        if isinstance(error, GreetingRefused):  # it may be a worker that is one too many
            why = f"{self.name} refused the greeting: {error}"
            failure = Failure(kind="HandshakeError", message=why)
            peer.send_past_queue(Kind.FAILURE, failure.encode())
        if peer.joined:
            self._lose(peer, "RemoteProtocolError", f"{who} broke the protocol: {error}")

    def on_error(self, peer: Connection, error: BaseException) -> None:
        if isinstance(error, ForepropError):
            self.fail(failure_of(error))
        else:
            self.broke(error)

    def _on_closed(self, peer: Connection) -> None:
        if peer.left or self._done.is_set():
            return
        message = (
            f"{self._name_of(peer)} is gone: its connection to {self.name} closed without a"
            f" goodbye; {self._describe_last(peer)}"
        )
        self._lose(peer, "PeerLost", message)

    def _lose(self, peer: Connection, kind: str, message: str) -> None:
        """Lose a worker, and end the session if it cannot go on without it."""
        failure = Failure(kind=kind, message=message, peer=self._name_of(peer), step=peer.last_step)
        if not self._joining.goes_on_without(peer, failure):
            self.fail(failure)

    def _name_of(self, peer: Connection) -> str:
        known = self._joining.known
        return known.name(peer.number) if known is not None else f"rank {peer.rank}"

    def _describe_last(self, peer: Connection) -> str:
        """Where a lost worker was: stage, step and parameter."""
        work = self._joining.work
        if work is None:
            return "the session had not started"
        if self._plane is not None:
            peer.last_push = self._plane.last_push(self.index, peer.number)
        if peer.last_push is None:
            last = "it had pushed nothing"
        else:
            last = f"its last push was {work.names[peer.last_push[0]]} of step {peer.last_step}"
        with self.lock:
            for _, step, text in work.incomplete():
                return f"{last}; stage {Stage.PUSH_RECEIVED.value}, step {step}: {text}"
        return f"{last} (stage {Stage.PUSH_RECEIVED.value}); nothing was waiting for it"

    # The end.
    def fail(self, failure: Failure) -> None:
        with self.lock:
            if self._failure is None and not self._done.is_set():
                self._failure = failure
        self.end()

    def broke(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        LOGGER.error("%s broke:\n%s", self.name, text)
        self.fail(failure_of(error))

    def _say_farewell(self) -> None:
        """Say to every worker why the session ended; whoever does not listen is left behind."""
        failure = self._failure
        if failure is None:
            return
        data = failure.encode()
        farewells = [
            peer.start_sending_past_queue("foreprop-farewell", Kind.FAILURE, data)
            for peer in list(self._reception.greeted.values())
        ]
        deadline = time.monotonic() + _FAREWELL_S
        for farewell in farewells:
            farewell.join(max(0.0, deadline - time.monotonic()))

    # For the stall report.
    def stalled(self) -> tuple[int, int, str] | None:
        """A slice that some ranks have pushed and others not: (slice, step, description)."""
        work = self._joining.work
        if work is None:
            return None
        with self.lock:
            if open_workers := self._open_workers():
                return -1, 0, f"waits: {self._describe_open_workers(open_workers)}"
            return next(work.incomplete(), None)
