"""A small, believable pair of timelines: two convolutions, one heavy layer, one light layer.

One worker with a serial link up and one down. Under "kvstore" whole arrays go first come, first
served, the heavy one in two halves side by side to two servers; under "p3" slices go by priority.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from foreprop.tools.report.timeline import Lane, Timeline, TimelineEvent, timeline_from_trace

LAYERS = ("conv1", "conv2", "fc1", "fc2")
SIZES_BYTES = (90_000, 420_000, 3_700_000, 120_000)
FORWARD_S = (0.011, 0.016, 0.008, 0.003)
BYTES_PER_S = 75e6
SLICE_BYTES = 200_000
TURN_S = 0.0015

Job = tuple[float, int, int]
"""When it is ready (s), layer, bytes."""


def example_timeline(preset: str, *, slice_bytes: int = SLICE_BYTES) -> Timeline:
    raw = _Run(preset, slice_bytes).run(steps=5)
    trace = {
        "traceEvents": [
            {"ph": "X", "cat": cat, "name": name, "ts": ts * 1e6, "dur": dur * 1e6, "args": args}
            for cat, name, ts, dur, args in raw
        ]
    }
    return Timeline(preset=preset, events=timeline_from_trace(trace, first_step=2))


class _Run:
    def __init__(self, preset: str, slice_bytes: int) -> None:
        self.sliced = preset == "p3"
        self.slice_bytes = slice_bytes
        self.events: list[tuple[str, str, float, float, dict[str, int]]] = []

    def run(self, steps: int) -> list[tuple[str, str, float, float, dict[str, int]]]:
        now, ready = 0.0, [0.0] * len(LAYERS)
        for step in range(steps):
            now, gradients = self._compute(step, now, ready)
            ready = self._synchronise(step, gradients)
        return self.events

    def _add(self, cat: str, name: str, start: float, stop: float, step: int, size: int) -> None:
        self.events.append((cat, name, start, stop - start, {"step": step, "bytes": size}))

    def _compute(self, step: int, now: float, ready: list[float]) -> tuple[float, list[float]]:
        for layer, name in enumerate(LAYERS):
            start = now
            if ready[layer] > now:
                self._add("wait", f"{name}.weight", now, ready[layer], step, 0)
                now = ready[layer]
            now += FORWARD_S[layer]
            self._add("forward", name, start, now, step, 0)
        gradients = [0.0] * len(LAYERS)
        for layer in reversed(range(len(LAYERS))):
            start, now = now, now + 2 * FORWARD_S[layer]
            self._add("backward", LAYERS[layer], start, now, step, 0)
            gradients[layer] = now
        return now, gradients

    def _synchronise(self, step: int, gradients: list[float]) -> list[float]:
        jobs = [job for layer, t in enumerate(gradients) for job in self._cut(layer, t)]
        arrived = self._link("push_sent", step, jobs, turn_s=TURN_S * (1 if self.sliced else 3))
        back = self._link("reply_received", step, arrived, turn_s=0.0)
        return [max(t for t, layer, _ in back if layer == wanted) for wanted in range(len(LAYERS))]

    def _cut(self, layer: int, ready: float) -> Iterable[Job]:
        left = SIZES_BYTES[layer]
        unit = self.slice_bytes if self.sliced else left
        while left > 0:
            yield ready, layer, min(unit, left)
            left -= unit

    def _link(self, cat: str, step: int, jobs: list[Job], turn_s: float) -> list[Job]:
        """Serve the jobs one at a time; returns them with the time at which they got there."""
        pending, queue, done, now = sorted(jobs), list[tuple[float, int, Job]](), list[Job](), 0.0
        while pending or queue:
            now = max(now, pending[0][0]) if not queue else now
            while pending and pending[0][0] <= now:
                job = pending.pop(0)
                heapq.heappush(queue, (job[1] if self.sliced else job[0], len(pending), job))
            _, _, (_, layer, size) = heapq.heappop(queue)
            stop = now + size / BYTES_PER_S
            for part in (size // 2, size - size // 2) if size > 3_000_000 else (size,):
                self._add(cat, f"{LAYERS[layer]}.weight", now, stop, step, part)
            done.append((stop + turn_s, layer, size))
            now = stop
        return done


def event(
    lane: Lane,
    layer: str,
    start_s: float,
    stop_s: float,
    *,
    layer_index: int = 0,
    step: int = 0,
    direction: str = "",
    size: int = 0,
) -> TimelineEvent:
    return TimelineEvent(
        lane=lane,
        direction=direction,
        layer=layer,
        layer_index=layer_index,
        step=step,
        start_s=start_s,
        stop_s=stop_s,
        bytes=size,
    )
