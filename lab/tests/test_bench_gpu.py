"""lab/src/foreprop_lab/benchmarks/gpu.py on real links, with a CPU in the GPU's place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foreprop_lab.benchmarks.gpu import main

pytestmark = [pytest.mark.process, pytest.mark.lab]


@pytest.mark.long
def test_systems_are_measured_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    systems = "alone,ddp,p3"
    small = "--device cpu --model small --batch 2 --nodes 2 --rate 1e9 --steps 2 --blocks 2"
    main([*small.split(), "--systems", systems, "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())["systems"]
    assert list(found) == systems.split(",")
    parameters = 3 * 224 * 224 * 16 + 16 + 16 * 1000 + 1000
    for name in ("ddp", "p3"):
        assert found[name]["ranks_end_alike"]
        assert found[name]["sent_bytes"] == pytest.approx(4 * parameters, rel=0.2)
        assert found[name]["step_s"] > 8 * 4 * parameters / 1e9
    assert not found["alone"]["ranks_end_alike"]
    assert found["alone"]["sent_bytes"] < 10_000
    assert capsys.readouterr().out.count("\n") == 2 + len(found)
