"""A worker that comes in a lost one's place: orders of events, and one server by itself."""

from __future__ import annotations

from typing import Any

import pytest

from foreprop.core.collect import AnswerSlice, DropPush, SliceUpdated, UpdateSlice
from foreprop.core.frames import Finish, PeerLeft, PushArrived, ValueArrived
from foreprop.core.membership import (
    MemberLeft,
    Members,
    PeerDropped,
)
from foreprop.core.newcomers import (
    BEGUN_STEPS,
    LEAD_STEPS,
    AnswerJoin,
    JoinAsked,
    JoinBid,
    JoinSettled,
    MemberJoined,
)
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.errors import RemoteProtocolError
from tests.tiers import long_cases
from tests.unit.counting_world import counting_server, explore, replayed, run, sets_of
from tests.unit.joining_world import JoiningWorld

LONG = pytest.mark.long


def world_of(**about: Any) -> JoiningWorld:
    return JoiningWorld(**{"workers": 2, "servers": 2, "slices": 2, "lost": 1, **about})


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "about",
    [
        {"steps": 5, "servers": 1, "prompt": True},
        pytest.param({"steps": 4, "servers": 1, "prompt": True, "again": True}, marks=LONG),
        pytest.param({"steps": 3, "prompt": True}, marks=LONG),
        pytest.param(
            {"workers": 2, "lost": None, "absent": 1, "steps": 7, "servers": 1, "slices": 1}
            | {"prompt": True, "begun": BEGUN_STEPS},
            marks=LONG,
        ),
        pytest.param(
            {"workers": 3, "lost": 1, "absent": 1, "steps": 3, "servers": 1, "slices": 1}
            | {"prompt": True},
            marks=LONG,
        ),
    ],
    ids=str,
)
def test_in_any_order_a_newcomer_counts_from_its_first_step_on(about: dict[str, Any]) -> None:
    """`JoiningWorld` looks at values, steps, and who knows of it; `explore` for deadlocks."""
    first = set()

    def look(world: JoiningWorld) -> None:
        first.update(world.joined_at.values())

    assert explore(world_of(**about), look) > 100
    assert min(first) <= about["steps"] < max(first), "it always came, or never"


@pytest.mark.parametrize("seeds", [40, *long_cases(300)])
@pytest.mark.timeout(600)
def test_seeded_newcomers(seeds: int) -> None:
    """One of three or four workers joins while another one dies, or the newcomer itself.

    And of those that were never there: one alone grows to three, or one is lost and another comes.
    """
    trained, dropped, late, grown = 0, 0, 0, 0
    for seed in range(seeds):
        about: dict[str, Any] = {"workers": 3 + seed % 2, "slices": 4, "steps": 9}
        about |= [
            {},
            {"again": True},
            {"kill": 2},
            {"workers": 3, "lost": None, "absent": 2, "steps": 12, "begun": BEGUN_STEPS},
            {"workers": 4, "absent": 1, "kill": 2},
        ][seed % 5]
        world = world_of(**about, late=seed % 10)
        run(world, seed, kill_after=(seed * 7) % 400)
        first = world.joined_at.get(1)
        counted = {rank for ranks in sets_of(world.stories) for rank in ranks}
        trained += 1 in counted
        grown += "absent" in about and world.workers - 1 in counted
        dropped += any(left.rank == 1 for left in world.left)
        late += first is not None and first > about["steps"]
        if seed % 4 == 0:
            assert replayed(world, seed).stories == world.stories
    assert trained > seeds / 3, "hardly anybody has joined"
    assert grown > seeds / 5, "hardly anybody has come for the first time"
    assert dropped > seeds / 20, "hardly any newcomer has died"
    assert late > 0, "nobody has come too late"


@pytest.mark.parametrize("seeds", [20, *long_cases(300)])
@pytest.mark.timeout(600)
def test_seeded_newcomers_where_some_are_backups(seeds: int) -> None:
    """Its first step waits for it, whoever else is late; then it meets the others."""
    trained, late = 0, 0
    for seed in range(seeds):
        about: dict[str, Any] = {"workers": 4, "slices": 4, "steps": 9, "backups": 1 + seed % 2}
        about |= [{}, {"again": True}, {"kill": 2}][seed % 3]
        about |= {"meets": [(), (4, 9)][seed % 2], "norm": seed % 4 < 2, "late": seed % 8}
        world = world_of(**about)
        run(world, seed, kill_after=(seed * 7) % 400)
        first = world.joined_at.get(1, 0)
        for story in world.stories if 1 in world.alive else ():
            assert all(1 in counted for step, counted in story if step == first)
        trained += any(1 in counted for counted in sets_of(world.stories))
        late += any(world.newer)
        if seed % 5 == 0:
            assert replayed(world, seed).stories == world.stories
    assert trained > seeds / 3, "hardly anybody has joined"
    assert late > seeds / 10


def test_the_world_notices_a_step_that_counts_it_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that promises, and closes slices as if nobody came."""
    monkeypatch.setattr(Members, "of_step", lambda self, _: self.here - self.since.keys())
    with pytest.raises(AssertionError):
        explore(world_of(steps=5, prompt=True))


# One server by itself.
def server_of(workers: int = 3, slices: int = 2, started: int | None = None) -> ServerMachine:
    """All have the values; the last was lost at once, or those from ``started`` on never came."""
    server = counting_server(
        [Slice(number, number, 0, 1, 0) for number in range(slices)],
        Members(workers, started=started),
        [f"p{number}" for number in range(slices)],
    )
    for number in range(slices):
        server.handle(ValueArrived(0, number, 0, number))
    if started is None:
        server.handle(PeerDropped(workers - 1))
    return server


def make_step(server: ServerMachine, step: int, ranks: Any, slices: Any = (1, 0)) -> list[Any]:
    """The answers, of the last layer first."""
    said: list[Any] = []
    for slice_ in slices:
        for rank in ranks:
            said += server.handle(PushArrived(rank, slice_, step, slice_, 0))
        said += server.handle(SliceUpdated())
    return [each for each in said if not isinstance(each, UpdateSlice)]


def join(server: ServerMachine, step: int, rank: int = 2, newest: int = 0) -> list[Any]:
    (answer,) = server.handle(JoinAsked(rank, step))
    assert isinstance(answer, AnswerJoin)
    assert answer.step == step
    return list(server.handle(JoinSettled(rank, step, newest)))


def test_a_newcomer_is_sent_all_values_when_all_are_there_and_the_first_layer_s_first() -> None:
    server = server_of()
    make_step(server, 1, (0, 1))
    assert server.handle(JoinAsked(2, 3)) == [AnswerJoin(2, 0, 4, 1)]
    assert server.handle(JoinAsked(2, 4)) == [AnswerJoin(2, 4, 4, 1)]
    assert server.can_spare(2)
    assert server.handle(PushArrived(0, 1, 2, 1, 0)) == []
    assert server.handle(PushArrived(1, 1, 2, 1, 0)) == [], "step 2 waits for what is decided"
    assert server.awaited() == {2}
    assert server.describe_wait(1, 2) == "p1 waits for the push of rank 2"
    joined, due = server.handle(JoinSettled(2, 4, 1))
    assert joined == MemberJoined(2, 4)
    assert isinstance(due, UpdateSlice)
    assert due.counted == (0, 1)
    assert server.handle(SliceUpdated()) == [AnswerSlice(1, 2, 1, (0, 1))]
    make_step(server, 2, (0, 1), slices=[0])
    assert make_step(server, 3, (0, 1)) == [
        AnswerSlice(1, 3, 1, (0, 1)),
        AnswerSlice(0, 3, 0, (0, 1)),
        AnswerSlice(0, 3, 0, (2,)),
        AnswerSlice(1, 3, 1, (2,)),
    ]
    assert make_step(server, 4, (0, 1, 2))[-1] == AnswerSlice(0, 4, 0, (0, 1, 2))


def test_where_members_give_the_values_a_server_sends_none() -> None:
    """It only waits for the newcomer's first push; until then nobody else can be spared."""
    pieces = [Slice(number, number, 0, 1, 0) for number in range(2)]
    members = Members(3, started=1)
    server = counting_server(pieces, members, ["p0", "p1"], has_values=False)
    for number in range(2):
        server.handle(ValueArrived(0, number, 0, number))
    assert join(server, 4, 1) == [MemberJoined(1, 4)]
    for step in (1, 2, 3):
        assert all(answer.ranks == (0,) for answer in make_step(server, step, (0,)))
    assert not server.can_spare(0)
    assert server.handle(PushArrived(0, 1, 4, 1, 0)) == []
    assert len(server.handle(PushArrived(1, 1, 4, 1, 0))) == 1
    assert server.can_spare(0)


def test_slices_that_rest_come_with_the_others() -> None:
    server = server_of()
    for step in range(1, 6):
        make_step(server, step, (0, 1), slices=[1])
    assert join(server, 8, newest=5) == [MemberJoined(2, 8)]
    make_step(server, 6, (0, 1), slices=[1])
    assert make_step(server, 7, (0, 1), slices=[1])[-2:] == [
        AnswerSlice(0, 7, 0, (2,)),
        AnswerSlice(1, 7, 1, (2,)),
    ]
    resting = server_of()
    assert join(resting, 8, newest=5)[1:] == [
        AnswerSlice(0, 7, 0, (2,)),
        AnswerSlice(1, 7, 1, (2,)),
    ], "nothing of this server is pushed at all"


def test_a_later_wish_takes_the_place_of_a_promise() -> None:
    server = server_of()
    server.handle(JoinAsked(2, 3))
    for slice_ in (0, 1):
        for rank in (0, 1):
            assert server.handle(PushArrived(rank, slice_, 1, slice_, 0)) == []
    answer, due = server.handle(JoinAsked(2, 7))
    assert answer == AnswerJoin(2, 7, 3, 0)
    assert isinstance(due, UpdateSlice)
    with pytest.raises(RemoteProtocolError, match="joins from step 3, which is not promised"):
        server.handle(JoinSettled(2, 3, 0))


def test_a_newcomer_that_goes_again_before_it_counts() -> None:
    server = server_of()
    server.handle(JoinAsked(2, 3))
    assert server.handle(PeerDropped(2)) == [], "nobody has heard of it"
    join(server, 9)
    told = server.handle(PeerDropped(2))
    assert told == [MemberLeft(2, 8, 0, 2)]
    assert server.handle(PushArrived(2, 0, 9, 0, 0)) == [DropPush(0, 2, 9)]
    assert server.handle(JoinAsked(2, 4)) == [AnswerJoin(2, 0, 9, 0)], "it had said that already"


def test_the_last_one_with_values_cannot_be_spared() -> None:
    server = server_of(2)
    join(server, 5, rank=1)
    assert not server.can_spare(0)
    for step in range(1, 5):
        make_step(server, step, (0,))
    assert server.can_spare(0)


def test_the_end_before_a_newcomer_s_first_step() -> None:
    """It is sent the values that the others end with."""
    server = server_of()
    join(server, 5)
    make_step(server, 1, (0, 1))
    assert server.handle(PeerLeft(0)) == []
    assert server.handle(PeerLeft(1)) == [
        AnswerSlice(0, 4, 0, (2,)),
        AnswerSlice(1, 4, 1, (2,)),
    ]
    assert server.handle(PeerLeft(2)) == [Finish()]
    ending = server_of()
    ending.handle(PeerLeft(0))
    assert ending.handle(JoinAsked(2, 9)) == [AnswerJoin(2, 0, 3, 0, ending=True)]


def test_the_end_before_the_first_steps_of_two() -> None:
    """Both are sent the last values, and neither waits for a step of the other."""
    server = server_of(3, started=1)
    join(server, 5, 1)
    make_step(server, 1, (0,))
    assert isinstance(server.handle(JoinAsked(2, 7))[0], AnswerJoin)
    assert server.handle(PeerLeft(0)) == []
    assert server.handle(JoinSettled(2, 7, 1)) == [
        MemberJoined(2, 7),
        *(AnswerSlice(slice_, 4, slice_, (1,)) for slice_ in (0, 1)),
        *(AnswerSlice(slice_, 6, slice_, (2,)) for slice_ in (0, 1)),
    ]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (JoinAsked(1, 9), "rank 1 wants to join, and is here"),
        (JoinAsked(3, 9), "rank 3 of a world of 3"),
        (JoinSettled(2, 9, 0), "rank 2 joins from step 9, which is not promised"),
        (PushArrived(2, 0, 4, 0, 0), "rank 2 pushed slice 0 of p0 for step 4 after step 4"),
    ],
)
def test_what_a_newcomer_may_not_do(event: object, message: str) -> None:
    server = server_of()
    join(server, 5)
    with pytest.raises(RemoteProtocolError) as caught:
        server.handle(event)
    assert str(caught.value) == message


def test_two_come_that_were_never_there() -> None:
    """They join a world of one; one of them is lost before it counts, and comes again."""
    server = server_of(3, started=1)
    make_step(server, 1, (0,))
    assert not server.can_spare(0)
    for rank in (1, 2):
        assert join(server, 4, rank) == [MemberJoined(rank, 4)]
    assert server.handle(PeerDropped(1)) == [MemberLeft(1, 3, 0, 2)]
    make_step(server, 2, (0,))
    assert make_step(server, 3, (0,))[-2:] == [
        AnswerSlice(0, 3, 0, (2,)),
        AnswerSlice(1, 3, 1, (2,)),
    ]
    assert server.can_spare(0)
    assert server.describe_wait(1, 4) == "p1 waits for the push of ranks 0, 2"
    assert join(server, 8, 1, newest=3) == [MemberJoined(1, 8)]
    assert make_step(server, 4, (0, 2))[-1] == AnswerSlice(0, 4, 0, (0, 2))


def test_slices_that_rest_are_known_when_the_third_step_is_closed() -> None:
    """The newcomer only asks until then, and nobody waits for it."""
    server, bid = server_of(2, started=1), JoinBid(1, begun=BEGUN_STEPS)
    for step in range(1, BEGUN_STEPS + 1):
        (answer,) = server.handle(JoinAsked(1, bid.step))
        assert bid.add(0, answer) is False
        assert (bid.step, bid.is_early) == (0, True)
        assert len(make_step(server, step, (0,), slices=[1])) == 1
    (answer,) = server.handle(JoinAsked(1, bid.step))
    assert bid.add(0, answer) is False
    assert (bid.step, bid.newest, bid.is_early) == (7, BEGUN_STEPS, False)
    (answer,) = server.handle(JoinAsked(1, bid.step))
    assert bid.add(0, answer) is True
    assert server.handle(JoinSettled(1, bid.step, bid.newest)) == [MemberJoined(1, 7)]
    for step in (4, 5):
        make_step(server, step, (0,), slices=[1])
    assert make_step(server, 6, (0,), slices=[1])[-2:] == [
        AnswerSlice(0, 6, 0, (1,)),
        AnswerSlice(1, 6, 1, (1,)),
    ]


def test_a_bid_goes_up_until_all_have_promised() -> None:
    bid = JoinBid(2)
    assert bid.step == 1 + LEAD_STEPS
    assert bid.add(0, AnswerJoin(2, 3, 3, 0)) is None
    assert bid.add(1, AnswerJoin(2, 0, 9, 6)) is False
    assert (bid.step, bid.newest) == (10, 6)
    bid.add(1, AnswerJoin(2, 0, 12, 9))
    assert bid.add(0, AnswerJoin(2, 10, 4, 1)) is False
    assert (bid.step, bid.newest) == (14, 9), "twice as far as before"
    bid.add(0, AnswerJoin(2, 14, 4, 1))
    with pytest.raises(RemoteProtocolError, match="server 0 promises step 14 out of turn"):
        bid.add(0, AnswerJoin(2, 14, 4, 1))
    assert bid.add(1, AnswerJoin(2, 14, 13, 10)) is True
