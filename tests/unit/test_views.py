"""Members agree on who they are, whoever dies, is silent or is cut off, in any order."""

from __future__ import annotations

import itertools
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


def left_of(members: int, lost: int) -> set[frozenset[int]]:
    """All that may be left when so many may be lost."""
    return {
        frozenset(range(members)) - set(some)
        for count in range(lost + 1)
        for some in itertools.combinations(range(members), count)
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("members", "kills"), [(2, 1), (2, 2), (3, 2), pytest.param(4, 2, marks=LONG)]
)
def test_whoever_dies_and_when_the_others_go_on(members: int, kills: int) -> None:
    """Between two sends of the same vote, too: each link loses what it likes of the last ones."""
    ends = explore(members, kills=kills)
    assert {there for there, _ in ends} == left_of(members, kills)
    assert not any(ended for _, ended in ends), "a death makes nobody else end"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("members", "cut", "stays"),
    [
        (2, (0,), (0,)),
        (3, (0,), (1, 2)),
        (3, (2,), (0, 1)),
        pytest.param(4, (0, 3), (0, 3), marks=LONG),
        pytest.param(4, (1, 2), (0, 3), marks=LONG),
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
        pytest.param(4, {"accusations": ((2, 0),), "kills": 1}, marks=LONG),
        pytest.param(4, {"cut": (0, 1), "kills": 1, "mortal": (2,)}, marks=LONG),
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
    assert ViewMachine(1, first_view(range(2))).handle(MemberDied(0))[-1] == EnterView(
        View(1, 0, (1,), (0,)), lost=(0,)
    ), "the dead count for nobody"


def test_an_attempt_that_may_have_been_formed_binds() -> None:
    """Members 1 and 2 may be a view by now: member 2 makes none with 0, unless 1 is dead."""
    machine = ViewMachine(2, first_view(range(3)))
    accused = frozenset({(1, 0)})
    sent = machine.handle(vote_of(1, 1, (1, 2), silent=accused))
    assert isinstance(sent[-1], EnterView)
    machine = ViewMachine(2, first_view(range(3)))
    left, _ = machine.handle(MemberSilent(0))
    assert left == LeaveView(0)
    both = frozenset({(0, 1), (2, 0)})
    assert machine.handle(vote_of(0, 1, (0, 2), silent=both)) == [], "it waits for 1"
    (ended,) = machine.handle(MemberSilent(1))
    assert isinstance(ended, EndMember)


def test_a_newcomer_counts_two_steps_after_the_last_that_is_begun() -> None:
    machine = ViewMachine(0, first_view(range(2)))
    machine.handle(StepBegun(6))
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
