"""Each recommendation in a setting in which it must come, and in one in which it must not."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from plan_example import GBIT, setting, sparse_profile

from foreprop.config import PRESETS
from foreprop.plan.compressing import Compressed
from foreprop.plan.planner import (
    TOLERANCE,
    Candidate,
    Forecast,
    candidate_step_s,
    choose,
    forecast,
    forecasts,
)
from foreprop.plan.profile import Profile, ProfiledArray, load_profile
from foreprop.plan.recommendation import Recommendation, obstacle_of, recommend
from tests.tiers import long_cases

DDP, RING, P2P = Candidate("ddp"), Candidate("ring"), Candidate("p2p", "p3")


@functools.cache
def recommended(**changes: Any) -> Recommendation:
    asked = setting(**changes)
    return recommend(asked, forecasts(asked))


def kinds(recommendation: Recommendation) -> list[str]:
    return [remedy.kind for remedy in recommendation.remedies]


def text(recommendation: Recommendation) -> str:
    return " ".join(recommendation.reasons)


# Which one.
def test_plain_ddp_where_links_are_fast() -> None:
    made = recommended(rate_bits_per_s=100 * GBIT)
    assert (made.candidate, made.verdict, made.obstacle) == (DDP, "plain_ddp", "none")
    assert made.over_ddp == 1.0
    assert made.fastest != DDP  # it is simpler, not faster
    assert "Plain DDP is as good here" in text(made)
    assert made.code == "DistributedDataParallel(model)"


def test_a_schedule_where_communication_takes_about_as_long_as_compute() -> None:
    made = recommended()
    assert (made.candidate, made.verdict) == (P2P, "schedule")
    assert made.over_ddp > 1.15
    assert "Plain DDP is as good" not in text(made)
    assert made.code == "foreprop.parallelize(model, optimizer)"


def test_dedicated_servers_where_links_are_slow_and_there_are_enough() -> None:
    slow = {"rate_bits_per_s": 0.3 * GBIT}
    made = recommended(**slow, servers=(0, 4))
    assert (made.candidate, made.verdict) == (Candidate("ps", "p3", 4), "servers")
    assert "as fast as the best without dedicated servers" in text(made)
    assert made.code == "foreprop.parallelize(model, optimizer, dedicated_servers=4)"
    for servers in ((0,), (0, 1, 2)):  # none, or so few that their links are the bottleneck
        assert recommended(**slow, servers=servers).verdict != "servers"


def test_p2p_before_servers_that_gain_too_little() -> None:
    made = recommended(rate_bits_per_s=1.2 * GBIT, servers=(0, 4))
    assert made.candidate == P2P
    assert made.fastest.servers == 4
    assert "the fastest, ps p3, 4 servers, saves only" in text(made)


def test_the_fewest_servers_that_do() -> None:
    asked = setting(rate_bits_per_s=0.3 * GBIT, servers=tuple(range(9)))
    made = recommend(asked, forecasts(asked))
    fewer = Candidate("ps", "p3", made.candidate.servers - 1)
    assert made.candidate.servers == 4  # more than workers cannot help
    assert candidate_step_s(asked, fewer) > 1.05 * made.step_s


def test_servers_only_if_there_are_to_be_none_beside_the_workers() -> None:
    asked = setting(servers=(2,))
    architectures = {f.candidate.architecture for f in forecasts(asked)}
    assert architectures == {"ddp", "ring", "ps"}


# Tables with sparse gradients.
MANY_SMALL_ARRAYS = Profile(
    name="many",
    arrays=(
        ProfiledArray(name="words.weight", shape=(50_000, 128), forward_flops=0.0, alpha=0.1),
        *(ProfiledArray(name=f"n{n}.weight", shape=(64,), forward_flops=1e4) for n in range(1000)),
    ),
)


@pytest.mark.long
def test_hybrid_where_servers_would_be_busy_with_a_thousand_small_updates() -> None:
    """Collectives join small arrays; a server updates each by itself."""
    fields: dict[str, Any] = {"compute_s": 0.01, "rate_bits_per_s": 10 * GBIT, "nodes": 3}
    asked = setting(profile=MANY_SMALL_ARRAYS, **fields)
    candidates = [DDP, Candidate("ddp", dense=True), RING, Candidate("hybrid"), P2P]
    made = recommend(asked, [forecast(asked, candidate) for candidate in candidates])
    assert (made.candidate, made.verdict) == (Candidate("hybrid"), "schedule")
    assert made.code == 'foreprop.parallelize(model, optimizer, architecture="hybrid")'
    assert "Only touched rows of words.weight are sent" in text(made)


def test_p2p_before_hybrid_where_both_hide_as_much() -> None:
    made = recommended(profile=sparse_profile(), rate_bits_per_s=0.8 * GBIT)
    assert made.candidate == P2P
    assert "Only touched rows of words.weight, classes.weight are sent" in text(made)
    assert "sparse=True" in text(made)


def test_a_model_without_tables_is_told_nothing_about_rows() -> None:
    asked = setting()
    made = recommend(asked, forecasts(asked))
    assert "rows" not in text(made)
    assert not [f for f in forecasts(asked) if f.candidate.dense]


def test_ddp_with_sparse_gradients_where_gathered_rows_are_few_and_links_fast() -> None:
    made = recommended(profile=sparse_profile(alpha=0.001), rate_bits_per_s=40 * GBIT)
    assert made.candidate == DDP
    assert "need sparse=True: all ranks gather" in text(made)


def test_plain_ddp_is_the_fastest_only_if_nothing_is_faster() -> None:
    asked = setting(rate_bits_per_s=100 * GBIT)
    made = recommend(asked, [forecast(asked, candidate) for candidate in (DDP, P2P, RING)])
    alone = recommend(asked, [forecast(asked, DDP)])
    assert "Plain DDP is as good here" in text(made)
    assert "Plain DDP is the fastest here" in text(alone)


def test_ddp_with_dense_gradients_where_links_are_so_fast_that_rows_gain_little() -> None:
    made = recommended(profile=sparse_profile(alpha=0.7), nodes=8, rate_bits_per_s=400 * GBIT)
    assert made.candidate == Candidate("ddp", dense=True)
    assert "need sparse=False" in text(made)
    assert made.over_ddp == 1.0


def test_gathered_rows_are_not_said_to_be_halved_by_a_hook() -> None:
    """DDP's hooks for half precision do not take sparse gradients."""
    fields: dict[str, Any] = {"rate_bits_per_s": 0.02 * GBIT, "nodes": 2}
    made = recommended(profile=sparse_profile(alpha=0.2), **fields)
    assert (made.candidate, made.obstacle) == (DDP, "wire_too_slow")
    assert "rate" in kinds(made)
    assert "half_precision" not in kinds(made)
    plain = recommended(**fields)
    assert plain.candidate == DDP
    assert "half_precision" in kinds(plain)


# Several workers per node.
BUSY_RELAYS = "gradients of a node's 4 workers takes one process 34.6 ms per step"
"""9.6 MB and four workers."""


def test_relays_that_take_longer_than_the_rest_of_a_step_are_counted() -> None:
    made = recommended(workers_per_node=4, rate_bits_per_s=25 * GBIT, compute_s=0.02)
    assert made.candidate.architecture in ("ddp", "ring")
    assert BUSY_RELAYS in text(made)
    assert "with p2p p3 a step takes 36.2 ms for that, and without 21 ms" in text(made)


@pytest.mark.parametrize("compute_s", [0.05, 0.2])
def test_relays_that_the_computation_hides_do_not_stand_against_p3(compute_s: float) -> None:
    made = recommended(workers_per_node=4, rate_bits_per_s=2 * GBIT, compute_s=compute_s)
    assert made.candidate == P2P
    assert (BUSY_RELAYS in text(made)) == (compute_s == 0.05)
    assert "for that" not in text(made)


def test_without_several_workers_relays_are_not_told_of() -> None:
    made = recommended(rate_bits_per_s=4 * GBIT, compute_s=0.02)
    assert "Summing" not in text(made)


@pytest.mark.parametrize(
    ("model", "rate_gbit", "compute_s"), [("resnet50", 25, 0.12), ("vgg19", 10, 0.5)]
)
def test_nothing_is_recommended_for_a_time_that_its_relays_do_not_have(
    model: str, rate_gbit: float, compute_s: float
) -> None:
    """A relay's process takes 0.6 and 3.4 s per step on 2 nodes of 8 workers."""
    asked = setting(
        profile=load_profile(model),
        nodes=2,
        workers_per_node=8,
        rate_bits_per_s=rate_gbit * GBIT,
        compute_s=compute_s,
    )
    made = [forecast(asked, candidate) for candidate in (P2P, DDP)]
    chosen = recommend(asked, made)
    assert chosen.candidate == DDP
    assert made[0].step_s > made[0].relays_s > made[1].step_s
    assert "Not counted" not in text(chosen)


def test_what_limits_may_be_the_relays() -> None:
    asked = setting(workers_per_node=4, rate_bits_per_s=10 * GBIT, compute_s=0.02)
    p3 = forecast(asked, P2P)
    assert obstacle_of(p3) == p3.limited_by == "relays"
    made = recommend(asked, [p3, replace(forecast(asked, DDP), step_s=1.0)])
    assert "Endlessly fast relays would save" in text(made)
    assert BUSY_RELAYS in text(made)


# What is left.
def test_no_schedule_helps_where_the_wire_is_far_too_slow() -> None:
    made = recommended(rate_bits_per_s=0.04 * GBIT)
    assert made.obstacle == "wire_too_slow"
    assert made.too_slow == pytest.approx(3.0 / 0.14, rel=0.05)
    assert "No schedule helps: the wire is 22.0x too slow" in text(made)
    assert "local steps" not in text(made)  # which foreprop has not
    assert "by accumulating gradients over as many batches." in text(made)
    assert made.candidate == DDP
    assert recommended().too_slow is None


def test_a_schedule_that_helps_somewhat_still_says_that_the_wire_is_too_slow() -> None:
    made = recommended(rate_bits_per_s=0.3 * GBIT)
    assert (made.candidate, made.obstacle) == (P2P, "wire_too_slow")
    assert "No schedule helps enough: the wire is 2.9x too slow" in text(made)


def test_servers_that_are_too_slow_are_not_called_a_wire() -> None:
    made = recommended(rate_bits_per_s=0.1 * GBIT, servers=(0, 3))
    assert made.candidate.servers == 3
    assert made.obstacle == "servers_too_slow"
    assert "the servers are" in text(made)


def test_latency_where_messages_are_slow_and_models_small() -> None:
    slow = recommended(rate_bits_per_s=100 * GBIT, latency_s=0.1)
    assert slow.obstacle == "latency"
    assert "Latency limits it" in text(slow)
    assert recommended(rate_bits_per_s=100 * GBIT).obstacle == "none"


def test_links_that_are_somewhat_slow() -> None:
    made = recommended(rate_bits_per_s=0.6 * GBIT)
    assert made.obstacle == "wire"
    assert "Endlessly fast links would save" in text(made)
    assert made.too_slow is None


# What more would help.
def test_two_more_servers_would_help() -> None:
    made = recommended(rate_bits_per_s=0.05 * GBIT, nodes=8, servers=tuple(range(7)))
    assert made.candidate == Candidate("ps", "p3", 6)
    more = [r for r in made.remedies if r.kind == "servers"]
    assert [r.servers for r in more] == [7, 8]
    assert more[1].speed_up == pytest.approx(8 / 6, rel=0.06)  # their shares are unequal by a slice
    assert "2 more servers, 8 in all, would give 1.2" in text(made)


def test_servers_of_their_own_would_help_where_there_are_none() -> None:
    made = recommended(rate_bits_per_s=0.3 * GBIT)
    (remedy,) = [r for r in made.remedies if r.kind == "servers"]
    assert remedy.servers == 4
    assert "4 dedicated servers on machines of their own would give" in text(made)


def test_more_servers_are_not_wanted_where_each_node_has_one_or_links_are_fast() -> None:
    assert "servers" not in kinds(recommended(rate_bits_per_s=0.2 * GBIT, servers=(0, 4)))
    assert "servers" not in kinds(recommended(rate_bits_per_s=100 * GBIT))


def test_fewer_bytes_and_faster_links_help_where_the_wire_limits() -> None:
    made = recommended(rate_bits_per_s=0.2 * GBIT)
    gains = {r.kind: r.speed_up for r in made.remedies}
    assert gains["half_precision"] == pytest.approx(2, rel=0.05)
    assert gains["rate"] == pytest.approx(2, rel=0.05)
    assert "Links of 400 Mbit/s would give 1.9" in text(made)
    assert 'wire_dtype="bfloat16"' in text(made)


def test_nothing_helps_devices_that_are_busy() -> None:
    made = recommended(rate_bits_per_s=100 * GBIT)
    assert made.remedies == []
    assert "little left to gain" in text(made)


@pytest.mark.parametrize("rate", [0.2, *long_cases(0.05, 0.5, 1.0)])
def test_a_remedy_gives_what_is_said_if_it_is_applied(rate: float) -> None:
    made = recommended(rate_bits_per_s=rate * GBIT)
    for remedy in made.remedies:
        assert remedy.speed_up == pytest.approx(made.step_s / remedy.step_s)
        assert remedy.speed_up >= 1.1
        if remedy.kind == "rate":
            twice = setting(rate_bits_per_s=2 * rate * GBIT)
            assert candidate_step_s(twice, made.candidate) == remedy.step_s
        if remedy.kind == "servers":
            more = Candidate("ps", "p3", remedy.servers or 0)
            assert candidate_step_s(setting(rate_bits_per_s=rate * GBIT), more) == remedy.step_s


# The rule.
CANDIDATES = [
    DDP,
    RING,
    *(Candidate("p2p", preset) for preset in PRESETS),
    *(Candidate("ps", preset, k) for preset in PRESETS for k in (1, 2, 8)),
]


@given(st.dictionaries(st.sampled_from(CANDIDATES), st.floats(0.1, 0.13), min_size=1))
def test_the_simplest_of_those_within_the_tolerance(steps_s: dict[Candidate, float]) -> None:
    chosen = choose(steps_s)
    fastest_s = min(steps_s.values())
    assert steps_s[chosen] <= (1 + TOLERANCE) * fastest_s
    for candidate, seconds in steps_s.items():
        if candidate.simplicity < chosen.simplicity:
            assert seconds > (1 + TOLERANCE) * fastest_s
        if candidate.simplicity == chosen.simplicity:
            assert seconds >= steps_s[chosen]


def test_ddp_then_the_default_then_a_ring_then_hybrid_then_servers_by_number() -> None:
    wanted = [
        DDP,
        P2P,
        RING,
        Candidate("hybrid"),
        Candidate("p2p", "slicing"),
        *(Candidate("ps", "p3", k) for k in (1, 2, 8)),
        Candidate("ps", "kvstore", 1),
    ]
    left = dict.fromkeys(reversed(wanted), 1.0)
    for candidate in wanted:
        assert choose(left) == candidate
        del left[candidate]


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(
    rate=st.floats(0.02, 40),
    latency_ms=st.floats(0, 20),
    nodes=st.integers(2, 6),
    k=st.integers(0, 6),
    workers=st.integers(1, 6),
)
def test_what_is_recommended_is_as_fast_as_any_within_the_tolerance(
    rate: float, latency_ms: float, nodes: int, k: int, workers: int
) -> None:
    asked = setting(
        rate_bits_per_s=rate * GBIT,
        latency_s=latency_ms / 1e3,
        nodes=nodes,
        servers=(0, k),
        workers_per_node=workers,
    )
    made = forecasts(asked)
    recommendation = recommend(asked, made)
    assert recommendation.step_s <= (1 + TOLERANCE) * min(f.step_s for f in made)
    assert recommendation.reasons
    if recommendation.obstacle == "none":
        assert recommendation.efficiency >= 0.9
    for remedy in recommendation.remedies:
        assert remedy.step_s < recommendation.step_s


def test_an_obstacle_is_judged_by_the_links_not_by_devices_that_limit_too() -> None:
    figures = {"compute": 0.5, "wire": 0.2, "server": 0.1, "relays": 0.0, "latency": 0.3}
    half = Forecast(
        candidate=P2P,
        step_s=1.0,
        throughput=1.0,
        efficiency=0.6,
        compute_s=0.6,
        wire_s=0.9,
        server_s=0.1,
        relays_s=0.0,
        saved_s=figures,  # type: ignore[arg-type]
        limited_by="compute",
    )
    assert obstacle_of(half) == "latency"


# Compression.
def offered(recommendation: Recommendation) -> dict[str, Compressed]:
    found = (remedy.compressed for remedy in recommendation.remedies)
    return {made.compression: made for made in found if made is not None}


def test_codecs_are_offered_where_the_wire_is_too_slow() -> None:
    made = recommended(rate_bits_per_s=0.4 * GBIT)
    auto = offered(made)["auto"]
    assert auto.candidate == P2P
    assert auto.limit_s <= auto.step_s < made.step_s / 1.1
    assert auto.step_s <= 1.05 * 0.14
    assert auto.code == 'foreprop.parallelize(model, optimizer, compression="auto")'
    assert f"{auto.code} would give" in text(made)
    assert auto.shares in text(made)
    assert "Not exact: " in text(made)
    assert auto.not_exact
    assert "As good as exact in short trainings" in auto.accuracy
    assert auto.accuracy in text(made)


def test_the_exact_codec_comes_first_and_says_that_it_is() -> None:
    made = recommended(rate_bits_per_s=0.03 * GBIT)
    codecs = offered(made)
    assert list(codecs) == ["lossless", "auto", "dgc"]
    assert not codecs["lossless"].not_exact
    assert "The same bits as without." in text(made)
    assert codecs["lossless"].step_s > codecs["auto"].step_s > codecs["dgc"].step_s
    assert "DGC sends the largest 0.1%" in text(made)
    assert "Counted with 85% of the bytes left" in codecs["lossless"].accuracy
    assert codecs["dgc"].accuracy.startswith("Worse than exact in short trainings")
    assert all(codec.accuracy in text(made) for codec in codecs.values())


def test_no_codec_is_offered_that_is_not_worth_it_or_refused() -> None:
    assert offered(recommended(rate_bits_per_s=100 * GBIT)) == {}
    fast = recommended(rate_bits_per_s=1.2 * GBIT)
    assert "dgc" not in offered(fast)
    slow: dict[str, Any] = {"rate_bits_per_s": 0.1 * GBIT}
    assert offered(recommended(**slow, workers_per_node=2, local_aggregation=False)) == {}
    assert offered(recommended(**slow, bytes_per_elem=2)) == {}


def test_a_nodes_relays_encode_as_one_worker_would() -> None:
    alone, relayed = (
        offered(recommended(rate_bits_per_s=0.03 * GBIT, workers_per_node=count))
        for count in (1, 2)
    )
    assert list(alone) == list(relayed) == ["lossless", "auto", "dgc"]
    for name, made in relayed.items():
        relays_s = 9.6e6 * 2.4e-9
        assert alone[name].step_s <= made.step_s <= alone[name].step_s + relays_s
        assert made.kept_bytes == alone[name].kept_bytes


def test_what_waits_on_a_node_is_said() -> None:
    made = recommended(rate_bits_per_s=0.03 * GBIT)
    codecs = offered(made)
    assert codecs["lossless"].kept_bytes == 0
    assert codecs["dgc"].kept_bytes == pytest.approx(2 * 9.6e6, rel=0.01)  # momentum, and the sum
    assert "Each node keeps 19.2 MB from step to step." in text(made)


def test_rows_of_tables_take_the_exact_codec_only() -> None:
    slow: dict[str, Any] = {"rate_bits_per_s": 0.05 * GBIT, "profile": sparse_profile()}
    (lossless,) = offered(recommended(**slow)).values()
    assert lossless.compression == "lossless"
    assert not lossless.not_exact
    plain_s = candidate_step_s(setting(**slow), lossless.candidate)
    assert lossless.limit_s <= lossless.step_s < 0.9 * plain_s


def test_dedicated_servers_send_by_codecs_too() -> None:
    made = recommended(rate_bits_per_s=0.1 * GBIT, servers=(4,))
    assert made.candidate.servers == 4
    auto = offered(made)["auto"]
    assert auto.candidate == made.candidate
    assert "dedicated_servers=4, compression=" in auto.code
    assert auto.limit_s <= auto.step_s < made.step_s / 2
