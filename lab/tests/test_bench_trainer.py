"""``foreprop bench trainer``, tiny: every plane beside every kind of training thread."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from foreprop.errors import ConfigError
from foreprop.tools.cli.app import app
from foreprop_lab.benchmarks.trainer import BARE, EAGER, LOGS, WAITS, measure_trainer

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.leaks_ok(reason="the store's client has a thread as long as the process"),
]


def test_every_plane_is_measured_beside_every_thread() -> None:
    before = os.sched_getaffinity(0)
    costs = measure_trainer(slices_kb=[8.0, 0.4], servers=[1], slices=45, rounds=1)
    planes = [
        f"{which}, {size} kB, 1 server a rank"
        for size in ("8", "0.4")
        for which in ("native", "python")
    ]
    planes.append("gloo, DDP's buckets")
    kinds = [(plane, thread) for plane in planes for thread in (WAITS, EAGER, BARE, LOGS)]
    assert [(cost.plane, cost.thread) for cost in costs] == kinds
    for cost in costs:
        assert cost.alone_us > 0
        assert cost.slow_down > 0
        assert cost.bits_per_s > 0
        assert (cost.of_waiting == 1.0) == (cost.thread == WAITS)
    assert os.sched_getaffinity(0) == before


def test_one_processor_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(ConfigError, match="may use one processor"):
        measure_trainer(slices_kb=[8.0], servers=[1], slices=45, rounds=1)


def test_the_command_prints_a_table() -> None:
    options = ["--slice-kb", "0.4", "--servers", "2", "--slices", "45", "--rounds", "1"]
    options += ["--encrypted", "--compression", "int8"]
    result = CliRunner().invoke(app, ["bench", "trainer", *options])
    assert result.exit_code == 0, result.output
    assert "45 slices per step, medians of 1 rounds" in result.output
    assert "2 servers a rank" in result.output
    assert "logs in Python" in result.output
