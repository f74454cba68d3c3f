"""Ranks with compiled code train to the bits of one process that compiles, without foreprop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.compiled_script import Loop
from tests.process.harness import ROOT, Zygote, workers
from tests.process.train_script import Scenario

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(500)]

SCRIPT = ROOT / "tests" / "process" / "compiled_script.py"
CASES = [
    (2, Loop("aot_eager")),
    (3, Loop("aot_eager", passes=2)),
    (2, Loop("inductor")),
    (3, Loop("inductor", passes=2)),
    (2, Loop("inductor", regional=True, passes=2)),
]
"""Each loop once, and of each backend two ranks and three: who adds up does not see the loop."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where inductor keeps what it has compiled: most of it is the same in every case."""
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.mark.parametrize(("ranks", "loop"), CASES, ids=str)
def test_ranks_train_as_one_process_does(
    zygote: Zygote, tmp_path: Path, kernels: str, loop: Loop, ranks: int
) -> None:
    more = {"COMPILED": loop.encode(), "TORCHINDUCTOR_CACHE_DIR": kernels}
    with workers(
        zygote, tmp_path, ranks, Scenario(), local_size=ranks, script=SCRIPT, **more
    ) as run:
        run.wait(400)
        assert run.codes() == [0] * ranks, run.output()
        results = list(run.results().values())
        assert {result["sha256"] for result in results} == {results[0]["alone"]}
        assert len(results) == ranks
