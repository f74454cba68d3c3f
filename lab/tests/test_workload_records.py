from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from foreprop.errors import ConfigError
from foreprop.plan.profile import load_profile
from foreprop.tools.compare.result import Spread, write_records
from foreprop_lab.setting.labsetting import LabSetting
from foreprop_lab.setting.records import read_records
from lab.tests.lab_example import example_record

SETTING = LabSetting(profile=load_profile("resnet50"), systems=("p3", "ddp"))
RECORDS = [
    example_record(SETTING, "p3"),
    example_record(SETTING, "ddp", bucket_bytes=1_638_400, cpu_bound=True, network="pacing"),
]


def test_spread_of_known_values() -> None:
    spread = Spread.of([float(n) for n in range(101)])
    assert (spread.p10, spread.median, spread.p90) == (10.0, 50.0, 90.0)


def test_spread_of_one_value() -> None:
    assert Spread.of([2.5]) == Spread(median=2.5, p10=2.5, p90=2.5)


@pytest.mark.parametrize("count", [2, 3, 5, 9, 20])
def test_spread_lies_within_what_was_measured(count: int) -> None:
    values = [1.0 + 0.1 * n for n in range(count)]
    spread = Spread.of(values)
    assert values[0] <= spread.p10 <= spread.median <= spread.p90 <= values[-1]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for records in (RECORDS, RECORDS[:1]):  # the second time in place of the first
        write_records(path, records)
        assert read_records(path) == records
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("nodes", "scale"), [(4, 16), (16, 16), (32, 16), (4, 64)])
def test_a_record_with_the_default_slices_has_usual_ones(nodes: int, scale: int) -> None:
    setting = replace(SETTING, nodes=nodes, scale=scale)
    assert example_record(setting, "p3").has_usual_slices
    others = replace(setting, slice_elems=200_000)
    assert not example_record(others, "p3").has_usual_slices


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_records(path, RECORDS)
    with pytest.raises(TypeError):
        write_records(path, [object()])  # type: ignore[list-item]
    assert read_records(path) == RECORDS


@pytest.mark.parametrize("content", ["", "{}", '[{"system": "p3"}]', "[1"])
def test_what_holds_no_records_names_the_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"results\.json holds no results of the lab"):
        read_records(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json holds no results"):
        read_records(tmp_path / "none.json")
