"""What `foreprop bench codecs` computes of its times, and that it measures every codec."""

from __future__ import annotations

import pytest

from foreprop.core.codecfacts import CODEC_NAMES, LAB_CODECS
from foreprop_lab.benchmarks.codecs import NAMES, CodecCost, measure_codecs


def test_all_codecs_are_measured() -> None:
    costs = measure_codecs(slice_elems=2000, slices=3, rounds=2)
    assert [cost.name for cost in costs] == list(NAMES)
    assert {name.partition(":")[0] for name in NAMES} | {"none"} == {*CODEC_NAMES, *LAB_CODECS}
    assert all(cost.encode_s_per_gb >= 0 and cost.decode_s_per_gb >= 0 for cost in costs)
    sizes = {cost.name: cost.bytes_per_elem for cost in costs}
    assert sizes["bf16"] == 2.0
    assert 3.0 < sizes["lossless"] < 3.6  # of normal numbers the exponents shrink
    assert sizes["topk:0.01"] == 8 * 20 / 2000


def test_the_rate_from_which_a_codec_does_not_pay() -> None:
    """Sending half the bytes of a GB saves 4 Gbit; at 2 s for it that is 2 Gbit/s."""
    cost = CodecCost("half", 2.0, encode_s_per_gb=1.5, decode_s_per_gb=0.5)
    assert cost.worth_below_bits_per_s == pytest.approx(2e9)
    gigabit, rate = 8e9, cost.worth_below_bits_per_s
    assert gigabit / rate == pytest.approx(gigabit * 0.5 / rate + 2.0)
