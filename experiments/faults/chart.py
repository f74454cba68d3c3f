"""Throughput over time, through faults."""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments.chart import Chart
from experiments.faults.run import SYSTEM, Trial
from foreprop.report.style import QUIET, WAIT, style_of

_BIN_S = 2.0


def chart_of(trial: Trial) -> Chart:
    def draw(figure: Figure) -> None:
        axes, length_s, style = figure.subplots(), trial.length_s, style_of(SYSTEM)
        starts = [i * _BIN_S for i in range(int(length_s / _BIN_S))]
        paces = [trial.pace(start, start + _BIN_S) for start in starts]
        middles = [start + _BIN_S / 2 for start in starts]
        axes.plot(middles, paces, style.dashes, color=style.light)
        for fault in trial.faults:
            end_s = fault.at_s + fault.for_s if fault.for_s else length_s
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

    said = "steps per second over time, with a slow link, a stop, a cut and a kill"
    return Chart(
        whole=draw,
        whole_in=(7.6, 3.4),
        parts=[(said, draw)],
        systems=[SYSTEM],
    )
