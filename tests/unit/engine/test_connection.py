"""A connection: frames go to who owns their kind, and each kind of end is told as what it is."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from foreprop.backends.composed import ServerComposer
from foreprop.core.wire import (
    HEADER_BYTES,
    Flag,
    Header,
    Kind,
    decode_header,
    encode_header,
    sealed,
)
from foreprop.engine.connection import Connection, FailureReports, Later, Receivers, bounded
from foreprop.engine.stream import SocketStream, load_checksum
from foreprop.errors import Failure, InternalError, RemoteProtocolError, TransportError
from tests.faults.wire_peers import engine, manifest_of

EMPTY = memoryview(b"")


class Pulls:
    """Owns two kinds; writes down what comes."""

    kinds = frozenset({Kind.PULL, Kind.BLOB})

    def __init__(self, error: BaseException | None = None) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.error = error

    def room(self, peer: Connection, header: Header) -> memoryview:
        return bounded(header, 8)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if self.error is not None:
            raise self.error
        self.frames.append((header.kind, bytes(payload)))


class OtherPulls(Pulls):
    kinds = frozenset({Kind.PULL})


class Ends:
    """Writes down what becomes of a connection."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def refusal(self, peer: Connection, header: Header) -> RemoteProtocolError:
        return RemoteProtocolError(f"{Kind(header.kind).name} is nobody's")

    def on_lost(self, peer: Connection, why: str) -> None:
        self.told.append(("lost", why))

    def on_refused(self, peer: Connection, error: RemoteProtocolError) -> None:
        self.told.append(("refused", str(error)))

    def on_error(self, peer: Connection, error: BaseException) -> None:
        self.told.append(("error", error))


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    far.settimeout(60)
    yield near, far
    near.close()
    far.close()


def connection(sock: socket.socket, *services: Any, give_up_s: float = 5.0) -> Connection:
    owners = Receivers()
    owners.add(*services)
    stream = SocketStream(sock, "a server")
    about: dict[str, Any] = {"sender": 3, "whose": "server", "give_up_s": give_up_s}
    return Connection(stream, owners, **about, rank=1, number=1)


def frame(kind: Kind, data: bytes = b"", rank: int = 1) -> bytes:
    header = encode_header(kind, 0, rank, 2, 0, 0, len(data))
    return sealed(header, data, load_checksum()) + data


def ends_after(sockets: tuple[socket.socket, socket.socket], data: bytes, *services: Any) -> Any:
    near, far = sockets
    far.sendall(data)
    far.shutdown(socket.SHUT_WR)
    ends = Ends()
    connection(near, *services).receive(ends)
    return ends.told


def test_frames_go_to_who_owns_their_kind(sockets: Any) -> None:
    pulls, failures = Pulls(), []
    reports = FailureReports(lambda _, failure: failures.append(failure))
    told = Failure(kind="PeerLost", message="rank 0 is gone")
    data = frame(Kind.BLOB, b"12") + frame(Kind.FAILURE, told.encode()) + frame(Kind.PULL)
    assert ends_after(sockets, data, pulls, reports) == [("lost", "")]
    assert pulls.frames == [(Kind.BLOB, b"12"), (Kind.PULL, b"")]
    assert failures == [told]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (frame(Kind.PUSH), "PUSH is nobody's"),
        (frame(Kind.PULL, rank=2), "server 1 sent a frame of server 2"),
        (frame(Kind.BLOB, bytes(9)), "BLOB of 9 bytes; at most 8"),
        (b"GET / HTTP/1.1\r\n" * 3, "not a foreprop peer: magic is 0x4745, not 0xf0e9"),
    ],
)
def test_a_broken_rule_is_refused(sockets: Any, data: bytes, why: str) -> None:
    assert ends_after(sockets, data, Pulls()) == [("refused", why)]


def test_an_error_of_ours_is_no_loss(sockets: Any) -> None:
    error = ValueError("ours")
    assert ends_after(sockets, frame(Kind.PULL), Pulls(error)) == [("error", error)]


class Pushes(Pulls):
    """Owns what a server does, and writes down slices."""

    kinds = frozenset({Kind.PUSH, Kind.PULL})

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        self.frames.append((header.kind, f"{header.slice}".encode()))


def test_a_pull_waits_for_its_push_where_that_is_to_come_again(sockets: Any) -> None:
    """A gradient that changes while it leaves has come damaged; the pull is right behind it."""

    def of(kind: Kind, slice_: int, sent: bytes, checked: bytes) -> bytes:
        header = encode_header(kind, Flag.GRADIENT, 1, 2, slice_, 0, len(sent))
        return sealed(header, checked, load_checksum()) + sent

    push, pull = partial(of, Kind.PUSH), partial(of, Kind.PULL, sent=b"", checked=b"")
    data = push(1, b"new!", b"old!") + pull(1) + push(2, b"same", b"same") + pull(2)
    data += push(1, b"new!", b"new!") + push(1, b"more", b"more") + pull(1)
    pushes = Pushes()
    assert ends_after(sockets, data, pushes) == [("lost", "")]
    order = [(Kind(kind).name, int(slice_)) for kind, slice_ in pushes.frames]
    assert order == [
        *[("PUSH", 2), ("PULL", 2), ("PUSH", 1), ("PULL", 1)],
        *[("PUSH", 1), ("PULL", 1)],
    ]
    asked = sockets[1].recv(HEADER_BYTES)
    assert (decode_header(asked).kind, decode_header(asked).slice) == (Kind.DAMAGED, 1)


def test_a_lost_connection_says_why(sockets: Any) -> None:
    class Broken(SocketStream):
        def receive_into(self, view: memoryview) -> int:
            raise TransportError("no route")

    ends = Ends()
    made = connection(sockets[0], Pulls())
    made.stream = Broken(sockets[0], "a server")
    made.receive(ends)
    assert ends.told == [("lost", "no route")]


def test_what_is_sent_is_counted_and_silence_is_kept(sockets: Any) -> None:
    near, far = sockets
    made = connection(near)
    made.send(Kind.PUSH, 0, 1, 0, 0, memoryview(b"1234"))
    made.silent = True
    made.send(Kind.PUSH, 0, 1, 0, 0, memoryview(b"5678"))
    made.send_past_queue(Kind.BYE)
    first, last = far.recv(HEADER_BYTES + 4), far.recv(HEADER_BYTES)
    assert (decode_header(first[:HEADER_BYTES]).rank, first[HEADER_BYTES:]) == (3, b"1234")
    assert decode_header(last).kind == Kind.BYE
    assert made.sent_bytes == HEADER_BYTES + 4


def test_who_is_stuck_in_the_middle_of_a_frame_is_given_up(sockets: Any) -> None:
    near, far = sockets
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    made = connection(near, give_up_s=0.05)
    large = memoryview(bytes(8_000_000))
    thread = threading.Thread(target=made.send, args=(Kind.PUSH, 0, 1, 0, 0, large))
    thread.start()
    first = far.recv(1)  # it is in the middle of its frame
    made.send_past_queue(Kind.BYE)
    rest = len(first)
    while rest < 28 + len(large):
        rest += len(far.recv(1 << 20))
    thread.join(60)
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(1)


# Who owns which kind.
class Host:
    """As much of a server as its services need to be composed."""

    def __init__(self) -> None:
        self.index, self.trace, self.lock = 0, None, threading.RLock()

    def fail(self, failure: Failure) -> None: ...
    def broke(self, error: BaseException) -> None: ...
    def end(self) -> None: ...


FROM_SERVERS = {
    kind for kind in Kind if kind.name.endswith("_REPLY") or kind in (Kind.REPLY, Kind.NOTIFY)
} | {Kind.WELCOME, Kind.NORM_PART, Kind.PACE_REPORT, Kind.LEFT, Kind.DAMAGED}
AT_THE_START = {Kind.HELLO, Kind.MANIFEST, Kind.PULSE}
OF_MEMBERS = {kind for kind in Kind if Kind.GIVEN <= kind <= Kind.POSITIONS}
"""In sessions that outlive a node."""


def test_every_kind_of_frame_has_an_owner_on_its_side() -> None:
    work = ServerComposer().compose(manifest_of(), Host(), {})
    assert work.owners.keys() | AT_THE_START | {Kind.FAILURE} == (
        set(Kind) - FROM_SERVERS - OF_MEMBERS
    )
    with engine() as (made, _):
        owned = {Kind(kind) for kind in made.receivers}
    later = {Kind.PACE_REPORT, Kind.LEFT}  # when a window of steps has ended; if it is elastic
    assert owned | later == FROM_SERVERS | {Kind.NORM, Kind.FAILURE}


def test_a_kind_has_one_owner() -> None:
    with pytest.raises(InternalError, match="PULL have two owners: Pulls and OtherPulls"):
        Receivers().add(Pulls(), OtherPulls())


def test_a_service_may_be_made_by_its_first_frame(sockets: Any) -> None:
    made: list[Pulls] = []

    def make() -> Pulls:
        made.append(Pulls())
        return made[-1]

    later = Later(Pulls.kinds, make)
    Receivers().add(later)
    assert (made, later.made) == ([], None)
    ends_after(sockets, frame(Kind.PULL) * 2, later)
    assert [each.frames for each in made] == [[(Kind.PULL, b"")] * 2]
    assert later.service is made[0]


def test_what_no_thread_can_send_is_sent_here(
    sockets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Python 3.12 while the interpreter ends, where a session that is open says goodbye."""

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    near, far = sockets
    made = connection(near, Pulls())
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    made.start_sending_past_queue("goodbye", Kind.BLOB, b"12").join(60)
    sent = frame(Kind.BLOB, b"12")
    assert len(far.recv(100)) == len(sent)
