"""Epochs that are dealt anew when workers leave: nothing is lost, nothing comes twice."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from foreprop.core.dealing import (
    CERTAIN_STEPS,
    Deal,
    DealtPart,
    MemberChange,
    PassProgress,
    unread,
)
from tests.conformance.shares import torchs_share
from tests.dealtloop import Loop, Reader, all_read, join, left_within, run


@st.composite
def loops(draw: st.DrawFn, least: int = 2) -> Loop:
    workers = draw(st.integers(least, 5))
    loop = Loop(
        items=draw(st.integers(1, 120)),
        workers=workers,
        rounds=draw(st.integers(1, 4)),
        ahead=draw(st.integers(0, 5)),
        batches_per_step=draw(st.integers(1, 3)),
        steps_before=draw(st.integers(0, 3)),
    )
    victims = draw(st.lists(st.integers(0, workers - 1), unique=True, max_size=workers - 1))
    steps = st.integers(0, loop.steps_before + 30)
    loop.changes = [MemberChange(rank, draw(steps)) for rank in victims]
    for rank in range(workers):
        for change in loop.changes:
            early = st.integers(change.step, change.step + CERTAIN_STEPS)
            loop.told[rank, change] = draw(early)
    return loop


@given(loops(), st.data())
def test_what_nobody_has_read_is_known_in_the_middle_of_an_epoch(
    loop: Loop, data: st.DataObject
) -> None:
    """A checkpoint has it, for another world to go on from, with what leavers had not read."""
    done = data.draw(st.integers(loop.steps_before, loop.steps_before + 30))
    loop.joined = (loop.workers, done + 1)  # nobody; then every rank keeps where it is
    left = {each.rank: each.step for each in loop.changes if each.step <= done}
    readers = run(loop)
    here = [reader for rank, reader in readers.items() if rank not in left]
    assume(here and here[0].progress is not None)
    places = [(each.given, each.drawn, each.deals) for each in map(progress_of, here)]
    assert places == places[:1] * len(places)
    gone = tuple(MemberChange(rank, step) for rank, step in left.items())
    part = DealtPart(loop.workers, loop.rounds, progress_of(here[0]), gone)
    rest = list(unread(part, iter(range(loop.items))))
    read = [item for rank, reader in readers.items() for item in reader.until(left.get(rank, done))]
    times = Counter([*read, *rest])
    assert times.keys() == set(range(loop.items))
    assert {item for item, count in times.items() if count > 1} <= set(range(loop.workers))
    assert len(set(rest)) == len(rest)


def progress_of(reader: Reader) -> PassProgress:
    assert reader.progress is not None
    return reader.progress


@given(loops())
def test_every_sample_is_read_once_whoever_leaves_when(loop: Loop) -> None:
    """But for those that fill up a round, and for what only the end of the epoch has lost."""
    readers = run(loop)
    survivors = [rank for rank in readers if rank not in left_within(loop)]
    first = readers[survivors[0]]
    for rank in survivors:
        steps = [(at, len(items)) for at, items in readers[rank].read]
        assert steps == [(at, len(items)) for at, items in first.read], "batches are not alike"
        assert readers[rank].epoch.deals == first.epoch.deals
    times = Counter(all_read(loop, readers))
    twice = {item for item, count in times.items() if count > 1}
    assert twice <= set(range(loop.workers)), "they are not from the beginning of the epoch"
    lost = loop.items - len(times)
    written_off = [
        sum(readers[rank].epoch.write_off(change) for change in loop.changes) for rank in survivors
    ]
    assert written_off == [written_off[0]] * len(survivors)
    assert 0 <= written_off[0] - lost <= loop.workers, "what fills up a round is not lost"
    if all(change.is_certain(first.done) for change in loop.changes):
        assert lost == 0


@given(loops())
def test_what_is_known_early_makes_no_difference(loop: Loop) -> None:
    late = copy.copy(loop)
    late.told = {}
    assert [each.read for each in run(loop).values()] == [each.read for each in run(late).values()]


@given(loops())
def test_until_somebody_leaves_it_is_torchs_share(loop: Loop) -> None:
    loop.changes = ()
    for rank, reader in run(loop).items():
        read = [item for _, items in reader.read for item in items]
        assert read == torchs_share(range(loop.items), rank, loop.workers)


def test_a_death_by_hand() -> None:
    """Three ranks, two samples a batch; rank 1 dies within step 2: its batch 1 was its last."""
    left = MemberChange(1, 2)
    readers = run(Loop(items=30, workers=3, rounds=2, changes=[left]))
    # after 4 steps all know; batches 2 and 3 of rank 1 come first
    before = [(step, [6 * step - 6, 6 * step - 3]) for step in (1, 2, 3, 4)]
    assert readers[0].read == [*before, (5, [13, 19]), (6, [24, 26]), (7, [28])]
    assert readers[2].read[4:] == [(5, [16, 22]), (6, [25, 27]), (7, [29])]
    assert readers[1].until(2) == [1, 4, 7, 10]
    assert readers[0].epoch.deals == [Deal(0, (0, 1, 2)), Deal(4, (0, 2), ((1, 2),), items=4)]


def test_an_epoch_that_has_been_drawn_goes_on() -> None:
    """All was drawn ahead when it came to be known; what rank 0 was still to read comes then."""
    loop = Loop(items=12, workers=2, rounds=1, ahead=9, changes=[MemberChange(0, 3)])
    read = run(loop)[1].read
    assert read == [(1 + at, [2 * at + 1]) for at in range(6)] + [(7, [6]), (8, [8]), (9, [10])]


def test_who_leaves_in_the_last_step_takes_its_batch_along() -> None:
    """It had pushed nothing of step 4 yet: nobody is certain of that before step 5."""
    loop = Loop(items=16, workers=2, rounds=2, changes=[MemberChange(0, 3)])
    readers = run(loop)
    assert [step for step, _ in readers[1].read] == [1, 2, 3, 4]
    assert readers[1].epoch.write_off(MemberChange(0, 3)) == 2
    assert readers[1].epoch.write_off(MemberChange(0, 3)) == 0, "it is said once"
    assert set(range(16)) - set(all_read(loop, readers)) == {12, 14}


def test_the_next_pass_is_of_those_who_are_left() -> None:
    loop = Loop(items=9, workers=3, rounds=3, steps_before=8, changes=[MemberChange(1, 6)])
    readers = run(loop)
    assert [readers[rank].read for rank in (0, 2)] == [
        [(9, [0, 2, 4]), (10, [6, 8])],
        [(9, [1, 3, 5]), (10, [7, 0])],
    ]


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 4, 5, 6])
def test_the_length_is_known_at_any_time(taken: int) -> None:
    """Each of three ranks has 10 of 30 samples; with two from the fifth batch on, 13 in all."""
    loop = Loop(items=30, workers=3, rounds=2, changes=[MemberChange(1, 2)])
    reader = Reader(loop, 0)
    for _ in range(taken):
        reader.next()
        reader.epoch.given += 1
        reader.done += 1
    assert reader.epoch.count(30) == (10 if taken <= 4 else 13)


def test_a_session_that_begins_in_a_pass_counts_from_one() -> None:
    """What was read before belongs to its first step: who leaves after that has read it."""
    reader = Reader(Loop(items=30, workers=3, rounds=2, steps_before=70), 0)
    for _ in range(2):
        reader.next()
        reader.epoch.given += 1
        reader.done += 1
    reader.epoch.begin_anew()
    reader.loop.changes, reader.done = [MemberChange(2, 1)], 3
    reader.next()
    assert reader.epoch.deals[-1] == Deal(2, (0, 1), ((2, 2),))


# Joining.
@st.composite
def loops_with_a_joiner(draw: st.DrawFn) -> Loop:
    """One that has left comes again, some steps later; others leave, too."""
    loop = draw(loops().filter(lambda each: bool(each.changes)))
    left = loop.changes[0]
    step = max(left.step, loop.steps_before) + 1 + draw(st.integers(0, 8))
    back = MemberChange(left.rank, step, joins=True)
    loop.changes = [*loop.changes, back]
    loop.joined = (left.rank, step)
    return loop


@st.composite
def loops_that_grow(draw: st.DrawFn) -> Loop:
    """One comes that was never there, while others leave."""
    loop = draw(loops(least=1))
    step = loop.steps_before + 1 + draw(st.integers(0, 30))
    loop.changes = [*loop.changes, MemberChange(loop.workers, step, joins=True)]
    loop.joined = (loop.workers, step)
    return loop


@given(st.one_of(loops_with_a_joiner(), loops_that_grow()))
def test_who_joins_takes_its_part_of_what_is_left(loop: Loop) -> None:
    """It makes as many batches as all others. At first it reads what the first member reads."""
    readers = run(loop)
    survivors = [rank for rank in readers if rank not in left_within(loop)]
    first = readers[survivors[0]]
    joiner = join(loop, first)
    if joiner is None:
        return
    assert loop.joined is not None
    since = [(step, len(items)) for step, items in first.read if step >= loop.joined[1]]
    assert [(step, len(items)) for step, items in joiner.read] == since
    assert joiner.epoch.deals == first.epoch.deals
    before = len(first.read) - len(since)
    dealt = [deal.batch for deal in first.epoch.deals if joiner.rank in deal.joined]
    begins = next(iter(dealt), len(first.read))
    copies = {item for _, items in joiner.read[: begins - before] for item in items}
    times = Counter([*all_read(loop, readers), *joiner.until(10**9)])
    twice = {item for item, count in times.items() if count > 1}
    assert twice - copies <= set(range(loop.workers))
    lost = loop.items - len(times)
    assert lost <= sum(first.epoch.write_off(change) for change in loop.changes)


def test_a_joiner_by_hand() -> None:
    """Rank 1 leaves within step 2 and joins at step 6; loaders draw one batch ahead."""
    changes = [MemberChange(1, 2), MemberChange(1, 6, joins=True)]
    loop = Loop(items=36, workers=2, rounds=2, ahead=1, changes=changes, joined=(1, 6))
    first = run(loop)[0]
    alone = [(6, [9, 11]), (7, [13, 15])]
    shared = [(8, [17, 20]), (9, [22, 24]), (10, [26, 28]), (11, [30, 32]), (12, [34])]
    assert first.read[5:] == [*alone, *shared]
    joiner = join(loop, first)
    assert joiner is not None
    shared = [(8, [19, 21]), (9, [23, 25]), (10, [27, 29]), (11, [31, 33]), (12, [35])]
    assert joiner.read == [*alone, *shared]


def test_a_world_of_one_that_grows() -> None:
    """Rank 1 joins at step 3. A round that is not full has the first sample once more."""
    changes = [MemberChange(1, 3, joins=True)]
    loop = Loop(items=9, workers=1, rounds=1, changes=changes, joined=(1, 3))
    first = run(loop)[0]
    assert first.read == [(1, [0]), (2, [1]), (3, [2]), (4, [3]), (5, [5]), (6, [7])]
    joiner = join(loop, first)
    assert joiner is not None
    assert joiner.read == [(3, [2]), (4, [4]), (5, [6]), (6, [8])]
    assert first.epoch.deals == [Deal(0, (0,)), Deal(3, (0, 1), (), (1,))]
