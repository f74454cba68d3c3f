"""The page of `foreprop lab figures`: what it says, and that it needs nothing but itself."""

from __future__ import annotations

import html
import io
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from foreprop.tools.report.charts import STYLES
from foreprop.tools.report.document import contrast
from foreprop_lab.experiments.figures.campaign import PAGE, make_figures
from foreprop_lab.experiments.figures.comparison import points_of
from foreprop_lab.experiments.figures.pagetables import best_table, points_table
from foreprop_lab.experiments.figures.sweeps import FULL, plan_measurements
from foreprop_lab.setting.labsetting import LabSetting
from lab.tests.lab_example import ExampleLab, ExampleResult, example_record

pytestmark = pytest.mark.long
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PHONE_PX = 390


def make(out: Path, **changes: Any) -> str:
    values: dict[str, Any] = {
        "quick": False,
        "console": Console(file=io.StringIO()),
        "measure": ExampleLab(),
        "command": "foreprop lab figures --out <runs>",
    }
    return make_figures(out, **(values | changes)).page.read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run's figures; also, matplotlib has its fonts open from here on."""
    made = tmp_path_factory.mktemp("figures")
    make(made)
    return made


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / PAGE).read_text()


@pytest.fixture(autouse=True, scope="module")
def _fonts(folder: Path) -> None:
    """Before any test is watched for what it leaves open."""


def words_of(page: str) -> str:
    without = re.sub(r"<(style|script|svg).*?</\1>", " ", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", without)))


def test_the_page_has_the_papers_results_beside_the_measured_ones(page: str) -> None:
    words = words_of(page)
    for reported in (
        "1.26\u00d7 at 4 Gbit/s",
        "1.18\u00d7",
        "1.66\u00d7 at 15 Gbit/s",
        "1.38\u00d7",
    ):
        assert reported in words
    assert "over ddp-tuned" in words
    assert "61%" in words
    assert "mxnet" not in words


def test_the_page_says_what_was_run_on_which_machine(page: str) -> None:
    words = words_of(page)
    for fact in ("processor", "cores", "torch", "2.13.0", "kernel (tc tbf)", "balance"):
        assert fact in words
    assert "foreprop lab figures --out <runs>" in words
    assert "quick run" not in words


def test_cpu_bound_runs_are_marked(page: str) -> None:
    assert "left out of every stated speed-up" in words_of(page)
    assert re.search(r'class="bound">0\.\d\d <small>CPU-bound', page)
    assert page.count(">CPU-bound</text>") >= 4


def test_settings_that_differ_in_slices_alone_are_counted_each(tmp_path: Path) -> None:
    lab = ExampleLab()

    def overloaded(setting: LabSetting, *, progress: Callable[[str], None]) -> ExampleResult:
        found = lab(setting, progress=progress)
        return replace(found, records=[structs.replace(r, cpu_bound=True) for r in found.records])

    page = make(tmp_path, measure=overloaded, only=(4,))
    assert f"In {len(lab.asked)} of the settings" in words_of(page)
    assert len(lab.asked) == 18


def test_each_throughput_chart_has_the_limit_line(page: str) -> None:
    charts = re.findall(r'<svg viewBox="[^"]*" role="img".*?</svg>', page, flags=re.DOTALL)
    throughput = [chart for chart in charts if "batches/s" in chart]
    assert len(throughput) == 4 + 3 + 3
    assert all("stroke-dasharray: 4.8,2.4" in chart for chart in throughput)


def test_ids_differ_and_colours_are_the_pages(page: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', page))
    assert used <= set(ids)
    drawn = "".join(re.findall(r'<div class="chart">.*?</svg>', page, flags=re.DOTALL))
    assert "var(--system-p3)" in drawn
    colours = set(re.findall(r"#[0-9a-f]{6}\b", re.sub(r"url\([^)]*\)|href=\"[^\"]*\"", "", drawn)))
    assert colours <= {"#000000"}  # what matplotlib gives marks that are lines only


def test_the_page_asks_for_nothing(page: str) -> None:
    assert re.findall(r'\b(?:src|href)="(?!#)[^"]*"', page) == []
    assert re.findall(r"url\((?!#)|@import", page) == []
    assert "default-src 'none'" in page


def test_a_quick_part_says_so(tmp_path: Path) -> None:
    words = words_of(make(tmp_path, quick=True, only=[3]))
    assert "This was a quick run" in words
    assert "3. Throughput against the number of nodes" in words
    assert "1. Throughput" not in words
    assert "Best speed-up" not in words


def test_every_figure_is_written_in_three_forms(folder: Path) -> None:
    names = {path.stem for path in folder.glob("figure-*")}
    assert len(names) == 5
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        ElementTree.parse(folder / f"{name}.svg")
        assert json.loads((folder / f"{name}.json").read_bytes())


def test_mxnet_is_shown_where_it_was_measured() -> None:
    plan = plan_measurements(FULL, traces=Path(), only=[1], mxnet_python=Path("python"))
    points = points_of([example_record(m.setting, s) for s in m.setting.systems] for m in plan)
    best = best_table(points)
    assert best is not None
    assert "over mxnet-p3" in best.names
    assert "mxnet-kvstore / limit" in points_table(points, "balance", "").names


def test_paced_links_and_notices_are_on_the_page(tmp_path: Path) -> None:
    class PacedLab(ExampleLab):
        def __call__(self, setting: Any, *, progress: Any) -> Any:
            result = super().__call__(setting, progress=progress)
            paced = [example_record(setting, "p3", network="pacing")]
            return type(result)(records=paced, notices=["no links: <not> permitted"])

    words = words_of(make(tmp_path, quick=True, only=[3], measure=PacedLab()))
    assert "paced its own sockets" in words
    assert words.count("no links: <not> permitted") == 1


def test_lines_stand_out_from_light_and_dark_cards() -> None:
    assert all(contrast(style.light, "#ffffff") >= 3 for style in STYLES.values())
    assert all(contrast(style.dark, "#1a1d22") >= 3 for style in STYLES.values())


@pytest.mark.process
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_phone_shows_it_without_scrolling_sideways(page: str, tmp_path: Path) -> None:
    """In a frame as wide as a phone, which a window of headless Chromium cannot be."""
    measured = {
        "width": "root.scrollWidth",
        "requests": "frame.contentWindow.performance.getEntriesByType('resource').length",
        "charts": "[...root.querySelectorAll('.chart svg')].filter(wide).length",
    }
    script = ",".join(f"{name}:{value}" for name, value in measured.items())
    (tmp_path / "frame.html").write_text(
        f'<iframe id="frame" style="border:0" width={PHONE_PX} height=800></iframe><pre></pre>'
        f"<script>frame.srcdoc={json.dumps(page).replace('</', '<' + chr(92) + '/')};"
        "const wide=(svg)=>svg.clientWidth>250;"
        "frame.onload=()=>{const root=frame.contentDocument.documentElement;"
        f"document.querySelector('pre').textContent=JSON.stringify({{{script}}})}}</script>"
    )
    found = json.loads(re.findall(r"<pre>(.*?)</pre>", dumped(tmp_path / "frame.html"))[-1])
    assert found == {"width": PHONE_PX, "requests": 0, "charts": 4 + 9 + 3 + 3}


def dumped(path: Path) -> str:
    """The document as Chromium has it once it is loaded."""
    options = (
        "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run "
        "--disable-component-update --disable-sync --hide-scrollbars "
        "--virtual-time-budget=5000 --dump-dom"
    )
    done = subprocess.run(
        [str(CHROMIUM), *options.split(), f"--user-data-dir={path.parent}/profile", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    return done.stdout
