"""Connections between probes: who answers there, how long a message takes, how much goes through.

A connection begins with a greeting that has the examination's token; one without is closed. Then
either every question is answered with the time and the host's number, or the bytes that come are
counted for a while and the rate is told. Everything here ends after a bounded time.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import selectors
import socket
import statistics
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from foreprop.config import Config
from foreprop.engine.stream import tune
from foreprop.errors import TransportError

_GREETING = struct.Struct("!16sBdd")  # token, kind, settle_s, seconds
_QUESTION = struct.Struct("!Q")
_ANSWER = struct.Struct("!Qdi")  # the question, the time here, the host's number
_RATE = struct.Struct("!d")
_QUESTIONS, _BULK = 1, 2
_CHUNK_BYTES = 1 << 20
_PINGS, _WARM_UP_PINGS = 500, 10
_CONNECT_S = 5.0
_PATIENCE_S = 5.0
"""How long to wait for what should come at once."""
_GIVE_UP_S = 30.0
"""A connection on which nothing moves for as long is broken by the kernel."""
_MAX_STRANGERS = 64
"""Connections that have not greeted; the oldest makes room."""
_MOST_SERVED = 256
"""The most that are served at once of who has greeted; each has a thread."""
_LONGEST_S = 600.0
"""That somebody may ask to be counted."""
_LOOK_S, _AGAIN_S = 0.5, 0.05
_ABORT = struct.pack("ii", 1, 0)
"""SO_LINGER: what is unsent at the end is dropped, not left to disturb the next measurement."""


Purpose = Literal["server", "rendezvous"]
"""What a connection stands for: a session's to a server, or torchrun's to the first host."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where another host's probe listens."""

    host: int
    address: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    purpose: Purpose = "server"


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One connection that was tried."""

    source: int
    to: int
    address: str
    port: int
    purpose: Purpose
    outcome: Literal["connected", "timeout", "refused", "stranger", "failed"]
    """stranger: something answers there that is not the probe which was meant."""
    error: str = ""


class Trip(msgspec.Struct, frozen=True, kw_only=True):
    """Small messages between two hosts, there and back.

    ``offset_s``: the other's clock minus this one's, off by at most half of ``least_s``: of the
    message with the shortest round trip, as in NTP (RFC 5905, section 8).
    """

    source: int
    to: int
    count: int = 0
    median_s: float = 0.0
    p90_s: float = 0.0
    least_s: float = 0.0
    offset_s: float = 0.0
    error: str | None = None


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two hosts; ``bits_per_s`` is payload, as the receiver counted it."""

    source: int
    to: int
    bits_per_s: float = 0.0
    error: str | None = None


@dataclass(slots=True, eq=False)
class _Stranger:
    came_at_s: float = field(default_factory=time.monotonic)
    got: bytes = b""


class ProbeListener:
    """Answers others' greetings on a free port until it is closed.

    One thread accepts and hears who has not greeted, a fixed number of bytes at most; only who has
    the token gets a thread of its own.
    """

    def __init__(self, sock: socket.socket, host: int, token: bytes) -> None:
        self._sock = sock
        self._host = host
        self._token = token
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        """Those who have greeted."""
        self._strangers: dict[socket.socket, _Stranger] = {}
        """Those who have not, in the order in which they came. Accepting thread."""
        self._selector = selectors.DefaultSelector()
        self._closed = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def port(self) -> int:
        return int(self._sock.getsockname()[1])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            open_now = [self._sock, *self._connections]
        for sock in open_now:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it; close() would not
        for thread in self._threads:
            thread.join()
        self._sock.close()

    def _accept(self) -> None:
        self._sock.setblocking(False)
        self._selector.register(self._sock, selectors.EVENT_READ)
        while not self._closed:
            for key, _ in self._selector.select(_LOOK_S):
                if key.fileobj is self._sock:
                    self._arrive()
                elif (sock := key.fileobj) in self._strangers:  # not crowded out meanwhile
                    self._hear(sock)
            since_s = time.monotonic() - _PATIENCE_S
            for sock, each in list(self._strangers.items()):
                if each.came_at_s < since_s:
                    self._dismiss(sock)
        for sock in list(self._strangers):
            self._dismiss(sock)
        self._selector.close()

    def _arrive(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError:
            if not self._closed:  # gone before we looked, or too many descriptors
                time.sleep(_AGAIN_S)
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self._dismiss(next(iter(self._strangers)))
        sock.setblocking(False)
        self._strangers[sock] = _Stranger()
        self._selector.register(sock, selectors.EVENT_READ)

    def _dismiss(self, sock: socket.socket) -> None:
        self._forget(sock)
        sock.close()

    def _forget(self, sock: socket.socket) -> None:
        del self._strangers[sock]
        self._selector.unregister(sock)

    def _hear(self, sock: socket.socket) -> None:
        stranger = self._strangers[sock]
        try:
            data = sock.recv(_GREETING.size - len(stranger.got))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        stranger.got += data
        if not data:
            self._dismiss(sock)
        elif len(stranger.got) == _GREETING.size:
            self._take(sock, stranger.got)

    def _take(self, sock: socket.socket, greeting: bytes) -> None:
        """Who has the token is served; what it asks for has a bound, too."""
        token, kind, settle_s, seconds = _GREETING.unpack(greeting)
        is_ours = hmac.compare_digest(token, self._token) and kind in (_QUESTIONS, _BULK)
        if not is_ours or not (0 <= settle_s <= _LONGEST_S and 0 <= seconds <= _LONGEST_S):
            self._dismiss(sock)
            return
        self._forget(sock)
        with self._lock:
            self._threads = [known for known in self._threads if known.is_alive()]
            if self._closed or len(self._threads) > _MOST_SERVED:
                sock.close()
                return
            self._connections.add(sock)
            about = (sock, kind, settle_s, seconds)
            self._threads.append(threading.Thread(target=self._serve, args=about, daemon=True))
            self._threads[-1].start()

    def _serve(self, sock: socket.socket, kind: int, settle_s: float, seconds: float) -> None:
        try:
            sock.settimeout(_PATIENCE_S)
            if kind == _QUESTIONS:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while True:  # until the other end closes it
                    (number,) = _QUESTION.unpack(_receive(sock, _QUESTION.size))
                    sock.sendall(_ANSWER.pack(number, time.time(), self._host))
            else:
                _count(sock, settle_s, seconds)
        except OSError:
            pass  # the other end tells what happened
        finally:
            with self._lock:
                self._connections.discard(sock)
            sock.close()


def listen_everywhere(port: int) -> socket.socket:
    """Listening on all addresses, as torchrun's store does; ``port`` 0: a free one."""
    try:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # a kernel without IPv6 may say so only now
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
                )
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise TransportError(f"cannot listen on port {port}: {error.strerror}") from error


def _count(sock: socket.socket, settle_s: float, seconds: float) -> None:
    """Tell the rate at which bytes have come, and take what still comes until the other ends."""
    memory = memoryview(bytearray(_CHUNK_BYTES))
    begin_s = time.monotonic() + settle_s
    end_s = begin_s + seconds
    counted_bytes, since_s = 0, begin_s
    while (now_s := time.monotonic()) < end_s:
        sock.settimeout(end_s - now_s)
        try:
            got_bytes = sock.recv_into(memory)
        except TimeoutError:
            break
        if not got_bytes:
            return
        if now_s >= begin_s:
            counted_bytes += got_bytes
        else:
            since_s = max(begin_s, time.monotonic())  # what came till then is not counted
    sock.settimeout(_PATIENCE_S)
    sock.sendall(_RATE.pack(counted_bytes * 8 / (time.monotonic() - since_s)))
    while sock.recv_into(memory):  # closing now would take back the number just sent
        pass


def _receive(sock: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        piece = sock.recv(size_bytes - len(data))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        data += piece
    return bytes(data)


def _greet(
    peer: Endpoint,
    token: bytes,
    kind: int,
    *,
    timeout_s: float = _CONNECT_S,
    settle_s: float = 0.0,
    seconds: float = 0.0,
) -> socket.socket:
    sock = socket.create_connection((peer.address, peer.port), timeout=timeout_s)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(_GREETING.pack(token, kind, settle_s, seconds))
    except BaseException:
        sock.close()
        raise
    return sock


def _ask(sock: socket.socket, number: int) -> tuple[float, int]:
    """The time at the other end, and its host's number."""
    sock.sendall(_QUESTION.pack(number))
    _, clock_s, host = _ANSWER.unpack(_receive(sock, _ANSWER.size))
    return clock_s, host


def reach(source: int, peer: Endpoint, token: bytes, timeout_s: float) -> Attempt:
    """Connect, and see whether the right probe answers."""

    def attempt(outcome: str, error: str = "") -> Attempt:
        return Attempt(
            source=source,
            to=peer.host,
            address=peer.address,
            port=peer.port,
            purpose=peer.purpose,
            outcome=outcome,  # type: ignore[arg-type]
            error=error,
        )

    connected = False
    try:
        with _greet(peer, token, _QUESTIONS, timeout_s=timeout_s) as sock:
            connected = True
            _, host = _ask(sock, 0)
    except TimeoutError as error:
        return attempt("timeout", "no answer" if connected else str(error))
    except ConnectionRefusedError as error:
        return attempt("refused", str(error))
    except OSError as error:
        return attempt("stranger" if connected else "failed", error.strerror or str(error))
    if host != peer.host:
        return attempt("stranger", "another host answers there")
    return attempt("connected")


def ping(source: int, peer: Endpoint, token: bytes, seconds: float) -> Trip:
    """Questions, one after the other, for at most ``seconds``; answers within seconds each."""
    trips_s: list[float] = []
    offset_s = 0.0
    try:
        with _greet(peer, token, _QUESTIONS) as sock:
            end_s = time.monotonic() + seconds
            for number in range(_WARM_UP_PINGS):
                if time.monotonic() < end_s:
                    _ask(sock, number)
            while len(trips_s) < 2 or (len(trips_s) < _PINGS and time.monotonic() < end_s):
                asked_s, started_s = time.time(), time.perf_counter()
                clock_s, _ = _ask(sock, len(trips_s))
                trip_s = time.perf_counter() - started_s
                if trip_s < min(trips_s, default=float("inf")):
                    offset_s = clock_s - (asked_s + trip_s / 2)
                trips_s.append(trip_s)
    except OSError as error:
        return Trip(source=source, to=peer.host, error=error.strerror or str(error))
    return Trip(
        source=source,
        to=peer.host,
        count=len(trips_s),
        median_s=statistics.median(trips_s),
        p90_s=statistics.quantiles(trips_s, n=10, method="inclusive")[-1],
        least_s=min(trips_s),
        offset_s=offset_s,
    )


def send(source: int, peer: Endpoint, token: bytes, *, settle_s: float, seconds: float) -> Flow:
    """Send until the receiver tells the rate, with the kernel's queues as short as in training."""
    try:
        with _greet(peer, token, _BULK, settle_s=settle_s, seconds=seconds) as sock:
            tune(sock, unsent_bytes=Config().unsent_bytes, timeout_s=_GIVE_UP_S)
            _fill(sock, time.monotonic() + settle_s + seconds + _PATIENCE_S)
            sock.settimeout(_PATIENCE_S)
            (bits_per_s,) = _RATE.unpack(_receive(sock, _RATE.size))
    except OSError as error:
        return Flow(source=source, to=peer.host, error=error.strerror or str(error))
    return Flow(source=source, to=peer.host, bits_per_s=bits_per_s)


def _fill(sock: socket.socket, deadline_s: float) -> None:
    """Send until there is something to read."""
    payload = memoryview(bytes(_CHUNK_BYTES))
    sock.setblocking(False)
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLOUT)
    while True:
        left_s = deadline_s - time.monotonic()
        events = poll.poll(left_s * 1000) if left_s > 0 else []
        if not events:
            raise TimeoutError("the receiver does not say what it got")
        if events[0][1] & ~select.POLLOUT:
            return
        with contextlib.suppress(BlockingIOError):
            sock.send(payload)
