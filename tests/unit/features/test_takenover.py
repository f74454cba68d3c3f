"""A server's frames about slices that come to it: who may send them, and when."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from foreprop.core.membership import Members
from foreprop.core.slicing import Slice
from foreprop.core.takeover import Claim, Settled, SlicesSettled
from foreprop.core.wire import ROUND_SHIFT, Flag, Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.features.members.counting import TakenOver
from foreprop.features.members.messages import decode_settled

SLICES = [Slice(number, number, 0, 1, number) for number in range(3)]


class Server:
    """Number 1 of three, and what its service asks of it; the others' slices may come to it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.members = Members(3)
        self.machine = self.store = self
        self.said: list[tuple[int, list[Settled]]] = []
        self.events: list[Any] = []
        self.replies: list[tuple[Any, ...]] = []
        """By rank: step, slice, average and flags."""
        self.service = TakenOver(SLICES, 1, self)  # type: ignore[arg-type]
        self.service.begin(self)  # type: ignore[arg-type]

    def send(self, rank: int, kind: int, *rest: Any) -> None:
        if kind == Kind.REPLY:
            step, _, slice_, average, flags = rest
            self.replies.append((rank, step, slice_, bytes(average), flags))
        else:
            assert kind == Kind.SETTLED
            self.said.append((rank, decode_settled(memoryview(rest[-1]))))

    def handle(self, event: Any) -> list[Any]:
        self.events.append(event)
        return []

    def execute(self, instructions: Any) -> None: ...
    def catch_up(self) -> None: ...
    def adopt(self, pieces: Any) -> None: ...
    def reset_voters(self) -> None: ...
    def note_anew(self, pieces: Any) -> None: ...

    def size_bytes(self, slice_: int, *, value: bool) -> int:
        assert value
        return 4

    # What comes.
    def claim(self, rank: int, *claims: Claim) -> None:
        data = msgspec.json.encode(claims)
        header = Header(Kind.CLAIM, 0, rank, 0, 0, 0, len(data))
        assert len(self.service.room(peer(rank), header)) == len(data)
        self.service.on_frame(peer(rank), header, memoryview(data))

    def begin_average(
        self, rank: int, step: int, *, flags: int = 0, size: int = 4
    ) -> tuple[Header, memoryview]:
        header = Header(Kind.TAKEN_OVER, flags, rank, step, 0, 0, size)
        room = self.service.room(peer(rank), header)
        assert len(room) == size
        room[:] = bytes([rank] * size)
        return header, room

    def end_average(self, arriving: tuple[Header, memoryview]) -> None:
        header, room = arriving
        self.service.on_frame(peer(header.rank), header, room)

    def lose(self, rank: int) -> None:
        self.members.drop(rank)
        self.service.drop(rank)


def peer(rank: int) -> Any:
    return SimpleNamespace(number=rank)


def claimed() -> Server:
    """Slice 0 of the lost server 0 goes on after round (5, 1), which rank 2 lacks."""
    server = Server()
    server.claim(0, Claim(0, 5, 1))
    server.claim(1, Claim(0, 5, 1))
    assert server.said == []
    server.claim(2, Claim(0, 5, 0))
    return server


def test_all_members_are_told_where_a_slice_goes_on() -> None:
    server = claimed()
    assert server.said == [(rank, [Settled(0, 5, 1, giver=0)]) for rank in range(3)]
    assert server.events == [SlicesSettled((SLICES[0],), {0: (5, 1)})]


def test_what_there_is_not_is_not_claimed() -> None:
    with pytest.raises(RemoteProtocolError, match="rank 2 claims slice 3"):
        Server().claim(2, Claim(3, 5, 0))


def test_the_average_goes_to_who_is_owed_it() -> None:
    server = claimed()
    header = server.begin_average(0, 5, flags=1 << ROUND_SHIFT)
    server.end_average(header)
    assert server.replies == [(2, 5, 0, bytes(4), 0)]


def test_that_there_was_none_is_said_without_bytes() -> None:
    server = claimed()
    flags = 1 << ROUND_SHIFT | Flag.UNCHANGED
    server.end_average(server.begin_average(0, 5, flags=flags, size=0))
    assert server.replies == [(2, 5, 0, b"", Flag.UNCHANGED)]


@pytest.mark.parametrize(("rank", "flags"), [(1, 1 << ROUND_SHIFT), (0, 0)])
def test_nobody_else_gives_and_no_other_round(rank: int, flags: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"rank {rank} gave round"):
        claimed().begin_average(rank, 5, flags=flags)


def test_one_that_is_dropped_while_it_gives_does_not_give() -> None:
    """It was silent in the middle of a frame; another one gives, which does right."""
    server = claimed()
    header = server.begin_average(0, 5, flags=1 << ROUND_SHIFT)
    server.lose(0)
    assert server.said[-1] == (2, [Settled(0, 5, 1, giver=1)])
    server.end_average(header)
    assert server.replies == []
    server.end_average(server.begin_average(1, 5, flags=1 << ROUND_SHIFT))
    assert server.replies == [(2, 5, 0, bytes([1] * 4), 0)]


def test_claims_of_one_that_has_been_dropped_are_of_no_consequence() -> None:
    server = Server()
    server.lose(2)
    server.claim(2, Claim(0, 5, 1))
    server.claim(0, Claim(0, 5, 1))
    server.claim(1, Claim(0, 5, 1))
    assert [rank for rank, _ in server.said] == [0, 1]


def test_who_asks_about_a_slice_that_is_not_settled_hears_whose_claims_are_awaited() -> None:
    """Workers ask after some time of waiting, and the lost one's silence may take longer."""
    server = Server()
    server.claim(0, Claim(0, 5, 1))
    assert 0 in server.service
    assert server.service.describe_wait(0, 6).endswith("the claims of ranks [1, 2]")
    server.claim(1, Claim(0, 5, 1))
    server.claim(2, Claim(0, 5, 1))
    assert 0 not in server.service
    assert 1 not in server.service
    assert 3 not in server.service
