"""Draw the charts of lab/docs/results again from the data beside them, without measuring.

That includes the charts in index.html, and the rates in its words. It leaves out the timeline, the
accuracies, the faults and the compiled step.

    python -m foreprop_lab.experiments.figures.redraw lab/docs/results
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import msgspec
from markupsafe import Markup

from foreprop.quantities import rate_text
from foreprop.tools.report.charts import save
from foreprop_lab.benchmarks import convergence, scale, simulated_steps
from foreprop_lab.experiments.accuracy import scorecharts
from foreprop_lab.experiments.chart import Chart, write_chart
from foreprop_lab.experiments.figures import distribution
from foreprop_lab.experiments.figures.charts import throughput_chart, utilisation_chart
from foreprop_lab.experiments.figures.curves import (
    RATE_LABEL,
    Axis,
    ThroughputPanel,
    UtilisationPanel,
    unscaled_rate,
)
from foreprop_lab.experiments.figures.page import scaled_words
from foreprop_lab.experiments.figures.pictures import Part, inline_parts, systems_css
from foreprop_lab.experiments.figures.sweeps import SCALE
from foreprop_lab.experiments.mlp import charts as mlp
from foreprop_lab.experiments.mlp.run import MlpRecord
from foreprop_lab.experiments.papers import convergence as convergence_by_time
from foreprop_lab.experiments.papers import parallaxcharts
from foreprop_lab.setting.records import Record

_EMULATED = "emulated link rate, Mbit/s"
"""The axis label of older files, which have the divided model's rate."""
_TITLE_RATE = re.compile(r", (\d+) Mbit/s$")
_GBIT_PER_MBIT = SCALE / 1e3
_CHARTS = re.compile(r'(?<=<div class="charts">).*?(?=</div>\s*<p class="caption">)', re.DOTALL)
"""The charts in index.html, one match for each figure but the timeline."""
_STANDS_FOR = re.compile(r": a link of ([\d.]+ Mbit/s) here stands for ([\d.]+ Gbit/s) with [^.<]*")
THROUGHPUT = ("figure-1-bandwidth", "figure-3-nodes", "figure-4-slice-size")


def main(folder: str) -> None:
    results = Path(folder)
    charts = {name: _redraw_throughput(results, name) for name in THROUGHPUT}
    data = (results / "figure-2-utilisation.json").read_bytes()
    panels = msgspec.json.decode(data, type=list[UtilisationPanel])
    charts["figure-2-utilisation"] = utilisation_chart(panels)
    write_chart(results, "figure-2-utilisation", charts["figure-2-utilisation"], data)
    _redraw_mlp(results)
    _redraw_papers(results)
    for name, study in scorecharts.FILES.items():
        data = (results / f"{name}.json").read_bytes()
        write_chart(results, name, scorecharts.chart_of(study, scorecharts.decode(data)), data)
    for name in ("simulated-steps", "predicted-steps", "preset-steps"):
        points = msgspec.json.decode((results / f"{name}.json").read_bytes())
        simulated_steps.draw(points, str(results / name))
    curves = msgspec.json.decode((results / "convergence.json").read_bytes())
    convergence.write(curves, str(results / "convergence"))
    scale.draw(msgspec.json.decode((results / "scale.json").read_bytes()), str(results / "scale"))
    page, records = results / "index.html", (results / "results.json").read_bytes()
    parts = [inline_parts(name, charts[name]) for name in sorted(charts)]
    text = with_charts(page.read_text(), parts)
    page.write_text(with_undivided_rates(text, msgspec.json.decode(records, type=list[Record])))
    _recolour(page)


def with_charts(page: str, figures: Sequence[Sequence[Part]]) -> str:
    """The page with its charts replaced by those of the figures, in their order."""
    numbers = count()

    def drawn_anew(_: re.Match[str]) -> str:
        return "".join(
            Markup(
                '<div class="chart"><svg viewBox="{}" role="img" aria-label="{}">{}</svg></div>'
            ).format(part.box, part.label, part.inside)
            for part in figures[next(numbers)]
        )

    return _CHARTS.sub(drawn_anew, page)


def with_undivided_rates(page: str, records: Sequence[Record]) -> str:
    """The page with the rates of the undivided model in its words, if it had the emulated ones."""
    for record in records:
        bits_per_s = record.rate_bits_per_s
        undivided = unscaled_rate(bits_per_s)
        where = f"{record.model}, {record.nodes} nodes, "
        page = page.replace(f"{where}{bits_per_s / 1e6:.0f} Mbit/s", where + undivided)
        cell = rate_text(bits_per_s).replace(" ", "\N{NO-BREAK SPACE}")
        page = page.replace(f"<td>{cell}</td>", f"<td>{undivided}</td>")
    return _STANDS_FOR.sub(lambda found: scaled_words(found[1], found[2]), page)


def _redraw_throughput(results: Path, name: str) -> Chart:
    path = results / f"{name}.json"
    panels = msgspec.json.decode(path.read_bytes(), type=list[ThroughputPanel])
    undivided = [in_gbit(panel) for panel in panels]
    chart = throughput_chart(undivided)
    write_chart(results, name, chart, msgspec.json.encode(undivided))
    return chart


def in_gbit(panel: ThroughputPanel) -> ThroughputPanel:
    """The panel with the undivided model's rates, if it has the emulated ones."""
    title = _TITLE_RATE.sub(lambda m: f", {int(m[1]) * _GBIT_PER_MBIT:.2g} Gbit/s", panel.title)
    panel = msgspec.structs.replace(panel, title=title)
    if panel.axis.label != _EMULATED:
        return panel
    axis = msgspec.structs.replace(
        panel.axis,
        label=RATE_LABEL,
        second_ticks=[(x * _GBIT_PER_MBIT, text) for x, text in panel.axis.second_ticks],
    )
    return _scaled(panel, axis)


def _scaled(panel: ThroughputPanel, axis: Axis) -> ThroughputPanel:
    return msgspec.structs.replace(
        panel,
        axis=axis,
        curves=[
            msgspec.structs.replace(
                curve,
                points=[
                    msgspec.structs.replace(point, x=point.x * _GBIT_PER_MBIT)
                    for point in curve.points
                ],
            )
            for curve in panel.curves
        ],
        limit=[(x * _GBIT_PER_MBIT, y) for x, y in panel.limit],
    )


def _redraw_mlp(results: Path) -> None:
    records = msgspec.json.decode((results / "mlp.json").read_bytes(), type=list[MlpRecord])
    charts = {
        "mlp-epoch-times": mlp.epoch_chart(records),
        "mlp-throughput": mlp.throughput_chart(records),
        "mlp-comparison": mlp.comparison_chart(records),
    }
    for name, chart in charts.items():
        save(chart.whole, chart.whole_in, results / f"{name}.png", results / f"{name}.svg")


def _redraw_papers(results: Path) -> None:
    """Draw the figures that are not measured: the papers', simulated, and Fig. 5's arrays."""
    data = (results / "simulated-utilisation.json").read_bytes()
    watched = msgspec.json.decode(data, type=list[UtilisationPanel])
    chart = utilisation_chart(watched)
    save(chart.whole, chart.whole_in, results / "simulated-utilisation.png")  # 23,000 lines as SVG
    data = (results / "simulated-nodes.json").read_bytes()
    by_nodes = msgspec.json.decode(data, type=list[ThroughputPanel])
    write_chart(results, "simulated-nodes", throughput_chart(by_nodes), data)
    data = (results / f"{distribution.NAME}.json").read_bytes()
    arrays = msgspec.json.decode(data, type=list[distribution.Distribution])
    write_chart(results, distribution.NAME, distribution.distribution_chart(arrays), data)
    courses = msgspec.json.decode((results / "convergence-time.json").read_bytes())
    convergence_by_time.write(courses, results)
    parallaxcharts.draw(results)


def _recolour(page: Path) -> None:
    """Make the page's own pictures take their colours from its variables."""
    light, dark = systems_css().splitlines()
    text = page.read_text()
    text = re.sub(r":root\{--system-p3:[^}]*\}", light, text, count=1)
    dark_root = dark[dark.index(":root") : -1]
    start = text.index(light) + len(light)
    rest = re.sub(r":root\{--system-p3:[^}]*\}", dark_root, text[start:], count=1)
    variant = re.compile(r"var\(--system-(\w+)-tuned\)")
    page.write_text(text[:start] + variant.sub(r"var(--system-\1)", rest))


if __name__ == "__main__":
    main(*sys.argv[1:])
