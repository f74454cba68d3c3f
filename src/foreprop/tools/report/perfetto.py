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
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from foreprop.core.frames import Stage
from foreprop.errors import ConfigError
from foreprop.tools.report.timeline import StepSpan, parse_events, step_spans
from foreprop.tools.report.tracefile import ProcessTrace, read_folder

_EIGHTHS_NS = 125


def exact_ns(us: float) -> int:
    """Microseconds as nanoseconds, to an eighth of a microsecond.

    The file has microseconds in decimals. Some versions of Perfetto multiply them by 1000 and cut
    off the rest, so that 0.001 becomes 0 or 1 ns and neighbours overlap. Eighths are exact in
    binary, too.
    """
    return round(us * 8) * _EIGHTHS_NS


class Span(NamedTuple):
    """What took time; nanoseconds, as `exact_ns` makes them, from the first event of all."""

    start_ns: int
    stop_ns: int
    category: str
    name: str
    args: Mapping[str, Any]

    @property
    def slice_key(self) -> tuple[int, int]:
        return self.args["slice"], self.args["step"]


class Placed(NamedTuple):
    """A span on a track of a process."""

    process: int
    track: int
    span: Span


def place(spans: Iterable[Span], *, same_ns: int = 0) -> list[list[Span]]:
    """Put spans into as few rows as possible, where each lies beside or within the others.

    If two overlap by no more than ``same_ns``, the second one begins so much later.
    """
    rows: list[_Row] = []
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.stop_ns)):
        if not any(row.takes(span, same_ns) for row in rows):
            rows.append(_Row())
            rows[-1].takes(span, same_ns)
    return [row.spans for row in rows]


class _Row:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._open_until: list[int] = []
        """The ends of the spans that the next one may lie within, the outermost first."""

    def takes(self, span: Span, same_ns: int) -> bool:
        """Add a span if it fits, and say whether; spans come in the order of their starts."""
        start_ns, open_until = span.start_ns, self._open_until
        while open_until and open_until[-1] <= start_ns:
            open_until.pop()
        if open_until and span.stop_ns > open_until[-1]:
            if len(open_until) > 1 or open_until[-1] - start_ns > same_ns:
                return False
            start_ns = open_until.pop()
        self.spans.append(span._replace(start_ns=start_ns))
        open_until.append(span.stop_ns)
        return True


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
"""Tracks by category, in this order; other categories' tracks have their names."""
_OF_A_PEER = _SENT | _RECEIVED
_SAMPLES = 2000
"""How many samples of the link's rate are shown over a recording; none is under a millisecond."""
_LEAST_SAMPLE_NS = 1_000_000
_SAME_NS = 1000
"""Recorded times are good to about a microsecond."""

Event = dict[str, Any]


def merge_traces(directory: Path, target: Path) -> int:
    """Write all traces of a directory to one file; return the number of events."""
    trace = to_perfetto(read_folder(directory))
    try:
        target.write_bytes(msgspec.json.encode(trace))
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from error
    return len(trace["traceEvents"])


def to_perfetto(traces: Sequence[ProcessTrace]) -> dict[str, Any]:
    """The whole file in Chrome's trace event format, as an object."""
    stamps = [float(span["ts"]) for trace in traces for span in trace.spans]
    zero_us = min(stamps, default=0.0)
    abouts = {trace.session: trace.about for trace in traces if trace.about}
    free = itertools.count(len(traces) + 1)
    tracks = [
        ProcessTracks(trace, number, zero_us, abouts.get(trace.session, {}), free)
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


class ProcessTracks:
    """One process's spans, laid out on tracks.

    ``number`` is its "pid" in the new file, ``about`` what is run, as a worker of the session has
    described it, and ``free`` gives numbers for tracks that no other process has.
    """

    def __init__(
        self,
        trace: ProcessTrace,
        number: int,
        zero_us: float,
        about: Mapping[str, Any],
        free: Iterator[int],
    ) -> None:
        self.trace, self.number, self.about = trace, number, about
        self.spans = [_span(event, zero_us) for event in trace.spans]
        self.spans += _steps(trace, zero_us)
        self.placed: list[Placed] = []
        self.names: dict[int, str] = {}
        by_track: defaultdict[tuple[int, str], list[Span]] = defaultdict(list)
        for span in self.spans:
            if span.category not in _QUEUES and span.category not in _MOMENTS:
                by_track[_track_of(span)].append(span)
        for (_, name), spans in sorted(by_track.items()):
            for row in place(spans, same_ns=_SAME_NS):
                track = next(free)
                self.names[track] = name
                self.placed += [Placed(number, track, span) for span in row]
        self.moments = next(free)
        """The track of events that take no time, and of those that only have to have a track."""
        self.names[self.moments] = "moments"

    def events(self) -> Iterator[Event]:
        yield _meta(self.number, "process_name", {"name": self.trace.process})
        yield _meta(self.number, "process_sort_index", {"sort_index": self.number})
        for track, name in self.names.items():
            yield _meta(self.number, "thread_name", {"name": name}, track)
            yield _meta(self.number, "thread_sort_index", {"sort_index": track}, track)
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
        for number, span in enumerate(self.spans):
            at = {"cat": span.category, "name": span.name, "pid": self.number, "tid": self.moments}
            if span.category in _QUEUES:
                mark = {**at, "id": f"{self.number}.{number}"}
                yield {**mark, "ph": "b", "ts": span.start_ns / 1e3, "args": span.args}
                yield {**mark, "ph": "e", "ts": span.stop_ns / 1e3, "args": {}}
            elif span.category in _MOMENTS:
                yield {**at, "ph": "i", "s": "t", "ts": span.start_ns / 1e3, "args": span.args}
        yield from self._counters()

    def _counters(self) -> Iterator[Event]:
        for category, name in _QUEUES.items():
            changes: Counter[int] = Counter()
            for span in self.spans:
                if span.category == category:
                    changes[span.start_ns] += 1
                    changes[span.stop_ns] -= 1
            yield from self.counter(name, "slices", _summed(changes))
        for name, categories in (("link out", _SENT), ("link in", _RECEIVED)):
            spans = [span for span in self.spans if span.category in categories]
            crossing = [s for s in spans if self.trace.crosses(s.args.get("peer", -1), self.about)]
            yield from self.counter(name, "Mbit/s", rates(crossing))

    def counter(self, name: str, unit: str, values: Iterable[tuple[int, float]]) -> Iterator[Event]:
        """A counter's changes; Perfetto shows its name and then its unit."""
        at = {"ph": "C", "name": name, "pid": self.number, "tid": self.moments}
        last = None
        for at_ns, value in values:
            if value != last:
                yield {**at, "ts": at_ns / 1e3, "args": {unit: value}}
            last = value


def rates(spans: Sequence[Span]) -> list[tuple[int, float]]:
    """Moments (ns), and the Mbit/s until the next; a frame's bytes are spread over its span."""
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
    """The place of a span's track in the order of tracks, and the track's name."""
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


def _arrows(processes: Sequence[ProcessTracks], numbers: Iterator[int]) -> Iterator[Event]:
    """Arrows from each push over the update and the reply to the parameter's first use."""
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
    """One arrow, forward in time as Perfetto wants it: where clocks disagree a step is left out."""
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
    """Where the forward pass waits for a parameter or layer, or else uses it, by name and step."""
    found: dict[tuple[str, int], Placed] = {}
    for placed in sorted(worker.placed, key=lambda p: p.span.start_ns):
        span = placed.span
        if span.category in ("wait", "forward") and span.stop_ns > span.start_ns:
            found.setdefault((placed.span.name, placed.span.args["step"]), placed)
    return found


def _use_of(push: Span, uses: Mapping[tuple[str, int], Placed]) -> Placed | None:
    """The first use, in the step after a push, of what was pushed."""
    step = push.args["step"] + 1
    name = push.name
    while name:
        if (name, step) in uses:
            return uses[name, step]
        name = name.rpartition(".")[0]
    return uses.get(("", step))


def _under_way(processes: Sequence[ProcessTracks]) -> Iterator[Event]:
    """A counter of each worker's bytes between their departure and their arrival at a server."""
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
