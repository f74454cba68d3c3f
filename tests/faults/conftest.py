"""What comes in time is measured where nothing else keeps the processors: in `make test-all`."""

from __future__ import annotations

import pytest

from tests.faults.lost_peers import Soon


def pytest_itemcollected(item: pytest.Item) -> None:
    """A long test that bounds how long something takes runs alone."""
    if "soon" in getattr(item, "fixturenames", ()) and item.get_closest_marker("long"):
        item.add_marker(pytest.mark.alone)


@pytest.fixture
def soon(request: pytest.FixtureRequest) -> Soon:
    """Whether something took less than so many seconds; in a test of `make test`, always."""
    measures = request.node.get_closest_marker("alone") is not None
    return lambda took_s, limit_s: not measures or took_s < limit_s
