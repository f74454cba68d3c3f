"""``foreprop plan``: its table, its JSON, its pictures, and what it says of wrong input."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plan_example import SMALL, sparse_profile
from typer.testing import CliRunner, Result

from foreprop.plan.planner import PLANNED
from foreprop.plan.profile import Profile
from foreprop.tools.cli import app as cli
from foreprop.tools.cli import main as script
from foreprop.tools.cli.plan import Plan
from tests.tiers import long_cases

COMMON = ("--nodes", "4", "--rate", "1Gbit", "--latency", "50us")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    arrays = msgspec.to_builtins(SMALL.arrays)
    path.write_bytes(msgspec.json.encode({"model": "small", "arrays_in_forward_order": arrays}))
    return path


@pytest.fixture
def plan(profile: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: str) -> Result:
        given = ["plan", "--profile", str(profile), *COMMON, "--compute", "140ms", *arguments]
        result = CliRunner().invoke(cli.app, given, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result

    return run


def test_the_table_has_every_system_and_fits_80_columns(plan: Any) -> None:
    output = plan("--servers", "0..2", "--batch", "32", "--what-if", "rate=100Mbit..1Gbit").stdout
    table, _, rest = output.partition("* Use ")
    assert table.startswith("small, 4 nodes, 1 Gbit/s, latency 50 us, compute 140 ms\n")
    rows = [line.strip(" *").split() for line in table.splitlines() if "%" in line]
    served = [" ".join(row[:3]) for row in rows if row[0] == "ps"]
    twos = [f"ps {preset} 2" for preset in PLANNED]
    assert sorted(served) == sorted(["ps p3 1", *twos])
    assert len(rows) == len(served) + 2 + len(PLANNED)
    assert "samples/s" in table
    assert max(map(len, table.splitlines())) <= 80
    what_if = rest.partition("small, 4 nodes, latency 50 us, compute 140 ms: samples/s of all")[2]
    lines = [line for line in what_if.splitlines() if "bit/s" in line]
    values = [line.strip().partition("bit/s")[0] for line in lines]
    assert values == [*(f"{n} M" for n in (100, 150, 200, 300, 500, 700)), "1 G"]
    assert max(map(len, lines)) <= 80


def test_numbers_of_servers_that_are_no_faster_are_one_line(plan: Any) -> None:
    output = plan("--rate", "300Mbit", "--servers", "0..6").stdout
    rows = [line.strip(" *").split() for line in output.splitlines() if "%" in line]
    assert [row[2] for row in rows if row[:2] == ["ps", "p3"]] == ["4", "3", "2", "1"]
    assert "More dedicated servers than 4 are no faster.\n" in output
    assert "* Use ps p3, 4 servers" in output
    made = msgspec.json.decode(plan("--servers", "0,6", "--json").stdout, type=Plan)
    assert {f.candidate.servers for f in made.forecasts} == {0, 6}
    assert "More than" not in plan("--rate", "300Mbit", "--servers", "0,2").stdout


def test_the_heading_has_all_options(plan: Any) -> None:
    output = plan("--workers-per-node", "2", "--server-rate", "5Gbit", "--servers", "0,1").stdout
    heading = "small, 4 nodes, 2 workers on each, 1 Gbit/s, dedicated servers 5 Gbit/s, latency"
    assert output.startswith(heading)


def test_the_recommended_one_is_marked_and_explained(plan: Any) -> None:
    output = plan().stdout
    (marked,) = [line for line in output.splitlines() if line.strip().startswith("* p2p")]
    assert "p2p p3" in marked
    assert "* Use p2p p3: foreprop.parallelize(model, optimizer)" in output
    assert "as fast as plain DDP" in output


def test_a_model_with_tables_is_planned_with_hybrid_and_both_ways_of_ddp(
    plan: Any, tmp_path: Path
) -> None:
    path = tmp_path / "sparse.json"
    sparse_profile(alpha=0.1, rows=10_000).save(path)
    options = ("--profile", str(path), "--rate", "800Mbit")  # the last one counts
    output = plan(*options, "--what-if", "nodes=2,4").stdout
    assert max(map(len, output.partition("* Use ")[0].splitlines()[:-3])) <= 80
    table = output.partition("efficiency: ")[0]
    systems = re.findall(r"^[ *]+(\w+(?: [a-z]\w*)?) .*%", table, flags=re.MULTILINE)
    expected = ["ddp", "ddp dense", "hybrid", "ring", *(f"p2p {preset}" for preset in PLANNED)]
    assert sorted(systems) == sorted(expected)
    rule = "By rows: words.weight, classes.weight. ddp gathers the rows; ring, ddp dense reduce"
    assert rule in output
    assert "* Use p2p p3: foreprop.parallelize(model, optimizer)" in output
    made = msgspec.json.decode(plan(*options, "--json").stdout, type=Plan)
    assert made.tables == ["words.weight", "classes.weight"]
    dense = plan(*options, "--dense-gradients").stdout
    assert "hybrid" not in dense
    assert "ddp dense" not in dense
    assert "rows" not in dense


@pytest.mark.leaks_ok(reason="matplotlib keeps the fonts that it has used open")
def test_json_has_all_and_nothing_else_is_printed(plan: Any, tmp_path: Path) -> None:
    picture = tmp_path / "nodes.svg"
    options = ("--servers", "0,2", "--what-if", "nodes=2,4", "--out", str(picture))
    printed = plan(*options, "--json").stdout
    made = msgspec.json.decode(printed, type=Plan)
    assert (made.model, made.nodes, made.rate_bits_per_s) == ("small", 4, 1e9)
    assert made.recommendation.candidate in {f.candidate for f in made.forecasts}
    assert len(made.forecasts) == 12
    assert made.what_if is not None
    assert [point.value for point in made.what_if.points] == [2, 4]
    assert made.throughput_unit == "batches/s"
    assert picture.exists()


@pytest.mark.leaks_ok(reason="matplotlib keeps the fonts that it has used open")
@pytest.mark.parametrize(
    "what_if", long_cases("servers=1..3", "rate=100Mbit..10Gbit", "nodes=2..5")
)
def test_pictures_show_a_curve_for_each_architecture(
    plan: Any, tmp_path: Path, what_if: str
) -> None:
    svg, png = tmp_path / "curves.svg", tmp_path / "curves.png"
    for path in (svg, png):
        output = plan("--servers", "0,2", "--what-if", what_if, "--out", str(path)).stdout
        assert f"Picture: {path}" in output.replace("\n", "")
    drawing = svg.read_text()
    for text in ("ddp", "ring", "p2p p3", "ps p3", "ideal", "batches/s, all workers", "compute"):
        assert text in drawing
    assert png.read_bytes().startswith(b"\x89PNG")
    first = svg.read_bytes()
    plan("--servers", "0,2", "--what-if", what_if, "--out", str(svg))
    assert svg.read_bytes() == first


def test_measured_compute_is_the_default(tmp_path: Path) -> None:
    timed = [
        msgspec.structs.replace(array, forward_flops=None, forward_s=0.01, backward_s=0.02)
        for array in SMALL.arrays
    ]
    path = tmp_path / "timed.json"
    Profile(name="timed", arrays=tuple(timed)).save(path)
    asked = ["plan", "--profile", str(path), *COMMON, "--json"]
    printed = CliRunner().invoke(cli.app, asked).stdout
    assert msgspec.json.decode(printed, type=Plan).compute_s == pytest.approx(0.36)
    printed = CliRunner().invoke(cli.app, [*asked, "--compute", "1s"]).stdout
    assert msgspec.json.decode(printed, type=Plan).compute_s == 1.0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"--rate": "10GB/s"}, "--rate is '10GB/s'; it must be a number with its unit, as 10Gbit"),
        ({"--latency": "50"}, "--latency is '50'; it must be a number with its unit, as 50us"),
        ({"--compute": "fast"}, "--compute is 'fast'; it must be a number with its unit"),
        (
            {"--compute": None},
            "--compute is not given, and the profile of resnet50 has no",
        ),
        ({"--model": None}, "neither --model nor --profile is given: give either"),
        ({"--model": "alexnet"}, "--model is 'alexnet'; there are inceptionv3"),
        ({"--profile": "x.json"}, "both are given: give either --model or --profile"),
        ({"--servers": "8..0"}, "--servers is '8..0'; a range goes from the smaller"),
        ({"--server-rate": "1"}, "--server-rate is '1'; it must be a number with its unit"),
        ({"--nodes": "1"}, "--nodes is 1; at least 2"),
        ({"--batch": "0"}, "--batch is 0; at least 1"),
        ({"--what-if": "rate"}, "--what-if is 'rate'; it must be one of rate, latency"),
        ({"--what-if": "nodes=1..4"}, "nodes is 1; at least 2"),
        ({"--out": "x.png"}, "--out is x.png, but there is nothing to draw without --what-if"),
        (
            {"--out": "x.gif", "--what-if": "nodes=2..4"},
            "--out is x.gif; its name must end in",
        ),
        ({"--out": "/no/x.png", "--what-if": "nodes=2..4"}, "--out is /no/x.png, which cannot be"),
    ],
)
def test_wrong_input_is_one_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str | None],
    told: str,
) -> None:
    options: dict[str, str | None] = {
        "--model": "resnet50",
        "--nodes": "8",
        "--rate": "10Gbit",
        "--compute": "180ms",
    }
    given = [word for pair in (options | changes).items() if pair[1] for word in pair]
    monkeypatch.setattr(sys, "argv", ["foreprop", "plan", *map(str, given)])
    with pytest.raises(SystemExit) as caught:
        script.main()
    captured = capsys.readouterr()
    assert caught.value.code == 2
    assert captured.err.startswith(f"foreprop: {told}")
    assert captured.err.count("\n") == 1
    assert not captured.out
