"""The limit of uneven nodes, steps and links beside every schedule of a few slices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.plan import limit
from foreprop.plan.profile import Layer
from foreprop_lab.setting import criticalpath
from foreprop_lab.setting.criticalpath import LinkTimes, earliest_end_s, passage_of, plan_passage
from foreprop_lab.setting.links import CrossTraffic, LinkRate, Network
from foreprop_lab.setting.unevenness import Draw, Unevenness
from tests.tiers import long_cases

BYTE_S = 1.0
"""At a rate of 8 bit/s."""


@dataclass(frozen=True)
class Slice:
    layer: int
    owner: int
    size_bytes: int


@dataclass(frozen=True)
class Message:
    slice: int
    sender: int
    receiver: int
    is_reply: bool


@dataclass(frozen=True)
class Case:
    """One training: times by step, rank, layer and pass; rates by node, of 8 bit/s."""

    slices: tuple[Slice, ...]
    times: tuple[tuple[tuple[tuple[float, float], ...], ...], ...]
    factors: tuple[float, ...]

    @property
    def nodes(self) -> int:
        return len(self.factors)

    @property
    def layers(self) -> int:
        return len(self.times[0][0])

    def messages(self, sender: int) -> list[Message]:
        """All that it sends in a step."""
        sent = []
        for number, piece in enumerate(self.slices):
            if piece.owner != sender:
                sent.append(Message(number, sender, piece.owner, is_reply=False))
                continue
            others = [node for node in range(self.nodes) if node != sender]
            sent += [Message(number, sender, node, is_reply=True) for node in others]
        return sent

    def limit_s(self) -> float:
        """Of all steps together."""
        placed = np.zeros((self.nodes, self.layers))
        for piece in self.slices:
            placed[piece.owner, piece.layer] += piece.size_bytes
        rates = tuple(LinkRate(node=n, factor=factor) for n, factor in enumerate(self.factors))
        network = Network(nodes=self.nodes, rate_bits_per_s=8 / BYTE_S, link_rates=rates)
        draw: Draw = lambda step: np.array(self.times[step - 1])  # noqa: E731
        passage = passage_of(placed.cumsum(axis=1))
        return earliest_end_s(draw, passage, LinkTimes(network), steps=len(self.times))

    def schedules(self) -> Iterator[tuple[tuple[Message, ...], ...]]:
        """Every order in which each node may send its messages."""
        return itertools.product(
            *(itertools.permutations(self.messages(node)) for node in range(self.nodes))
        )

    def best_s(self) -> float:
        return min(self.ends_s(orders) for orders in self.schedules())

    def ends_s(self, orders: Sequence[Sequence[Message]]) -> float:
        """When the last rank has ended; infinite if the nodes wait for each other for ever."""
        ends = [0.0] * self.nodes
        wires = _Wires(self)
        for times in self.times:
            ready = [_backward(ends[rank], times[rank]) for rank in range(self.nodes)]
            there = wires.carry(ready, orders)
            if there is None:
                return math.inf
            ends = [self._forward(rank, times[rank], ready, there) for rank in range(self.nodes)]
        return max(ends)

    def _forward(
        self,
        rank: int,
        times: Sequence[tuple[float, float]],
        ready: Sequence[Sequence[float]],
        there: dict[tuple[int, int], float],
    ) -> float:
        now = ready[rank][0]
        for layer, (forward_s, _) in enumerate(times):
            needed = [number for number, s in enumerate(self.slices) if s.layer == layer]
            now = max([now, *(there[number, rank] for number in needed)]) + forward_s
        return now


def _backward(began: float, times: Sequence[tuple[float, float]]) -> list[float]:
    """When each layer has its gradient."""
    ready, now = [0.0] * len(times), began
    for layer in reversed(range(len(times))):
        now += times[layer][1]
        ready[layer] = now
    return ready


class _Wires:
    """Links that begin to pass on what they still receive, so that none waits for another one."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._up_free = [0.0] * case.nodes
        self._down_free = [0.0] * case.nodes

    def carry(
        self, ready: Sequence[Sequence[float]], orders: Sequence[Sequence[Message]]
    ) -> dict[tuple[int, int], float] | None:
        """When each slice's new value is on each node; None if it never is."""
        case = self._case
        pushed = {
            (number, piece.owner): ready[piece.owner][piece.layer]
            for number, piece in enumerate(case.slices)
        }
        there: dict[tuple[int, int], float] = {}
        waiting = [list(order) for order in orders]
        while any(waiting):
            self._update(pushed, there)
            known = [
                (max(self._up_free[m.sender], released), m)
                for m in (queue[0] for queue in waiting if queue)
                if (released := self._released(m, ready, there)) is not None
            ]
            if not known:
                return None
            starts, message = min(known, key=lambda each: (each[0], each[1].sender))
            arrived = self._send(message, starts)
            waiting[message.sender].pop(0)
            if message.is_reply:
                there[message.slice, message.receiver] = arrived
            else:
                pushed[message.slice, message.sender] = arrived
        self._update(pushed, there)
        return there

    def _update(
        self, pushed: dict[tuple[int, int], float], there: dict[tuple[int, int], float]
    ) -> None:
        """A server has a new value when it has all gradients."""
        nodes = range(self._case.nodes)
        for number, piece in enumerate(self._case.slices):
            if all((number, node) in pushed for node in nodes):
                there[number, piece.owner] = max(pushed[number, node] for node in nodes)

    def _released(
        self,
        message: Message,
        ready: Sequence[Sequence[float]],
        there: dict[tuple[int, int], float],
    ) -> float | None:
        if message.is_reply:
            return there.get((message.slice, message.sender))
        return ready[message.sender][self._case.slices[message.slice].layer]

    def _send(self, message: Message, starts: float) -> float:
        size_s = self._case.slices[message.slice].size_bytes * BYTE_S
        sent = starts + size_s / self._case.factors[message.sender]
        begins = max(starts, self._down_free[message.receiver])
        received = begins + size_s / self._case.factors[message.receiver]
        self._up_free[message.sender] = sent
        self._down_free[message.receiver] = received
        return max(sent, received)


def alike(nodes: int, layers: int, *, steps: int = 1, slowed: float = 1.0) -> tuple:  # type: ignore[type-arg]
    """Layers of 1 s forward and 2 s backward; the last node's take ``slowed`` times as long."""
    factors = [1.0] * (nodes - 1) + [slowed]
    return (tuple(((factor, 2 * factor),) * layers for factor in factors),) * steps


ONE_EACH = (Slice(0, 0, 2), Slice(0, 1, 2))
TWO_LAYERS = (Slice(0, 0, 1), Slice(0, 1, 1), Slice(1, 0, 3), Slice(1, 1, 3))
THREE_NODES = (Slice(0, 0, 1), Slice(0, 1, 1), Slice(0, 2, 1))


@pytest.mark.parametrize(
    ("case", "expected_s"),
    [
        # 3 s of compute, and between them a push and a reply of 2 s over each link
        (Case(ONE_EACH, alike(2, 1), (1.0, 1.0)), 7.0),
        # a link of half the rate takes 8 s for both
        (Case(ONE_EACH, alike(2, 1), (1.0, 0.5)), 11.0),
        # all of 8 s on the wire come between the last layer's gradient and its use
        (Case(TWO_LAYERS, alike(2, 2), (1.0, 1.0)), 11.0),
        pytest.param(
            Case(TWO_LAYERS, alike(2, 2, steps=2), (1.0, 1.0)), 22.0, marks=pytest.mark.long
        ),
        (Case(THREE_NODES, alike(3, 1), (1.0, 1.0, 1.0)), 7.0),
        # pushes and replies of 2 s each over the slow node's own link of half the rate
        pytest.param(
            Case(THREE_NODES, alike(3, 1, slowed=3.0), (1.0, 1.0, 0.5)),
            15.0,
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_best_schedule_reaches_the_limit(case: Case, expected_s: float) -> None:
    assert case.limit_s() == pytest.approx(expected_s)
    assert case.best_s() == pytest.approx(expected_s)


durations = st.integers(0, 4).map(float)
sizes = st.integers(1, 3)
rates = st.sampled_from([0.5, 1.0, 1.0, 2.0])


@st.composite
def cases(draw: st.DrawFn, nodes: int, slices: int, *, steps: int = 1) -> Case:
    layers = draw(st.integers(1, 3))
    pieces = tuple(
        Slice(draw(st.integers(0, layers - 1)), draw(st.integers(0, nodes - 1)), draw(sizes))
        for _ in range(slices)
    )
    times = tuple(
        tuple(
            tuple((draw(durations), draw(durations)) for _ in range(layers)) for _ in range(nodes)
        )
        for _ in range(steps)
    )
    return Case(pieces, times, tuple(draw(rates) for _ in range(nodes)))


@settings(max_examples=30, deadline=None)
@given(cases(2, 3, steps=2))
def test_no_schedule_of_two_nodes_beats_the_limit(case: Case) -> None:
    assert case.best_s() >= case.limit_s() - 1e-9


@settings(max_examples=20, deadline=None)
@given(cases(3, 2))
def test_no_schedule_of_three_nodes_beats_the_limit(case: Case) -> None:
    assert case.best_s() >= case.limit_s() - 1e-9


@settings(max_examples=15, deadline=None)
@given(cases(3, 4, steps=3), st.randoms(use_true_random=False))
def test_no_order_of_more_slices_and_steps_beats_the_limit(case: Case, chance) -> None:  # type: ignore[no-untyped-def]
    for _ in range(8):
        orders = [chance.sample(sent, len(sent)) for sent in map(case.messages, range(case.nodes))]
        assert case.ends_s(orders) >= case.limit_s() - 1e-9


@pytest.mark.parametrize("slowed", [2.0, *long_cases(1.5, 4.0)])
@pytest.mark.parametrize("nodes", [3, *long_cases(2)])
def test_small_slices_reach_the_limit_of_a_slow_node(nodes: int, slowed: float) -> None:
    """It pushes all that others own, and sends its own values after that."""
    count = 40 * nodes
    slices = tuple(Slice(0, number % nodes, 1) for number in range(count))
    times = (tuple(((20.0 * factor, 40.0 * factor),) for factor in [1.0] * (nodes - 1) + [slowed]),)
    case = Case(slices, times, (1.0,) * nodes)
    orders = [sorted(case.messages(node), key=lambda m: m.is_reply) for node in range(nodes)]
    one_way_s = 40 * (nodes - 1)
    expected = 40 * slowed + max(2 * one_way_s + 20, one_way_s + 20 * slowed)
    assert case.limit_s() == pytest.approx(expected)
    assert case.limit_s() <= case.ends_s(orders) < 1.05 * case.limit_s()


LAYERS = [
    Layer(name="first", sizes_elems=(3_000, 400), forward_s=0.1, backward_s=0.2),
    Layer(name="second", sizes_elems=(), forward_s=0.3, backward_s=0.1),
    Layer(name="third", sizes_elems=(90_000,), forward_s=0.2, backward_s=0.4),
]


@pytest.mark.parametrize("nodes", [2, 4, 7])
@pytest.mark.parametrize("rate", [1e6, 1e7, 1e9])
def test_where_nothing_differs_it_is_the_other_limit(nodes: int, rate: float) -> None:
    network = Network(nodes=nodes, rate_bits_per_s=rate)
    draw = Unevenness().draw(LAYERS, range(nodes), nodes=nodes)
    passage = plan_passage(LAYERS, nodes=nodes, slice_elems=1_000)
    expected = limit.limit_s(LAYERS, nodes=nodes, rate_bits_per_s=rate)
    found = criticalpath.limit_s(draw, passage, network, steps=3)
    assert found == pytest.approx(expected, rel=5e-3)
    assert found <= expected * (1 + 1e-9)


def test_servers_with_fewer_slices_send_less() -> None:
    passage = plan_passage(LAYERS[:1], nodes=4, slice_elems=1_000)
    even = 3_400 / 4
    assert passage.replied[:, 0] / limit.HEADER_FACTOR == pytest.approx(
        [3 * 4 * elems for elems in (even, even, even, 400)]
    )
    assert passage.pushed[:, 0] / limit.HEADER_FACTOR == pytest.approx(
        [4 * (3_400 - elems) for elems in (1_000, 1_000, 1_000, even)]
    )
    assert passage.all_sent[0] == pytest.approx(limit.HEADER_FACTOR * 2 * 3 * 4 * 3_400)


def test_the_slowest_node_s_compute_decides_where_links_are_fast() -> None:
    uneven = Unevenness(step_jitter=0.4, jitter=0.2, slow_nodes=1, slowdown=0.3)
    draw = uneven.draw(LAYERS, range(6), nodes=3, workers_per_node=2)
    network = Network(nodes=3, rate_bits_per_s=1e18)
    passage = plan_passage(LAYERS, nodes=3, slice_elems=1_000)
    found = criticalpath.limit_s(draw, passage, network, steps=5, workers_per_node=2)
    ends, waits = np.zeros(6), 0.0
    for step in range(1, 6):
        forward_s, backward_s = draw(step).sum(axis=1).T
        waits = (ends + backward_s).max()  # the first layer's gradients come last
        ends = waits + forward_s
    assert found == pytest.approx(ends.max() / 5)


def test_what_another_job_leaves_of_a_link_decides_in_the_long_run() -> None:
    traffic = CrossTraffic(node=1, share=0.5, period_s=10.0, duty=0.5)
    network = Network(nodes=2, rate_bits_per_s=1e6, cross_traffic=(traffic,))
    draw = Unevenness().draw(LAYERS, range(2), nodes=2)
    passage = plan_passage(LAYERS, nodes=2, slice_elems=1_000)
    found = criticalpath.limit_s(draw, passage, network, steps=4)
    on_wire_bits = 8 * limit.HEADER_FACTOR * limit.model_bytes(LAYERS)
    alone_s = limit.limit_s(LAYERS, nodes=2, rate_bits_per_s=1e6)
    assert found == pytest.approx(max(on_wire_bits / 0.75e6, alone_s))
    always = Network(nodes=2, rate_bits_per_s=1e6, cross_traffic=(CrossTraffic(node=1, share=0.5),))
    slower = criticalpath.limit_s(draw, passage, always, steps=4)
    assert slower == pytest.approx(limit.limit_s(LAYERS, nodes=2, rate_bits_per_s=0.5e6))
