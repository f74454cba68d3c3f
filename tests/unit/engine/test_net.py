"""Streams: all bytes or an error, paced links, addresses and connections."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from foreprop.backends.composed import close_with_the_last
from foreprop.core.sendqueue import SendBound
from foreprop.engine import stream
from foreprop.engine.pacing import Link, NodeLinks, PacedStream
from foreprop.engine.stream import (
    TCP_NOTSENT_LOWAT,
    TCP_USER_TIMEOUT,
    SocketStream,
    check_reachable,
    connect,
    listen,
    local_address,
    round_trips_us,
    tune,
)
from foreprop.errors import ConfigError, TransportError

HEADER = b"header--"


def connected_pair() -> tuple[SocketStream, SocketStream]:
    """Two ends of one connection, named after what each end talks to."""
    ours, theirs = socket.socketpair()
    return SocketStream(ours, "right"), SocketStream(theirs, "left")


@contextmanager
def pair() -> Iterator[tuple[SocketStream, SocketStream]]:
    left, right = connected_pair()
    with closing(left), closing(right):
        yield left, right


@contextmanager
def in_background(run: Callable[[], Any]) -> Iterator[list[Any]]:
    """Results and errors of a thread that has ended by the end of the block."""
    out: list[Any] = []

    def guarded() -> None:
        try:
            out.append(run())
        except Exception as error:
            out.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    yield out
    thread.join(60)
    assert not thread.is_alive()


def read_all(stream: Any, size: int) -> bytes:
    memory = bytearray(size)
    filled = 0
    while filled < size:
        received = stream.receive_into(memoryview(memory)[filled:])
        assert received > 0
        filled += received
    return bytes(memory)


class _Trickle:
    """A socket whose sendmsg takes only a few bytes, as a full kernel buffer may make it."""

    def __init__(self, sock: socket.socket, first_bytes: int) -> None:
        self._sock = sock
        self._first_bytes = first_bytes

    def sendmsg(self, buffers: tuple[bytes, memoryview]) -> int:
        return self._sock.send(b"".join(buffers)[: self._first_bytes])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@pytest.mark.parametrize("first_bytes", [0, 3, len(HEADER), len(HEADER) + 5, len(HEADER) + 100])
def test_what_one_system_call_did_not_take_is_sent_after_it(first_bytes: int) -> None:
    ours, theirs = socket.socketpair()
    payload = bytes(range(100))
    with ours, closing(SocketStream(theirs, "left")) as right:
        sock: Any = _Trickle(ours, first_bytes)
        SocketStream(sock, "right").send(HEADER, memoryview(payload))
        assert read_all(right, len(HEADER) + 100) == HEADER + payload


def test_a_payload_larger_than_the_kernel_s_buffers_arrives_whole() -> None:
    payload = bytes(range(256)) * 20_000
    with pair() as (left, right), in_background(lambda: left.send(HEADER, memoryview(payload))):
        assert read_all(right, len(HEADER) + len(payload)) == HEADER + payload


def test_a_read_waits_for_all_that_it_was_asked_for() -> None:
    with pair() as (left, right):
        memory = bytearray(6)
        with in_background(lambda: right.receive_into(memoryview(memory))) as received:
            left.send(b"abc", memoryview(b""))
            time.sleep(0.05)
            assert received == []
            left.send(b"", memoryview(b"defg"))
        assert (received, memory) == ([6], b"abcdef")
        assert read_all(right, 1) == b"g"


def test_the_end_gives_what_is_there_and_then_zero() -> None:
    with pair() as (left, right):
        left.send(b"abc", memoryview(b""))
        left.close()
        memory = bytearray(6)
        assert right.receive_into(memoryview(memory)) == 3
        assert right.receive_into(memoryview(memory)) == 0


def test_close_wakes_a_blocked_reader_and_may_be_repeated() -> None:
    with pair() as (left, _):
        with in_background(lambda: left.receive_into(memoryview(bytearray(1)))) as received:
            time.sleep(0.05)
            left.close()
        assert received == [0] or isinstance(received[0], TransportError)
        left.close()


def test_close_wakes_a_blocked_sender() -> None:
    with pair() as (left, _):
        payload = memoryview(bytes(4_000_000))
        with in_background(lambda: left.send(HEADER, payload)) as sent:
            time.sleep(0.05)
            left.close()
        assert isinstance(sent[0], TransportError)
        assert "cannot send to right" in str(sent[0])


def test_errors_name_the_peer() -> None:
    with pair() as (left, right):
        right.close()
        with pytest.raises(TransportError, match=r"^cannot send to right: "):
            left.send(HEADER, memoryview(b"x"))
        with pytest.raises(TransportError, match=r"^cannot receive from left: "):
            right.receive_into(memoryview(bytearray(1)))


class Clock:
    """Simulated: who sleeps moves it on to when it wakes up."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._lock = threading.Lock()
        self._seen = threading.local()

    def monotonic(self) -> float:
        self._seen.now_s = self.now_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.now_s = max(self.now_s, self._seen.now_s + seconds)

    def timed(self, run: Callable[[], object]) -> float:
        started_s = self.now_s
        run()
        return self.now_s - started_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of emulated links."""
    clock = Clock()
    monkeypatch.setattr("foreprop.engine.pacing.time", clock)
    return clock


def test_a_link_takes_as_long_as_its_rate_says(tmp_path: Path, clock: Clock) -> None:
    with closing(Link(8_000_000, tmp_path / "link")) as link:  # a megabyte per second
        assert 0.18 < clock.timed(lambda: [link.occupy(20_000) for _ in range(10)]) < 0.21


def test_idle_time_is_not_saved_up(tmp_path: Path, clock: Clock) -> None:
    with closing(Link(8_000_000, tmp_path / "link")) as link:
        link.occupy(1)
        clock.now_s += 0.15
        assert clock.timed(lambda: link.occupy(100_000)) > 0.09


def test_links_over_one_file_share_one_clock(tmp_path: Path, clock: Clock) -> None:
    """Two processes of a node: each gets half the rate, both together no more than the rate."""
    path = tmp_path / "link"
    with closing(Link(8_000_000, path)) as ours, closing(Link(8_000_000, path)) as theirs:

        def both() -> None:
            with in_background(lambda: [ours.occupy(10_000) for _ in range(10)]):
                for _ in range(10):
                    theirs.occupy(10_000)

        assert 0.18 < clock.timed(both) < 0.21


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_paced_stream_delivers_the_same_bytes_at_the_link_s_rate(
    tmp_path: Path, side: str, clock: Clock
) -> None:
    payload = bytes(range(256)) * 800  # 200 KB in seven chunks
    with (
        pair() as (left, right),
        closing(Link(8_000_000, tmp_path / "slow")) as slow,
        closing(Link(1e12, tmp_path / "fast")) as fast,
    ):
        sender = PacedStream(left, egress=slow if side == "sender" else fast, ingress=fast)
        receiver = PacedStream(right, egress=fast, ingress=slow if side != "sender" else fast)

        def transfer() -> None:
            with in_background(lambda: sender.send(HEADER, memoryview(payload))):
                assert read_all(receiver, len(HEADER) + len(payload)) == HEADER + payload

        assert 0.17 < clock.timed(transfer) < 0.21
        left.send(HEADER, memoryview(b""))
        assert read_all(receiver, len(HEADER)) == HEADER  # an empty payload is no special case
        receiver.close()
        with pytest.raises(TransportError):
            sender.send(HEADER, memoryview(payload))


def test_frames_inside_a_node_do_not_pass_its_links() -> None:
    with pair() as (stream, _), closing_links() as links:
        assert links.wrap(stream, 3) is links.wrap_to_node(stream, 1) is stream  # ranks 2 and 3
        assert isinstance(links.wrap(stream, 1), PacedStream)
        assert isinstance(links.wrap_to_node(stream, -1), PacedStream)


@contextmanager
def closing_links() -> Iterator[NodeLinks]:
    links = NodeLinks("test-net", 1, 2, 1e9)
    yield links
    links.close()


def test_addresses() -> None:
    assert local_address("127.0.0.1") == "127.0.0.1"
    assert local_address("127.0.0.1", "lo") in {"127.0.0.1", "::1"}
    assert local_address("somewhere.invalid", "127.0.0.2") == "127.0.0.2"
    with pytest.raises(ConfigError, match=r"^interface is 'eth77'; it must be .* one of .*lo"):
        local_address("127.0.0.1", "eth77")


@pytest.mark.parametrize("host", ["no such host", "a" * 70 + ".invalid"])
def test_a_host_without_a_route_is_named(host: str) -> None:
    with pytest.raises(TransportError, match=f"^no route to the rendezvous host '{host}': "):
        local_address(host)


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(TransportError, match=r"^cannot listen on 192\.0\.2\.1: "):
        listen("192.0.2.1")


@contextmanager
def connected() -> Iterator[socket.socket]:
    with listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        with connect("127.0.0.1", port, timeout_s=60) as sock:
            yield sock


def test_a_connection_has_no_timeout() -> None:
    with connected() as sock:
        assert sock.gettimeout() is None


def free_port() -> int:
    with listen("127.0.0.1") as listener:
        return int(listener.getsockname()[1])


def test_connect_gives_up_in_time_and_says_to_whom() -> None:
    port = free_port()
    started_s = time.monotonic()
    with pytest.raises(
        TransportError, match=f"no connection to 127.0.0.1 port {port} within 0.2 s"
    ):
        connect("127.0.0.1", port, timeout_s=0.2)
    assert 0.2 <= time.monotonic() - started_s < 60


def test_a_port_that_the_kernel_joined_to_itself_is_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined: list[socket.socket] = []

    def to_itself(address: tuple[str, int], timeout: float) -> socket.socket:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())  # may happen if nobody listens on a port that is free
        joined.append(sock)
        return sock

    monkeypatch.setattr(socket, "create_connection", to_itself)
    with pytest.raises(TransportError, match="nobody listens"):
        connect("127.0.0.1", free_port(), timeout_s=0.1)
    assert joined
    assert all(sock.fileno() == -1 for sock in joined)


@pytest.mark.parametrize("emulated", [False, True])
def test_tune_bounds_what_the_kernel_holds_unsent(emulated: bool) -> None:
    with connected() as sock:
        tune(sock, unsent_bytes=54_321, timeout_s=7, emulated=emulated)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT) == 54_321
        assert sock.getsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT) == 7000
        if emulated:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * 65_536
        tune(sock, unsent_bytes=2**40, timeout_s=1e9)  # more than the kernel can count
        assert sock.getsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT) == 2**31 - 1


def test_tune_bounds_what_is_under_way_if_it_is_told_to() -> None:
    def send_buffer_bytes(**settings: Any) -> int:
        with connected() as sock:
            tune(sock, unsent_bytes=4096, timeout_s=7, **settings)
            return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    with connected() as untouched:
        default_bytes = untouched.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert send_buffer_bytes() == default_bytes
    assert send_buffer_bytes(window_bytes=50_000) == 50_000
    assert send_buffer_bytes(window_bytes=8192) == 8192
    largest_bytes = send_buffer_bytes(window_bytes=2**40)  # the system has a limit of its own
    assert 50_000 < largest_bytes <= 2**31 - 1
    paced_bytes = send_buffer_bytes(window_bytes=50_000, emulated=True)
    assert paced_bytes == send_buffer_bytes(emulated=True)  # a paced link bounds it by itself


@contextmanager
def between_addresses() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection whose ends have different addresses, as if it left the machine."""
    with closing(listen("127.0.0.1")) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with (
            closing(
                socket.create_connection(listener.getsockname(), source_address=("127.0.0.2", 0))
            ) as ours,
            closing(listener.accept()[0]) as theirs,
        ):
            yield ours, theirs


def held_bytes(sock: socket.socket) -> int:
    """What the kernel holds, unsent or unacknowledged."""
    return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def test_a_bounded_stream_ends_a_send_when_most_of_it_has_been_acknowledged() -> None:
    frames, payload, window_bytes = 100, bytes(3000), 8192
    ends_held: list[int] = []
    with between_addresses() as (ours, theirs), closing(SocketStream(ours, "right")) as left:
        left.bound(window_bytes)

        def send_all() -> None:
            for _ in range(frames):
                left.send(HEADER, memoryview(payload))
                ends_held.append(held_bytes(ours))

        with in_background(send_all) as out:
            wait_until_still(ends_held)
            assert len(ends_held) < frames  # who receives has not begun, and its buffer is small
            assert held_bytes(ours) <= window_bytes
            read_all(SocketStream(theirs, "left"), frames * (len(HEADER) + len(payload)))
    assert out == [None]
    assert max(ends_held) <= window_bytes * 2 / 3


def wait_until_still(growing: list[int]) -> None:
    while True:
        before = len(growing)
        time.sleep(0.3)
        if before == len(growing):
            return


def test_what_the_kernel_may_hold_follows_the_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    most_bytes, trips = 262_144, [(900, 100), (900, 100), (900, 100), (200, 100), (100, 100)]
    monkeypatch.setattr(stream, "round_trips_us", lambda _: trips.pop(0))
    with between_addresses() as (ours, theirs), closing(theirs):
        left = SocketStream(ours, "right", SendBound(most_bytes))
        held = []
        while trips:
            left.send(HEADER, memoryview(b"x"))
            held.append(ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
    assert held == [most_bytes // part for part in (2, 4, 4, 4, 2)]


def test_the_kernel_tells_round_trips() -> None:
    with between_addresses() as (ours, theirs), closing(SocketStream(ours, "right")) as left:
        left.send(HEADER, memoryview(bytes(3000)))
        read_all(SocketStream(theirs, "left"), len(HEADER) + 3000)
        found = round_trips_us(ours)
    assert found is not None
    assert 0 < found[1] <= found[0] < 10_000_000


def test_what_stays_on_this_machine_is_not_bounded() -> None:
    left, right = connected_pair()
    with closing(left), closing(right), connected() as sock:
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        for stream in (left, SocketStream(sock, "right")):
            stream.bound(8192)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before


def test_a_lost_connection_can_be_bounded() -> None:
    with between_addresses() as (ours, _):
        stream = SocketStream(ours, "right")
        stream.close()
        stream.bound(8192)
        with pytest.raises(TransportError, match="cannot send to right"):
            stream.send(HEADER, memoryview(b"payload"))


def test_tune_leaves_other_sockets_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        tune(ours, unsent_bytes=1, timeout_s=1)


def test_a_loopback_address_is_not_announced_to_other_machines() -> None:
    check_reachable("127.0.1.1", "127.0.0.1", "lo")
    check_reachable("127.0.0.1", "localhost", None)
    check_reachable("10.0.0.7", "node0", "eth0")
    with pytest.raises(ConfigError, match=r"'node0' is 127\.0\.1\.1 .*Set FOREPROP_INTERFACE"):
        check_reachable("127.0.1.1", "node0", None)
    with pytest.raises(ConfigError, match=r"interface is 'lo' .*127\.0\.0\.1.* or leave it out"):
        check_reachable("127.0.0.1", "node0", "lo")


class Relaying:
    """Like a relay, as far as its end goes."""


def test_links_that_relays_share_are_closed_once_and_with_the_last() -> None:
    """A descriptor that is closed twice may be somebody else's by then."""
    links = NodeLinks("test-net-relays", 1, 2, 1e9)
    descriptors = [link.descriptor for link in links._links]
    relays: list[Any] = [Relaying() for _ in range(3)]
    close_with_the_last(links, relays)
    while relays:
        for descriptor in descriptors:
            os.fstat(descriptor)
        relays.pop()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
