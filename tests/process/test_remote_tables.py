"""A table of ten times the memory that a worker is allowed, in processes under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import ROOT, Run, Zygote, running
from tests.process.remote_script import ALLOWED_BYTES, TABLE_BYTES
from tests.process.train_script import Scenario

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

SCRIPT = ROOT / "tests" / "process" / "remote_script.py"
PLAIN_BYTES = 700 * 2**20
"""More than a process takes that has torch imported."""


@pytest.mark.long
def test_a_table_larger_than_a_worker_s_memory(zygote: Zygote, tmp_path: Path) -> None:
    with running(tmp_path) as run:
        results = results_of(run, zygote)
        for result in results:
            assert "can't allocate memory" in result["refused"]  # the limit is one
            assert result["max_rss_bytes"] < PLAIN_BYTES + ALLOWED_BYTES < TABLE_BYTES / 4
            assert result["as_before"]  # loaded, and trained once more
            for rss_bytes in result["server_rss_bytes"]:  # it has the rows that were updated
                assert rss_bytes < PLAIN_BYTES
        assert results[0]["sha256"] == results[1]["sha256"]
        assert results[0]["server_rss_bytes"]
        run.check_nothing_left()


def results_of(run: Run, zygote: Zygote) -> list[dict[str, Any]]:
    variables = run.environment(Scenario())
    run.torchrun(zygote, variables, "--standalone", "--nproc-per-node", "2", script=SCRIPT)
    run.wait(100)
    assert run.codes() == [0], run.output()
    return [result for _, result in sorted(run.results().items())]
