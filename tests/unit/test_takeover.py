"""A lost server's slices go on: each step is made once, and little optimizer state is lost."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from foreprop.core import buddy
from foreprop.core.buddy import most_lost
from foreprop.core.collect import AnswerSlice, UpdateSlice
from foreprop.core.frames import InstallValue, PushArrived
from foreprop.core.membership import Members
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Partition, plan_slices
from foreprop.core.takeover import Settled, Settlement, SliceTakenOver, pushed_again
from foreprop.errors import RemoteProtocolError
from tests import buddies
from tests.buddies import Plan, ServedLife, explore
from tests.tiers import long_cases
from tests.unit.counting_world import counting_server


def settle(claims: dict[int, list[int]], *, buddy: int = 0) -> list[Settled]:
    settlement = Settlement([3, 5], sorted(claims), buddy=buddy)
    found: list[Settled] = []
    for member, steps in claims.items():
        assert not found
        found = settlement.add(member, steps)
    return found


def test_a_slice_goes_on_from_the_newest_step_that_anybody_has() -> None:
    assert settle({0: [7, 7], 1: [8, 7], 2: [8, 8]}) == [
        Settled(3, 8, 1, (0,)),
        Settled(5, 8, 2, (0, 1)),
    ]


def test_the_worker_beside_the_substitute_gives_what_it_has() -> None:
    assert [each.giver for each in settle({0: [8, 7], 1: [8, 8], 2: [8, 8]}, buddy=2)] == [2, 2]


def test_whatever_order_claims_come_in_the_same_is_settled() -> None:
    claims = {0: [7, 7], 1: [8, 7], 2: [7, 8]}
    found = [settle(dict(order)) for order in itertools.permutations(claims.items())]
    assert all(each == found[0] for each in found)


def test_what_cannot_be_is_refused() -> None:
    settlement = Settlement([3], [0, 1, 2], buddy=1)
    assert settlement.add(0, [4]) == []
    with pytest.raises(RemoteProtocolError, match="claims slices out of turn"):
        settlement.add(0, [4])
    with pytest.raises(RemoteProtocolError, match="claims slices out of turn"):
        settlement.add(3, [4])
    with pytest.raises(RemoteProtocolError, match="claims 2 slices of 1"):
        settlement.add(1, [4, 4])
    with pytest.raises(RemoteProtocolError, match="more than one apart"):
        settlement.add(1, [6])
    assert settlement.missing == [1, 2]


def test_only_lost_pushes_are_sent_again() -> None:
    assert pushed_again({3: 8, 5: 9, 7: 2}, {3: 8, 5: 8}) == [5]
    with pytest.raises(RemoteProtocolError, match="goes on from step 6"):
        pushed_again({3: 8}, {3: 6})


def substitute() -> ServerMachine:
    """For ranks 0 and 2; rank 1 is gone."""
    members = Members(3)
    members.drop(1)
    slices = plan_slices([2], [4], Partition(slice_elems=1))
    return counting_server(slices, members, ["p"])


def test_who_lacks_the_last_step_is_answered_and_the_next_one_closes_with_all() -> None:
    machine = substitute()
    assert machine.handle(PushArrived(2, 0, 6, 2, 0)) == []  # before the values
    told = machine.handle(SliceTakenOver(0, 5, 2, (0,)))
    assert told == [InstallValue(0), AnswerSlice(0, 5, 2, (0,))]
    update = UpdateSlice(0, 6, (0, 2), counted=(0, 2))
    assert machine.handle(PushArrived(0, 0, 6, 2, 0)) == [update]


def test_a_slice_is_taken_over_once() -> None:
    machine = substitute()
    machine.handle(SliceTakenOver(0, 5, 0, ()))
    with pytest.raises(RemoteProtocolError, match="taken over twice"):
        machine.handle(SliceTakenOver(0, 5, 0, ()))
    with pytest.raises(RemoteProtocolError, match="does not belong"):
        machine.handle(SliceTakenOver(9, 5, 0, ()))


USUAL = {(2, 0, 2), (2, 1, 5), (3, 0, 1), (3, 2, 5)}
"""Workers, the lost one, and steps between copies of the state."""


@pytest.mark.parametrize(
    ("workers", "lost", "every"),
    [
        pytest.param(*node, every, marks=[] if (*node, every) in USUAL else pytest.mark.long)
        for node in [(2, 0), (2, 1), (3, 0), (3, 2), (4, 1)]
        for every in (1, 2, 5)
    ],
)
@pytest.mark.parametrize("seeds", [range(20), *long_cases(range(20, 90))])
def test_any_node_may_be_lost_at_any_moment(
    workers: int, lost: int, every: int, seeds: range
) -> None:
    """`tests.buddies` checks each step of the way; here, that what was to happen did."""
    behind: list[int] = []
    undone = 0
    for seed in seeds:
        kill_after = random.Random(seed).randint(1, 60 * workers)
        plan = Plan(workers=workers, lost=lost, every=every, kill_after=kill_after)
        life = ServedLife(plan).run(seed)
        behind += life.behind
        undone += life.undone
    assert len(behind) > 2 * len(seeds), "too few nodes were lost"
    assert max(behind) in range(min(every - 1, 1), most_lost(every) + 1)
    if len(seeds) > 50:
        assert undone, "no update was lost that nobody had seen"
        assert every == 5 or max(behind) == most_lost(every)


# Every order of events of the smallest sessions: `tests.buddies` checks the rules of each step.
def alike(**plan: Any) -> Plan:
    return Plan(prompt=True, **plan)


SMALLEST = [
    # the session; how many steps of state are lost, updates that nobody has seen, and the states
    (Plan(workers=2, sizes_elems=(1,), steps=2, every=1, lost=0), {0}, {0, 1}, 200),
    (alike(workers=2, sizes_elems=(2,), steps=2, every=1, lost=1), {0}, {0, 1, 2}, 300),
    (alike(workers=3, sizes_elems=(1,), steps=2, every=1, lost=0), {0}, {0, 1}, 300),
]
LONGER = [
    (alike(workers=2, sizes_elems=(1,), steps=3, every=2, lost=1), {0, 1, 2}, {0}, 150),
    (alike(workers=3, sizes_elems=(1,), steps=3, every=2, lost=1), {0, 1, 2}, {0}, 800),
    (Plan(workers=3, sizes_elems=(1,), steps=2, every=1, lost=2), {0}, {0, 1}, 900),
    (alike(workers=3, sizes_elems=(1, 1), steps=1, every=1, lost=2), {0}, {0, 1, 2}, 2000),
]


@pytest.mark.parametrize(
    ("plan", "lost_steps", "lost_updates", "states"),
    [*SMALLEST, *[pytest.param(*each, marks=pytest.mark.long) for each in LONGER]],
    ids=str,
)
def test_in_any_interleaving_each_step_is_made_once(
    plan: Plan, lost_steps: set[int], lost_updates: set[int], states: int
) -> None:
    behind, undone = set[int](), set[int]()

    def look(life: ServedLife) -> None:
        behind.update(life.behind)
        undone.add(life.undone)

    assert explore(plan, look) > states
    assert (behind, undone) == (lost_steps, lost_updates)


# That the exploration finds a rule that is broken.
def give_what_is_old(self: Settlement, place: int) -> Settled:
    steps = {member: claimed[place] for member, claimed in sorted(self._claims.items())}
    return SETTLE(self, place)._replace(giver=min(steps, key=steps.__getitem__))


SETTLE = Settlement._settle


def test_the_exploration_notices_values_of_the_wrong_survivor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Settlement, "_settle", give_what_is_old)
    with pytest.raises(AssertionError):
        explore(alike(workers=3, sizes_elems=(1,), steps=2, every=1, lost=0))


def test_the_exploration_notices_a_push_that_is_sent_again_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buddies, "pushed_again", lambda unanswered, settled: sorted(unanswered))
    with pytest.raises((AssertionError, RemoteProtocolError)):
        explore(alike(workers=3, sizes_elems=(1,), steps=2, every=1, lost=0))


def test_the_exploration_notices_a_push_that_is_not_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buddies, "pushed_again", lambda unanswered, settled: [])
    with pytest.raises(AssertionError, match="deadlock"):
        explore(alike(workers=2, sizes_elems=(1,), steps=2, every=1, lost=0))


@pytest.mark.parametrize("every", [1, 2])
def test_the_exploration_notices_a_state_that_is_too_old(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buddy, "most_lost", lambda every: most_lost(every) + 1)
    with pytest.raises(AssertionError):
        explore(alike(workers=2, sizes_elems=(1,), steps=4, every=every, lost=0))
