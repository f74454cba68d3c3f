"""Row-wise parameters: the shards, the server's decisions, and how rows travel."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.core.barrier import StepBarrier
from foreprop.core.frames import (
    FailSession,
    InstallValue,
    NormArrived,
    PeerLeft,
    PullArrived,
    PushArrived,
    SendNormPart,
    ValueArrived,
    each_worker,
)
from foreprop.core.norm import ZERO, SquareSum
from foreprop.core.rows_machine import (
    AnswerRows,
    RowsMachine,
    RowsSummed,
    RowsUpdated,
    SumRows,
    UpdateRows,
)
from foreprop.core.shards import Shard, plan_shards, rows_of
from foreprop.core.wire import Flag
from foreprop.errors import InternalError, RemoteProtocolError
from foreprop.tables.parts import (
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


def make(workers: int = 2, barrier: StepBarrier | None = None) -> RowsMachine:
    names = ["a", "b", "c"]
    machine = RowsMachine(SHARDS, index=0, peers=each_worker(workers), names=names, barrier=barrier)
    for shard in (A, B):
        assert machine.handle(ValueArrived(0, shard, 0, 0)) == [InstallValue(shard)]
    return machine


def pull(rank: int, shard: int = A, step: int = 0, request: int = 0) -> PullArrived:
    return PullArrived(rank, shard, step, 3, request)


def answer(rank: int, shard: int = A, step: int = 0, request: int = 0) -> AnswerRows:
    return AnswerRows(rank, shard, step, request, 3)


def push(rank: int, shard: int = A, step: int = 1, flags: int = 0) -> PushArrived:
    return PushArrived(rank, shard, step, 0, flags)


def handle_all(machine: RowsMachine, events: Iterable[object]) -> list[Any]:
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
    """Of a remote table: nobody sends its values, and nobody may."""
    shards = plan_shards([(0, 10, 4), (2, 3, 1)], servers=2, first_number=5, remote={2})
    assert [shard.remote for shard in shards] == [False, False, True, True]
    machine = RowsMachine(shards, index=0, peers=each_worker(1), names=["a", "b", "c"])
    assert machine.handle(pull(0, B)) == [answer(0, B)]
    assert machine.handle(pull(0, A)) == []
    with pytest.raises(RemoteProtocolError, match="values for rows of c came for step 0"):
        machine.handle(ValueArrived(0, B, 0, 0))
    assert machine.handle(push(0, B)) == [UpdateRows(B, 1, (0,))]


def test_pulls_before_the_values() -> None:
    machine = RowsMachine(SHARDS, index=0, peers=each_worker(2), names=["a", "b", "c"])
    assert machine.handle(pull(1)) == []
    assert machine.handle(ValueArrived(0, A, 0, 0)) == [InstallValue(A), answer(1)]


def test_one_update_of_a_shard_at_a_time() -> None:
    """Workers that look nothing up may run ahead: the next step is complete before the update."""
    machine = make()
    events = [push(0), push(1), push(0, step=2), push(1, step=2), push(0, B), push(1, B)]
    assert handle_all(machine, events) == [UpdateRows(A, 1, (0, 1)), UpdateRows(B, 1, (0, 1))]
    assert machine.handle(RowsUpdated(A)) == [UpdateRows(A, 2, (0, 1))]
    assert machine.handle(RowsUpdated(A)) == []


# The barrier.
def test_updates_wait_for_the_norm_of_all_shards() -> None:
    barrier = StepBarrier(2)
    machine = make(barrier=barrier)
    assert handle_all(machine, [push(0), push(1)]) == [SumRows(A, 1, (0, 1))]
    assert handle_all(machine, [RowsSummed(A, ONE), pull(0, step=1)]) == []
    assert handle_all(machine, [push(0, B), push(1, B)]) == [SumRows(B, 1, (0, 1))]
    assert machine.handle(RowsSummed(B, ONE)) == [SendNormPart(1, TWO)]
    barrier.release(1)
    updates = [UpdateRows(A, 1, (0, 1)), UpdateRows(B, 1, (0, 1))]
    assert machine.handle(NormArrived(0, 1)) == updates
    assert machine.handle(RowsUpdated(A)) == [answer(0, step=1)]


def test_a_step_that_is_left_out_updates_nothing_and_is_answered() -> None:
    barrier = StepBarrier(1)
    machine = make(barrier=barrier)
    handle_all(machine, [push(0), push(1), RowsSummed(A, ONE), pull(0, step=1)])
    barrier.release(1)
    assert machine.handle(NormArrived(0, 1, skip=True)) == [UpdateRows(A, 1, ())]
    assert machine.handle(RowsUpdated(A)) == [answer(0, step=1)]


def test_shards_that_no_rank_uses_count_as_zeros_and_stay() -> None:
    barrier = StepBarrier(1)
    machine = make(barrier=barrier)
    nothing = [push(rank, flags=Flag.NO_GRADIENT) for rank in (0, 1)]
    assert handle_all(machine, nothing) == [SendNormPart(1, ZERO)]
    barrier.release(1)
    assert machine.handle(NormArrived(0, 1)) == [UpdateRows(A, 1, ())]


def test_the_next_step_s_sum_waits_for_this_one_s_update() -> None:
    barrier = StepBarrier(1)
    machine = make(workers=1, barrier=barrier)
    assert handle_all(machine, [push(0), push(0, step=2)]) == [SumRows(A, 1, (0,))]
    machine.handle(RowsSummed(A, ONE))
    with pytest.raises(InternalError, match="an update of rows finished that nobody started"):
        machine.handle(RowsUpdated(A))
    barrier.release(1)
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
        "1 of 2 are done; the rows of c wait for the push of rank 1"
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
    (failure,) = machine.handle(push(0, step=1))
    assert "rank 1 is at step 2, but ranks [0] are at step 1" in failure.reason


@pytest.mark.parametrize(
    ("events", "match"),
    [
        ([push(0, shard=6)], "shard 6 does not belong to server 0"),
        ([push(2)], "rank 2 of a world of 2"),
        ([push(0), push(0)], "twice in step 1"),
        ([push(0, step=0)], "past"),
        ([push(0), push(1), push(0)], "past"),
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
    assert machine.describe_wait(A, 1) == "the rows of a wait for the push of ranks 0, 2"
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
    machine = RowsMachine(
        SHARDS, index=0, peers=each_worker(workers), names=["a", "b", "c"], barrier=barrier
    )
    queues = [_events_of(rank, steps, chance) for rank in range(workers)]
    done, answered, asked = {A: -1, B: -1}, [], []
    work: dict[int, UpdateRows | SumRows] = {}  # under way, by shard
    norms: list[SendNormPart] = []  # that are not known yet
    while any(queues) or work or norms:
        ready = [queue for queue in queues if queue]
        if norms and (not (ready or work) or chance.random() < 0.3):
            known = norms.pop()
            assert barrier is not None
            barrier.release(known.step)
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
        (*event[:3], event.request, event.priority) for event in asked
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
