"""What survivors of a lost peer must have said."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.faults.faults import EventInjector
from tests.process.harness import Run, Zygote, workers
from tests.process.train_script import Scenario
from tests.tiers import long_cases

TOLD_WITHIN_S = 5.0
STEPS = 200
Soon = Callable[[float, float], bool]
"""Of seconds and a limit: see conftest.py."""


def often(cases: Iterable[str], *names: str) -> list[Any]:
    """These of a test's cases after every change, and the others when time is there."""
    return [*names, *long_cases(*[name for name in cases if name not in names])]


def ranks(
    zygote: Zygote, folder: Path, size: int, told: Scenario, *, local_size: int = 1, fork: int = 0
) -> AbstractContextManager[Run]:
    """As `workers`, whose processes end faster."""
    script = Path(__file__).with_name("train_and_end.py")
    return workers(zygote, folder, size, told, local_size=local_size, fork=fork, script=script)


def scenario(injector: EventInjector, **more: Any) -> Scenario:
    return Scenario(**{"steps": STEPS, "faults": tuple(injector.plan), "pause_s": 0.02, **more})


def check_told(run: Run, since_s: float, survivors: list[int], names: str, soon: Soon) -> None:
    """Every survivor raised in time, and its message names whom, stage, step and parameter."""
    results = run.results()
    for rank in survivors:
        result = results[rank]
        assert result.get("error") == "PeerLost", f"rank {rank}: {result}\n{run.output()}"
        took_s = result["at_s"] - since_s
        assert soon(took_s, TOLD_WITHIN_S), f"rank {rank}: {result}\n{run.output()}"
        assert re.search(names, result["message"]), f"rank {rank}: {result}"
        check_place(result["message"])


def check_place(message: str) -> None:
    assert re.search(r"stage \w+", message), message
    assert re.search(r"step \d+", message), message
    assert re.search(r"\b[02]\.(weight|bias)\b", message), message
