"""Every element belongs to exactly one slice, every slice to one server, on all processes alike."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.core.slicing import Partition, Slice, plan_slices, usual_slice_elems
from foreprop.errors import ConfigError
from foreprop.plan.profile import load_profile
from tests.tiers import long_cases

SIZES = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 300)), max_size=12)
PARTITIONS = st.builds(
    Partition,
    granularity=st.sampled_from(["slice", "array"]),
    placement=st.sampled_from(["round_robin", "kvstore", "balanced", "strict_round_robin"]),
    servers=st.integers(1, 7),
    slice_elems=st.one_of(st.integers(1, 60), st.just(10_000)),
    big_array_elems=st.one_of(st.integers(1, 100), st.just(10_000)),
)


def plan(sizes: list[int], **knobs: Any) -> tuple[Slice, ...]:
    return plan_slices(sizes, [4] * len(sizes), Partition(**knobs))


@settings(max_examples=200, deadline=None)
@given(SIZES, PARTITIONS, st.data())
def test_every_element_is_in_one_slice(
    sizes: list[int], partition: Partition, data: st.DataObject
) -> None:
    itemsizes = data.draw(st.lists(st.sampled_from([2, 4, 8]), min_size=len(sizes)))[: len(sizes)]
    slices = plan_slices(sizes, itemsizes, partition)
    assert [piece.number for piece in slices] == list(range(len(slices)))
    covered = [(piece.parameter, e) for piece in slices for e in range(*piece[2:4])]
    assert covered == [(parameter, e) for parameter, n in enumerate(sizes) for e in range(n)]
    assert all(piece.elems > 0 for piece in slices)
    assert all(0 <= piece.server < partition.servers for piece in slices)
    if partition.granularity == "slice":
        assert all(piece.elems <= partition.slice_elems for piece in slices)
    assert slices == plan_slices(tuple(sizes), tuple(itemsizes), partition)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=12), st.integers(1, 60), st.integers(1, 7))
def test_equal_slices_are_dealt_in_turn_across_parameters(
    slice_counts: list[int], slice_elems: int, servers: int
) -> None:
    sizes = [count * slice_elems for count in slice_counts]
    slices = plan(sizes, slice_elems=slice_elems, servers=servers)
    assert [piece.server for piece in slices] == [i % servers for i in range(len(slices))]
    assert len(slices) == sum(slice_counts)


@settings(max_examples=150, deadline=None)
@given(SIZES, st.integers(1, 60), st.integers(1, 7), st.data())
def test_each_slice_is_dealt_to_the_server_with_the_fewest_bytes_so_far(
    sizes: list[int], slice_elems: int, servers: int, data: st.DataObject
) -> None:
    itemsizes = [data.draw(st.sampled_from([2, 4, 8])) for _ in sizes]
    slices = plan_slices(sizes, itemsizes, Partition(servers=servers, slice_elems=slice_elems))
    load_bytes = [0] * servers
    for piece in slices:
        assert piece.server == load_bytes.index(min(load_bytes))  # of equal ones, the first
        load_bytes[piece.server] += piece.elems * itemsizes[piece.parameter]
    assert len(slices) == sum(-(-n // slice_elems) for n in sizes)


@pytest.mark.parametrize("servers", [3, *long_cases(2, 4, 8)])
@pytest.mark.parametrize("model", ["resnet50", *long_cases("inceptionv3", "sockeye", "vgg19")])
def test_every_server_has_its_fair_share_of_a_real_model(model: str, servers: int) -> None:
    sizes = [math.prod(array.shape) for array in load_profile(model).arrays]
    slices = plan(sizes, servers=servers, slice_elems=50_000)
    covered = [(piece.parameter, piece.start_elems, piece.stop_elems) for piece in slices]
    assert covered == [
        (parameter, start, min(start + 50_000, size))
        for parameter, size in enumerate(sizes)
        for start in range(0, size, 50_000)
    ]
    load_elems = [sum(p.elems for p in slices if p.server == s) for s in range(servers)]
    assert max(load_elems) <= 1.01 * sum(sizes) / servers


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(1, 7), st.integers(1, 100))
def test_kvstore_splits_large_arrays_equally_and_keeps_others_whole(
    sizes: list[int], servers: int, big_array_elems: int
) -> None:
    knobs = {
        "granularity": "array",
        "placement": "kvstore",
        "servers": servers,
        "big_array_elems": big_array_elems,
    }
    slices = plan(sizes, **knobs)
    for parameter, size in enumerate(sizes):
        parts = [piece for piece in slices if piece.parameter == parameter]
        if size <= big_array_elems:
            assert [piece.elems for piece in parts] == [size] * (size > 0)
            continue
        elems = [piece.elems for piece in parts]
        assert max(elems) - min(elems) <= 1
        assert len(parts) == min(servers, size)
        assert len({piece.server for piece in parts}) == len(parts)
        assert [piece.server for piece in parts] == sorted(piece.server for piece in parts)
    assert slices == plan(sizes, **knobs)


def test_kvstore_s_choice_reaches_every_server() -> None:
    slices = plan([10] * 200, granularity="array", placement="kvstore", servers=4)
    assert {piece.server for piece in slices} == {0, 1, 2, 3}


@settings(max_examples=150, deadline=None)
@given(SIZES, st.sampled_from(["slice", "array"]), st.integers(1, 60), st.integers(1, 7), st.data())
def test_balanced_loads_differ_by_at_most_the_largest_piece(
    sizes: list[int], granularity: str, slice_elems: int, servers: int, data: st.DataObject
) -> None:
    itemsizes = [data.draw(st.sampled_from([2, 4, 8])) for _ in sizes]
    partition = Partition(
        granularity=granularity,  # type: ignore[arg-type]
        placement="balanced",
        servers=servers,
        slice_elems=slice_elems,
    )
    slices = plan_slices(sizes, itemsizes, partition)
    load_bytes = [0] * servers
    for piece in slices:
        load_bytes[piece.server] += piece.elems * itemsizes[piece.parameter]
    largest_bytes = max((p.elems * itemsizes[p.parameter] for p in slices), default=0)
    assert max(load_bytes) - min(load_bytes) <= largest_bytes


@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(1, 9), st.integers(1, 100))
def test_strict_round_robin_counts_slices_and_not_bytes(
    sizes: list[int], servers: int, slice_elems: int
) -> None:
    partition = Partition(placement="strict_round_robin", servers=servers, slice_elems=slice_elems)
    slices = plan_slices(sizes, [4] * len(sizes), partition)
    assert [piece.server for piece in slices] == [n % servers for n in range(len(slices))]


def test_strict_round_robin_leaves_servers_with_unequal_bytes() -> None:
    """What p3 does not: a server of four has two of the five slices, one of them next to empty."""
    sizes, one = [120_000, 30, 49_000], Partition(placement="strict_round_robin", servers=4)
    by_bytes = Partition(placement="round_robin", servers=4)
    assert [s.server for s in plan_slices(sizes, [4] * 3, one)] == [0, 1, 2, 3, 0]
    assert [s.server for s in plan_slices(sizes, [4] * 3, by_bytes)] == [0, 1, 2, 3, 3]


def test_a_large_model_is_cut_as_the_paper_says() -> None:
    slices = plan([120_000, 0, 1, 50_000, 50_001])
    assert [(p.parameter, p.elems) for p in slices] == [
        *[(0, 50_000), (0, 50_000), (0, 20_000)],
        *[(2, 1), (3, 50_000), (4, 50_000), (4, 1)],
    ]
    assert all(a.stop_elems == b.start_elems for a, b in pairwise(slices[:3]))


@pytest.mark.parametrize("field", ["servers", "slice_elems", "big_array_elems"])
def test_a_partition_names_the_field_that_cannot_be(field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field} is 0; it must be at least 1$"):
        Partition(**{field: 0})


def test_with_many_servers_the_usual_slices_are_smaller() -> None:
    sizes = {1: 50_000, 8: 50_000, 10: 40_000, 16: 25_000, 32: 12_500, 4096: 12_500}
    assert {servers: usual_slice_elems(servers) for servers in sizes} == sizes
