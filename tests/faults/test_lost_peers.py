"""Workers and servers that die: everybody else says who it was, where, and soon."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.faults.faults import EventInjector, Phase
from tests.process.harness import Run, Zygote, workers
from tests.process.train_script import Scenario

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]

TOLD_WITHIN_S = 5.0
STEPS = 40


def scenario(injector: EventInjector, **more: Any) -> Scenario:
    return Scenario(**{"steps": STEPS, "faults": tuple(injector.plan), "pause_s": 0.02, **more})


def check_told(
    run: Run, fault: dict[str, Any], survivors: list[int], names: str, kinds: set[str]
) -> None:
    """Every survivor raised in time, and its message names whom, stage, step and parameter."""
    results = run.results()
    assert set(results) >= set(survivors), run.output()
    for rank in survivors:
        result = results[rank]
        assert result.get("error") in kinds, f"rank {rank}: {result}\n{run.output()}"
        told_after_s = result["at_s"] - fault["at_s"]
        assert told_after_s < TOLD_WITHIN_S, f"rank {rank}: {result}\n{run.output()}"
        message = result["message"]
        assert re.search(names, message), message
        assert re.search(r"stage \w+", message), message
        assert re.search(r"step \d+", message), message
        assert re.search(r"\b[02]\.(weight|bias)\b|was complete", message), message


@pytest.mark.parametrize("phase", ["forward", "backward", "between"])
def test_a_killed_worker_is_named_by_all_others(
    zygote: Zygote, tmp_path: Path, phase: Phase
) -> None:
    injector = EventInjector(tmp_path).at(rank=1, step=3, phase=phase).kill()
    with workers(zygote, tmp_path, 3, scenario(injector)) as run:
        run.wait(30)
        (fault,) = injector.fired()
        assert (fault["phase"], run.codes()[1]) == (phase, -9)
        check_told(run, fault, [0, 2], r"rank 1 is gone", {"PeerLost"})
        run.check_nothing_left()
