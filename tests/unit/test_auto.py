"""Which way an embedding goes: Parallax's Table 3, and what is told about it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.auto.planning import choose_routes, describe_routes
from foreprop.core.manifest import ParameterInfo
from foreprop.core.parallax import prefers_servers, traffic

MEGABYTE = ParameterInfo(name="words.weight", shape=(2500, 100), dtype="float32", group=0)


def test_table_3() -> None:
    """W = 1 MB, alpha = 0.01, 8 workers."""
    moved = traffic(1_000_000, 0.01, 8)
    assert moved.servers == pytest.approx(20_000)
    assert moved.all_gather == pytest.approx(140_000)
    assert moved.all_reduce == pytest.approx(1_750_000)


@given(st.floats(0, 1), st.integers(2, 1000))
def test_servers_are_for_less_than_all_but_one_nth(alpha: float, workers: int) -> None:
    moved = traffic(1, alpha, workers)
    assert prefers_servers(alpha, workers) == (moved.servers < moved.all_reduce)
    assert moved.servers <= moved.all_gather
    if alpha < 0.49:
        assert prefers_servers(alpha, workers)


def test_one_worker_moves_nothing() -> None:
    assert traffic(1_000_000, 0.5, 1).all_reduce == 0
    assert not prefers_servers(0.5, 1)


def test_the_choices_are_told_in_a_table() -> None:
    dense = ParameterInfo(name="out.weight", shape=(10, 100), dtype="float32", group=0)
    unmeasured = ParameterInfo(name="bias", shape=(10,), dtype="float32", group=0)
    shares = {"words.weight": 0.01, "out.weight": 1.0}
    choices = choose_routes([MEGABYTE, dense, unmeasured], shares, 8)
    assert [(c.info.name, c.row_wise) for c in choices] == [
        ("words.weight", True),
        ("out.weight", False),
    ]
    lines = describe_routes(choices, 8).splitlines()
    assert lines[0] == "embeddings, with bytes per worker (of 8) and step:"
    assert [line.split() for line in lines[1:]] == [
        ["parameter", "size", "alpha", "choice", "servers", "all-gather", "all-reduce"],
        "words.weight 1 MB 0.0100 servers, by rows 20 kB 140 kB 1.75 MB".split(),
        "out.weight 4 kB 1.0000 all-reduce 8 kB 56 kB 7 kB".split(),
    ]
