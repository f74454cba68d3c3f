"""The worker's decisions, as whole lists of instructions."""

from __future__ import annotations

import pytest

from foreprop.core.manifest import Reply
from foreprop.core.sendqueue import Order
from foreprop.core.slicing import Partition, Slice, plan_slices
from foreprop.core.wire import Flag, Kind
from foreprop.core.worker import (
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
    WorkerMachine,
)
from foreprop.errors import InternalError, LocalProtocolError, RemoteProtocolError

# parameter 0 in slices 0 and 1, parameter 1 in slice 2, parameter 2 in slices 3 and 4
SLICES = tuple(Slice(i, p, 0, 1, i % 2) for i, p in enumerate([0, 0, 1, 2, 2]))


def make(
    order: Order = "priority", reply: Reply = "broadcast", parameters: int = 3
) -> WorkerMachine:
    return WorkerMachine(SLICES, parameters=parameters, order=order, reply=reply)


def frame(kind: Kind, slice_: int, *, step: int = 1, priority: int, flags: int = 0) -> SendFrame:
    return SendFrame(slice_ % 2, kind, step, slice_, priority, flags, NO_TOKEN)


def push(slice_: int, *, step: int = 1, priority: int, flags: int = 0) -> SendFrame:
    return frame(Kind.PUSH, slice_, step=step, priority=priority, flags=flags)


def pull(slice_: int, *, priority: int) -> SendFrame:
    return frame(Kind.PULL, slice_, priority=priority)


def drain(machine: WorkerMachine) -> list[object]:
    """Everything that leaves while nothing else happens; the link is idle afterwards."""
    out: list[object] = []
    while instructions := machine.handle(FrameSent()):
        out += instructions
        if instructions == [Finish()]:
            break
    return out


def state_of(machine: WorkerMachine) -> str:
    return repr({**vars(machine), "_handlers": None, "_queue": machine._queue.items()})


def pushed(reply: Reply, parameter: int = 0) -> WorkerMachine:
    """A machine all of whose pushes of one parameter have left, in step 1."""
    machine = make("fifo" if reply != "broadcast" else "priority", reply)
    machine.handle(GradientReady(parameter, 1))
    drain(machine)
    return machine


def test_a_gradient_leaves_slice_by_slice_one_frame_at_a_time() -> None:
    machine = make()
    assert machine.handle(GradientReady(0, 1)) == [push(0, priority=0)]
    assert machine.queue_depth == 1
    assert machine.handle(GradientReady(1, 1)) == []  # the link is busy
    assert machine.handle(FrameSent()) == [push(1, priority=0)]
    assert machine.handle(FrameSent()) == [push(2, priority=1)]
    assert machine.handle(FrameSent()) == []
    assert machine.queue_depth == 0


def test_priority_overtakes_between_frames_only() -> None:
    machine = make()
    assert machine.handle(GradientReady(2, 1)) == [push(3, priority=2)]
    assert machine.handle(GradientReady(1, 1)) == []
    assert machine.handle(GradientReady(0, 1)) == []
    expected = [push(s, priority=p) for s, p in [(0, 0), (1, 0), (2, 1), (4, 2)]]
    assert drain(machine) == expected


def test_fifo_sends_in_the_order_of_the_backward_pass() -> None:
    machine = make("fifo")
    first = [i for p in (2, 1, 0) for i in machine.handle(GradientReady(p, 1))]
    expected = [push(s, priority=p) for s, p in [(3, 2), (4, 2), (2, 1), (0, 0), (1, 0)]]
    assert first + drain(machine) == expected


def test_an_earlier_step_goes_before_a_more_urgent_parameter_of_the_next() -> None:
    machine = make()
    machine.handle(GradientReady(1, 1))
    machine.handle(GradientReady(0, 2))
    machine.handle(GradientReady(2, 1))
    expected = [(3, 1, 2), (4, 1, 2), (0, 2, 0), (1, 2, 0)]
    assert drain(machine) == [push(s, step=step, priority=p) for s, step, p in expected]


def test_learned_priorities_hold_from_the_next_gradient_on() -> None:
    machine = make()
    assert machine.handle(GradientReady(1, 1)) == [push(2, priority=1)]
    assert machine.handle(GradientReady(2, 1)) == []
    assert machine.handle(PrioritiesLearned((2, 0, 1))) == []
    assert [machine.priority_of(p) for p in range(3)] == [1, 2, 0]
    assert machine.handle(GradientReady(0, 1)) == []
    assert drain(machine) == [push(s, priority=p) for s, p in [(0, 1), (1, 1), (3, 2), (4, 2)]]


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
    assert machine.handle(GradientReady(0, 2)) == [push(0, step=2, priority=0)]
    assert machine.step_of(0) == 2


def test_a_reply_may_come_before_the_link_says_that_the_push_has_left() -> None:
    machine = make()
    assert machine.handle(GradientReady(1, 1)) == [push(2, priority=1)]
    assert machine.handle(ReplyArrived(2, 1, 0)) == [CompleteParameter(1, 1)]
    assert machine.handle(FrameSent()) == []


def test_missing_slices_tell_what_is_queued_from_what_has_left() -> None:
    machine = make()
    machine.handle(GradientReady(0, 1))
    assert machine.missing_slices(0) == [(SLICES[0], True), (SLICES[1], False)]


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
        push(0, priority=0, flags=flags),
        frame(Kind.VALUE, 1, priority=0),
        push(1, priority=0, flags=flags),
    ]


def test_rank_zero_offers_every_slice_and_the_others_await_them_as_step_zero() -> None:
    zero, other = make(), make()
    offered = zero.handle(ValuesOffered()) + drain(zero)
    priorities = [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2)]
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
    machine = make()
    machine.handle(GradientReady(1, 1))
    blob = MessageReady(0, Kind.BLOB, 1, LAST_PRIORITY, 1, 7)
    status = MessageReady(1, Kind.STATUS_PULL, 1, CONTROL_PRIORITY, 2, 8)
    assert (
        machine.handle(blob) == machine.handle(GradientReady(0, 1)) == machine.handle(status) == []
    )
    assert drain(machine) == [
        SendFrame(1, Kind.STATUS_PULL, 1, 2, CONTROL_PRIORITY, 0, 8),
        push(0, priority=0),
        push(1, priority=0),
        SendFrame(0, Kind.BLOB, 1, 1, LAST_PRIORITY, 0, 7),
    ]


def test_kvstore_pulls_once_all_parts_are_announced() -> None:
    machine = pushed("notify")
    assert machine.handle(NotifyArrived(1, 1, 1, 0)) == []
    assert not machine.awaits(1, 1)  # no reply may land before the pull has left
    assert machine.handle(NotifyArrived(0, 1, 0, 0)) == [pull(1, priority=0)]
    assert machine.handle(FrameSent()) == [pull(0, priority=0)]
    assert machine.handle(FrameSent()) == []
    assert machine.handle(ReplyArrived(1, 1, 1)) == []
    assert machine.handle(ReplyArrived(0, 1, 0)) == [CompleteParameter(0, 1)]


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
        assert machine.handle(FrameSent()) == []
        assert machine.handle(ReplyArrived(2, step, 0)) == [CompleteParameter(1, step)]


def test_tensorflow_pulls_when_the_next_step_starts_and_not_before() -> None:
    machine = pushed("pull")
    machine.handle(GradientReady(1, 1))
    assert drain(machine) == []
    assert not machine.awaits(0, 1)
    assert machine.handle(PullsDue()) == [pull(0, priority=0)]
    assert machine.awaits(0, 1)
    assert drain(machine) == [pull(1, priority=0), pull(2, priority=1)]
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
    assert machine.handle(NotifyArrived(1, 1, 1, 0)) == [pull(0, priority=0)]
    with pytest.raises(RemoteProtocolError, match="announced slice 1 twice"):
        machine.handle(NotifyArrived(1, 1, 1, 0))  # also after it was pulled


def test_a_reply_before_the_pull_was_sent_is_the_server_s_error() -> None:
    machine = pushed("pull", 1)
    with pytest.raises(RemoteProtocolError, match="slice 2, step 1; it is not awaited"):
        machine.handle(ReplyArrived(2, 1, 0))
    machine.handle(PullsDue())
    assert machine.handle(ReplyArrived(2, 1, 0)) == [CompleteParameter(1, 1)]


def test_shutdown_is_a_state_and_finish_comes_when_the_queue_is_empty() -> None:
    machine = make()
    machine.handle(GradientReady(2, 1))
    assert machine.handle(Closing()) == []
    assert machine.handle(GradientReady(0, 1)) == []
    expected = [push(s, priority=p) for s, p in [(0, 0), (1, 0), (4, 2)]]
    assert drain(machine) == [*expected, Finish()]


def test_an_idle_machine_finishes_at_once() -> None:
    assert make().handle(Closing()) == [Finish()]


def test_an_unknown_event_is_an_internal_error() -> None:
    with pytest.raises(InternalError, match="a worker does not know the event 'hello'"):
        make().handle("hello")


def test_ranks_send_a_parameters_slices_to_different_servers_first() -> None:
    slices = plan_slices([10], [4], Partition(servers=4, slice_elems=1))
    orders = []
    for rank in range(4):
        machine = WorkerMachine(
            slices, parameters=1, order="priority", reply="broadcast", rank=rank
        )
        frames = machine.handle(GradientReady(0, 1))
        while frames:
            orders.append((rank, frames[0].slice))
            frames = machine.handle(FrameSent())
    sent = [[slice_ for r, slice_ in orders if r == rank] for rank in range(4)]
    assert sent[0] == list(range(10))
    assert sent[1] == [1, 2, 3, 0, 5, 6, 7, 4, 9, 8]
    assert [order[0] for order in sent] == [0, 1, 2, 3], "four servers, four first slices"
    assert all(sorted(order) == list(range(10)) for order in sent)
