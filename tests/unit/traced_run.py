"""A run of two ranks and two servers as its traces have it, for tests of what is made of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreprop.engine.trace import TraceRecorder

LAYERS = ("conv", "fc")
BYTES = {"conv.weight": 4_000, "fc.weight": 400_000}
SHAPES = {"conv.weight": [1000], "fc.weight": [100, 1000]}
MS = 1_000_000
STEP_MS, FORWARD_MS, BACKWARD_MS, WAIT_MS = 100, 20, 30, 10
"""Of each of the two layers; the wait is for ``fc.weight``, from the second step on."""
SESSION = "abc"


def record_run(
    folder: Path, *, ranks: int = 2, steps: int = 6, rate: float | None = 1e9, about: bool = True
) -> None:
    """Step ``n`` begins 100 n ms after the start; slice 0 is conv's, slices 1 and 2 are fc's."""
    zero_ns = TraceRecorder.now_ns()
    servers = [
        TraceRecorder(_path(folder, f"server-{n}"), f"server {n}", 1000 + n) for n in range(2)
    ]
    for rank in range(ranks):
        worker = TraceRecorder(_path(folder, f"worker-{rank}"), f"worker {rank}", rank)
        if about:
            worker.describe(facts(ranks, rate))
        for step in range(1, steps + 1):
            _compute(worker, step, zero_ns + step * STEP_MS * MS)
            _communicate(worker, servers, rank, step, zero_ns + step * STEP_MS * MS)
        worker.write()
    for server in servers:
        server.write()


def facts(ranks: int, rate: float | None) -> dict[str, object]:
    return {
        "version": "0.1",
        "torch": "2.13",
        "ranks": ranks,
        "nodes": ranks,
        "servers": ranks,
        "dedicated_servers": 0,
        "architecture": None,
        "update": "auto",
        "order": "priority",
        "slice_elems": 50_000,
        "link_rate_bits_per_s": rate,
        "wire_dtype": None,
        "header_bytes": 28,
        "parameters": [{"name": n, "shape": s, "itemsize": 4} for n, s in SHAPES.items()],
    }


def _path(folder: Path, process: str) -> Path:
    return folder / f"{process}.{SESSION}.trace.json"


def _compute(worker: TraceRecorder, step: int, at_ns: int) -> None:
    def span(category: str, name: str, start_ms: float, stop_ms: float) -> None:
        start_ns, stop_ns = at_ns + round(start_ms * MS), at_ns + round(stop_ms * MS)
        worker.span(category, name, start_ns, stop_ns=stop_ns, step=step)

    span("forward", "conv", 0, FORWARD_MS)
    waited_ms = WAIT_MS if step > 1 else 0
    if waited_ms:
        span("wait", "fc.weight", FORWARD_MS, FORWARD_MS + waited_ms)
    span("forward", "fc", FORWARD_MS, 2 * FORWARD_MS + waited_ms)
    half_ms = 2 * FORWARD_MS + waited_ms
    span("backward", "fc", half_ms, half_ms + BACKWARD_MS)
    span("backward", "conv", half_ms + BACKWARD_MS, STEP_MS)


def _communicate(
    worker: TraceRecorder, servers: list[TraceRecorder], rank: int, step: int, at_ns: int
) -> None:
    """Queued spans overlap, and so do the pushes to the two servers."""
    for slice_, name in enumerate(("conv.weight", "fc.weight", "fc.weight")):
        server = slice_ % 2
        about = {"step": step, "slice_": slice_, "size_bytes": BYTES[name] // (1 + slice_ % 2)}
        start = at_ns + (80 - 3 * slice_) * MS
        worker.span("gradient_ready", name, start, stop_ns=start, step=step)
        worker.span("push_queued", name, start, stop_ns=start + 2 * MS, peer=server, **about)
        worker.span("push_sent", name, start + 2 * MS, stop_ns=start + 6 * MS, peer=server, **about)
        owner = servers[server]
        owner.span(
            "push_received", name, start + 3 * MS, stop_ns=start + 7 * MS, peer=rank, **about
        )
        if rank == 0:
            owner.span("updated", name, start + 7 * MS, stop_ns=start + 8 * MS, **about)
        owner.span("reply_queued", name, start + 8 * MS, stop_ns=start + 9 * MS, peer=rank, **about)
        owner.span("reply_sent", name, start + 9 * MS, stop_ns=start + 12 * MS, peer=rank, **about)
        worker.span(
            "reply_received", name, start + 10 * MS, stop_ns=start + 13 * MS, peer=server, **about
        )


@dataclass
class Reading:
    """What Perfetto's trace processor makes of a file, by the rules of its importer."""

    failures: list[str] = field(default_factory=list)
    """What it counts as an error, and leaves out."""
    arrows: defaultdict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Of each the categories of the spans that it is bound to."""
    threads: dict[int, str] = field(default_factory=dict)


def read_as_perfetto(events: Iterable[Mapping[str, Any]]) -> Reading:
    """In the order of the times, equal ones as in the file. Nanoseconds are cut off, not rounded.

    A span lies beside or within the ones that its track has open, or is left out. An arrow's end
    is bound to the span that began last on its track and has not been closed by another one.
    """
    found = Reading()
    stacks: defaultdict[Any, list[tuple[int, int, str]]] = defaultdict(list)
    waiting: set[Any] = set()
    for event in sorted(events, key=lambda e: _nanoseconds(e.get("ts", 0))):
        kind, track = event["ph"], (event["pid"], event.get("tid"))
        stack = stacks[track]
        if kind in ("X", "i"):
            start = _nanoseconds(event["ts"])
            stop = start + _nanoseconds(event.get("dur", 0))
            while stack and stack[-1][1] <= start and not stack[-1][0] == start == stop:
                stack.pop()
            if stack and stop > stack[-1][1]:
                found.failures.append(f"{event['name']} overlaps {stack[-1]} in part")
            else:
                stack.append((start, stop, event["cat"]))
        elif kind in ("s", "t", "f"):
            arrow = found.arrows[event["id"]]
            if not stack:
                found.failures.append(f"arrow {event['id']} is bound to no span")
            elif (kind == "s") == bool(arrow) or (kind == "f" and event["bp"] != "e"):
                found.failures.append(f"arrow {event['id']} is out of order at {kind}")
            else:
                arrow.append(stack[-1][2])
        elif kind in ("b", "e"):
            key = (event["pid"], event["cat"], event["name"], event["id"])
            if (kind == "b") == (key in waiting):
                found.failures.append(f"{key} is {kind} twice")
            waiting ^= {key}
        elif kind == "M" and event["name"] == "thread_name":
            if event["tid"] in (0, event["pid"], *found.threads):
                found.failures.append(f"thread {event['tid']} is another one, too")
            found.threads[event["tid"]] = event["args"]["name"]
    found.failures += [f"{key} has no end" for key in waiting]
    return found


def _nanoseconds(us: float) -> int:
    return int(us * 1000.0)
