"""Records what happened when, in a file that grows while the process runs.

A slice passes the stages of `core.frames.Stage`, in that order. ``foreprop trace`` lays the files
out for Perfetto, ``foreprop report`` draws them.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from foreprop.config import LOGGER, Config
from foreprop.config.checks import parse_windows
from foreprop.core.frames import Stage
from foreprop.core.wire import Header
from foreprop.errors import ConfigError, StorageError


class RelayStage(Enum):
    """What a relay does between a push's arrival and its departure for the server."""

    NODE_SUMMED = "node_summed"


class CodecStage(Enum):
    """Stages beside those of a slice, with ``compression``: just before or after it crosses."""

    ENCODED = "encoded"
    DECODED = "decoded"


class RingStage(Enum):
    """What there is instead of pushes and replies where gradients are all-reduced."""

    CHUNK_REDUCED = "chunk_reduced"


BUCKET_REDUCED = "bucket_reduced"
"""What DDP does, where the lab traces it."""
Clock = Callable[[], int]

ENDING = ".trace.json"
ABOUT = "foreprop"
"""The name of the event that says what was run."""
_HEAD = b'{"displayTimeUnit":"ms","traceEvents":[\n'
_TAIL = b"\n]}\n"
_EVENTS_LIMIT = 2_000_000
"""The most in a file: about 400 MB."""
_WAITING_LIMIT = 200_000
"""The most in memory, where the disk does not keep up."""
_WRITE_EVERY_S = 0.5
_AT_ONCE = 256
"""Events that are encoded together: who trains gets the interpreter back in between."""


class _Span(NamedTuple):
    category: str
    name: str
    start_ns: int
    stop_ns: int
    thread: int
    step: int
    size_bytes: int
    slice_: int
    priority: int
    peer: int


def trace_path(folder: Path, process: str, session_id: str) -> Path:
    """Where a process's trace goes; several sessions may share a folder."""
    return folder / f"{process}.{session_id}{ENDING}"


class TraceRecorder:
    """Collects spans of one process and writes them twice a second. Any thread may call it.

    So memory is bounded, and what was recorded half a second before a process died is kept.
    ``steps``: those that are recorded, as the setting ``trace_steps`` has them. Times are
    `time.time_ns` values, so that traces of several processes can be laid together (on one machine
    exactly, across machines as well as their clocks agree).
    """

    def __init__(self, path: Path, process: str, process_id: int, steps: str | None = None) -> None:
        self.path = path
        self._process_id = process_id
        # What to add to `now_ns`. A pause between the two clocks makes it too small: take the best.
        self._offset_ns = max(time.time_ns() - time.perf_counter_ns() for _ in range(5))
        self._windows = None if steps is None else parse_windows(steps)
        self._spans: deque[_Span] = deque()
        self._meta: deque[dict[str, object]] = deque()
        self._count = self._dropped = 0
        self._thread_names: dict[int, str] = {}
        self._error: OSError | None = None
        self._sources: list[Callable[[], int]] = []
        self._begun = False
        self._ending = threading.Event()
        self._writer = threading.Thread(target=self._run, name="foreprop-trace", daemon=True)
        self._started = threading.Lock()
        self._note("process_name", {"name": process})

    @staticmethod
    def now_ns() -> int:
        return time.perf_counter_ns()

    def describe(self, facts: Mapping[str, object]) -> None:
        """Say what is run, for reports; of several times the last one counts."""
        self._note(ABOUT, facts)

    def draw_from(self, source: Callable[[], int]) -> None:
        """Before each writing ``source`` records what it has, and says how much it has lost."""
        self._sources.append(source)
        with self._started:
            self._start()

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
        peer: int = -1,
    ) -> None:
        """Record a span from ``start_ns`` (see `now_ns`) to ``stop_ns``, by default now.

        ``peer``: the number of the server, or the rank, that it is sent to or comes from.
        """
        if self._windows is not None and not any(step in window for window in self._windows):
            return
        if self._count >= _EVENTS_LIMIT or len(self._spans) >= _WAITING_LIMIT:
            self._dropped += 1
            return
        self._count += 1
        stop = self.now_ns() if stop_ns is None else stop_ns
        thread = threading.get_native_id()
        if thread not in self._thread_names:
            self._name_thread(thread)
        self._spans.append(
            _Span(category, name, start_ns, stop, thread, step, size_bytes, slice_, priority, peer)
        )

    def slice_span(
        self,
        stage: Stage | RelayStage | CodecStage,
        name: str,
        about: Header,
        started_ns: int,
        *,
        stop_ns: int | None = None,
    ) -> None:
        """A stage of a slice, whose parameter is called ``name``; ``about.rank``: the peer's."""
        self.span(
            stage.value,
            name,
            started_ns,
            stop_ns=stop_ns,
            step=about.step,
            size_bytes=about.payload_bytes,
            slice_=about.slice,
            priority=about.priority,
            peer=about.rank,
        )

    def write(self) -> None:
        """Complete the file; once, at the end of the session. Raises `StorageError`."""
        with self._started:
            self._ending.set()
            started = self._writer.ident is not None
        if started:
            self._writer.join()
        self._draw()
        self._write_waiting()
        self._append(_TAIL)
        if self._dropped:
            LOGGER.warning(
                "%d events were left out of the trace %s, which has %d: set trace_steps",
                self._dropped,
                self.path,
                self._count,
            )
        if self._error is not None:
            raise StorageError(
                f"the trace {self.path} cannot be written: {self._error}"
            ) from self._error

    # The writing thread.
    def _name_thread(self, thread: int) -> None:
        name = threading.current_thread().name
        self._thread_names[thread] = name  # it may have ended before it is written
        self._note("thread_name", {"name": name}, tid=thread)
        with self._started:
            self._start()

    def _start(self) -> None:
        if self._writer.ident is None and not self._ending.is_set():
            self._writer.start()

    def _draw(self) -> None:
        for source in self._sources:
            self._dropped += source()

    def _note(self, name: str, args: Mapping[str, object], **more: int) -> None:
        self._meta.append(
            {"ph": "M", "pid": self._process_id, **more, "name": name, "args": dict(args)}
        )

    def _run(self) -> None:
        while not self._ending.wait(_WRITE_EVERY_S):
            self._draw()
            self._write_waiting()

    def _write_waiting(self) -> None:
        while (events := list(self._take())) and self._error is None:
            text = b",\n".join(map(msgspec.json.encode, events))
            self._append(b",\n" + text if self._begun else _HEAD + text)
            self._begun = True

    def _take(self) -> Iterator[dict[str, Any]]:
        while self._meta:
            yield self._meta.popleft()
        for _ in range(min(_AT_ONCE, len(self._spans))):
            span = self._spans.popleft()
            yield {
                "ph": "X",
                "cat": span.category,
                "name": span.name,
                "ts": (span.start_ns + self._offset_ns) / 1e3,
                "dur": (span.stop_ns - span.start_ns) / 1e3,
                "pid": self._process_id,
                "tid": span.thread,
                "args": {
                    "step": span.step,
                    "bytes": span.size_bytes,
                    "slice": span.slice_,
                    "priority": span.priority,
                    "peer": span.peer,
                },
            }

    def _append(self, data: bytes) -> None:
        try:
            if not self._begun:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab" if self._begun else "wb") as file:
                file.write(data)
        except OSError as error:
            self._error = self._error or error


def check_folders(config: Config) -> None:
    """Be sure before the session that what it records can be written; raises `ConfigError`."""
    for name in ("trace", "watch"):
        if (folder := getattr(config, name)) is not None:
            check_trace_folder(folder, name)


def check_trace_folder(folder: str, setting: str = "trace") -> None:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{setting} is {folder!r}, a folder that cannot be written on this machine: {error}"
        ) from error
