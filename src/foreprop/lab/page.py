"""The page of ``foreprop lab figures``: one HTML file that needs nothing else, and its words.

`render_page` is pure. Whatever is not measured is left out, so a part of the figures, or a quick
run, makes a page too, which then says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from foreprop.lab import sweeps
from foreprop.lab.charts import LIMIT, STYLES, style_of
from foreprop.lab.comparison import SUBJECT, Point, model_name, points_of
from foreprop.lab.curves import Measured, unscaled_gbit_per_s
from foreprop.lab.keptruns import KeptRun
from foreprop.lab.pagetables import CPU_BOUND, best_section, points_table, row, slice_table, table
from foreprop.lab.pictures import systems_css, variable
from foreprop.lab.sweeps import Measurement
from foreprop.report.document import render_document
from foreprop.report.markup import percent, rate, tag, text
from foreprop.report.palette import palette_css
from foreprop.report.report import timeline_block
from foreprop.report.timeline import Timeline
from foreprop.report.timeline_svg import layer_names
from foreprop.workload.records import CPU_BOUND_SHARE, Record

_TITLE = "P3 and its peers, measured on one machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One figure as the page shows it: SVG elements, or timelines that the page draws itself."""

    number: int
    parts: Sequence[str]
    systems: Sequence[str]
    timelines: Sequence[Timeline]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """All that the page tells."""

    quick: bool
    command: str
    figures: Sequence[Drawn]
    runs: Sequence[tuple[Measurement, KeptRun]]
    failed: Sequence[str]

    def points(self, number: int) -> list[Point]:
        """Of one figure, in the order of its sweep."""
        return points_of(run.records for m, run in self.runs if number in m.figures)

    def measured(self, number: int) -> list[Measured]:
        return [(m.setting, run.records) for m, run in self.runs if number in m.figures]

    @property
    def records(self) -> list[Record]:
        return [record for _, run in self.runs for record in run.records]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    heading: str
    paper: str
    intro: str


_WORDS: Mapping[int, _Words] = {
    sweeps.BANDWIDTH: _Words(
        heading="Throughput against bandwidth",
        paper="Fig. 7, section 5.3",
        intro="Four nodes, each with a worker and a server; a slower link to the left. Where the "
        "limit line is flat there is enough bandwidth to hide all communication behind the "
        "computation; where it falls, the wire is the limit. The gap between a curve and the line "
        "is what the system's order of sending costs.",
    ),
    sweeps.UTILISATION: _Words(
        heading="What one node's link carries",
        paper="Figs. 8 and 9, section 5.4",
        intro="Node 0's interface counters, read every 10 ms for about two steps, as a share of "
        "the link's rate (dashed). The paper sees bursts with idle time between them for its "
        "baseline, inbound and outbound not at the same time, and less idle time with P3.",
    ),
    sweeps.NODES: _Words(
        heading="Throughput against the number of nodes",
        paper="Fig. 10, section 5.5",
        intro="The links keep their rate while nodes are added. All nodes of this cluster share "
        "one machine, so with many of them its CPUs may become the limit: those points are hollow "
        "and no speed-up is stated for them. The paper, on links of 10 Gbit/s: up to 61% more with "
        "P3 for VGG-19 and 18% for Sockeye, both on eight machines; no difference for ResNet-50, "
        "for which such links are more than enough. Here the links are slow enough to matter.",
    ),
    sweeps.SLICE_SIZE: _Words(
        heading="Throughput against slice size",
        paper="Fig. 12, section 5.7",
        intro="How finely p3 cuts, in elements of the unscaled model. Very small slices cost CPU "
        "time for each of them; very large ones hold up the more urgent ones behind them and "
        "leave one direction of the link idle. The paper found its peak at 50,000 for ResNet-50 "
        "and VGG-19.",
    ),
    sweeps.TIMELINE: _Words(
        heading="Two steps of one worker",
        paper="sketched in Figs. 4 and 6, section 4",
        intro="From the traces of a real run. A colour is a layer, from dark (needed first in the "
        "forward pass) to bright (needed last); pale is the backward pass, red is waiting for a "
        "parameter. With kvstore the first layers' gradients, which come last, queue behind the "
        "large layers'; with p3 they overtake.",
    ),
}


def render_page(story: Story) -> str:
    """The whole page."""
    body = _header(story) + best_section(story.points(sweeps.BANDWIDTH))
    body += "".join(_figure_section(story, figure) for figure in story.figures)
    body += _how_to_read() + _what_was_run(story)
    timelines = [timeline for figure in story.figures for timeline in figure.timelines]
    own = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    styles = own + systems_css() + palette_css(layer_names(timelines))
    return render_document(_TITLE, body, styles=styles)


def _header(story: Story) -> str:
    return tag(
        "header",
        tag("p", "foreprop lab", class_="eyebrow")
        + tag("h1", text(_TITLE))
        + tag("p", text(_lede(story)), class_="lede")
        + "".join(tag("p", text(note), class_="note") for note in _notes(story)),
    )


def _lede(story: Story) -> str:
    words = (
        "This repeats the evaluation of Priority-based Parameter Propagation (Jayarajan et al., "
        "SysML 2019) on a cluster in a box: emulated accelerators, but real gradients, optimizers "
        "and sockets."
    )
    points = [p for p in story.points(sweeps.BANDWIDTH) if SUBJECT in p.by_system]
    shares = [r.efficiency for p in points if not (r := p.by_system[SUBJECT]).cpu_bound]
    if shares:
        words += (
            f" Along the bandwidth sweep p3 reaches {min(shares):.2f} to {max(shares):.2f} of what "
            "no schedule can beat."
        )
    return words


def _notes(story: Story) -> Iterator[str]:
    """What a reader must know before the figures."""
    if story.quick:
        yield (
            "This was a quick run: few points, few steps. It shows the shapes; for figures to "
            "quote, run it without --quick."
        )
    bound = {(r.model, r.nodes, r.rate_bits_per_s) for r in story.records if r.cpu_bound}
    if bound:
        yield (
            f"In {len(bound)} of the settings the CPUs were the limit for some system: hollow in "
            "the charts, and left out of every stated speed-up."
        )
    if any(record.network == "pacing" for record in story.records):
        yield (
            "The kernel's links could not be made for all of it: there foreprop paced its own "
            "sockets, and only its own presets were measured."
        )
    yield from dict.fromkeys(notice for _, run in story.runs for notice in run.notices)
    for failure in story.failed:
        yield f"Not measured: {failure}"


def _figure_section(story: Story, figure: Drawn) -> str:
    words = _WORDS[figure.number]
    heading = tag("h2", f"{figure.number}. {text(words.heading)}")
    intro = tag("p", text(f"{words.intro} (In the paper: {words.paper}.)"))
    if figure.timelines:
        picture = timeline_block(figure.timelines)
    else:
        parts = "".join(tag("div", part, class_="chart") for part in figure.parts)
        picture = _legend(figure.systems) + tag("div", parts, class_="charts")
    caption = tag("p", text(_setting_in_words(story, figure.number)), class_="caption")
    return tag("section", heading + intro + picture + caption + _tables(story, figure.number))


def _legend(systems: Sequence[str]) -> str:
    if not systems:
        return ""
    entries = [_mark(f"var(--{variable(name)})", name) + text(name) for name in systems]
    entries.append(_mark("var(--ink)", LIMIT) + "limit: no schedule can beat it")
    entries.append(_mark("var(--quiet)", "hollow") + CPU_BOUND)
    entries.append(_mark("var(--quiet)", "spread") + "p10 to p90 of the steps")
    return tag("p", "".join(tag("span", entry) for entry in entries), class_="systems")


def _mark(colour: str, kind: str) -> str:
    """A piece of the line as the charts have it."""
    dashes = {"--": "6 3", ":": "2 2"}.get(style_of(kind).dashes, "none")
    if kind == LIMIT:
        dashes = "5 3"
    line = tag("path", d="M1 7H33", stroke=colour, stroke_width=2, stroke_dasharray=dashes)
    dot = _DOTS.get(style_of(kind).marker, "") if kind in STYLES else ""
    shape = tag("path", d=dot, fill=colour) if dot else ""
    if kind == "hollow":
        line = tag("circle", cx=17, cy=7, r=4, stroke=colour, stroke_width=1.6, fill="none")
    elif kind == "spread":
        line = tag("path", d="M17 1V13M14 1H20M14 13H20", stroke=colour, stroke_width=1.4)
    return tag("svg", line + shape, viewBox="0 0 34 14", aria_hidden="true")


_DOTS = {
    "o": "M13 7a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z",
    "s": "M13.5 3.5h7v7h-7Z",
    "D": "M17 2l5 5l-5 5l-5-5Z",
    "^": "M17 2l5 9h-10Z",
    "v": "M17 12l5-9h-10Z",
    "P": "M15.5 3h3v2.5h2.5v3h-2.5v2.5h-3v-2.5h-2.5v-3h2.5Z",
    "X": "M13 4l2-2l2 2l2-2l2 2l-2.5 3l2.5 3l-2 2l-2-2l-2 2l-2-2l2.5-3Z",
}


def _setting_in_words(story: Story, number: int) -> str:
    settings = [m.setting for m, _ in story.runs if number in m.figures]
    compute = {model_name(s.profile.name): f"{s.compute_s:g} s" for s in settings}
    first = settings[0]
    listed = ", ".join(f"{name} {seconds}" for name, seconds in compute.items())
    words = (
        f"Compute per step: {listed}. All arrays, slices and buckets are divided by {first.scale}: "
        f"a link of {_plain_rate(first.rate)} here stands for "
        f"{unscaled_gbit_per_s(first.rate):.2g} Gbit/s with the whole model and the same compute."
    )
    if number in (sweeps.UTILISATION, sweeps.TIMELINE):
        words = f"{model_name(first.profile.name)}, wire time = compute. {words}"
    return words


def _plain_rate(bits_per_s: float) -> str:
    return rate(bits_per_s).replace("\N{NO-BREAK SPACE}", " ")


def _tables(story: Story, number: int) -> str:
    points = story.points(number)
    if number == sweeps.BANDWIDTH:
        return tag("h3", "Every point of the sweep") + points_table(points, "balance")
    if number == sweeps.NODES:
        return tag("h3", "Every number of nodes") + points_table(points, "nodes")
    if number == sweeps.SLICE_SIZE:
        return tag("h3", "Efficiency by slice size") + slice_table(story.measured(number))
    return ""


def _how_to_read() -> str:
    entries = {
        "throughput": "workers / median seconds per step: how many batches all workers together "
        "process in a second. The emulated device has no batch size; ratios are as they would be "
        "in images per second.",
        "balance": "wire time / compute. Wire time is 2 (N - 1) / N times the model's bytes over "
        "the link's rate: what synchronising all parameters occupies each link for, in each "
        "direction, with a parameter server beside every worker as well as with a ring.",
        "limit": "the shortest step that any schedule of exact synchronous training could reach on "
        "these links, Ethernet, IP and TCP headers counted: the larger of the compute and, for "
        "every k, backward pass of arrays k and above + wire time of the first k + forward pass "
        "of arrays k and above.",
        "efficiency": "limit / median step.",
        CPU_BOUND: f"more than {percent(CPU_BOUND_SHARE)} of the machine's CPUs were busy. Such a "
        "run says something about this machine, not about the network.",
        "emulated": "a layer occupies a device clock for its share of the compute (by FLOPs, "
        "forward : backward = 1 : 2) instead of computing; gradients of the real shapes, hooks, "
        "optimizers, processes and sockets are real. All systems of a setting train the same "
        "module, and their blocks of steps take turns, so that a noisy machine hits all alike.",
    }
    rows = "".join(tag("dt", text(k)) + tag("dd", text(v)) for k, v in entries.items())
    return tag("section", tag("h2", "What the words mean") + tag("dl", rows))


def _what_was_run(story: Story) -> str:
    rows = "".join(
        tag("dt", text(name)) + tag("dd", text("; ".join(values)))
        for name, values in _facts(story).items()
    )
    command = tag("pre", tag("code", text(story.command)), tabindex=0) if story.command else ""
    listed = tag("summary", f"All {len(story.runs)} measurements") + _runs_table(story)
    return tag(
        "section",
        tag("h2", "What was run, on what")
        + tag("dl", rows)
        + command
        + tag("h3", "Measurements")
        + tag("details", listed),
    )


def _facts(story: Story) -> dict[str, list[str]]:
    """Every different value of each fact: a page may be made of runs of several days."""
    facts: dict[str, dict[str, None]] = {}
    for _, run in story.runs:
        versions = [record.versions for record in run.records]
        for found in (run.machine, *versions):
            for name, value in found.items():
                facts.setdefault(name, {})[value] = None
    network = {"namespaces": "network namespaces, links shaped by the kernel (tc tbf)"}
    for record in story.records:
        words = network.get(record.network, "sockets paced by foreprop")
        facts.setdefault("network", {})[words] = None
    taken = sorted(run.taken_at for _, run in story.runs)
    if taken:
        facts["measured"] = dict.fromkeys([f"{taken[0]} to {taken[-1]}"])
    return {name: list(values) for name, values in facts.items()}


def _runs_table(story: Story) -> str:
    names = ("figure", "setting", "systems", "steps", "took")
    rows = []
    for measurement, run in story.runs:
        steps = max((record.iterations for record in run.records), default=0)
        systems = ", ".join(record.system for record in run.records)
        cells = [run.title, systems, str(steps), f"{run.took_s:.0f} s"]
        figures = ", ".join(map(str, measurement.figures))
        rows.append(row(figures, [tag("td", text(cell)) for cell in cells]))
    return table(names, rows, kind="wide-text")
