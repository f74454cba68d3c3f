"""The plane under a connection: what it takes, what passes, what it refuses, how it ends."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.config import Config
from foreprop.core.authentication import Channel, Subject
from foreprop.core.frames import GradientReady, Stage
from foreprop.core.manifest import NO_GROUP, Knobs, Manifest, OptimizerInfo, ParameterInfo
from foreprop.core.wire import (
    HEADER_BYTES,
    Damage,
    Flag,
    Header,
    Kind,
    decode_header,
    encode_header,
    sealed,
)
from foreprop.engine.encrypted import EncryptedStream
from foreprop.engine.encryptedplane import EncryptedPlane
from foreprop.engine.memory import Copying
from foreprop.engine.native import maybe_library, why_not
from foreprop.engine.pacing import Link
from foreprop.engine.plane import Plane, PlaneStream, SliceSpan
from foreprop.engine.stream import bound_send_buffer, load_checksum
from foreprop.errors import (
    ForepropError,
    LocalProtocolError,
    RemoteProtocolError,
    TransportError,
)
from tests.secretfile import secret_file

pytestmark = pytest.mark.skipif(maybe_library() is None, reason="the plane was not built")
ELEMS, SOON_S, SLACK_S = 6, 20.0, 0.002
SIZE = 4 * ELEMS
ONES = np.ones(ELEMS, dtype=np.float32)


def manifest(**changes: Any) -> Manifest:
    """Two ranks with a server each, and two parameters, one at either."""
    made = Manifest(
        foreprop="0",
        torch="0",
        byteorder=sys.byteorder,
        session="here",
        world_size=2,
        knobs=Config().knobs(2),
        optimizer=OptimizerInfo(name="SGD", groups=()),
        parameters=tuple(
            ParameterInfo(name=name, shape=(ELEMS,), dtype="float32", group=NO_GROUP)
            for name in "ab"
        ),
        blob_bytes=(8,),
    )
    return msgspec.structs.replace(made, **changes)


def frame(kind: Kind, slice_: int, step: int, data: bytes = b"", **about: int) -> bytes:
    header = encode_header(
        kind, about.get("flags", 0), about.get("rank", 1), step, slice_, 0, len(data)
    )
    return sealed(header, data, load_checksum()) + data


def push(slice_: int, step: int, values: np.ndarray, **about: int) -> bytes:
    flags = about.pop("flags", 0) | Flag.GRADIENT
    return frame(Kind.PUSH, slice_, step, values.tobytes(), flags=flags, **about)


class Peer:
    """Rank 1, by hand: its connection to the server of rank 0, and that of rank 0 to its server."""

    def __init__(self, plane: Plane) -> None:
        self.own = next(piece.number for piece in plane.slices if piece.server == 0)
        self.other = 1 - self.own
        self.to_server, its = socket.socketpair()
        self.to_worker, ours = socket.socketpair()
        self.at_server = plane.server_stream(its, "rank 1", 0)
        self.at_worker = plane.worker_stream(ours, "server 1", 1, 0)
        for sock in (self.to_server, self.to_worker):
            sock.settimeout(SOON_S)
        loop, back = socket.socketpair()  # rank 0 and its own server
        self.loops = [plane.worker_stream(loop, "server 0", 0, 0)]
        self.loops.append(plane.server_stream(back, "rank 0", 0))
        self.streams = [self.at_server, self.at_worker, *self.loops]

    def carry(self) -> None:
        for rank, stream in ((1, self.at_server), (0, self.loops[1])):
            assert isinstance(stream, PlaneStream)
            stream.carry(rank)

    def read(self, sock: socket.socket) -> tuple[Header, bytes]:
        head = self._exactly(sock, HEADER_BYTES)
        header = decode_header(head)
        return header, self._exactly(sock, header.payload_bytes)

    def _exactly(self, sock: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            got = sock.recv(size - len(data))
            assert got, "the connection has ended"
            data += got
        return data

    def close(self) -> None:
        for each in (*self.streams, self.to_server, self.to_worker):
            each.close()


@contextlib.contextmanager
def running(preset: str | None = None) -> Iterator[tuple[Plane, Peer]]:
    config = Config.resolve(preset)
    plane = Plane(manifest(knobs=config.knobs(2)), config, rank=0, servers=(0,))
    peer = Peer(plane)
    try:
        yield plane, peer
    finally:
        peer.close()
        plane.close()


def received(stream: Any, size: int) -> bytes:
    data = b""
    while len(data) < size:
        room = bytearray(min(4096, size - len(data)))
        got = stream.receive_into(memoryview(room))
        assert got
        data += room[:got]
    return data


class Own:
    """Rank 0's gradients, and room for its averages."""

    def __init__(self, plane: Plane, elems: int = ELEMS) -> None:
        self.plane = plane
        self.gradients = [np.arange(elems, dtype=np.float32) + 10 * p for p in range(2)]
        self.rooms = [np.zeros(elems, dtype=np.float32) for _ in range(2)]

        self.word = np.zeros(1, dtype=np.int64)
        self.check: Callable[[], object] = lambda: None

    def push(self, parameter: int, step: int, flags: int = 0, number: int = 0) -> None:
        """With a ``number``, which ``word`` is to have, it is still copied."""
        event = GradientReady(parameter, step, Flag.GRADIENT | flags, False)
        gradient, room = (all_[parameter].data.cast("B") for all_ in (self.gradients, self.rooms))
        has_none = flags & Flag.NO_GRADIENT
        copying = Copying(self.word.ctypes.data, number, lambda: self.check())
        self.plane.push(event, None if has_none else gradient, room, copying if number else None)

    def wait(self, parameter: int) -> None:
        deadline = time.monotonic() + SOON_S
        while not self.plane.is_complete(parameter):
            assert time.monotonic() < deadline
            self.plane.wait(parameter, 1.0)


def test_gradients_are_averaged_and_come_back() -> None:
    with running() as (plane, peer):
        peer.carry()
        own, theirs = Own(plane), np.full(ELEMS, 0.5, dtype=np.float32)
        for step in (1, 2):
            for parameter in (0, 1):
                own.push(parameter, step)
            header, data = peer.read(peer.to_worker)
            assert header[:6] == (Kind.PUSH, Flag.GRADIENT, 0, step, peer.other, peer.other)
            assert data == own.gradients[peer.other].tobytes()
            peer.to_server.sendall(push(peer.own, step, theirs))
            header, data = peer.read(peer.to_server)
            assert (header.kind, header.rank, header.step) == (Kind.REPLY, 0, step)
            assert data == ((own.gradients[peer.own] + theirs) / 2).tobytes()
            own.wait(peer.own)
            assert own.rooms[peer.own].tobytes() == data
            assert plane.is_answered(peer.own)
            average = np.full(ELEMS, float(step), dtype=np.float32)
            peer.to_worker.sendall(frame(Kind.REPLY, peer.other, step, average.tobytes()))
            own.wait(peer.other)
            assert own.rooms[peer.other].tobytes() == average.tobytes()
        assert plane.statistics()[:2] == [4, 4 * SIZE]


def test_a_gradient_that_is_still_copied_leaves_when_its_number_shows() -> None:
    with running() as (plane, peer):
        peer.carry()
        own = Own(plane)
        gradient = own.gradients[peer.other]
        wanted = gradient.tobytes()
        gradient.fill(0)
        own.push(peer.other, 3, number=7)
        plane.message(1, Kind.TRAINABLE, 3, 5, 0, b"words", 0)
        own.word[0] = 6
        assert peer.read(peer.to_worker)[0].kind == Kind.TRAINABLE  # it would be behind the push
        assert (plane.step_of(peer.other), plane.is_complete(peer.other)) == (3, False)
        assert plane.missing(peer.other) == [(peer.other, None)]
        looks: list[int] = []

        def look() -> None:
            looks.append(plane.statistics()[0])
            if len(looks) == 2:  # flushing has waited for this one
                gradient[:] = np.frombuffer(wanted, dtype=np.float32)
                own.word[0] = 7

        own.check = look
        plane.flush(SOON_S)
        assert looks[:2] == [0, 0]
        header, data = peer.read(peer.to_worker)
        assert (header.kind, header.step, data) == (Kind.PUSH, 3, wanted)
        assert plane.missing(peer.other) == [(peer.other, True)]
        peer.to_worker.sendall(frame(Kind.REPLY, peer.other, 3, ONES.tobytes()))
        own.wait(peer.other)


def test_all_that_have_been_copied_leave_even_if_one_was_for_nobody() -> None:
    """Each to its server; one that has no gradient waits for the device, too."""
    with running() as (plane, peer):
        peer.carry()
        own = Own(plane)
        own.push(peer.own, 1, Flag.NO_GRADIENT, number=1)
        own.push(peer.other, 1, number=2)
        peer.to_server.sendall(push(peer.own, 1, ONES))
        own.word[0] = 2
        assert peer.read(peer.to_worker)[0].kind == Kind.PUSH
        assert peer.read(peer.to_server)[0].kind == Kind.REPLY
        own.wait(peer.own)


def test_no_gradient_follows_one_that_is_still_copied() -> None:
    with running() as (plane, peer):
        own = Own(plane)
        own.push(peer.own, 1, number=1)
        for number in (0, 2):
            with pytest.raises(LocalProtocolError, match="for step 2 while step 1 is pending"):
                own.push(peer.own, 2, number=number)


def test_a_pull_that_was_due_before_the_gradient_was_copied_follows_it() -> None:
    with running("tensorflow") as (plane, peer):
        peer.carry()
        own = Own(plane)
        own.push(peer.other, 1, number=1)
        plane.pulls_due()
        own.word[0] = 1
        kinds = [peer.read(peer.to_worker)[0].kind for _ in range(2)]
        assert kinds == [Kind.PUSH, Kind.PULL]


def test_where_nobody_had_a_gradient_nothing_comes() -> None:
    with running() as (plane, peer):
        peer.carry()
        own = Own(plane)
        own.push(peer.own, 1, Flag.NO_GRADIENT)
        flags = Flag.GRADIENT | Flag.NO_GRADIENT
        peer.to_server.sendall(frame(Kind.PUSH, peer.own, 1, flags=flags))
        header, data = peer.read(peer.to_server)
        assert (header.flags, data) == (Flag.UNCHANGED, b"")
        own.wait(peer.own)
        assert not plane.is_answered(peer.own)


def test_all_other_frames_pass_in_their_order_however_large() -> None:
    """More than what may wait in the plane for Python to read it."""
    with running() as (_, peer):
        peer.carry()
        large = np.random.default_rng(0).bytes(3_000_000)
        frames = [
            frame(Kind.BLOB, 0, 1, large),
            frame(Kind.BYE, 0, 0),
            frame(Kind.STATE, 1, 2, b"x"),
        ]
        sender = threading.Thread(target=peer.to_server.sendall, args=(b"".join(frames),))
        sender.start()
        assert received(peer.at_server, sum(map(len, frames))) == b"".join(frames)
        sender.join()


def test_a_message_leaves_behind_the_pushes_before_it() -> None:
    with running() as (plane, peer):
        peer.carry()
        own = Own(plane)
        own.push(peer.other, 1)
        plane.message(1, Kind.TRAINABLE, 1, -1, 0, b"words", 0)
        assert peer.read(peer.to_worker)[0].kind == Kind.PUSH
        header, data = peer.read(peer.to_worker)
        assert (header.kind, data) == (Kind.TRAINABLE, b"words")


def test_a_message_to_its_own_server_leaves_in_its_turn_too() -> None:
    """Its pushes pass through memory, and the first of a step is told of behind it."""
    with running() as (plane, peer):
        peer.carry()
        plane.tell_begins(0)
        plane.message(0, Kind.TRAINABLE, 1, -1, 0, b"words", 0)
        Own(plane).push(peer.own, 2)
        head = received(peer.loops[1], HEADER_BYTES)
        assert decode_header(head).kind == Kind.TRAINABLE
        assert received(peer.loops[1], 5) == b"words"
        told = decode_header(received(peer.loops[1], HEADER_BYTES))
        assert (told.kind, told.step, told.payload_bytes) == (Kind.PUSH, 2, 0)


def test_what_is_told_does_not_cut_a_frame_that_is_coming() -> None:
    with running() as (plane, peer):
        peer.carry()
        peer.to_server.sendall(push(peer.own, 1, ONES))
        deadline = time.monotonic() + SOON_S
        while plane.last_push(0, 1) is None:
            assert time.monotonic() < deadline
        whole = frame(Kind.BLOB, 0, 1, bytes(100))
        peer.to_server.sendall(whole[:50])
        assert received(peer.at_server, 50) == whole[:50]
        plane.tell_begins(0)
        peer.to_server.sendall(whole[50:])
        assert received(peer.at_server, len(whole) - 50) == whole[50:]
        told = decode_header(received(peer.at_server, HEADER_BYTES))
        assert (told.kind, told.step, told.payload_bytes) == (Kind.PUSH, 1, 0)


def test_slices_are_not_taken_before_all_have_joined() -> None:
    with running() as (_, peer):
        early = push(peer.own, 1, ONES)
        peer.to_server.sendall(early)
        assert received(peer.at_server, len(early)) == early


ODD = {
    "another's slice": (
        lambda peer: push(peer.other, 1, np.ones(6, np.float32)),
        "does not belong",
    ),
    "no slice": (lambda peer: push(77, 1, np.ones(6, np.float32)), "does not belong"),
    "too long": (lambda peer: push(peer.own, 1, np.ones(7, np.float32)), "28 bytes, not 24"),
    "another's rank": (lambda peer: push(peer.own, 1, np.ones(6, np.float32), rank=3), "rank 3"),
    "step 0": (lambda peer: push(peer.own, 0, np.ones(6, np.float32)), "which is past"),
    "noise": (lambda _: b"\x01" * 64, "not a foreprop peer"),
}


@pytest.mark.parametrize("what", ODD)
def test_what_does_not_fit_ends_that_connection_and_says_why(what: str) -> None:
    make, why = ODD[what]
    with running() as (_, peer):
        peer.carry()
        peer.to_server.sendall(make(peer))  # type: ignore[no-untyped-call]
        with pytest.raises(RemoteProtocolError, match=why):
            received(peer.at_server, 1)


def test_a_reply_that_nobody_awaits_is_refused() -> None:
    with running() as (_, peer):
        peer.to_worker.sendall(frame(Kind.REPLY, peer.other, 1, bytes(SIZE)))
        with pytest.raises(RemoteProtocolError, match="which is not awaited"):
            received(peer.at_worker, 1)


def test_a_damaged_gradient_is_asked_for_again() -> None:
    with running() as (plane, peer):
        peer.carry()
        own = Own(plane)
        own.push(peer.own, 1)
        theirs = ONES
        whole = bytearray(push(peer.own, 1, theirs))
        whole[-1] ^= 1
        peer.to_server.sendall(whole)
        header, data = peer.read(peer.to_server)
        assert (header.kind, header.slice, header.step) == (Kind.DAMAGED, peer.own, 1)
        assert Damage.decode(data).size_bytes == SIZE
        peer.to_server.sendall(push(peer.own, 1, theirs))
        assert peer.read(peer.to_server)[0].kind == Kind.REPLY
        own.wait(peer.own)


def test_a_pull_waits_for_a_gradient_that_is_to_come_again() -> None:
    with running("tensorflow") as (plane, peer):
        peer.carry()
        own = Own(plane)
        own.push(peer.own, 1)
        plane.pulls_due()
        whole = bytearray(push(peer.own, 1, ONES))
        whole[-1] ^= 1
        peer.to_server.sendall(whole + frame(Kind.PULL, peer.own, 1))
        assert peer.read(peer.to_server)[0].kind == Kind.DAMAGED
        peer.to_server.sendall(push(peer.own, 1, ONES))
        header, average = peer.read(peer.to_server)
        assert (header.kind, header.slice, header.step) == (Kind.REPLY, peer.own, 1)
        assert average == ((own.gradients[peer.own] + ONES) / 2).tobytes()
        own.wait(peer.own)


@pytest.mark.parametrize("step", [0, 1])
def test_an_average_is_pulled_once_and_when_there_is_one(step: int) -> None:
    """Another pull ends the connection, and takes nothing from who is still owed it."""
    with running("tensorflow") as (plane, peer):
        peer.carry()
        own = Own(plane)
        if step:
            own.push(peer.own, step)
            plane.pulls_due()
            peer.to_server.sendall(push(peer.own, step, ONES) + frame(Kind.PULL, peer.own, step))
            assert peer.read(peer.to_server)[0].kind == Kind.REPLY
            own.wait(peer.own)
        peer.to_server.sendall(frame(Kind.PULL, peer.own, step))
        with pytest.raises(RemoteProtocolError, match=r"rank 1 pulled slice 0"):
            received(peer.at_server, 1)


@pytest.mark.parametrize(
    ("preset", "sent", "why"),
    [
        ("tensorflow", frame(Kind.PULL, 0, 1), "which it has not pushed"),
        ("tensorflow", frame(Kind.PULL, 0, 1, b"odd"), "PULL of slice 0 carries 3 bytes, not 0"),
        ("tensorflow", frame(Kind.PULL, 7, 1), "slice 7 does not belong to server 0"),
        (None, frame(Kind.PULL, 0, 1), "replies are broadcast"),
    ],
)
def test_an_odd_pull_ends_its_connection(preset: str | None, sent: bytes, why: str) -> None:
    with running(preset) as (_, peer):
        assert peer.own == 0
        peer.carry()
        peer.to_server.sendall(sent)
        with pytest.raises(RemoteProtocolError, match=why):
            received(peer.at_server, 1)


def test_a_damaged_average_ends_the_session() -> None:
    with running() as (plane, peer):
        peer.carry()
        Own(plane).push(peer.other, 1)
        peer.read(peer.to_worker)
        whole = bytearray(frame(Kind.REPLY, peer.other, 1, bytes(SIZE)))
        whole[-1] ^= 1
        peer.to_worker.sendall(whole)
        with pytest.raises(RemoteProtocolError, match=r"REPLY of slice .* has come damaged"):
            received(peer.at_worker, 1)


@settings(max_examples=150)
@given(
    where=st.integers(0, HEADER_BYTES + SIZE - 1),
    bits=st.integers(1, 255),
    cut=st.integers(1, 5),
    fixes=st.booleans(),
)
def test_no_bytes_break_it(where: int, bits: int, cut: int, fixes: bool) -> None:
    """One that is changed anywhere, with its checks made anew or not, in any pieces."""
    with running() as (plane, peer):
        peer.carry()
        Own(plane).push(peer.own, 1)
        whole = bytearray(push(peer.own, 1, ONES))
        whole[where] ^= bits
        if fixes and where < HEADER_BYTES - 8:
            data = bytes(whole[HEADER_BYTES:])
            whole[:HEADER_BYTES] = sealed(bytes(whole[:HEADER_BYTES]), data, load_checksum())
        for start in range(0, len(whole), -(-len(whole) // cut)):
            peer.to_server.sendall(whole[start : start - (-len(whole) // cut)])
        peer.to_server.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ForepropError):
            room = bytearray(4096)
            while peer.at_server.receive_into(memoryview(room)):
                pass


def test_threads_and_descriptors_are_gone_within_a_second_of_the_end() -> None:
    before = {"threads": os.listdir("/proc/self/task"), "files": os.listdir("/proc/self/fd")}
    with running() as (plane, peer):
        peer.carry()
        Own(plane).push(peer.other, 1)  # and nobody answers
        copied = Own(plane)
        copied.push(peer.own, 1, number=1)  # and never ends
        assert len(os.listdir("/proc/self/task")) == len(before["threads"]) + 2
        started = time.monotonic()
    assert time.monotonic() < started + 1
    assert len(os.listdir("/proc/self/task")) <= len(before["threads"])
    assert len(os.listdir("/proc/self/fd")) <= len(before["files"])


def test_who_reads_hears_of_the_end() -> None:
    with running() as (_, peer):
        heard: list[int] = []
        reader = threading.Thread(
            target=lambda: heard.append(peer.at_server.receive_into(memoryview(bytearray(9))))
        )
        reader.start()
        peer.at_server.close()
        reader.join(SOON_S)
        assert heard == [0]


def test_a_forked_child_has_no_threads_and_lets_go() -> None:
    with running() as (plane, peer):
        peer.carry()
        own = Own(plane)
        own.push(peer.own, 1, number=1)
        pid = os.fork()
        if pid == 0:
            plane.forget_in_child()
            os._exit(len(os.listdir("/proc/self/task")))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        own.word[0] = 1
        peer.to_server.sendall(push(peer.own, 1, ONES))
        own.wait(peer.own)


def test_a_fork_amid_a_step_harms_nobody() -> None:
    with running() as (plane, peer):
        peer.carry()
        own, steps = Own(plane), 30

        def train() -> None:
            for step in range(1, steps + 1):
                own.push(peer.own, step)
                peer.to_server.sendall(push(peer.own, step, ONES))
                assert peer.read(peer.to_server)[0].step == step
                own.wait(peer.own)

        trainer = threading.Thread(target=train)
        trainer.start()
        children = []
        for _ in range(5):
            children.append(os.fork())
            if children[-1] == 0:
                plane.forget_in_child()
                os._exit(0)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 5
        trainer.join(SOON_S)
        assert plane.step_of(peer.own) == steps
        assert plane.is_complete(peer.own)


@contextlib.contextmanager
def ended_with_a_child(begin: Callable[[socket.socket], Plane]) -> Iterator[socket.socket]:
    """The other end of what a process began a plane with, that ends while its fork lives."""
    ours, theirs = socket.socketpair()
    hear, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            plane = begin(theirs)
            child = os.fork()
            if child == 0:
                plane.forget_in_child()
                os.write(tell, b"%d" % os.getpid())
                time.sleep(2 * SOON_S)
        finally:
            os._exit(0)
    theirs.close()
    child = int(os.read(hear, 20))
    try:
        yield ours
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(pid, 0)
        for descriptor in (hear, tell):
            os.close(descriptor)
        ours.close()


def test_a_peer_sees_the_end_of_a_process_whose_forked_child_lives() -> None:
    def begin(sock: socket.socket) -> Plane:
        plane = Plane(manifest(), Config(), rank=0, servers=(0,))
        stream = plane.server_stream(sock, "rank 1", 0)
        assert isinstance(stream, PlaneStream)
        stream.carry(1)
        return plane

    with ended_with_a_child(begin) as ours:
        ours.settimeout(SOON_S)
        assert ours.recv(1) == b""


def test_it_is_seen_on_an_encrypted_connection(tmp_path: Path) -> None:
    """The forked child keeps nothing of the way to the process that encrypts."""
    settings: Any = {"encryption": "tls", "secret_file": secret_file(tmp_path)}
    config = Config(join_timeout_s=60.0, **settings)
    channel = Channel(Subject("a-session", "server 0", True), 1, bytes(64))

    def begin(sock: socket.socket) -> Plane:
        plane = EncryptedPlane(manifest(), config, rank=0, servers=(0,))
        stream = plane.server_stream(sock, "rank 1", 0, channel)
        stream.send(b"x" * 28, memoryview(b""))
        return plane

    with ended_with_a_child(begin) as ours:
        stream = EncryptedStream(ours, "server 0", channel, config, accepts=False)
        try:
            assert stream.receive_into(memoryview(bytearray(29))) == 28
        finally:
            stream.close()


class Interrupted(Exception):
    """What a signal's handler raises."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("call", ["wait", "flush"])
def test_signals_are_handled_while_the_training_thread_waits(
    call: str, number: signal.Signals
) -> None:
    """Within 0.1 s; what it waits for would not come in a minute."""

    def interrupt(*_: Any) -> None:
        raise Interrupted

    def go_on_waiting(plane: Plane, parameter: int) -> None:
        while True:
            if call == "wait":
                plane.wait(parameter, 60.0)
            else:
                plane.flush(60.0)

    with running() as (plane, peer):
        peer.carry()
        Own(plane).push(peer.other, 1)
        plane.message(1, Kind.BLOB, 1, 0, 0, bytes(4_000_000), 0)  # which nobody reads
        before = signal.signal(number, interrupt)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), number))
        started = time.monotonic()
        timer.start()
        try:
            with pytest.raises(Interrupted):
                go_on_waiting(plane, peer.other)
            assert time.monotonic() - started < SOON_S
        finally:
            signal.signal(number, before)
            timer.join()


def test_calls_for_what_is_gone_or_never_was_are_harmless() -> None:
    library = maybe_library()
    assert library is not None
    with running() as (plane, peer):
        peer.carry()
        number = peer.at_server._number  # type: ignore[attr-defined]
        peer.at_server.close()
        room, lost = (ctypes.c_int64 * 64)(), ctypes.c_int64()
        with plane as native:
            for gone in (number, 77):
                library.fp_carry(native, gone, 1)
                library.fp_bound(native, gone, 1, 100_000)
                library.fp_pace(native, gone, 0, 0, 1e-9)
                library.fp_release(native, gone)
                assert library.fp_read(native, gone, room, 64) == 0
                assert library.fp_write(native, gone, room, 36, None, 0) == errno.EBADF
                text = ctypes.create_string_buffer(64)
                assert library.fp_end(native, gone, room, text, 64) == 1
            for index in (1, -7):  # another's server, and nobody's
                library.fp_left(native, index, 0)
                library.fp_tell_begins(native, index)
                assert library.fp_snapshot(native, index, room, 64) == 0
                assert library.fp_spans(native, index, room, 2, ctypes.byref(lost)) == 0
                assert library.fp_same_batch(native, index) == 0
                library.fp_last_push(native, index, 0, room)
                assert room[0] == -1
            library.fp_last_push(native, 0, 9, room)
            assert room[0] == -1
    own = Own(plane)
    with pytest.raises(TransportError):
        own.push(0, 1)
    plane.wait(0, 1.0)
    plane.flush(1.0)
    plane.ring()
    plane.message(1, Kind.BYE, 1, 0, 0, b"", 0)
    plane.peer_left(0, 1)
    plane.draw(0)
    assert (plane.snapshot(0), plane.missing(0)) == ([], [])
    assert (plane.last_push(0, 1), plane.same_batch(0), plane.is_complete(0)) == (None, 0, False)


def test_a_reply_of_another_servers_slice_is_refused() -> None:
    """Else it would be written where the training thread may have moved on."""
    with running() as (plane, peer):
        peer.carry()
        Own(plane).push(peer.own, 1)
        peer.to_worker.sendall(frame(Kind.REPLY, peer.own, 1, bytes(SIZE)))
        with pytest.raises(RemoteProtocolError, match="belongs to server 0"):
            received(peer.at_worker, 1)


def test_a_push_of_its_own_rank_is_not_taken_from_a_socket() -> None:
    """There is no gradient of it in memory then."""
    with running() as (_, peer):
        peer.carry()
        own = push(peer.own, 1, ONES, rank=0)
        peer.loops[0].send(own[:HEADER_BYTES], memoryview(own)[HEADER_BYTES:])
        with pytest.raises(RemoteProtocolError, match="own rank has come from a socket"):
            received(peer.loops[1], 1)


def test_a_parameter_is_not_complete_before_its_gradient_has_left() -> None:
    """A server may answer what it has not read; the memory stays in use until it has."""
    elems = 2_000_000
    infos = tuple(msgspec.structs.replace(i, shape=(elems,)) for i in manifest().parameters)
    knobs = Config(slice_elems=elems).knobs(2)
    plane = Plane(manifest(parameters=infos, knobs=knobs), Config(), rank=0, servers=(0,))
    peer = Peer(plane)
    try:
        peer.carry()
        gradient, room = np.ones(elems, np.float32), np.zeros(elems, np.float32)
        event = GradientReady(peer.other, 1, Flag.GRADIENT, False)
        plane.push(event, gradient.data.cast("B"), room.data.cast("B"))
        average = np.full(elems, 2, np.float32)
        peer.to_worker.sendall(frame(Kind.REPLY, peer.other, 1, average.tobytes()))
        deadline = time.monotonic() + SOON_S
        while plane.statistics()[2] == 0:  # replies that have come
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not plane.is_complete(peer.other)
        assert peer.read(peer.to_worker)[1] == gradient.tobytes()
        while not plane.is_complete(peer.other):
            assert time.monotonic() < deadline
            plane.wait(peer.other, 1.0)
        assert room.tobytes() == average.tobytes()
    finally:
        peer.close()
        plane.close()


def paced(plane: Plane, folder: Path, rate_bits_per_s: float) -> tuple[Peer, Link, Link]:
    """Rank 1's connections, which pass the emulated links of rank 0's node."""
    links = Link(rate_bits_per_s, folder / "egress"), Link(rate_bits_per_s, folder / "ingress")
    peer = Peer(plane)
    for stream in (peer.at_server, peer.at_worker):
        about = links[0].descriptor, links[1].descriptor, links[0].seconds_per_byte
        assert stream.pace(*about)
    peer.carry()
    return peer, *links


def free_at_s(link: Link) -> float:
    return float(np.frombuffer(os.pread(link.descriptor, 8, 0))[0])


@pytest.mark.parametrize("elems", [ELEMS, 40_000])
def test_an_emulated_link_is_as_long_taken_as_its_rate_says(tmp_path: Path, elems: int) -> None:
    """Both ways, by all connections together; the bytes are what they are without it."""
    made = manifest()
    shapes = [msgspec.structs.replace(info, shape=(elems,)) for info in made.parameters]
    plane = Plane(
        msgspec.structs.replace(made, parameters=tuple(shapes)), Config(), rank=0, servers=(0,)
    )
    rate_bits_per_s = 80e6
    peer, egress, ingress = paced(plane, tmp_path, rate_bits_per_s)
    own = Own(plane, elems)
    began_s = time.monotonic()
    try:
        ones, passed = np.ones(elems, dtype=np.float32), 0
        for step in (1, 2, 3):
            for parameter in (peer.own, peer.other):
                own.push(parameter, step)
            peer.to_server.sendall(push(peer.own, step, ones))
            header, data = peer.read(peer.to_worker)
            assert data == own.gradients[peer.other].tobytes()
            peer.to_worker.sendall(frame(Kind.REPLY, peer.other, step, ones.tobytes()))
            _, average = peer.read(peer.to_server)
            assert average == ((own.gradients[peer.own] + ones) / 2).tobytes()
            for parameter in (peer.own, peer.other):
                own.wait(parameter)
            passed += 2 * (HEADER_BYTES + header.payload_bytes)  # a push and an average each way
        assert own.rooms[peer.other].tobytes() == ones.tobytes()
        for link in (egress, ingress):
            took_s = passed * 8 / rate_bits_per_s
            assert free_at_s(link) >= began_s + took_s - 3 * SLACK_S
            assert time.monotonic() >= free_at_s(link) - SLACK_S  # nothing is ahead of its link
    finally:
        peer.close()
        plane.close()
        for link in (egress, ingress):
            link.close()


def test_behind_an_emulated_link_the_most_urgent_frame_is_next(tmp_path: Path) -> None:
    elems, slices = 3_000, 40
    config = Config(slice_elems=elems)
    made = manifest(knobs=config.knobs(2))
    shapes = (elems,), (slices * elems,)
    infos = [
        msgspec.structs.replace(info, shape=shape)
        for info, shape in zip(made.parameters, shapes, strict=True)
    ]
    plane = Plane(
        msgspec.structs.replace(made, parameters=tuple(infos)), config, rank=0, servers=(0,)
    )
    peer, egress, ingress = paced(plane, tmp_path, 20e6)  # 5 ms a slice
    try:
        rooms = [np.zeros(shape, dtype=np.float32) for shape in shapes]
        for parameter in (1, 0):  # as a backward pass comes to them
            room = rooms[parameter].data.cast("B")
            plane.push(GradientReady(parameter, 1, Flag.GRADIENT, False), room, room)
        numbers = [n for n, piece in enumerate(plane.slices) if piece.server == 1]
        came = [peer.read(peer.to_worker)[0].slice for _ in numbers]
        assert sorted(came) == numbers
        urgent = [n for n in numbers if plane.slices[n].parameter == 0]
        assert all(came.index(n) <= 3 for n in urgent)
        assert [n for n in came if n not in urgent] == sorted(set(numbers) - set(urgent))
    finally:
        peer.close()
        plane.close()
        for link in (egress, ingress):
            link.close()


def test_who_has_waited_for_room_and_has_nothing_more_to_send_sleeps() -> None:
    """The kernel says that there is room for as long as it is asked."""
    with running() as (plane, peer):
        peer.carry()
        assert isinstance(peer.at_worker, PlaneStream)
        bound_send_buffer(peer.at_worker._sock, 8_192)
        peer.at_worker._set_bound(waits=True, most_bytes=0)
        room = select.poll()
        room.register(peer.at_worker._sock, select.POLLOUT)
        plane.message(1, Kind.PACE, 1, 0, 0, bytes(6_000), 0)
        deadline = time.monotonic() + SOON_S
        while room.poll(0):  # until it is with the kernel, which has no more room then
            assert time.monotonic() < deadline
        time.sleep(0.1)
        assert len(peer.read(peer.to_worker)[1]) == 6_000
        assert room.poll(1000)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.2


@pytest.mark.parametrize("adapts", [True, False])
def test_small_frames_that_leave_together_are_few_where_the_kernel_may_hold_little(
    adapts: bool,
) -> None:
    """What has been let go is not overtaken, no more than what the kernel holds."""
    elems, slices = 1_000, 100
    config = Config(slice_elems=elems, **({} if adapts else {"unsent_bytes": 16_384}))
    made = manifest(knobs=config.knobs(2))
    shapes = (2 * elems,), (slices * elems,)
    infos = [
        msgspec.structs.replace(info, shape=shape)
        for info, shape in zip(made.parameters, shapes, strict=True)
    ]
    plane = Plane(
        msgspec.structs.replace(made, parameters=tuple(infos)), config, rank=0, servers=(0,)
    )
    peer = Peer(plane)
    peer.carry()
    try:
        assert isinstance(peer.at_worker, PlaneStream)
        bound_send_buffer(peer.at_worker._sock, 16_384)
        if adapts:
            peer.at_worker.adapt(16_384)
        rooms = [np.zeros(shape, dtype=np.float32) for shape in shapes]
        room = rooms[1].data.cast("B")
        plane.push(GradientReady(1, 1, Flag.GRADIENT, False), room, room)
        numbers = [n for n, piece in enumerate(plane.slices) if piece.server == 1]
        came = [peer.read(peer.to_worker)[0].slice for _ in range(10)]  # the kernel is full
        room = rooms[0].data.cast("B")
        plane.push(GradientReady(0, 1, Flag.GRADIENT, False), room, room)
        came += [peer.read(peer.to_worker)[0].slice for _ in numbers[10:]]
        assert sorted(came) == numbers
        urgent = [n for n in numbers if plane.slices[n].parameter == 0]
        kernels, together, leaving = 16_384 // 4_000, 8_192 // 4_000, 1
        assert max(came.index(n) for n in urgent) <= 10 + kernels + together + leaving + len(urgent)
    finally:
        peer.close()
        plane.close()


def test_of_each_slice_it_tells_what_has_happened_and_when() -> None:
    with running() as (plane, peer):
        peer.carry()
        own = Own(plane)
        heard: dict[int, list[SliceSpan]] = {plane.WORKER: [], 0: []}
        for index, spans in heard.items():
            plane.tell(index, spans.append)
        began_ns = time.perf_counter_ns()
        own.push(peer.own, 1)
        own.push(peer.other, 1)
        peer.read(peer.to_worker)
        peer.to_worker.sendall(frame(Kind.REPLY, peer.other, 1, ONES.tobytes()))
        peer.to_server.sendall(push(peer.own, 1, ONES))
        peer.read(peer.to_server)
        for parameter in (peer.own, peer.other):
            own.wait(parameter)
        deadline = time.monotonic() + SOON_S
        while len(heard[0]) < 7 and time.monotonic() < deadline:  # what has left is told later
            time.sleep(0.01)
            plane.draw(0)
        plane.draw(plane.WORKER)
        ended_ns = time.perf_counter_ns()
    stages = {
        index: sorted((span.stage.value, span.slice_, span.peer, span.size_bytes) for span in spans)
        for index, spans in heard.items()
    }
    assert stages[plane.WORKER] == sorted(
        [(Stage.PARAMETER_READY.value, parameter, -1, 0) for parameter in (0, 1)]
        + [
            (stage.value, slice_, server, SIZE)
            for stage in (Stage.PUSH_QUEUED, Stage.PUSH_SENT, Stage.REPLY_RECEIVED)
            for slice_, server in ((peer.own, 0), (peer.other, 1))
        ]
    )
    assert stages[0] == sorted(
        [(Stage.UPDATED.value, peer.own, -1, 0)]
        + [
            (stage.value, peer.own, rank, SIZE)
            for stage in (Stage.PUSH_RECEIVED, Stage.REPLY_QUEUED, Stage.REPLY_SENT)
            for rank in (0, 1)
        ]
    )
    for span in (each for spans in heard.values() for each in spans):
        assert began_ns <= span.start_ns <= span.stop_ns <= ended_ns
        assert span.step == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"plane": "python"}, "plane='python'"),
        ({"elastic": True}, ""),
        ({"elastic": True, "compression": "int8"}, "elastic, with codecs"),
        ({"backup_workers": 1}, "backup workers"),
    ],
    ids=str,
)
def test_what_it_does_not_carry_it_names(changes: dict[str, Any], why: str) -> None:
    changes = dict(changes)
    config = Config.resolve(changes.pop("preset", None), **changes)
    knobs: Knobs = config.knobs(2)
    assert why in why_not(manifest(knobs=knobs), config)
    assert bool(why_not(manifest(knobs=knobs), config)) == bool(why)
