"""What a run's traces say of its steps, and what the model says that other ways would take.

All of it is arithmetic on recorded traces; `report.jobpage` shows it.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from foreprop.core.frames import Stage
from foreprop.errors import ConfigError
from foreprop.plan.planner import Candidate, PlanSetting, forecast
from foreprop.plan.profile import Profile, ProfiledArray
from foreprop.quantities import counted
from foreprop.tools.report.timeline import StepSpan, TimelineEvent, parse_events, step_spans
from foreprop.tools.report.tracefile import ProcessTrace

LEARNING_STEPS = 2
"""The first steps, in which a session learns the loop, are left out if there are enough others."""
_ENOUGH_STEPS = 3
_WINDOW_S = 0.02
"""The window in which a link's busiest moment is looked for."""
_LATE_SHARE = 0.05
"""A worker that computes longer than the others by more than this share holds them up."""
_DTYPES = {2: "float16", 4: "float32", 8: "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSteps:
    """The steps of one worker that are recorded whole, but for the first ones."""

    rank: int
    steps: Sequence[StepSpan]
    sent_bytes: float
    """Per step, as ``received_bytes``."""
    received_bytes: float

    @property
    def step_s(self) -> list[float]:
        return [step.stop_s - step.start_s for step in self.steps]

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def deciles_s(self) -> tuple[float, float]:
        if len(self.steps) < 2:
            return self.median_s, self.median_s
        deciles = statistics.quantiles(self.step_s, n=10, method="inclusive")
        return deciles[0], deciles[-1]

    @property
    def waiting_share(self) -> float:
        return math.fsum(step.wait_s for step in self.steps) / math.fsum(self.step_s)

    @property
    def busy_s(self) -> float:
        """The median time that a step takes without waiting: computing, loading, the optimizer."""
        return statistics.median(step.stop_s - step.start_s - step.wait_s for step in self.steps)

    def typical_step(self) -> int:
        """The first of two consecutive steps whose times are nearest to the median."""
        median_s, times = self.median_s, dict(zip(self.numbers, self.step_s, strict=True))
        pairs = [number for number in times if number + 1 in times] or self.numbers[:1]
        return min(
            pairs,
            key=lambda n: abs(times[n] - median_s) + abs(times.get(n + 1, median_s) - median_s),
        )

    @property
    def numbers(self) -> list[int]:
        return [step.step for step in self.steps]


def measure(trace: ProcessTrace) -> WorkerSteps:
    """One worker's steps; raises `ConfigError` if no whole step is recorded."""
    events = parse_events({"traceEvents": trace.spans}).events
    spans = step_spans(events)
    whole = [span for span, later in pairwise(spans) if later.step == span.step + 1]
    if not whole:
        raise ConfigError(
            f"the trace of {trace.process} has {counted(len(spans), 'step')} with a forward and"
            " a backward pass, and no two in a row: record more steps (trace_steps)"
        )
    known = [step for step in whole if step.step > LEARNING_STEPS]
    kept = known if len(known) >= _ENOUGH_STEPS else whole
    numbers = {step.step for step in kept}

    def bytes_per_step(lane: str) -> float:
        return sum(e.bytes for e in events if e.lane == lane and e.step in numbers) / len(kept)

    return WorkerSteps(
        rank=trace.rank or 0,
        steps=kept,
        sent_bytes=bytes_per_step("push"),
        received_bytes=bytes_per_step("reply"),
    )


def find_straggler(workers: Sequence[WorkerSteps]) -> tuple[int, float] | None:
    """The rank that computes longest, and by how many seconds; None if all are about alike."""
    if len(workers) < 2:
        return None
    slowest = max(workers, key=lambda worker: worker.busy_s)
    others_s = statistics.median(w.busy_s for w in workers if w is not slowest)
    late_s = slowest.busy_s - others_s
    return (slowest.rank, late_s) if late_s > _LATE_SHARE * others_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Predicted times per step; what cannot be predicted is None, and ``why_not`` says why."""

    rate_bits_per_s: float | None = None
    rate_is_given: bool = False
    """Whether the user or the session's setting says the rate, and not only the trace."""
    ddp_s: float | None = None
    p3_s: float | None = None
    """What the model says of this run's own steps, if it was the preset p3."""
    limit_s: float | None = None
    why_not: str = ""


def predict_job(
    about: Mapping[str, Any],
    worker: ProcessTrace,
    measured: WorkerSteps,
    everybody: Sequence[ProcessTrace],
    *,
    rate_bits_per_s: float | None = None,
) -> Predicted:
    """DDP's step and the limit for this worker's times, on links of the session's rate."""
    if why_not := _why_unpredictable(about):
        return Predicted(why_not=why_not)
    rate = rate_bits_per_s or about["link_rate_bits_per_s"]
    given = rate is not None
    rate = rate or busiest_rate(about, everybody)
    if not rate:
        return Predicted(why_not="the trace shows no traffic between nodes; say the links' --rate")
    setting = PlanSetting(
        profile=profile_of(about, worker, measured),
        compute_s=measured.busy_s,
        nodes=about["nodes"],
        workers_per_node=about["ranks"] // about["nodes"],
        rate_bits_per_s=rate,
    )
    narrow = about["wire_dtype"] is not None or about.get("compression") is not None
    return Predicted(
        rate_bits_per_s=rate,
        rate_is_given=given,
        ddp_s=forecast(setting, Candidate("ddp")).step_s,
        p3_s=None if narrow else forecast(setting, Candidate("p2p", "p3")).step_s,
        limit_s=None if narrow else setting.limit_s,
    )


def _why_unpredictable(about: Mapping[str, Any]) -> str:
    if not about:
        return "the trace does not say what was run: worker 0's file is not there"
    if about["nodes"] < 2:
        return "all ranks are on one machine, so no link between machines is in the way"
    if about["ranks"] % about["nodes"]:
        return "the nodes have different numbers of workers"
    if not about["parameters"]:
        return "the trace names no parameters"
    return ""


def profile_of(about: Mapping[str, Any], trace: ProcessTrace, measured: WorkerSteps) -> Profile:
    """The model's arrays in the order of their use, each with its share of the recorded times.

    A layer's times are medians over the steps, without waiting, and stand at its first array.
    """
    events = parse_events({"traceEvents": trace.spans}).events
    times = layer_times(events, measured.numbers)
    forward = sorted((e.layer_index, e.layer) for e in events if e.direction == "forward")
    order = {name: place for place, (_, name) in enumerate(dict.fromkeys(forward))}
    parameters = sorted(
        about["parameters"], key=lambda p: order.get(_layer_of(p["name"], order), len(order))
    )
    arrays, seen = [], set()
    for parameter in parameters:
        layer = _layer_of(parameter["name"], order)
        forward_s, backward_s = (0.0, 0.0) if layer in seen else times.get(layer, (0.0, 0.0))
        seen.add(layer)
        arrays.append(
            ProfiledArray(
                name=parameter["name"],
                shape=tuple(parameter["shape"]),
                forward_s=forward_s,
                backward_s=backward_s,
                dtype=_DTYPES.get(parameter["itemsize"], "float32"),
            )
        )
    return Profile(name="traced", arrays=tuple(arrays))


def _layer_of(name: str, layers: Mapping[str, int]) -> str:
    layer = name.rpartition(".")[0]
    while layer not in layers and layer:
        layer = layer.rpartition(".")[0]
    return layer


def layer_times(
    events: Sequence[TimelineEvent], steps: Sequence[int]
) -> dict[str, tuple[float, float]]:
    """Each layer's forward and backward time in forward order: medians over the steps, seconds."""
    wanted = set(steps)
    found: dict[str, tuple[defaultdict[int, float], defaultdict[int, float]]] = {}
    for event, own_s in _own_times(events):
        if event.lane == "compute" and event.step in wanted:
            both = found.setdefault(event.layer, (defaultdict(float), defaultdict(float)))
            both[event.direction != "forward"][event.step] += own_s

    def median(by_step: Mapping[int, float]) -> float:
        return statistics.median(by_step.values()) if by_step else 0.0

    return {layer: (median(forward), median(back)) for layer, (forward, back) in found.items()}


def _own_times(events: Iterable[TimelineEvent]) -> Iterator[tuple[TimelineEvent, float]]:
    """Computing and waiting events, with their times less those of the events within them."""

    def without_inner(event: TimelineEvent, inner: list[float]) -> tuple[TimelineEvent, float]:
        return event, max(event.duration_s - math.fsum(inner), 0.0)

    relevant = (event for event in events if event.lane in ("compute", "wait"))
    around: list[tuple[TimelineEvent, list[float]]] = []
    for event in sorted(relevant, key=lambda e: (e.start_s, -e.stop_s)):
        while around and around[-1][0].stop_s <= event.start_s:
            yield without_inner(*around.pop())
        if around:
            around[-1][1].append(min(event.stop_s, around[-1][0].stop_s) - event.start_s)
        around.append((event, []))
    while around:
        yield without_inner(*around.pop())


def busiest_rate(about: Mapping[str, Any], traces: Sequence[ProcessTrace]) -> float:
    """The most that a node's link has carried one way in 20 ms, bit/s: it is at least so fast.

    The rate is 0 if nothing has come from another node.
    """
    arrived: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    for trace in traces:
        node = trace.node(about)
        if node is None:
            continue
        for event in trace.spans:
            args = event["args"]
            is_received = event["cat"] in (Stage.REPLY_RECEIVED.value, Stage.PUSH_RECEIVED.value)
            if is_received and trace.crosses(args.get("peer", -1), about):
                stop_s = (float(event["ts"]) + float(event["dur"])) / 1e6
                arrived[node].append((stop_s, args["bytes"]))
    return max((_most(frames) for frames in arrived.values()), default=0.0)


def _most(frames: list[tuple[float, int]]) -> float:
    """The bit/s in the busiest window; a frame counts when it is complete."""
    frames.sort()
    best, first, inside = 0.0, 0, 0
    for last_s, size_bytes in frames:
        inside += size_bytes
        while last_s - frames[first][0] > _WINDOW_S:
            inside -= frames[first][1]
            first += 1
        best = max(best, 8 * (inside - frames[first][1]) / _WINDOW_S)
    return best
