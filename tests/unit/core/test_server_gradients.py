"""A server whose workers update: it averages round by round, and tells what does not agree."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from foreprop.core.closing import AllMembers
from foreprop.core.collect import SliceUpdated, UpdateSlice
from foreprop.core.frames import FailSession, FrameSent, PullArrived, PushArrived, SendFrame
from foreprop.core.sendqueue import Reply
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.wire import ROUND_SHIFT, Flag, Kind
from foreprop.errors import RemoteProtocolError

SLICES = (Slice(0, 0, 0, 1, 0), Slice(1, 1, 0, 1, 0))
NONE = Flag.GRADIENT | Flag.NO_GRADIENT


def make(reply: Reply = "broadcast") -> ServerMachine:
    return ServerMachine(
        SLICES,
        closing=AllMembers,
        index=0,
        workers=2,
        order="priority",
        reply=reply,
        names=["a", "b"],
    )


def push(rank: int, flags: int = Flag.GRADIENT, *, step: int = 1, again: int = 0) -> PushArrived:
    return PushArrived(rank, 0, step, 0, flags | again << ROUND_SHIFT)


def answers(machine: ServerMachine, events: Iterable[object]) -> list[tuple[int, int]]:
    """Peers and flags of the replies, as the link takes them."""
    frames = [frame for event in events for frame in machine.handle(event)]
    for peer in (0, 1):
        while more := machine.handle(FrameSent(peer)):
            frames += more
    return sorted(
        (f.peer, f.flags) for f in frames if isinstance(f, SendFrame) and f.kind == Kind.REPLY
    )


@pytest.mark.parametrize("late", [False, True])
def test_who_pulls_an_average_of_nothing_is_told_so(late: bool) -> None:
    """Otherwise workers would take the values that the server has for a gradient."""
    machine = make("pull")
    pulls = [PullArrived(rank, 0, 1, 0) for rank in (0, 1)]
    pushes = [push(0, NONE), push(1, NONE)]
    events = [*pushes, SliceUpdated(), *pulls] if late else [*pushes, *pulls, SliceUpdated()]
    assert answers(machine, events) == [(0, Flag.UNCHANGED), (1, Flag.UNCHANGED)]
    again = [push(rank, step=2) for rank in (0, 1)]
    pulls = [PullArrived(rank, 0, 2, 0) for rank in (0, 1)]
    assert answers(machine, [*again, SliceUpdated(), *pulls]) == [(0, 0), (1, 0)]


def test_a_step_may_have_several_rounds() -> None:
    machine = make()
    for again in range(3):
        machine.handle(push(0, again=again))
        (update,) = machine.handle(push(1, NONE, again=again))
        assert update == UpdateSlice(0, 1, (0,), gradient=True)
        assert answers(machine, [SliceUpdated()]) == [(0, 0), (1, 0)]


def test_ranks_that_disagree_on_who_updates_are_named() -> None:
    machine = make()
    machine.handle(push(0))
    (failure,) = machine.handle(push(1, 0))
    assert isinstance(failure, FailSession)
    assert "ranks [0] update a themselves in step 1, but ranks [1] leave" in failure.reason


def test_ranks_in_different_rounds_are_named() -> None:
    machine = make()
    machine.handle(push(0))
    with pytest.raises(RemoteProtocolError, match=r"rank 1 has averaged the gradient of a 1 times"):
        machine.handle(push(1, again=1))
