"""A relay's decisions, as whole lists of instructions. More in `test_interleavings`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from foreprop.core.collect import SliceUpdated, UpdateSlice
from foreprop.core.frames import (
    NO_TOKEN,
    SERVER,
    FailSession,
    Finish,
    FrameSent,
    InstallValue,
    MessageReady,
    NotifyArrived,
    PeerLeft,
    PullArrived,
    PushArrived,
    ReplyArrived,
    SendFrame,
    ValueArrived,
)
from foreprop.core.relay_machine import PassedUpwards, relay_machine, workers_of_node
from foreprop.core.sendqueue import Order, Reply
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.wire import Flag, Kind
from foreprop.errors import InternalError, RemoteProtocolError

# server 0 owns slices 0 and 2, of the parameters "a" and "b"
SLICES = (Slice(0, 0, 0, 1, 0), Slice(1, 0, 1, 2, 1), Slice(2, 1, 0, 1, 0))
PRIORITY = {0: 0, 2: 1}


Relay = ServerMachine[PassedUpwards]


def make(reply: Reply = "broadcast", *, node: int = 1, order: Order = "priority") -> Relay:
    """The relay of a node with two workers; on node 1 these are ranks 2 and 3."""
    peers = workers_of_node(node, 4, 2)
    return relay_machine(SLICES, server=0, peers=peers, order=order, reply=reply, names=["a", "b"])


def push(worker: int, slice_: int, step: int = 1, flags: int = 0) -> PushArrived:
    return PushArrived(worker, slice_, step, PRIORITY[slice_], flags)


def frame(kind: Kind, peer: int, slice_: int, step: int = 1, flags: int = 0) -> SendFrame:
    return SendFrame(peer, kind, step, slice_, PRIORITY[slice_], flags, NO_TOKEN)


def answer(slice_: int, step: int = 1, flags: int = 0) -> ReplyArrived:
    return ReplyArrived(slice_, step, SERVER, PRIORITY[slice_], flags)


def handle_all(machine: Relay, events: Iterable[object]) -> list[object]:
    return [instruction for event in events for instruction in machine.handle(event)]


def pushed_on(machine: Relay, slice_: int, step: int = 1) -> list[object]:
    """Both workers push, the sum is made, and has left."""
    events = [push(0, slice_, step), push(1, slice_, step)]
    assert handle_all(machine, events) == [UpdateSlice(slice_, step, (0, 1))]
    sent = machine.handle(SliceUpdated())
    return [*sent, *machine.handle(FrameSent(SERVER))]


@pytest.mark.parametrize("worker", [0, 1])
def test_what_one_worker_may_have_changed_its_node_may_have(worker: int) -> None:
    """The flag is set in that step alone."""
    machine = make()
    flags = [Flag.EXPOSED if peer == worker else 0 for peer in range(2)]
    handle_all(machine, [push(0, 0, flags=flags[0]), push(1, 0, flags=flags[1])])
    assert machine.handle(SliceUpdated()) == [frame(Kind.PUSH, SERVER, 0, flags=Flag.EXPOSED)]
    machine.handle(FrameSent(SERVER))
    handle_all(machine, [answer(0), FrameSent(0), FrameSent(1)])
    assert pushed_on(machine, 0, step=2) == [frame(Kind.PUSH, SERVER, 0, step=2)]


def test_one_push_leaves_when_every_worker_has_pushed_and_the_answer_goes_to_all() -> None:
    machine = make()
    assert machine.handle(push(1, 0)) == []
    assert machine.incomplete() == [(0, 1)]
    assert machine.describe_wait(0, 1) == "a waits for the push of rank 2"
    assert machine.handle(push(0, 0)) == [UpdateSlice(0, 1, (0, 1))]
    assert not machine.closing.has_pushed(0, 1)
    assert machine.handle(SliceUpdated()) == [frame(Kind.PUSH, SERVER, 0)]
    assert machine.closing.has_pushed(0, 1)
    assert machine.describe_wait(0, 1) == "a is summed and waits for server 0"
    assert machine.closing.awaits(0, 1)
    assert machine.handle(answer(0)) == [frame(Kind.REPLY, 0, 0), frame(Kind.REPLY, 1, 0)]
    assert not machine.closing.awaits(0, 1)


def test_many_sums_wait_for_their_answers_which_come_in_any_order() -> None:
    machine = make()
    assert pushed_on(machine, 2) == [frame(Kind.PUSH, SERVER, 2)]
    assert pushed_on(machine, 0) == [frame(Kind.PUSH, SERVER, 0)]
    assert machine.closing.awaited() == [(2, 1), (0, 1)]
    assert machine.handle(answer(0)) == [frame(Kind.REPLY, 0, 0), frame(Kind.REPLY, 1, 0)]
    assert machine.closing.awaited() == [(2, 1)]


def test_the_most_urgent_sum_is_made_and_leaves_first() -> None:
    machine = make()
    assert handle_all(machine, [push(w, 2) for w in (0, 1)]) == [UpdateSlice(2, 1, (0, 1))]
    machine.handle(SliceUpdated())  # under way from now on
    assert handle_all(machine, [push(w, 0) for w in (0, 1)]) == [UpdateSlice(0, 1, (0, 1))]
    machine.handle(MessageReady(SERVER, Kind.STATE, 1, 5, 0, 77))  # less urgent, but came first
    assert machine.handle(SliceUpdated()) == []
    assert machine.handle(FrameSent(SERVER)) == [frame(Kind.PUSH, SERVER, 0)]
    assert machine.handle(FrameSent(SERVER)) == [SendFrame(SERVER, Kind.STATE, 1, 0, 5, 0, 77)]


def test_only_those_with_a_gradient_are_summed() -> None:
    machine = make()
    machine.handle(push(0, 0, flags=Flag.NO_GRADIENT))
    assert machine.handle(push(1, 0)) == [UpdateSlice(0, 1, (1,))]
    assert machine.handle(SliceUpdated()) == [frame(Kind.PUSH, SERVER, 0)]


def test_a_node_without_a_gradient_says_so() -> None:
    machine = make()
    events = [push(worker, 0, flags=Flag.NO_GRADIENT) for worker in (0, 1)]
    assert handle_all(machine, events) == [UpdateSlice(0, 1, ())]
    told = frame(Kind.PUSH, SERVER, 0, flags=Flag.NO_GRADIENT)
    assert machine.handle(SliceUpdated()) == [told]
    unchanged = machine.handle(answer(0, flags=Flag.UNCHANGED))
    assert unchanged == [frame(Kind.REPLY, w, 0, flags=Flag.UNCHANGED) for w in (0, 1)]


def test_rank_zero_s_values_start_its_own_node_and_go_on_to_the_server() -> None:
    machine = make(node=0)
    first = machine.handle(ValueArrived(0, 0, 0, 0))
    assert first == [
        InstallValue(0),
        frame(Kind.REPLY, 1, 0, step=0),
        frame(Kind.VALUE, SERVER, 0, step=0),
    ]
    assert not machine.closing.awaits(0, 0)  # here, they do not come from the server


def test_on_another_node_they_come_from_the_server_for_all() -> None:
    machine = make()
    assert machine.closing.awaits(0, 0)
    assert machine.handle(answer(0, step=0)) == [
        InstallValue(0),
        frame(Kind.REPLY, 0, 0, step=0),
        frame(Kind.REPLY, 1, 0, step=0),
    ]
    assert not machine.closing.awaits(0, 0)
    with pytest.raises(RemoteProtocolError, match="slice 0, step 0, which is not awaited"):
        machine.handle(answer(0, step=0))


def test_values_changed_by_hand_go_before_the_push_whatever_its_priority() -> None:
    machine = make(node=0)
    assert machine.handle(ValueArrived(0, 0, 1, 7)) == []
    changed = Flag.VALUE_CHANGED
    machine.handle(PushArrived(0, 0, 1, 7, changed))
    machine.handle(PushArrived(1, 0, 1, 3, changed))
    value = SendFrame(SERVER, Kind.VALUE, 1, 0, 3, 0, NO_TOKEN)
    pushed = SendFrame(SERVER, Kind.PUSH, 1, 0, 3, changed, NO_TOKEN)
    assert machine.handle(SliceUpdated()) == [value]
    assert machine.handle(FrameSent(SERVER)) == [pushed]


def test_a_change_on_one_worker_of_the_node_ends_the_session() -> None:
    machine = make()
    machine.handle(push(0, 0, flags=Flag.VALUE_CHANGED))
    (failure,) = machine.handle(push(1, 0))
    assert isinstance(failure, FailSession)
    assert "on ranks [2] but not on ranks [3]" in failure.reason


def test_only_rank_zero_may_send_values() -> None:
    with pytest.raises(RemoteProtocolError, match="rank 2 sent parameter values"):
        make().handle(ValueArrived(0, 0, 0, 0))


@pytest.mark.parametrize("first", [0, 1])
def test_notify_the_first_pull_is_passed_on_and_its_answer_copied(first: int) -> None:
    machine = make("notify")
    pushed_on(machine, 0)
    assert machine.handle(NotifyArrived(0, 1, SERVER, 0)) == [
        frame(Kind.NOTIFY, 0, 0),
        frame(Kind.NOTIFY, 1, 0),
    ]
    handle_all(machine, [FrameSent(0), FrameSent(1)])
    assert not machine.closing.awaits(0, 1)
    assert machine.handle(PullArrived(first, 0, 1, 0)) == [frame(Kind.PULL, SERVER, 0)]
    assert machine.closing.awaits(0, 1)
    assert machine.handle(answer(0)) == [frame(Kind.REPLY, first, 0)]
    other = 1 - first
    assert machine.handle(PullArrived(other, 0, 1, 0)) == [frame(Kind.REPLY, other, 0)]


def test_notify_that_nothing_has_changed_needs_no_pull() -> None:
    machine = make("notify")
    pushed_on(machine, 0)
    notices = machine.handle(NotifyArrived(0, 1, SERVER, Flag.UNCHANGED))
    assert notices == [frame(Kind.NOTIFY, w, 0, flags=Flag.UNCHANGED) for w in (0, 1)]
    assert machine.closing.awaited() == []


def test_pull_waits_for_the_node_s_push() -> None:
    machine = make("pull")
    machine.handle(push(0, 0))
    assert machine.handle(PullArrived(0, 0, 1, 0)) == []  # worker 1 has not pushed
    assert machine.handle(push(1, 0)) == [UpdateSlice(0, 1, (0, 1))]
    assert machine.handle(SliceUpdated()) == [frame(Kind.PUSH, SERVER, 0)]
    assert machine.handle(FrameSent(SERVER)) == [frame(Kind.PULL, SERVER, 0)]
    assert machine.handle(PullArrived(1, 0, 1, 0)) == []  # asked for already
    assert machine.handle(answer(0)) == [frame(Kind.REPLY, 0, 0), frame(Kind.REPLY, 1, 0)]


def test_it_leaves_when_all_workers_have_and_all_is_passed_on() -> None:
    machine = make()
    handle_all(machine, [push(0, 0), push(1, 0)])
    assert machine.handle(PeerLeft(0)) == []
    assert machine.handle(PeerLeft(1)) == []  # the sum is under way
    assert machine.handle(SliceUpdated()) == [frame(Kind.PUSH, SERVER, 0)]
    assert machine.handle(FrameSent(SERVER)) == [Finish()]


def test_a_worker_that_leaves_while_another_needs_it_is_named() -> None:
    machine = make()
    machine.handle(push(0, 0))
    (failure,) = machine.handle(PeerLeft(1))
    assert isinstance(failure, FailSession)
    assert failure.reason.startswith("rank 3 has left the session, but ranks [2] are at step 1")


WRONG = {
    "a reply for what nobody has pushed": ("broadcast", [], answer(0)),
    "a reply for another step": ("broadcast", [0], answer(0, step=2)),
    "a reply for another server's slice": ("broadcast", [], ReplyArrived(1, 0, SERVER, 0, 0)),
    "a reply that nobody has pulled": ("pull", [0], answer(0)),
    "a notice where replies are broadcast": ("broadcast", [0], NotifyArrived(0, 1, SERVER, 0)),
    "a notice for another step": ("notify", [0], NotifyArrived(0, 2, SERVER, 0)),
    "a pull before the notice": ("notify", [0], PullArrived(0, 0, 1, 0)),
    "a pull where replies are broadcast": ("broadcast", [0], PullArrived(0, 0, 1, 0)),
    "a push of another server's slice": ("broadcast", [], PushArrived(0, 1, 1, 0, 0)),
    "a push twice": ("broadcast", [0], push(0, 0)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_breaks_the_rules_is_refused(name: str) -> None:
    reply, slices, event = WRONG[name]
    machine = make(reply)  # type: ignore[arg-type]
    for slice_ in slices:
        pushed_on(machine, slice_)
    with pytest.raises(RemoteProtocolError):
        machine.handle(event)


def test_a_second_notice_is_refused() -> None:
    machine = make("notify")
    pushed_on(machine, 0)
    machine.handle(NotifyArrived(0, 1, SERVER, 0))
    with pytest.raises(RemoteProtocolError, match="announced slice 0 of step 1"):
        machine.handle(NotifyArrived(0, 1, SERVER, 0))


@pytest.mark.parametrize("event", [SliceUpdated(), object()])
def test_what_cannot_happen_is_an_internal_error(event: object) -> None:
    with pytest.raises(InternalError):
        make().handle(event)
