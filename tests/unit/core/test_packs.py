"""Which parameters share a slice, and how a pack is laid out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from foreprop.core.slicing import packed_elems, packed_order, places_in, plan_packs

KINDS = st.sampled_from(["float32", "bfloat16", None])


@given(st.lists(st.tuples(st.integers(0, 30), KINDS), max_size=40), st.integers(1, 100))
def test_neighbours_of_a_kind_share_a_slice(
    parameters: Sequence[tuple[int, str | None]], slice_elems: int
) -> None:
    sizes, kinds = [size for size, _ in parameters], [kind for _, kind in parameters]
    packs = plan_packs(sizes, kinds, slice_elems)
    packed = [number for pack in packs for number in pack]
    assert packed == sorted(set(packed)), "in order, and each once"
    for pack in packs:
        assert list(pack) == list(range(pack[0], pack[-1] + 1)), "neighbours"
        assert len(pack) > 1
        assert len({kinds[number] for number in pack}) == 1
        assert kinds[pack[0]] is not None
        assert all(0 < 4 * sizes[number] <= slice_elems for number in pack)
        assert sum(sizes[number] + 1 for number in pack) <= slice_elems
    for first, second in itertools.pairwise(packs):  # as few as can be
        both = [*first, *second]
        alike = len({kinds[number] for number in both}) == 1
        whole = sum(sizes[n] + 1 for n in first) + sizes[second[0]] + 1
        assert not (alike and first[-1] + 1 == second[0] and whole <= slice_elems)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=9), st.data())
def test_all_of_a_pack_is_sent_under_its_first_number(
    sizes: Sequence[int], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(sizes) - 2))
    pack = tuple(range(start, data.draw(st.integers(start + 2, len(sizes)))))
    packed = packed_elems(sizes, (pack,))
    for number, size in enumerate(sizes):
        whole = sum(sizes[n] + 1 for n in pack)
        assert packed[number] == (size if number not in pack else whole * (number == start))
    places = list(places_in([sizes[number] for number in pack]))
    assert [stop - begin for begin, stop in places] == [sizes[number] for number in pack]
    assert [begin for begin, _ in places] == [0, *(stop for _, stop in places)][:-1]
    assert places[-1][1] + len(pack) == packed[start], "then one mark for each"


@given(st.permutations(range(6)))
def test_a_pack_is_as_urgent_as_its_most_urgent_parameter(order: Sequence[int]) -> None:
    packed = packed_order(order, ((1, 2, 3),))
    assert sorted(packed) == list(range(6)), "each once"
    for number in (0, 4, 5):
        first = min(map(order.index, (1, 2, 3)))
        assert (packed.index(1) < packed.index(number)) == (first < order.index(number))
