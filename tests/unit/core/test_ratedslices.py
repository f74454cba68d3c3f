"""Slice sizes by rate: the table that docs/tuning.md has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.core.linkshares import slice_elems_at
from foreprop.core.slicing import LEAST_SLICE_ELEMS, usual_slice_elems

LARGE = 25_000_000
"""Elements, as ResNet-50 has."""


@pytest.mark.parametrize(
    ("rate_bits_per_s", "elems"),
    [
        (1e3, 12_500),
        (1e8, 12_500),
        (1e9, 25_000),
        (2.5e9, 50_000),
        (5e9, 100_000),
        (9.4e9, 200_000),
        (1e12, 200_000),
    ],
)
def test_a_slice_takes_a_link_about_as_long_whatever_its_rate(
    rate_bits_per_s: float, elems: int
) -> None:
    assert slice_elems_at(rate_bits_per_s, servers=4, elems=LARGE) == elems


def test_where_shares_are_uneven_there_are_more_slices_to_share() -> None:
    assert slice_elems_at(5e9, servers=4, elems=LARGE, uneven=True) == 50_000
    assert slice_elems_at(1e8, servers=4, elems=LARGE, uneven=True) == LEAST_SLICE_ELEMS


@given(
    rate_bits_per_s=st.floats(1.0, 1e13),
    servers=st.integers(1, 1000),
    elems=st.integers(0, 10**10),
    uneven=st.booleans(),
)
def test_slices_are_never_too_few_or_too_small(
    rate_bits_per_s: float, servers: int, elems: int, uneven: bool
) -> None:
    usual = usual_slice_elems(servers)
    found = slice_elems_at(rate_bits_per_s, servers=servers, elems=elems, uneven=uneven)
    faster = slice_elems_at(2 * rate_bits_per_s, servers=servers, elems=elems, uneven=uneven)
    assert LEAST_SLICE_ELEMS <= found <= faster <= 4 * usual
    assert found <= usual or elems // found >= 16 * servers
