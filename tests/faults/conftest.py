"""What comes in time is measured where nothing else keeps the processors: in `make test-all`."""

from __future__ import annotations

import pytest

from tests.faults.lost_peers import Soon


@pytest.fixture
def soon(request: pytest.FixtureRequest) -> Soon:
    """Whether something took less than so many seconds; in a test that is not `long`, always."""
    measures = request.node.get_closest_marker("long") is not None
    return lambda took_s, limit_s: not measures or took_s < limit_s
