"""Ranks with compiled code train to the bits of one process that compiles, without foreprop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.compiled_script import Loop
from tests.process.harness import ROOT, Zygote, running
from tests.process.train_script import Scenario

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(500)]

SCRIPT = ROOT / "tests" / "process" / "compiled_script.py"
LOOPS = [
    Loop("aot_eager"),
    Loop("aot_eager", passes=2),
    Loop("inductor"),
    Loop("inductor", passes=2),
    Loop("inductor", regional=True, passes=2),
]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_ranks_train_as_one_process_does(
    zygote: Zygote, tmp_path: Path, loop: Loop, ranks: int
) -> None:
    with running(tmp_path) as run:
        variables = run.environment(Scenario(), COMPILED=loop.encode())
        run.torchrun(zygote, variables, "--standalone", f"--nproc-per-node={ranks}", script=SCRIPT)
        run.wait(400)
        assert run.codes() == [0], run.output()
        results = list(run.results().values())
        assert {result["sha256"] for result in results} == {results[0]["alone"]}
        assert len(results) == ranks
