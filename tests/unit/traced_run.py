"""A run of two ranks and two servers as its traces have it, for tests of what is made of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from foreprop.observe.trace import TraceRecorder

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


def find_partial_overlaps(events: Iterable[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    """Pairs of spans of one track of which neither lies beside nor within the other."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = round(event["ts"] * 1e3)
            stop = start + round(event["dur"] * 1e3)
            tracks[event["pid"], event["tid"]].append((start, stop, event["name"]))
    found = []
    for spans in tracks.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        around: list[tuple[int, int, str]] = []
        for span in spans:
            while around and around[-1][1] <= span[0]:
                around.pop()
            if around and span[1] > around[-1][1]:
                found.append((around[-1], span))
            around.append(span)
    return found
