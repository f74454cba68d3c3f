"""P3's Figs. 8, 9, 13, 14 (a node's link) and 10 (2 to 16 nodes), simulated.

    python -m foreprop_lab.experiments.papers.links lab/docs/results

It simulates what `foreprop lab figures --only 2,3` would measure, for all models and up to 16
nodes, in the same settings, panels and charts; nothing here is a measurement.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

import msgspec

from foreprop.tools.cli.options import writable
from foreprop.tools.report.charts import save
from foreprop_lab.experiments.chart import write_chart
from foreprop_lab.experiments.figures.charts import throughput_chart, utilisation_chart
from foreprop_lab.experiments.figures.curves import (
    UtilisationPanel,
    nodes_panels,
    utilisation_panels,
)
from foreprop_lab.experiments.figures.sweeps import FULL, NODES, UTILISATION, plan_measurements
from foreprop_lab.setting.labsetting import LabSetting
from foreprop_lab.setting.records import Record
from foreprop_lab.simulate.run import simulate_each, simulate_lab
from foreprop_lab.simulate.setting import SimulatedSetting

IDLE_SHARE = 0.05
"""A link that carries less than this share of its rate is called idle."""
SIXTEEN = replace(
    FULL,
    nodes={model: dict.fromkeys((2, 4, 8, 16), 3) for model in ("sockeye", "resnet50", "vgg19")},
)
"""The lab's campaign, with VGG-19 on 16 nodes in addition."""
_STEPS = 3


def simulated(setting: LabSetting) -> SimulatedSetting:
    """The setting for the simulator, without traces."""
    given = {spec.name: getattr(setting, spec.name) for spec in fields(LabSetting)}
    return SimulatedSetting(
        **given | {"trace": None, "iterations": min(setting.iterations, _STEPS), "warm_up": 1}
    )


def utilisation(settings: Iterable[LabSetting]) -> list[UtilisationPanel]:
    panels = []
    for setting in settings:
        found = list(simulate_each(simulated(setting)))
        samples = {record.system: seen for record, seen in found}
        panels += utilisation_panels([record for record, _ in found], samples)
    return panels


def idle_shares(panel: UtilisationPanel) -> tuple[float, float]:
    """The shares of the time in which the node's link is idle, sending and receiving."""
    lengths_s = [end - begin for begin, end in itertools.pairwise(panel.seconds)]

    def idle(shares: Sequence[float]) -> float:
        idle_s = sum(s for s, share in zip(lengths_s, shares, strict=True) if share < IDLE_SHARE)
        return idle_s / max(sum(lengths_s), 1e-9)

    return idle(panel.sent_share), idle(panel.received_share)


def by_nodes(settings: Iterable[LabSetting]) -> Iterator[tuple[LabSetting, Sequence[Record]]]:
    for setting in settings:
        yield setting, simulate_lab(simulated(setting))


def main(out: str, only: str = "2,3") -> None:
    """Write simulated-utilisation and simulated-nodes, and print what they show."""
    folder, wanted = writable(Path(out)), {int(number) for number in only.split(",")}
    planned = plan_measurements(SIXTEEN, traces=Path("unused"), only=wanted)
    if UTILISATION in wanted:
        watched = utilisation(m.setting for m in planned if UTILISATION in m.figures)
        chart = utilisation_chart(watched)
        save(chart.whole, chart.whole_in, folder / "simulated-utilisation.png")  # large as SVG
        (folder / "simulated-utilisation.json").write_bytes(msgspec.json.encode(watched))
        for panel in watched:
            sent, received = idle_shares(panel)
            print(f"{panel.model}, {panel.system}: idle {sent:.0%} out, {received:.0%} in")
    if NODES in wanted:
        runs = []
        for setting, records in by_nodes(m.setting for m in planned if NODES in m.figures):
            steps = {record.system: record.iteration_s.median for record in records}
            print(
                f"{setting.profile.name}, {setting.nodes} nodes: p3 over kvstore"
                f" {steps['kvstore'] / steps['p3']:.2f}, over ddp {steps['ddp'] / steps['p3']:.2f}",
                flush=True,
            )
            runs.append((setting, records))
            panels = nodes_panels(runs)
            data = msgspec.json.encode(panels)
            write_chart(folder, "simulated-nodes", throughput_chart(panels), data)


if __name__ == "__main__":
    main(*sys.argv[1:])
