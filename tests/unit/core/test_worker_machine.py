"""The worker's decisions, as whole lists of instructions."""

from __future__ import annotations

import pytest

from foreprop.core.frames import (
    CONTROL_PRIORITY,
    LAST_PRIORITY,
    NO_TOKEN,
    Closing,
    CompleteParameter,
    Finish,
    FrameSent,
    GradientReady,
    MessageReady,
    NotifyArrived,
    PrioritiesLearned,
    PullsDue,
    ReplyArrived,
    SendFrame,
    ValuesAwaited,
    ValuesOffered,
)
from foreprop.core.sendqueue import Order, Reply
from foreprop.core.slicing import Partition, Slice, plan_slices
from foreprop.core.wire import Flag, Kind
from foreprop.core.worker_machine import WorkerMachine
from foreprop.errors import InternalError, LocalProtocolError, RemoteProtocolError

# parameter 0 in slices 0 and 1, parameter 1 in slice 2, parameter 2 in slices 3 and 4
SLICES = tuple(Slice(i, p, 0, 1, i % 2) for i, p in enumerate([0, 0, 1, 2, 2]))


ON_ONE_SERVER = tuple(piece._replace(server=0) for piece in SLICES)


def make(
    order: Order = "priority", reply: Reply = "broadcast", parameters: int = 3, servers: int = 2
) -> WorkerMachine:
    slices = SLICES if servers == 2 else ON_ONE_SERVER
    return WorkerMachine(slices, parameters=parameters, order=order, reply=reply)


def frame(kind: Kind, slice_: int, *, step: int = 1, priority: int, flags: int = 0) -> SendFrame:
    return SendFrame(slice_ % 2, kind, step, slice_, priority, flags, NO_TOKEN)


def push(slice_: int, *, step: int = 1, priority: int, flags: int = 0) -> SendFrame:
    return frame(Kind.PUSH, slice_, step=step, priority=priority, flags=flags)


def pull(slice_: int, *, priority: int) -> SendFrame:
    return frame(Kind.PULL, slice_, priority=priority)


def to_server_0(*frames: SendFrame) -> list[SendFrame]:
    return [frame._replace(peer=0) for frame in frames]


def drain(machine: WorkerMachine) -> list[object]:
    """Everything that leaves while nothing else happens, server by server; then all are idle."""
    out: list[object] = []
    for server in (0, 1):
        while instructions := machine.handle(FrameSent(server)):
            out += instructions
            if instructions == [Finish()]:
                return out
    return out


def state_of(machine: WorkerMachine) -> str:
    lanes = (machine._lanes.items(), machine._lanes._busy)
    return repr({**vars(machine), "_handlers": None, "_lanes": lanes})


def pushed(reply: Reply, parameter: int = 0) -> WorkerMachine:
    """A machine all of whose pushes of one parameter have left, in step 1."""
    machine = make("fifo" if reply != "broadcast" else "priority", reply)
    machine.handle(GradientReady(parameter, 1))
    drain(machine)
    return machine


def test_a_gradient_leaves_slice_by_slice_one_frame_to_each_server_at_a_time() -> None:
    machine = make()
    assert machine.handle(GradientReady(0, 1)) == [push(0, priority=0), push(1, priority=0)]
    assert machine.queue_depth == 0
    assert machine.handle(GradientReady(2, 1)) == []  # both links are busy
    assert machine.handle(GradientReady(1, 1)) == []
    assert machine.queue_depth == 3
    assert machine.handle(FrameSent(0)) == [push(2, priority=1)]
    assert machine.handle(FrameSent(1)) == [push(3, priority=2)]
    assert machine.handle(FrameSent(1)) == []
    assert machine.handle(FrameSent(0)) == [push(4, priority=2)]
    assert machine.handle(FrameSent(0)) == []
    assert machine.queue_depth == 0


def test_a_full_server_does_not_hold_up_another() -> None:
    machine = make()
    assert machine.handle(GradientReady(0, 1)) == [push(0, priority=0), push(1, priority=0)]
    assert machine.handle(FrameSent(0)) == []  # server 1 never takes its frame
    assert machine.handle(GradientReady(2, 1)) == [push(4, priority=2)]
    assert machine.handle(GradientReady(1, 1)) == []
    assert machine.handle(FrameSent(0)) == [push(2, priority=1)]
    assert machine.handle(FrameSent(0)) == []
    assert machine.queue_depth == 1
    assert machine.missing_slices(2) == [(SLICES[3], False), (SLICES[4], True)]
    assert machine.handle(FrameSent(1)) == [push(3, priority=2)]


def test_priority_overtakes_between_frames_only() -> None:
    machine = make(servers=1)
    assert machine.handle(GradientReady(2, 1)) == to_server_0(push(3, priority=2))
    assert machine.handle(GradientReady(1, 1)) == []
    assert machine.handle(GradientReady(0, 1)) == []
    expected = [push(s, priority=p) for s, p in [(0, 0), (1, 0), (2, 1), (4, 2)]]
    assert drain(machine) == to_server_0(*expected)


def test_priority_orders_what_goes_to_each_server() -> None:
    machine = make()
    assert machine.handle(GradientReady(0, 1)) == [push(0, priority=0), push(1, priority=0)]
    for parameter, step in [(2, 1), (1, 1)]:
        assert machine.handle(GradientReady(parameter, step)) == []
    for slice_ in (0, 1):
        machine.handle(ReplyArrived(slice_, 1, slice_))
    assert machine.handle(GradientReady(0, 2)) == []
    expected = [(2, 1, 1), (4, 1, 2), (0, 2, 0), (3, 1, 2), (1, 2, 0)]  # server 0, then server 1
    assert drain(machine) == [push(s, step=step, priority=p) for s, step, p in expected]


def test_fifo_sends_in_the_order_of_the_backward_pass() -> None:
    machine = make("fifo", servers=1)
    first = [i for p in (2, 1, 0) for i in machine.handle(GradientReady(p, 1))]
    expected = [push(s, priority=p) for s, p in [(3, 2), (4, 2), (2, 1), (0, 0), (1, 0)]]
    assert first + drain(machine) == to_server_0(*expected)

    machine = make("fifo")  # 3 and 4 at once, then 2 and 0 to server 0 and 1 to server 1
    first = [i for p in (2, 1, 0) for i in machine.handle(GradientReady(p, 1))]
    assert first == expected[:2]
    assert drain(machine) == expected[2:]


def test_an_earlier_step_goes_before_a_more_urgent_parameter_of_the_next() -> None:
    machine = make(servers=1)
    machine.handle(GradientReady(1, 1))
    machine.handle(GradientReady(0, 2))
    machine.handle(GradientReady(2, 1))
    expected = [(3, 1, 2), (4, 1, 2), (0, 2, 0), (1, 2, 0)]
    pushes = [push(s, step=step, priority=p) for s, step, p in expected]
    assert drain(machine) == to_server_0(*pushes)


def test_learned_priorities_hold_from_the_next_gradient_on() -> None:
    machine = make(servers=1)
    assert machine.handle(GradientReady(1, 1)) == to_server_0(push(2, priority=1))
    assert machine.handle(GradientReady(2, 1)) == []
    assert machine.handle(PrioritiesLearned((2, 0, 1))) == []
    assert [machine.priority_of(p) for p in range(3)] == [1, 2, 0]
    assert machine.handle(GradientReady(0, 1)) == []
    expected = [push(s, priority=p) for s, p in [(0, 1), (1, 1), (3, 2), (4, 2)]]
    assert drain(machine) == to_server_0(*expected)


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (0, 1, 3), (0, 1, 2, 3)])
def test_priorities_must_name_every_parameter_once(order: tuple[int, ...]) -> None:
    machine = make()
    with pytest.raises(LocalProtocolError, match="must name every parameter once"):
        machine.handle(PrioritiesLearned(order))
    assert [machine.priority_of(p) for p in range(3)] == [0, 1, 2]


def test_a_parameter_is_complete_when_all_its_slices_are_answered() -> None:
    machine = pushed("broadcast")
    assert not machine.is_complete(0)
    assert machine.awaits(0, 1)
    assert machine.handle(ReplyArrived(1, 1, 1)) == []
    assert not machine.awaits(1, 1)
    assert machine.missing_slices(0) == [(SLICES[0], True)]
    assert machine.handle(ReplyArrived(0, 1, 0)) == [CompleteParameter(0, 1)]
    assert machine.is_complete(0)
    assert machine.missing_slices(0) == []
    expected = [push(s, step=2, priority=0) for s in (0, 1)]
    assert machine.handle(GradientReady(0, 2)) == expected
    assert machine.step_of(0) == 2


def test_a_reply_may_come_before_the_link_says_that_the_push_has_left() -> None:
    machine = make()
    assert machine.handle(GradientReady(1, 1)) == [push(2, priority=1)]
    assert machine.handle(ReplyArrived(2, 1, 0)) == [CompleteParameter(1, 1)]
    assert machine.handle(FrameSent(0)) == []


def test_missing_slices_tell_what_is_queued_from_what_has_left() -> None:
    machine = make(servers=1)
    machine.handle(GradientReady(0, 1))
    assert machine.missing_slices(0) == [(ON_ONE_SERVER[0], True), (ON_ONE_SERVER[1], False)]


def test_a_second_gradient_of_a_pending_parameter_is_our_own_error() -> None:
    machine = pushed("broadcast")
    before = state_of(machine)
    with pytest.raises(
        LocalProtocolError, match="parameter 0 has a gradient for step 2 while step 1"
    ):
        machine.handle(GradientReady(0, 2))
    assert state_of(machine) == before


def test_flags_travel_and_a_value_goes_before_its_gradient() -> None:
    machine = make()
    flags = Flag.VALUE_CHANGED
    first = machine.handle(GradientReady(0, 1, flags, True))
    assert first + drain(machine) == [
        frame(Kind.VALUE, 0, priority=0),
        frame(Kind.VALUE, 1, priority=0),
        push(0, priority=0, flags=flags),
        push(1, priority=0, flags=flags),
    ]

    machine = make(servers=1)
    first = machine.handle(GradientReady(0, 1, flags, True))
    assert first + drain(machine) == to_server_0(
        frame(Kind.VALUE, 0, priority=0),
        push(0, priority=0, flags=flags),
        frame(Kind.VALUE, 1, priority=0),
        push(1, priority=0, flags=flags),
    )


def test_rank_zero_offers_every_slice_and_the_others_await_them_as_step_zero() -> None:
    zero, other = make(), make()
    offered = zero.handle(ValuesOffered()) + drain(zero)
    priorities = [(0, 0), (1, 0), (2, 1), (4, 2), (3, 2)]  # the first of each server, then the rest
    assert offered == [frame(Kind.VALUE, s, step=0, priority=p) for s, p in priorities]
    assert all(zero.is_complete(p) for p in range(3))

    assert other.handle(ValuesAwaited()) == []
    assert other.handle(ReplyArrived(2, 0, 0)) == [CompleteParameter(1, 0)]
    assert [other.is_complete(p) for p in range(3)] == [False, True, False]


@pytest.mark.parametrize("reply", ["notify", "pull"])
def test_initial_values_are_replies_even_where_later_ones_are_pulled(reply: Reply) -> None:
    machine = make(reply=reply)
    machine.handle(ValuesAwaited())
    assert machine.handle(ReplyArrived(2, 0, 0)) == [CompleteParameter(1, 0)]


def test_an_empty_parameter_is_complete_at_once() -> None:
    machine = make(parameters=4)
    assert machine.handle(GradientReady(3, 1)) == [CompleteParameter(3, 1)]
    assert machine.handle(ValuesAwaited()) == [CompleteParameter(3, 0)]


def test_messages_queue_by_step_and_priority() -> None:
    machine = make(servers=1)
    machine.handle(GradientReady(1, 1))
    blob = MessageReady(0, Kind.BLOB, 1, LAST_PRIORITY, 1, 7)
    status = MessageReady(0, Kind.STATUS_PULL, 1, CONTROL_PRIORITY, 2, 8)
    assert (
        machine.handle(blob) == machine.handle(GradientReady(0, 1)) == machine.handle(status) == []
    )
    assert drain(machine) == [
        SendFrame(0, Kind.STATUS_PULL, 1, 2, CONTROL_PRIORITY, 0, 8),
        *to_server_0(push(0, priority=0), push(1, priority=0)),
        SendFrame(0, Kind.BLOB, 1, 1, LAST_PRIORITY, 0, 7),
    ]


def test_a_message_to_an_idle_server_leaves_at_once() -> None:
    machine = make()
    assert machine.handle(GradientReady(1, 1)) == [push(2, priority=1)]
    status = SendFrame(1, Kind.STATUS_PULL, 1, 2, CONTROL_PRIORITY, 0, 8)
    event = MessageReady(1, Kind.STATUS_PULL, 1, CONTROL_PRIORITY, 2, 8)
    assert machine.handle(event) == [status]


def test_kvstore_pulls_once_all_parts_are_announced() -> None:
    machine = pushed("notify")
    assert machine.handle(NotifyArrived(1, 1, 1, 0)) == []
    assert not machine.awaits(1, 1)  # no reply may land before the pull has left
    pulls = [pull(0, priority=0), pull(1, priority=0)]
    assert machine.handle(NotifyArrived(0, 1, 0, 0)) == pulls
    assert [machine.handle(FrameSent(server)) for server in (0, 1)] == [[], []]
    assert machine.handle(ReplyArrived(1, 1, 1)) == []
    assert machine.handle(ReplyArrived(0, 1, 0)) == [CompleteParameter(0, 1)]


def test_a_queued_pull_awaits_nothing() -> None:
    machine = pushed("notify")
    machine.handle(GradientReady(1, 1))  # under way to server 0
    machine.handle(NotifyArrived(1, 1, 1, 0))
    assert machine.handle(NotifyArrived(0, 1, 0, 0)) == [pull(1, priority=0)]
    assert [machine.awaits(slice_, 1) for slice_ in (0, 1)] == [False, True]
    assert machine.handle(FrameSent(0)) == [pull(0, priority=0)]
    assert machine.awaits(0, 1)


def test_kvstore_does_not_pull_what_has_not_changed() -> None:
    machine = pushed("notify")
    assert machine.handle(NotifyArrived(0, 1, 0, Flag.UNCHANGED)) == []
    assert machine.handle(NotifyArrived(1, 1, 1, Flag.UNCHANGED)) == [CompleteParameter(0, 1)]

    machine = pushed("notify")  # the unchanged part is the last that the other waited for
    assert machine.handle(NotifyArrived(0, 1, 0, 0)) == []
    assert machine.handle(NotifyArrived(1, 1, 1, Flag.UNCHANGED)) == [pull(0, priority=0)]
    assert machine.handle(ReplyArrived(0, 1, 0)) == [CompleteParameter(0, 1)]


def test_kvstore_announces_every_step_anew() -> None:
    machine = pushed("notify", 1)
    for step in (1, 2, 3):
        if step > 1:
            machine.handle(GradientReady(1, step))
            drain(machine)
        assert machine.handle(NotifyArrived(2, step, 0, 0)) == [
            frame(Kind.PULL, 2, step=step, priority=1)
        ]
        assert machine.handle(FrameSent(0)) == []
        assert machine.handle(ReplyArrived(2, step, 0)) == [CompleteParameter(1, step)]


def test_tensorflow_pulls_when_the_next_step_starts_and_not_before() -> None:
    machine = pushed("pull")
    machine.handle(GradientReady(1, 1))
    assert drain(machine) == []
    assert not machine.awaits(0, 1)
    assert machine.handle(PullsDue()) == [pull(0, priority=0), pull(1, priority=0)]
    assert [machine.awaits(slice_, 1) for slice_ in range(3)] == [True, True, False]
    assert drain(machine) == [pull(2, priority=1)]
    assert machine.handle(PullsDue()) == []  # each is pulled once
    assert machine.handle(ReplyArrived(0, 1, 0)) == []
    assert machine.handle(ReplyArrived(1, 1, 1)) == [CompleteParameter(0, 1)]


WRONG_REPLIES = {
    "not pushed": (ReplyArrived(2, 1, 0), "slice 2, step 1; it is not awaited"),
    "later step": (ReplyArrived(0, 2, 0), "slice 0, step 2; step 1 is awaited"),
    "earlier step": (ReplyArrived(0, 0, 0), "slice 0, step 0; step 1 is awaited"),
    "no step": (ReplyArrived(2, -1, 0), "slice 2, step -1; it is not awaited"),
    "unknown slice": (ReplyArrived(5, 1, 0), "slice 5, step 1; it is not awaited"),
    "negative slice": (ReplyArrived(-1, 1, 0), "slice -1, step 1; it is not awaited"),
    "another's slice": (ReplyArrived(0, 1, 1), "server 1 sent a reply for slice 0, which belongs"),
    "not announced": (NotifyArrived(0, 1, 0, 0), "a notification for slice 0, step 1"),
}


@pytest.mark.parametrize("what", WRONG_REPLIES)
def test_a_wrong_reply_is_the_server_s_error_and_changes_nothing(what: str) -> None:
    machine = pushed("broadcast")
    event, message = WRONG_REPLIES[what]
    before = state_of(machine)
    with pytest.raises(RemoteProtocolError, match=message):
        machine.handle(event)
    assert state_of(machine) == before
    assert machine.handle(ReplyArrived(0, 1, 0)) == []  # the proper one still counts
    with pytest.raises(RemoteProtocolError, match="slice 0, step 1; it is not awaited"):
        machine.handle(ReplyArrived(0, 1, 0))  # but once
    assert machine.handle(ReplyArrived(1, 1, 1)) == [CompleteParameter(0, 1)]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (NotifyArrived(0, 1, 0, 0), "server 0 announced slice 0 twice"),
        (NotifyArrived(0, 1, 0, Flag.UNCHANGED), "server 0 announced slice 0 twice"),
        (NotifyArrived(1, 2, 1, 0), "slice 1, step 2; step 1 is awaited"),
        (NotifyArrived(1, 1, 0, 0), "slice 1, which belongs to server 1"),
        (NotifyArrived(9, 1, 0, 0), "slice 9, step 1; it is not awaited"),
        (ReplyArrived(0, 1, 0), "sent a reply for slice 0, step 1; it is not awaited"),
    ],
)
def test_a_wrong_notification_changes_nothing(event: object, message: str) -> None:
    machine = pushed("notify")
    machine.handle(NotifyArrived(0, 1, 0, 0))
    before = state_of(machine)
    with pytest.raises(RemoteProtocolError, match=message):
        machine.handle(event)
    assert state_of(machine) == before
    pulls = [pull(0, priority=0), pull(1, priority=0)]
    assert machine.handle(NotifyArrived(1, 1, 1, 0)) == pulls
    with pytest.raises(RemoteProtocolError, match="announced slice 1 twice"):
        machine.handle(NotifyArrived(1, 1, 1, 0))  # also after it was pulled


def test_a_reply_before_the_pull_was_sent_is_the_server_s_error() -> None:
    machine = pushed("pull", 1)
    with pytest.raises(RemoteProtocolError, match="slice 2, step 1; it is not awaited"):
        machine.handle(ReplyArrived(2, 1, 0))
    machine.handle(PullsDue())
    assert machine.handle(ReplyArrived(2, 1, 0)) == [CompleteParameter(1, 1)]


def test_shutdown_is_a_state_and_finish_comes_when_the_queue_is_empty() -> None:
    machine = make(servers=1)
    machine.handle(GradientReady(2, 1))
    assert machine.handle(Closing()) == []
    assert machine.handle(GradientReady(0, 1)) == []
    expected = [push(s, priority=p) for s, p in [(0, 0), (1, 0), (4, 2)]]
    assert drain(machine) == [*to_server_0(*expected), Finish()]


def test_finish_comes_when_the_last_frame_has_left_for_every_server() -> None:
    machine = make()
    machine.handle(GradientReady(2, 1))
    machine.handle(GradientReady(1, 1))
    assert machine.handle(Closing()) == []
    assert machine.handle(FrameSent(0)) == [push(2, priority=1)]
    assert machine.handle(FrameSent(0)) == []  # one is under way to server 1
    assert machine.handle(FrameSent(1)) == [Finish()]


def test_an_idle_machine_finishes_at_once() -> None:
    assert make().handle(Closing()) == [Finish()]


def test_an_unknown_event_is_an_internal_error() -> None:
    with pytest.raises(InternalError, match="a worker does not know the event 'hello'"):
        make().handle("hello")


def test_every_server_gets_its_slices_of_a_parameter_in_order() -> None:
    slices = plan_slices([10], [4], Partition(servers=4, slice_elems=1))
    machine = WorkerMachine(slices, parameters=1, order="priority", reply="broadcast")
    frames = machine.handle(GradientReady(0, 1))
    for server in range(4):
        while following := machine.handle(FrameSent(server)):
            frames += following
    sent = [(f.peer, f.slice) for f in frames if isinstance(f, SendFrame)]
    assert sent[:4] == [(0, 0), (1, 1), (2, 2), (3, 3)]  # all servers at once
    assert sent[4:] == [(0, 4), (0, 8), (1, 5), (1, 9), (2, 6), (3, 7)]


def test_what_is_awaited_is_counted_from_its_leaving_on() -> None:
    machine = make()
    counts = [machine.awaited]
    machine.handle(GradientReady(0, 1, 0, False))  # slice 0 to server 0, slice 1 to server 1
    machine.handle(GradientReady(2, 1, 0, False))  # slices 3 and 4 are queued
    counts.append(machine.awaited)
    machine.handle(FrameSent(0))
    counts.append(machine.awaited)
    machine.handle(MessageReady(0, Kind.PUSH, 1, 0, 0, 9, 0))  # once more: it came damaged
    machine.handle(FrameSent(0))
    counts.append(machine.awaited)
    machine.handle(ReplyArrived(0, 1, 0))
    counts.append(machine.awaited)
    assert counts == [0, 2, 3, 3, 2]


def test_values_to_begin_with_are_awaited_too() -> None:
    machine = make()
    machine.handle(ValuesAwaited(4))
    assert machine.awaited == 5
    for piece in SLICES:
        machine.handle(ReplyArrived(piece.number, 4, piece.server))
    assert machine.awaited == 0
