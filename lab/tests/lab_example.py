"""A stand-in for `run_lab`: believable records, samples and traces, without a cluster."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foreprop.plan import limit
from foreprop.plan.profile import Layer
from foreprop.tools.compare.result import Spread
from foreprop_lab.setting.labsetting import LabSetting
from foreprop_lab.setting.records import Record

SLOWDOWN = {
    "p3": 1.03,
    "p3-2019": 1.15,
    "slicing": 1.22,
    "tensorflow": 1.5,
    "wfbp": 1.3,
    "kvstore": 1.45,
    "ddp": 1.36,
    "ddp-tuned": 1.27,
    "mxnet-kvstore": 1.5,
    "mxnet-p3": 1.3,
}
"""Step / limit at balance 1; less elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleResult:
    records: list[Record]
    samples: dict[str, list[tuple[float, int, int]]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


class ExampleLab:
    """Counts what it was asked to measure; ``fail_at`` raises instead of that measurement."""

    def __init__(self, *, fail_at: int | None = None, error: BaseException | None = None) -> None:
        self.asked: list[LabSetting] = []
        self._fail_at = fail_at
        self._error = error

    def __call__(self, setting: LabSetting, *, progress: Callable[[str], None]) -> ExampleResult:
        progress("block 1 of 1")
        self.asked.append(setting)
        if self._error is not None and len(self.asked) == self._fail_at:
            raise self._error
        records = [example_record(setting, name) for name in setting.systems]
        samples = {}
        for name in setting.systems if setting.sample_network else ():
            events = _simulate(setting.layers, setting.rate, steps=6, by_priority=name == "p3")
            if setting.trace is not None:
                folder = setting.trace / name
                folder.mkdir(parents=True, exist_ok=True)
                trace = {"traceEvents": events}
                (folder / "worker-0.1234.trace.json").write_text(json.dumps(trace))
            samples[name] = _samples(events)
        return ExampleResult(records=records, samples=samples)


def example_record(setting: LabSetting, system: str, **changes: Any) -> Record:
    layers = setting.layers
    compute_s = limit.compute_s(layers)
    wire_s = limit.wire_s(
        limit.model_bytes(layers), nodes=setting.nodes, rate_bits_per_s=setting.rate
    )
    balance = wire_s / compute_s
    excess = (SLOWDOWN[system] - 1) * (balance**2 if balance < 1 else balance**-0.8)
    tiny = 20_000 / setting.unscaled_slice_elems if setting.unscaled_slice_elems < 20_000 else 0.0
    huge = 0.1 * max(0.0, setting.unscaled_slice_elems / 1e6) ** 0.5
    overload = 1.25 if setting.nodes > 8 and system != "ddp" else 1.0
    median = setting.limit_s * (1 + excess + 0.05 * tiny + huge) * overload
    bound = overload > 1 or tiny > 10
    values: dict[str, Any] = {
        "system": system,
        "model": setting.profile.name,
        "scale": setting.scale,
        "nodes": setting.nodes,
        "rate_bits_per_s": setting.rate,
        "balance": balance,
        "compute_s": compute_s,
        "wire_s": wire_s,
        "limit_s": setting.limit_s,
        "iteration_s": Spread(median=median, p10=0.98 * median, p90=1.06 * median),
        "efficiency": setting.limit_s / median,
        "waiting_s": median - compute_s,
        "cpu_s_per_gb": 8.0,
        "cpu_share": 0.93 if bound else 0.41,
        "cpu_bound": bound,
        "iterations": setting.iterations,
        "slice_elems": setting.slice_elems_of(system),
        "bucket_bytes": None,
        "network": "namespaces",
        "versions": {"foreprop": "0.1.0", "torch": "2.13.0", "python": "3.11.2", "linux": "6.1"},
    }
    return Record(**(values | changes))


def _simulate(
    layers: Sequence[Layer], rate: float, *, steps: int, by_priority: bool
) -> list[dict[str, Any]]:
    """A worker's trace with a serial link up and one down; layers have numbers, as the lab's do."""
    events: list[dict[str, Any]] = []
    now, ready = 0.0, [0.0] * len(layers)
    for step in range(1, steps + 1):
        gradients = [0.0] * len(layers)
        for i, layer in enumerate(layers):
            if ready[i] > now:
                events.append(_event("wait", f"{i}.arrays.0", now, ready[i], step, 0))
                now = ready[i]
            events.append(_event("forward", str(i), now, now + layer.forward_s, step, 0))
            now += layer.forward_s
        for i, layer in reversed(list(enumerate(layers))):
            events.append(_event("backward", f"{i}.arrays", now, now + layer.backward_s, step, 0))
            now += layer.backward_s
            gradients[i] = now
        jobs = [(gradients[i], i, size) for i, layer in enumerate(layers) for size in _cut(layer)]
        back = jobs
        for category in ("push_sent", "reply_received"):
            back = _link(events, category, step, back, 1.5 * 8 / rate, by_priority)
        ready = [max(t for t, i, _ in back if i == wanted) for wanted in range(len(layers))]
    return events


def _cut(layer: Layer) -> list[int]:
    total = 4 * sum(layer.sizes_elems)
    piece = max(100_000, total // 40)
    return [min(piece, total - start) for start in range(0, total, piece)]


def _link(
    events: list[dict[str, Any]],
    category: str,
    step: int,
    jobs: list[tuple[float, int, int]],
    s_per_byte: float,
    by_priority: bool,
) -> list[tuple[float, int, int]]:
    pending, queue, done, now = sorted(jobs), list[Any](), list[tuple[float, int, int]](), 0.0
    while pending or queue:
        now = max(now, pending[0][0]) if not queue else now
        while pending and pending[0][0] <= now:
            job = pending.pop(0)
            heapq.heappush(queue, (job[1] if by_priority else job[0], len(pending), job))
        _, _, (_, layer, size) = heapq.heappop(queue)
        stop = now + size * s_per_byte
        events.append(_event(category, f"{layer}.arrays.0", now, stop, step, size))
        done.append((stop, layer, size))
        now = stop
    return done


def _event(category: str, name: str, start: float, stop: float, step: int, size: int) -> Any:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start * 1e6,
        "dur": (stop - start) * 1e6,
        "args": {"step": step, "bytes": size},
    }


def _samples(events: list[dict[str, Any]]) -> list[tuple[float, int, int]]:
    """Bytes so far every 10 ms; 1.5 times the bytes of the arrays cross the link."""
    last_s = max(e["ts"] + e["dur"] for e in events) / 1e6
    at = np.arange(0.0, last_s, 0.01)
    moved = []
    for category in ("push_sent", "reply_received"):
        parts = sorted(
            (e["ts"], e["dur"], e["args"]["bytes"]) for e in events if e["cat"] == category
        )
        times = [t / 1e6 for ts, dur, _ in parts for t in (ts, ts + dur)]
        ends = np.cumsum([1.5 * size for _, _, size in parts])
        moved.append(np.interp(at, times, np.repeat(np.append(0.0, ends), 2)[1:-1]))
    return [(float(t), int(a), int(b)) for t, a, b in zip(at, *moved, strict=True)]
