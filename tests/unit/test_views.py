"""Members agree on who they are, whoever dies, is silent or is cut off, in any order."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from foreprop.core.views import (
    SLOTS,
    AdmissionAsked,
    EndMember,
    EnterView,
    LeaveView,
    MemberDied,
    MemberSilent,
    SendTo,
    StepBegun,
    View,
    ViewMachine,
    Vote,
    first_view,
    is_quorum,
    owner_of,
    slices_of,
)
from foreprop.errors import InternalError
from tests.tiers import long_cases
from tests.unit.exploration import explore_states
from tests.unit.view_world import ViewWorld

LONG = pytest.mark.long
NEWCOMER = SLOTS + 2


def explore(members: int, **about: Any) -> set[tuple[frozenset[int], frozenset[int]]]:
    """All ends: who is left, and who has ended by itself. `ViewWorld` looks for two halves."""
    ends = set()

    def visit(world: ViewWorld) -> Any:
        choices = world.choices()
        if not world.pressing() and all(what != "stalled" for what, *_ in choices):
            world.check_agreed()
            there = frozenset(m for m in world.alive if world.views[m])
            ends.add((there, frozenset(world.ends)))
        return choices

    explore_states(ViewWorld(members, **about), visit)
    return ends


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("members", "mortal"),
    [(2, (0, 1)), (3, (0, 1, 2)), pytest.param(4, (0, 3), marks=LONG)],
)
def test_whoever_dies_and_when_the_others_go_on(members: int, mortal: tuple[int, ...]) -> None:
    """Between two sends of the same vote, too: each link loses what it likes of the last ones."""
    everybody = frozenset(range(members))
    lost = [some for count in range(3) for some in itertools.combinations(mortal, count)]
    assert explore(members, kills=2, mortal=mortal) == {
        (everybody - set(some), frozenset()) for some in lost
    }, "a death makes nobody else end"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("members", "cut", "stays"),
    [
        (2, (0,), (0,)),
        (3, (0,), (1, 2)),
        (3, (2,), (0, 1)),
        pytest.param(4, (3,), (0, 1, 2), marks=LONG),
    ],
)
def test_of_two_halves_one_goes_on(
    members: int, cut: tuple[int, ...], stays: tuple[int, ...]
) -> None:
    everybody, kept = frozenset(range(members)), frozenset(stays)
    assert explore(members, cut=cut) == {
        (everybody, frozenset()),
        (kept, everybody - kept),
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("members", "about"),
    [
        (3, {"cut": (0,), "kills": 1}),
        (3, {"accusations": ((1, 0),), "kills": 1}),
        (3, {"accusations": ((1, 0), (0, 1))}),
        (3, {"accusations": ((1, 0), (2, 1), (0, 2))}),
        pytest.param(3, {"accusations": ((1, 0), (2, 1), (0, 2)), "kills": 1}, marks=LONG),
        pytest.param(3, {"accusations": ((1, 0), (0, 1)), "kills": 2}, marks=LONG),
        pytest.param(4, {"accusations": ((2, 0),)}, marks=LONG),
    ],
    ids=str,
)
def test_who_is_accused_or_cut_off_while_another_dies(members: int, about: Any) -> None:
    """All may end then; never do two halves train, nor does anybody wait for ever."""
    ends = explore(members, **about)
    assert any(ended and there for there, ended in ends)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "about",
    [
        {"members": 1, "steps": 2},
        {"members": 1, "kills": 1, "steps": 1},
        {"members": 2},
        pytest.param({"members": 2, "steps": 2}, marks=LONG),
        pytest.param({"members": 2, "steps": 1, "kills": 1}, marks=LONG),
    ],
    ids=str,
)
def test_a_newcomer_s_first_step_is_known_before_it_begins(about: dict[str, Any]) -> None:
    ends = explore(newcomer=NEWCOMER, **about)
    assert any(NEWCOMER in there for there, _ in ends)
    assert all(ended <= {NEWCOMER} for _, ended in ends), "nobody ends for its sake"


def world_of(chance: random.Random) -> ViewWorld:
    """Of members that do not all hear each other, as behind a broken switch."""
    members = chance.choice([4, 4, 5])
    side = [chance.choice([0, 0, 1, 1, 2]) for _ in range(members)]  # 2 hears both
    apart = [p for p in itertools.permutations(range(members), 2) if {side[m] for m in p} == {0, 1}]
    return ViewWorld(
        members,
        kills=chance.choice([0, 1, 2]),
        accusations=chance.sample(apart, min(len(apart), chance.randrange(8))),
        cut=chance.choice([(), chance.sample(range(members), chance.randrange(1, members))]),
        newcomer=chance.choice([None, SLOTS + members]),
        steps=chance.choice([0, 3]),
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", [150, *long_cases(5000)])
def test_seeded_members_that_do_not_all_hear_each_other(seeds: int) -> None:
    left = 0
    for seed in range(seeds):
        chance = random.Random(seed)
        world = world_of(chance)
        world.run(chance)
        world.check_agreed()
        left += any(world.views[member] for member in world.alive)
    assert left > seeds / 2


# One machine by itself.
@pytest.mark.parametrize(
    ("some", "of", "dead", "may"),
    [
        ((0, 1), (0, 1, 2), (), True),
        ((1, 2), (0, 1, 2), (), True),
        ((0,), (0, 1, 2), (1,), False),
        ((2,), (0, 1, 2), (0, 1), True),
        ((0,), (0, 1), (), True),
        ((1,), (0, 1), (), False),
        ((1,), (0, 1), (0,), True),
        ((2, 3), (0, 1, 2, 3), (1,), False),
        ((0, 3), (0, 1, 2, 3), (), True),
        ((), (0, 1), (0, 1), False),
        ((5, 6), (0, 1), (0, 1), False),
    ],
)
def test_a_quorum(some: Any, of: Any, dead: Any, may: bool) -> None:
    assert is_quorum(some, of, dead) == may


def test_two_quorums_have_a_member_in_common_or_all_of_one_are_dead() -> None:
    everybody = range(5)
    sets = [set(s) for n in range(1, 6) for s in itertools.combinations(everybody, n)]
    for dead in [set(), *sets]:
        for one, other in itertools.product(sets, sets):
            if is_quorum(one, everybody, ()) and is_quorum(other, everybody, dead):
                assert one & other or one <= dead


def test_a_lost_server_s_slices_go_to_the_others_in_turn_and_home_again() -> None:
    homes = {slice_: slice_ % 3 for slice_ in range(9)}
    assert slices_of(1, first_view(range(3)), homes) == [1, 4, 7]
    without = View(1, 0, (0, 2), (0, 0))
    assert [owner_of(slice_, 1, without) for slice_ in (1, 4, 7)] == [2, 0, 2]
    assert slices_of(0, without, homes) == [0, 3, 4, 6]
    again = View(2, 1, (0, 2, SLOTS + 1), (0, 0, 9))
    assert slices_of(SLOTS + 1, again, homes) == [1, 4, 7]


def vote_of(sender: int, number: int, members: tuple[int, ...], **about: Any) -> Vote:
    known: dict[str, Any] = {"dead": frozenset(), "silent": frozenset(), "joining": frozenset()}
    known |= {"base": first_view(range(3)), "step": 0}
    return Vote(sender=sender, number=number, members=members, **known | about)


def test_a_death_as_frames() -> None:
    """It leaves the view, votes, and enters the next one when all have voted alike."""
    machine = ViewMachine(0, first_view(range(3)))
    dead = frozenset({2})
    vote = vote_of(0, 1, (0, 1), dead=dead)
    assert machine.handle(MemberDied(2)) == [LeaveView(0), SendTo((1,), vote)]
    assert machine.awaited == [1]
    view = View(1, 0, (0, 1), (0, 0))
    assert machine.handle(vote_of(1, 1, (0, 1), dead=dead)) == [
        SendTo((1,), view),
        EnterView(view, lost=(2,)),
    ]
    assert machine.handle(view) == [], "it is in it"
    assert machine.awaited == []
    other = ViewMachine(1, first_view(range(3)))
    assert other.handle(vote)[0] == LeaveView(0), "it need not have seen the death itself"
    assert other.base == view


def test_who_is_behind_is_told() -> None:
    machine = ViewMachine(0, first_view(range(3)))
    view = View(4, 0, (0, 1, 2), (0, 0, 0))
    machine.handle(view)
    assert machine.handle(vote_of(2, 1, (0, 2))) == [SendTo((2,), view)]


def test_who_is_left_out_ends() -> None:
    machine = ViewMachine(2, first_view(range(3)))
    (ended,) = machine.handle(View(1, 0, (0, 1), (0, 0)))
    assert isinstance(ended, EndMember)
    assert ended.reason == "the others went on without it, as view 1 with members [0, 1]"
    assert machine.handle(MemberDied(0)) == [], "it says nothing more"


def test_who_is_no_majority_ends() -> None:
    machine = ViewMachine(1, first_view(range(2)))
    (ended,) = machine.handle(MemberSilent(0))
    assert isinstance(ended, EndMember)
    assert ended.reason.startswith("only members [1] of view 0 with members [0, 1] can be reached")
    machine = ViewMachine(2, first_view(range(3)))
    assert machine.handle(vote_of(0, 1, (0, 1, 2), silent=frozenset({(0, 2)})))[-1:] == []
    machine.handle(MemberDied(1))
    (ended,) = machine.handle(MemberSilent(0))
    assert isinstance(ended, EndMember), "who has left it out cannot tell it"
    assert ViewMachine(1, first_view(range(2))).handle(MemberDied(0))[-1] == EnterView(
        View(1, 0, (1,), (0,)), lost=(0,)
    ), "the dead count for nobody"


def test_an_attempt_that_may_have_been_formed_binds() -> None:
    """Members 1, 2 and 3 may be a view by now, of which 1 and 0 are no quorum."""
    machine, base = ViewMachine(1, first_view(range(4))), first_view(range(4))
    accused = frozenset({(2, 0)})
    voted = machine.handle(vote_of(2, 1, (1, 2, 3), silent=accused, base=base))
    assert voted[0] == LeaveView(0)
    assert machine.awaited == [3]
    more = frozenset({(0, 2), (0, 3)})
    assert machine.handle(vote_of(0, 2, (0, 1), silent=more, base=base)) == [], "it waits for 3"
    (ended,) = machine.handle(MemberSilent(3))
    assert isinstance(ended, EndMember)


def test_nobody_goes_back_to_a_view_that_it_has_given_up() -> None:
    """It has voted without 3 since, which others may have formed: they all vote once more."""
    machine, base = ViewMachine(1, first_view(range(5))), first_view(range(5))
    machine.handle(MemberDied(4))
    machine.handle(MemberDied(3))
    formed = View(1, 0, (0, 1, 2, 3), (0, 0, 0, 0))
    dead = frozenset({3, 4})
    vote = vote_of(1, 3, (0, 1, 2), dead=dead, base=formed)
    assert machine.handle(formed) == [SendTo((0, 2), vote)]
    late = vote_of(0, 2, (0, 1, 2), dead=dead, base=base)
    assert machine.handle(late) == [SendTo((0,), formed)]
    assert machine.awaited == [0, 2]


def test_who_may_have_entered_a_view_that_was_given_up_is_told() -> None:
    """Member 0 may be in the attempt that 1 has voted for, which is not of the view it learns."""
    machine, base = ViewMachine(1, first_view(range(4))), first_view(range(4))
    dead = frozenset({2})
    machine.handle(vote_of(0, 2, (0, 1, 3), dead=dead, base=base))
    formed = View(1, 0, (1, 2, 3), (0, 0, 0))
    assert machine.handle(formed) == [
        SendTo((3,), vote_of(1, 3, (1, 3), dead=dead, base=formed)),
    ]
    told, entered = machine.handle(vote_of(3, 3, (1, 3), dead=dead, base=formed))
    assert told == SendTo((0, 3), View(3, 1, (1, 3), (0, 0)))
    assert entered == EnterView(View(3, 1, (1, 3), (0, 0)), lost=(0, 2))


def test_a_newcomer_counts_two_steps_after_the_last_that_is_begun() -> None:
    machine = ViewMachine(0, first_view(range(2)))
    for step in (5, 6):
        machine.handle(StepBegun(step))
    everybody, base = (0, 1, NEWCOMER), first_view(range(2))
    about: dict[str, Any] = {"base": base, "joining": frozenset({NEWCOMER})}
    _, vote = machine.handle(AdmissionAsked(NEWCOMER))
    assert vote == SendTo((1, NEWCOMER), vote_of(0, 1, everybody, step=6, **about))
    assert machine.handle(vote_of(1, 1, everybody, step=7, **about)) == []
    entered = machine.handle(vote_of(NEWCOMER, 1, everybody, **about))[-1]
    assert entered == EnterView(View(1, 0, everybody, (0, 0, 9)), lost=())
    view = entered.view
    assert (view.counting(8), view.counting(9)) == ((0, 1), everybody)


def test_nobody_comes_to_a_slot_that_is_taken() -> None:
    machine = ViewMachine(0, first_view(range(2)))
    assert machine.handle(AdmissionAsked(SLOTS + 1)) == []
    stranger = ViewMachine(NEWCOMER, None)
    assert stranger.handle(vote_of(0, 1, (0, 1))) == [], "it is not asked"
    with pytest.raises(InternalError, match="does not know the event"):
        machine.handle("hello")
