"""Just enough: never lossier than needed, exact if exact fits, feasible whenever anything is.

What is in time is decided here by an earliest-deadline schedule that is played through.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.core.codecfacts import KnownCodec, codec_named
from foreprop.core.justenough import (
    TOLERANCE,
    Carriers,
    Enough,
    Need,
    checked_enough,
    just_enough,
    shares_text,
)
from foreprop.errors import ConfigError

NONE, LOSSLESS, BF16, INT8, INT4 = map(codec_named, ("none", "lossless", "bf16", "int8", "int4"))
SOME = (NONE, BF16, INT8)
EPSILON_S = 1e-9


def needs_of(layers: Sequence[tuple[int, float, float]], stays: Sequence[bool] = ()) -> list[Need]:
    """The needs of layers in forward order: elements, forward and backward time."""
    backward_s = sum(layer[2] for layer in layers)
    needs, forward_s, ready_s = [], 0.0, backward_s
    for (elems, layer_forward_s, layer_backward_s), exact in itertools.zip_longest(
        layers, stays[: len(layers)], fillvalue=False
    ):
        needs.append(Need(elems, ready_s, backward_s + forward_s, bool(exact)))
        forward_s += layer_forward_s
        ready_s -= layer_backward_s
    return needs


def compute_of(layers: Sequence[tuple[int, float, float]]) -> float:
    return sum(forward_s + backward_s for _, forward_s, backward_s in layers)


def is_in_time(
    needs: Sequence[Need], carriers: Carriers, codecs: Sequence[KnownCodec], allowance_s: float
) -> bool:
    """Play an earliest-deadline schedule through, preempted whenever a gradient is ready."""
    pairs = zip(needs, codecs, strict=True)
    left_s = [carriers.load_s(need.elems, codec) for need, codec in pairs]
    ready_s = [need.ready_s + carriers.round_trip_s for need in needs]
    now_s, ends_s = 0.0, [0.0] * len(needs)
    for until_s in [*sorted(ready_s), float("inf")]:
        for number, need in enumerate(needs):  # in the order of first use: of deadlines
            if ready_s[number] > now_s or left_s[number] == 0:
                continue
            took_s = min(left_s[number], until_s - now_s)
            left_s[number] = left_s[number] - took_s if took_s < left_s[number] else 0.0
            now_s += took_s
            ends_s[number] = now_s
            if need.needed_s + allowance_s + EPSILON_S < now_s:
                return False
        now_s = max(now_s, until_s) if until_s != float("inf") else now_s
    return not any(left_s) and all(
        max(end_s, ready) <= need.needed_s + allowance_s + EPSILON_S
        for end_s, ready, need in zip(ends_s, ready_s, needs, strict=True)
    )


times = st.integers(0, 20).map(lambda tens: tens / 100)
layers_of_some = st.lists(st.tuples(st.integers(0, 40_000), times, times), min_size=1, max_size=5)
rates = st.sampled_from([1e4, 3e4, 1e5, 2e5, 3e5, 1e6, 1e7])


def carriers_of(rate_bytes_per_s: float, **changes: float) -> Carriers:
    fields = {"nodes": 4, "slice_elems": 5_000, "cores": 4.0} | changes
    return Carriers(rate_bytes_per_s=rate_bytes_per_s, **fields)  # type: ignore[arg-type]


def enough_of(
    needs: Sequence[Need], carriers: Carriers, compute_s: float, allowed: Sequence[KnownCodec]
) -> tuple[Enough, float]:
    """The choice, and how much longer than the compute the step was to be at most."""
    enough = just_enough(needs, carriers, allowed, compute_s=compute_s)
    return enough, max(TOLERANCE * compute_s, enough.step_s - compute_s)


@given(layers_of_some, rates, st.sampled_from([0.0, 0.01]), st.lists(st.booleans(), max_size=5))
def test_in_time_if_anything_is_and_no_raise_too_many(
    layers: list[tuple[int, float, float]], rate: float, trip_s: float, stays: list[bool]
) -> None:
    needs, carriers = needs_of(layers, stays), carriers_of(rate, round_trip_s=trip_s)
    compute_s = compute_of(layers)
    enough, allowance_s = enough_of(needs, carriers, compute_s, SOME)
    assert is_in_time(needs, carriers, enough.codecs, allowance_s)
    choices = [
        choice
        for choice in itertools.product(SOME, repeat=len(needs))
        if all(c.facts.exact or not n.stays_exact for c, n in zip(choice, needs, strict=True))
    ]
    assert enough.codecs in choices
    # feasible exactly if some choice is; else as quick as the quickest
    at_once = allowance_s <= TOLERANCE * compute_s + EPSILON_S
    shorter_s = TOLERANCE * compute_s if at_once else allowance_s * (1 - 1e-6) - 2 * EPSILON_S
    found = [choice for choice in choices if is_in_time(needs, carriers, choice, shorter_s)]
    assert bool(found) == at_once
    # taking one raise back misses a deadline
    for place, chosen in enumerate(enough.codecs):
        for less in SOME[: SOME.index(chosen)]:
            others = (*enough.codecs[:place], less, *enough.codecs[place + 1 :])
            assert not is_in_time(needs, carriers, others, allowance_s - 2 * EPSILON_S)


@given(layers_of_some, rates)
def test_exact_everywhere_if_exact_fits(
    layers: list[tuple[int, float, float]], rate: float
) -> None:
    needs, carriers, compute_s = needs_of(layers), carriers_of(rate), compute_of(layers)
    enough, _ = enough_of(needs, carriers, compute_s, (NONE, LOSSLESS, BF16, INT8, INT4))
    for allowed, is_so in (((NONE,), enough.codecs), ((NONE, LOSSLESS), enough.codecs)):
        every = itertools.product(allowed, repeat=len(needs))
        margin_s = TOLERANCE * compute_s - 2 * EPSILON_S
        if any(is_in_time(needs, carriers, choice, margin_s) for choice in every):
            assert set(is_so) <= set(allowed)


@given(layers_of_some, st.lists(rates, min_size=2, max_size=2, unique=True))
def test_a_choice_for_slow_links_is_in_time_on_fast_ones(
    layers: list[tuple[int, float, float]], both: list[float]
) -> None:
    needs, compute_s = needs_of(layers), compute_of(layers)
    slow, fast = map(carriers_of, sorted(both))
    slowly, allowance_s = enough_of(needs, slow, compute_s, SOME)
    quickly, _ = enough_of(needs, fast, compute_s, SOME)
    assert is_in_time(needs, fast, slowly.codecs, allowance_s)
    assert quickly.step_s <= compute_s + allowance_s + EPSILON_S


@given(st.lists(st.tuples(times, times), min_size=1, max_size=6), rates, rates)
def test_of_equal_arrays_the_fewest_are_lossy_and_fewer_on_faster_links(
    layers: list[tuple[float, float]], one: float, other: float
) -> None:
    sized = [(20_000, forward_s, backward_s) for forward_s, backward_s in layers]
    needs, compute_s = needs_of(sized), compute_of(sized)
    lossy = []
    for rate in sorted((one, other)):
        carriers = carriers_of(rate)
        enough, allowance_s = enough_of(needs, carriers, compute_s, (NONE, INT8))
        lossy.append(enough.codecs.count(INT8))
        fewer = [
            choice
            for choice in itertools.product((NONE, INT8), repeat=len(needs))
            if choice.count(INT8) < lossy[-1]
        ]
        assert not any(is_in_time(needs, carriers, c, allowance_s - 2 * EPSILON_S) for c in fewer)
    if (
        compute_s
        and enough_of(needs, carriers_of(min(one, other)), compute_s, (NONE, INT8))[1]
        <= TOLERANCE * compute_s
    ):
        assert lossy == sorted(lossy, reverse=True)


EVEN = [(100_000, 0.01, 0.02)] * 10
"""1 MB each way and more in 0.3 s."""


def test_small_and_urgent_arrays_stay_exact_and_large_ones_are_made_small() -> None:
    layers = [(2_000, 0.05, 0.1), (2_000, 0.05, 0.1), (400_000, 0.05, 0.1), (2_000, 0.05, 0.1)]
    needs = needs_of(layers)
    enough, _ = enough_of(needs, carriers_of(5e6), compute_of(layers), SOME)
    assert [codec.name for codec in enough.codecs] == ["none", "none", "bf16", "none"]


def test_the_smallest_raise_that_is_enough() -> None:
    layers = [(10_000, 0.3, 0.3), (100_000, 0.1, 0.2), (500_000, 0.1, 0.2)]
    needs, compute_s = needs_of(layers), compute_of(layers)
    exact_s = sum(carriers_of(1.0).load_s(need.elems, NONE) for need in needs)
    saved_s = carriers_of(1.0).load_s(100_000, NONE) - carriers_of(1.0).load_s(100_000, BF16)
    rate = (exact_s - 0.9 * saved_s) / (0.9 + TOLERANCE * compute_s)  # the last one's window
    enough, _ = enough_of(needs, carriers_of(rate), compute_s, SOME)
    assert [codec.name for codec in enough.codecs][2] == "none"
    assert not enough.is_exact


def test_no_codec_where_processors_are_slower_than_the_link() -> None:
    needs = needs_of(EVEN)
    quick = carriers_of(2e9, cores=1.0)
    enough, _ = enough_of([n._replace(elems=n.elems * 1000) for n in needs], quick, 0.3, SOME)
    assert {codec.name for codec in enough.codecs} <= {"none", "bf16"}  # int8 costs more
    slow = just_enough(needs, carriers_of(2e6), SOME, compute_s=0.3)
    assert INT8 in slow.codecs


def test_dedicated_servers_have_each_direction_to_themselves() -> None:
    beside = carriers_of(1e6)
    apart = Carriers(rate_bytes_per_s=1e6, nodes=4, dedicated_servers=4, slice_elems=5_000)
    both = beside.load_s(100_000, NONE), apart.load_s(100_000, NONE)
    assert both[0] == pytest.approx(1.5 * both[1])  # 2 x 3/4 of the bytes against one direction
    few = Carriers(rate_bytes_per_s=1e6, nodes=4, dedicated_servers=1, slice_elems=5_000)
    assert few.load_s(100_000, NONE) == pytest.approx(4 * both[1])


def test_windows_are_nested_even_if_gradients_come_in_another_order() -> None:
    needs = [Need(1000, 0.1, 0.3), Need(1000, 0.2, 0.4), Need(1000, 0.0, 0.5)]
    turned = [Need(1000, 0.2, 0.3), Need(1000, 0.2, 0.4), Need(1000, 0.0, 0.5)]
    results = [just_enough(each, carriers_of(2e4), SOME, compute_s=0.5) for each in (needs, turned)]
    assert results[0] == results[1]


def test_where_lossless_was_measured_its_own_share_counts() -> None:
    """An embedding, last to have its gradient and first to be used, of which few rows move."""
    layers = [(100_000, 0.1, 0.2), (50_000, 0.1, 0.2)]
    needs, compute_s = needs_of(layers), compute_of(layers)
    allowed = (NONE, LOSSLESS, BF16, INT8, INT4)
    carriers = carriers_of(8e6)
    assumed, _ = enough_of(needs, carriers, compute_s, allowed)
    assert [codec.name for codec in assumed.codecs] == ["int8", "none"]
    sparse = [needs[0]._replace(lossless_share=0.05), needs[1]]
    measured, _ = enough_of(sparse, carriers, compute_s, allowed)
    assert [codec.name for codec in measured.codecs] == ["lossless:0.0500", "none"]
    assert measured.is_exact
    assert measured.sentence.startswith("67% of the bytes in lossless, which is exact")
    noise = [needs[0]._replace(lossless_share=1.0), needs[1]]  # no raise at all
    assert enough_of(noise, carriers, compute_s, allowed)[0].codecs == assumed.codecs


# What it says.
def test_it_says_how_much_of_the_bytes_is_not_exact() -> None:
    assert shares_text([INT8, NONE], [31, 69]) == "31% of the bytes in int8, the rest exact"
    assert shares_text([INT8, INT8], [31, 69]) == "all of the bytes in int8"
    assert shares_text([NONE, NONE], [31, 69]) == "all of the bytes as they are"
    assert shares_text([NONE], [0]) == "all of the bytes as they are"
    assert shares_text([LOSSLESS, NONE], [50, 50]) == "50% of the bytes in lossless, which is exact"
    mixed = shares_text([LOSSLESS, INT8, INT4, NONE], [500, 496, 1, 3])
    assert mixed == (
        "less than 1% of the bytes in int4, 50% of the bytes in int8,"
        " 50% of the bytes in lossless, the rest exact"
    )
    enough = Enough((INT8, NONE), 0.182, 0.18, (31, 69))
    assert enough.sentence == (
        "31% of the bytes in int8, the rest exact; step 0.182 s, 0.99 of it compute"
    )
    assert not enough.is_exact
    assert enough.loss == pytest.approx(0.31 * INT8.loss)


# With somebody else's steps.
def checked(rate: float, queues: float) -> tuple[Enough, list[tuple[str, ...]]]:
    """The choice for `EVEN`, with so many times the excess that windows say."""
    needs, carriers, asked = needs_of(EVEN), carriers_of(rate), []

    def step_s(codecs: Sequence[KnownCodec]) -> float:
        asked.append(tuple(codec.name for codec in codecs))
        longest_s = 0.0
        for last in range(len(needs)):
            pairs = zip(needs[: last + 1], codecs, strict=False)
            busy_s = sum(carriers.load_s(need.elems, codec) for need, codec in pairs)
            longest_s = max(longest_s, busy_s - (needs[last].needed_s - needs[last].ready_s))
        return 0.3 + queues * longest_s

    return checked_enough(needs, carriers, SOME, compute_s=0.3, step_s=step_s), asked


def test_exact_steps_that_are_short_enough_are_asked_for_once() -> None:
    enough, asked = checked(1e9, 1.0)
    assert enough.is_exact
    assert asked == [("none",) * 10]


def test_queues_leave_less_to_spare() -> None:
    calm, _ = checked(2.7e7, 1.0)
    busy, asked = checked(2.7e7, 1.5)
    assert not calm.is_exact
    assert max(calm.step_s, busy.step_s) <= (1 + TOLERANCE) * 0.3
    assert busy.loss > calm.loss
    assert len(asked) == len(set(asked)) > 2


def test_a_choice_that_gains_nothing_is_none() -> None:
    needs = needs_of(EVEN)
    enough = checked_enough(needs, carriers_of(1e6), SOME, compute_s=0.3, step_s=lambda _: 9.0)
    assert enough.is_exact
    assert enough.step_s == 9.0


def test_one_codec_for_all_is_tried_where_windows_find_nothing_quick() -> None:
    needs = needs_of([(100_000, 0.01, 0.02)] * 9 + [(100, 0.01, 0.02)], [False] * 9 + [True])

    def step_s(codecs: Sequence[KnownCodec]) -> float:
        return 0.5 if codecs == (BF16,) * 9 + (NONE,) else 1.0

    enough = checked_enough(needs, carriers_of(1e6), SOME, compute_s=0.3, step_s=step_s)
    assert enough.codecs == (BF16,) * 9 + (NONE,)
    assert enough.step_s == 0.5


@pytest.mark.long
@pytest.mark.timeout(60)
def test_thousands_of_arrays_are_no_matter_of_minutes() -> None:
    """A mixture of experts has so many; each keeps another share when lossless."""
    layers = [(10_000 + number % 97, 1e-4, 2e-4) for number in range(3000)]
    needs = [
        need._replace(lossless_share=0.5 + (number * 37 % 1000) / 2000)
        for number, need in enumerate(needs_of(layers))
    ]
    allowed = (NONE, LOSSLESS, BF16, INT8, INT4)
    enough = just_enough(needs, carriers_of(4e7), allowed, compute_s=compute_of(layers))
    counts = Counter(codec.session_name for codec in enough.codecs)
    assert min(counts["int4"], counts["int8"]) > 1000
    assert enough.step_s <= (1 + TOLERANCE) * compute_of(layers)


# What cannot be.
@pytest.mark.parametrize("allowed", [(), (INT8,), (NONE, INT8, BF16)])
def test_codecs_must_come_in_the_order_of_loss(allowed: Sequence[KnownCodec]) -> None:
    with pytest.raises(ConfigError, match="allowed is"):
        just_enough(needs_of(EVEN), carriers_of(1e6), allowed, compute_s=0.3)


def test_parameters_must_come_in_the_order_of_use() -> None:
    needs = [Need(10, 0.0, 0.2), Need(10, 0.0, 0.1)]
    with pytest.raises(ConfigError, match="order of first use"):
        just_enough(needs, carriers_of(1e6), SOME, compute_s=0.3)


@pytest.mark.parametrize(
    "changes",
    [
        {"rate_bytes_per_s": 0.0},
        {"server_rate_bytes_per_s": -1.0},
        {"cpu": 0.0},
        {"cores": float("inf")},
        {"nodes": 0},
        {"slice_elems": 0},
        {"dedicated_servers": -1},
    ],
)
def test_carriers_that_cannot_be_are_named(changes: dict[str, float]) -> None:
    fields = {"rate_bytes_per_s": 1e6, "nodes": 2, "slice_elems": 100} | changes
    with pytest.raises(ConfigError, match=next(iter(changes))):
        Carriers(**fields)  # type: ignore[arg-type]
