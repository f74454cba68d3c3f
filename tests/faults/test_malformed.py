"""Bytes that the protocol does not allow: an error on the right side, and nobody else is hurt."""

from __future__ import annotations

import contextlib
import re
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from foreprop.core.manifest import ParameterInfo
from foreprop.core.rowinit import row_init_of
from foreprop.core.wire import HEADER_BYTES, MAX_CONTROL_BYTES, Damage, Flag, Kind, sealed
from foreprop.engine.connection import greeting
from foreprop.engine.entrance import MAX_GREETING_BYTES
from foreprop.engine.stream import load_checksum
from foreprop.engine.tensors import encode_state
from foreprop.errors import PeerLost, RemoteProtocolError
from foreprop.features.tables.parts import VALUES, KeptRows, encode_kept
from tests.faults.lost_peers import often
from tests.faults.wire_peers import (
    GROUP,
    SESSION,
    Client,
    FakeServer,
    engine,
    frame,
    gradient,
    manifest_of,
    resident_bytes,
    session,
)
from tests.tiers import long_cases

HELLO = greeting(SESSION, 0)


def header_with(**fields: int) -> bytes:
    values = {"magic": 0xF0E9, "version": 3, "kind": 1, "payload": 0, **fields}
    fixed = (values["magic"], values["version"], values["kind"], 0, 0, 0, 0, 0, values["payload"])
    return sealed(struct.pack("!HBBHHQIiI", *fixed), b"", load_checksum())


STRANGERS: dict[str, tuple[Callable[[Client], None], str]] = {
    "garbage": (
        lambda c: c.raw(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 3),
        "not a foreprop peer",
    ),
    "wrong magic": (lambda c: c.raw(header_with(magic=0x1234)), "magic is 0x1234"),
    "wrong version": (lambda c: c.raw(header_with(version=77)), "protocol version 77"),
    "unknown kind": (lambda c: c.raw(header_with(kind=99)), "unknown frame kind 99"),
    "oversized": (
        lambda c: c.raw(header_with(payload=MAX_GREETING_BYTES + 1)),
        f"HELLO of {MAX_GREETING_BYTES + 1} bytes; at most {MAX_GREETING_BYTES}",
    ),
    "push first": (lambda c: c.send(Kind.PUSH, gradient(1.0), step=1), "PUSH, not HELLO"),
    "goodbye first": (lambda c: c.send(Kind.BYE), "BYE, not HELLO"),
    "failure first": (lambda c: c.send(Kind.FAILURE, b"{}"), "FAILURE, not HELLO"),
    "not an id": (lambda c: c.send(Kind.HELLO, b"\xff\x00 no"), "another session: b'\\xff"),
    "another session": (lambda c: c.hello(manifest_of(session="x")), "another session: b'x'"),
    "manifest first": (lambda c: c.send(Kind.MANIFEST, manifest_of().encode()), "not HELLO"),
}


def test_strangers_are_turned_away_and_training_goes_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with session() as running:
        for say, _ in STRANGERS.values():
            stranger = running.stranger()
            say(stranger)
            stranger.expect_end()
            running.make_a_step()
        running.say_goodbye()
    told = re.findall("server 0: a stranger broke the protocol: (.*)", capfd.readouterr().err)
    assert len(told) == len(STRANGERS)
    for line, (name, (_, reason)) in zip(told, STRANGERS.items(), strict=True):
        assert reason in line, name


def test_strangers_that_leave_in_mid_frame_are_forgotten() -> None:
    with session() as running:
        for data in (b"", HELLO[:5], HELLO[:-1], HELLO):
            stranger = running.stranger()
            stranger.raw(data)
            stranger.close()
            running.make_a_step()
        running.say_goodbye()


@pytest.mark.parametrize("steps", [20, *long_cases(200)])
def test_strangers_come_and_go_while_training(steps: int) -> None:
    """Many at a time, some silent for ever; each step's result is the right one."""
    with session() as running:
        stop = threading.Event()

        def disturb() -> None:
            while not stop.is_set():
                for say, _ in STRANGERS.values():
                    client = Client(running.port)
                    say(client)
                    client.close()

        thread = threading.Thread(target=disturb)
        thread.start()
        silent = [running.stranger() for _ in range(20)]
        for _ in range(steps):
            running.make_a_step()
        stop.set()
        thread.join(60)
        assert len(silent) == 20
        running.make_a_step()
        running.say_goodbye()


def test_a_stranger_that_says_nothing_is_closed_in_time() -> None:
    with session(join_timeout_s=2.0) as running:  # in which workers join, too
        running.stranger().expect_end()
        running.make_a_step()
        running.say_goodbye()


def test_announced_bytes_take_no_memory_until_they_come() -> None:
    with session() as running:
        tracemalloc.start()
        resident = resident_bytes()
        strangers = [running.stranger() for _ in range(20)]
        for stranger in strangers:
            stranger.raw(header_with(kind=Kind.MANIFEST, payload=MAX_CONTROL_BYTES))
        for stranger in strangers:
            stranger.expect_end()
        running.make_a_step()
        tracemalloc.stop()
        assert resident_bytes() - resident < MAX_CONTROL_BYTES
        running.say_goodbye()


JSON_GROUPS = msgspec.json.encode((GROUP,))
MEMBERS: dict[str, tuple[Callable[[Client], None], str]] = {
    "garbage": (lambda c: c.raw(b"\x00" * HEADER_BYTES), "a frame's header has come damaged"),
    "foreign slice": (
        lambda c: c.send(Kind.PUSH, gradient(1), step=2, slice_=9),
        "slice 9 does not belong",
    ),
    "past step": (lambda c: c.send(Kind.PUSH, gradient(1), step=1), "step 1, which is past"),
    "pushed twice": (
        lambda c: [c.send(Kind.PUSH, gradient(1), step=2) for _ in range(2)] and None,
        "twice in step 2",
    ),
    "too short": (
        lambda c: c.send(Kind.PUSH, gradient(1)[:-4], step=2),
        "carries 20 bytes, not 24",
    ),
    "too long": (
        lambda c: c.send(Kind.PUSH, step=2, says_bytes=2**32 - 1),
        "4294967295 bytes, not 24",
    ),
    "bytes without gradient": (
        lambda c: c.send(Kind.PUSH, gradient(1), step=2, flags=Flag.NO_GRADIENT),
        "carries 24 bytes, not 0",
    ),
    "another's rank": (lambda c: c.send(Kind.PUSH, gradient(1), step=2, rank=0), "frame of rank 0"),
    "second hello": (lambda c: c.hello(), "HELLO"),
    "a server's frame": (lambda c: c.send(Kind.WELCOME), "rank 1 sent WELCOME"),
    "values": (lambda c: c.send(Kind.VALUE, gradient(1), step=2), "only rank 0 may"),
    "pull of a broadcast": (lambda c: c.send(Kind.PULL, step=1), "replies are broadcast"),
    "payload of a pull": (lambda c: c.send(Kind.PULL, b"x", step=1), "PULL carries 1 bytes"),
    "no numbers": (
        lambda c: c.send(Kind.HYPERPARAMETERS, b"nonsense", step=2),
        "not hyperparameters",
    ),
    "other numbers": (
        lambda c: c.send(Kind.HYPERPARAMETERS, b'[{"lr": 1}]', step=2),
        "other names than at the start",
    ),
    "too many numbers": (
        lambda c: c.send(Kind.HYPERPARAMETERS, step=2, says_bytes=1 << 21),
        "HYPERPARAMETERS of 2097152 bytes",
    ),
    "blob": (lambda c: c.send(Kind.BLOB, b"x" * 8, step=2), "only rank 0 may"),
    "no such blob": (lambda c: c.send(Kind.BLOB_PULL, step=2, slice_=5), "no blob 5"),
    "state": (lambda c: c.send(Kind.STATE, b"rubbish", step=2), ""),
    "huge state": (
        lambda c: c.send(Kind.STATE, step=2, says_bytes=2**31),
        "STATE of 2147483648 bytes",
    ),
    "status of nothing": (
        lambda c: c.send(Kind.STATUS_PULL, step=2, slice_=77),
        "slice 77 does not",
    ),
    "norm": (lambda c: c.send(Kind.NORM, b"x" * 8, step=2), "rank 1 sent the norm of step 2"),
    "negative norm": (
        lambda c: c.send(Kind.NORM, struct.pack("!d", -1.0), step=2),
        "the norm of step 2 is -1.0",
    ),
    "long norm": (lambda c: c.send(Kind.NORM, b"x" * 9, step=2), "carries 9 bytes, not 8"),
    "averages": (
        lambda c: c.send(Kind.STATE, encode_state({}), step=2, flags=Flag.AVERAGES),
        "a moving average for slice 0, which has none",
    ),
    "rows of no table": (lambda c: c.send(Kind.TABLE, b"x"), "shard 0 is not of a remote table"),
    "odd failure": (lambda c: c.send(Kind.FAILURE, b"{}"), "not a failure report"),
}


@pytest.mark.parametrize(
    "name",
    often(
        MEMBERS,
        "garbage",
        "foreign slice",
        "pushed twice",
        "too long",
        "another's rank",
        "a server's frame",
        "values",
        "other numbers",
        "huge state",
        "no such blob",
        "negative norm",
        "rows of no table",
        "odd failure",
    ),
)
def test_a_worker_that_breaks_the_rules_ends_the_session_with_its_name(name: str) -> None:
    say, reason = MEMBERS[name]
    with session() as running:
        running.make_a_step()
        say(running.workers[1])
        running.wait()
        for worker in running.workers:
            failure = worker.expect_failure()
            assert failure.kind == "RemoteProtocolError", failure
            assert "rank 1 broke the protocol: " in failure.message
            assert reason in failure.message
            worker.expect_end()
        assert running.failure[0] is not None


def test_ranks_at_different_steps() -> None:
    with session() as running:
        running.workers[0].send(Kind.PUSH, gradient(1), step=1)
        running.workers[1].send(Kind.PUSH, gradient(1), step=2)
        for worker in running.workers:
            failure = worker.expect_failure()
            assert failure.kind == "TrainingLoopError"
            assert "are at step" in failure.message
            assert "skips a batch" in failure.message
        running.wait()


def test_a_failure_is_understood_before_the_session_has_started() -> None:
    with session(joined=False) as running:
        worker, other = running.stranger(0), running.stranger(1)
        worker.hello(manifest_of(3))
        other.rank = 1
        other.hello(manifest_of(3))
        worker.send(Kind.FAILURE, b'{"kind": "StepTimeout", "message": "rank 0 waited"}')
        assert other.expect_failure().message == "rank 0 waited"
        running.wait()


@contextlib.contextmanager
def stuck() -> Iterator[tuple[Client, Client]]:
    """Ranks 0 and 1; rank 1 does not read, and the server is in the middle of a reply to it."""
    with session(joined=False) as running:
        manifest = manifest_of()
        big = msgspec.structs.replace(manifest.parameters[0], shape=(3_000_000,))
        knobs = msgspec.structs.replace(manifest.knobs, granularity="array")
        manifest = msgspec.structs.replace(
            manifest, parameters=(big, manifest.parameters[1]), knobs=knobs
        )
        zero = running.stranger(0)
        running.others.append(one := Client(running.port, 1, buffer_bytes=4096))
        for client in (zero, one):
            client.hello(manifest)
        zero.expect(Kind.WELCOME)
        for slice_, size in enumerate((12_000_000, 24)):
            zero.send(Kind.VALUE, bytes(size), slice_=slice_)  # goes on to rank 1
        status_after(zero, b"it is sending to rank 1")
        yield zero, one


def status_after(client: Client, end: bytes) -> bytes:
    """The server's status as soon as it ends so."""
    deadline = time.monotonic() + 60
    while not (text := status_of(client)).endswith(end):
        assert time.monotonic() < deadline, text
    return text


def status_of(client: Client) -> bytes:
    client.send(Kind.STATUS_PULL, step=1, slice_=1)
    return client.expect(Kind.STATUS_REPLY)


def test_the_status_passes_a_reply_that_is_stuck() -> None:
    with stuck() as (zero, _):
        assert status_of(zero).startswith(b"b waits for the push of ranks 0, 1; it is sending to")


def test_a_worker_that_does_not_read_holds_up_no_reply_to_another() -> None:
    with stuck() as (zero, one):
        for client in (zero, one):
            client.send(Kind.HYPERPARAMETERS, msgspec.json.encode((GROUP,)), step=1)
            client.send(Kind.PUSH, gradient(1.0), step=1, slice_=1)
        assert zero.expect(Kind.REPLY) == gradient(-0.5)
        text = status_after(zero, b"it is sending to rank 1")  # no more to rank 0
        assert text.startswith(b"b is updated; replies still queued for ranks [1")


CAST: dict[str, tuple[Callable[[Client], None], str]] = {
    "gradient in full": (
        lambda c: c.send(Kind.PUSH, gradient(1), step=1),
        "carries 24 bytes, not 12",
    ),
    "value that is cast": (
        lambda c: c.send(Kind.VALUE, gradient(1)[:12], step=1),
        "carries 12 bytes, not 24",
    ),
}


@pytest.mark.parametrize("name", CAST)
def test_what_does_not_fit_the_wires_type(name: str) -> None:
    say, reason = CAST[name]
    with session(joined=False) as running:
        worker = running.stranger(0)
        knobs = msgspec.structs.replace(manifest_of().knobs, wire_dtype="bfloat16")
        worker.hello(manifest_of(1, knobs=knobs))
        worker.expect(Kind.WELCOME)
        say(worker)
        assert reason in worker.expect_failure().message
        running.wait()


def test_later_values_before_those_of_the_start() -> None:
    """With staleness they are compared with what rank 0 has read, which is nothing yet."""
    with session(joined=False) as running:
        worker = running.stranger(0)
        knobs = msgspec.structs.replace(manifest_of().knobs, staleness=2)
        worker.hello(manifest_of(1, knobs=knobs))
        worker.expect(Kind.WELCOME)
        worker.send(Kind.VALUE, gradient(1), step=1)
        assert "before those of the start" in worker.expect_failure().message
        running.wait()


TABLE: dict[str, tuple[int, Callable[[Client], None], str]] = {
    "another rank's": (
        1,
        lambda c: c.send(Kind.TABLE, encode_kept(KeptRows(torch.tensor([1]), {}))),
        "rank 1 sent a table's rows; only rank 0 may",
    ),
    "rubbish": (0, lambda c: c.send(Kind.TABLE, b"rubbish"), "7 bytes are no part of a table"),
    "no such row": (
        0,
        lambda c: c.send(Kind.TABLE, encode_kept(KeptRows(torch.tensor([9]), {}))),
        "rows 9 to 9 of 8; they must be there",
    ),
    "a number for rows": (
        0,
        lambda c: c.send(Kind.TABLE, encode_kept(KeptRows(torch.tensor([1]), {VALUES: 3}))),
        "values of rows is 3, not rows",
    ),
    "huge": (0, lambda c: c.send(Kind.TABLE, says_bytes=2**31), "TABLE of 2147483648 bytes"),
    "values": (0, lambda c: c.send(Kind.ROWS_VALUE, bytes(8)), "came for step 0: step 0 is done"),
    "a short pull": (1, lambda c: c.send(Kind.TABLE_PULL, b"x"), "carries 1 bytes, not 8"),
    "a pull beyond": (
        1,
        lambda c: c.send(Kind.TABLE_PULL, struct.pack("!q", 9)),
        "rows from place 9 on, of 8 rows",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_does_not_fit_a_remote_table(name: str) -> None:
    rank, say, reason = TABLE[name]
    info = ParameterInfo(
        name="t", shape=(8, 3), dtype="float32", group=0, rows=True, init=row_init_of("t", None)
    )
    with session(joined=False) as running:
        workers = [running.stranger(0), running.stranger(1)]
        workers[1].rank = 1
        for worker in workers:
            worker.hello(manifest_of(parameters=(info,)))
        for worker in workers:
            worker.expect(Kind.WELCOME)
        say(workers[rank])
        for worker in workers:
            assert reason in worker.expect_failure().message
        running.wait()


# The worker's side.
SERVERS: dict[str, tuple[Callable[[FakeServer], None], str]] = {
    "garbage": (lambda s: s.raw(b"\xaa" * HEADER_BYTES), "a frame's header has come damaged"),
    "nobody asked": (lambda s: s.send(Kind.REPLY, gradient(9), step=1, slice_=1), "not awaited"),
    "no such slice": (lambda s: s.send(Kind.REPLY, gradient(9), step=1, slice_=55), "not awaited"),
    "past step": (lambda s: s.send(Kind.REPLY, gradient(9), step=0, slice_=0), "not awaited"),
    "step to come": (lambda s: s.send(Kind.REPLY, gradient(9), step=2, slice_=0), "not awaited"),
    "too long": (lambda s: s.send(Kind.REPLY, gradient(9) * 2, step=1), "48 bytes where 24 belong"),
    "too short": (lambda s: s.send(Kind.REPLY, b"abcd", step=1), "4 bytes where 24 belong"),
    "another's index": (
        lambda s: s.send(Kind.REPLY, gradient(9), step=1, rank=3),
        "frame of server 3",
    ),
    "a worker's frame": (lambda s: s.send(Kind.PUSH, step=1), "sent PUSH"),
    "notified": (lambda s: s.send(Kind.NOTIFY, step=1), "notification"),
    "norm": (lambda s: s.send(Kind.NORM, b"x" * 8, step=1), "sent rank 0 NORM, which is not"),
    "norm part": (lambda s: s.send(Kind.NORM_PART, b"x" * 34, step=1), "rank 0 NORM_PART, which"),
    "long norm": (lambda s: s.send(Kind.NORM, b"x" * 9, step=1), "NORM of 9 bytes; at most 8"),
    "huge status": (lambda s: s.send(Kind.STATUS_REPLY, says_bytes=1 << 30), "at most 65536"),
    "huge blob": (lambda s: s.send(Kind.BLOB_REPLY, says_bytes=1 << 30), "at most 8"),
    "no failure report": (lambda s: s.send(Kind.FAILURE, b"[]"), "not a failure report"),
}


@pytest.mark.parametrize(
    "name",
    often(
        SERVERS,
        "garbage",
        "nobody asked",
        "too long",
        "another's index",
        "a worker's frame",
        "norm part",
        "huge blob",
        "no failure report",
    ),
)
def test_a_server_that_breaks_the_rules_is_an_error_in_the_training_thread(name: str) -> None:
    say, reason = SERVERS[name]
    with engine() as (made, (fake,)):
        made.push(0, 1)
        assert fake.expect(Kind.PUSH) == gradient(1.0)
        say(fake)
        with pytest.raises(RemoteProtocolError, match=reason):
            made.wait(0, 1)


@pytest.mark.parametrize("size_bytes", [2, 11, 22, 48])
def test_a_reply_that_is_neither_cast_nor_in_full(size_bytes: int) -> None:
    with engine(wire_dtype="float16") as (made, (fake,)):
        made.push(0, 1)
        assert fake.expect(Kind.PUSH) == b"\x00\x3c" * 6
        fake.send(Kind.REPLY, bytes(size_bytes), step=1)
        with pytest.raises(RemoteProtocolError, match=f"{size_bytes} bytes where 12 belong"):
            made.wait(0, 1)


def test_a_reply_that_comes_twice() -> None:
    with engine() as (made, (fake,)):
        for parameter in range(2):
            made.push(parameter, 1)
            fake.expect(Kind.PUSH)
        fake.send(Kind.REPLY, gradient(5), step=1)
        made.wait(0, 1)
        fake.send(Kind.REPLY, gradient(6), step=1)
        with pytest.raises(RemoteProtocolError, match="not awaited"):
            made.wait(1, 1)


def test_a_reply_from_the_wrong_server() -> None:
    with engine(servers=2) as (made, fakes):
        made.push(0, 1)
        fakes[0].expect(Kind.PUSH)
        fakes[1].send(Kind.REPLY, gradient(5), step=1)
        with pytest.raises(RemoteProtocolError, match="belongs to server 0"):
            made.wait(0, 1)


def test_a_reply_cut_in_two_is_a_peer_lost() -> None:
    with engine() as (made, (fake,)):
        made.push(0, 1)
        fake.expect(Kind.PUSH)
        fake.send(Kind.REPLY, gradient(5)[:10], step=1, says_bytes=24)
        fake.sock.shutdown(2)
        with pytest.raises(PeerLost, match=r"server 0 is gone.*parameter a, step 1, stage"):
            made.wait(0, 1)


def test_a_server_that_asks_for_no_slice_of_its_own_is_refused() -> None:
    with engine() as (made, (fake,)):
        made.push(0, 1, flags=int(Flag.GRADIENT))
        fake.send(Kind.DAMAGED, Damage(1, 2, int(Flag.GRADIENT), 0, 24).encode(), step=1, slice_=9)
        with pytest.raises(RemoteProtocolError, match="DAMAGED of slice 9, which is not its own"):
            made.wait(0, 1)


@pytest.mark.parametrize(("changes", "size_bytes"), [(True, 24), (False, 24), (True, 9)])
def test_a_gradient_that_came_damaged_is_sent_as_it_is_now(changes: bool, size_bytes: int) -> None:
    """If it has changed, as another backward pass does; else it was damaged on the way.

    So was what is shorter: a code, of which no gradient's memory is a part.
    """
    with engine() as (made, (fake,)):
        flags = int(Flag.GRADIENT)
        made.push(0, 1, flags=flags)
        sent = fake.expect(Kind.PUSH)
        told = load_checksum()(gradient(2.0) if changes else sent, 0)
        fake.send(Kind.DAMAGED, Damage(told, 7, flags, -3, size_bytes).encode(), step=1)
        if changes and size_bytes == 24:
            frame = fake.receive()
            assert frame is not None
            assert frame[0][:2] + frame[0][3:6] == (Kind.PUSH, flags, 1, 0, -3)
            assert frame[1] == sent
            return
        message = rf"rank 0 to server 0: PUSH of slice 0, step 1 \({size_bytes} bytes\) has come"
        with pytest.raises(RemoteProtocolError, match=message):
            made.wait(0, 1)


# Anything at all.
FRAMES = st.builds(
    lambda kind, flags, rank, step, slice_, priority, payload, said: frame(
        kind, flags, rank, step, slice_, priority, payload, said
    ),
    st.sampled_from(list(Kind)),
    st.integers(0, 7),
    st.integers(0, 2),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(-2, 2),
    st.one_of(
        st.just(b""),
        st.just(gradient(1.0)),
        st.just(manifest_of().encode()),
        st.just(SESSION.encode()),
        st.just(JSON_GROUPS),
        st.binary(max_size=40),
    ),
    st.one_of(st.none(), st.integers(0, 2**32 - 1)),
)
SPEECH = st.lists(st.one_of(FRAMES, st.binary(min_size=1, max_size=60)), min_size=1, max_size=6)
TIERS = pytest.mark.parametrize("examples", [10, *long_cases(40)])


@TIERS
def test_any_stranger_leaves_the_session_alone(examples: int) -> None:
    with session() as running:

        @given(speech=SPEECH)
        @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
        def check(speech: list[bytes]) -> None:
            stranger = running.stranger()
            for data in speech:
                stranger.raw(data)
            stranger.close()
            running.make_a_step()

        check()
        running.say_goodbye()


@TIERS
def test_whatever_a_member_says_the_server_ends_and_tells_why(examples: int) -> None:
    @given(speech=SPEECH)
    @example(speech=[frame(Kind.BYE, 0, 1, 0, 0, 0)])
    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    def check(speech: list[bytes]) -> None:
        with session() as running:
            for data in speech:
                running.workers[1].raw(data)
            running.workers[1].close()
            running.workers[0].send(Kind.BYE)  # or it is waited for, if rank 1 has said it, too
            running.wait()
            (failure,) = running.failure
        if failure is not None:  # it may have said a proper goodbye
            assert failure.kind in {"RemoteProtocolError", "PeerLost"} or speech_tells(
                speech, failure
            )

    check()


def speech_tells(speech: list[bytes], failure: Any) -> bool:
    """A failure that the member itself has reported."""
    return any(failure.message.encode() in data for data in speech)
