"""``foreprop bench tables``, tiny: what a shard takes is what it keeps."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from foreprop.tools.cli.app import app
from foreprop_lab.benchmarks.tables import measure_tables

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(120)]


def test_memory_is_taken_for_what_is_updated_and_never_twice() -> None:
    costs = measure_tables(rows=400_000, row_elems=64, share=0.5, rows_per_update=4096)
    arrays = {"SGD": 1, "Adagrad": 2, "SparseAdam": 3}  # values and states
    assert [cost.optimizer for cost in costs] == list(arrays)
    for cost in costs:
        assert cost.table_bytes == 400_000 * 64 * 4
        assert cost.start_bytes < 0.1 * cost.table_bytes
        kept_bytes = arrays[cost.optimizer] * cost.table_bytes / 2
        assert 0.9 * kept_bytes < cost.peak_bytes < kept_bytes + 0.4 * cost.table_bytes
        assert cost.update_s > 0


def test_the_command_prints_a_table() -> None:
    options = ["--rows", "2000", "--row-elems", "4", "--share", "0.1"]
    result = CliRunner().invoke(app, ["bench", "tables", *options])
    assert result.exit_code == 0, result.output
    assert "2000 rows of 4 elements, 10.00% of them updated" in result.output
    assert "SparseAdam" in result.output
