"""A session's traces as one file for Perfetto: tracks, arrows, counters and steps.

The format forbids spans of one track that overlap in part, and Perfetto leaves them out. So each
stage has tracks of its own, as many as it needs; what waits in a queue is an asynchronous span.
Times are microseconds from the first event. A track's number ("tid") is its own in the whole file,
not 0 and no process's. For some versions of Perfetto 0 is the main thread, whose number is the
process's, and is shown first; and threads are looked up by their number alone.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from foreprop.core.frames import Stage
from foreprop.errors import ConfigError
from foreprop.report.timeline import StepSpan, parse_events, step_spans
from foreprop.report.tracefile import ProcessTrace, read_folder
from foreprop.report.tracks import Placed, Span, exact_ns, place

_QUEUES = {Stage.PUSH_QUEUED.value: "push queue", Stage.REPLY_QUEUED.value: "reply queue"}
_MOMENTS = {Stage.GRADIENT_READY.value, Stage.PARAMETER_READY.value}
_SENT = {Stage.PUSH_SENT.value, Stage.REPLY_SENT.value}
_RECEIVED = {Stage.PUSH_RECEIVED.value, Stage.REPLY_RECEIVED.value}
_TRACKS = {
    "step": "steps",
    "forward": "compute",
    "backward": "compute",
    "wait": "waiting",
    Stage.PUSH_SENT.value: "push to server",
    Stage.REPLY_RECEIVED.value: "reply from server",
    Stage.PUSH_RECEIVED.value: "push from rank",
    Stage.UPDATED.value: "update",
    Stage.REPLY_SENT.value: "reply to rank",
}
"""By category; the others' tracks are called as they are. In this order."""
_OF_A_PEER = _SENT | _RECEIVED
_SAMPLES = 2000
"""Of the link's rate, over the whole recording; at least a millisecond each."""
_LEAST_SAMPLE_NS = 1_000_000
_SAME_NS = 1000
"""Recorded times are good to about a microsecond."""

Event = dict[str, Any]


def merge_traces(directory: Path, target: Path) -> int:
    """Lay all traces of a directory into one file; returns the number of events."""
    laid_out = lay_out(read_folder(directory))
    try:
        target.write_bytes(msgspec.json.encode(laid_out))
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from error
    return len(laid_out["traceEvents"])


def lay_out(traces: Sequence[ProcessTrace]) -> dict[str, Any]:
    """The whole file: Chrome's trace event format, in its form as an object."""
    stamps = [float(span["ts"]) for trace in traces for span in trace.spans]
    zero_us = min(stamps, default=0.0)
    abouts = {trace.session: trace.about for trace in traces if trace.about}
    free = itertools.count(len(traces) + 1)
    tracks = [
        ProcessTracks.of(trace, number, zero_us, abouts.get(trace.session, {}), free)
        for number, trace in enumerate(traces, start=1)
    ]
    events = [event for process in tracks for event in process.events()]
    numbers = itertools.count(1)
    by_session: defaultdict[str, list[ProcessTracks]] = defaultdict(list)
    for process in tracks:
        by_session[process.trace.session].append(process)
    for processes in by_session.values():
        events += _arrows(processes, numbers)
        events += _under_way(processes)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"sessions": abouts, "zero_us": zero_us},
        "traceEvents": events,
    }


@dataclass(kw_only=True)
class ProcessTracks:
    """One process, laid out."""

    trace: ProcessTrace
    number: int
    """Its "pid" in the new file."""
    spans: list[Span]
    about: Mapping[str, Any]
    """What is run, as a worker of the session has told."""
    free: Iterator[int]
    """Numbers for tracks, which no other process has."""
    placed: list[Placed] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    """Of the tracks, by number."""
    moments: int = 0
    """The track of what takes no time, and of what needs some track."""

    @classmethod
    def of(
        cls,
        trace: ProcessTrace,
        number: int,
        zero_us: float,
        about: Mapping[str, Any],
        free: Iterator[int],
    ) -> ProcessTracks:
        spans = [_span(event, zero_us) for event in trace.spans]
        spans += _steps(trace, zero_us)
        made = cls(trace=trace, number=number, spans=spans, about=about, free=free)
        made._place()
        return made

    def _place(self) -> None:
        by_track: defaultdict[tuple[int, str], list[Span]] = defaultdict(list)
        for span in self.spans:
            if span.category not in _QUEUES and span.category not in _MOMENTS:
                by_track[_track_of(span)].append(span)
        for (_, name), spans in sorted(by_track.items()):
            for row in place(spans, same_ns=_SAME_NS):
                track = next(self.free)
                self.names[track] = name
                self.placed += [Placed(self.number, track, span) for span in row]
        self.moments = next(self.free)
        self.names[self.moments] = "moments"

    def events(self) -> Iterator[Event]:
        yield from self._metadata()
        for placed in self.placed:
            start_ns, stop_ns, category, name, args = placed.span
            yield {
                "ph": "X",
                "cat": category,
                "name": name,
                "ts": start_ns / 1e3,
                "dur": (stop_ns - start_ns) / 1e3,
                "pid": self.number,
                "tid": placed.track,
                "args": args,
            }
        yield from self._queued_and_moments()
        yield from self._depths()
        yield from self._rate()

    def _metadata(self) -> Iterator[Event]:
        yield _meta(self.number, "process_name", {"name": self.trace.process})
        yield _meta(self.number, "process_sort_index", {"sort_index": self.number})
        for track, name in self.names.items():
            yield _meta(self.number, "thread_name", {"name": name}, track)
            yield _meta(self.number, "thread_sort_index", {"sort_index": track}, track)

    def _queued_and_moments(self) -> Iterator[Event]:
        for number, span in enumerate(self.spans):
            at = {"cat": span.category, "name": span.name, "pid": self.number, "tid": self.moments}
            if span.category in _QUEUES:
                mark = {**at, "id": f"{self.number}.{number}"}
                yield {**mark, "ph": "b", "ts": span.start_ns / 1e3, "args": span.args}
                yield {**mark, "ph": "e", "ts": span.stop_ns / 1e3, "args": {}}
            elif span.category in _MOMENTS:
                yield {**at, "ph": "i", "s": "t", "ts": span.start_ns / 1e3, "args": span.args}

    def _depths(self) -> Iterator[Event]:
        """How many slices wait in each queue."""
        for category, name in _QUEUES.items():
            changes: Counter[int] = Counter()
            for span in self.spans:
                if span.category == category:
                    changes[span.start_ns] += 1
                    changes[span.stop_ns] -= 1
            yield from self.counter(name, "slices", _summed(changes))

    def _rate(self) -> Iterator[Event]:
        """What leaves the node and what comes to it, on average over a short while."""
        for name, categories in (("link out", _SENT), ("link in", _RECEIVED)):
            spans = [span for span in self.spans if span.category in categories]
            crossing = [s for s in spans if self.trace.crosses(s.args.get("peer", -1), self.about)]
            yield from self.counter(name, "Mbit/s", rates(crossing))

    def counter(self, name: str, unit: str, values: Iterable[tuple[int, float]]) -> Iterator[Event]:
        """Its changes. Perfetto shows both texts, one after the other."""
        at = {"ph": "C", "name": name, "pid": self.number, "tid": self.moments}
        last = None
        for at_ns, value in values:
            if value != last:
                yield {**at, "ts": at_ns / 1e3, "args": {unit: value}}
            last = value


def rates(spans: Sequence[Span]) -> list[tuple[int, float]]:
    """Mbit/s from each moment on (ns) until the next; a frame's bytes are spread over its span."""
    if not spans:
        return []
    first = min(span.start_ns for span in spans)
    last = max(span.stop_ns for span in spans)
    every_ns = max(_LEAST_SAMPLE_NS, (last - first) // _SAMPLES)
    bits: defaultdict[int, float] = defaultdict(float)
    for span in spans:
        size_bits, length = 8 * span.args["bytes"], max(span.stop_ns - span.start_ns, 1)
        begin, end = (span.start_ns - first), (span.start_ns - first) + length
        for sample in range(begin // every_ns, (end - 1) // every_ns + 1):
            inside = min(end, (sample + 1) * every_ns) - max(begin, sample * every_ns)
            bits[sample] += size_bits * inside / length
    found = []
    for sample in sorted({*bits, *(sample + 1 for sample in bits)}):
        found.append((first + sample * every_ns, round(bits.get(sample, 0.0) / every_ns * 1e3, 1)))
    return found


def _span(event: Mapping[str, Any], zero_us: float) -> Span:
    start_us = float(event["ts"]) - zero_us
    start_ns = exact_ns(start_us)
    stop_ns = max(exact_ns(start_us + float(event["dur"])), start_ns)
    return Span(start_ns, stop_ns, event["cat"], event["name"], event["args"])


def _steps(trace: ProcessTrace, zero_us: float) -> Iterator[Span]:
    """A span for each step of a worker, from its first forward block to the next step's."""
    found = parse_events({"traceEvents": trace.spans})
    shift_us = found.zero_us - zero_us
    steps: Sequence[StepSpan] = step_spans(found.events) if found.events else ()
    for step in steps:
        start_ns = exact_ns(step.start_s * 1e6 + shift_us)
        stop_ns = exact_ns(step.stop_s * 1e6 + shift_us)
        args = {"step": step.step, "waited_ms": round(step.wait_s * 1e3, 3), "bytes": 0}
        yield Span(start_ns, stop_ns, "step", f"step {step.step}", args)


def _track_of(span: Span) -> tuple[int, str]:
    """Its place in the order of tracks, and its name."""
    order = list(_TRACKS)
    name = _TRACKS.get(span.category, span.category)
    place_ = order.index(span.category) if span.category in order else len(order)
    if span.category == "backward":
        place_ -= 1
    peer = span.args.get("peer", -1)
    return place_, f"{name} {peer}" if span.category in _OF_A_PEER and peer >= 0 else name


def _meta(process: int, name: str, args: Event, track: int | None = None) -> Event:
    event = {"ph": "M", "pid": process, "name": name, "args": args}
    return event if track is None else {**event, "tid": track}


def _summed(changes: Mapping[int, int]) -> list[tuple[int, float]]:
    total, found = 0, []
    for at_ns in sorted(changes):
        total += changes[at_ns]
        found.append((at_ns, float(total)))
    return found


# Arrows, and bytes under way: what needs the traces of both sides.
def _arrows(processes: Sequence[ProcessTracks], numbers: Iterator[int]) -> Iterator[Event]:
    """From each push over the update and the reply to the parameter's first use."""
    servers = [p for p in processes if p.trace.rank is None]
    updates = _by_slice(servers, Stage.UPDATED)
    replies = {
        (*placed.span.slice_key, placed.span.args.get("peer", -1)): placed
        for placed in _of_stage(servers, Stage.REPLY_SENT)
    }
    for worker in processes:
        rank = worker.trace.rank
        if rank is None:
            continue
        received, uses = _by_slice([worker], Stage.REPLY_RECEIVED), _first_uses(worker)
        for push in _of_stage([worker], Stage.PUSH_SENT):
            key = push.span.slice_key
            way = [updates.get(key), replies.get((*key, rank)), received.get(key)]
            way.append(_use_of(push.span, uses))
            steps = [push, *(placed for placed in way if placed is not None)]
            if len(steps) > 1:
                yield from _arrow(steps, next(numbers))


def _arrow(steps: Sequence[Placed], number: int) -> Iterator[Event]:
    """Forward in time, as Perfetto wants it: where clocks disagree, without that step."""
    at_ns, way = 0, []
    for placed in steps:
        at_ns = max(at_ns, placed.span.start_ns)
        if at_ns <= placed.span.stop_ns:
            way.append((at_ns, placed))
        else:
            at_ns = way[-1][0]
    if len(way) < 2:
        return
    for place_, (at_ns, (process, track, _)) in enumerate(way):
        kind = "s" if place_ == 0 else "f" if place_ == len(way) - 1 else "t"
        event: Event = {
            "ph": kind,
            "cat": "slice",
            "name": "slice",
            "id": number,
            "pid": process,
            "tid": track,
            "ts": at_ns / 1e3,
        }
        yield event if kind == "s" else {**event, "bp": "e"}


def _of_stage(processes: Iterable[ProcessTracks], stage: Stage) -> Iterator[Placed]:
    for process in processes:
        yield from (p for p in process.placed if p.span.category == stage.value)


def _by_slice(processes: Iterable[ProcessTracks], stage: Stage) -> dict[tuple[int, int], Placed]:
    return {placed.span.slice_key: placed for placed in _of_stage(processes, stage)}


def _first_uses(worker: ProcessTracks) -> dict[tuple[str, int], Placed]:
    """By parameter, or layer, and step: where the forward pass waits for it, or else uses it."""
    found: dict[tuple[str, int], Placed] = {}
    for placed in sorted(worker.placed, key=lambda p: p.span.start_ns):
        span = placed.span
        if span.category in ("wait", "forward") and span.stop_ns > span.start_ns:
            found.setdefault((placed.span.name, placed.span.args["step"]), placed)
    return found


def _use_of(push: Span, uses: Mapping[tuple[str, int], Placed]) -> Placed | None:
    """In the step after the push."""
    step = push.args["step"] + 1
    name = push.name
    while name:
        if (name, step) in uses:
            return uses[name, step]
        name = name.rpartition(".")[0]
    return uses.get(("", step))


def _under_way(processes: Sequence[ProcessTracks]) -> Iterator[Event]:
    """Bytes of each worker's pushes from their departure until a server has them."""
    servers = [p for p in processes if p.trace.rank is None]
    arrivals = {
        (*placed.span.slice_key, placed.span.args.get("peer", -1)): placed.span.stop_ns
        for placed in _of_stage(servers, Stage.PUSH_RECEIVED)
    }
    for worker in processes:
        changes: Counter[int] = Counter()
        for placed in _of_stage([worker], Stage.PUSH_SENT):
            span = placed.span
            arrived = arrivals.get((*span.slice_key, worker.trace.rank or 0), span.stop_ns)
            changes[span.start_ns] += span.args["bytes"]
            changes[max(arrived, span.stop_ns)] -= span.args["bytes"]
        values = ((at_ns, total / 1e3) for at_ns, total in _summed(changes))
        yield from worker.counter("pushes under way", "KB", values)
