"""What strangers and other members can do to a substitute, and to the wish for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from foreprop.buddies.substitutes import _WAITING_EACH, Substitution, substitute_id
from foreprop.core.manifest import OptimizerInfo
from foreprop.core.wire import Kind
from foreprop.link.connection import greeting
from foreprop.path.entrance import MAX_STRANGERS
from foreprop.servers.composed import ServerComposer
from tests.faults.wire_peers import GROUP, SESSION, Client, Session, manifest_of, session
from tests.secretfile import secret_file

WORLD = 3
STAND_IN = Substitution(0, 1, (1, 2), SESSION, "127.0.0.1", 0)
"""For server 0, whose node is gone; on node 1."""


def buddied() -> Any:
    manifest = manifest_of(WORLD, servers=WORLD)
    knobs = msgspec.structs.replace(manifest.knobs, elastic=True, buddy_steps=1)
    momentum = OptimizerInfo(name="SGD", groups=({**GROUP, "momentum": 0.9},))
    return msgspec.structs.replace(manifest, knobs=knobs, optimizer=momentum)


def join(running: Session, rank: int) -> Client:
    worker = running.stranger(rank)
    if running.secret_file is not None:
        worker.authenticate(running.secret_file)
    worker.hello(buddied())
    return worker


@pytest.fixture
def substitute(tmp_path: Path) -> Iterator[Session]:
    composer = ServerComposer(substitution=STAND_IN)
    with session(joined=False, composer=composer, secret_file=secret_file(tmp_path)) as running:
        yield running


def test_a_substitute_s_port_is_as_well_kept_as_a_server_s(substitute: Session) -> None:
    """Silent ones, and one that knows all but the secret; then the survivors come."""
    for _ in range(3 * MAX_STRANGERS):
        substitute.stranger()
    knows = substitute.stranger(1)
    knows.raw(greeting(SESSION, 1))
    assert "rank 1 has no secret" in knows.expect_failure().message
    claims_are_settled(substitute)


def claims_are_settled(substitute: Session) -> None:
    survivors = [join(substitute, rank) for rank in STAND_IN.members]
    for worker in survivors:
        worker.expect(Kind.WELCOME)
        worker.send(Kind.CLAIM, b"[4]")
    for worker in survivors:
        assert msgspec.json.decode(worker.expect(Kind.SETTLED)) == [[0, 4, 1, []]]


def test_a_rank_that_has_gone_does_not_join_in_a_survivor_s_place(substitute: Session) -> None:
    """It has the secret: a node that was cut off, say, and is back."""
    back = join(substitute, 0)
    assert "rank 0 is not one of" in back.expect_failure().message
    back.expect_end()
    claims_are_settled(substitute)


def test_what_waits_for_a_state_is_bounded(substitute: Session) -> None:
    one, two = (join(substitute, rank) for rank in STAND_IN.members)
    for worker in (one, two):
        worker.expect(Kind.WELCOME)
        worker.send(Kind.CLAIM, b"[4]")
    one.expect(Kind.SETTLED)
    for _ in range(_WAITING_EACH * WORLD + 1):
        two.send(Kind.STATE_PULL)
    left, *_, reason = msgspec.json.decode(one.expect(Kind.LEFT))
    assert left == 2
    assert "rank 2 broke the protocol: more than 12 frames about the state" in reason


@pytest.mark.parametrize(
    ("rank", "changes"),
    [
        (0, {"session": "../../../a-session-2-2"}),
        (0, {"server": 2**70}),
        (1, {}),
        pytest.param(0, {"session": f"{SESSION}-2-7"}, marks=pytest.mark.long),
        pytest.param(0, {"members": (0, 7)}, marks=pytest.mark.long),
        pytest.param(1, {"node": 1, "members": (0, 1)}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_no_word_of_a_peer_s_is_taken_for_a_file_s_name(rank: int, changes: dict[str, Any]) -> None:
    """Who wishes for a substitute otherwise than its own node's worker may leaves the session."""
    wish = Substitution(2, 0, (0, 1), substitute_id(SESSION, 2, 2), "127.0.0.1", 0)
    with session(joined=False) as running:
        workers = [join(running, each) for each in range(WORLD)]
        for worker in workers:
            worker.expect(Kind.WELCOME)
        workers[0].send(Kind.VALUE, bytes(24))  # from now on the others can do without it
        for worker in workers[1:]:
            worker.expect(Kind.REPLY)
        changed = msgspec.structs.replace(wish, **changes)
        workers[rank].send(Kind.TAKEOVER, msgspec.json.encode(changed))
        left, *_, reason = msgspec.json.decode(workers[2].expect(Kind.LEFT))
        assert left == rank
        assert f"rank {rank} broke the protocol: " in reason
        assert "a substitute" in reason
        work: Any = running.server._joining.work
        assert work.recovery.substitutes == []
