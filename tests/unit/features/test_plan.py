"""Planning one order of collectives from the times that were observed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.errors import ConfigError, InternalError
from foreprop.features.collectives.order import (
    Chunk,
    Observation,
    Observer,
    backward_order,
    better_order,
    cut_chunks,
    lateness_s,
    plan_order,
    plans_after,
)


def test_chunks_cover_every_parameter_once_and_in_order() -> None:
    assert pieces(cut_chunks([5, 0, 4], 2)) == [
        [(0, 0, 2)],
        [(0, 2, 4)],
        [(0, 4, 5)],
        [(2, 0, 2)],
        [(2, 2, 4)],
    ]


def pieces(chunks: tuple[Chunk, ...]) -> list[list[tuple[int, int, int]]]:
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    return [[tuple(piece) for piece in chunk.pieces] for chunk in chunks]


def test_small_parameters_join_a_neighbour_of_their_kind() -> None:
    assert pieces(cut_chunks([20, 1, 0, 4, 8, 1, 16, 4, 1], 16, kinds="aaaaaabbb")) == [
        [(0, 0, 16)],
        [(0, 16, 20), (1, 0, 1), (3, 0, 4)],
        [(4, 0, 8), (5, 0, 1)],  # 8 is too large to join
        [(6, 0, 16), (7, 0, 4)],
        [(8, 0, 1)],  # no room for it
    ]


@given(
    sizes=st.lists(st.integers(0, 40)),
    chunk_elems=st.integers(1, 20),
    seed=st.randoms(use_true_random=False),
)
def test_every_element_is_in_one_chunk(
    sizes: list[int], chunk_elems: int, seed: random.Random
) -> None:
    kinds = [seed.randrange(2) for _ in sizes]
    chunks = cut_chunks(sizes, chunk_elems, kinds=kinds)
    elements = [(p, e) for p, size in enumerate(sizes) for e in range(size)]
    cut = [piece for chunk in chunks for piece in chunk.pieces]
    assert [(p, e) for p, start, stop in cut for e in range(start, stop)] == elements
    for chunk in chunks:
        assert chunk.elems <= chunk_elems * 5 / 4
        assert len({kinds[parameter] for parameter in chunk.parameters}) == 1


def test_a_shared_chunk_is_ready_with_the_last_and_urgent_as_the_first() -> None:
    chunks = cut_chunks([1, 1, 9, 9], 8, kinds="aabb")
    seen = Observation((3.0, 1.0, 2.0, 0.0), (4.0, 0.0, 6.0, 7.0), (1.0,) * 5)
    assert plan_order(chunks, [1, 2, 3, 0], seen) == (3, 4, 1, 0, 2)
    assert backward_order(chunks, [3, 2, 1, 0]) == (0, 1, 2, 3, 4)
    assert lateness_s((0, 1, 2, 3, 4), chunks, seen) == 4.0  # reduced at 4, and needed at 0


def test_refuses_chunks_of_nothing() -> None:
    with pytest.raises(ConfigError, match="chunk_elems is 0; it must be at least 1"):
        cut_chunks([1], 0)


def test_backward_order_is_last_used_first() -> None:
    chunks = cut_chunks([2, 1, 1], 1)
    assert backward_order(chunks, [2, 0, 1]) == (2, 0, 1, 3)


def observed(ready_s: list[float], chunk_s: list[float]) -> Observation:
    return Observation(tuple(ready_s), tuple(0.0 for _ in ready_s), tuple(chunk_s))


def test_a_fast_link_sends_in_the_order_of_readiness() -> None:
    chunks = cut_chunks([1, 1, 1], 1)
    assert plan_order(chunks, [0, 1, 2], observed([2.0, 1.0, 0.0], [0.1] * 3)) == (2, 1, 0)


def test_a_slow_link_lets_the_most_urgent_overtake_what_still_waits() -> None:
    chunks = cut_chunks([1, 1, 3], 1)
    order = plan_order(chunks, [0, 1, 2], observed([2.0, 1.0, 0.0], [1.5] * 5))
    assert order == (2, 1, 0, 3, 4)  # one of the last parameter, then what came meanwhile


def test_an_idle_link_takes_the_first_that_comes() -> None:
    chunks = cut_chunks([1, 1], 1)
    assert plan_order(chunks, [0, 1], observed([5.0, 9.0], [1.0, 1.0])) == (0, 1)


def test_equally_ready_parameters_go_by_urgency() -> None:
    chunks = cut_chunks([1, 1, 1], 1)
    assert plan_order(chunks, [1, 2, 0], observed([0.0] * 3, [1.0] * 3)) == (1, 2, 0)


def test_refuses_an_observation_of_something_else() -> None:
    with pytest.raises(InternalError, match="other parameters or chunks"):
        plan_order(cut_chunks([1], 1), [0], observed([0.0], [1.0, 1.0]))


def test_lateness_is_that_of_the_latest_parameter_for_its_use() -> None:
    chunks = cut_chunks([1, 1], 1)
    seen = Observation(ready_s=(2.0, 1.0), needed_s=(0.0, 3.0), chunk_s=(1.0, 1.5))
    assert lateness_s((1, 0), chunks, seen) == 3.5  # 0 is reduced from 2.5 to 3.5, needed at 0
    assert lateness_s((0, 1), chunks, seen) == 3.0  # 1 from 3.0 to 4.5, needed at 3.0


def test_an_order_is_changed_only_for_one_that_is_clearly_better() -> None:
    chunks = cut_chunks([1, 1], 1)
    seen = observed([1.0, 0.0], [1.0, 0.5])
    best = plan_order(chunks, [0, 1], seen)
    assert best == (1, 0)
    assert better_order(None, chunks, [0, 1], seen) == best
    assert better_order(best, chunks, [0, 1], seen) is None
    assert better_order((0, 1), chunks, [0, 1], seen) == best
    assert better_order((0, 1), chunks, [0, 1], None) is None


def test_orders_are_planned_early_and_then_now_and_then() -> None:
    assert [step for step in range(1, 151) if plans_after(step)] == [4, 8, 50, 100, 150]


times = st.floats(0, 10)


@st.composite
def situations(draw: st.DrawFn) -> tuple[tuple[Chunk, ...], list[int], Observation]:
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    count = len(sizes)
    kinds = draw(st.none() | st.lists(st.booleans(), min_size=count, max_size=count))
    chunks = cut_chunks(sizes, draw(st.integers(1, 16)), kinds=kinds)
    each = st.lists(times, min_size=count, max_size=count)
    chunk_s = draw(st.lists(times, min_size=len(chunks), max_size=len(chunks)))
    forward = draw(st.permutations(range(count)))
    return chunks, forward, Observation(tuple(draw(each)), tuple(draw(each)), tuple(chunk_s))


def ready_s_of(chunk: Chunk, seen: Observation) -> float:
    return max(seen.ready_s[parameter] for parameter in chunk.parameters)


@given(situations())
def test_a_plan_names_every_chunk_once_and_the_link_is_never_idle_with_something_ready(
    situation: tuple[tuple[Chunk, ...], list[int], Observation],
) -> None:
    chunks, forward, seen = situation
    order = plan_order(chunks, forward, seen)
    assert sorted(order) == list(range(len(chunks)))
    now_s = 0.0
    left = set(order)
    for number in order:
        ready_s = ready_s_of(chunks[number], seen)
        if ready_s > now_s:
            assert all(ready_s_of(chunks[other], seen) >= ready_s for other in left)
        now_s = max(now_s, ready_s) + seen.chunk_s[number]
        left.remove(number)


def test_observer_gives_times_since_the_first_gradient_and_the_first_use() -> None:
    observer = Observer(2, [100, 300])
    for step, late_s in enumerate([0.0, 0.5, 0.1], 1):
        start_s = 10.0 * step
        observer.gradient_ready(1, step, start_s)
        observer.gradient_ready(0, step, start_s + 1 + late_s)
        observer.reduced(1, start_s + 2, more=True)
        observer.reduced(0, start_s + 2.5, more=False)
        observer.needed(0, step, start_s + 4)
        observer.waited(3.0)
        observer.needed(1, step, start_s + 8)
    assert observer.ready_s() == pytest.approx([1.1, 0.0])  # the second latest
    seen = observer.observation([[0.9, 0.2], [1.0, 0.1]])
    assert seen is not None
    assert seen.ready_s == pytest.approx((1.1, 0.2))  # the last rank's
    assert seen.needed_s == pytest.approx((0.0, 1.0))
    assert seen.chunk_s == pytest.approx((0.5, 1.5))  # 0.5 s for 100 bytes


def test_observer_has_nothing_to_say_until_it_has_seen_everything() -> None:
    observer = Observer(1, [8])
    assert observer.observation([]) is None
    observer.gradient_ready(0, 1, 0.0)
    observer.needed(0, 1, 0.0)
    observer.reduced(0, 1.0, more=True)
    assert observer.observation([]) is None  # how long one takes is not known yet
    observer.reduced(0, 3.0, more=True)
    seen = observer.observation([])
    assert seen is not None
    assert seen.chunk_s == (2.0,)
    observer.forget_rate()
    assert observer.observation([]) is None


def test_observer_waits_only_for_parameters_that_are_summed() -> None:
    observer = Observer(3, [8], summed=[1])  # the others are in its pack
    assert observer.ready_s() == []
    observer.gradient_ready(1, 1, 4.0)
    observer.needed(1, 1, 5.0)
    observer.reduced(0, 6.0, more=True)
    observer.reduced(0, 8.0, more=False)
    seen = observer.observation([[0.0, 0.5, 0.0]])
    assert seen is not None
    assert (seen.ready_s, seen.needed_s) == ((0.0, 0.5, 0.0), (0.0, 0.0, 0.0))
