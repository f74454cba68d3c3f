"""Cutting a parameter into more slices gives its device no more to do."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.cluster import worlds
from tests.lagging import slicecost
from tests.lagging.device import DEVICE
from tests.tiers import long_cases


@pytest.mark.parametrize("slices", [slicecost.MANY, *long_cases(slicecost.FEW)])
def test_calls_of_the_device_are_the_parameters_and_not_the_slices(slices: int) -> None:
    found = slicecost.measure(DEVICE, slices, steps=1, world=worlds(1)[0])
    each = {
        "current_stream": 2,  # where the gradient was computed, where the value is used
        "stream": 1,
        "Event": 2,  # it is computed; it is copied
        "Event.record": 2,
        "Event.wait": 1,
        "Event.synchronize": 1,
    }
    assert found.calls == Counter({name: n * slicecost.PARAMETERS for name, n in each.items()})
    assert found.cpu_s["foreprop-stage"] > 0


@pytest.mark.long
def test_the_command_tells_what_each_thread_uses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # as ranks of other tests, with its server's threads in this process: it starts at once
    monkeypatch.setattr(slicecost, "lonely_world", lambda: worlds(1)[0])
    assert slicecost.main(["--rounds", "1", "--steps", "1"]) == 0
    told = capsys.readouterr().out
    threads = {tuple(line.split()[:2]) for line in told.splitlines() if "per slice" in line}
    moving = {"MainThread", "foreprop-send-0", "foreprop-receive-0"}
    on_host, on_device = ({name for place, name in threads if place == p} for p in slicecost.PLACES)
    assert moving <= on_host
    assert on_device - on_host == {"foreprop-stage"}
    assert told.count("calls of the device per parameter") == 2
