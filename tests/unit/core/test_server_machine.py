"""The server's decisions, as whole lists of instructions."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from foreprop.core.closing import AllMembers
from foreprop.core.collect import SliceUpdated, UpdateSlice
from foreprop.core.frames import (
    CONTROL_PRIORITY,
    NO_TOKEN,
    FailSession,
    Finish,
    FrameSent,
    InstallValue,
    MessageReady,
    PeerLeft,
    PullArrived,
    PushArrived,
    SendFrame,
    ValueArrived,
)
from foreprop.core.sendqueue import Order, Reply
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.wire import Flag, Kind
from foreprop.errors import InternalError, RemoteProtocolError

# server 0 owns slices 0, 2 and 3, of the parameters "a", "b" and "c"
SLICES = (Slice(0, 0, 0, 1, 0), Slice(1, 0, 1, 2, 1), Slice(2, 1, 0, 1, 0), Slice(3, 2, 0, 1, 0))
PRIORITY = {0: 0, 2: 1, 3: 2}


def make(
    order: Order = "priority", reply: Reply = "broadcast", *, workers: int = 2, index: int = 0
) -> ServerMachine:
    names = ["a", "b", "c"]
    return ServerMachine(
        SLICES,
        closing=AllMembers,
        index=index,
        workers=workers,
        order=order,
        reply=reply,
        names=names,
    )


def push(rank: int, slice_: int, step: int = 1, flags: int = 0) -> PushArrived:
    return PushArrived(rank, slice_, step, PRIORITY[slice_], flags)


def frame(kind: Kind, rank: int, slice_: int, step: int = 1, flags: int = 0) -> SendFrame:
    return SendFrame(rank, kind, step, slice_, PRIORITY[slice_], flags, NO_TOKEN)


def reply(rank: int, slice_: int, step: int = 1, flags: int = 0) -> SendFrame:
    return frame(Kind.REPLY, rank, slice_, step, flags)


def handle_all(machine: ServerMachine, events: Iterable[object]) -> list[object]:
    return [instruction for event in events for instruction in machine.handle(event)]


def drain(machine: ServerMachine) -> list[object]:
    """Everything that leaves while nothing else happens, rank by rank; then all are idle."""
    out: list[object] = []
    for rank in range(machine._peers.count):
        while instructions := machine.handle(FrameSent(rank)):
            out += instructions
    return out


def update(machine: ServerMachine, slice_: int, step: int = 1) -> list[object]:
    """One whole update: all pushes, and all replies until the link is idle."""
    workers = range(machine._peers.count)
    assert handle_all(machine, [push(r, slice_, step) for r in workers]) == [
        UpdateSlice(slice_, step, tuple(workers))
    ]
    return machine.handle(SliceUpdated()) + drain(machine)


def state_of(machine: ServerMachine) -> str:
    slices = [
        [getattr(state, name) for name in state.__slots__] for state in machine._states.values()
    ]
    replies = machine._replies
    queues = (machine._updates.items(), machine._updating, replies.lanes.items())
    waits = (dict(replies._pulls), replies._unchanged, replies.lanes._busy)
    return repr((slices, queues, waits, machine.closing.members.left))


def test_a_slice_is_updated_once_every_worker_has_pushed_it() -> None:
    machine = make(workers=3)
    assert machine.handle(push(2, 0)) == []
    assert machine.handle(push(0, 0)) == []
    assert machine.incomplete() == [(0, 1)]
    assert machine.handle(push(1, 0)) == [UpdateSlice(0, 1, (0, 1, 2))]  # ranks ascending
    assert machine.incomplete() == []
    assert machine.handle(SliceUpdated()) == [reply(0, 0), reply(1, 0), reply(2, 0)]
    assert drain(machine) == []


def test_replies_carry_the_pushes_priority_back() -> None:
    """ps-lite loses it. The most urgent of the pushes' counts, should they differ."""
    machine = make()
    machine.handle(PushArrived(0, 0, 1, 9, 0))
    machine.handle(PushArrived(1, 0, 1, 7, 0))
    frames = machine.handle(SliceUpdated()) + drain(machine)
    assert [f.priority for f in frames if isinstance(f, SendFrame)] == [7, 7]


def test_priority_overtakes_in_the_update_queue_but_not_the_update_under_way() -> None:
    machine = make()
    events = [push(rank, slice_) for slice_ in (3, 2, 0) for rank in (0, 1)]
    assert handle_all(machine, events) == [UpdateSlice(3, 1, (0, 1))]
    assert len(machine._updates) == 2
    replies: list[object] = [reply(0, 3), reply(1, 3)]
    assert machine.handle(SliceUpdated()) == [*replies, UpdateSlice(0, 1, (0, 1))]
    assert machine.handle(SliceUpdated()) == [UpdateSlice(2, 1, (0, 1))]
    assert machine.handle(SliceUpdated()) == []
    expected = [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert drain(machine) == [reply(rank, slice_) for rank, slice_ in expected]


def test_replies_overtake_too_on_the_way_to_each_worker() -> None:
    machine = make()
    status = [MessageReady(rank, Kind.STATUS_REPLY, 1, CONTROL_PRIORITY, 2, 5) for rank in (0, 1)]
    assert len(handle_all(machine, status)) == 2  # under way to both
    for slice_ in (3, 2):
        handle_all(machine, [push(rank, slice_) for rank in (0, 1)])
        assert machine.handle(SliceUpdated()) == []
    assert machine.handle(FrameSent(1)) == [reply(1, 2)]
    handle_all(machine, [push(rank, 0) for rank in (0, 1)])
    assert machine.handle(SliceUpdated()) == []
    expected = [(0, 0), (0, 2), (0, 3), (1, 0), (1, 3)]
    assert drain(machine) == [reply(rank, slice_) for rank, slice_ in expected]


def test_fifo_updates_and_replies_in_the_order_of_arrival() -> None:
    machine = make("fifo")
    done = handle_all(machine, [push(r, s) for s in (3, 2, 0) for r in (0, 1)])
    done += handle_all(machine, [SliceUpdated()] * 3) + drain(machine)
    assert [u.slice for u in done if isinstance(u, UpdateSlice)] == [3, 2, 0]
    frames = [(f.peer, f.slice) for f in done if isinstance(f, SendFrame)]
    assert frames == [(0, 3), (1, 3), (0, 2), (0, 0), (1, 2), (1, 0)]


def test_an_earlier_step_is_updated_before_a_more_urgent_slice_of_the_next() -> None:
    machine = make(workers=1)
    machine.handle(push(0, 2))  # under way
    machine.handle(push(0, 0, 2))
    machine.handle(push(0, 3, 1))
    updates = [machine.handle(SliceUpdated())[-1] for _ in range(2)]
    assert updates == [UpdateSlice(3, 1, (0,)), UpdateSlice(0, 2, (0,))]


def test_one_frame_to_each_worker_is_in_flight() -> None:
    machine = make()
    update(machine, 0)
    handle_all(machine, [push(0, 2), push(1, 2)])
    assert machine.handle(SliceUpdated()) == [reply(0, 2), reply(1, 2)]
    assert (machine.sending_to, machine.queue_depth) == (set(), 0)
    asked = [MessageReady(rank, Kind.STATUS_REPLY, 1, CONTROL_PRIORITY, 2, rank) for rank in (0, 1)]
    status = [
        SendFrame(rank, Kind.STATUS_REPLY, 1, 2, CONTROL_PRIORITY, 0, rank) for rank in (0, 1)
    ]
    assert handle_all(machine, asked) == []
    assert (machine.sending_to, machine.queue_depth) == ({0, 1}, 2)
    assert drain(machine) == status


def test_a_worker_that_does_not_read_holds_up_nobody_else() -> None:
    machine = make()
    for slice_ in (3, 2, 0):
        handle_all(machine, [push(rank, slice_) for rank in (0, 1)])
    frames = handle_all(machine, [SliceUpdated()] * 3)
    assert [f for f in frames if isinstance(f, SendFrame)] == [reply(0, 3), reply(1, 3)]
    assert machine.handle(FrameSent(1)) == [reply(1, 0)]  # rank 0 never takes its frame
    assert machine.handle(FrameSent(1)) == [reply(1, 2)]
    assert machine.handle(FrameSent(1)) == []
    assert machine.sending_to == {0}
    assert drain(machine) == [reply(0, 0), reply(0, 2)]


def test_kvstore_notifies_and_answers_pulls() -> None:
    machine = make("fifo", "notify")
    assert update(machine, 0) == [frame(Kind.NOTIFY, 0, 0), frame(Kind.NOTIFY, 1, 0)]
    assert machine.handle(PullArrived(1, 0, 1, 0)) == [reply(1, 0)]
    assert machine.handle(PullArrived(0, 0, 1, 0)) == [reply(0, 0)]
    assert drain(machine) == []


def test_tensorflow_answers_pulls_only_and_also_those_that_came_early() -> None:
    machine = make("fifo", "pull")
    assert machine.handle(push(0, 0)) == []
    assert machine.handle(PullArrived(0, 0, 1, 0)) == []
    assert machine.handle(push(1, 0)) == [UpdateSlice(0, 1, (0, 1))]
    assert machine.handle(SliceUpdated()) == [reply(0, 0)]
    assert drain(machine) == []
    assert machine.handle(PullArrived(1, 0, 1, 0)) == [reply(1, 0)]


def test_ranks_without_a_gradient_are_left_out_of_the_sum() -> None:
    machine = make(workers=3)
    flags = (0, Flag.NO_GRADIENT, 0)
    events = [push(rank, 0, flags=flag) for rank, flag in enumerate(flags)]
    assert handle_all(machine, events) == [UpdateSlice(0, 1, (0, 2))]
    assert machine.handle(SliceUpdated()) == [reply(0, 0), reply(1, 0), reply(2, 0)]


@pytest.mark.parametrize(("mode", "kind"), [("broadcast", Kind.REPLY), ("notify", Kind.NOTIFY)])
def test_no_gradient_on_any_rank_means_unchanged(mode: Reply, kind: Kind) -> None:
    machine = make(reply=mode)
    events = [push(rank, 0, flags=Flag.NO_GRADIENT) for rank in (0, 1)]
    assert handle_all(machine, events) == [UpdateSlice(0, 1, ())]
    frames = machine.handle(SliceUpdated()) + drain(machine)
    assert frames == [frame(kind, rank, 0, flags=Flag.UNCHANGED) for rank in (0, 1)]


def test_a_value_set_by_hand_is_sent_even_without_any_gradient() -> None:
    machine = make()
    flags = Flag.NO_GRADIENT | Flag.VALUE_CHANGED
    assert machine.handle(ValueArrived(0, 0, 1, 0)) == []
    assert handle_all(machine, [push(r, 0, flags=flags) for r in (0, 1)]) == [UpdateSlice(0, 1, ())]
    assert machine.handle(SliceUpdated()) + drain(machine) == [reply(0, 0), reply(1, 0)]


def test_a_value_set_by_hand_on_some_ranks_only_ends_the_session() -> None:
    machine = make(workers=3)
    flags = (Flag.VALUE_CHANGED, 0, Flag.VALUE_CHANGED)
    message = (
        "parameter b was changed by hand before step 4 on ranks [0, 2] but not on ranks [1]:"
        " change it on every rank alike"
    )
    events = [push(rank, 2, 4, flag) for rank, flag in enumerate(flags)]
    assert handle_all(machine, events) == [FailSession(message, -1, 4)]


def test_initial_values_are_installed_and_sent_to_all_but_rank_zero() -> None:
    machine = make(workers=3, reply="notify")
    event = ValueArrived(0, 2, 0, 1)
    assert machine.handle(event) == [InstallValue(2), reply(1, 2, step=0), reply(2, 2, step=0)]
    assert drain(machine) == []
    with pytest.raises(RemoteProtocolError, match="slice 2 of b came for step 0: step 0 is done"):
        machine.handle(event)


def ready(mode: Reply = "broadcast") -> ServerMachine:
    """Slice 0 done in step 3 and pushed by rank 1 for step 4; slice 2 has rank 0's value."""
    machine = make(reply=mode)
    update(machine, 0, 3)
    machine.handle(push(1, 0, 4))
    machine.handle(ValueArrived(0, 2, 4, 1))
    return machine


WRONG = {
    "foreign slice": (push(0, 0)._replace(slice=1), "slice 1 does not belong to server 0"),
    "unknown slice": (push(0, 0)._replace(slice=77), "slice 77 does not belong to server 0"),
    "unknown rank": (push(2, 0, 4), "rank 2 of a world of 2"),
    "negative rank": (push(-1, 0, 4), "rank -1 of a world of 2"),
    "twice": (push(1, 0, 4), "rank 1 pushed slice 0 of a twice in step 4"),
    "past step": (push(0, 0, 3), "for step 3, which is past: step 3 is done"),
    "step zero": (push(0, 2, 0), "rank 0 pushed slice 2 of b for step 0"),
    "other step": (push(0, 0, 5), r"for step 5 while ranks \[1\] are at step 4"),
    "value of another rank": (ValueArrived(1, 3, 4, 2), "only rank 0 may"),
    "value twice": (ValueArrived(0, 2, 4, 1), "slice 2 of b came for step 4: twice or late"),
    "value of a past step": (ValueArrived(0, 0, 3, 0), "came for step 3: step 3 is done"),
    "foreign value": (ValueArrived(0, 1, 4, 0), "slice 1 does not belong to server 0"),
    "pull of a broadcast": (PullArrived(1, 0, 3, 0), "replies are broadcast"),
    "foreign pull": (PullArrived(1, 1, 3, 0), "slice 1 does not belong to server 0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_frame_is_the_worker_s_error_and_changes_nothing(what: str) -> None:
    machine = ready()
    event, message = WRONG[what]
    before = state_of(machine)
    with pytest.raises(RemoteProtocolError, match=message):
        machine.handle(event)
    assert state_of(machine) == before
    assert machine.handle(push(0, 0, 4)) == [UpdateSlice(0, 4, (0, 1))]  # the proper one counts


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (PullArrived(0, 0, 4, 0), "slice 0 for step 4, which it has not pushed; step 3 is done"),
        (PullArrived(1, 0, 5, 0), "slice 0 for step 5, which it has not pushed; step 3 is done"),
        (PullArrived(1, 0, 2, 0), "slice 0 for step 2, which it has not pushed; step 3 is done"),
        (PullArrived(2, 0, 3, 0), "rank 2 of a world of 2"),
        (PullArrived(1, 0, 4, 0), "rank 1 pulled slice 0 twice in step 4"),
    ],
)
def test_a_wrong_pull_changes_nothing(event: PullArrived, message: str) -> None:
    machine = ready("pull")
    assert machine.handle(PullArrived(1, 0, 4, 0)) == []
    before = state_of(machine)
    with pytest.raises(RemoteProtocolError, match=message):
        machine.handle(event)
    assert state_of(machine) == before


def test_a_value_after_its_own_push_is_late() -> None:
    machine = make()
    machine.handle(push(0, 0, 1))
    with pytest.raises(RemoteProtocolError, match="came for step 1: twice or late"):
        machine.handle(ValueArrived(0, 0, 1, 0))


def test_a_worker_that_left_is_named_by_whoever_still_needs_it() -> None:
    reason = (
        "rank 1 has left the session, but ranks [0] are at step 2 and need its gradient of b: all"
        " ranks must make the same number of steps"
    )
    machine = make()
    update(machine, 2)
    assert machine.handle(PeerLeft(1)) == []
    assert machine.handle(push(0, 2, 2)) == [FailSession(reason, 1, 1)]

    machine = make()  # the other order
    update(machine, 2)
    assert machine.handle(push(0, 2, 2)) == []
    assert machine.handle(PeerLeft(1)) == [FailSession(reason, 1, 1)]


def test_a_worker_may_leave_while_its_last_gradient_is_being_updated() -> None:
    machine = make()
    handle_all(machine, [push(0, 0), push(1, 0)])
    assert machine.handle(PeerLeft(0)) == []
    assert machine.handle(SliceUpdated()) == [reply(0, 0), reply(1, 0)]
    assert machine.handle(PeerLeft(1)) == [Finish()]


def test_nobody_pushes_after_saying_goodbye() -> None:
    machine = make()
    machine.handle(PeerLeft(1))
    before = state_of(machine)
    with pytest.raises(RemoteProtocolError, match="rank 1 pushed a slice of a after its goodbye"):
        machine.handle(push(1, 0))
    assert state_of(machine) == before


def test_the_session_is_finished_when_every_worker_has_left() -> None:
    machine = make(workers=3)
    assert handle_all(machine, [PeerLeft(0), PeerLeft(2), PeerLeft(2)]) == []
    assert machine.handle(PeerLeft(1)) == [Finish()]


def test_what_a_slice_waits_for_in_words() -> None:
    machine = make(workers=3)
    assert machine.describe_wait(2, 1) == "b waits for the push of ranks 0, 1, 2"
    machine.handle(push(1, 2))
    assert machine.describe_wait(2, 1) == "b waits for the push of ranks 0, 2"
    machine.handle(push(2, 2))
    assert machine.describe_wait(2, 1) == "b waits for the push of rank 0"
    assert machine.describe_wait(2, 2) == "b waits for the push of ranks 0, 1, 2"
    handle_all(machine, [push(rank, 0) for rank in range(3)])
    machine.handle(push(0, 2))
    assert machine.describe_wait(0, 1) == "a is being updated"
    assert machine.describe_wait(2, 1) == "b is queued for its update, with 0 other slices"
    for rank in (1, 2):  # under way to them, so that their replies have to wait
        machine.handle(MessageReady(rank, Kind.STATUS_REPLY, 1, CONTROL_PRIORITY, 2, 5))
    machine.handle(SliceUpdated())
    assert machine.describe_wait(0, 1) == "a is updated; replies still queued for ranks [1, 2]"
    drain(machine)
    assert machine.describe_wait(0, 1) == "a is updated; no reply is queued"
    with pytest.raises(RemoteProtocolError, match="slice 1 does not belong to server 0"):
        machine.describe_wait(1, 1)


def test_unknown_events_and_impossible_ones_are_internal_errors() -> None:
    with pytest.raises(InternalError, match="a server does not know the event 'hello'"):
        make().handle("hello")
    with pytest.raises(InternalError, match="an update finished that nobody started"):
        make().handle(SliceUpdated())
