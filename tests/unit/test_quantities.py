"""Rates, times and ranges as people write them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raised import error_of

from foreprop.errors import ConfigError
from foreprop.quantities import (
    counted,
    maybe_ends,
    parse_count,
    parse_counts,
    parse_rate,
    parse_time,
    rate_text,
    short,
    three_digits,
    time_text,
)

RATES = [
    ("10Gbit", 10e9),
    ("800Mbit", 800e6),
    ("2.5 Gbit/s", 2.5e9),
    (" 10gbit ", 10e9),
    (".5kbit", 500.0),
    ("7bit", 7.0),
    ("1Tbit", 1e12),
    ("10Gbps", 10e9),
    ("10 GBPS", 10e9),
    ("25G", 25e9),
    ("2.5 Gb/s", 2.5e9),
    ("800 mbps", 800e6),
]


def test_rates() -> None:
    for text, bits_per_s in RATES:
        assert parse_rate("rate", text) == pytest.approx(bits_per_s), text


TIMES = [
    ("50us", 50e-6),
    ("50\u00b5s", 50e-6),
    ("50\u03bcs", 50e-6),
    ("180ms", 0.18),
    ("1.5s", 1.5),
    ("0s", 0.0),
    ("3 ns", 3e-9),
]


def test_times() -> None:
    for text, seconds in TIMES:
        assert parse_time("latency", text) == pytest.approx(seconds), text


NO_RATES = ["", "10", "Gbit", "10GB", "10GB/s", "9Gbpss", "-1Gbit", "1e9bit", "1,5Gbit"]


def test_a_rate_that_is_none_names_field_value_and_form() -> None:
    for text in NO_RATES:
        said = error_of(ConfigError, parse_rate, "rate", text)
        assert re.search(rf"rate is {re.escape(repr(text))}; .* as 10Gbit or 800Mbit", said)


NO_TIMES = ["", "180", "3min", "-1s", "1.5.s", "10Gbit", "nans", "\u0663s"]


def test_a_time_that_is_none_names_field_value_and_form() -> None:
    for text in NO_TIMES:
        said = error_of(ConfigError, parse_time, "compute", text)
        assert re.search(r"compute is '.*'; .* as 50us, 180ms or 1.5s", said)


def test_counts() -> None:
    assert parse_counts("servers", "2") == (2,)
    assert parse_counts("servers", "0..3") == (0, 1, 2, 3)
    assert parse_counts("servers", "4, 0,2,2") == (0, 2, 4)


NO_COUNTS = [
    ("", "servers is ''; it must be a whole number"),
    ("two", "servers is 'two'; it must be a whole number"),
    ("-1", "servers is '-1'; it must be a whole number"),
    ("1.5", "servers is '1.5'"),
    ("..3", "servers is ''"),
    ("3..3", "from the smaller to the larger"),
    ("8..0", "from the smaller to the larger"),
    ("0..64", "at most 64 values"),
]


def test_counts_that_are_none_are_told() -> None:
    for text, told in NO_COUNTS:
        assert told in error_of(ConfigError, parse_counts, "servers", text)


def test_a_range_has_both_ends_with_their_units() -> None:
    assert maybe_ends("rate", "800Mbit..1Gbit", parse_rate) == (800e6, 1e9)
    assert maybe_ends("nodes", "2..64", parse_count) == (2, 64)
    assert maybe_ends("rate", "1Gbit", parse_rate) is None
    with pytest.raises(ConfigError, match=r"rate is '1'"):
        maybe_ends("rate", "1..100Gbit", parse_rate)


RATES_AS_TEXT = [
    (10e9, "10 Gbit/s"),
    (1.5e9, "1.5 Gbit/s"),
    (999e6, "999 Mbit/s"),
    (12.0, "12 bit/s"),
]


def test_rates_as_text() -> None:
    for value, text in RATES_AS_TEXT:
        assert rate_text(value) == text


TIMES_AS_TEXT = [
    (0.18, "180 ms"),
    (1.5971, "1.6 s"),
    (50e-6, "50 us"),
    (0.0, "0 s"),
    (0.99996, "1 s"),
]


def test_times_as_text() -> None:
    for value, text in TIMES_AS_TEXT:
        assert time_text(value) == text


def test_three_digits_and_no_exponent() -> None:
    assert [three_digits(v) for v in (0.0123456, 9.0, 43.04, 123.4, 98765.4)] == [
        "0.0123",
        "9.00",
        "43.0",
        "123",
        "98765",
    ]
    assert [short(v) for v in (9.0, 100.0, 0.5)] == ["9", "100", "0.5"]


@given(st.floats(min_value=1.0, max_value=1e13))
def test_a_rate_that_was_written_is_read_back_to_three_digits(bits_per_s: float) -> None:
    assert parse_rate("rate", rate_text(bits_per_s)) == pytest.approx(bits_per_s, rel=0.006)


@given(st.floats(min_value=1e-8, max_value=1e6))
def test_a_time_that_was_written_is_read_back_to_three_digits(seconds: float) -> None:
    assert parse_time("time", time_text(seconds)) == pytest.approx(seconds, rel=0.006)


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "server", "0 servers"),
        (1, "server", "1 server"),
        (2, "server", "2 servers"),
        (1, "batch", "1 batch"),
        (10_000, "batch", "10,000 batches"),
    ],
)
def test_one_is_no_plural(count: int, noun: str, text: str) -> None:
    assert counted(count, noun) == text
