"""The barrier between the sums of a step and its updates."""

from __future__ import annotations

import pytest

from foreprop.core.barrier import OUTSIDE, NormCombiner, StepBarrier
from foreprop.core.closing import AllMembers
from foreprop.core.collect import SliceSummed, SliceUpdated, SumSlice, UpdateSlice
from foreprop.core.frames import NormArrived, PushArrived, SendFrame
from foreprop.core.norm import ZERO, SendNormPart, SquareSum
from foreprop.core.sendqueue import Reply
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.staleness import rule_of
from foreprop.core.wire import Flag, Kind
from foreprop.errors import InternalError, RemoteProtocolError

ONE, TWO = (SquareSum(0, (0, 0, n)) for n in (1, 2))
# server 0 owns slices 0 and 2; slice 2 is the more urgent
SLICES = (Slice(0, 0, 0, 1, 0), Slice(1, 0, 1, 2, 1), Slice(2, 1, 0, 1, 0))
PRIORITY = {0: 5, 2: 3}


def make(*, needs_norm: bool = True, reply: Reply = "broadcast", index: int = 0) -> ServerMachine:
    own = sum(piece.server == index for piece in SLICES)
    return ServerMachine(
        SLICES,
        closing=AllMembers,
        index=index,
        workers=2,
        order="priority",
        reply=reply,
        names=["a", "b"],
        barrier=StepBarrier(own) if needs_norm else None,
    )


def push(machine: ServerMachine, slice_: int, *ranks: int, step: int = 1, flags: int = 0) -> object:
    """The last one's instructions."""
    for rank in ranks:
        told = machine.handle(PushArrived(rank, slice_, step, PRIORITY[slice_], flags))
    return told


def test_updates_wait_until_the_norm_is_known_and_go_by_priority() -> None:
    machine = make()
    assert push(machine, 0, 1, 0) == [SumSlice(0, 1, (0, 1))]
    assert machine.handle(SliceSummed(ONE)) == []
    assert push(machine, 2, 0, 1) == [SumSlice(2, 1, (0, 1))]
    assert machine.handle(SliceSummed(ONE)) == [SendNormPart(1, TWO)]
    assert machine.handle(NormArrived(0, 1)) == [UpdateSlice(2, 1, (0, 1))]
    replies = machine.handle(SliceUpdated())
    assert replies == [
        SendFrame(0, Kind.REPLY, 1, 2, 3, 0, -1),
        SendFrame(1, Kind.REPLY, 1, 2, 3, 0, -1),
        UpdateSlice(0, 1, (0, 1)),
    ]


def test_one_sum_at_a_time() -> None:
    machine = make()
    push(machine, 0, 0, 1)
    assert push(machine, 2, 0, 1) == []
    assert machine.handle(SliceSummed(ONE)) == [SumSlice(2, 1, (0, 1))]


def test_a_step_that_is_left_out_updates_nothing_and_is_answered() -> None:
    machine = make()
    for slice_ in (0, 2):
        push(machine, slice_, 0, 1)
        machine.handle(SliceSummed(ONE))
    assert machine.handle(NormArrived(0, 1, skip=True)) == [UpdateSlice(2, 1, ())]
    replies = machine.handle(SliceUpdated())
    assert replies[0] == SendFrame(0, Kind.REPLY, 1, 2, 3, Flag.UNCHANGED, -1)
    assert replies[-1] == UpdateSlice(0, 1, ())


def test_slices_that_no_rank_uses_count_as_zeros_and_stay() -> None:
    machine = make()
    assert push(machine, 0, 0, 1, flags=Flag.NO_GRADIENT) == []
    push(machine, 2, 0, 1)
    assert machine.handle(SliceSummed(ONE)) == [SendNormPart(1, ONE)]
    assert machine.handle(NormArrived(0, 1)) == [UpdateSlice(2, 1, (0, 1))]
    assert machine.handle(SliceUpdated())[-1] == UpdateSlice(0, 1, ())


def test_the_last_slice_may_be_one_that_no_rank_uses() -> None:
    machine = make()
    push(machine, 2, 0, 1)
    assert machine.handle(SliceSummed(ONE)) == []
    assert push(machine, 0, 0, 1, flags=Flag.NO_GRADIENT) == [SendNormPart(1, ONE)]


def test_the_next_step_is_summed_while_updates_of_this_one_are_queued() -> None:
    machine = make()
    for slice_ in (0, 2):
        push(machine, slice_, 0, 1)
        machine.handle(SliceSummed(ONE))
    machine.handle(NormArrived(0, 1))
    machine.handle(SliceUpdated())  # of slice 2; slice 0 is under way
    assert push(machine, 2, 0, 1, step=2) == []
    assert machine.handle(SliceUpdated())[-1] == SumSlice(2, 2, (0, 1))
    assert machine.handle(SliceSummed(ONE)) == []
    push(machine, 0, 0, 1, step=2)
    assert machine.handle(SliceSummed(TWO)) == [SendNormPart(2, SquareSum(0, (0, 0, 3)))]


def test_a_wait_is_told_with_what_is_missing() -> None:
    machine = make()
    push(machine, 0, 0, 1)
    machine.handle(SliceSummed(ONE))
    text = "a is summed and waits for the sums of this server's other slices: 1 of 2 are done"
    assert machine.describe_wait(0, 1) == text
    push(machine, 2, 0)
    assert machine.describe_wait(0, 1) == f"{text}; b waits for the push of rank 1"
    push(machine, 2, 1)
    machine.handle(SliceSummed(ONE))
    assert machine.describe_wait(0, 1) == (
        "a is summed and waits for the global gradient norm of step 1, which rank 0 adds up"
    )


def test_a_norm_that_nobody_awaits_is_refused() -> None:
    machine = make()
    with pytest.raises(RemoteProtocolError, match="came while 0 of 2 slices of step 0 are summed"):
        machine.handle(NormArrived(0, 1))
    for slice_ in (0, 2):
        push(machine, slice_, 0, 1)
        machine.handle(SliceSummed(ONE))
    with pytest.raises(RemoteProtocolError, match="rank 1 sent the norm of step 1"):
        machine.handle(NormArrived(1, 1))
    with pytest.raises(RemoteProtocolError, match="the norm of step 2 came while 2 of 2 slices"):
        machine.handle(NormArrived(0, 2))
    with pytest.raises(RemoteProtocolError, match="which is not awaited"):
        make(needs_norm=False).handle(NormArrived(0, 1))
    with pytest.raises(InternalError, match="a sum is done that nobody started"):
        make().handle(SliceSummed(ONE))


def test_a_server_without_slices_has_nothing_to_hold() -> None:
    assert make(index=7).handle(NormArrived(0, 1)) == []


def test_slices_of_two_steps_cannot_wait_for_one_norm() -> None:
    barrier = StepBarrier(2)
    barrier.hold(1, 0, ZERO)
    with pytest.raises(RemoteProtocolError, match="slice 2 is at step 2 while others wait"):
        barrier.hold(2, 2, ZERO)


def test_without_priorities_updates_go_in_the_order_of_the_sums() -> None:
    barrier = StepBarrier(2)
    machine = ServerMachine(
        SLICES,
        closing=AllMembers,
        index=0,
        workers=1,
        order="fifo",
        reply="broadcast",
        names=["a", "b"],
        barrier=barrier,
    )
    for slice_ in (2, 0):
        push(machine, slice_, 0)
        machine.handle(SliceSummed(ONE))
    assert machine.handle(NormArrived(0, 1)) == [UpdateSlice(2, 1, (0,))]


def test_where_workers_are_apart_each_push_has_a_norm_of_its_own() -> None:
    """Rank 1's is infinite, and left out alone; rank 0's next step is held meanwhile."""
    machine = ServerMachine(
        SLICES,
        closing=rule_of("async"),
        index=0,
        workers=2,
        order="priority",
        names=["a", "b"],
        barrier=StepBarrier(2, told_by="own"),
    )
    assert push(machine, 0, 1) == [SumSlice(0, 1, (1,), (1,))]
    assert machine.handle(SliceSummed(ONE)) == []
    assert push(machine, 0, 0) == [SumSlice(0, 1, (0,), (0,))]
    assert machine.handle(SliceSummed(ONE)) == []
    push(machine, 2, 1)
    assert machine.handle(SliceSummed(ONE)) == [SendNormPart(1, TWO, 1)]
    text = "b is summed and waits for the global gradient norm of step 1, which rank 1 adds up"
    assert machine.describe_wait(2, 1) == text
    with pytest.raises(RemoteProtocolError, match="the norm of step 1 came while 1 of 2 slices"):
        machine.handle(NormArrived(0, 1))
    first = UpdateSlice(2, 1, (), counted=(1,))
    assert machine.handle(NormArrived(1, 1, skip=True)) == [first]
    assert machine.handle(SliceUpdated())[-1] == UpdateSlice(0, 1, (), counted=(1,))
    assert push(machine, 2, 0, flags=Flag.NO_GRADIENT) == [SendNormPart(1, ONE, 0)]
    machine.handle(SliceUpdated())
    assert machine.handle(NormArrived(0, 1)) == [UpdateSlice(2, 1, (), counted=(0,))]
    assert machine.handle(SliceUpdated())[-1] == UpdateSlice(0, 1, (0,), counted=(0,))


def test_the_first_word_of_all_counts() -> None:
    barrier = StepBarrier(1, told_by="any")
    assert barrier.takes(3)
    assert barrier.hold(1, 0, ONE) == [SendNormPart(1, ONE)]
    barrier.release(1)
    assert barrier.has_been_told(1)
    assert not barrier.has_been_told(2)
    assert not StepBarrier(1).takes(3)


def test_who_is_not_first_may_have_parts_of_the_next_step() -> None:
    """Or it has come within a step, of which it gets some parts only."""
    combiner = NormCombiner({0, 1}, from_all=True)
    assert combiner.add(0, 1, ONE) is None
    assert combiner.add(0, 2, ONE) is None
    assert combiner.add(1, 2, TWO) == SquareSum(0, (0, 0, 3))
    assert combiner.add(1, 3, ONE) is None
    with pytest.raises(RemoteProtocolError, match="server 1 sent a part of the norm of step 3"):
        combiner.add(1, 3, ONE)


def test_rank_zero_adds_up_one_part_of_each_server() -> None:
    combiner = NormCombiner({0, 2})
    assert combiner.add(2, 1, ONE) is None
    with pytest.raises(RemoteProtocolError, match="server 2 sent a part of the norm of step 1"):
        combiner.add(2, 1, ONE)
    with pytest.raises(RemoteProtocolError, match="server 1 sent a part"):
        combiner.add(1, 1, ONE)
    with pytest.raises(RemoteProtocolError, match="of step 2 while the parts of step 1 come in"):
        combiner.add(0, 2, ONE)
    assert combiner.add(0, 1, TWO) == SquareSum(0, (0, 0, 3))
    assert combiner.add(0, 2, ONE) is None


def test_what_is_not_on_servers_may_have_a_part() -> None:
    combiner = NormCombiner({0, OUTSIDE})
    assert combiner.add(0, 1, ONE) is None
    assert combiner.add(OUTSIDE, 1, ONE) == TWO
