"""Row-wise parameters: the shards, the server's decisions, and how rows travel."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.core.barrier import StepBarrier
from foreprop.core.closing import AllMembers, RanksApart
from foreprop.core.collect import DropPush
from foreprop.core.firstmembers import FirstMembers
from foreprop.core.frames import (
    FailSession,
    InstallValue,
    NormArrived,
    PeerLeft,
    PullArrived,
    PushArrived,
    ValueArrived,
)
from foreprop.core.membership import MemberLeft, Members, PeerDropped
from foreprop.core.norm import ZERO, SendNormPart, SquareSum
from foreprop.core.rows_machine import (
    AnswerRows,
    RowsMachine,
    RowsSummed,
    RowsUpdated,
    SumRows,
    UpdateRows,
)
from foreprop.core.slicing import Shard, plan_shards, rows_of
from foreprop.core.staleness import BoundedStaleness, Staleness, most_steps_apart
from foreprop.core.wire import Flag
from foreprop.errors import InternalError, RemoteProtocolError
from foreprop.features.tables.parts import (
    RowPart,
    decode_part,
    decode_pull,
    encode_part,
    encode_pull,
    part_limit_bytes,
    pulled_shard,
)

SHARDS = plan_shards([(0, 10, 4), (2, 3, 1)], servers=2, first_number=5)
A, B = 5, 7  # server 0's shards, of the parameters "a" and "c"
ONE, TWO = (SquareSum(0, (0, 0, n)) for n in (1, 2))


Machine = RowsMachine[Any]


def new(shards: Sequence[Shard] = SHARDS, workers: int = 2, **about: Any) -> Machine:
    """The machine of server 0, which knows no values yet."""
    names = ["a", "b", "c"]
    about = {"closing": AllMembers, **about}
    return RowsMachine([], shards, index=0, workers=workers, order="priority", names=names, **about)


def make(workers: int = 2, barrier: StepBarrier | None = None, **about: Any) -> Machine:
    machine = new(workers=workers, barrier=barrier, **about)
    for shard in (A, B):
        assert machine.handle(ValueArrived(0, shard, 0, 0)) == [InstallValue(shard)]
    return machine


def pull(rank: int, shard: int = A, step: int = 0, request: int = 0) -> PullArrived:
    return PullArrived(rank, shard, step, 3, request)


def answer(rank: int, shard: int = A, step: int = 0, request: int = 0) -> AnswerRows:
    return AnswerRows(rank, shard, step, request, 3)


def push(rank: int, shard: int = A, step: int = 1, flags: int = 0) -> PushArrived:
    return PushArrived(rank, shard, step, 0, flags)


def handle_all(machine: Machine, events: Iterable[object]) -> list[Any]:
    return [instruction for event in events for instruction in machine.handle(event)]


@given(st.integers(0, 50), st.integers(1, 9))
def test_each_row_has_one_place(rows: int, servers: int) -> None:
    places = [(row % servers, row // servers) for row in range(rows)]
    for server in range(servers):
        own = [place for at, place in places if at == server]
        assert own == list(range(rows_of(server, rows, servers)))


def test_shards_are_numbered_after_the_slices() -> None:
    assert (
        Shard(5, 0, 0, 5, 4),
        Shard(6, 0, 1, 5, 4),
        Shard(7, 2, 0, 2, 1),
        Shard(8, 2, 1, 1, 1),
    ) == SHARDS


# Decisions.
def test_pulls_wait_for_their_step() -> None:
    machine = make()
    assert machine.handle(pull(1)) == [answer(1)]
    assert machine.handle(pull(0, step=1)) == []
    assert machine.handle(push(1)) == []
    assert machine.handle(push(0, flags=Flag.NO_GRADIENT)) == [UpdateRows(A, 1, (1,))]
    assert machine.handle(pull(1, step=1, request=9)) == []
    assert machine.handle(RowsUpdated(A)) == [answer(0, step=1), answer(1, step=1, request=9)]
    assert machine.handle(pull(1, step=1, request=4)) == [answer(1, step=1, request=4)]


def test_rows_that_the_server_makes_are_there_at_once() -> None:
    """Nobody sends the values of a remote table, and nobody may."""
    shards = plan_shards([(0, 10, 4), (2, 3, 1)], servers=2, first_number=5, remote={2})
    assert [shard.remote for shard in shards] == [False, False, True, True]
    machine = new(shards, workers=1)
    assert machine.handle(pull(0, B)) == [answer(0, B)]
    assert machine.handle(pull(0, A)) == []
    with pytest.raises(RemoteProtocolError, match="values for rows of c came for step 0"):
        machine.handle(ValueArrived(0, B, 0, 0))
    assert machine.handle(push(0, B)) == [UpdateRows(B, 1, (0,))]


def test_pulls_before_the_values() -> None:
    machine = new()
    assert machine.handle(pull(1)) == []
    assert machine.handle(ValueArrived(0, A, 0, 0)) == [InstallValue(A), answer(1)]


def test_one_update_of_a_shard_at_a_time() -> None:
    """Workers that look nothing up may run ahead: the next step is here before the update."""
    machine = make()
    events = [push(0), push(1), push(0, step=2), push(1, step=2), push(0, B), push(1, B)]
    assert handle_all(machine, events) == [UpdateRows(A, 1, (0, 1)), UpdateRows(B, 1, (0, 1))]
    assert machine.handle(RowsUpdated(A)) == [UpdateRows(A, 2, (0, 1))]
    assert machine.handle(RowsUpdated(A)) == []


# The barrier.
def test_updates_wait_for_the_norm_of_all_shards() -> None:
    machine = make(barrier=StepBarrier(2))
    assert handle_all(machine, [push(0), push(1)]) == [SumRows(A, 1, (0, 1))]
    assert handle_all(machine, [RowsSummed(A, ONE), pull(0, step=1)]) == []
    assert handle_all(machine, [push(0, B), push(1, B)]) == [SumRows(B, 1, (0, 1))]
    assert machine.handle(RowsSummed(B, ONE)) == [SendNormPart(1, TWO)]
    updates = [UpdateRows(A, 1, (0, 1)), UpdateRows(B, 1, (0, 1))]
    assert machine.handle(NormArrived(0, 1)) == updates
    assert machine.handle(RowsUpdated(A)) == [answer(0, step=1)]


def test_a_step_that_is_left_out_updates_nothing_and_is_answered() -> None:
    machine = make(barrier=StepBarrier(1))
    handle_all(machine, [push(0), push(1), RowsSummed(A, ONE), pull(0, step=1)])
    assert machine.handle(NormArrived(0, 1, skip=True)) == [UpdateRows(A, 1, ())]
    assert machine.handle(RowsUpdated(A)) == [answer(0, step=1)]


def test_shards_that_no_rank_uses_count_as_zeros_and_stay() -> None:
    machine = make(barrier=StepBarrier(1))
    nothing = [push(rank, flags=Flag.NO_GRADIENT) for rank in (0, 1)]
    assert handle_all(machine, nothing) == [SendNormPart(1, ZERO)]
    assert machine.handle(NormArrived(0, 1)) == [UpdateRows(A, 1, ())]


def test_the_next_step_s_sum_waits_for_this_one_s_update() -> None:
    machine = make(workers=1, barrier=StepBarrier(1))
    assert handle_all(machine, [push(0), push(0, step=2)]) == [SumRows(A, 1, (0,))]
    machine.handle(RowsSummed(A, ONE))
    with pytest.raises(InternalError, match="an update of rows finished that nobody started"):
        machine.handle(RowsUpdated(A))
    machine.handle(NormArrived(0, 1))
    assert machine.handle(RowsUpdated(A)) == [SumRows(A, 2, (0,))]
    assert machine.handle(RowsSummed(A, TWO)) == [SendNormPart(2, TWO)]


def test_slices_share_the_barrier() -> None:
    barrier = StepBarrier(2)
    machine = make(workers=1, barrier=barrier)
    machine.handle(push(0))
    assert machine.handle(RowsSummed(A, ONE)) == []
    assert machine.describe_wait(A, 1) == (
        "the rows of a are summed and wait for the sums of this server's other slices: 1 of 2 are"
        " done"
    )
    assert barrier.hold(1, 0, ONE) == [SendNormPart(1, TWO)]
    assert "wait for the global gradient norm of step 1" in machine.describe_wait(A, 1)


def test_a_wait_at_the_barrier_is_told_with_what_is_missing() -> None:
    machine = make(barrier=StepBarrier(2))
    handle_all(machine, [push(0), push(1), push(0, B), RowsSummed(A, ONE)])
    assert machine.describe_wait(A, 1).endswith(
        "1 of 2 are done; the update of the rows of c waits for the push of rank 1"
    )


def test_sums_that_nobody_started() -> None:
    with pytest.raises(InternalError, match="a sum of rows finished that nobody started"):
        make(barrier=StepBarrier(1)).handle(RowsSummed(A, ONE))


def test_steps_may_be_left_out() -> None:
    """A frozen table is not pushed."""
    machine = make(workers=1)
    assert machine.handle(push(0, step=4)) == [UpdateRows(A, 4, (0,))]


def test_changed_by_hand_on_some_ranks() -> None:
    machine = make()
    machine.handle(push(0))
    (failure,) = machine.handle(push(1, flags=Flag.VALUE_CHANGED))
    assert isinstance(failure, FailSession)
    assert failure.reason.startswith("parameter a was changed by hand before step 1 on ranks [1]")
    machine = make()
    events = [ValueArrived(0, A, 1, 0), *(push(rank, flags=Flag.VALUE_CHANGED) for rank in (0, 1))]
    assert handle_all(machine, events) == [UpdateRows(A, 1, (0, 1))]


def test_a_rank_that_left_is_not_waited_for() -> None:
    machine = make()
    machine.handle(push(0))
    (failure,) = machine.handle(PeerLeft(1))
    assert (failure.rank, failure.step) == (1, 0)
    assert "rank 1 has left" in failure.reason
    assert "gradient of a" in failure.reason
    machine = make()
    assert machine.handle(PeerLeft(1)) == []
    (failure,) = machine.handle(push(0))
    assert "rank 1 has left" in failure.reason


def test_a_rank_that_left_a_step_out_is_not_waited_for() -> None:
    machine = make()
    machine.handle(push(1, step=2))
    with pytest.raises(RanksApart, match=r"for step 1 while ranks \[1\] are at step 2"):
        machine.handle(push(0, step=1))


def test_a_step_that_is_left_out_is_found_when_held_pushes_are_looked_at() -> None:
    """Another peer's frame is under way by then, which is not to be blamed."""
    machine = make()
    handle_all(machine, [push(0), push(1), push(0, step=2), push(1, step=3)])
    (failure,) = machine.handle(RowsUpdated(A))
    assert (failure.rank, failure.step) == (-1, 3)
    assert "rank 1 pushed rows of a for step 3 while ranks [0] are at step 2" in failure.reason


def test_a_goodbye_waits_for_what_is_held() -> None:
    """A rank that keeps no rows may push its last step and leave."""
    machine = make()
    handle_all(machine, [push(0), push(0, step=2)])
    assert machine.handle(PeerLeft(0)) == []
    assert machine.handle(push(1)) == [UpdateRows(A, 1, (0, 1))]
    assert machine.handle(RowsUpdated(A)) == []
    assert machine.handle(push(1, step=2)) == [UpdateRows(A, 2, (0, 1))]
    machine.handle(RowsUpdated(A))
    (failure,) = machine.handle(push(1, step=3))
    assert "rank 0 has left" in failure.reason


@pytest.mark.parametrize(
    ("events", "match"),
    [
        ([push(0, shard=6)], "6 does not belong to server 0"),
        ([push(2)], "rank 2 of a world of 2"),
        ([push(0), push(0)], "for step 1 after step 1"),
        ([push(0, step=0)], "for step 0 after step 0"),
        ([push(0), push(1), push(0)], "for step 1 after step 1"),
        ([push(0), push(1), RowsUpdated(A), pull(0)], "as of step 0; step 1 is done"),
        ([pull(3)], "rank 3 of a world of 2"),
        ([ValueArrived(1, A, 1, 0)], "only rank 0 may"),
        ([ValueArrived(0, A, 0, 0)], "step 0 is done"),
        ([push(0), ValueArrived(0, A, 1, 0)], "twice or late"),
        ([ValueArrived(0, A, 1, 0), ValueArrived(0, A, 1, 0)], "twice or late"),
        ([PeerLeft(0), push(0)], "after its goodbye"),
    ],
)
def test_rules(events: list[Any], match: str) -> None:
    machine = make()
    handle_all(machine, events[:-1])
    before = machine.incomplete()
    with pytest.raises(RemoteProtocolError, match=match):
        machine.handle(events[-1])
    assert machine.incomplete() == before


def test_unknown_events_and_updates() -> None:
    with pytest.raises(InternalError, match="does not know"):
        make().handle("event")
    with pytest.raises(InternalError, match="nobody started"):
        make().handle(RowsUpdated(A))


def test_what_a_shard_waits_for() -> None:
    machine = make(workers=3)
    machine.handle(push(1))
    assert machine.incomplete() == [(A, 1)]
    waits = "the update of the rows of a waits for the push of ranks 0, 2"
    assert machine.describe_wait(A, 1) == waits
    machine.handle(push(1, step=2))
    assert machine.describe_wait(A, 2) == waits
    handle_all(machine, [push(0), push(2)])
    assert machine.describe_wait(A, 1) == "the rows of a are being updated"
    machine.handle(RowsUpdated(A))
    assert machine.describe_wait(A, 1) == "the rows of a are updated"


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.booleans())
def test_random_schedules(seed: int, needs_norm: bool) -> None:
    """Whatever the order of arrival, each pull is answered once, with its step's rows.

    With a norm no update of a step begins before both shards' sums are in it, once each.
    """
    chance = random.Random(seed)
    workers, steps = chance.randint(1, 4), chance.randint(1, 5)
    barrier = StepBarrier(2) if needs_norm else None
    machine = new(workers=workers, barrier=barrier)
    queues = [_events_of(rank, steps, chance) for rank in range(workers)]
    done, answered, asked = {A: -1, B: -1}, [], []
    work: dict[int, UpdateRows | SumRows] = {}  # under way, by shard
    norms: list[SendNormPart] = []  # that are not known yet
    while any(queues) or work or norms:
        ready = [queue for queue in queues if queue]
        if norms and (not (ready or work) or chance.random() < 0.3):
            known = norms.pop()
            event: Any = NormArrived(0, known.step, skip=chance.random() < 0.2)
        elif work and (not ready or chance.random() < 0.4):
            doing = work.pop(chance.choice(sorted(work)))
            if isinstance(doing, SumRows):
                event = RowsSummed(doing.shard, ONE)
            else:
                done[doing.shard] += 1
                event = RowsUpdated(doing.shard)
        elif ready:
            event = chance.choice(ready).pop(0)
            asked += [event] if isinstance(event, PullArrived) else []
        else:
            continue
        for instruction in machine.handle(event):
            if isinstance(instruction, (UpdateRows, SumRows)):
                assert instruction.shard not in work
                assert instruction.step == done[instruction.shard] + 1
                assert isinstance(instruction, UpdateRows) == (
                    not needs_norm or isinstance(event, NormArrived)
                )
                work[instruction.shard] = instruction
            elif isinstance(instruction, SendNormPart):
                assert instruction == SendNormPart(min(done.values()) + 1, TWO)
                norms.append(instruction)
            elif isinstance(instruction, InstallValue):
                done[instruction.slice] = 0
            else:
                assert isinstance(instruction, AnswerRows)
                assert instruction.step == done[instruction.shard]
                answered.append(tuple(instruction))
    assert done == {A: steps, B: steps}
    assert sorted(answered) == sorted(
        (*event[:3], event.request, event.priority, 0) for event in asked
    )


def _events_of(rank: int, steps: int, chance: random.Random) -> list[Any]:
    """One worker's, in the order in which its connection carries them."""
    events: list[Any] = [ValueArrived(0, shard, 0, 0) for shard in (A, B)] if rank == 0 else []
    for step in range(steps + 1):
        turn: list[Any] = []
        for shard in (A, B):
            pulls = [
                pull(rank, shard, step, chance.randrange(100)) for _ in range(chance.randrange(3))
            ]
            turn += [*pulls, *([push(rank, shard, step + 1)] if step < steps else [])]
        events += turn
    return events


# Workers apart.
@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, "async"]))
def test_whatever_the_schedule_reads_are_fresh_enough(seed: int, staleness: Staleness) -> None:
    """Reads are between two updates, which take each worker's pushes in its order, one by one."""
    chance, most_apart = random.Random(seed), most_steps_apart(staleness)
    workers, steps = chance.randint(1, 4), chance.randint(1, 5)
    machine = make(workers, closing=partial(BoundedStaleness, staleness=staleness))
    todo = [_loop_of(rank, steps, chance) for rank in range(workers)]
    waits: list[set[int]] = [set() for _ in range(workers)]  # requests, by rank
    applied = {shard: [0] * workers for shard in (A, B)}
    work: dict[int, UpdateRows] = {}  # under way, by shard
    while any(todo) or any(waits) or work:
        ready = [rank for rank in range(workers) if todo[rank] and not waits[rank]]
        if work and (not ready or chance.random() < 0.4):
            done = work.pop(chance.choice(sorted(work)))
            (rank,) = done.ranks
            assert done.step == applied[done.shard][rank] + 1
            applied[done.shard][rank] = done.step
            told = machine.handle(RowsUpdated(done.shard))
        else:
            rank = chance.choice(ready)
            event = todo[rank].pop(0)
            waits[rank] |= {event.request} if isinstance(event, PullArrived) else set()
            told = machine.handle(event)
        begun: list[UpdateRows] = []
        for each in told:
            if isinstance(each, UpdateRows):
                assert each.shard not in work.keys() | {other.shard for other in begun}
                assert each.ranks == each.counted
                begun.append(each)
                continue
            assert isinstance(each, AnswerRows)
            assert each.shard not in work
            waits[each.rank].remove(each.request)
            at = applied[each.shard]
            assert at[each.rank] == each.step
            assert each.step - min(at) <= most_apart
        work |= {each.shard: each for each in begun}
    assert applied == {A: [steps] * workers, B: [steps] * workers}


def _loop_of(rank: int, steps: int, chance: random.Random) -> list[Any]:
    """Look-ups, for each of which the worker waits, and pushes."""
    events: list[Any] = []
    for step in range(steps + 1):
        looked_up = chance.choices([A, B], k=chance.randrange(3))
        pushed = [A, B] if step < steps else []
        chance.shuffle(pushed)
        events += [pull(rank, shard, step, len(events) + n) for n, shard in enumerate(looked_up)]
        events += [push(rank, shard, step + 1) for shard in pushed]
    return events


def test_a_push_of_a_worker_that_looks_nothing_up_waits_for_its_last() -> None:
    machine = make(closing=partial(BoundedStaleness, staleness=1))
    (due,) = machine.handle(push(0))
    assert due == UpdateRows(A, 1, (0,), (0,))
    assert handle_all(machine, [push(0, step=2), pull(0, step=1)]) == []
    late = AnswerRows(0, A, 1, 0, 3)
    assert machine.handle(RowsUpdated(A)) == [late, UpdateRows(A, 2, (0,), (0,))]
    assert handle_all(machine, [RowsUpdated(A), pull(0, step=2, request=1)]) == []
    assert machine.describe_wait(A, 2) == (
        "the update of the rows of a waits for rank 1, which is at step 0: step 2 may be 1 ahead"
    )
    assert machine.handle(push(1)) == [UpdateRows(A, 1, (1,), (1,))]
    assert machine.handle(RowsUpdated(A)) == [AnswerRows(0, A, 2, 1, 3)]


def test_values_stay_where_workers_are_apart() -> None:
    machine = make(closing=partial(BoundedStaleness, staleness="async"))
    with pytest.raises(RemoteProtocolError, match="rank 0 sent rows of a for step 1, and workers"):
        machine.handle(ValueArrived(0, A, 1, 0))
    (failure,) = machine.handle(push(0, flags=Flag.VALUE_CHANGED))
    assert "a was changed by hand by rank 0" in failure.reason


# Some workers' pushes only.
class Worker:
    """Looks rows up, waits for them, and pushes; what it has read of a later step it says."""

    def __init__(self, rank: int, steps: int, chance: random.Random) -> None:
        self.waits: set[int] = set()
        self.late_in = 0
        """The last step for which it has read newer rows."""
        self.todo = _loop_of(rank, steps, chance)

    def next(self) -> Any:
        event = self.todo.pop(0)
        if isinstance(event, PullArrived):
            self.waits.add(event.request)
        elif event.step == self.late_in:
            event = event._replace(flags=int(Flag.LATE))
        return event

    def read(self, answer: AnswerRows) -> None:
        self.waits.remove(answer.request)
        if answer.flags & Flag.LATE:
            self.late_in = answer.step + 1


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.sampled_from([0, 1]))
def test_whatever_the_schedule_what_counts_is_of_the_step_before(seed: int, backups: int) -> None:
    """No worker that lives waits for ever, with backups or deaths, and all end alike."""
    chance = random.Random(seed)
    count, steps = chance.randint(2, 4), chance.randint(1, 5)
    members = Members(count, backups=backups)
    machine = make(count, closing=partial(FirstMembers, members=members))
    workers = {rank: Worker(rank, steps, chance) for rank in range(count)}
    done, kept = {A: 0, B: 0}, dict[tuple[int, int], list[int]]()
    work: dict[int, UpdateRows] = {}  # under way, by shard
    while work or any(each.todo or each.waits for each in workers.values()):
        ready = [rank for rank, each in workers.items() if each.todo and not each.waits]
        if not backups and len(workers) > 1 and chance.random() < 0.02:
            dead = chance.choice(sorted(workers))
            del workers[dead]
            told = machine.handle(PeerDropped(dead))
        elif work and (not ready or chance.random() < 0.4):
            update = work.pop(chance.choice(sorted(work)))
            done[update.shard] += 1
            assert update.step == done[update.shard]
            told = machine.handle(RowsUpdated(update.shard))
        else:
            assert ready, "all wait"
            event = workers[rank := chance.choice(ready)].next()
            if isinstance(event, PushArrived):
                kept.setdefault((event.slice, rank), []).append(event.step)
            told = machine.handle(event)
        for each in told:
            if isinstance(each, AnswerRows):
                assert each.shard not in work
                assert bool(each.flags & Flag.LATE) == (done[each.shard] > each.step)
                workers[each.rank].read(each)
            elif isinstance(each, UpdateRows):
                assert each.shard not in work
                assert each.counted is not None
                assert len(each.counted) >= len(workers) - backups
                for rank in each.counted:
                    assert kept[each.shard, rank].pop(0) == each.step
                    assert rank not in workers or workers[rank].late_in != each.step
                work[each.shard] = each
            elif isinstance(each, DropPush):
                kept[each.slice, each.rank].remove(each.step)
            else:
                assert isinstance(each, MemberLeft), each
    assert done == {A: steps, B: steps}
    assert not any(left for (_, rank), left in kept.items() if rank in workers)


# How rows travel.
@st.composite
def parts(draw: st.DrawFn) -> tuple[RowPart, Shard]:
    shard = Shard(3, 0, 0, draw(st.integers(1, 20)), draw(st.integers(1, 5)))
    numbers = sorted(draw(st.sets(st.integers(0, shard.rows - 1))))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    rows = torch.arange(len(numbers) * shard.row_elems).view(len(numbers), shard.row_elems)
    return RowPart(torch.tensor(numbers, dtype=torch.int64), rows.to(dtype)), shard


@given(parts())
def test_parts_arrive_as_they_left(case: tuple[RowPart, Shard]) -> None:
    part, shard = case
    data = encode_part(part)
    assert len(data) <= part_limit_bytes(shard, part.rows.dtype.itemsize)
    got = decode_part(memoryview(bytearray(data)), shard, part.rows.dtype)
    assert torch.equal(got.numbers, part.numbers)
    assert torch.equal(got.rows, part.rows)
    question = memoryview(bytearray(encode_pull(shard.number, part.numbers)))
    assert pulled_shard(question) == shard.number
    assert torch.equal(decode_pull(question, shard), part.numbers)
    assert len(question) <= part_limit_bytes(shard, 1)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_part_or_an_error(data: bytes) -> None:
    shard = Shard(3, 0, 0, 6, 2)
    try:
        part = decode_part(memoryview(bytearray(data)), shard, torch.float32)
    except RemoteProtocolError:
        return
    assert encode_part(part)[: len(data)] == data or part.numbers.numel() % 2  # padding is free


@pytest.mark.parametrize("numbers", [[2, 1], [1, 1], [-1, 2], [3, 6]])
def test_row_numbers_must_be_there_and_ascend(numbers: list[int]) -> None:
    shard = Shard(3, 0, 0, 6, 2)
    part = RowPart(torch.tensor(numbers), torch.zeros(2, 2))
    with pytest.raises(RemoteProtocolError, match="ascend"):
        decode_part(memoryview(bytearray(encode_part(part))), shard, torch.float32)
    assert not all(a < b for a, b in pairwise([-1, *numbers, 6])) or numbers[0] < 0


def test_the_length_must_fit() -> None:
    shard = Shard(3, 0, 0, 6, 2)
    data = bytearray(encode_part(RowPart(torch.tensor([0, 4]), torch.zeros(2, 2))))
    for wrong in (data[:-1], data + b"\0", data[:12], b"", data[:8]):
        with pytest.raises(RemoteProtocolError):
            decode_part(memoryview(bytearray(wrong)), shard, torch.float32)
    with pytest.raises(RemoteProtocolError, match="too many after a pull"):
        decode_pull(memoryview(bytearray(encode_pull(3, torch.tensor([1])) + b"12345678")), shard)
