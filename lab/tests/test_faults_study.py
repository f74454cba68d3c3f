"""What `foreprop lab faults` makes of the moments at which workers ended their steps."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from foreprop.errors import ConfigError, PeerLost
from foreprop.tools.cli.output import print_table
from foreprop_lab.experiments.faults.chart import chart_of
from foreprop_lab.experiments.faults.command import table_of
from foreprop_lab.experiments.faults.node import serve_node
from foreprop_lab.experiments.faults.run import _Lab
from foreprop_lab.experiments.faults.systems import FaultSystem, system_of
from foreprop_lab.experiments.faults.trial import (
    KILL,
    P3,
    REJOIN,
    TORCHFT,
    Fault,
    FaultSetting,
    Steps,
    Trial,
    usual_faults,
)
from foreprop_lab.lab.cluster import Cluster

PAUSE_S = 12.0


def _fault(name: str) -> Fault:
    (found,) = (fault for fault in usual_faults(4, PAUSE_S) if fault.name == name)
    return found


def _trial(
    *, silent_after: tuple[float, float] = (0.0, 0.0), back_s: float = 1e9, system: str = P3
) -> Trial:
    """Four workers of two steps a second; nobody ends one in that time.

    Rank 3 is killed, and is back that many seconds after it has started again.
    """
    begin, end = silent_after
    gone, back = _fault(KILL).at_s, _fault(REJOIN).at_s + back_s
    moments = [i / 2 for i in range(190)]
    workers = []
    for rank in range(4):
        ends = [m + 0.01 * rank for m in moments if not begin <= m < end]
        if rank == 3:
            ends = [m for m in ends if m < gone or m >= back]
        workers.append(Steps(rank=rank, ends_s=ends))
    faults = usual_faults(4, PAUSE_S)
    return Trial(system=system, version="1", workers=workers, faults=faults, length_s=95.0)


def test_the_time_without_a_step_is_that_of_the_others() -> None:
    stop = _fault("stop")
    trial = _trial(silent_after=(stop.at_s + 0.6, stop.at_s + 4.0))
    downs = {fault.name: trial.down_s(fault, until) for fault, until in trial.windows()}
    assert downs["stop"] == pytest.approx(3.5, abs=0.05)
    assert downs["kill"] < 0.6
    assert downs["cut"] < 0.6


def test_the_pace_falls_by_the_workers_that_are_gone() -> None:
    trial = _trial()
    assert trial.pace(1.25, 11.25) == pytest.approx(8.0, rel=0.05)
    assert trial.pace(_fault(KILL).at_s + 1.25, 77.25) == pytest.approx(6.0, rel=0.05)


def test_a_worker_that_rejoins_is_back_with_its_first_step() -> None:
    """The step that it has ended when it began is none of them."""
    rejoin = _fault(REJOIN)
    trial = _trial(back_s=7.2)
    assert trial.back_s(rejoin) == pytest.approx(7.53)
    assert trial.pace(rejoin.at_s + 8.25, 94.25) == pytest.approx(8.0, rel=0.05)
    assert _trial().back_s(rejoin) is None


def test_the_table_and_the_chart_have_all_systems(capsys: pytest.CaptureFixture[str]) -> None:
    trials = [_trial(back_s=7.2), _trial(system=TORCHFT, silent_after=(60.2, 69.0))]
    print_table(Console(width=200), table_of(trials))
    printed = capsys.readouterr().out.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ")
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert any(line.startswith("p3 1 rejoin") and "7.53 s" in line for line in lines)
    assert any(line.startswith("torchft 1 rejoin") and "it made none" in line for line in lines)
    assert any(line.startswith("torchft 1 kill 8.98 s") for line in lines)
    chart = chart_of(trials)
    assert list(chart.systems) == ["p3-elastic", "torchft"]
    figure = Figure()
    chart.whole(figure)
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.get_lines()] == ["p3-elastic", "torchft"]
    heights = [max(line.get_ydata()) for line in axes.get_lines()]
    assert heights == [8.0, 8.0]


def test_faults_come_one_after_another_and_spare_the_rendezvous() -> None:
    for nodes in (3, 4, 9):
        faults = usual_faults(nodes, PAUSE_S)
        assert [fault.name for fault in faults] == [
            "slow link",
            "stop",
            "cut",
            "kill",
            "rejoin",
        ]
        for fault, after in pairwise(faults):
            assert fault.at_s + fault.for_s < after.at_s
        assert all(0 < fault.node < nodes for fault in faults)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"nodes": 2}, "--nodes is 2"),
        ({"silent_s": 3.0}, "--silent is 3 s; stops and cuts take 4 s"),
        ({"systems": ("p3", "ddp")}, "--systems has 'ddp'; it must be one of"),
        ({"systems": ()}, "--systems has ''; it must be one of"),
        ({"systems": (TORCHFT,)}, "--systems has torchft, which needs --torchft-python"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        FaultSetting(**wrong)  # type: ignore[arg-type]


# What a worker is told.
def _p3(folder: Path) -> FaultSystem:
    return system_of(P3, FaultSetting(), folder)


def test_a_worker_that_rejoins_gets_the_servers_addresses(tmp_path: Path) -> None:
    system = _p3(tmp_path)
    first = system.environment(0, again=False)
    assert "FOREPROP_JOIN" not in first
    Path(first["FOREPROP_SERVERS_FILE"]).write_text("10.0.0.1:5\n10.0.0.2:6\n")
    again = system.environment(3, again=True)
    assert again["FOREPROP_JOIN"] == "10.0.0.1:5,10.0.0.2:6"
    assert again["FOREPROP_SERVERS_FILE"] != first["FOREPROP_SERVERS_FILE"]
    system.clear()
    with pytest.raises(PeerLost, match="rank 0 has not said where its servers are"):
        system.environment(3, again=True)


def test_a_worker_that_ends_at_the_start_is_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "import sys; print('there is no such model', flush=True); sys.exit(3)"
    system = replace(_p3(tmp_path), command=(sys.executable, "-S", "-c", said))
    ours, theirs = Pipe()

    def serve() -> None:
        with contextlib.suppress(EOFError):
            serve_node(0, theirs, system.setting.network)

    node = threading.Thread(target=serve)
    node.start()
    try:
        lab = _Lab(cast("Cluster", SimpleNamespace(connections=[ours])), system, nodes=1)
        lab.start()
        told = "rank 0 of p3 ended with exit code 3 after 0 steps; .*there is no such model"
        with pytest.raises(PeerLost, match=told):
            lab.wait_for_steps()
        monkeypatch.setattr("foreprop_lab.experiments.faults.run._REJOIN_S", 600.0)
        lab._rejoined_s = time.monotonic()
        lab.wait_for_rejoin(0)
    finally:
        ours.close()
        node.join()
        theirs.close()


def test_only_a_studys_own_files_are_removed(tmp_path: Path) -> None:
    for name in ("steps-0", "worker-0.log", "servers-0", "kept"):
        (tmp_path / name).touch()
    _p3(tmp_path).clear()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("python", "message"),
    [("/none/python", "which cannot be run: No such file"), (sys.executable, "No module named")],
)
def test_a_python_without_torchft_is_named(python: str, message: str, tmp_path: Path) -> None:
    setting = FaultSetting(systems=(TORCHFT,), torchft_python=Path(python))
    with pytest.raises(ConfigError, match=f"--torchft-python is {python}, .*{message}.*torchft==0"):
        system_of(TORCHFT, setting, tmp_path)
