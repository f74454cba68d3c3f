"""Servers and workers that break the rules towards a relay: all are told, and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foreprop.core.wire import Flag, Kind
from foreprop.errors import Failure
from tests.faults.lost_peers import often
from tests.faults.relay_peers import node
from tests.faults.wire_peers import Client, FakeServer, gradient

WRONG: dict[str, Callable[[FakeServer], None]] = {
    "noise": lambda server: server.raw(b"GET / HTTP/1.1\r\n" * 5),
    "another server's frame": lambda server: server.send(Kind.NOTIFY, rank=1),
    "a reply that nobody awaits": lambda server: server.send(Kind.REPLY, gradient(1.0), step=2),
    "a reply for no slice": lambda server: server.send(Kind.REPLY, step=1, slice_=77),
    "a notice": lambda server: server.send(Kind.NOTIFY, step=1),
    "a worker's frame": lambda server: server.send(Kind.PUSH, gradient(1.0), step=2),
    "a part of the norm": lambda server: server.send(Kind.NORM_PART, bytes(34)),
    "a state that nobody wants": lambda server: server.send(Kind.STATE_REPLY, b"x"),
    "a state of no slice": lambda server: server.send(Kind.STATE_REPLY, slice_=99),
    "a status that nobody wants": lambda server: server.send(Kind.STATUS_REPLY, b"x"),
    "rows that nobody wants": lambda server: server.send(Kind.ROWS_REPLY, b"x", step=1),
    "a blob that is not there": lambda server: server.send(Kind.BLOB_REPLY, slice_=9),
    "too much": lambda server: server.send(Kind.WELCOME, says_bytes=2**31),
    "an odd failure": lambda server: server.send(Kind.FAILURE, b"{}"),
}


@pytest.mark.parametrize(
    "name",
    often(
        WRONG,
        "noise",
        "another server's frame",
        "a reply that nobody awaits",
        "a notice",
        "a state that nobody wants",
        "too much",
        "an odd failure",
    ),
)
def test_a_server_that_breaks_the_rules_ends_the_session(name: str) -> None:
    with node() as running:
        running.make_a_step()
        WRONG[name](running.server)
        for worker in running.workers:
            assert worker.expect_failure().kind == "RemoteProtocolError"


@pytest.mark.parametrize("size_bytes", [0, 12, 23, 48])
def test_a_reply_of_another_size_is_refused(size_bytes: int) -> None:
    with node() as running:
        for worker in running.workers:
            worker.send(Kind.PUSH, gradient(1.0), step=1)
        running.server.expect(Kind.PUSH)
        running.server.send(Kind.REPLY, bytes(size_bytes), step=1)
        failure = running.workers[0].expect_failure()
        assert f"slice 0 carries {size_bytes} bytes, not 24" in failure.message


def test_a_server_that_is_gone_is_named() -> None:
    with node() as running:
        running.make_a_step()
        running.server.close()
        for worker in running.workers:
            failure = worker.expect_failure()
            assert (failure.kind, failure.peer) == ("PeerLost", "server 0")
            assert failure.message.startswith("server 0 is gone")


def test_a_worker_that_is_gone_is_named() -> None:
    with node() as running:
        running.make_a_step()
        running.workers[1].close()
        for client in (running.workers[0], running.server):
            failure = client.expect_failure()
            assert (failure.kind, failure.peer) == ("PeerLost", "rank 3")


def test_a_server_s_failure_is_passed_on() -> None:
    told = Failure(kind="PeerLost", message="rank 0 is gone", peer="rank 0", step=3)
    with node() as running:
        running.server.send(Kind.FAILURE, told.encode())
        assert [worker.expect_failure() for worker in running.workers] == [told, told]


WORKERS_WRONG: dict[str, tuple[Callable[[Client], None], str]] = {
    "a push of another size": (lambda w: w.send(Kind.PUSH, b"1234", step=1), "4 bytes, not 24"),
    "values": (lambda w: w.send(Kind.VALUE, gradient(1.0), step=1), "only rank 0 may"),
    "a norm": (lambda w: w.send(Kind.NORM, bytes(8), step=1), "sent NORM; only rank 0 may"),
    "a state": (lambda w: w.send(Kind.STATE, b"", step=1), "sent STATE; only rank 0 may"),
    "buffers": (lambda w: w.send(Kind.BLOB, bytes(8), step=1), "sent BLOB; only rank 0 may"),
    "an empty push with bytes": (
        lambda w: w.send(Kind.PUSH, b"1234", step=1, flags=Flag.NO_GRADIENT),
        "4 bytes, not 0",
    ),
}


@pytest.mark.parametrize("name", WORKERS_WRONG)
def test_a_worker_that_breaks_the_rules_is_named_to_the_server(name: str) -> None:
    say, reason = WORKERS_WRONG[name]
    with node() as running:
        say(running.workers[1])
        for client in (*running.workers, running.server):
            failure = client.expect_failure()
            assert failure.kind == "RemoteProtocolError"
            assert failure.message.startswith("rank 3 broke the protocol")
            assert reason in failure.message
