"""What a stranger can do where a secret is set, by the lines of lab/docs/threats.md."""

from __future__ import annotations

import contextlib
import re
import resource
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import foreprop
from foreprop.core.authentication import CHALLENGE_BYTES, OPENING_BYTES, ConnectingSide, Subject
from foreprop.core.wire import Kind
from foreprop.engine import entrance, server
from foreprop.engine.connection import greeting
from foreprop.engine.secret import load_key
from foreprop.engine.world import World
from foreprop.errors import Failure, ForepropError, HandshakeError, StepTimeout
from tests.cluster import run_cluster
from tests.faults.lost_peers import Soon
from tests.faults.seeded_training import SEEDING, train
from tests.faults.wire_peers import SESSION, Client, Session, session
from tests.secretfile import secret_file
from tests.tiers import long_cases


@pytest.fixture
def secret(tmp_path: Path) -> str:
    return secret_file(tmp_path)


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    return secret_file(tmp_path, "other.secret", "fedcba9876543210")


def joins_all_the_same(running: Session) -> None:
    running.join()
    running.make_a_step()
    running.say_goodbye()


# Connections.
def opening(secret_file: str, rank: int = 1) -> bytes:
    side = ConnectingSide(load_key(secret_file), Subject(SESSION, "server 0"), rank, bytes(32))
    return side.opening


def answers(client: Client, data: bytes) -> bytes:
    """All that a server says to these bytes, until it closes the connection."""
    client.raw(data)
    said = b""
    while more := receive(client.sock):
        said += more
    return said


def receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(4096)
    except ConnectionResetError:
        return b""


def test_who_knows_all_but_the_secret_does_not_take_a_rank_s_place(secret: str) -> None:
    """It has the session's id from the store and comes before the true rank 1."""
    with session(joined=False, secret_file=secret) as running:
        stranger = running.stranger(1)
        stranger.hello()
        assert stranger.expect_failure().message.startswith(
            "rank 1 has no secret, server 0 has one: set FOREPROP_SECRET_FILE"
        )
        stranger.expect_end()
        joins_all_the_same(running)


def test_who_has_another_secret_is_told_and_the_right_ones_go_on(secret: str, wrong: str) -> None:
    """The second job of the two that meet at one rendezvous."""
    with session(joined=False, secret_file=secret) as running:
        for rank in (0, 1):
            with pytest.raises(HandshakeError, match=f"rank {rank} and server 0 have different"):
                running.stranger(rank).authenticate(wrong)
        with pytest.raises(HandshakeError, match="or mean different sessions"):
            running.stranger(1).authenticate(secret, session="another")
        with pytest.raises(HandshakeError, match="or mean different sessions"):
            running.stranger(1).authenticate(secret, target="server 1")
        joins_all_the_same(running)


def test_a_server_without_the_secret_is_told(secret: str) -> None:
    with session(joined=False) as running:
        with pytest.raises(HandshakeError, match="rank 1 has a secret, server 0 has none: set"):
            running.stranger(1).authenticate(secret)
        joins_all_the_same(running)


def test_a_server_that_waits_in_vain_says_whom_it_has_refused(secret: str) -> None:
    with session(joined=False, secret_file=secret, join_timeout_s=1.0) as running:
        running.stranger(1).hello()
        running.wait()
        (failure,) = running.failure
        assert failure is not None
        assert "it has refused a connection: rank 1 has no secret" in failure.message


def test_a_late_greeting_does_not_end_a_session(secret: str) -> None:
    """Neither a stranger's, nor one of somebody who has the secret."""
    with session(secret_file=secret) as running:
        running.make_a_step()
        stranger = running.stranger(5)
        stranger.hello()
        assert "rank 5 has no secret" in stranger.expect_failure().message
        late = running.stranger(5)
        late.authenticate(secret)
        late.hello()
        assert "the session has begun without it" in late.expect_failure().message
        late.expect_end()
        running.make_a_step()
        running.say_goodbye()


def test_who_has_shown_one_rank_does_not_greet_as_another(secret: str) -> None:
    with session(joined=False, secret_file=secret) as running:
        odd = running.stranger(1)
        odd.authenticate(secret)
        odd.rank = 0
        odd.hello()
        odd.expect_end()
        joins_all_the_same(running)


def test_a_stranger_hears_one_challenge_and_no_more(secret: str) -> None:
    """Of 4 KiB that it sends no more than 76 bytes are read."""
    with session(secret_file=secret) as running:
        said = answers(running.stranger(), opening(secret) + bytes(4096))
        assert len(said) == CHALLENGE_BYTES
        assert answers(running.stranger(), b"GET / HTTP/1.1\r\n\r\n" * 200) == b""
        running.make_a_step()
        running.say_goodbye()


def test_a_proof_that_was_heard_does_not_serve_again(secret: str) -> None:
    with session(joined=False, secret_file=secret) as running:
        heard = Recorded(running.stranger(1).sock)
        true = running.others[-1]
        true.sock = heard  # type: ignore[assignment]
        true.authenticate(secret)
        replay = running.stranger(1)
        assert len(answers(replay, b"".join(heard.sent))) == CHALLENGE_BYTES
        heard.close()
        joins_all_the_same(running)


@pytest.mark.alone
def test_what_authentication_costs(secret: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Once per connection; afterwards its stream is any other's. `pytest -s` shows the time."""
    taken_s = []
    with session(secret_file=secret) as running:
        for _ in range(300):
            with contextlib.closing(Client(running.port, 1)) as client:
                started_s = time.perf_counter()
                client.authenticate(secret)
                taken_s.append(time.perf_counter() - started_s)
        running.say_goodbye()
    median_s = statistics.median(taken_s)
    with capsys.disabled():
        print(f"\nauthentication: {1e6 * median_s:.0f} us in the median of {len(taken_s)}")
    assert median_s < 0.02


class Recorded:
    """A socket that keeps what it sends."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.sent: list[bytes] = []

    def sendall(self, data: bytes) -> None:
        self.sent.append(data)
        self._sock.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def receiving_threads() -> int:
    names = [thread.name for thread in threading.enumerate()]
    return names.count("foreprop-server0-receive")


@pytest.fixture
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if before[1] == resource.RLIM_INFINITY else min(4096, before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(wanted, before[0]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("count", "keyed", "said"),
    [
        (100, True, 20),
        (100, False, 0),
        *[
            pytest.param(1000, keyed, said, marks=pytest.mark.long)
            for keyed in (True, False)
            for said in (0, 20)
        ],
    ],
)
def test_a_thousand_idle_connections_keep_nobody_out(
    secret: str, count: int, keyed: bool, said: int, many_files: None, soon: Soon
) -> None:
    """They cost no thread, and only the last of them are kept."""
    changes = {"secret_file": secret} if keyed else {}
    with session(joined=False, **changes) as running:
        start = opening(secret) if keyed else greeting(SESSION, 1)
        for _ in range(count):
            running.stranger().raw(start[:said])
        joins_at_once(running, soon)


def joins_at_once(running: Session, soon: Soon) -> None:
    started_s = time.monotonic()
    running.join()
    assert soon(time.monotonic() - started_s, entrance.GREETING_S / 2)
    # they have not gone; and both workers have had a place for a moment
    assert 0 <= entrance.MAX_STRANGERS - len(running.server._entrance) <= 2
    assert receiving_threads() == 2
    running.make_a_step()
    running.say_goodbye()


def test_who_has_opened_stays_before_those_who_are_silent(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entrance, "MAX_STRANGERS", 3)
    with session(secret_file=secret) as running:
        opened = running.stranger(1)
        opened.raw(opening(secret))
        assert len(opened.sock.recv(100)) == CHALLENGE_BYTES
        silent = [running.stranger() for _ in range(12)]
        for each in silent[:10]:
            each.expect_end()
        opened.sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            opened.sock.recv(1)
        running.make_a_step()
        running.say_goodbye()


def test_many_who_have_opened_keep_nobody_out(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody can say that much: the oldest of them makes room."""
    monkeypatch.setattr(entrance, "MAX_STRANGERS", 3)
    with session(joined=False, secret_file=secret) as running:
        for _ in range(6):
            opened = running.stranger(1)
            opened.raw(opening(secret))
            assert len(opened.sock.recv(100)) == CHALLENGE_BYTES
        joins_all_the_same(running)


def test_who_does_not_go_on_in_time_is_closed(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "GREETING_S", 2.0)  # workers are in time, too
    monkeypatch.setattr(server, "_MOST_POLL_S", 0.1)
    with session(secret_file=secret) as running:
        for size in (0, 7, OPENING_BYTES - 1, OPENING_BYTES, OPENING_BYTES + 31):
            silent = running.stranger()
            silent.raw((opening(secret) + bytes(32))[:size])
        proven = running.stranger()
        proven.authenticate(secret)
        proven.raw(greeting(SESSION, 0)[:20])
        for each in running.others:
            each.expect_closed()
        running.make_a_step()
        running.say_goodbye()


FRAMES = st.builds(
    lambda kind, payload, extra: (kind, payload, extra),
    st.sampled_from(list(Kind)),
    st.binary(max_size=300),
    st.integers(0, 2**26),
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Session, str]]:
    file = secret_file(tmp_path_factory.mktemp("secret"))
    with session(secret_file=file) as running:
        yield running, file
        running.say_goodbye()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(start=st.integers(0, OPENING_BYTES), data=st.binary(max_size=600))
def test_no_bytes_before_authentication_touch_a_session(
    begun: tuple[Session, str], start: int, data: bytes
) -> None:
    """Any, after any part of a true opening: at most a challenge comes back, and the end."""
    running, file = begun
    client = Client(running.port, 1)
    try:
        client.raw(opening(file)[:start] + data)
        with contextlib.suppress(OSError):  # it may have been closed already
            client.sock.shutdown(socket.SHUT_WR)
        said = answers(client, b"")
        assert said == b"" or len(said) == CHALLENGE_BYTES or b"has no secret" in said
    finally:
        client.close()
    running.make_a_step()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(frames=st.lists(FRAMES, min_size=1, max_size=4))
def test_no_frames_before_authentication_touch_a_session(
    begun: tuple[Session, str], frames: list[tuple[Kind, bytes, int]]
) -> None:
    """Of every kind, and of every size that a header can say: one fixed answer, and the end."""
    running, _ = begun
    client = Client(running.port, 1)
    try:
        for kind, payload, extra in frames:
            client.send(kind, payload, says_bytes=len(payload) + extra)
        failure = client.expect_failure()
        assert failure.message.startswith("rank 1 has no secret, server 0 has one")
        client.expect_end()
    finally:
        client.close()
    running.make_a_step()


# Whole sessions, and the store.


LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "servers": (2, 1, {}),
    "several servers": (2, 1, {"servers_per_node": 2}),
    "relays": (4, 2, {"local_aggregation": "on"}),
    "ring": (2, 1, {"architecture": "ring"}),
}


@pytest.mark.parametrize("name", ["ring", *long_cases("servers", "several servers", "relays")])
def test_the_bits_are_those_without_a_secret(name: str, secret: str) -> None:
    size, local_size, changes = LAYOUTS[name]

    def with_secret(world: World) -> list[torch.Tensor]:
        return train(world, secret_file=secret, **changes)

    plain = run_cluster(size, lambda world: train(world, **changes), local_size=local_size)
    found = run_cluster(size, with_secret, local_size=local_size)
    for rank in range(size):
        assert all(map(torch.equal, plain[rank], found[rank]))


def error_of(make: Callable[[], Any]) -> ForepropError | None:
    try:
        make()
    except ForepropError as error:
        return error
    return None


def test_a_rank_without_the_secret_is_told_at_once(secret: str) -> None:
    """Rank 0 waits for the true rank 1, which may still come, and says what it has refused."""

    def work(world: World) -> ForepropError | None:
        # rank 1's limit is longer than `run_cluster` waits
        changes = {} if world.rank else {"secret_file": secret, "join_timeout_s": 3.0}
        return error_of(lambda: train(world, **{"join_timeout_s": 300.0, **changes}))

    zero, one = run_cluster(2, work)
    assert isinstance(one, HandshakeError)
    assert re.search("rank 1 has no secret, and the store's entry 'session/0' is signed", str(one))
    assert isinstance(zero, (StepTimeout, HandshakeError)), zero


@pytest.mark.parametrize("architecture", ["p2p", *long_cases("ring")])
def test_a_rank_with_the_secret_of_another_job_is_told(
    secret: str, wrong: str, architecture: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(world: World) -> ForepropError | None:
        file = wrong if world.rank else secret
        # `run_cluster` does not wait for step_timeout_s
        changes = {"architecture": architecture, "join_timeout_s": 1.5, "step_timeout_s": 300.0}
        return error_of(lambda: train(world, secret_file=file, **changes))

    zero, one = run_cluster(2, work)
    assert isinstance(one, HandshakeError)
    expected = r"rank 1 has a secret, and the store's entry 'session/0' is signed with another"
    assert re.search(expected, str(one))
    assert "another job meets at the same rendezvous: give this one another port" in str(one)
    assert zero is not None
    assert "the store's entry 'session/0' is signed with another secret" in capfd.readouterr().err


def written(world: World, *keys: str, value: bytes = b"") -> None:
    for key in keys:
        world.store.set(key, value.decode())


REFUSED = Failure(kind="HandshakeError", message="a stranger wants an end").encode()
ELSEWHERE = b"127.0.0.1 9"


@pytest.mark.parametrize("architecture", ["p2p", *long_cases("ring")])
def test_what_a_stranger_has_written_into_the_store_changes_nothing(
    secret: str, architecture: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A refusal, another session's announcement, other servers' addresses: the true ones come."""
    prepared, second = threading.Event(), list[World]()

    def work(world: World) -> list[torch.Tensor]:
        if world.rank == 0:
            written(world, "session/0/refused", value=REFUSED)
            written(world, "session/0", value=b'["another-session", {}]')
            written(world, "session/0/server/0", "session/0/server/1", value=ELSEWHERE)
            written(world, "session/0/manifest", value=b"1")
            written(world, "session/0/manifest/0", value=b"{}")
            prepared.set()
            while not (second and has_refused(second[0], "session/0")):
                time.sleep(0.001)
        else:
            prepared.wait(60)
            second.append(world)
        return train(world, secret_file=secret, architecture=architecture)

    plain = run_cluster(2, lambda world: train(world, architecture=architecture))
    found = run_cluster(2, work)
    for rank in range(2):
        assert all(map(torch.equal, plain[rank], found[rank]))
    assert "the store's entry 'session/0' is not signed, and does not count" in (
        capfd.readouterr().err
    )


def has_refused(world: World, key: str) -> bool:
    seals = [entries.seal for entries in (world.entries, world.raw_entries)]
    return any(seal is not None and key in seal._refused for seal in seals)


def test_a_refusal_that_a_stranger_writes_in_mid_training_changes_nothing(secret: str) -> None:
    def work(world: World) -> list[torch.Tensor]:
        with SEEDING:
            torch.manual_seed(0)
            model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        changes: dict[str, Any] = {"architecture": "ring", "secret_file": secret}
        with foreprop.parallelize(model, optimizer, world=world, step_timeout_s=20.0, **changes):
            for step in range(6):
                if step == 2:
                    written(world, "session/0/refused", value=REFUSED)
                optimizer.zero_grad()
                model(torch.ones(2, 6)).sum().backward()
                optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    first, second = run_cluster(2, work)
    assert all(map(torch.equal, first, second))


def test_a_true_entry_that_is_replaced_ends_in_an_error_that_names_it(secret: str) -> None:
    """That much a stranger can do who may write to the store: the training does not begin."""

    def work(world: World) -> ForepropError | None:
        if world.rank == 0:
            return error_of(lambda: train(world, secret_file=secret, join_timeout_s=1.5))
        while not world.store.check(["session/0"]):
            time.sleep(0.005)
        written(world, "session/0", value=b"garbage")
        return error_of(lambda: train(world, secret_file=secret, join_timeout_s=0.8))

    _, one = run_cluster(2, work)
    assert isinstance(one, HandshakeError)
    assert "the store's entry 'session/0' is not signed" in str(one)
