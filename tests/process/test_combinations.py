"""Every pair of settings that the table allows, with processes for ranks and servers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.matrix import MATRIX, ranks_of, together
from tests.process.harness import ROOT, Zygote, workers
from tests.process.train_script import Scenario

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(600)]

SCRIPT = ROOT / "tests" / "process" / "matrix_script.py"
WITHOUT = {"dedicated"}
"""Its servers are another command's (`test_server_command`)."""


def cases(ranks: int, local_size: int) -> list[list[str]]:
    pairs = itertools.combinations(sorted(MATRIX.keys() - WITHOUT), 2)
    allowed = ((list(pair), settings) for pair in pairs if (settings := together(*pair)))
    return [
        pair
        for pair, settings in allowed
        if (ranks_of(settings), settings.get("workers_per_node", 1)) == (ranks, local_size)
    ]


def test_each_pair_is_a_case() -> None:
    of_each = [cases(2, 1), cases(3, 1), cases(4, 2), cases(6, 2)]
    pairs = itertools.combinations(sorted(MATRIX.keys() - WITHOUT), 2)
    assert sum(map(len, of_each)) == sum(together(*pair) is not None for pair in pairs)


@pytest.mark.parametrize(("ranks", "local_size"), [(2, 1), (3, 1), (4, 2), (6, 2)])
def test_each_allowed_pair(zygote: Zygote, tmp_path: Path, ranks: int, local_size: int) -> None:
    found = cases(ranks, local_size)
    secret = tmp_path / "secret"
    secret.write_text("x" * 64)
    secret.chmod(0o600)
    more = {"CASES": json.dumps(found), "SECRET": str(secret)}
    servers = 6 * len(found)  # plans and relays start some more
    about = {"local_size": local_size, "script": SCRIPT, "fork": servers}
    with workers(zygote, tmp_path, ranks, Scenario(), **about, **more) as run:  # type: ignore[arg-type]
        run.wait(500)
        assert run.codes() == [0] * ranks, run.output()
        assert all(result["done"] == found for result in run.results().values())
