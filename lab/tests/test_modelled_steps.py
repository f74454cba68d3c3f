"""lab/src/foreprop_lab/benchmarks/modelled_steps.py, of one setting."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from foreprop_lab.setting.records import read_records

BENCHMARKS = Path(__file__).parents[2] / "lab" / "src" / "foreprop_lab" / "benchmarks"


@pytest.mark.long
def test_every_system_is_compared_with_the_simulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = BENCHMARKS / "modelled_steps.py"
    path = tmp_path / "steps.json"
    module = runpy.run_path(str(script))
    results = str(BENCHMARKS.parents[2] / "docs" / "results" / "results.json")
    points = module["main"](str(path), results, ("sockeye",), (4,), (1.0,))
    assert [point["system"] for point in points] == list(module["SYSTEMS"])
    for point in points:
        assert point["modelled_s"] == pytest.approx(point["step_s"], rel=0.1)
    assert json.loads(path.read_text()) == points
    printed = capsys.readouterr().out
    assert "p3 1 points" in printed
    compared = [
        record
        for record in read_records(Path(results))
        if record.system == "p3" and record.has_usual_slices and not record.cpu_bound
    ]
    assert compared
    assert f"beside the lab\np3 {len(compared)} points" in printed
