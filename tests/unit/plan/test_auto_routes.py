"""Which way an embedding goes, and what is told about it."""

from __future__ import annotations

from foreprop.core.manifest import ParameterInfo
from foreprop.core.parallax import Topology
from foreprop.plan.planning import choose_routes, describe_routes

MEGABYTE = ParameterInfo(name="words.weight", shape=(2500, 100), dtype="float32", group=0)


def test_the_choices_are_told_in_a_table() -> None:
    dense = ParameterInfo(name="out.weight", shape=(10, 100), dtype="float32", group=0)
    unmeasured = ParameterInfo(name="bias", shape=(10,), dtype="float32", group=0)
    shares = {"words.weight": 0.01, "out.weight": 1.0}
    choices = choose_routes([MEGABYTE, dense, unmeasured], shares, Topology(8))
    assert [(c.info.name, c.row_wise) for c in choices] == [
        ("words.weight", True),
        ("out.weight", False),
    ]
    lines = describe_routes(choices, Topology(8)).splitlines()
    assert (
        lines[0] == "embeddings, with bytes per step over the busiest link, each way (8 workers):"
    )
    assert [line.split() for line in lines[1:]] == [
        ["parameter", "size", "alpha", "choice", "servers", "all-gather", "all-reduce"],
        "words.weight 1 MB 0.0100 servers, by rows 17.9 kB 71.4 kB 1.75 MB".split(),
        "out.weight 4 kB 1.0000 all-reduce 7.14 kB 28.6 kB 7 kB".split(),
    ]


def test_a_node_that_each_worker_pushes_from_and_halved_bytes_count() -> None:
    """Four workers' rows cross the link of each of two nodes; a ring passes it once."""
    each = Topology(2, 4, local_aggregation=False)
    shares = {"words.weight": 0.5}
    (together,) = choose_routes([MEGABYTE], shares, Topology(2, 4))
    (apart,) = choose_routes([MEGABYTE], shares, each)
    (halved,) = choose_routes([MEGABYTE], shares, each, "bfloat16")
    assert (together.row_wise, apart.row_wise, halved.row_wise) == (True, False, False)
    assert halved.moved.all_reduce == apart.moved.all_reduce / 2
    assert halved.moved.servers > apart.moved.servers / 2  # numbers of rows are not halved
