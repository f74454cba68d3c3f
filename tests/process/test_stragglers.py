"""A rank that is slow is named on every rank, with its cause, and named no more when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.process.harness import ROOT, Zygote, running, torchruns_variables
from tests.process.train_script import Scenario

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

SCRIPT = ROOT / "tests" / "process" / "straggler_script.py"
SLOW_S = 0.1
"""Steps take a few milliseconds otherwise, and on a loaded machine several times that."""


@pytest.mark.long
def test_a_slow_rank_is_named_until_it_is_as_fast_as_the_others(
    zygote: Zygote, tmp_path: Path
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with running(tmp_path) as run:
        for rank in range(2):
            told = torchruns_variables(rank, store.port)
            variables = run.environment(Scenario(), SLOW=f"1:{SLOW_S}", **told)
            run.start(zygote, variables, script=SCRIPT)
        run.wait(200)
        assert run.codes() == [0, 0], run.output()
        for result in run.results().values():
            named = [each for each in result["said"] if each and each[:2] == [1, "compute"]]
            assert named, (result, run.output())
            assert named[0][2] > SLOW_S / 4
            assert result["said"][0] is None
        assert "rank 1 is late by" in run.output()
        assert "its compute" in run.output()
        run.check_nothing_left()
    del store
