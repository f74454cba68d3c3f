"""What a server sends its buddy, when, and which answers wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from foreprop.core.buddy import (
    NOBODY,
    BuddiedServer,
    HeldStates,
    KeepState,
    SnapshotHeld,
    StateKept,
    StateReplaced,
    buddy_of,
    most_lost,
)
from foreprop.core.collect import AnswerSlice, SliceUpdated, UpdateSlice
from foreprop.core.frames import (
    LAST_PRIORITY,
    NO_TOKEN,
    FrameSent,
    MessageReady,
    PeerLeft,
    PushArrived,
    SendFrame,
    ValueArrived,
)
from foreprop.core.membership import Members, PeerDropped
from foreprop.core.slicing import Partition, plan_slices
from foreprop.core.wire import Flag, Kind
from foreprop.errors import RemoteProtocolError
from tests.unit.counting_world import counting_server

BUDDY = 1


class Buddied:
    """A server of two workers whose frames are sent at once, unless ``slow``."""

    def __init__(self, *, slices: int = 1, every: int = 2, ranks: int = 2) -> None:
        planned = plan_slices([slices], [4], Partition(slice_elems=1))
        inner = counting_server(planned, Members(ranks), ["p"])
        for number in range(slices):
            inner.handle(ValueArrived(0, number, 0, 0))
        self.ranks = range(ranks)
        self.machine = BuddiedServer(inner, range(slices), node=0, members=self.ranks, every=every)
        self.slow = False
        self.sent: list[SendFrame] = []
        self.kept: list[tuple[int, int]] = []
        self.order: list[str] = []

    def step(self, step: int, slice_: int = 0, *, flags: int = 0) -> None:
        """All push the slice, and it is updated."""
        for rank in self.ranks:
            told = self.machine.handle(PushArrived(rank, slice_, step, 3, flags))
        assert [type(each) for each in told] == [UpdateSlice]
        self.do(self.machine.handle(SliceUpdated()))

    def do(self, instructions: Sequence[Any]) -> None:
        for each in instructions:
            if isinstance(each, KeepState):
                self.kept.append(tuple(each))
                self.order.append("keep")
                self.do(self.machine.handle(StateKept(*each)))
            elif isinstance(each, AnswerSlice):
                for rank in each.ranks:
                    place = (Kind.REPLY, each.step, each.priority, each.slice, NO_TOKEN)
                    self.do(self.machine.handle(MessageReady(rank, *place)))
            elif isinstance(each, SendFrame):
                self.sent.append(each)
                self.order.append(Kind(each.kind).name)
                if not self.slow:
                    self.do(self.machine.handle(FrameSent(each.peer)))

    def holds(self, slice_: int, step: int, rank: int = BUDDY) -> None:
        self.do(self.machine.handle(SnapshotHeld(rank, slice_, step)))

    def replies(self, step: int) -> int:
        return sum(frame.kind == Kind.REPLY and frame.step == step for frame in self.sent)

    def snapshots(self) -> list[tuple[int, int]]:
        kinds = (frame for frame in self.sent if frame.kind == Kind.SNAPSHOT)
        return [(frame.slice, frame.step) for frame in kinds]


def test_the_next_member_in_ring_order_is_the_buddy() -> None:
    assert [buddy_of(node, [0, 1, 2, 3]) for node in range(4)] == [1, 2, 3, 0]
    assert [buddy_of(node, [0, 2, 3]) for node in (0, 2, 3)] == [2, 3, 0]
    assert buddy_of(1, [0, 2]) == 2  # it is gone itself
    assert buddy_of(2, [2]) == NOBODY


def test_each_slice_is_sent_every_k_steps_and_as_many_in_each_step() -> None:
    server = Buddied(slices=6, every=3)
    for step in range(1, 7):
        for slice_ in range(6):
            server.step(step, slice_)
        for slice_, sent in server.snapshots()[-2:]:
            server.holds(slice_, sent)
    assert server.snapshots() == [
        (slice_, step) for step in range(1, 7) for slice_ in divided(6, (step - 1) % 3)
    ]
    assert server.kept == server.snapshots()
    assert server.machine.waits == 0


def divided(slices: int, turn: int) -> range:
    return range(slices // 3 * turn, slices // 3 * (turn + 1))


def test_a_copy_is_made_before_the_answer_leaves_and_sent_after_it() -> None:
    server = Buddied()
    server.step(1)
    assert server.order == ["keep", "REPLY", "REPLY", "SNAPSHOT"]
    assert server.sent[-1].priority == LAST_PRIORITY
    assert server.sent[-1].peer == BUDDY


def test_a_snapshot_waits_until_nothing_else_is_queued_or_under_way() -> None:
    server = Buddied(slices=2, every=2)
    server.slow = True
    server.step(1, 0)
    server.step(1, 1)  # its answers are queued
    assert server.snapshots() == []
    for peer in (0, 1, 0):
        server.do(server.machine.handle(FrameSent(peer)))
        assert server.snapshots() == []
    server.do(server.machine.handle(FrameSent(1)))
    assert server.snapshots() == [(0, 1)]


def test_an_answer_waits_that_would_leave_the_buddy_more_than_k_steps_behind() -> None:
    server = Buddied(every=2)
    server.step(1)
    server.step(2)
    assert (server.replies(1), server.replies(2)) == (2, 2)
    server.step(3)  # the buddy has said nothing yet
    assert server.replies(3) == 0
    assert server.machine.waits == 1
    assert "waits until rank 1 holds its state" in server.machine.describe_wait(0, 3)
    server.holds(0, 1)
    assert server.replies(3) == 2
    assert server.machine.held(0) == 1


def test_with_k_of_one_every_answer_waits_and_its_snapshot_is_as_urgent() -> None:
    server = Buddied(every=1)
    for step in (1, 2):
        server.step(step)
        assert server.replies(step) == 0
        assert server.snapshots()[-1] == (0, step)
        assert server.sent[-1].priority == 3
        server.holds(0, step)
        assert server.replies(step) == 2
    assert most_lost(1) == 0


def test_a_step_without_gradients_changes_no_state_and_waits_for_nobody() -> None:
    server = Buddied(every=1)
    server.step(1, flags=Flag.NO_GRADIENT)
    assert server.kept == []
    assert server.replies(1) == 2


def test_alone_nothing_is_kept() -> None:
    server = Buddied(every=1, ranks=1)
    server.step(1)
    assert server.order == ["REPLY"]


@pytest.mark.parametrize("event", [PeerDropped(BUDDY), PeerLeft(BUDDY)])
def test_nobody_waits_for_a_buddy_that_is_gone(event: Any) -> None:
    server = Buddied(every=1)
    server.step(1)
    assert server.replies(1) == 0
    server.do(server.machine.handle(event))
    assert server.replies(1) == 2
    assert server.machine.buddy == NOBODY


def test_a_new_buddy_gets_every_slice_within_k_steps() -> None:
    server = Buddied(slices=2, every=2, ranks=3)
    for slice_ in (0, 1):
        server.step(1, slice_)
    server.do(server.machine.handle(PeerDropped(1)))
    server.ranks = range(0, 3, 2)
    for step in (2, 3):
        for slice_ in (0, 1):
            server.step(step, slice_)
    assert [frame.peer for frame in server.sent if frame.kind == Kind.SNAPSHOT] == [1, 2, 2]
    server.holds(0, 1)  # the old one's word comes late
    assert server.snapshots() == [(0, 1), (0, 2), (1, 3)]


def test_in_the_middle_of_a_step_a_new_buddy_gets_those_that_are_behind() -> None:
    server = Buddied(slices=2, every=1, ranks=3)
    server.step(1, 0)
    server.do(server.machine.handle(PeerDropped(1)))
    server.ranks = range(0, 3, 2)
    server.step(1, 1)
    assert server.snapshots() == [(0, 1), (1, 1)]
    assert server.replies(1) == 3
    server.holds(1, 1, rank=2)
    assert server.replies(1) == 5


def test_a_state_that_is_loaded_is_sent_and_awaited() -> None:
    server = Buddied(slices=4, every=4)
    server.do(server.machine.handle(StateReplaced(3)))
    assert server.snapshots() == [(3, 0)]
    server.step(1, 3)
    assert server.replies(1) == 0
    server.holds(3, 0)
    assert server.replies(1) == 2


def test_a_buddy_cannot_hold_what_was_not_made() -> None:
    server = Buddied()
    with pytest.raises(RemoteProtocolError, match="after step 1; step 0 is done"):
        server.holds(0, 1)
    with pytest.raises(RemoteProtocolError, match="does not belong"):
        server.holds(5, 0)


def test_two_snapshots_of_a_slice_are_held() -> None:
    held: HeldStates[str] = HeldStates()
    assert held.newest(0, 5) is None
    for step in (2, 4, 6):
        held.put(0, step, f"after {step}")
    assert held.newest(0, 7) == (6, "after 6")
    assert held.newest(0, 5) == (4, "after 4")
    assert held.newest(0, 3) is None
    assert held.all() == [(0, 4, "after 4"), (0, 6, "after 6")]
    held.put(0, 6, "loaded")
    assert held.newest(0, 6) == (6, "loaded")
    with pytest.raises(RemoteProtocolError, match="came after that of step 6"):
        held.put(0, 5, "late")
