"""Draw lab/docs/results/against-ddp.png: foreprop and DDP beside the limit, from figure 1's data.

python scripts/ddp_chart.py        (needs the extra `lab`)

Nothing is measured here: `foreprop lab figures` wrote lab/docs/results/figure-1-bandwidth.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from foreprop.tools.report.charts import CARD, INK, PNG_DPI, QUIET, drawn, style_of
from foreprop_lab.experiments.chart import with_gaps

RESULTS = Path(__file__).parents[1] / "lab" / "docs" / "results"
TUNED = "ddp-tuned"
SHOWN = {"p3": "foreprop", "ddp": "DDP", TUNED: "DDP, best of several bucket sizes"}
MODELS = ("ResNet-50", "VGG-19")
TICKS = {2.0: "twice as long", 1.0: "as long", 0.5: "half as long"}


def panels() -> dict[str, Any]:
    """The panels of figure 1 by model, which show throughput by link rate."""
    found = json.loads((RESULTS / "figure-1-bandwidth.json").read_text())
    return {panel["title"]: panel for panel in found}


def points(panel: Any, system: str) -> list[tuple[float, float]]:
    """Link rate (1: sending takes as long as computing) and throughput (1: without a network)."""
    rate, most = _units(panel)
    curve = next(curve for curve in panel["curves"] if curve["system"] == system)
    return [(point["x"] / rate, point["throughput"] / most) for point in curve["points"]]


def shown_points(panel: Any, system: str) -> list[tuple[float, float]]:
    """The points as drawn: DDP's usual bucket size is used where it is the best of several."""
    own, plain = points(panel, system), dict(points(panel, "ddp"))
    return [(x, max(y, plain.get(x, y)) if system == TUNED else y) for x, y in own]


def limit(panel: Any) -> list[tuple[float, float]]:
    rate, most = _units(panel)
    return [(x / rate, throughput / most) for x, throughput in panel["limit"]]


def _units(panel: Any) -> tuple[float, float]:
    (rate,) = [x for x, balance in panel["axis"]["second_ticks"] if balance == "1"]
    return rate, max(throughput for _, throughput in panel["limit"])


def draw(figure: Figure) -> None:
    shown = panels()
    for axes, model in zip(figure.subplots(1, len(MODELS), sharey=True), MODELS, strict=True):
        axes.set_title(model)
        axes.plot(*zip(*limit(shown[model]), strict=True), color=INK, label="the limit")
        measured = {rate for system in SHOWN for rate, _ in points(shown[model], system)}
        for system, label in SHOWN.items():
            style, width = style_of(system), 2.6 if system == "p3" else 1.4
            axes.plot(
                *with_gaps(shown_points(shown[model], system), measured),
                color=style.light,
                marker=style.marker,
                linestyle="" if system == TUNED else style.dashes,  # too few to be joined
                linewidth=width,
                label=label,
            )
        axes.set(ylim=(0, 1.06), xscale="log")
        axes.set_xlabel("sending a step's gradients takes ... as computing it", color=QUIET)
        axes.set_xticks([1 / times for times in TICKS], [*TICKS.values()])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    figure.axes[0].set_ylabel("throughput, of a network that costs nothing")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)


def main() -> None:
    with drawn(draw, (8.6, 3.7)) as figure:
        figure.savefig(RESULTS / "against-ddp.png", dpi=PNG_DPI, facecolor=CARD)


if __name__ == "__main__":
    main()
