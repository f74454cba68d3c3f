"""What survivors of a lost peer must have said."""

from __future__ import annotations

import re
from typing import Any

from tests.faults.faults import EventInjector
from tests.process.harness import Run
from tests.process.train_script import Scenario

TOLD_WITHIN_S = 5.0
STEPS = 200


def scenario(injector: EventInjector, **more: Any) -> Scenario:
    return Scenario(**{"steps": STEPS, "faults": tuple(injector.plan), "pause_s": 0.02, **more})


def check_told(run: Run, since_s: float, survivors: list[int], names: str) -> None:
    """Every survivor raised in time, and its message names whom, stage, step and parameter."""
    results = run.results()
    for rank in survivors:
        result = results[rank]
        assert result.get("error") == "PeerLost", f"rank {rank}: {result}\n{run.output()}"
        assert result["at_s"] - since_s < TOLD_WITHIN_S, f"rank {rank}: {result}\n{run.output()}"
        assert re.search(names, result["message"]), f"rank {rank}: {result}"
        check_place(result["message"])


def check_place(message: str) -> None:
    assert re.search(r"stage \w+", message), message
    assert re.search(r"step \d+", message), message
    assert re.search(r"\b[02]\.(weight|bias)\b", message), message
