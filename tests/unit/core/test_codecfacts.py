"""What planners know of codecs, beside the formats' own arithmetic and draws of normal numbers."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable

import pytest

from foreprop.core.codecfacts import AUTO_CODECS, CODEC_NAMES, UNCODED, codec_named
from foreprop.errors import ConfigError
from foreprop.features.compression.codecs import make_for_replies

ELEMS = 51_200
"""Four hundred blocks."""


BYTES = [
    ("none", 4 * ELEMS, 4 * ELEMS),
    ("lossless:0.5", 2 * ELEMS, 2 * ELEMS),
    ("bf16", 2 * ELEMS, 2 * ELEMS),
    ("int8", ELEMS + 1600, ELEMS + 1600),  # a scale of four bytes for each block
    ("int4", ELEMS // 2 + 1600, ELEMS // 2 + 1600),
    ("int2", ELEMS // 4 + 1600, ELEMS // 4 + 1600),
    ("topk:0.01", 512 * 8, 4 * 512 * 8),  # the union of four ranks
    ("topk:0.5", 25_600 * 8, 4 * ELEMS),  # all of them: as it is
    ("randomk:0.01", 512 * 4, 512 * 4),  # all draw the same places
    ("dgc", 52 * 8, 4 * 52 * 8),
    ("dgc:0.25", 12_800 * 8, 4 * ELEMS),
]


def test_bytes_both_ways() -> None:
    for name, push_bytes, reply_bytes in BYTES:
        coded = codec_named(name).coded(ELEMS, ranks=4)
        assert (coded.push_bytes, coded.reply_bytes) == (push_bytes, reply_bytes), name


@pytest.mark.parametrize("name", ["int8", "int2", "topk", "dgc"])
def test_answers_are_those_of_a_server(name: str) -> None:
    expected = make_for_replies(name, 4).most_bytes(ELEMS)
    found = codec_named(name).coded(ELEMS, ranks=4).reply_bytes
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", AUTO_CODECS)
def test_raw_answers_are_as_they_are_but_for_exact_codecs(name: str) -> None:
    usual = codec_named(name)
    raw, coded = (each.coded(ELEMS, ranks=4) for each in (usual._replace(raw_answers=True), usual))
    assert raw.push_bytes == coded.push_bytes
    assert raw.reply_bytes == (coded.reply_bytes if usual.facts.exact else 4 * ELEMS)


def test_no_codec_makes_a_large_slice_larger() -> None:
    for name in CODEC_NAMES:
        coded = codec_named(name).coded(ELEMS, ranks=64)
        assert 0 < coded.push_bytes <= 4 * ELEMS, name
        assert 0 < coded.reply_bytes <= 4 * ELEMS, name
        assert codec_named(name).coded(0, ranks=4) == UNCODED, name


def test_a_core_that_is_twice_as_fast_needs_half_the_time() -> None:
    usual, fast = (codec_named("int8").coded(ELEMS, ranks=4, cpu=cpu) for cpu in (1.0, 2.0))
    assert fast.encode_s == usual.encode_s / 2 > 0
    assert fast.decode_s == usual.decode_s / 2 > 0


def test_what_is_called_exact_loses_nothing_and_the_rest_does() -> None:
    for codec in map(codec_named, CODEC_NAMES):
        assert codec.facts.exact == (codec.loss == 0) == (codec.name in ("none", "lossless"))


def test_auto_has_its_codecs_in_the_order_of_loss() -> None:
    losses = [codec_named(name).loss for name in AUTO_CODECS]
    assert losses == sorted(losses)


def test_a_session_is_not_told_what_lossless_saves() -> None:
    assert codec_named("lossless:0.7").session_name == "lossless"
    assert codec_named("topk:0.1").session_name == "topk:0.1"


@pytest.mark.parametrize("name", ["int7", "int8:4", "none:1", "", "topk:", "dgc:0", "topk:1.5"])
def test_a_wrong_name_says_what_there_is(name: str) -> None:
    with pytest.raises(ConfigError, match=f"codec '{name}'") as raised:
        codec_named(name)
    allowed = ("topk:R", "at most 1")
    assert any(text in str(raised.value) for text in allowed)


# Losses of the table, from draws.
def _bf16(value: float) -> float:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    (back,) = struct.unpack("<f", struct.pack("<I", rounded))
    return float(back)


def _each(round_one: Callable[[float], float]) -> Callable[[list[float]], list[float]]:
    return lambda block: [round_one(value) for value in block]


def _to_levels(most: int) -> Callable[[list[float]], list[float]]:
    def rounded(block: list[float]) -> list[float]:
        scale = max(map(abs, block)) / most
        return [round(value / scale) * scale for value in block]

    return rounded


def _to_three_levels(block: list[float]) -> list[float]:
    sigma = math.sqrt(math.pi / 2) * sum(map(abs, block)) / len(block)
    scale = 1.224 * sigma
    return [max(-1, min(1, round(value / scale))) * scale for value in block]


@pytest.mark.parametrize(
    ("name", "decoded"),
    [
        ("bf16", _each(_bf16)),
        ("fp16", _each(lambda value: struct.unpack("<e", struct.pack("<e", value))[0])),
        ("int8", _to_levels(127)),
        ("int4", _to_levels(7)),
        ("int2", _to_three_levels),
    ],
)
def test_losses_are_those_of_normal_gradients(
    name: str, decoded: Callable[[list[float]], list[float]]
) -> None:
    draws = random.Random(0)
    lost = whole = 0.0
    for _ in range(120):
        block = [draws.gauss(0, 1) for _ in range(128)]
        lost += sum((a - b) ** 2 for a, b in zip(block, decoded(block), strict=True))
        whole += sum(value**2 for value in block)
    assert codec_named(name).loss == pytest.approx(lost / whole, rel=0.1)
