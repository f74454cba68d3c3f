"""A server's shell: the threads and sockets around its session.

One thread accepts; one per peer receives, and one sends. Here peers are met, told apart and lost;
what their frames are about, the session knows (`path.slices`, or a relay's).
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from foreprop.config import Config
from foreprop.core.manifest import NO_GROUP, Manifest, decode_manifest, describe_mismatch
from foreprop.core.peers import Peers
from foreprop.core.sendqueue import Order, takes_turns
from foreprop.core.window import window_share_bytes
from foreprop.core.wire import (
    MAX_CONTROL_BYTES,
    Frame,
    FrameReader,
    Header,
    Kind,
    encode_header,
)
from foreprop.core.worker_machine import CONTROL_PRIORITY, NO_TOKEN, SendFrame
from foreprop.errors import (
    ForepropError,
    InternalError,
    RemoteProtocolError,
    StorageError,
    TransportError,
)
from foreprop.link.failure import Failure, decode_failure, failure_of
from foreprop.link.outbox import Outbox
from foreprop.link.stream import SocketStream, Stream
from foreprop.link.tcp import tune
from foreprop.observe.stages import Stage
from foreprop.observe.trace import TraceRecorder, trace_path
from foreprop.path.partoptimizer import ELEMENTWISE_OPTIMIZERS
from foreprop.path.peer import Peer, Session, SessionHost, bounded
from foreprop.path.reception import MAX_GREETING_BYTES, GreetingRefused, Reception
from foreprop.path.slices import ServerSession
from foreprop.path.stall import StallReporter
from foreprop.tables.store import SPARSE_OPTIMIZERS
from foreprop.version import __version__

_FAREWELL_S = 2.0
_MOST_POLL_S = 1.0
"""Between two looks at who is awaited: each costs a processor that others need."""
_ACCEPT_AGAIN_S = 0.2
_JOIN_SHARE = 0.9
"""A server gives up before the workers do: it knows who is missing."""
_FIRST_PROCESS = 1000
"""Of servers in traces; workers have their ranks."""
StreamWrapper = Callable[[Stream, int], Stream]
"""Puts an emulated link around the stream to a rank, if there is one."""

SessionMaker = Callable[[Manifest, SessionHost], Session]
PeersOf = Callable[[Manifest], Peers]


class Server:
    """One server of one session, over a listening socket or ready-made streams.

    ``make_session`` and ``peers_of`` make a relay of it (`relays.relay`); ``name`` is for messages,
    ``process`` and its number are for traces.
    """

    def __init__(
        self,
        *,
        index: int,
        session_id: str,
        config: Config,
        world_size: int | None = None,
        wrap: StreamWrapper | None = None,
        make_session: SessionMaker = ServerSession,
        peers_of: PeersOf = Manifest.peers,
        name: str = "",
        process: str = "",
        process_id: int | None = None,
    ) -> None:
        self.index = index
        self.name = name or f"server {index}"
        self._make_session = make_session
        self._peers_of = peers_of
        self._session_id = session_id
        self._config = config
        self._join_limit_s = _JOIN_SHARE * config.join_timeout_s
        self._wrap = wrap
        self.lock = threading.RLock()
        self._peers: dict[int, Peer] = {}  # by number
        self._known: Peers | None = None
        """Who is to come, once the first has said so."""
        self._session: Session | None = None
        self._reception = Reception(session_id, world_size, self._join_limit_s)
        self._started_at_s = time.monotonic()
        self._parting_since_s = 0.0
        self._done = threading.Event()
        self._wake = socket.socketpair()  # ends the wait for connections
        self._failure: Failure | None = None
        self._messages: dict[int, bytes | memoryview] = {}
        self._next_token = 0
        self._threads: list[threading.Thread] = []
        self._streams: list[Stream] = []
        self._outbox = Outbox(
            f"foreprop-server{index}-send", self._transmit, self._next_after_sent, self.broke
        )
        self.trace: TraceRecorder | None = None
        if config.trace:
            process = process or f"server {index}"
            path = trace_path(Path(config.trace), process.replace(" ", "-"), session_id)
            number = _FIRST_PROCESS + index if process_id is None else process_id
            self.trace = TraceRecorder(path, process, number)

    # Life.
    def run(self, listener: socket.socket) -> Failure | None:
        """Serve until every worker has left or the session has failed; returns the failure."""
        listener.setblocking(False)
        reporter = StallReporter(self)
        selector = selectors.DefaultSelector()
        selector.register(listener, selectors.EVENT_READ)
        selector.register(self._wake[0], selectors.EVENT_READ)
        poll_s = self._poll_s()
        while not self._done.is_set():
            reporter.look()
            self._look_at_joining()
            self._look_at_parting()
            ready = selector.select(poll_s)
            if all(key.fileobj is not listener for key, _ in ready):
                continue
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:  # too many descriptors, or gone before we looked
                print(f"foreprop: {self.name}: accept: {error}", file=sys.stderr)
                time.sleep(_ACCEPT_AGAIN_S)
                continue
            self._welcome_socket(sock, address[0])
        selector.close()
        self._accept_the_rest(listener)
        listener.close()
        return self.wait()

    def _poll_s(self) -> float:
        """Short beside the times that are looked at."""
        margin_s = (1 - _JOIN_SHARE) * self._config.join_timeout_s
        return min(_MOST_POLL_S, self._config.stall_report_s / 4, margin_s / 2)

    def _accept_the_rest(self, listener: socket.socket) -> None:
        """Who has connected is to hear why the session has failed."""
        while self._failure is not None:
            try:
                sock, address = listener.accept()
            except OSError:
                return
            self._welcome_socket(sock, address[0])

    def _welcome_socket(self, sock: socket.socket, address: str) -> None:
        try:
            sock.settimeout(None)
            tune(
                sock,
                unsent_bytes=self._config.unsent_bytes,
                timeout_s=self._config.step_timeout_s,
                emulated=self._wrap is not None,
            )
        except OSError:
            sock.close()
            return
        self.serve(SocketStream(sock, f"worker at {address}"))

    def _look_at_joining(self) -> None:
        """Give up on workers that do not come, and on strangers that say nothing."""
        limit_s, now = self._join_limit_s, time.monotonic()
        with self.lock:
            silent = self._reception.silent()
            joined = dict(self._peers)
        for peer in silent:
            peer.stream.close()
        if self._session is None and now > self._started_at_s + limit_s:
            what, met = "rank 0", f"ranks {sorted(peer.rank for peer in joined.values())}"
            if self._known is not None:
                missing = [peer for peer in range(self._known.count) if peer not in joined]
                what = ", ".join(map(self._known.name, missing)) or what
                met = self._known.listed(sorted(joined))
            self.fail(
                Failure(
                    kind="StepTimeout",
                    message=f"{self.name} waited {limit_s:.1f} s (of join_timeout_s) for"
                    f" {what} to join; it has met {met}",
                )
            )

    def _look_at_parting(self) -> None:
        """Give up on workers that do not leave although others have."""
        with self.lock:
            staying = self._staying()
        now, limit_s = time.monotonic(), self._config.step_timeout_s
        if staying:
            self._parting_since_s = self._parting_since_s or now
        if staying and now > self._parting_since_s + limit_s:
            text = f"{self._describe_staying(staying)} {limit_s:g} s ago (step_timeout_s)"
            self.fail(Failure(kind="StepTimeout", message=f"{self.name}: {text}"))

    def _staying(self) -> list[int]:
        """The workers that have not closed the session, if others have."""
        staying = [number for number, peer in self._peers.items() if not peer.left]
        return staying if self._session is not None and len(staying) < len(self._peers) else []

    def _describe_staying(self, staying: list[int]) -> str:
        known = self._known or Peers(())
        gone = [number for number in range(known.count) if number not in staying]
        return f"{known.names(staying)} did not close the session; {known.names(gone)} did"

    def serve(self, stream: Stream) -> None:
        """Take one worker's connection; returns at once."""
        peer = Peer(stream)
        with self.lock:
            self._streams.append(stream)
            crowded_out = self._reception.arrived(peer)
        if crowded_out is not None:
            crowded_out.stream.close()
        self._spawn("receive", lambda: self._receive(peer))

    def wait(self) -> Failure | None:
        """Block until the session has ended, then release everything."""
        self._done.wait()
        self._say_farewell()
        if self._session is not None:
            self._session.close(self._failure)
        for stream in list(self._streams):
            stream.close()
        self._outbox.stop()
        for thread in self._threads:
            thread.join()
        for end in self._wake:
            end.close()
        self._write_trace()
        return self._failure

    def _write_trace(self) -> None:
        try:
            if self.trace is not None:
                self.trace.write()
        except StorageError as error:
            print(f"foreprop: {self.name}: {error}", file=sys.stderr, flush=True)

    def wait_for_end(self, timeout_s: float) -> bool:
        """Whether the session has ended within this time."""
        return self._done.wait(timeout_s)

    def cancel(self) -> None:
        """End now, without telling anybody."""
        self.end()

    def end(self) -> None:
        self._done.set()
        with contextlib.suppress(OSError):  # closed already: it has ended before
            self._wake[1].send(b"x", socket.MSG_DONTWAIT)

    def _spawn(self, what: str, run: Callable[[], None]) -> None:
        name = f"foreprop-server{self.index}-{what}"
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads = [known for known in self._threads if known.is_alive()]
        self._threads.append(thread)
        thread.start()

    # Receiving.
    def _receive(self, peer: Peer) -> None:
        torch.set_grad_enabled(False)  # holds for this thread, which may have to update slices
        reader = FrameReader(lambda header: self._destination(peer, header))
        try:
            while True:
                received = peer.stream.receive_into(reader.buffer)
                if not received:
                    break
                frame = reader.advance(received)
                if frame is not None:
                    self._on_frame(peer, frame)
        except RemoteProtocolError as error:
            self._reject(peer, error)
        except TransportError:
            pass
        except ForepropError as error:
            self.fail(failure_of(error))
        except BaseException as error:
            self.broke(error)
        if not peer.joined or not self._done.is_set():
            peer.stream.close()  # otherwise it is still told why the session has ended
        self._on_closed(peer)

    def _reject(self, peer: Peer, error: RemoteProtocolError) -> None:
        """A peer that breaks the rules loses its connection; a stranger costs nobody anything."""
        who = self._name_of(peer) if peer.joined else "a stranger"
        message = f"foreprop: {self.name}: {who} broke the protocol: {error}"
        print(message, file=sys.stderr, flush=True)
        if isinstance(error, GreetingRefused):  # it may be a worker that is one too many
            self._tell_refused(peer, f"{self.name} refused the greeting: {error}")
        if peer.joined:
            failure = Failure(
                kind="RemoteProtocolError",
                message=f"{who} broke the protocol: {error}",
                peer=who,
                step=peer.last_step,
            )
            self.fail(failure)

    def _tell_refused(self, peer: Peer, why: str) -> None:
        data = Failure(kind="HandshakeError", message=why).encode()
        _tell(peer, *_failure_frame(self.index, data))

    def _on_closed(self, peer: Peer) -> None:
        if not peer.joined:
            with self.lock:
                self._reception.forget(peer)
                self._streams.remove(peer.stream)
            return
        if peer.left or self._done.is_set():
            return
        who = self._name_of(peer)
        message = (
            f"{who} is gone: its connection to {self.name} closed without a"
            f" goodbye; {self._describe_last(peer)}"
        )
        self.fail(Failure(kind="PeerLost", message=message, peer=who, step=peer.last_step))

    def _name_of(self, peer: Peer) -> str:
        return self._known.name(peer.number) if self._known is not None else f"rank {peer.rank}"

    def _describe_last(self, peer: Peer) -> str:
        """Where a lost worker was: stage, step and parameter."""
        session = self._session
        if session is None:
            return "the session had not started"
        if peer.last_push is None:
            last = "it had pushed nothing"
        else:
            last = f"its last push was {session.names[peer.last_push[0]]} of step {peer.last_step}"
        with self.lock:
            for _, step, text in session.incomplete():
                return f"{last}; stage {Stage.PUSH_RECEIVED.value}, step {step}: {text}"
        return f"{last} (stage {Stage.PUSH_RECEIVED.value}); nothing was waiting for it"

    def _destination(self, peer: Peer, header: Header) -> memoryview:
        """Where the payload goes; every size is checked against what is known here."""
        kind = header.kind
        if self.trace is not None:
            peer.receive_started_ns = self.trace.now_ns()
        if peer.rank < 0:
            if kind != Kind.HELLO:
                raise RemoteProtocolError(f"the first frame is {Kind(kind).name}, not HELLO")
            return bounded(header, MAX_GREETING_BYTES)
        if header.rank != peer.rank:
            raise RemoteProtocolError(f"rank {peer.rank} sent a frame of rank {header.rank}")
        if kind == Kind.FAILURE:
            return bounded(header, MAX_CONTROL_BYTES)
        if not peer.joined:
            return self._manifest_destination(peer, header)
        session = self._session
        if session is None:
            raise RemoteProtocolError(f"{Kind(kind).name} before the session has started")
        return session.destination(peer, header)

    def _manifest_destination(self, peer: Peer, header: Header) -> memoryview:
        if self._session is not None:
            raise GreetingRefused(f"the session has begun without rank {peer.rank}")
        if header.kind not in (Kind.MANIFEST, Kind.HELLO):
            raise RemoteProtocolError(f"{Kind(header.kind).name} before the session has started")
        return bounded(header, MAX_CONTROL_BYTES if header.kind == Kind.MANIFEST else 0)

    def _on_frame(self, peer: Peer, frame: Frame) -> None:
        header, payload = frame
        kind = header.kind
        if kind == Kind.HELLO and not peer.joined:
            with self.lock:
                begun = self._session is not None
                self._reception.greet(peer, header, payload, begun=begun)
        elif kind == Kind.MANIFEST and not peer.joined:
            self._on_manifest(peer, decode_manifest(payload))
        elif kind == Kind.FAILURE:
            failure = decode_failure(payload)
            peer.left = True
            self.fail(failure)
        elif self._session is None:
            raise RemoteProtocolError("the session has not started")
        else:
            self._session.on_frame(peer, header, payload)

    # The start.
    def _on_manifest(self, peer: Peer, manifest: Manifest) -> None:
        if manifest.session != self._session_id:
            raise RemoteProtocolError(f"HELLO for another session: {manifest.session!r}")
        self._reception.check_world_size(peer, manifest.world_size)
        if peer.rank >= manifest.world_size or not manifest.parameters:
            raise RemoteProtocolError(f"rank {peer.rank} of {manifest.world_size}")
        number = self._peers_of(manifest).number_of(peer.rank)
        with self.lock:
            if number in self._peers:
                raise GreetingRefused(f"two workers say that they are rank {peer.rank}")
            peer.number, peer.manifest = number, manifest
            if self._wrap is not None:
                peer.stream = self._wrap(peer.stream, peer.rank)
            self._peers[number] = peer
            first = self._peers.get(0)
            if first is None or first.manifest is None:
                return
            self._known = self._peers_of(first.manifest)
            refused = self._compare_all(first.manifest)
            complete = len(self._peers) == self._known.count
            session = None
            if not refused and complete:
                self._bound_replies(first.manifest.knobs.order, self._known.count)
                session = self._session = self._make_session(first.manifest, self)
        if refused:
            self.fail(Failure(kind="HandshakeError", message=refused))
        elif session is not None:  # not `_session`: another thread may have made that by now
            session.start()

    def _bound_replies(self, order: Order, peers: int) -> None:
        if not takes_turns(order, peers):
            return
        window_bytes = window_share_bytes(self._config.push_window_bytes, peers, order)
        for peer in self._peers.values():
            peer.stream.bound(window_bytes)

    def _compare_all(self, zero: Manifest) -> str | None:
        """How the first peer and the others, or this process, differ."""
        known = (
            SPARSE_OPTIMIZERS if info.rows else ELEMENTWISE_OPTIMIZERS
            for info in zero.parameters
            if info.group != NO_GROUP
        )
        if any(zero.optimizer.name not in allowed for allowed in known):
            return f"optimizer {zero.optimizer.name!r} is not one that servers apply"
        first = f"rank {self._peers[0].rank}"
        ours = (__version__, torch.__version__.partition("+")[0], sys.byteorder)
        theirs = (zero.foreprop, zero.torch, zero.byteorder)
        for name, mine, other in zip(("foreprop", "torch", "byteorder"), ours, theirs, strict=True):
            if mine != other:
                us, values = self.name, f"{first} has {other!r}, {self.name} {mine!r}"
                return f"{first} and {us} do not agree: {name}: {values}"
        for peer in self._peers.values():
            if peer.manifest is not None:
                them = f"rank {peer.rank}"
                text = describe_mismatch(zero, peer.manifest, us=first, them=them)
                if text is not None:
                    return f"{first} and {them} do not agree: {text}"
        return None

    # Sending, for the session.
    def submit(self, frame: SendFrame) -> None:
        self._outbox.submit(frame)

    def sending_to(self) -> list[int]:
        return self._outbox.sending_to()

    def keep(self, data: bytes | memoryview) -> int:
        with self.lock:
            token = self._next_token
            self._next_token += 1
            self._messages[token] = data
        return token

    def take(self, token: int) -> bytes | memoryview:
        return self._messages.pop(token)

    def tell(self, peer: Peer, kind: int, about: Header, data: bytes) -> None:
        place = (about.step, about.slice, CONTROL_PRIORITY, len(data))
        _tell(peer, encode_header(kind, 0, self.index, *place), memoryview(data))

    def _next_after_sent(self, peer: int) -> list[SendFrame]:
        session = self._session
        if session is None:
            return []
        with self.lock:
            return session.next_after_sent(peer)

    def _transmit(self, frame: SendFrame) -> None:
        session = self._session
        if session is None:
            raise InternalError("a frame is sent before the session has started")
        number, kind, step, slice_, priority, flags, token = frame
        kept = token != NO_TOKEN
        payload = memoryview(self.take(token)) if kept else session.payload_of(frame)
        header = encode_header(kind, flags, self.index, step, slice_, priority, len(payload))
        started_ns = self.trace.now_ns() if self.trace is not None else 0
        peer = self._peers[number]
        try:
            with peer.sending:
                if self._done.is_set():
                    return
                peer.stream.send(header, payload)
        except TransportError:
            return  # its receiving thread reports the loss, with the rank's name
        session.on_sent(frame, len(payload), started_ns)

    # The end.
    def fail(self, failure: Failure) -> None:
        with self.lock:
            if self._failure is None and not self._done.is_set():
                self._failure = failure
        self.end()

    def broke(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        print(f"foreprop: {self.name} broke:\n{text}", file=sys.stderr, flush=True)
        self.fail(failure_of(error))

    def _say_farewell(self) -> None:
        """Tell every worker why the session ended; whoever does not listen is left behind."""
        failure = self._failure
        if failure is None:
            return
        frame = _failure_frame(self.index, failure.encode())
        tellers = [
            threading.Thread(target=_tell, args=(peer, *frame), daemon=True)
            for peer in self._reception.everybody()
        ]
        for teller in tellers:
            teller.start()
        deadline = time.monotonic() + _FAREWELL_S
        for teller in tellers:
            teller.join(max(0.0, deadline - time.monotonic()))

    # For the stall report.
    def stalled(self) -> tuple[int, int, str] | None:
        """(slice, step, description) of a slice that some ranks have pushed and others not."""
        session = self._session
        if session is None:
            return None
        with self.lock:
            if staying := self._staying():
                return -1, 0, f"waits: {self._describe_staying(staying)}"
            return next(session.incomplete(), None)

    @property
    def stall_report_s(self) -> float:
        return self._config.stall_report_s


def _failure_frame(server: int, data: bytes) -> tuple[bytes, memoryview]:
    header = encode_header(Kind.FAILURE, 0, server, 0, 0, CONTROL_PRIORITY, len(data))
    return header, memoryview(data)


def _tell(peer: Peer, header: bytes, payload: memoryview) -> None:
    if not peer.sending.acquire(timeout=_FAREWELL_S):
        return  # stuck in the middle of a frame: it will see the connection close
    try:
        with contextlib.suppress(TransportError):
            peer.stream.send(header, payload)
    finally:
        peer.sending.release()
