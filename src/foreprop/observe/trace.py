"""Records what happened when, as a Chrome trace that Perfetto and chrome://tracing open.

A slice passes the stages of `core.frames.Stage`, in that order.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from foreprop.core.frames import Stage
from foreprop.core.wire import Header
from foreprop.errors import ConfigError, StorageError


class RelayStage(Enum):
    """What a relay does between a push's arrival and its departure for the server."""

    NODE_SUMMED = "node_summed"


class RingStage(Enum):
    """What there is instead of pushes and replies where gradients are all-reduced."""

    CHUNK_REDUCED = "chunk_reduced"


Clock = Callable[[], int]

_EVENTS_LIMIT = 2_000_000


def trace_path(folder: Path, process: str, session_id: str) -> Path:
    """Where a process's trace goes; several sessions may share a folder."""
    return folder / f"{process}.{session_id}.trace.json"


class TraceRecorder:
    """Collects spans of one process and writes them at the end. Any thread may call it.

    Times are `time.time_ns` values, so that traces of several processes can be laid together
    (on one machine exactly, across machines as well as their clocks agree).
    """

    def __init__(self, path: Path, process: str, process_id: int) -> None:
        self.path = path
        self._process = process
        self._process_id = process_id
        self._offset_ns = _wall_clock_offset_ns()
        self._events: list[tuple[str, str, int, int, int, int, int, int, int]] = []
        self._thread_names: dict[int, str] = {}  # a thread may have ended before `write`

    @staticmethod
    def now_ns() -> int:
        return time.perf_counter_ns()

    def span(
        self,
        category: str,
        name: str,
        start_ns: int,
        *,
        step: int,
        stop_ns: int | None = None,
        size_bytes: int = 0,
        slice_: int = -1,
        priority: int = 0,
    ) -> None:
        """Record a span from ``start_ns`` (see `now_ns`) to ``stop_ns``, by default now."""
        if len(self._events) >= _EVENTS_LIMIT:
            return
        stop = self.now_ns() if stop_ns is None else stop_ns
        thread = threading.get_native_id()
        if thread not in self._thread_names:
            self._thread_names[thread] = threading.current_thread().name
        self._events.append(
            (category, name, start_ns, stop, thread, step, size_bytes, slice_, priority)
        )

    def slice_span(
        self,
        stage: Stage | RelayStage,
        name: str,
        about: Header,
        started_ns: int,
        *,
        stop_ns: int | None = None,
    ) -> None:
        """A stage of a slice, whose parameter is called ``name``."""
        self.span(
            stage.value,
            name,
            started_ns,
            stop_ns=stop_ns,
            step=about.step,
            size_bytes=about.payload_bytes,
            slice_=about.slice,
            priority=about.priority,
        )

    def write(self) -> None:
        """Write the file; once, at the end of the session. Raises `StorageError`."""
        meta: list[dict[str, object]] = [
            {
                "ph": "M",
                "pid": self._process_id,
                "name": "process_name",
                "args": {"name": self._process},
            }
        ]
        meta += [
            {
                "ph": "M",
                "pid": self._process_id,
                "tid": ident,
                "name": "thread_name",
                "args": {"name": name},
            }
            for ident, name in dict(self._thread_names).items()
        ]
        events = meta + [self._as_json(event) for event in list(self._events)]
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
        partial = self.path.with_suffix(".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text)
            partial.replace(self.path)
        except OSError as error:
            raise StorageError(f"the trace {self.path} cannot be written: {error}") from error

    def _as_json(
        self, event: tuple[str, str, int, int, int, int, int, int, int]
    ) -> dict[str, object]:
        category, name, start, stop, thread, step, size_bytes, slice_, priority = event
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "ts": (start + self._offset_ns) / 1e3,
            "dur": (stop - start) / 1e3,
            "pid": self._process_id,
            "tid": thread,
            "args": {
                "step": step,
                "bytes": size_bytes,
                "slice": slice_,
                "priority": priority,
            },
        }


def check_trace_folder(folder: str) -> None:
    """Be sure before the session that its traces can be written; raises `ConfigError`."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"trace is {folder!r}, a folder that cannot be written on this machine: {error}"
        ) from error


def _wall_clock_offset_ns() -> int:
    """What to add to `now_ns`. A pause between the two clocks makes it too small: take the best."""
    return max(time.time_ns() - time.perf_counter_ns() for _ in range(5))


def merge_traces(directory: Path, target: Path) -> int:
    """Lay all ``*.trace.json`` files of a directory into one file; returns the number of events."""
    events: list[object] = []
    for path in sorted(directory.glob("*.trace.json")):
        events += json.loads(path.read_text())["traceEvents"]
    target.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return len(events)
