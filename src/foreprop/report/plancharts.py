"""The planner's curves: throughput by what may be another, a line for each architecture."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from foreprop.model.whatif import WhatIf, value_text
from foreprop.report.charts import INK, QUIET, STYLES, Chart

_SIZE_IN = (7.0, 4.2)
_MOST_TICKS = 9
_LABELS = {
    "rate": "rate of every node's link",
    "latency": "latency",
    "compute": "compute per step",
    "nodes": "nodes",
    "servers": "dedicated servers",
}
_STYLES = {
    "ddp": STYLES["ddp"],
    "ddp dense": STYLES["ddp-tuned"],
    "ring": STYLES["slicing"],
    "hybrid": STYLES["mxnet-kvstore"],
    "p2p": STYLES["p3"],
    "ps": STYLES["kvstore"],
}
"""By name or architecture; the lab's for what it has, too."""


def what_if_chart(title: str, curves: WhatIf) -> Chart:
    """``title`` says what stays as it is."""

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        values = [point.value for point in curves.points]
        for number, name in enumerate(curves.candidates):
            style = _STYLES.get(name) or _STYLES[name.partition(" ")[0]]
            ax.plot(
                values,
                [point.throughputs[number] for point in curves.points],
                color=style.light,
                marker=style.marker,
                markersize=4.5,
                linewidth=1.9 if name == "p2p p3" else 1.3,
                label=name,
            )
        ideal = [point.ideal for point in curves.points]
        ax.plot(values, ideal, color=INK, linestyle=(0, (4, 2)), linewidth=1.2, label="ideal")
        ax.set_title(title)
        ax.set_xlabel(_LABELS[curves.variable])
        ax.set_ylabel(f"{curves.throughput_unit}, all workers")
        ax.set_ylim(0, 1.08 * max([*ideal, *(max(p.throughputs) for p in curves.points)]))
        if curves.variable != "servers" and values[0] > 0 and values[-1] / values[0] > 4:
            ax.set_xscale("log")
        ticks = values[:: -(-len(values) // _MOST_TICKS)]
        ax.xaxis.set_major_locator(FixedLocator(ticks))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xticks(ticks, [value_text(curves.variable, value) for value in ticks])
        ax.margins(x=0.07)
        if curves.asked is not None and values[0] < curves.asked < values[-1]:
            ax.axvline(curves.asked, color=QUIET, linewidth=0.8, linestyle=":")
        handles, labels = ax.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))

    return Chart(whole=draw, whole_in=_SIZE_IN, parts=[])
