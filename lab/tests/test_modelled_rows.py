"""lab/src/foreprop_lab/benchmarks/modelled_rows.py, of a text of this test's own."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "lab" / "src" / "foreprop_lab" / "benchmarks"

SCRIPT = BENCHMARKS / "modelled_rows.py"


def test_bytes_by_rows_are_far_fewer_than_of_whole_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text"
    path.write_text(" ".join(f"w{n % 40_000}" for n in range(200_000)))
    module: dict[str, Any] = runpy.run_path(str(SCRIPT))
    measured = module["measured_in"](module["RECORDS"])
    assert {record.nodes for record in measured} == {2, 4, 8}
    records = [record._replace(nodes=2) for record in measured if record.rate_mbit == 40]
    made = module["main"](records, path)
    systems, steps_s, sent_mb, simulated_s = zip(*made, strict=True)
    assert systems == ("hybrid", "p2p", "ddp-sparse", "ring", "ddp-dense")
    by_rows, whole = sent_mb[:3], sent_mb[3:]
    # 40,000 rows of 32 elements in each of 2 tables; of the softmax's a fifth is touched
    assert min(whole) > 8 > max(by_rows) > 1
    for seconds in (steps_s, simulated_s):
        assert max(seconds[:3]) < min(seconds[3:])
    assert simulated_s == pytest.approx(steps_s, rel=0.1)
    first = f"hybrid     2 nodes, 40 Mbit/s: {records[0].step_s:.3f} s measured"
    assert first in capsys.readouterr().out
