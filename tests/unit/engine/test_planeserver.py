"""A server's machine beside the plane, which may be ahead of what reaches the machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from foreprop.core.closing import AllMembers
from foreprop.core.frames import ValueArrived
from foreprop.core.slicing import Slice
from foreprop.core.wire import Flag
from foreprop.engine.planeserver import PlaneServer
from foreprop.errors import RemoteProtocolError


def server(seen: list[tuple[int, int, Any, Any, dict[int, int]]]) -> PlaneServer:
    plane: Any = SimpleNamespace(snapshot=lambda index: seen)
    slices = [Slice(0, 0, 0, 4, 0), Slice(1, 1, 0, 4, 0)]
    names = ["first", "second"]
    return PlaneServer(
        plane, slices, index=0, workers=2, order="priority", names=names, closing=AllMembers
    )


@pytest.mark.parametrize("done", [(-1, 0), (1, 0)])
def test_values_may_come_after_a_look_at_what_was_pushed_behind_them(done: tuple[int, int]) -> None:
    """A machine that reads each frame in turn takes that for values that are late."""
    machine = server([(1, 0, done, (2, 0), {0: int(Flag.GRADIENT)})])
    assert machine.incomplete()
    machine.handle(ValueArrived(0, 1, 0, 0))
    machine.incomplete()
    with pytest.raises(RemoteProtocolError, match="values for slice 1 of second came"):
        machine.handle(ValueArrived(0, 1, 0, 0))
