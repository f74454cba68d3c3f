"""The ring's state machine: one order on all ranks, whatever happens when."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.core.frames import (
    Closing,
    CompleteParameter,
    Finish,
    GradientReady,
    NormArrived,
    PrioritiesLearned,
)
from foreprop.core.norm import SendNormPart, SquareSum
from foreprop.errors import InternalError, LocalProtocolError, RemoteProtocolError
from foreprop.features.collectives.order import cut_chunks
from foreprop.features.collectives.ring_machine import (
    ChunkReduced,
    MeasureParameter,
    OrderLearned,
    ParameterMeasured,
    ParameterUpdated,
    ReduceChunk,
    RingMachine,
    UpdateParameter,
    UseNorm,
)

ONE = SquareSum(0, (0, 0, 1))


def machine(
    sizes: list[int],
    *,
    chunk_elems: int = 1,
    shared: bool = False,
    in_flight: int = 4,
    needs_norm: bool = False,
    shares_norm: bool = False,
) -> RingMachine:
    return RingMachine(
        cut_chunks(sizes, chunk_elems, kinds=[0] * len(sizes) if shared else None),
        parameters=len(sizes),
        in_flight=in_flight,
        in_flight_elems=in_flight * chunk_elems,
        needs_norm=needs_norm,
        shares_norm=shares_norm,
    )


def test_issues_in_order_and_holds_back_what_is_ready_too_early() -> None:
    ring = machine([1, 1])
    assert ring.handle(GradientReady(0, 1)) == []
    assert ring.queue_depth == 1
    assert ring.next_chunk == (1, 1)
    assert ring.handle(GradientReady(1, 1)) == [ReduceChunk(1, 1), ReduceChunk(0, 1)]
    assert ring.queue_depth == 0
    assert ring.under_way == (0, 1)
    for chunk in (0, 1):
        ring.handle(ChunkReduced(chunk))
    assert ring.under_way is None


def test_parameters_that_share_a_chunk_wait_for_each_other() -> None:
    ring = machine([1, 1, 1], chunk_elems=12, shared=True)
    assert ring.handle(GradientReady(0, 1)) == []
    assert ring.queue_depth == 0
    assert ring.next_chunk == (1, 1)  # what is missing
    assert ring.handle(GradientReady(2, 1)) == []
    assert ring.handle(GradientReady(1, 1)) == [ReduceChunk(0, 1)]
    updates = [UpdateParameter(0, 1), UpdateParameter(1, 1), UpdateParameter(2, 1)]
    assert ring.handle(ChunkReduced(0)) == updates


def test_keeps_at_most_its_collectives_in_flight() -> None:
    ring = machine([3], in_flight=2)
    assert ring.handle(GradientReady(0, 1)) == [ReduceChunk(0, 1), ReduceChunk(1, 1)]
    assert ring.handle(ChunkReduced(1)) == [ReduceChunk(2, 1)]
    assert ring.handle(ChunkReduced(0)) == []
    assert ring.handle(ChunkReduced(2)) == [UpdateParameter(0, 1)]


def test_keeps_at_most_its_elements_in_flight() -> None:
    chunks = cut_chunks([2, 2, 1, 1, 9], 9)
    ring = RingMachine(chunks, parameters=5, in_flight=3, in_flight_elems=4)
    ring.handle(OrderLearned((0, 1, 2, 3, 4), 1))
    for parameter in (4, 3, 2, 1):
        assert ring.handle(GradientReady(parameter, 1)) == []
    assert ring.handle(GradientReady(0, 1)) == [ReduceChunk(0, 1), ReduceChunk(1, 1)]
    assert ring.handle(ChunkReduced(0))[:2] == [ReduceChunk(2, 1), ReduceChunk(3, 1)]
    assert ring.handle(ChunkReduced(1)) == [UpdateParameter(1, 1)]
    assert ring.handle(ChunkReduced(2)) == [UpdateParameter(2, 1)]
    assert ring.handle(ChunkReduced(3))[:1] == [ReduceChunk(4, 1)]  # one may always go


def test_a_parameter_is_complete_when_it_is_updated() -> None:
    ring = machine([1])
    assert ring.is_complete(0)
    ring.handle(GradientReady(0, 1))
    ring.handle(ChunkReduced(0))
    assert not ring.is_complete(0)
    assert ring.handle(ParameterUpdated(0)) == [CompleteParameter(0, 1)]
    assert ring.is_complete(0)
    assert ring.step_of(0) == 1


def test_an_empty_parameter_is_complete_at_once() -> None:
    ring = machine([0, 1])
    assert ring.handle(GradientReady(0, 1)) == [CompleteParameter(0, 1)]
    assert ring.is_complete(0)
    assert ring.handle(GradientReady(1, 1)) == [ReduceChunk(0, 1)]


def test_the_next_step_may_begin_while_parts_of_this_one_are_under_way() -> None:
    ring = machine([1, 1])
    ring.handle(GradientReady(1, 1))
    ring.handle(GradientReady(0, 1))
    ring.handle(ChunkReduced(1))
    ring.handle(ParameterUpdated(1))
    assert ring.handle(GradientReady(1, 2)) == [ReduceChunk(1, 2)]
    assert ring.next_chunk == (0, 2)


def test_a_new_order_counts_from_its_step() -> None:
    ring = machine([1, 1])
    ring.handle(GradientReady(1, 1))
    ring.handle(OrderLearned((0, 1), 2))
    assert ring.next_chunk == (0, 1)
    ring.handle(GradientReady(0, 1))
    for parameter in (1, 0):
        ring.handle(ChunkReduced(parameter))
        ring.handle(ParameterUpdated(parameter))
    assert ring.next_chunk == (0, 2)


def test_a_new_order_for_the_coming_step_counts_at_once() -> None:
    ring = machine([1, 1])
    ring.handle(OrderLearned((0, 1), 1))
    assert ring.next_chunk == (0, 1)


def test_updates_wait_for_the_norm_of_all_parameters_and_go_by_priority() -> None:
    ring = machine([1, 0, 1], needs_norm=True)
    ring.handle(PrioritiesLearned((2, 1, 0)))
    for parameter in (2, 1, 0):
        ring.handle(GradientReady(parameter, 1))
    assert ring.handle(ChunkReduced(0)) == [MeasureParameter(0, 1)]
    assert ring.handle(ParameterMeasured(0, ONE)) == []
    assert ring.handle(ChunkReduced(1)) == [MeasureParameter(2, 1)]
    assert ring.handle(ParameterMeasured(2, ONE)) == [
        UseNorm(1, SquareSum(0, (0, 0, 2)).norm),
        UpdateParameter(2, 1),
        UpdateParameter(0, 1),
    ]


def measured(sizes: list[int]) -> RingMachine:
    """All parameters are reduced, and all but the last measured."""
    ring = machine(sizes, needs_norm=True, shares_norm=True)
    for parameter in range(len(sizes)):
        ring.handle(GradientReady(parameter, 1))
    for parameter in range(len(sizes)):
        ring.handle(ChunkReduced(parameter))
    for parameter in range(len(sizes) - 1):
        assert ring.handle(ParameterMeasured(parameter, ONE)) == []
    return ring


def test_updates_wait_for_a_norm_that_others_have_a_part_in() -> None:
    ring = measured([1, 1])
    assert ring.handle(ParameterMeasured(1, ONE)) == [SendNormPart(1, SquareSum(0, (0, 0, 2)))]
    updates = [UpdateParameter(0, 1), UpdateParameter(1, 1)]
    assert ring.handle(NormArrived(0, 1, norm=0.5)) == [UseNorm(1, 0.5), *updates]


def test_the_norm_may_arrive_before_this_rank_has_measured_its_part() -> None:
    ring = measured([1, 1])
    assert ring.handle(NormArrived(0, 1, norm=0.5)) == []
    instructions = ring.handle(ParameterMeasured(1, ONE))
    assert instructions == [
        SendNormPart(1, SquareSum(0, (0, 0, 2))),
        UseNorm(1, 0.5),
        UpdateParameter(0, 1),
        UpdateParameter(1, 1),
    ]


def test_norms_that_nobody_awaits_are_refused() -> None:
    ring = measured([1, 1])
    ring.handle(NormArrived(0, 1, norm=0.5))
    with pytest.raises(RemoteProtocolError, match="the norm of step 2 came, which is not awaited"):
        ring.handle(NormArrived(0, 2, norm=0.5))
    with pytest.raises(RemoteProtocolError, match="which is not awaited"):
        machine([1], needs_norm=True).handle(NormArrived(0, 1, norm=0.5))
    ring = measured([1])
    ring.handle(ParameterMeasured(0, ONE))
    with pytest.raises(RemoteProtocolError, match="the norm of step 2 came, not of step 1"):
        ring.handle(NormArrived(0, 2, norm=0.5))


def test_finishes_when_everything_begun_is_done() -> None:
    ring = machine([1])
    ring.handle(GradientReady(0, 1))
    assert ring.handle(Closing()) == []
    ring.handle(ChunkReduced(0))
    assert ring.handle(ParameterUpdated(0)) == [CompleteParameter(0, 1), Finish()]
    assert machine([]).handle(Closing()) == [Finish()]


def test_refuses_what_cannot_be() -> None:
    ring = machine([1, 1])
    with pytest.raises(InternalError, match="0 collectives in flight"):
        machine([1], in_flight=0)
    with pytest.raises(InternalError, match="does not know the event 'nonsense'"):
        ring.handle("nonsense")
    with pytest.raises(LocalProtocolError, match="chunk 0 was reduced, but is not under way"):
        ring.handle(ChunkReduced(0))
    with pytest.raises(LocalProtocolError, match="every chunk once"):
        ring.handle(OrderLearned((0, 0), 1))
    with pytest.raises(LocalProtocolError, match="every parameter once"):
        ring.handle(PrioritiesLearned((0, 0)))
    ring.handle(GradientReady(1, 1))
    with pytest.raises(LocalProtocolError, match="parameter 1 is ready for step 2"):
        ring.handle(GradientReady(1, 2))
    with pytest.raises(LocalProtocolError, match="parameter 0 is ready for step 2"):
        ring.handle(GradientReady(0, 2))
    with pytest.raises(LocalProtocolError, match="for step 1 comes when step 1 is under way"):
        ring.handle(OrderLearned((0, 1), 1))


class Rank:
    """One rank under a random schedule: a training thread, and collectives that end some time."""

    def __init__(
        self,
        sizes: list[int],
        in_flight: int,
        steps: int,
        chooser: random.Random,
        *,
        shared: bool,
        norm: str,
    ) -> None:
        chunk_elems = 8 if shared else 2
        self.chunks = len(cut_chunks(sizes, chunk_elems, kinds=[0] * 4 if shared else None))
        self.ring = machine(
            sizes,
            chunk_elems=chunk_elems,
            shared=shared,
            in_flight=in_flight,
            needs_norm=norm != "none",
            shares_norm=norm == "shared",
        )
        self.sums: list[SendNormPart] = []
        self.arrived = 0  # norms
        self.measures: list[int] = []
        self.norms: list[UseNorm] = []
        self.issued: list[tuple[int, int]] = []  # (step, chunk)
        self.under_way: set[int] = set()
        self.updates: list[int] = []
        self._script = [
            (step, parameter)
            for step in range(1, steps + 1)
            for parameter in chooser.sample(range(len(sizes)), len(sizes))
        ]

    def do(self, event: object) -> None:
        for instruction in self.ring.handle(event):
            if isinstance(instruction, ReduceChunk):
                self.issued.append((instruction.step, instruction.chunk))
                self.under_way.add(instruction.chunk)
            elif isinstance(instruction, UpdateParameter):
                self.updates.append(instruction.parameter)
            elif isinstance(instruction, MeasureParameter):
                self.measures.append(instruction.parameter)
            elif isinstance(instruction, SendNormPart):
                self.sums.append(instruction)
            elif isinstance(instruction, UseNorm):
                assert not self.updates, "the updates of the step before are not done"
                self.norms.append(instruction)

    def train(self) -> bool:
        """The next gradient, unless its parameter is pending still, as in a forward pass."""
        if not self._script or not self.ring.is_complete(self._script[0][1]):
            return False
        step, parameter = self._script.pop(0)
        self.do(GradientReady(parameter, step))
        return True

    @property
    def done(self) -> bool:
        missing = self.arrived < len(self.sums)
        busy = self._script or self.under_way or self.updates or self.measures or missing
        return not busy


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    in_flight=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    shared=st.booleans(),
    norm=st.sampled_from(["none", "own", "shared"]),
)
def test_ranks_with_other_orders_of_gradients_issue_alike_and_nobody_waits_for_ever(
    sizes: list[int], in_flight: int, seed: int, shared: bool, norm: str
) -> None:
    chooser = random.Random(seed)
    steps = 4
    ranks = [Rank(sizes, in_flight, steps, chooser, shared=shared, norm=norm) for _ in range(3)]
    chunks = ranks[0].chunks
    order = tuple(chooser.sample(range(chunks), chunks))
    for rank in ranks:
        rank.do(OrderLearned(order, 3))
    reduced = 0  # a collective ends when every rank has issued it; in the order of issue or not
    ended: list[set[tuple[int, int]]] = [set() for _ in ranks]
    while not all(rank.done for rank in ranks):
        moves = []
        for index, rank in enumerate(ranks):
            moves += [("update", index, parameter) for parameter in rank.updates]
            moves += [("measure", index, parameter) for parameter in rank.measures]
            if rank.arrived < len(ranks[0].sums):  # the first rank's sum makes the total known
                moves.append(("tell", index, ranks[0].sums[rank.arrived]))
            for step, chunk in set(rank.issued) - ended[index]:
                if all((step, chunk) in other.issued for other in ranks):
                    moves.append(("end", index, (step, chunk)))
        trainers = list(ranks)
        chooser.shuffle(trainers)
        if chooser.random() < 0.5 and any(rank.train() for rank in trainers):
            continue
        if not moves:
            assert any(rank.train() for rank in trainers), "all ranks wait"
            continue
        kind, index, what = chooser.choice(moves)
        if kind == "update":
            ranks[index].updates.remove(what)
            ranks[index].do(ParameterUpdated(what))
        elif kind == "measure":
            ranks[index].measures.remove(what)
            ranks[index].do(ParameterMeasured(what, ONE))
        elif kind == "tell":
            ranks[index].arrived += 1
            ranks[index].do(NormArrived(0, what.step, norm=what.part.norm))
        else:
            ended[index].add(what)
            ranks[index].under_way.remove(what[1])
            ranks[index].do(ChunkReduced(what[1]))
            reduced += 1
    assert ranks[0].issued == ranks[1].issued == ranks[2].issued
    assert reduced == 3 * steps * chunks
    with_elements = sum(map(bool, sizes))
    norms = [UseNorm(s, SquareSum(0, (0, 0, with_elements)).norm) for s in range(1, steps + 1)]
    for rank in ranks:
        assert rank.norms == (norms if norm != "none" and with_elements else [])
    assert [chunk for step, chunk in ranks[0].issued if step >= 3] == 2 * list(order)
