"""The page of ``foreprop lab figures``, with its words: one HTML file that needs nothing else.

`render_page` is pure. What is not measured is left out, so some of the figures, or a quick run,
make a page too, which says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foreprop.tools.compare.result import CPU_BOUND_SHARE
from foreprop.tools.report.charts import STYLES, style_of
from foreprop.tools.report.document import asset, palette_css, rate, render
from foreprop.tools.report.timeline import Timeline
from foreprop.tools.report.timeline_svg import DrawnTimelines, draw_timelines, layer_names
from foreprop_lab.experiments.figures import sweeps
from foreprop_lab.experiments.figures.comparison import SUBJECT, Point, model_name, points_of
from foreprop_lab.experiments.figures.curves import Measured, unscaled_rate
from foreprop_lab.experiments.figures.keptruns import KeptRun
from foreprop_lab.experiments.figures.pagetables import (
    CPU_BOUND,
    Cell,
    Row,
    Table,
    best_table,
    points_table,
    slice_table,
)
from foreprop_lab.experiments.figures.pictures import Part, systems_css, variable
from foreprop_lab.experiments.figures.sweeps import Measurement
from foreprop_lab.setting.records import Record

_TITLE = "P3 and its peers, measured on one machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One figure as the page shows it: SVG elements, or timelines that the page draws itself."""

    number: int
    parts: Sequence[Part]
    systems: Sequence[str]
    timelines: Sequence[Timeline]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """All that the page shows."""

    quick: bool
    command: str
    figures: Sequence[Drawn]
    runs: Sequence[tuple[Measurement, KeptRun]]
    failed: Sequence[str]

    def points(self, number: int) -> list[Point]:
        """One figure's points, in the order of its sweep."""
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
        paper="Figs. 8, 9, 13 and 14, section 5.4 and appendix B",
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


class LegendEntry(NamedTuple):
    """A piece of a chart's line, or its mark, with the system whose it is."""

    words: str
    colour: str
    kind: str = "line"
    dashes: str = "none"
    dot: str = ""
    """The mark's SVG path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """A figure as the template needs it."""

    number: int
    words: _Words
    legend: Sequence[LegendEntry]
    parts: Sequence[Part]
    timelines: DrawnTimelines | None
    caption: str
    table: Table | None


def render_page(story: Story) -> str:
    """The whole page as HTML."""
    timelines = [timeline for figure in story.figures for timeline in figure.timelines]
    own = asset("page.css", package=__package__)
    return render(
        "page.html",
        package=__package__,
        styles=own + systems_css() + palette_css(layer_names(timelines)),
        title=_TITLE,
        lede=_lede(story),
        notes=list(_notes(story)),
        best=best_table(story.points(sweeps.BANDWIDTH)),
        figures=[_figure(story, figure) for figure in story.figures],
        cpu_bound_share=CPU_BOUND_SHARE,
        facts={name: "; ".join(values) for name, values in _facts(story).items()},
        command=story.command,
        runs=_runs_table(story),
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
    bound = sum(any(record.cpu_bound for record in run.records) for _, run in story.runs)
    if bound:
        yield (
            f"In {bound} of the settings the CPUs were the limit for some system: hollow in "
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


def _figure(story: Story, figure: Drawn) -> _Figure:
    return _Figure(
        number=figure.number,
        words=_WORDS[figure.number],
        legend=_legend(figure.systems),
        parts=figure.parts,
        timelines=draw_timelines(figure.timelines) if figure.timelines else None,
        caption=_setting_in_words(story, figure.number),
        table=_table(story, figure.number),
    )


def _legend(systems: Sequence[str]) -> list[LegendEntry]:
    if not systems:
        return []
    return [
        *(_system_entry(name) for name in systems),
        LegendEntry("limit: no schedule can beat it", "var(--ink)", dashes="5 3"),
        LegendEntry(CPU_BOUND, "var(--quiet)", "hollow"),
        LegendEntry("p10 to p90 of the steps", "var(--quiet)", "spread"),
    ]


def _system_entry(name: str) -> LegendEntry:
    style = style_of(name)
    return LegendEntry(
        name,
        f"var(--{variable(name)})",
        dashes={"--": "6 3", ":": "2 2"}.get(style.dashes, "none"),
        dot=_DOTS.get(style.marker, "") if name in STYLES else "",
    )


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
        f"Compute per step: {listed}. All arrays, slices and buckets are divided by {first.scale}"
        f"{scaled_words(_plain_rate(first.rate), unscaled_rate(first.rate))}."
    )
    if number in (sweeps.UTILISATION, sweeps.TIMELINE):
        words = f"Wire time = compute. {words}"
    return words


def scaled_words(emulated: str, undivided: str) -> str:
    """Sentences that say what the page's rates mean, as they look like those of slow links."""
    return (
        f", and so are the links: one of {undivided} with the whole model and the same compute has "
        f"{emulated} here. Rates are those with the whole model"
    )


def _plain_rate(bits_per_s: float) -> str:
    return rate(bits_per_s).replace("\N{NO-BREAK SPACE}", " ")


def _table(story: Story, number: int) -> Table | None:
    points = story.points(number)
    if number == sweeps.BANDWIDTH:
        return points_table(points, "balance", "Every point of the sweep")
    if number == sweeps.NODES:
        return points_table(points, "nodes", "Every number of nodes")
    if number == sweeps.SLICE_SIZE:
        return slice_table(story.measured(number), "Efficiency by slice size")
    return None


def _facts(story: Story) -> dict[str, list[str]]:
    """All different values of each fact: a page may be made of runs of several days."""
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


def _runs_table(story: Story) -> Table:
    names = ("figure", "setting", "systems", "steps", "took")
    rows = []
    for measurement, run in story.runs:
        steps = max((record.iterations for record in run.records), default=0)
        systems = ", ".join(record.system for record in run.records)
        cells = [run.title, systems, str(steps), f"{run.took_s:.0f} s"]
        figures = ", ".join(map(str, measurement.figures))
        rows.append(Row(figures, [Cell(words) for words in cells]))
    return Table(names=names, rows=rows, kind="wide-text")
