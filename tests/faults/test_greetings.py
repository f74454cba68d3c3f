"""Who greets late, twice or wrongly is refused on its own connection; the session goes on."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from foreprop.core.manifest import ParameterInfo
from foreprop.core.wire import Kind
from foreprop.engine import entrance, server
from foreprop.engine.connection import greeting
from foreprop.engine.pulses import pulse_greeting
from tests.faults.lost_peers import Soon
from tests.faults.relay_peers import MANIFEST, node
from tests.faults.wire_peers import (
    HANGS_S,
    SESSION,
    Client,
    Session,
    manifest_of,
    resident_bytes,
    session,
)
from tests.tiers import long_cases

LATE: dict[str, Callable[[Client], None]] = {
    "a rank of a larger world": lambda c: c.hello(manifest_of(9)),
    "a rank that is there": lambda c: c.hello(),
    "a greeting alone": lambda c: c.greet(),
}


def test_a_late_greeting_is_refused_alone() -> None:
    with session() as running:
        running.make_a_step()
        for greet, rank in itertools.product(LATE.values(), (0, 1, 5)):
            stranger = running.stranger(rank)
            greet(stranger)
            failure = stranger.expect_failure()
            assert failure.kind == "HandshakeError"
            assert f"rank {rank} says hello and the session has begun" in failure.message
            stranger.expect_end()
            running.make_a_step()
        running.say_goodbye()


@pytest.mark.parametrize("begun", [False, True])
def test_who_asks_to_join_what_takes_in_nobody_is_refused_alone(begun: bool) -> None:
    why = "takes in nobody (elastic=True)" if begun else "has not begun"
    with session(joined=begun) as running:
        stranger = running.stranger(1)
        stranger.send(Kind.SERVERS)
        failure = stranger.expect_failure()
        assert failure.kind == "HandshakeError"
        assert f"rank 1 wants to join, and the session {why}" in failure.message
        stranger.expect_end()
        if not begun:
            running.join()
        running.make_a_step()
        running.say_goodbye()


def test_a_late_greeting_to_a_relay_is_refused_alone() -> None:
    with node() as running:
        port = running.workers[0].sock.getpeername()[1]
        for rank in (2, 3, 5):
            stranger = Client(port, rank)
            stranger.hello(MANIFEST)
            assert "the session has begun" in stranger.expect_failure().message
            stranger.close()
        running.make_a_step()


def test_signs_of_life_for_another_session_are_nobodys() -> None:
    with session(silence_report_s=1.0, silence_timeout_s=1.0) as running:
        stranger = running.stranger()
        stranger.raw(pulse_greeting("another-id", 0, "node 0"))
        stranger.expect_closed()
        running.make_a_step()
        running.say_goodbye()


def test_signs_of_life_of_a_rank_that_there_is_not_are_not_missed() -> None:
    with session(silence_report_s=1.0, silence_timeout_s=1.0) as running:
        stranger = running.stranger()
        stranger.raw(pulse_greeting(SESSION, 7, "node 7"))
        stranger.expect_closed()  # after a second
        running.make_a_step()
        running.say_goodbye()


def test_a_rank_whose_signs_of_life_stay_away_ends_the_session_with_its_name() -> None:
    """Its own connection is as it was. What it says of itself is told without odd characters."""
    with session(silence_report_s=1.0, silence_timeout_s=1.0) as running:
        running.stranger().raw(pulse_greeting(SESSION, 1, "node 3, host \x1bn"))
        running.make_a_step()
        for worker in running.workers:
            failure = worker.expect_failure()
            assert failure.kind == "PeerLost"
            assert failure.peer == "rank 1"
            assert failure.message.startswith(
                "rank 1 (node 3, host n at 127.0.0.1) is gone: server 0 has heard nothing of it"
                " for 1 s (silence_timeout_s); its last push was b of step 1"
            )
        running.wait()


def test_who_comes_in_a_place_is_not_missed_for_the_one_before_it() -> None:
    with session(joined=False, silence_report_s=1.0, silence_timeout_s=1.0) as running:
        before = running.stranger(1)
        before.raw(pulse_greeting(SESSION, 1, "node 1"))
        deadline = time.monotonic() + HANGS_S
        while not len(running.server.pulses):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.join()
        before.expect_closed()
        running.make_a_step()
        running.say_goodbye()


def joins_all_the_same(running: Session) -> None:
    running.join()
    running.make_a_step()
    running.say_goodbye()


def greet_and(client: Client, then: Callable[[], None]) -> None:
    client.greet()
    then()


IMPOSSIBLE: dict[str, Callable[[Client], None]] = {
    "not JSON": lambda c: greet_and(c, lambda: c.send(Kind.MANIFEST, b"\xff\x00 no")),
    "deep JSON": lambda c: greet_and(c, lambda: c.send(Kind.MANIFEST, b"[" * 200_000)),
    "no parameters": lambda c: c.hello(manifest_of(parameters=())),
    "a smaller world": lambda c: c.hello(manifest_of(1)),
    "an endless world": lambda c: c.hello(manifest_of(2**40)),
    "endless servers": lambda c: c.hello(manifest_of(servers=2**40)),
    "a push": lambda c: greet_and(c, lambda: c.send(Kind.PUSH, b"x" * 24, step=1)),
    "gone again": lambda c: greet_and(c, lambda: c.sock.shutdown(1)),
}


def test_workers_can_join_after_strangers_with_their_ranks() -> None:
    with session(joined=False) as running:
        for say in IMPOSSIBLE.values():
            stranger = running.stranger(1)
            say(stranger)
            stranger.expect_end()
        joins_all_the_same(running)


def test_ranks_and_manifests_of_another_world_are_refused_alone() -> None:
    """The server knows its world before the first worker comes."""
    with session(joined=False) as running:
        running.server._reception._world_size = 2
        for rank, world_size, says in [
            (5, 9, "rank 5 of 2"),
            (5, 2, "rank 5 of 2"),
            (1, 9, "rank 1 of 9 in a world of 2"),
        ]:
            stranger = running.stranger(rank)
            stranger.hello(manifest_of(world_size))
            assert says in stranger.expect_failure().message
            stranger.expect_end()
        joins_all_the_same(running)


def test_a_second_rank_1_is_told_and_the_first_goes_on() -> None:
    with session(joined=False) as running:
        first, second = running.stranger(1), running.stranger(1)
        first.hello()
        while 1 not in running.server._peers:
            time.sleep(0.001)
        second.hello()
        assert "two workers say that they are rank 1" in second.expect_failure().message
        zero = running.stranger(0)
        zero.hello()
        for worker in (zero, first):
            worker.expect(Kind.WELCOME)


def test_idle_connections_shut_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest makes room, so there are never many, and workers come through."""
    monkeypatch.setattr(entrance, "MAX_STRANGERS", 5)
    with session(joined=False) as running:
        idle = [running.stranger() for _ in range(30)]
        for silent in idle[:25]:
            silent.expect_end()
        await_receiving_threads(7)
        joins_all_the_same(running)


def test_who_does_not_greet_in_time_loses_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "GREETING_S", 2.0)  # workers are in time, too
    monkeypatch.setattr(server, "_MOST_POLL_S", 0.1)
    with session() as running:
        idle = [running.stranger() for _ in range(5)]
        for half, silent in enumerate(idle):
            silent.raw(greeting(SESSION, 1)[: half * 7])
        for silent in idle:
            silent.expect_end()
        await_receiving_threads(2)
        running.make_a_step()
        running.say_goodbye()


def await_receiving_threads(most: int) -> None:
    """A connection's end is seen before its thread's."""
    while receiving_threads() > most:
        time.sleep(0.001)


def receiving_threads() -> int:
    names = [thread.name for thread in threading.enumerate()]
    return names.count("foreprop-server0-receive")


@pytest.mark.parametrize("strangers", [5, *long_cases(40)])
def test_what_a_stranger_says_is_neither_kept_nor_decoded(strangers: int, soon: Soon) -> None:
    """Connections with as much as they can say take no memory, and no time of a step's."""
    with session() as running:
        running.make_a_step()
        before = resident_bytes()
        for _ in range(strangers):
            stranger = running.stranger(1)
            stranger.send(Kind.HELLO, b"[" * 100_000, says_bytes=2**26)
        started = time.monotonic()
        running.make_a_step()
        assert soon(time.monotonic() - started, 2.0)
        assert resident_bytes() - before < 2**25
        running.say_goodbye()


@pytest.mark.parametrize(
    ("count", "layers"), [(300, 600), pytest.param(5_000, 9, marks=pytest.mark.long)]
)
def test_the_manifest_of_a_model_with_many_parameters_fits(count: int, layers: int) -> None:
    """Or with long names; each in a group of its own: larger than a greeting may ever be."""
    with session(joined=False) as running:
        made = manifest_of()
        groups = made.optimizer.groups * count
        parameters = tuple(
            ParameterInfo(
                name=f"{'layer.' * layers}{n}.weight", shape=(6,), dtype="float32", group=n
            )
            for n in range(count)
        )
        optimizer = msgspec.structs.replace(made.optimizer, groups=groups)
        made = msgspec.structs.replace(made, parameters=parameters, optimizer=optimizer)
        assert len(made.encode()) > 2**20
        workers = [running.stranger(rank) for rank in range(2)]
        for worker in workers:
            worker.hello(made)
        for worker in workers:
            worker.expect(Kind.WELCOME)
