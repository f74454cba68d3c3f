"""The picture of a compiled step, from the trace that a session has recorded.

    torchrun --nproc-per-node 2 -m foreprop_lab.experiments.compiledstep 60e6 step.svg

The transformer of `foreprop_lab.experiments.compiled`, compiled whole; the first argument is the
rate of each node's link in bits per second. Rank 0 draws its last step but one.

Compiled code has no layers while it runs. So what lies between two waits of a forward pass is
drawn as the computation of the layer that has been waited for. Behind the last wait everything,
the loss too, counts as backward, up to the first gradient.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foreprop.tools.cli.options import writable
from foreprop.tools.report.charts import save
from foreprop.tools.report.timeline import Timeline, timeline_from_trace
from foreprop_lab.experiments.compiled import Loop, set_up_node
from foreprop_lab.experiments.figures.charts import timeline_chart

STEPS = 12


def main(rate: float, picture: Path) -> None:
    writable(picture.parent)
    set_up_node()
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop("compiled", rate, trace=folder)
        loop.block(STEPS)
        rank = loop.session.rank
        loop.session.close()
        if rank == 0:
            (trace,) = Path(folder).glob("worker-0.*.trace.json")
            draw_step(trace, STEPS - 1, f"compiled whole, {rate / 1e6:g} Mbit/s", picture)


def draw_step(trace: Path, step: int, title: str, picture: Path) -> None:
    """Write the picture as SVG, and as PNG beside it; ``trace`` is one worker's."""
    events = json.loads(trace.read_text())["traceEvents"]
    layered = {"traceEvents": list(with_layers(events))}
    timeline = Timeline(preset=title, events=timeline_from_trace(layered, first_step=step, steps=1))
    chart = timeline_chart([timeline])
    save(chart.whole, chart.whole_in, picture.with_suffix(".png"), picture)


def with_layers(events: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The events, and each step's forward pass by layer; backward passes begin behind it."""
    spans = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: float(e["ts"]))
    steps = {e["args"]["step"] for e in spans if e["cat"] == "backward"}
    for step in sorted(steps):
        own = [e for e in spans if e["args"]["step"] == step]
        backward = [e for e in own if e["cat"] == "backward"]
        first_done = _stop(backward[0])
        waits = [e for e in own if e["cat"] == "wait" and e["ts"] < first_done]
        behind = max(map(_stop, waits), default=float(backward[0]["ts"]))
        yield from _forward(waits, behind)
        for event in backward:
            start = max(float(event["ts"]), behind)
            yield {**event, "ts": start, "dur": max(0.0, _stop(event) - start)}
    yield from (e for e in spans if e["cat"] != "backward")


def _forward(waits: Sequence[Mapping[str, Any]], until: float) -> Iterator[Mapping[str, Any]]:
    begins = [float(wait["ts"]) for wait in waits]
    for wait, start, stop in zip(waits, begins, [*begins, until][1:], strict=True):
        layer = wait["name"].rpartition(".")[0]
        yield {**wait, "cat": "forward", "name": layer, "ts": start, "dur": stop - start}


def _stop(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event.get("dur", 0))


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]))
