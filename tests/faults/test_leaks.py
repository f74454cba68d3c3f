"""Threads, descriptors and children after a session equal those before, however it ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from foreprop.cluster.world import World
from tests.faults import endings
from tests.faults.endings import check_nothing_left, orderly
from tests.process.harness import Zygote, running
from tests.process.train_script import Scenario
from tests.tiers import long_cases


@pytest.mark.parametrize(
    "work",
    [
        *[orderly, endings.raising, endings.cut, endings.refused],
        *long_cases(endings.paced, endings.real_servers, endings.real_servers_failing),
    ],
    ids=lambda work: work.__name__,
)
def test_nothing_is_left(work: Callable[[World], None]) -> None:
    check_nothing_left(work)


@pytest.mark.process
def test_nothing_is_left_of_a_server_in_another_process(zygote: Zygote, tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.start(zygote, run.environment(Scenario()), script=Path(endings.__file__))
        run.wait()
        assert "nothing is left" in run.output(), run.output()
        run.check_nothing_left()


@pytest.mark.parametrize("sessions", [3, *long_cases(15)])
def test_many_sessions_one_after_another(sessions: int) -> None:
    check_nothing_left(orderly, times=sessions, local_size=1)
