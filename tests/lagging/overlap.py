"""What a device costs beside host memory: the same emulated layers on both, in turns.

    python -m tests.lagging.overlap                                  # prints the steps' ratio
    python -m tests.lagging.overlap --timeline lab/docs/results/device-timeline.png

Two ranks train layers of known times, over links on which a step's bytes take as long as its
computation. On host memory the lab's emulated layers occupy the training thread. On the lagging
device they occupy its stream: the training thread runs ahead, and gradients and values are copied.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import foreprop
from foreprop.engine.world import World
from foreprop.plan.profile import Layer
from foreprop.tools.report.charts import QUIET, STYLES, WAIT, save
from foreprop.tools.report.tracefile import read_folder
from foreprop_lab.lab.accelerator import DeviceClock, EmulatedModel
from tests.cluster import run_cluster
from tests.lagging.device import DEVICE, Stream, lagging
from tests.lagging.streams import LINES, current_stream, on_stream

RANKS = 2
LAYERS = 8
ELEMS = 100_000
FORWARD_S, BACKWARD_S = 0.004, 0.008
STEP_S = LAYERS * (FORWARD_S + BACKWARD_S)
RATE_BITS_PER_S = 8 * 4 * ELEMS * LAYERS / STEP_S
SYSTEMS = ("host memory", "device")
_WARM_UP_STEPS = 4


# The layers on the device.
class _Occupy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: DeviceLayer, *_: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        layer.occupy("forward", FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        layer: DeviceLayer = ctx.layer
        layer.occupy("backward", BACKWARD_S)
        return gradient, None, layer.gradient.clone()


class DeviceLayer(nn.Module):
    """As the lab's emulated layer, but that its stream is occupied, and not who trains."""

    def __init__(self, clock: DeviceClock, number: int) -> None:
        super().__init__()
        self.array = nn.Parameter(torch.zeros(ELEMS, device=DEVICE))
        made = torch.randn(ELEMS, generator=torch.Generator().manual_seed(number))
        self.gradient = made.mul_(1e-3).to(DEVICE)
        self._clock, self._number = clock, number

    def occupy(self, what: str, seconds: float) -> None:
        given_s = time.monotonic()

        def job() -> None:
            # idle only until the host has given it this: as the lab's clock, it makes up for
            # sleeps that end late
            self._clock.free_at = max(self._clock.free_at, given_s)
            self._clock.occupy(seconds)

        job.name = f"{what} {self._number}"  # type: ignore[attr-defined]
        current_stream().line.put(job)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Occupy.apply(x, self, self.array.view_as(self.array))
        return result


def _model(system: str) -> nn.Module:
    if system == "device":
        clock = DeviceClock()
        return nn.Sequential(*(DeviceLayer(clock, number) for number in range(LAYERS)))
    layers = [
        Layer(name=f"layer {n}", sizes_elems=(ELEMS,), forward_s=FORWARD_S, backward_s=BACKWARD_S)
        for n in range(LAYERS)
    ]
    return EmulatedModel(layers)


class _System:
    """One of both on one rank."""

    def __init__(self, name: str, world: World, trace: Path | None) -> None:
        self._model = _model(name)
        self._on_device = name == "device"
        self._x = torch.ones(1, device=DEVICE if self._on_device else "cpu", requires_grad=True)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1, momentum=0.9)
        settings: dict[str, Any] = {"trace": str(trace)} if trace and self._on_device else {}
        self.session = foreprop.parallelize(
            self._model,
            self._optimizer,
            world=world,
            architecture="p2p",
            update="servers",
            link_rate_bits_per_s=RATE_BITS_PER_S,
            **settings,
        )

    def steps(self, count: int) -> float:
        """Seconds per step, from the end of one forward pass to the end of another."""
        self.session.flush()
        if isinstance(self._model, EmulatedModel):
            self._model.clock.restart()
        loss = self._model(self._x).sum()
        self._finish()
        began_s = time.perf_counter()
        for _ in range(count):
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            loss = self._model(self._x).sum()
        self._finish()
        return (time.perf_counter() - began_s) / count

    def _finish(self) -> None:
        if self._on_device:
            current_stream().synchronize()


class Span(NamedTuple):
    lane: str
    name: str
    began_s: float
    ended_s: float


class Measured(NamedTuple):
    """Seconds per step, by system and block, the slowest rank's; rank 0's last block.

    ``cpu_s``: processor time per step of the whole process, all ranks and servers.
    """

    steps_s: dict[str, list[float]]
    cpu_s: dict[str, list[float]]
    spans: list[Span]


def measure(rounds: int, steps: int, trace: Path | None = None) -> Measured:
    """In turns, a block of each: whoever else is on this machine disturbs both alike."""
    together = threading.Barrier(RANKS)
    LINES.takes_s = dict.fromkeys(range(1, 64), 0.0)  # which records when they do what
    spans: list[Span] = []
    cpu_s: dict[str, list[float]] = {name: [] for name in SYSTEMS}

    def work(world: World) -> list[list[float]]:
        torch.autograd.set_multithreading_enabled(False)
        found: list[list[float]] = []
        with ExitStack() as sessions, on_stream(Stream()):
            systems = [_System(name, world, trace) for name in SYSTEMS]
            for system in systems:
                sessions.enter_context(system.session)
                system.steps(_WARM_UP_STEPS)
            for _ in range(rounds):
                found.append([])
                for name, system in zip(SYSTEMS, systems, strict=True):
                    together.wait()
                    if world.rank == 0:
                        for line in LINES.all():
                            line.busy.clear()
                    used_s = time.process_time()
                    found[-1].append(system.steps(steps))
                    together.wait()
                    if world.rank == 0:
                        cpu_s[name].append((time.process_time() - used_s) / steps)
            together.wait()
            if world.rank == 0:
                spans.extend(_device_spans(current_stream().stream_id))
        return found

    try:
        with lagging(manner="eager"):
            by_rank = run_cluster(RANKS, work, timeout_s=600)
    finally:
        LINES.takes_s = {}
    blocks = [
        [max(both) for both in zip(*block, strict=True)] for block in zip(*by_rank, strict=True)
    ]
    steps_s = {name: [block[i] for block in blocks] for i, name in enumerate(SYSTEMS)}
    if trace is not None:
        spans += _link_spans(trace, since_s=min(span.began_s for span in spans))
    return Measured(steps_s, cpu_s, spans)


# The timeline.
LANES = ("compute", "copy to host", "copy to device", "push", "reply", "wait")
TOLD = {
    "compute": "device: compute",
    "copy to host": "device: gradients to the host",
    "copy to device": "device: values to the device",
    "push": "link: worker to servers",
    "reply": "link: servers to worker",
    "wait": "host: waits for values",
}
COPY_DRAWN_S = 0.7e-3
"""Copies take less, and would not be seen."""
_CATEGORIES = {"push_sent": "push", "reply_received": "reply", "wait": "wait"}


def _device_spans(training: int) -> Iterator[Span]:
    """Of rank 0's streams: the one that trains, and those that its thread has begun beside it."""
    for line in LINES.all():
        if line.number != training and line.begun_by != threading.current_thread().name:
            continue
        for began_s, ended_s, name in list(line.busy):
            kind = name if name.startswith("copy to") else name.partition(" ")[0]
            if kind in ("forward", "backward", "copy to host", "copy to device"):
                lane = kind if kind in LANES else "compute"
                yield Span(lane, name, began_s, ended_s)


def _link_spans(folder: Path, since_s: float) -> Iterator[Span]:
    """Rank 0's, of the session's own trace, in the same clock."""
    offset_s = time.time() - time.perf_counter()
    for process in read_folder(folder):
        if process.rank != 0:
            continue
        for event in process.spans:
            lane = _CATEGORIES.get(event["cat"])
            began_s = event["ts"] / 1e6 - offset_s
            if lane is not None and began_s >= since_s:
                yield Span(lane, event["name"], began_s, began_s + event["dur"] / 1e6)


def draw_timeline(spans: Sequence[Span], path: Path, steps: int = 2) -> None:
    """The last ``steps`` steps."""
    ends = [s.ended_s for s in spans if s.name == f"forward {LAYERS - 1}"]
    began_s, ended_s = sorted(ends)[-1 - steps], max(ends)
    blue = STYLES["p3"].light
    colours = {"forward": blue, "backward": STYLES["hybrid"].light, "wait": WAIT}

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        for row, lane in enumerate(LANES):
            for span in spans:
                start_s = max(span.began_s, began_s)
                if span.lane != lane or start_s >= min(span.ended_s, ended_s):
                    continue
                width_s = min(span.ended_s, ended_s) - start_s
                if lane.startswith("copy"):
                    width_s = max(width_s, COPY_DRAWN_S)
                kind = span.name.partition(" ")[0] if lane == "compute" else lane
                axes.broken_barh(
                    [((start_s - began_s) * 1e3, width_s * 1e3)],
                    (row - 0.4, 0.8),
                    color=colours.get(kind, QUIET),
                    edgecolor="none" if lane.startswith("copy") else "white",
                    linewidth=0.4,
                )
        axes.set_yticks(range(len(LANES)), [TOLD[lane] for lane in LANES])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title("The last steps on rank 0: forward dark, backward light")

    save(draw, (8.0, 2.8), path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12, help="blocks of each")
    parser.add_argument("--steps", type=int, default=10, help="steps per block")
    parser.add_argument("--timeline", type=Path, help="draw the last block's last steps there")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(asked.rounds, asked.steps, Path(folder) if asked.timeline else None)
    for name, values in found.steps_s.items():
        low, middle, high = (f(values) * 1e3 for f in (min, statistics.median, max))
        cpu_ms = statistics.median(found.cpu_s[name]) * 1e3
        print(
            f"{name:12} {middle:7.2f} ms per step ({low:.2f} to {high:.2f}), {cpu_ms:.1f} ms of"
            " the processors"
        )
    host, device = (found.steps_s[name] for name in SYSTEMS)
    ratios = [there / here for here, there in zip(host, device, strict=True)]
    print(
        f"device over host memory: {statistics.median(ratios):.3f}"
        f" ({min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} rounds); compute alone takes"
        f" {STEP_S * 1e3:.0f} ms, and the wire as long"
    )
    if asked.timeline is not None:
        draw_timeline(found.spans, asked.timeline)
    return 0


if __name__ == "__main__":
    sys.exit(main())
