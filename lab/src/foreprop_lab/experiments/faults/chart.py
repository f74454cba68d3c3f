"""Throughput over time, through faults."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from foreprop.tools.report.charts import QUIET, WAIT, style_of
from foreprop_lab.experiments.chart import Chart
from foreprop_lab.experiments.faults.trial import P3, REJOIN, Trial

_BIN_S = 2.0


def chart_of(trials: Sequence[Trial]) -> Chart:
    """The throughput chart of trials that all had the same faults."""
    names = [drawn_as(trial) for trial in trials]

    def draw(figure: Figure) -> None:
        axes, length_s = figure.subplots(), max(trial.length_s for trial in trials)
        for trial, name in zip(trials, names, strict=True):
            style = style_of(name)
            starts = [i * _BIN_S for i in range(int(trial.length_s / _BIN_S))]
            paces = [trial.pace(start, start + _BIN_S) for start in starts]
            middles = [start + _BIN_S / 2 for start in starts]
            axes.plot(middles, paces, style.dashes, color=style.light, label=name)
        for fault, until_s in trials[0].windows():
            end_s = fault.at_s + fault.for_s if fault.for_s else until_s
            if fault.name != REJOIN:
                axes.axvspan(fault.at_s, end_s, color=WAIT, alpha=0.08, linewidth=0)
            axes.text(
                fault.at_s,
                1.0,
                f" {fault.name}",
                color=QUIET,
                fontsize=8,
                va="bottom",
                transform=axes.get_xaxis_transform(),
            )
        axes.set(xlabel="seconds", ylabel="steps per second, all workers", xlim=(0, length_s))
        axes.set_ylim(bottom=0)
        if len(trials) > 1:
            axes.legend(loc="lower left")

    said = "steps per second over time, with a slow link, a stop, a cut, a kill and a rejoin"
    return Chart(
        whole=draw,
        whole_in=(7.6, 3.4),
        parts=[(said, draw)],
        systems=names,
    )


def drawn_as(trial: Trial) -> str:
    return "p3-elastic" if trial.system == P3 else trial.system
