"""Frames of every kind in every state, right ones and wrong ones in any order, from every side.

Strangers change nothing. A peer that takes part ends the session, with an error that names it:
never a hang, an error of nobody's (`InternalError`), or memory for what has not come.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreprop.core.codec import choices_of
from foreprop.core.manifest import NO_GROUP, Aggregation, Manifest, OptimizerInfo, ParameterInfo
from foreprop.core.rowinit import row_init_of
from foreprop.core.wire import Flag, Kind
from foreprop.engine.tensors import encode_state
from foreprop.engine.worker import WorkerEngine
from foreprop.errors import Failure, ForepropError
from foreprop.features.tables.parts import (
    VALUES,
    KeptRows,
    encode_kept,
    encode_numbers,
    encode_pull,
)
from tests.faults.relay_peers import node
from tests.faults.wire_peers import (
    GROUP,
    Client,
    Session,
    engine,
    gradient,
    manifest_of,
    resident_bytes,
    session,
)
from tests.faults.wire_peers import frame as frame_of
from tests.secretfile import secret_file

MOST_NEW_BYTES = 256 * 2**20
"""That all examples of a test may add to this process, with what torch loads in the first."""


class Said(NamedTuple):
    """A frame, or the beginning of one."""

    kind: int
    flags: int
    step: int
    slice_: int
    payload: bytes
    more_bytes: int
    """That its header announces, and that do not come."""
    rank: int | None
    """None: the true one."""


NUMBERS = torch.tensor([1, 3])
PAYLOADS = [
    b"",
    gradient(1.0),
    gradient(1.0)[:12],
    bytes(8),
    struct.pack("!d", float("nan")),
    struct.pack("!q", -1),
    struct.pack("!ddH", 1.0, 1.0, 0),
    manifest_of().encode(),
    manifest_of(2**40, servers=2**40).encode(),
    Failure(kind="StepTimeout", message="rank 1 waited").encode(),
    Failure(kind="NoSuchError", message="\n", peer="x" * 99, step=2**70).encode(),
    msgspec.json.encode((GROUP,)),
    msgspec.json.encode(({**GROUP, "lr": 1e400 - 1e400},)),
    msgspec.json.encode(({**GROUP, "lr": "0.1"},)),
    encode_state({}),
    encode_state({"momentum_buffer": torch.zeros(6)}),
    encode_state({"momentum_buffer": torch.zeros(2**10), "step": 3}),
    encode_kept(KeptRows(torch.tensor([1]), {})),
    encode_kept(KeptRows(torch.tensor([1]), {VALUES: torch.ones(1, 3)})),
    encode_numbers(NUMBERS),
    bytes(encode_numbers(NUMBERS)) + torch.ones(2, 3).numpy().tobytes(),
    encode_pull(0, NUMBERS),
    b"[" * 5000,
]


@st.composite
def changed(draw: st.DrawFn, payloads: Sequence[bytes]) -> bytes:
    """A payload that some frame has, whole or not, or with one byte changed; or any."""
    data = draw(st.sampled_from(payloads))
    how = draw(st.integers(0, 4))
    if how == 0:
        return draw(st.binary(max_size=64))
    if how == 1:
        return data[: draw(st.integers(0, len(data)))]
    if how == 2 and data:
        place = draw(st.integers(0, len(data) - 1))
        return data[:place] + bytes([draw(st.integers(0, 255))]) + data[place + 1 :]
    return data


GROUPS, STATE = msgspec.json.encode((GROUP,)), encode_state({"momentum_buffer": torch.zeros(6)})
ROWS_OF = encode_numbers(NUMBERS)
ROW_PART = bytes(ROWS_OF) + torch.ones(2, 3).numpy().tobytes()
KEPT = encode_kept(KeptRows(torch.tensor([1]), {VALUES: torch.ones(1, 3)}))
RIGHT: list[tuple[Kind, int, bytes, int]] = [
    # kind, step, payload, flags: as a worker, a server or a relay may say them at some time
    (Kind.PUSH, 1, gradient(1.0), 0),
    (Kind.PUSH, 1, b"", Flag.NO_GRADIENT),
    (Kind.PUSH, 2, gradient(1.0), Flag.GRADIENT),
    (Kind.PUSH, 1, gradient(1.0)[:12], 0),
    (Kind.VALUE, 0, gradient(1.0), 0),
    (Kind.HYPERPARAMETERS, 1, GROUPS, 0),
    (Kind.HYPERPARAMETERS, 2, GROUPS, 0),
    (Kind.STATE, 0, STATE, 0),
    (Kind.STATE, 0, STATE, Flag.AVERAGES),
    (Kind.STATE_PULL, 1, b"", 0),
    (Kind.STATE_PULL, 1, b"", Flag.GRADIENT),
    (Kind.STATE_PULL, 1, b"", Flag.MASTER),
    (Kind.STATE_PULL, 1, b"", Flag.AVERAGES),
    (Kind.BLOB, 1, bytes(8), 0),
    (Kind.BLOB_PULL, 1, b"", 0),
    (Kind.STATUS_PULL, 1, b"", 0),
    (Kind.PULL, 1, b"", 0),
    (Kind.NORM, 1, bytes(8), 0),
    (Kind.ROWS_VALUE, 0, ROW_PART, 0),
    (Kind.ROWS_PUSH, 1, ROW_PART, 0),
    (Kind.ROWS_PUSH, 1, ROW_PART, Flag.MORE),
    (Kind.ROWS_PULL, 1, encode_pull(0, NUMBERS), 0),
    (Kind.TABLE, 0, KEPT, Flag.ANEW),
    (Kind.TABLE, 0, KEPT, 0),
    (Kind.TABLE_PULL, 0, bytes(8), 0),
    (Kind.PACE, 20, bytes(8), 0),
    (Kind.REPLY, 1, gradient(5.0), 0),
    (Kind.REPLY, 1, b"", Flag.UNCHANGED),
    (Kind.NOTIFY, 1, b"", 0),
    (Kind.WELCOME, 0, b"", 0),
    (Kind.STATE_REPLY, 1, STATE, 0),
    (Kind.STATUS_REPLY, 1, b"waits", 0),
    (Kind.BLOB_REPLY, 1, bytes(8), 0),
    (Kind.ROWS_REPLY, 1, ROW_PART, 0),
    (Kind.NORM_PART, 1, bytes(18), 0),
    (Kind.FAILURE, 0, Failure(kind="StepTimeout", message="rank 1 waited").encode(), 0),
    (Kind.BYE, 0, b"", 0),
]
FLAGS = st.one_of(st.sampled_from([0, *(1 << n for n in range(16))]), st.integers(0, 65_535))
STEPS = st.sampled_from([0, 1, 2, 3, 2**31, 2**63, 2**64 - 1])
SLICES = st.sampled_from([0, 1, 2, 5, 2**31, 2**32 - 1])
MORE = st.sampled_from([1, 4, 1000, 2**31, 2**32 - 100_000])


@st.composite
def frame(draw: st.DrawFn) -> Said:
    """A right one for some state, or one of which a field is wrong, or any."""
    kind, step, payload, flags = draw(st.sampled_from(RIGHT))
    said = Said(int(kind), int(flags), step, draw(st.integers(0, 2)), payload, 0, None)
    match draw(st.integers(0, 9)):
        case 0 | 1 | 2:
            return said._replace(payload=draw(changed([payload])))
        case 3:
            return said._replace(payload=draw(changed(PAYLOADS)))
        case 4:
            return said._replace(flags=draw(FLAGS))
        case 5:
            return said._replace(step=draw(STEPS), slice_=draw(SLICES))
        case 6:
            return said._replace(more_bytes=draw(MORE))
        case 7:
            kind = draw(st.sampled_from(list(Kind)))
            return said._replace(kind=int(kind), rank=draw(st.sampled_from([None, 0, 1, 65_535])))
    return said


FRAMES = frame()


def say(client: Client, frames: Sequence[Said]) -> None:
    """All of them; then nothing more comes."""
    for each in frames:
        size = len(each.payload) + each.more_bytes
        rank = client.rank if each.rank is None else each.rank
        data = each.payload
        client.raw(frame_of(each.kind, each.flags, rank, each.step, each.slice_, 0, data, size))
    with contextlib.suppress(OSError):  # it may have been closed already
        client.sock.shutdown(socket.SHUT_WR)


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    before = resident_bytes()
    yield
    assert resident_bytes() - before < MOST_NEW_BYTES


def fuzz(examples: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


class Part(NamedTuple):
    names: Sequence[str]
    """Of states, manifests or members: each example draws one."""
    examples: int


def tiers(*names: str) -> Any:
    """A few examples of any of them after every change, and many of each when time is there."""
    alone = [
        pytest.param(Part([name], 100), id=name, marks=[pytest.mark.long, pytest.mark.timeout(600)])
        for name in names or ["only"]
    ]
    return pytest.mark.parametrize("part", [pytest.param(Part(names, 15), id="any"), *alone])


# Strangers.
Arrive = Callable[[Session, Client], None]
STATES: dict[str, tuple[bool, bool, Arrive]] = {
    # with a secret, begun
    "connected": (False, False, lambda s, c: None),
    "connected to one with a secret": (True, False, lambda s, c: None),
    "connected, begun": (False, True, lambda s, c: None),
    "authenticated": (True, False, lambda s, c: authenticated(s, c)),
    "authenticated, begun": (True, True, lambda s, c: authenticated(s, c)),
}


def authenticated(running: Session, client: Client) -> None:
    assert running.secret_file is not None
    client.authenticate(running.secret_file)


@tiers(*STATES)
def test_nothing_that_is_said_before_a_greeting_touches_a_session(
    part: Part, tmp_path: Path
) -> None:
    file = secret_file(tmp_path)
    with contextlib.ExitStack() as stack:
        sessions = {
            state: stack.enter_context(session(joined=STATES[state][1], secret_file=secret))
            for state in part.names
            for secret in [file if STATES[state][0] else None]
        }

        @fuzz(part.examples)
        @given(
            state=st.sampled_from(part.names),
            frames=st.lists(FRAMES.filter(lambda each: each.kind != Kind.HELLO), min_size=1),
        )
        def check(state: str, frames: list[Said]) -> None:
            _, begun, arrive = STATES[state]
            client = Client(sessions[state].port, 1)
            arrive(sessions[state], client)
            say(client, frames)
            client.expect_closed()
            client.close()
            if begun:
                sessions[state].make_a_step()

        check()
        for state, running in sessions.items():
            if not STATES[state][1]:
                running.join()
            running.make_a_step()
            running.say_goodbye()


@tiers()
def test_whatever_a_stranger_says_who_has_greeted_the_true_worker_joins(part: Part) -> None:
    """It knows the session's id; only that it has failed would be believed, without a secret."""

    @fuzz(part.examples)
    @given(frames=st.lists(FRAMES.filter(lambda each: each.kind != Kind.FAILURE), min_size=1))
    def check(frames: list[Said]) -> None:
        with session(joined=False) as running:
            odd = running.stranger(1)
            odd.greet()
            say(odd, [each for each in frames if not is_manifest(each)])
            odd.expect_closed()
            running.join()
            running.make_a_step()
            running.say_goodbye()

    check()


def is_manifest(said: Said) -> bool:
    """With which it would be the worker."""
    return said.kind == Kind.MANIFEST and said.payload == manifest_of().encode()


# Those who take part.
TABLE = ParameterInfo(
    name="t", shape=(8, 3), dtype="float32", group=0, rows=True, init=row_init_of("t", None)
)
ROWS = ParameterInfo(name="r", shape=(8, 3), dtype="float32", group=0, rows=True)


def with_knobs(**changes: Any) -> Manifest:
    manifest = manifest_of()
    return msgspec.structs.replace(
        manifest, knobs=msgspec.structs.replace(manifest.knobs, **changes)
    )


MANIFESTS = {
    "plain": manifest_of(),
    "clipped by norm, averaged": with_knobs(
        aggregation=Aggregation(clip_grad_norm=1.0, ema=0.9, check_finite=True)
    ),
    "notify": with_knobs(reply="notify"),
    "pull": with_knobs(reply="pull"),
    "half": with_knobs(wire_dtype="float16"),
    "codec": with_knobs(compression=choices_of("topk:0.5")),
    "lossless": with_knobs(compression=choices_of("lossless")),
    "tables": manifest_of(parameters=(TABLE, ROWS, manifest_of().parameters[0])),
}
OURS = (
    "ConfigError HandshakeError PeerLost RemoteProtocolError StepTimeout TrainingLoopError"
).split()
"""Errors that may end a session; not `InternalError`."""


def check_told(failure: Failure | None, who: str, frames: Sequence[Said]) -> None:
    """Why the session has ended is an error that says who is to blame."""
    assert failure is not None, frames
    reported = any(each.kind == Kind.FAILURE for each in frames)
    assert failure.kind in OURS or reported, (failure, frames)
    left = any(each.kind == Kind.BYE for each in frames)
    assert who in failure.message or left or reported, (failure, frames)


@tiers(*MANIFESTS)
def test_whatever_a_rank_says_ends_the_session_with_its_name(part: Part) -> None:
    @fuzz(part.examples)
    @given(
        name=st.sampled_from(part.names),
        rank=st.sampled_from([0, 1, 1]),
        frames=st.lists(FRAMES, min_size=1, max_size=8),
    )
    def check(name: str, rank: int, frames: list[Said]) -> None:
        with session(joined=False, join_timeout_s=10.0, step_timeout_s=5.0) as running:
            workers = [running.stranger(each) for each in (0, 1)]
            for worker in workers:
                worker.hello(MANIFESTS[name])
            for worker in workers:
                worker.expect(Kind.WELCOME)
            say(workers[rank], frames)
            if any(each.kind == Kind.BYE for each in frames):
                workers[1 - rank].close()  # and the other one goes without a word
            running.wait()
            (failure,) = running.failure
        check_told(failure, f"rank {rank}", frames)

    check()


WORLD = 3
MEMBER_FRAMES: list[tuple[Kind, int, bytes, int]] = [
    (Kind.CLAIM, 0, b"[[1,4,0]]", 0),
    (Kind.CLAIM, 0, b"[[1,0,0],[2,0,0]]", 0),
    (Kind.CLAIM, 0, b"[[1,-1,0]]", 0),
    (Kind.CLAIM, 0, b"[[0,4,0]]", 0),
    (Kind.CLAIM, 0, b"[[%d,4,0]]" % 2**80, 0),
    (Kind.CLAIM, 0, b"[" * 5000, 0),
    (Kind.CLAIM, 9, b"[[1,4,0]]", 0),
    (Kind.MOVES, 9, b"[9,0,[1,0]]", 0),
    (Kind.MOVES, 9, b"[9,0,[1]]", 0),
    (Kind.MOVES, 2**63, b"[9,0,[]]", 0),
    (Kind.TAKEN_OVER, 4, gradient(1.0), 0),
    (Kind.TAKEN_OVER, 4, b"", Flag.UNCHANGED),
    (Kind.GIVEN, 4, gradient(1.0), 0),
    (Kind.GIVEN, 2**63, b"", 0),
    (Kind.LEFT, 1, b'[1,1,1,1,""' + b",[" * 5000, 0),
    (Kind.SETTLED, 0, b"[[0,4,0,1]]", 0),
    (Kind.POSITIONS, 3, b'[[[0,1,[2,3,false,[[0,[0,1,2]]],[],[]]]],{"1":{"0":[[false,1]]}}]', 0),
    (Kind.POSITIONS, 3, b"[[],{}]" + b"[" * 5000, 0),
    (Kind.TRAINABLE, 3, b"[[1],[0]]", 0),
    (Kind.TRAINABLE, 4, b"[[2],[]]", 0),
    (Kind.TRAINABLE, 4, b"[[-1],[%d]]" % 2**80, 0),
    (Kind.PUSH, 1, gradient(1.0), Flag.LATE),
    (Kind.PUSH, 5, gradient(1.0), 0),
    (Kind.PUSH, 1, gradient(1.0), Flag.GRADIENT),
]


@st.composite
def member_frame(draw: st.DrawFn) -> Said:
    """As `frame`, or one about who is a member, right or wrong."""
    if draw(st.booleans()):
        return draw(FRAMES)
    kind, step, payload, flags = draw(st.sampled_from(MEMBER_FRAMES))
    said = Said(int(kind), int(flags), step, draw(st.integers(0, 2)), payload, 0, None)
    match draw(st.integers(0, 4)):
        case 0:
            return said._replace(payload=draw(changed([payload])))
        case 1:
            return said._replace(step=draw(STEPS), slice_=draw(SLICES))
        case 2:
            return said._replace(more_bytes=draw(MORE))
    return said


MEMBERS: dict[str, dict[str, Any]] = {
    "elastic": {"elastic": True},
    "backup workers": {"backup_workers": 1},
    "apart": {"staleness": 2},
    "servers that may be lost": {"elastic": True, "servers": WORLD},
}


@tiers(*MEMBERS)
def test_whatever_a_member_says_is_no_error_of_ours(part: Part) -> None:
    """It may go alone, or end the session by name; nobody waits, and nothing breaks."""
    with_momentum = OptimizerInfo(name="SGD", groups=({**GROUP, "momentum": 0.9},))

    @fuzz(part.examples)
    @given(
        name=st.sampled_from(part.names),
        place=st.integers(0, 1),
        frames=st.lists(member_frame(), min_size=1, max_size=8),
    )
    def check(name: str, place: int, frames: list[Said]) -> None:
        manifest = msgspec.structs.replace(
            with_knobs(**MEMBERS[name]), world_size=WORLD, optimizer=with_momentum
        )
        if "servers" in MEMBERS[name]:  # all values are with every worker, which update
            own = [msgspec.structs.replace(info, group=NO_GROUP) for info in manifest.parameters]
            manifest = msgspec.structs.replace(manifest, parameters=tuple(own))
            assert manifest.outlives_servers
        made: dict[str, Any] = {"join_timeout_s": 10.0, "step_timeout_s": 5.0}
        with session(joined=False, **made) as running:
            workers = [running.stranger(rank) for rank in range(WORLD)]
            for worker in workers:
                worker.hello(manifest)
            for worker in workers:
                worker.expect(Kind.WELCOME)
            say(workers[place], frames)
            for worker in workers:
                if worker is not workers[place]:
                    worker.close()  # so that the session ends
            running.wait()
            (failure,) = running.failure
        reported = any(each.kind == Kind.FAILURE for each in frames)
        assert failure is None or failure.kind in OURS or reported, (failure, frames)

    check()


def step_until_it_fails(made: WorkerEngine) -> None:
    for step in range(1, 4):  # right frames may do for a step
        made.wait(0, step)
        made.push(0, step + 1)


@tiers()
def test_whatever_a_server_says_is_an_error_that_names_it(part: Part) -> None:
    @fuzz(part.examples)
    @given(frames=st.lists(FRAMES, min_size=1, max_size=8))
    def check(frames: list[Said]) -> None:
        with engine() as (made, (fake,)):
            made.push(0, 1)
            say(fake, frames)
            with pytest.raises(ForepropError) as caught:
                step_until_it_fails(made)
        failure = Failure(kind=type(caught.value).__name__, message=str(caught.value))
        check_told(failure, "server 0", frames)

    check()


@tiers("rank 2", "server 0")
def test_whatever_is_said_to_a_relay_ends_the_session_with_a_name(part: Part) -> None:
    @fuzz(part.examples)
    @given(who=st.sampled_from(part.names), frames=st.lists(FRAMES, min_size=1, max_size=8))
    def check(who: str, frames: list[Said]) -> None:
        with node() as running:
            said_by = running.server if who == "server 0" else running.workers[0]
            say(said_by, frames)
            if any(each.kind == Kind.BYE for each in frames):
                running.workers[1].close()
            running.ended.wait(60)
        assert running.failures, frames
        check_told(running.failures[0], who, frames)

    check()
