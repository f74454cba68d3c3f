"""A board of a store in this process, as several ranks see it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from foreprop.backends.dedicated import raw_board
from foreprop.config import Config
from foreprop.engine import rendezvous
from foreprop.engine.rendezvous import Board, agree_on_session, session_board
from foreprop.engine.world import World
from foreprop.errors import ConfigError, HandshakeError, RemoteProtocolError, StepTimeout


def worlds(size: int) -> list[World]:
    store = HashStore()
    return [
        World(rank=r, size=size, local_size=size, host="h", store=store, raw_store=store)
        for r in range(size)
    ]


def boards(size: int, *, timeout_s: float = 20.0) -> list[Board]:
    return [Board(world, "key", timeout_s=timeout_s) for world in worlds(size)]


def test_every_rank_gets_what_all_publish() -> None:
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda b: b.exchange("a", f"of {b.rank}", "word"), boards(3)))
    assert found == [["of 0", "of 1", "of 2"]] * 3


def test_a_wait_ends_with_what_is_missing() -> None:
    board = boards(2, timeout_s=0.05)[1]
    with pytest.raises(StepTimeout, match=r"rank 1 waited 0\.05 s \(join_timeout_s\) for a word"):
        board.lookup("a", "a word")
    with pytest.raises(StepTimeout, match=r"rank 1 waited 0\.01 s"):
        board.lookup("a", "a word", timeout_s=0.01)
    with pytest.raises(StepTimeout, match=r"for rank 0, which has not arrived; does every rank"):
        board.meet("arrived")


def test_who_fails_is_waited_for_until_it_has_left() -> None:
    """Its failure is no reason for the others to end, where they go on without it."""
    ours, theirs = boards(2)
    members = {0, 1}
    theirs.publish_failure(ConfigError("no"))
    leaving = threading.Timer(0.05, members.discard, [1])
    leaving.start()
    ours.meet("begun", members=lambda: members)
    with pytest.raises(ConfigError, match="no"):
        ours.meet("begun")
    leaving.join()


def test_a_wait_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    board = Board(worlds(1)[0], "key", timeout_s=0.5, report_s=0.0)
    with pytest.raises(StepTimeout):
        board.lookup("a", "a word")
    assert capfd.readouterr().err == "foreprop: rank 0 for 0 s waits for a word\n"


def test_a_wait_ends_when_a_rank_has_failed() -> None:
    ours, theirs = boards(2)
    failing = threading.Timer(0.05, theirs.publish_failure, [ConfigError("no")])
    failing.start()
    with pytest.raises(ConfigError, match="no"):
        ours.lookup("a", "a word")
    failing.join()
    theirs.publish_failure(ConfigError("another"))  # the first one counts
    with pytest.raises(ConfigError, match="no"):
        ours.meet("arrived")


def test_a_wait_ends_with_what_has_happened_here() -> None:
    board = boards(2)[0]

    def look() -> None:
        raise HandshakeError("here")

    with pytest.raises(HandshakeError, match="here"):
        board.lookup("a", "a word", look)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 8])
def test_bytes_of_any_number(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_VALUE_BYTES", 4)
    ours, theirs = boards(2)
    ours.publish_bytes("a", bytes(range(size)))
    assert theirs.lookup_bytes("a", "bytes") == bytes(range(size))
    ours.forget_bytes("a")
    assert [theirs.peek(name) for name in ("a", "a/0", "a/1")] == [None] * 3


def test_ranks_agree_on_a_session() -> None:
    config = Config(join_timeout_s=5)
    zero, one, two = (session_board(world, config) for world in worlds(3))
    assert agree_on_session(zero, config, "id", {"world size": 3}) == "id"
    assert agree_on_session(one, config, "", {"world size": 3}) == "id"
    with pytest.raises(HandshakeError, match="world size: rank 0 has 3, rank 2 has 4"):
        agree_on_session(two, config, "", {"world size": 4})
    two.publish("", "no shape")
    with pytest.raises(RemoteProtocolError, match="'no shape' for a session"):
        agree_on_session(one, config, "", {})


def test_keys() -> None:
    world, config = worlds(1)[0], Config()
    assert session_board(world, config).key == "session/0"
    assert session_board(world, config, "rows").key == "session/0/rows"
    assert session_board(world, config).key == "session/1"
    raw_board(world, config, "key", lambda: None).publish("a", "b")
    assert world.raw_entries.maybe_get("key/a") == b"b"
