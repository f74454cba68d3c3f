from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from raised import error_of

from foreprop.core.wire import HEADER_BYTES
from foreprop.errors import ConfigError
from foreprop.plan import limit
from foreprop.plan.profile import Profile, ProfiledArray, load_profile
from foreprop_lab.setting.labsetting import (
    LAUNCH_SHARE,
    SYSTEMS,
    LabSetting,
    launches_in,
    rate_for_balance,
    usual_compute_s,
)
from foreprop_lab.setting.links import LinkRate, carried_bytes

SETTING = LabSetting(profile=load_profile("resnet110_cifar"), systems=("p3", "ddp"))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"systems": ()}, "there are baseline|there are .*p3"),
    ({"systems": ("p3", "p4")}, r"systems has 'p4'; there are .*p3.*ddp-tuned.*mxnet-p3"),
    ({"systems": ("p3@0",)}, "systems has 'p3@0'"),
    ({"systems": ("p3@many",)}, "systems has 'p3@many'"),
    ({"systems": ("ddp@100",)}, "systems has 'ddp@100'"),
    ({"systems": ("p3", "ddp", "p3")}, "systems names one twice: p3, ddp, p3"),
    ({"systems": ("ring+int8",)}, r"systems has 'ring\+int8'"),
    ({"systems": ("p3+int9",)}, "compression names the codec 'int9'; there are none, lossless"),
    ({"systems": ("p3+",)}, "compression is ''"),
    ({"systems": ("ddp+int8",)}, r"ddp\+int8; after ddp\+ comes .*: fp16, powersgd:RANK"),
    ({"systems": ("ddp+powersgd:0",)}, r"ddp\+powersgd:0; after"),
    ({"systems": ("ddp",), "compression": "int9"}, "compression names the codec 'int9'"),
    ({"compression": "x*=int8"}, r"compression has the pattern 'x\*', which no array of"),
    ({"nodes": 1}, "nodes is 1; at least 2"),
    ({"nodes": 65}, "nodes is 65; at most 64"),
    ({"scale": 0}, "scale is 0; at least 1"),
    ({"iterations": 0}, "iterations is 0; at least 1"),
    ({"warm_up": -1}, "warm_up is -1; at least 0"),
    ({"slice_elems": 0}, "slice_elems is 0; at least 1"),
    ({"rate_bits_per_s": 1e9, "balance": 1.0}, "rate and balance are both given"),
    ({"jitter": 1.0}, "jitter is 1.0; it must be at least 0 and below 1"),
    ({"jitter": -0.1}, "jitter is -0.1"),
    (
        {"jitter": 0.2, "systems": ("mxnet-p3",), "mxnet_python": Path("python")},
        r"jitter is 0\.2; mxnet-\* can only be measured without",
    ),
    ({"compute_s": 0.0}, "compute_s is 0.0; it must be positive"),
    ({"compute_s": -1.0}, "compute_s is -1.0"),
    ({"compute_s": math.nan}, "compute_s is nan"),
    ({"compute_s": math.inf}, "compute_s is inf"),
    ({"rate_bits_per_s": 0.0}, "rate_bits_per_s is 0.0; it must be positive"),
    ({"rate_bits_per_s": math.inf}, "rate_bits_per_s is inf"),
    ({"balance": 0.0}, "balance is 0.0; it must be positive"),
    ({"balance": -2.0}, "balance is -2.0"),
    ({"launch_s": -8e-6}, "launch is -8e-06 s; it must be finite and at least 5 us"),
    ({"launch_s": 0.0}, "launch is 0 s; it must be finite and at least 5 us"),
    ({"launch_s": 4e-6}, "launch is 4e-06 s; it must be finite and at least 5 us"),
    ({"launch_s": math.nan}, "launch is nan s"),
    ({"launch_s": math.inf}, "launch is inf s"),
    ({"launch_s": 0.1}, r"launch is 100 ms, of which not one fits into 20% of any layer's pass"),
    ({"systems": ("mxnet-p3",)}, "mxnet_python"),
    ({"systems": ("p3", "mxnet-kvstore")}, "mxnet_python"),
]


def test_refuses_and_says_what_is_allowed() -> None:
    for changes, message in WRONG:
        assert re.search(message, error_of(ConfigError, replace, SETTING, **changes))


def test_every_system_can_be_chosen() -> None:
    setting = replace(SETTING, systems=SYSTEMS, mxnet_python=Path("/opt/mxnet/bin/python"))
    assert setting.systems == SYSTEMS


def test_a_system_may_have_slices_of_its_own() -> None:
    setting = replace(SETTING, systems=("p3", "p3@200000", "kvstore@64"), slice_elems=16_000)
    assert [setting.slice_elems_of(name) for name in setting.systems] == [1000, 12_500, 4]


def test_a_system_may_have_a_codec_of_its_own() -> None:
    systems = ("p3", "p3+none", "p3@25000+dgc:0.001", "slicing+auto:int8", "ddp", "ddp+powersgd:2")
    setting = replace(SETTING, systems=systems, compression="int8")
    found = [setting.codec_of(name) for name in systems]
    assert found == ["int8", None, "dgc:0.001", "auto:int8", None, "powersgd:2"]
    assert setting.slice_elems_of(systems[2]) == 25_000 // 16
    assert replace(SETTING, compression="none").codec_of("p3") is None


def test_slices_are_the_usual_ones_of_a_session_on_so_many_nodes() -> None:
    settings = [replace(SETTING, nodes=nodes, slice_elems=None) for nodes in (4, 16)]
    assert [s.unscaled_slice_elems for s in settings] == [50_000, 25_000]
    assert settings[0].slice_elems_of("p3") == 50_000 // 16


@pytest.mark.parametrize(("nodes", "scale", "packets"), [(16, 16, 4), (32, 16, 2), (4, 64, 2)])
def test_usual_slices_of_few_packets_fill_them(nodes: int, scale: int, packets: int) -> None:
    setting = replace(SETTING, nodes=nodes, scale=scale, slice_elems=None)
    elems = setting.slice_elems_of("p3")
    full_bytes = packets * limit.PACKET_BYTES
    assert full_bytes - 4 < HEADER_BYTES + 4 * elems <= full_bytes
    assert elems <= setting.scaled(setting.unscaled_slice_elems) < elems + limit.PACKET_BYTES / 4


@pytest.mark.parametrize(("nodes", "scale"), [(4, 16), (16, 4), (16, 1), (4, 1000)])
def test_usual_slices_of_many_packets_or_less_than_one_are_only_divided(
    nodes: int, scale: int
) -> None:
    setting = replace(SETTING, nodes=nodes, scale=scale, slice_elems=None)
    assert setting.slice_elems_of("p3") == setting.unscaled_slice_elems // scale


def test_slices_of_a_given_size_are_only_divided() -> None:
    setting = replace(SETTING, nodes=16, systems=("p3", "p3@12500"), slice_elems=25_000)
    assert [setting.slice_elems_of(name) for name in setting.systems] == [1562, 781]


@pytest.mark.parametrize("launch_s", [5e-6, 8e-6, 30e-6, 1e-3])
def test_layers_launch_what_fits_into_a_share_of_each_pass(launch_s: float) -> None:
    setting = replace(SETTING, launch_s=launch_s)
    for layer in setting.layers:
        for seconds in (layer.forward_s, layer.backward_s):
            count = launches_in(seconds, launch_s)
            assert count * launch_s <= LAUNCH_SHARE * seconds * (1 + 1e-9) < (count + 1) * launch_s
    passes = 2 * len(setting.layers)
    most_s = LAUNCH_SHARE * setting.compute_s
    assert most_s - passes * launch_s < setting.launching_s <= most_s * (1 + 1e-9)
    assert SETTING.launching_s == 0


def test_a_launch_that_fits_into_some_layers_only_is_launched_there() -> None:
    setting = replace(SETTING, launch_s=2e-3)
    counts = {launches_in(layer.backward_s, 2e-3) for layer in setting.layers}
    assert 0 in counts
    assert 0 < setting.launching_s < LAUNCH_SHARE * setting.compute_s


def test_rate_is_the_given_one() -> None:
    assert replace(SETTING, rate_bits_per_s=123e6).rate == 123e6


@pytest.mark.parametrize("balance", [None, 0.5, 2.0])
def test_rate_follows_from_the_balance(balance: float | None) -> None:
    setting = replace(SETTING, balance=balance)
    size_bytes = limit.model_bytes(setting.layers)
    wire_s = limit.wire_s(size_bytes, nodes=setting.nodes, rate_bits_per_s=setting.rate)
    assert wire_s / setting.compute_s == pytest.approx(balance or 1.0)


def test_limit_is_that_of_the_scaled_layers_at_the_rate() -> None:
    setting = replace(SETTING, balance=2.0, scale=4, nodes=3)
    layers = setting.profile.layers(scale=4, compute_s=setting.compute_s)
    expected = limit.limit_s(layers, nodes=3, rate_bits_per_s=setting.rate)
    assert setting.limit_s == expected > 2 * setting.compute_s


def test_sizes_are_scaled_but_never_nothing() -> None:
    assert replace(SETTING, scale=16).scaled(50_000) == 3125
    assert replace(SETTING, scale=10**6).scaled(50_000) == 1


def test_usual_compute_grows_with_slices_and_nodes() -> None:
    small, large = load_profile("resnet110_cifar"), load_profile("vgg19")
    assert usual_compute_s(small, 4) == usual_compute_s(small, 2) == 1.0
    assert usual_compute_s(large, 4) == pytest.approx(2.9, rel=0.05)  # 143.7 M by 50,000 and a few
    twice_the_slices = usual_compute_s(large, 16) / usual_compute_s(large, 4) / 4**1.25
    assert twice_the_slices == pytest.approx(2.0, rel=0.01)


def test_usual_compute_is_the_measured_one() -> None:
    array = ProfiledArray(name="a", shape=(10**7,), forward_s=0.5, backward_s=0.75)
    profile = Profile(name="mine", arrays=(array,), before_first_use_s=0.25)
    assert usual_compute_s(profile, 16) == 1.5


def test_the_limit_of_links_that_differ_is_that_of_the_better_placement() -> None:
    """A link of half the rate carries the model once, and not one and a half times."""
    settings: dict[str, Any] = {
        "profile": load_profile("resnet50"),
        "systems": ("p3",),
        "compute_s": 0.1,
    }
    rates = (LinkRate(node=3, factor=0.5),)
    uneven = LabSetting(**settings, balance=4.0, link_rates=rates, iterations=2)
    even = LabSetting(**settings, balance=4.0, iterations=2)
    assert uneven.limit_s == pytest.approx(even.limit_s * 4 / 3, rel=0.03)


def test_the_limit_with_a_slow_node_is_that_of_the_better_placement() -> None:
    """Where links are full, its server had better own less: its gradients are the last ones."""
    settings: dict[str, Any] = {
        "profile": load_profile("sockeye"),
        "systems": ("p3",),
        "compute_s": 0.1,
        "slow_nodes": 1,
        "slowdown": 0.5,
        "iterations": 8,
    }
    for balance, gains in [(1.0, False), (2.0, True)]:
        uneven = LabSetting(**settings, balance=balance)
        even_s = uneven._placed_limit_s(uneven.layers, ())
        spared_s = uneven._placed_limit_s(uneven.layers, (2917, 2917, 2917, 1250))
        assert (spared_s < even_s) == gains, (balance, spared_s, even_s)
        assert uneven.limit_s == min(spared_s, even_s)


@pytest.mark.parametrize(("nodes", "balance"), [(2, 0.05), (4, 1.0), (16, 20.0)])
def test_balance_and_rate_follow_from_each_other(nodes: int, balance: float) -> None:
    layers = SETTING.layers
    rate = rate_for_balance(layers, nodes=nodes, balance=balance)
    wire_s = limit.wire_s(limit.model_bytes(layers), nodes=nodes, rate_bits_per_s=rate)
    assert wire_s / limit.compute_s(layers) == pytest.approx(balance)


def test_what_an_interface_counts_of_frames() -> None:
    """Headers of 66 bytes for each packet, and for each acknowledgement one without data."""
    assert carried_bytes(0, 0) == 0
    assert carried_bytes(10, 10 * 64) == 640 + 66 * (
        10 + 5
    )  # two small ones are acknowledged together
    assert carried_bytes(10, 10 * 12_500) == 125_000 + 66 * 20  # handed down as one, and cut later
    whole = carried_bytes(10, 10 * 144_800)  # larger than the bucket: cut before
    assert whole == 1_448_000 + 66 * (10 * 100 + 10)
