"""A queue is a stable sorted list, the lanes one for each peer; and their ancestors' traps."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.core.frames import Closing, Finish, FrameSent, GradientReady, SendFrame
from foreprop.core.sendqueue import (
    AT_LEAST,
    AT_ONCE,
    Order,
    SendLanes,
    SendQueue,
    Turns,
    turns_of,
)
from foreprop.core.slicing import Slice
from foreprop.core.wire import Kind
from foreprop.core.worker_machine import WorkerMachine

PUSHES = st.tuples(st.integers(0, 3), st.integers(-1, 4))
ACTIONS = st.lists(st.one_of(PUSHES, st.just("pop")), max_size=60)
PEERS = st.integers(0, 11)
LANE_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), PEERS, st.integers(0, 3), st.integers(-1, 4)),
        st.tuples(st.just("sent"), PEERS, st.just(0), st.just(0)),
        st.just(("depart", 0, 0, 0)),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS, st.sampled_from(["priority", "fifo"]))
def test_the_queue_equals_a_stable_sorted_list(
    actions: list[tuple[int, int] | str], order: Order
) -> None:
    queue: SendQueue[int] = SendQueue(order)
    model: list[tuple[tuple[int, int], int]] = []
    for number, action in enumerate(actions):
        if action == "pop":
            if not model:
                with pytest.raises(IndexError):
                    queue.pop()
                continue
            assert queue.pop() == model.pop(0)[1]
        else:
            step, priority = action  # type: ignore[misc]
            queue.push(step, priority, number)
            model.append(((0, 0) if order == "fifo" else (step, priority), number))
            model.sort(key=lambda entry: entry[0])  # Python's sort is stable
        assert len(queue) == len(model)
        assert queue.items() == [item for _, item in model]


@settings(max_examples=300, deadline=None)
@given(
    LANE_ACTIONS,
    st.sampled_from(["priority", "fifo"]),
    st.integers(0, 12),
    st.sampled_from([0, 1, 5, 8]),
    st.integers(1, 3),
)
def test_the_lanes_equal_a_stable_sorted_list_for_each_peer(
    actions: list[tuple[str, int, int, int]], order: Order, first: int, at_least: int, every: int
) -> None:
    def may_leave(item: tuple[int, int], is_short: bool) -> bool:
        return item[1] % every == 0 or (is_short and item[1] % 2 == 0)

    turns = Turns(first, at_once=8, at_least=at_least)
    lanes: SendLanes[tuple[int, int]] = SendLanes(order, may_leave, turns=turns)
    model: dict[int, list[tuple[tuple[int, int], tuple[int, int]]]] = {}
    under_way: set[int] = set()
    at_once = 8 if order == "priority" else 12

    def expected(peers: list[int]) -> list[tuple[int, int]]:
        """The heads that may leave; none may while another item is under way to its peer."""
        leaving = [peer for peer in peers if model.get(peer) and peer not in under_way]
        if order == "priority":
            leaving.sort(key=lambda peer: (model[peer][0][0], peer < first, peer))
        items = []
        for peer in leaving:
            may = may_leave(model[peer][0][1], len(under_way) < at_least)
            if may and len(under_way) < at_once:
                under_way.add(peer)
                items.append(model[peer].pop(0)[1])
        return items

    for number, (action, peer, step, priority) in enumerate(actions):
        if action == "push":
            lanes.push(peer, step, priority, (peer, number))
            queue = model.setdefault(peer, [])
            queue.append(((0, 0) if order == "fifo" else (step, priority), (peer, number)))
            queue.sort(key=lambda entry: entry[0])  # Python's sort is stable
        elif action == "sent":
            others_waited = len(under_way) == at_once
            under_way.discard(peer)
            others_may = others_waited or len(under_way) < at_least
            assert lanes.sent(peer) == expected(list(model) if others_may else [peer])
        else:
            assert lanes.depart() == expected(list(model))
            assert lanes.depart() == []
        queued = [item for queue in model.values() for _, item in queue]
        assert len(lanes) == len(queued)
        assert lanes.items() == queued
        assert lanes.idle == (not queued and not under_way)


def test_few_lanes_do_not_wait_for_each_other() -> None:
    lanes: SendLanes[str] = SendLanes()
    for peer, item in [(0, "a"), (0, "b"), (1, "c"), (1, "d")]:
        lanes.push(peer, 1, 0, item)
    assert lanes.depart() == ["a", "c"]  # peer 0 never takes its own
    assert [lanes.sent(1), lanes.sent(1), lanes.depart()] == [["d"], [], []]
    lanes.push(1, 1, 9, "e")
    assert lanes.depart() == ["e"]
    assert lanes.items() == ["b"]


def test_many_lanes_take_turns_the_most_urgent_first() -> None:
    lanes: SendLanes[int] = SendLanes()
    for peer in range(AT_ONCE + 2):
        lanes.push(peer, 1, 0, peer)
    assert lanes.depart() == list(range(AT_ONCE))
    lanes.push(0, 1, 0, 100)
    lanes.push(AT_ONCE + 1, 1, -1, 101)
    assert lanes.depart() == []
    assert lanes.sent(0) == [101]  # not its own, which is less urgent
    assert lanes.sent(AT_ONCE + 1) == [100]
    assert lanes.sent(1) == [AT_ONCE]


def test_one_lane_is_p3s_consumer() -> None:
    """It blocks until a slice is taken, whoever it is for; then the most urgent one is next."""
    lanes: SendLanes[str] = SendLanes(turns=turns_of("one", 0, 3))
    for peer, priority in ((1, 5), (2, 4), (0, 3), (1, 6)):
        lanes.push(peer, 1, priority, f"{priority} to {peer}")
    assert lanes.depart() == ["3 to 0"]
    assert lanes.depart() == []
    lanes.push(2, 1, 0, "0 to 2")
    assert lanes.depart() == []  # blocked, although peer 2 is idle
    assert lanes.sent(0) == ["0 to 2"]
    assert lanes.sent(2) == ["4 to 2"]
    assert lanes.sent(2) == ["5 to 1"]
    assert lanes.sent(1) == ["6 to 1"]
    assert lanes.sent(1) == []
    assert lanes.idle
    for peer in (2, 0, 1, 0):  # equally urgent slices go in the order in which they came
        lanes.push(peer, 2, 1, f"to {peer}")
    left = lanes.depart()
    while more := lanes.sent(int(left[-1][-1])):
        left += more
    assert left == ["to 2", "to 0", "to 1", "to 0"]
    assert turns_of("peers", 0, 3) == Turns.after(0, 3)


def test_what_may_leave_is_asked_anew_when_too_few_are_under_way() -> None:
    def may_leave(item: str, is_short: bool) -> bool:
        return item.isupper() or (is_short and item != "e")

    lanes: SendLanes[str] = SendLanes(may_leave=may_leave, turns=Turns(at_least=2))
    for peer, item in enumerate("abCde"):
        lanes.push(peer, 1, peer, item)
    assert lanes.depart() == ["a", "b", "C"]
    assert lanes.sent(2) == []  # two are still under way
    assert [lanes.sent(0), lanes.sent(1), lanes.items()] == [["d"], [], ["e"]]


def test_only_where_peers_take_turns_some_are_always_under_way() -> None:
    assert Turns.after(3, AT_ONCE) == Turns(4, AT_ONCE, 0)
    assert Turns.after(3, AT_ONCE + 1) == Turns(4, AT_ONCE, AT_LEAST)


def test_every_process_begins_with_another_peer() -> None:
    """Equally urgent items would otherwise all go to the same peer at once."""
    for first in range(4):
        lanes: SendLanes[int] = SendLanes(turns=Turns(first))
        for peer in range(4):
            lanes.push(peer, 1, 0, peer)
        assert lanes.depart() == [(first + peer) % 4 for peer in range(4)]


def test_in_fifo_order_all_peers_are_sent_to_at_once() -> None:
    lanes: SendLanes[int] = SendLanes("fifo", turns=Turns(3))
    peers = list(range(2 * AT_ONCE))
    for peer in peers:
        lanes.push(peer, 1, -peer, peer)
    assert lanes.depart() == peers


def test_fifo_ignores_steps_and_priorities() -> None:
    queue: SendQueue[str] = SendQueue("fifo")
    for step, priority, item in [(9, 9, "a"), (0, -1, "b"), (1, 0, "c")]:
        queue.push(step, priority, item)
    assert [queue.pop() for _ in range(3)] == ["a", "b", "c"]


def test_items_are_never_compared() -> None:
    queue: SendQueue[object] = SendQueue()
    items = [object() for _ in range(10)]
    for item in items:
        queue.push(1, 1, item)
    assert queue.items() == items
    assert [queue.pop() for _ in items] == items


@dataclass
class _PsLiteKey:
    """ps-lite's comparator: ``<=`` where a strict order is needed."""

    priority: int
    name: int

    def __lt__(self, other: _PsLiteKey) -> bool:
        return self.priority <= other.priority


def test_ps_lites_comparator_shuffles_equals_and_ours_does_not() -> None:
    heap: list[_PsLiteKey] = []
    queue: SendQueue[int] = SendQueue()
    for name in range(20):
        heapq.heappush(heap, _PsLiteKey(0, name))
        queue.push(0, 0, name)
    assert [heapq.heappop(heap).name for _ in range(20)] != list(range(20))  # the trap is there
    assert [queue.pop() for _ in range(20)] == list(range(20))


def test_ps_lites_stop_message_overtakes_and_our_shutdown_does_not() -> None:
    """There, stopping is a message of priority 0 in the data queue; here it is a state."""
    queue: SendQueue[str] = SendQueue()
    queue.push(1, 5, "gradient")
    queue.push(1, 0, "stop")
    assert queue.pop() == "stop"  # the trap: a queued gradient is lost behind it

    slices = [Slice(i, i, 0, 1, 0) for i in range(3)]
    machine = WorkerMachine(slices, parameters=3, order="priority", reply="broadcast")
    sent = machine.handle(GradientReady(2, 1)) + machine.handle(GradientReady(1, 1))
    sent += machine.handle(Closing())
    while (last := machine.handle(FrameSent(0))) != [Finish()]:
        sent += last
    assert [f.slice for f in sent if isinstance(f, SendFrame) and f.kind == Kind.PUSH] == [2, 1]


def test_byteps_lets_a_small_task_pass_a_large_urgent_one_and_this_queue_does_not() -> None:
    """There, what does not fit the credit is skipped. Here only the head can ever leave."""
    queue: SendQueue[tuple[str, int]] = SendQueue()
    queue.push(1, 3, ("small, late", 10))
    queue.push(1, 0, ("large, urgent", 10**9))
    assert queue.pop() == ("large, urgent", 10**9)
    for kind in (SendQueue, SendLanes):
        assert not {"remove", "peek", "pop_if", "requeue"} & set(dir(kind))
