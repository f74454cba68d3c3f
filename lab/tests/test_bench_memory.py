"""``foreprop bench memory``: what it makes of its looks, and the command, tiny."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from foreprop.tools.cli.app import app
from foreprop_lab.benchmarks.memory import Trained, memory_of


def test_looks_count_while_all_ranks_make_steps_that_count() -> None:
    looks = [
        (0.5, {1: 900, 2: 900}),  # before
        (1.5, {1: 100, 2: 110, 3: 40}),
        (2.5, {1: 120, 2: 130, 3: 50}),
        (3.5, {1: 100, 2: 100, 3: 30}),
        (4.5, {1: 900, 2: 900}),  # rank 1 has ended
    ]
    found = {0: Trained(1, 7, [0.0, 2.0, 5.0, 6.0]), 1: Trained(2, 7, [1.0, 2.0, 3.0, 4.0])}
    job = memory_of("workers", found, looks)
    assert (job.median_bytes, job.peak_bytes, job.ranks_bytes) == (250, 300, 250)
    assert (job.parameters, job.step_s) == (7, 2.0)
    with pytest.raises(RuntimeError, match="make more of them"):
        memory_of("workers", found, looks[-1:])


@pytest.mark.process
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.leaks_ok(reason="torch's launcher keeps its store and a tracker")
def test_the_command_prints_a_table() -> None:
    options = ["--params", "200000", "--steps", "40", "--kind", "workers", "--kind", "elastic"]
    result = CliRunner().invoke(app, ["bench", "memory", *options])
    assert result.exit_code == 0, result.output
    assert "0.6 million parameters, 2 ranks" in result.output
    rows = [line.split()[1] for line in result.output.splitlines() if line.startswith("│")]
    assert rows == ["ddp", "workers", "elastic"]
