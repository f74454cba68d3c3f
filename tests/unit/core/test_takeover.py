"""A lost server's slices go on at others: nothing is lost, and all survivors have the same bits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.core.collect import UpdateSlice
from foreprop.core.frames import (
    CameAfter,
    CompleteParameter,
    FrameSent,
    GradientReady,
    PushArrived,
    ReplyArrived,
    Round,
    SendFrame,
    SlicesGoOn,
    SlicesLost,
    ValueArrived,
)
from foreprop.core.membership import Members, PeerDropped
from foreprop.core.pushwindow import PushWindow
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.takeover import (
    NOBODY,
    RESTS,
    Claim,
    Settled,
    SlicesSettled,
    Takeovers,
    owner_of,
)
from foreprop.core.wire import ROUND_SHIFT, Flag, Kind
from foreprop.core.worker_machine import WorkerMachine
from foreprop.errors import RemoteProtocolError
from tests.tiers import long_cases
from tests.unit.counting_world import counting_server
from tests.unit.takeover_world import PASSES, STEPS, TakeoverWorld, explore, run

LONG = pytest.mark.long


# Whose a slice is.
def test_a_home_that_lives_keeps_its_slices() -> None:
    assert [owner_of(slice_, 2, 4, {0, 1, 3}) for slice_ in range(5)] == [2] * 5


def test_a_lost_servers_share_is_divided() -> None:
    owners = [owner_of(slice_, 1, 5, {1}) for slice_ in range(40)]
    assert {owner: owners.count(owner) for owner in set(owners)} == {0: 10, 2: 10, 3: 10, 4: 10}


def test_with_all_lost_it_is_nobodys() -> None:
    assert owner_of(3, 1, 3, {0, 1, 2}) == NOBODY
    assert owner_of(3, 0, 1, {0}) == NOBODY


@given(
    slice_=st.integers(0, 99),
    servers=st.integers(1, 7),
    losses=st.lists(st.integers(0, 6), unique=True),
    home=st.integers(0, 6),
)
def test_a_loss_moves_only_the_slices_of_the_lost(
    slice_: int, servers: int, losses: list[int], home: int
) -> None:
    """It does not matter in which order anybody hears of several losses."""
    home %= servers
    lost = [server for server in losses if server < servers]
    owner = owner_of(slice_, home, servers, ())
    for number, server in enumerate(lost, 1):
        after = owner_of(slice_, home, servers, lost[:number])
        assert after == owner or server == owner
        assert after not in lost[:number]
        assert after != NOBODY or number == servers
        owner = after


# Claims.
def taking(members: int = 3) -> tuple[Takeovers, set[int]]:
    here = set(range(members))
    return Takeovers(lambda step: here), here


def claimed(said: dict[int, list[Round]]) -> tuple[Takeovers, set[int], list[Settled]]:
    """The claims, by member, of its last rounds of slices 3, 4 and so on."""
    takeovers, here = taking(len(said))
    settled: list[Settled] = []
    for member, rounds in said.items():
        assert not settled
        settled = takeovers.add(member, claims(*rounds))
    return takeovers, here, settled


def claims(*rounds: Round, first: int = 3) -> list[Claim]:
    return [Claim(slice_, *round_) for slice_, round_ in enumerate(rounds, first)]


def test_a_slice_goes_on_after_the_newest_round_that_anybody_has() -> None:
    takeovers, _, settled = claimed({0: [(7, 0), (7, 0)], 1: [(7, 1), (7, 0)], 2: [(8, 0), (7, 0)]})
    assert settled == [Settled(3, 8, 0, giver=2), Settled(4, 7, 0, giver=NOBODY)]
    assert settled[0].round == (8, 0)
    takeovers.check_given(2, 3, (8, 0))
    assert takeovers.given(3) == (0, 1)


def test_whatever_order_claims_come_in_the_same_is_settled() -> None:
    said: dict[int, list[Round]] = {0: [(7, 0)], 1: [(8, 0)], 2: [(7, 0)], 3: [(8, 0)]}
    found = [claimed(dict(order))[2] for order in itertools.permutations(said.items())]
    assert found == [[Settled(3, 8, 0, giver=1)]] * 24


def test_who_has_never_pushed_a_slice_lacks_nothing() -> None:
    """A newcomer's claim of a slice that rests; it has the values."""
    takeovers, _, settled = claimed({0: [(4, 0)], 1: [(5, 0)], 2: [RESTS]})
    assert settled == [Settled(3, 5, 0, giver=1)]
    assert takeovers.given(3) == (0,)
    assert claimed({0: [(4, 0)], 1: [(4, 0)], 2: [RESTS]})[2] == [Settled(3, 4, 0, NOBODY)]


def test_each_slice_is_settled_by_itself() -> None:
    """A member that has noticed two losses claims more than one that has noticed one."""
    takeovers, _ = taking()
    assert takeovers.add(0, claims((2, 0), (2, 0))) == []
    assert takeovers.add(1, claims((2, 0))) == []
    assert takeovers.missing() == [1, 2]
    assert takeovers.add(2, claims((2, 0), (2, 0))) == [Settled(3, 2, 0, NOBODY)]
    assert takeovers.missing() == [1]
    assert takeovers.add(1, claims((2, 0), first=4)) == [Settled(4, 2, 0, NOBODY)]
    assert takeovers.missing() == []


def test_who_is_lost_is_not_waited_for() -> None:
    takeovers, here = taking()
    takeovers.add(1, claims((3, 0)))
    takeovers.add(2, claims((2, 1)))
    assert takeovers.missing() == [0]
    here.remove(0)
    assert takeovers.drop(0) == [Settled(3, 3, 0, giver=1)]
    assert takeovers.given(3) == (2,)
    here.remove(2)
    assert takeovers.drop(2) == [], "its average is here"


def test_another_one_gives_when_the_giver_is_lost() -> None:
    takeovers, here, _ = claimed({0: [(8, 0)], 1: [(7, 0)], 2: [(8, 0)]})
    here.remove(0)
    assert takeovers.drop(0) == [Settled(3, 8, 0, giver=2)]
    with pytest.raises(RemoteProtocolError, match="rank 0 gave round"):
        takeovers.check_given(0, 3, (8, 0))
    takeovers.check_given(2, 3, (8, 0))


def test_a_round_that_only_the_lost_had_is_made_again() -> None:
    takeovers, here, _ = claimed({0: [(8, 0)], 1: [(7, 1)], 2: [(7, 1)]})
    here.remove(0)
    assert takeovers.drop(0) == [Settled(3, 7, 1, giver=NOBODY)]


def test_who_was_owed_and_is_lost_is_owed_nothing() -> None:
    takeovers, here, _ = claimed({0: [(8, 0)], 1: [(7, 0)], 2: [(7, 0)]})
    here.remove(1)
    assert takeovers.drop(1) == []
    assert takeovers.given(3) == (2,)


def test_what_cannot_be_is_refused() -> None:
    takeovers, _ = taking()
    takeovers.add(1, claims((5, 0)))
    with pytest.raises(RemoteProtocolError, match="rank 1 claims slice 3 out of turn"):
        takeovers.add(1, claims((5, 0)))
    with pytest.raises(RemoteProtocolError, match="nobody can be more than one behind"):
        takeovers.add(0, claims((3, 0)))
    assert takeovers.missing() == [0, 2], "as it was"
    takeovers.add(0, claims((5, 0)))
    takeovers.add(2, claims((4, 0)))
    with pytest.raises(RemoteProtocolError, match="rank 2 claims slice 3 out of turn"):
        takeovers.add(2, claims((5, 0)))
    for rank, slice_, round_ in [(1, 3, (5, 0)), (0, 4, (5, 0)), (0, 3, (4, 0))]:
        with pytest.raises(RemoteProtocolError, match=f"rank {rank} gave round"):
            takeovers.check_given(rank, slice_, round_)
    takeovers.given(3)
    with pytest.raises(RemoteProtocolError, match="out of turn"):
        takeovers.check_given(0, 3, (5, 0))


def test_who_is_too_far_behind_is_at_fault_whoever_comes_first() -> None:
    """A server had dropped it, and was lost before it heard that: others do right."""
    takeovers, _ = taking()
    takeovers.add(0, claims((3, 0)))
    assert takeovers.add(1, claims((5, 0))) == []
    assert takeovers.add(2, claims((5, 0))) == [Settled(3, 5, 0, giver=1)]


# A worker.
SLICES = [Slice(number, number, 0, 1, number % 2) for number in range(4)]
"""Servers 0 and 1 have two each."""


def worker(**about: Any) -> WorkerMachine:
    return WorkerMachine(
        SLICES, parameters=4, order="priority", reply="broadcast", outlives=True, **about
    )


def push(machine: WorkerMachine, slice_: int, step: int, flags: int = 0) -> list[Any]:
    return list(machine.handle(GradientReady(slice_, step, flags)))


def pushed(server: int, slice_: int, step: int, flags: int = 0) -> SendFrame:
    return SendFrame(server, Kind.PUSH, step, slice_, slice_, flags, -1)


def answer(machine: WorkerMachine, slice_: int, step: int, flags: int = 0) -> None:
    done = machine.handle(ReplyArrived(slice_, step, slice_ % 2, 0, flags))
    assert done == [CompleteParameter(slice_, step)]


def lose(machine: WorkerMachine, server: int = 0, *, to: int = 2) -> list[Any]:
    its = {piece.number: to for piece in SLICES if piece.server == server}
    return list(machine.handle(SlicesLost(server, its)))


def test_only_pushes_of_later_rounds_are_sent_again() -> None:
    machine = worker()
    for slice_ in (2, 0):
        push(machine, slice_, 1)
        machine.handle(FrameSent(0))
    answer(machine, 2, 1)
    assert lose(machine) == []
    assert (machine.claim(0), machine.claim(2)) == ((0, 0), (1, 0))
    assert machine.handle(SlicesGoOn({0: (0, 0), 2: (1, 0)})) == [pushed(2, 0, 1)]
    assert machine.handle(FrameSent(2)) == [], "slice 2 has nothing under way"


def test_who_is_owed_an_average_awaits_it_of_the_next_owner() -> None:
    machine = worker()
    push(machine, 0, 1)
    machine.handle(FrameSent(0))
    lose(machine)
    assert machine.handle(SlicesGoOn({0: (1, 0), 2: (1, 0)})) == []
    with pytest.raises(RemoteProtocolError, match="which belongs to server 2"):
        machine.handle(ReplyArrived(0, 1, 0))
    assert machine.handle(ReplyArrived(0, 1, 2)) == [CompleteParameter(0, 1)]
    assert machine.claim(0) == (1, 0)


def test_what_is_queued_for_a_lost_server_leaves_no_more() -> None:
    machine = worker()
    for slice_ in (2, 0, 3, 1):
        push(machine, slice_, 1)
    assert machine.queue_depth == 2  # behind slices 2 and 3
    lose(machine)
    assert machine.queue_depth == 1
    assert machine.handle(FrameSent(0)) == []
    assert machine.handle(FrameSent(1)) == [pushed(1, 1, 1)]
    again = machine.handle(SlicesGoOn({0: (0, 0), 2: (0, 0)}))
    again = [*again, *machine.handle(FrameSent(2))]
    assert again == [pushed(2, 0, 1), pushed(2, 2, 1)], "most urgent first"


def test_a_slice_that_is_claimed_is_pushed_when_it_goes_on() -> None:
    machine = worker()
    lose(machine)
    assert push(machine, 0, 1) == []
    assert machine.missing_slices(0) == []
    assert push(machine, 1, 1) == [pushed(1, 1, 1)]
    assert machine.handle(SlicesGoOn({0: (0, 0), 2: (0, 0)})) == [pushed(2, 0, 1)]
    machine.handle(FrameSent(2))
    assert push(machine, 2, 1) == [pushed(2, 2, 1)]


def test_a_second_loss_moves_them_once_more() -> None:
    machine = worker()
    push(machine, 0, 1)
    lose(machine)
    machine.handle(SlicesGoOn({0: (0, 0), 2: (0, 0)}))
    machine.handle(SlicesLost(2, {0: 1, 2: 1}))
    assert machine.owner_of(0) == machine.owner_of(2) == 1
    assert machine.handle(SlicesGoOn({0: (0, 0), 2: (0, 0)})) == [pushed(1, 0, 1)]


def test_a_round_that_goes_back_is_pushed_again() -> None:
    """It was owed the average of a giver that is lost."""
    machine = worker()
    push(machine, 0, 1)
    lose(machine)
    assert machine.handle(SlicesGoOn({0: (1, 0), 2: (1, 0)})) == []
    assert machine.handle(SlicesGoOn({0: (0, 0)})) == [pushed(2, 0, 1)]


def test_rounds_of_one_step_are_told_apart() -> None:
    machine = worker()
    push(machine, 0, 1)
    answer(machine, 0, 1)
    flags = 1 << ROUND_SHIFT | Flag.GRADIENT
    push(machine, 0, 1, flags)
    lose(machine)
    assert machine.claim(0) == (1, 0)
    assert machine.is_lost(0, (1, 0))
    assert not machine.is_lost(0, (1, 1))
    assert machine.handle(SlicesGoOn({0: (1, 0), 2: (0, 0)})) == [pushed(2, 0, 1, flags)]


def test_it_knows_whether_there_was_an_average() -> None:
    machine = worker()
    for step, flags in [(1, Flag.UNCHANGED), (2, 0), (3, Flag.UNCHANGED)]:
        push(machine, 0, step)
        machine.handle(FrameSent(0))
        answer(machine, 0, step, flags)
        assert machine.was_unchanged(0) == bool(flags)


def test_a_newcomer_claims_what_it_came_with_or_that_the_slice_rests() -> None:
    machine = worker()
    machine.handle(CameAfter(6))
    assert machine.claim(0) == RESTS
    push(machine, 0, 7)
    assert machine.claim(0) == (6, 0)
    answer(machine, 0, 7)
    assert machine.claim(0) == (7, 0)


def test_a_window_forgets_what_a_lost_server_owed() -> None:
    """One slice is answered by another server than it was pushed to, one is pushed again."""
    machine = worker(window=PushWindow([4] * 4, 1, servers=2))
    for slice_ in (2, 0):
        push(machine, slice_, 1)
        machine.handle(FrameSent(0))
    lose(machine)
    assert machine.handle(SlicesGoOn({0: (1, 0), 2: (0, 0)})) == [pushed(2, 2, 1)]
    machine.handle(FrameSent(2))
    for slice_ in (0, 2):
        assert CompleteParameter(slice_, 1) in machine.handle(ReplyArrived(slice_, 1, 2))
    assert push(machine, 2, 2) == [pushed(2, 2, 2)]


# A server.
def server(index: int = 1, *, here: tuple[int, ...] = (0, 2)) -> ServerMachine:
    """A server of ranks 0 to 2, of which not all are here any more."""
    members = Members(3)
    for rank in {0, 1, 2} - set(here):
        members.drop(rank)
    names = [f"p{piece.number}" for piece in SLICES]
    return counting_server(SLICES, members, names, index=index, has_values=False)


def settled(machine: ServerMachine, slice_: int, round_: Round) -> None:
    assert machine.handle(SlicesSettled((SLICES[slice_],), {slice_: round_})) == []


def arrive(machine: ServerMachine, rank: int, at: Round, slice_: int = 0) -> list[Any]:
    flags = at[1] << ROUND_SHIFT | Flag.GRADIENT
    return list(machine.handle(PushArrived(rank, slice_, at[0], 9, flags)))


def test_a_slice_goes_on_at_another_server() -> None:
    machine = server()
    with pytest.raises(RemoteProtocolError, match="does not belong to server 1"):
        machine.owned(0)
    settled(machine, 0, (5, 0))
    assert machine.owned(0) == SLICES[0]
    assert arrive(machine, 0, (5, 1)) == []
    update = UpdateSlice(0, 5, (0, 2), gradient=True, counted=(0, 2))
    assert arrive(machine, 2, (5, 1)) == [update]


def test_a_slice_that_is_settled_anew_takes_the_round_before() -> None:
    machine = server()
    settled(machine, 0, (5, 0))
    settled(machine, 0, (4, 0))
    assert arrive(machine, 0, (5, 0)) == []
    assert len(arrive(machine, 2, (5, 0))) == 1


def test_one_that_waits_for_a_lost_member_goes_on_without() -> None:
    machine = server(here=(0, 1, 2))
    settled(machine, 0, (5, 0))
    assert arrive(machine, 0, (6, 0)) == []
    assert arrive(machine, 2, (6, 0)) == []
    _, update = machine.handle(PeerDropped(1))
    assert update == UpdateSlice(0, 6, (0, 2), gradient=True, counted=(0, 2))


def test_its_own_slices_are_as_they_were() -> None:
    machine = server(here=(0, 1, 2))
    machine.handle(ValueArrived(0, 1, 0, 0))
    assert arrive(machine, 0, (1, 0), slice_=1) == []
    settled(machine, 0, (5, 0))
    assert machine.incomplete() == [(1, 1)]


# Every order of events of small sessions; `takeover_world` checks the rules of each step.
SMALL: list[tuple[int, dict[str, Any]]] = [
    (2, {"homes": (0, 1), "rounds": STEPS[:1]}),
    (2, {"rounds": PASSES}),
    (2, {"prompt": False, "rounds": STEPS[:1]}),
    (3, {"mortal": (0, 2), "kills": 2, "rounds": STEPS[:1]}),
]
LARGER: list[tuple[int, dict[str, Any]]] = [
    (2, {"homes": (0, 1)}),
    (3, {"mortal": (0,)}),
    (2, {"prompt": False}),
    (3, {"mortal": (0, 1), "kills": 2}),
    (3, {"mortal": (0, 2), "kills": 2}),
    (3, {"mortal": (0, 1), "kills": 2, "rounds": PASSES[:2]}),
    (3, {"mortal": (0,), "homes": (0, 1), "rounds": STEPS[:1]}),
    (2, {"leaves": True, "rounds": STEPS[:1]}),
    (2, {"accusations": 1}),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("members", "about"),
    [*SMALL, *[pytest.param(*each, marks=LONG) for each in LARGER]],
    ids=str,
)
def test_in_any_order_all_survivors_have_the_same_averages(
    members: int, about: dict[str, Any]
) -> None:
    given, pushed_again = set[int](), set[int]()

    def look(world: TakeoverWorld) -> None:
        given.add(world.given)
        pushed_again.update(worker.pushed_again for worker in world.workers)

    assert explore(TakeoverWorld(members, **about), look) > 50
    assert {0, 1} <= pushed_again
    assert (1 in given) == (members > 2), "with one survivor nobody else can have what it lacks"


MOVING: list[tuple[int, dict[str, Any]]] = [
    (3, {"kills": 0}),
    (2, {"mortal": (0,)}),
    (2, {"mortal": (1,)}),
    (2, {"accusations": 1, "kills": 0}),
]
MOVING_LONG: list[tuple[int, dict[str, Any]]] = [
    (3, {"mortal": (0,)}),
    (3, {"mortal": (1,)}),
    (3, {"mortal": (2,)}),
    (2, {"homes": (0, 1)}),
    (2, {"prompt": False}),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("members", "about"),
    [*MOVING, *[pytest.param(*each, marks=LONG) for each in MOVING_LONG]],
    ids=str,
)
def test_a_slice_moves_whoever_is_lost_meanwhile(members: int, about: dict[str, Any]) -> None:
    """It moves from server 0 to server 1, before the second step."""
    assert explore(TakeoverWorld(members, **about, moves={2: (0,)})) > 50


def drawn(seed: int) -> TakeoverWorld:
    chance = random.Random(seed)
    members = chance.choice([3, 4, 5])
    slices = chance.choice([1, 2, 3, 5])
    rounds = chance.choice([STEPS, PASSES, (*PASSES, (3, 0))])
    moves: dict[int, list[int]] = {}
    if seed % 2:
        rounds = tuple((step, 0) for step in range(1, chance.randint(3, 8)))
        moves = {
            before: [each for each in range(slices) if chance.random() < 0.7]
            for before in range(2, len(rounds) + 1)
        }
    return TakeoverWorld(
        members,
        homes=[chance.randrange(members) for _ in range(slices)],
        rounds=rounds,
        kills=chance.randint(1, members - 1),
        accusations=chance.choice([0, 0, 1, 2]),
        prompt=chance.random() < 0.3,
        leaves=chance.random() < 0.3,
        moves=moves,
        unused=frozenset(
            each
            for each in itertools.product(range(members), range(slices), rounds)
            if chance.random() < chance.choice([0.0, 0.6])
        ),
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", [range(200), *long_cases(range(200, 6000))])
def test_any_members_may_be_lost_at_any_moment(seeds: range) -> None:
    given = anew = 0
    for seed in seeds:
        world = run(drawn(seed), seed)
        given += world.given
        anew += world.given_anew
    assert given > len(seeds) // 20
    assert anew or len(seeds) < 1000, "no slice was settled anew"


# That this finds a rule that is broken.
def run_many(members: int, **about: Any) -> None:
    for seed in range(600):
        run(TakeoverWorld(members, **about), seed)


def settle_after_the_oldest(self: Takeovers, slices: Any) -> list[Settled]:
    found = []
    for each in SETTLE_ALL(self, slices):
        known = self._slices[each.slice]
        known.round = min(known.by.values())
        known.owed, known.giver = (), NOBODY
        found.append(Settled(each.slice, *known.round, NOBODY))
    return found


def give_what_is_old(self: Takeovers, slices: Any) -> list[Settled]:
    found = []
    for each in SETTLE_ALL(self, slices):
        known = self._slices[each.slice]
        if known.giver != NOBODY:
            known.giver = known.owed[0]
        found.append(each._replace(giver=known.giver))
    return found


SETTLE_ALL = Takeovers._settle_all


def forget_who_gives(self: Takeovers, member: int) -> list[Settled]:
    open_ = [n for n, each in self._slices.items() if not each.is_settled]
    return [each for each in DROP(self, member) if each.slice in open_]


DROP = Takeovers.drop


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_settle_all", settle_after_the_oldest),
        ("_settle_all", give_what_is_old),
        ("drop", lambda self, member: []),
    ],
)
def test_these_worlds_notice_a_wrong_settlement(
    name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Takeovers, name, broken)
    with pytest.raises((AssertionError, RemoteProtocolError)):
        run_many(3, mortal=(0, 2), kills=2)


def test_the_exploration_notices_a_giver_that_is_lost_and_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few orders of events have one."""
    monkeypatch.setattr(Takeovers, "drop", forget_who_gives)
    with pytest.raises(AssertionError, match="deadlock"):
        explore(TakeoverWorld(3, mortal=(0, 2), kills=2, rounds=STEPS[:1]))


@pytest.mark.parametrize("is_lost", [True, False])
def test_these_worlds_notice_a_wrong_push(is_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not sent again, or sent again for nothing."""
    monkeypatch.setattr(
        WorkerMachine, "is_lost", lambda self, slice_, round_: is_lost and slice_ in self._open
    )
    with pytest.raises((AssertionError, RemoteProtocolError)):
        run_many(3, mortal=(0,))


def test_these_worlds_notice_owners_that_depend_on_who_has_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def odd(slice_: int, home: int, servers: int, lost: Any, moves: int) -> int:
        alive = [server for server in range(servers) if server not in lost]
        return home if home in alive else alive[(slice_ + len(lost)) % len(alive)]

    monkeypatch.setattr("tests.unit.takeover_world.owner_of", odd)
    with pytest.raises((AssertionError, RemoteProtocolError)):
        run_many(4, homes=(0, 1, 2, 3), kills=2)


def test_these_worlds_notice_a_move_past_the_next_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has heard of a loss, and not of the move, claims at another one."""
    far = owner_of

    def odd(slice_: int, home: int, servers: int, lost: Any, moves: int) -> int:
        return far(slice_, home, servers, lost, 2 * moves)

    monkeypatch.setattr("tests.unit.takeover_world.owner_of", odd)
    with pytest.raises((AssertionError, RemoteProtocolError)):
        run_many(4, homes=(0, 1, 2), moves={2: (0, 1, 2)})
