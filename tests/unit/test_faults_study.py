"""What `foreprop lab faults` makes of the moments at which workers ended their steps."""

from __future__ import annotations

from itertools import pairwise

import pytest

from experiments.faults.run import FaultSetting, Steps, Trial, usual_faults
from foreprop.errors import ConfigError

PAUSE_S = 12.0


def _trial(*, silent_after: tuple[float, float]) -> Trial:
    """Four workers of two steps a second; nobody ends one in that time; rank 3 dies at the end."""
    faults = usual_faults(4, PAUSE_S)
    begin, end = silent_after
    moments = [i / 2 for i in range(156)]
    workers = []
    for rank in range(4):
        last = faults[-1].at_s if rank == 3 else 100.0
        ends = [m + 0.01 * rank for m in moments if not begin <= m < end and m < last]
        workers.append(Steps(rank=rank, ends_s=ends))
    return Trial(version="", workers=workers, faults=faults, length_s=78.0)


def test_the_time_without_a_step_is_that_of_the_others() -> None:
    stop = usual_faults(4, PAUSE_S)[1]
    trial = _trial(silent_after=(stop.at_s + 0.6, stop.at_s + 4.0))
    downs = {fault.name: trial.down_s(fault, until) for fault, until in trial.windows()}
    assert downs["stop"] == pytest.approx(3.5, abs=0.05)
    assert downs["kill"] < 0.6
    assert downs["cut"] < 0.6


def test_the_pace_falls_by_who_is_gone() -> None:
    trial = _trial(silent_after=(0.0, 0.0))
    killed = usual_faults(4, PAUSE_S)[-1]
    assert trial.pace(1.25, 11.25) == pytest.approx(8.0, rel=0.05)
    assert trial.pace(killed.at_s + 1.25, 77.25) == pytest.approx(6.0, rel=0.05)


def test_faults_come_one_after_another_and_spare_the_rendezvous() -> None:
    for nodes in (3, 4, 9):
        faults = usual_faults(nodes, PAUSE_S)
        assert [fault.name for fault in faults] == ["slow link", "stop", "cut", "kill"]
        for fault, after in pairwise(faults):
            assert fault.at_s + fault.for_s < after.at_s
        assert all(0 < fault.node < nodes for fault in faults)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"nodes": 2}, "--nodes is 2"),
        ({"silent_s": 3.0}, "--silent is 3 s; stops and cuts take 4 s"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        FaultSetting(**wrong)  # type: ignore[arg-type]
