"""benchmarks/modelled_steps.py, of one setting."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest


@pytest.mark.long
def test_every_system_is_compared_with_the_simulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "modelled_steps.py"
    path = tmp_path / "steps.json"
    module = runpy.run_path(str(script))
    results = str(script.parents[1] / "docs" / "results" / "results.json")
    points = module["main"](str(path), results, ("sockeye",), (4,), (1.0,))
    assert [point["system"] for point in points] == list(module["SYSTEMS"])
    for point in points:
        assert point["modelled_s"] == pytest.approx(point["step_s"], rel=0.1)
    assert json.loads(path.read_text()) == points
    printed = capsys.readouterr().out
    assert "p3 1 points" in printed
    of_the_lab = re.search(r"beside the lab\np3 (\d+) points", printed)
    assert of_the_lab is not None
    assert int(of_the_lab[1]) > 20  # a campaign's: each model at each balance
