"""The demo's report: what it says, what it draws, and that it needs nothing but itself."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from foreprop.errors import ConfigError
from foreprop.tools.report import document
from foreprop.tools.report.document import milliseconds, percent, rate, size
from foreprop.tools.report.timeline import Lane, Shape, Timeline, plan_shapes
from foreprop.tools.report.timeline_svg import PLOT_PX, plan_panels, tick_s
from foreprop_lab.demo.report import (
    ReportContext,
    RunSummary,
    headline,
    render_report,
    same_weights,
    write_report,
)
from tests.unit.report_example import event, example_timeline


def example_run(preset: str, step_s: float, **changes: object) -> RunSummary:
    values: dict[str, object] = {
        "preset": preset,
        "step_s_median": step_s,
        "step_s_p10": step_s * 0.97,
        "step_s_p90": step_s * 1.06,
        "samples_per_s": 256 / step_s,
        "waiting_share": max(0.0, 1 - 0.118 / step_s),
        "test_accuracy": 0.9731,
        "weights_sha256": "9f2c4e1ab07d5583" * 4,
        "steps": 200,
        "compute_s": 0.114,
    }
    return RunSummary(**(values | changes))  # type: ignore[arg-type]


def example_context(**changes: object) -> ReportContext:
    values: dict[str, object] = {
        "title": "foreprop demo",
        "model": "a small CNN with one heavy layer",
        "workers": 2,
        "servers": 2,
        "rate_bits_per_s": 600e6,
        "batch_size": 128,
        "machine": {"processor": "2 cores, x86-64", "system": "Linux 6.1", "Python": "3.11.2"},
        "command": "foreprop demo --rate 600mbit --steps 200",
        "foreprop_version": "0.1.0",
        "torch_version": "2.13.0",
    }
    return ReportContext(**(values | changes))  # type: ignore[arg-type]


RUNS = (example_run("kvstore", 0.170), example_run("p3", 0.119))


@pytest.fixture(scope="module")
def timelines() -> list[Timeline]:
    return [example_timeline("kvstore"), example_timeline("p3")]


def plots(page: str) -> list[ElementTree.Element]:
    """The SVG panels, parsed as XML."""
    found = re.findall(r"<svg class=\"plot\".*?</svg>", page, flags=re.DOTALL)
    return [ElementTree.fromstring(svg) for svg in found]


def shapes_of(plot: ElementTree.Element) -> list[ElementTree.Element]:
    return [rect for rect in plot.iter("rect") if rect.find("title") is not None]


class Checker(HTMLParser):
    """Fails on elements that are not closed in order, collects text and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)


def read(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


@pytest.mark.parametrize(
    ("p3_s", "expected"),
    [
        (0.1207, "p3 trains 1.41\N{MULTIPLICATION SIGN} as fast as kvstore: 121\xa0ms per step"),
        (0.1870, "p3 does not win here: it takes 1.10\N{MULTIPLICATION SIGN} the time of kvstore"),
        (0.1675, "p3 does not win here: a step takes about as long as with kvstore (0.99"),
        (0.1730, "p3 does not win here: a step takes about as long as with kvstore (1.02"),
    ],
)
def test_the_headline_says_who_wins(p3_s: float, expected: str) -> None:
    for runs in (RUNS[0], example_run("p3", p3_s)), (example_run("p3", p3_s), RUNS[0]):
        assert headline(runs).startswith(expected)
        assert "".join(read(render_report(example_context(), runs, [])).words).count(expected) == 1


def test_ddp_and_then_kvstore_is_the_baseline_among_several() -> None:
    runs = (example_run("slicing", 0.140), example_run("p3", 0.119), RUNS[0])
    assert "as fast as ddp:" in headline((*runs, example_run("ddp", 0.150)))
    assert "as fast as kvstore:" in headline(runs)
    assert "as fast as slicing:" in headline(runs[:2])
    assert headline(RUNS[:1]) == f"kvstore takes {milliseconds(0.170)} per step"
    assert headline(()) == "Nothing was run"


def test_overlapping_ranges_and_little_waiting_are_pointed_out() -> None:
    near = (example_run("kvstore", 0.120, waiting_share=0.01), example_run("p3", 0.115))
    page = render_report(example_context(), near, [])
    assert "read the difference with care" in page
    assert "kvstore itself hardly waits" in page
    far = render_report(example_context(), RUNS, [])
    assert "with care" not in far
    assert "hardly waits" not in far


def test_identical_weights_are_stated() -> None:
    words, kind = same_weights(RUNS)
    assert (words, kind) == (
        "The final weights of kvstore and p3 are identical, bit for bit.",
        "same",
    )
    page = render_report(example_context(), RUNS, [])
    assert words in page
    assert f'title="{RUNS[0].weights_sha256}">{RUNS[0].weights_sha256[:12]}<' in page


def test_different_weights_are_stated() -> None:
    other = example_run("slicing", 0.14, weights_sha256="ab" * 32)
    words, kind = same_weights([*RUNS, other])
    assert kind == "different"
    assert "NOT identical" in words
    assert "kvstore and p3: 9f2c4e1ab07d; slicing: abababababab" in words
    assert "different numbers of steps" not in words
    short = example_run("slicing", 0.14, weights_sha256="ab" * 32, steps=3)
    assert "different numbers of steps" in same_weights([*RUNS, short])[0]
    assert same_weights(RUNS[:1])[1] == ""


def test_a_peer_without_waiting_and_with_other_sums_is_distinguished() -> None:
    ddp = example_run("ddp", 0.151, waiting_share=None, weights_sha256="ab" * 32, sums_alike=False)
    words, kind = same_weights([*RUNS, ddp])
    assert kind == "same"
    assert words.startswith("The final weights of kvstore and p3 are identical, bit for bit. Those")
    assert "ddp differ in their last bits" in words
    page = render_report(example_context(links="shaped"), [*RUNS, ddp], [])
    text = " ".join(read(page).words)
    assert "151\xa0ms with ddp, 170\xa0ms with kvstore." in text
    assert "both, which cannot be told apart" in text
    assert "600\xa0Mbit/s, shaped" in text
    assert page.count('class="whole"') == 1
    assert "Waiting for parameters takes" not in render_report(
        example_context(), [RUNS[1], ddp], []
    )


def test_the_table_has_every_measurement(timelines: list[Timeline]) -> None:
    words = " ".join(read(render_report(example_context(), RUNS, timelines)).words)
    for expected in ("170", "119", "115", "126", "1,506", "31%", "0.8%", "97.31%", "9f2c4e1ab07d"):
        assert expected in words
    for expected in ("600\xa0Mbit/s", "128 samples per worker", "foreprop demo --rate 600mbit"):
        assert expected in words


def test_all_text_is_escaped() -> None:
    nasty = "<b a=\"x\" c='y'>&amp;"
    run = example_run(nasty, 0.1, weights_sha256=nasty)
    context = example_context(title=nasty, model=nasty, command=nasty, machine={nasty: nasty})
    timeline = Timeline(
        preset=nasty,
        events=[
            event("compute", nasty, 0.0, 1.0, direction="forward"),
            event("push", nasty, 0.0, 1.0, size=3_000_000),
            event("wait", nasty, 1.0, 2.0, step=1),
        ],
    )
    page = render_report(context, [run, run], [timeline])
    checker = read(page)
    assert nasty not in page
    assert "<b a=" not in page
    assert "".join(checker.words).count(nasty) >= 10
    (plot,) = plots(page)
    assert any(nasty in (title.text or "") for title in plot.iter("title"))


def test_the_page_needs_nothing_but_itself(timelines: list[Timeline]) -> None:
    page = render_report(example_context(), RUNS, timelines)
    assert read(page).links == []
    assert "default-src 'none'" in page
    for loader in ("http://", "https://", "//", "url(", "@import", "fetch(", "file:"):
        assert loader not in re.sub(r"^\s*// .*$", "", page, flags=re.MULTILINE)
    assert page.startswith("<!doctype html>")
    assert 'name="viewport"' in page
    assert "prefers-color-scheme" in page


def test_all_panels_have_one_time_scale(timelines: list[Timeline]) -> None:
    page = render_report(example_context(), RUNS, timelines)
    assert len(plots(page)) == 2
    longest_s = max(timeline.stop_s for timeline in timelines)
    for plot, timeline in zip(plots(page), timelines, strict=True):
        assert plot.get("width") == plots(page)[0].get("width")
        drawn = {float(rect.get("x", "")): rect for rect in shapes_of(plot)}
        origin = min(drawn)
        end = max(x + float(rect.get("width", "")) for x, rect in drawn.items())
        assert end - origin == pytest.approx(PLOT_PX * timeline.stop_s / longest_s, abs=0.9)
        blocks = [rect for rect in shapes_of(plot) if "conv2: forward" in (rect[0].text or "")]
        for block in blocks:
            wanted = pytest.approx(PLOT_PX * 0.016 / longest_s, abs=0.02)
            assert float(block.get("width", "")) == wanted
        assert len(blocks) == 2
        ticks = [(t.get("x"), t.text) for t in plot.iter("text") if t.get("class") == "tick"]
        assert ticks == [
            (t.get("x"), t.text) for t in plots(page)[0].iter("text") if t.get("class") == "tick"
        ]


def test_colours_and_legend_are_the_layers(timelines: list[Timeline]) -> None:
    page = render_report(example_context(), RUNS, timelines)
    for plot in plots(page):
        for rect in shapes_of(plot):
            title = rect.findtext("title") or ""
            layer = ("conv1", "conv2", "fc1", "fc2").index(re.split(r"[.:]", title)[0])
            wanted = "wait" if "waiting" in title else f"c{layer}"
            assert (rect.get("class") or "").split()[0] == wanted
    assert re.findall(r"</i>(\w+)<small>([^<]+)</small>", page) == [
        ("conv1", "90\xa0KB"),
        ("conv2", "420\xa0KB"),
        ("fc1", "3.7\xa0MB"),
        ("fc2", "120\xa0KB"),
    ]


def test_tooltips_tell_layer_stage_step_bytes_and_duration() -> None:
    timeline = Timeline(
        preset="p3",
        events=[
            event("compute", "fc1", 0.0, 0.050, step=7, direction="backward"),
            event("push", "fc1.weight", 0.010, 0.0125, step=7, size=200_000),
        ],
    )
    (plot,) = plots(render_report(example_context(), RUNS, [timeline]))
    tips = [rect.findtext("title") for rect in shapes_of(plot)]
    assert tips[0] == "fc1: backward, step 7\n50.0 ms\nfrom 0.00 ms to 50.0 ms".replace(
        " ms", "\xa0ms"
    )
    assert tips[1] == (
        "fc1.weight: push, step 7\n2.50\xa0ms, 200\xa0KB\nfrom 10.0\xa0ms to 12.5\xa0ms"
    )


def test_steps_and_their_waiting_are_written(timelines: list[Timeline]) -> None:
    for plot, timeline in zip(
        plots(render_report(example_context(), RUNS, timelines)), timelines, strict=True
    ):
        panel = next(p for p in plan_panels(timelines) if p.timeline is timeline)
        words = [t.text for t in plot.iter("text")]
        for span in panel.spans:
            assert f"step {span.step}" in words
            assert f"waits {milliseconds(span.wait_s)}" in words
    kvstore, p3 = plan_panels(timelines)
    assert min(s.wait_s for s in kvstore.spans) > 5 * max(s.wait_s for s in p3.spans)


def test_a_panel_has_the_lanes_of_its_system() -> None:
    def lanes(*used: Lane) -> list[str]:
        events = [event(lane, "a", 0.0, 1.0) for lane in used]
        (panel,) = plan_panels([Timeline(preset="any", events=events)])
        places = [panel.top(lane) for lane in panel.lanes]
        assert places == sorted(set(places))
        assert panel.floor == places[-1] + panel.lane_px["wait"]
        return list(panel.lanes)

    assert lanes("compute") == lanes("push", "wait") == ["compute", "push", "reply", "wait"]
    assert lanes("compute", "reduce") == ["compute", "reduce", "wait"]
    assert lanes("reduce", "push") == ["compute", "push", "reduce", "wait"]


def test_overlapping_events_lie_in_rows_of_their_own() -> None:
    events = [
        event("push", "a.weight", 0.0, 1.0),
        event("push", "b.weight", 0.5, 1.5, layer_index=1),
        event("push", "c.weight", 1.0, 2.0, layer_index=2),
    ]
    (shapes,) = plan_shapes([Timeline(preset="p3", events=events)], gap_s=0.0)
    assert [(shape.names[0], shape.row) for shape in shapes] == [
        ("a.weight", 0),
        ("b.weight", 1),
        ("c.weight", 0),
    ]


def busy(shapes: Iterable[Shape]) -> dict[tuple[str, int], float]:
    """Seconds per lane and layer."""
    totals: dict[tuple[str, int], float] = defaultdict(float)
    for shape in shapes:
        totals[shape.lane, shape.layer_index] += shape.busy_s
    return totals


@pytest.mark.parametrize("limit", [0, 10**6])
def test_every_event_is_drawn_or_merged(timelines: list[Timeline], limit: int) -> None:
    panels: Sequence[Sequence[Shape]] = plan_shapes(timelines, gap_s=1e-4, limit=limit)
    for shapes, timeline in zip(panels, timelines, strict=True):
        assert sum(shape.events for shape in shapes) == len(timeline.events)
        assert sum(shape.bytes for shape in shapes) == sum(e.bytes for e in timeline.events)
        wanted: dict[tuple[str, int], float] = defaultdict(float)
        for item in timeline.events:
            wanted[item.lane, item.layer_index] += item.duration_s
        assert busy(shapes) == pytest.approx(wanted)
    assert (sum(map(len, panels)) < sum(len(t.events) for t in timelines)) == (limit == 0)


def test_below_the_limit_every_event_has_a_rectangle(timelines: list[Timeline]) -> None:
    page = render_report(example_context(), RUNS, timelines)
    counts = [len(shapes_of(plot)) for plot in plots(page)]
    assert counts == [len(timeline.events) for timeline in timelines]


@pytest.mark.long
def test_many_slices_are_merged_to_a_page_of_modest_size() -> None:
    many = example_timeline("p3", slice_bytes=2_000)
    assert len(many.events) > 8_000
    page = render_report(example_context(), RUNS, [many])
    (plot,) = plots(page)
    assert len(shapes_of(plot)) < 3_000
    assert len(page) < 300_000
    tips = [rect.findtext("title") or "" for rect in shapes_of(plot)]
    assert any(re.search(r"fc1.weight: push, step \d\n.* \d+ slices, [\d.]+\sMB", t) for t in tips)


def test_only_neighbours_of_one_layer_row_and_step_merge() -> None:
    events = [
        event("push", "a.weight", 0.0, 1.0, size=5),
        event("push", "a.bias", 1.0, 2.0, size=5),
        event("push", "a.weight", 2.0, 3.0, step=1),
        event("push", "b.weight", 3.0, 4.0, step=1, layer_index=1),
        event("push", "b.weight", 4.5, 5.0, step=1, layer_index=1),
        event("compute", "a", 0.0, 1.0, direction="forward"),
        event("compute", "a", 1.0, 2.0, direction="backward"),
    ]
    (shapes,) = plan_shapes([Timeline(preset="p3", events=events)], gap_s=0.1, limit=0)
    assert [(s.lane, s.names, s.start_s, s.stop_s, s.bytes) for s in shapes] == [
        ("compute", ("a",), 0.0, 1.0, 0),
        ("compute", ("a",), 1.0, 2.0, 0),
        ("push", ("a.weight", "a.bias"), 0.0, 2.0, 10),
        ("push", ("a.weight",), 2.0, 3.0, 0),
        ("push", ("b.weight",), 3.0, 4.0, 0),
        ("push", ("b.weight",), 4.5, 5.0, 0),
    ]


def test_missing_pieces_still_make_a_page() -> None:
    nan = float("nan")
    run = example_run("p3", 0.1, test_accuracy=nan, samples_per_s=nan, compute_s=None)
    empty = Timeline(preset="p3", events=[])
    for runs, drawn in ([], []), ([run], [empty]), (RUNS, [empty, example_timeline("p3")]):
        page = render_report(example_context(rate_bits_per_s=None), runs, drawn)
        read(page)
        assert len(plots(page)) == len(drawn)
        assert "links not limited" in page
        assert "nan" not in "".join(read(page).words)


def test_the_file_is_written_whole(tmp_path: Path, timelines: list[Timeline]) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report(path, example_context(), RUNS, timelines)
    assert path.read_text(encoding="utf-8") == render_report(example_context(), RUNS, timelines)
    with pytest.raises(OSError, match="nowhere"):
        write_report(tmp_path / "nowhere" / "x.html", example_context(), RUNS, timelines)
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_a_step_must_take_time() -> None:
    with pytest.raises(ConfigError, match="step_s_median of p3"):
        example_run("p3", 0.1, step_s_median=0.0)


def test_numbers_have_units() -> None:
    assert [milliseconds(s) for s in (0.00124, 0.0931, 0.09996, 1.204)] == [
        "1.24\xa0ms",
        "93.1\xa0ms",
        "100\xa0ms",
        "1,204\xa0ms",
    ]
    assert [size(b) for b in (812, 3_200, 1_640_000, 574e6)] == [
        "812\xa0B",
        "3.2\xa0KB",
        "1.64\xa0MB",
        "574\xa0MB",
    ]
    assert [rate(r) for r in (500e6, 1.5e9)] == ["500\xa0Mbit/s", "1.5\xa0Gbit/s"]
    assert [percent(s) for s in (0.0, 0.004, 0.0996, 0.31)] == ["0%", "0.4%", "10%", "31%"]


@pytest.mark.parametrize("longest_s", [1e-4, 0.05, 0.34, 1.0, 7.3, 120.0])
def test_time_labels_are_few_and_round(longest_s: float) -> None:
    assert 5 <= longest_s / tick_s(longest_s) <= 14


@pytest.mark.parametrize("ramp", [document.LIGHT_RAMP, document.DARK_RAMP])
def test_layers_differ_in_brightness_and_carry_readable_text(ramp: Sequence[str]) -> None:
    colours = [document.ramp_colour(ramp, place / 8) for place in range(9)]
    against_black = [document.contrast(colour, "#000000") for colour in colours]
    assert against_black == sorted(against_black)
    assert all(document.contrast(c, document._ink_on(c)) >= 4.0 for c in colours)


def test_a_summary_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        RUNS[0].steps = 1  # type: ignore[misc]
    assert isinstance(RUNS[0], RunSummary)
