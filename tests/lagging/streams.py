"""Streams and events of the lagging device: work that is done late, at a seed's whim.

Each stream is a thread that does its jobs in order. Before a job it may linger; it stops lingering
when somebody waits for a later event, directly or through another stream. So time passes only
where nobody waits, and who should have waited and has not finds old values.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

DEVICE = "lagging"
LONGEST_WAIT_S = 60.0
LATE_S = 0.05
"""How long a late stream lingers before each job that nobody waits for."""
LAG_S = 0.001

Job = Callable[[], None]


class DeviceError(RuntimeError):
    """A job has failed, or a wait lasted too long: told to whoever waits next."""


class Marker:
    """A place among the jobs of one stream."""

    __slots__ = ("demanded", "done", "failure", "line", "reached_s")

    def __init__(self, line: Line) -> None:
        self.line = line
        self.done = threading.Event()
        self.demanded = False
        self.reached_s = 0.0
        self.failure: BaseException | None = None

    def wait(self) -> None:
        """Until the stream has come here; raises what a job has failed with."""
        self.line.demand(self)
        if not self.done.wait(LONGEST_WAIT_S):
            raise DeviceError(f"stream {self.line.number} has not come here in time")
        if self.failure is not None:
            raise DeviceError(f"a job has failed: {self.failure!r}") from self.failure


class Line:
    """The jobs of one stream, and the thread that does them."""

    def __init__(self, number: int, seed: str, manner: str) -> None:
        self.number = number
        self._chance = random.Random(f"{seed}/{number}")
        self._manner = manner if manner != "any" else self._chance.choice(["eager", "lag", "late"])
        self._jobs: queue.SimpleQueue[Job | Marker | None] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self._demands = 0  # markers to come that somebody waits for
        self._hurried = threading.Event()
        self.failure: BaseException | None = None
        self._given = self._done = 0  # jobs
        self.busy: list[tuple[float, float, str]] = []
        """When it did what, if it ``records``."""
        self.records = False
        self.takes_s = 0.0
        """How long each job takes, whoever waits."""
        self.begun_by = ""
        """The thread that has given it its first job."""
        self._thread = threading.Thread(target=self._run, name=f"{DEVICE}-{number}", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Do it after all that has been put before. Any thread, also from a finalizer."""
        self.begun_by = self.begun_by or threading.current_thread().name
        self._given += 1
        self._jobs.put(job)

    def is_idle(self) -> bool:
        """Whether all that has been put is done."""
        return self._done == self._given

    def mark(self) -> Marker:
        marker = Marker(self)
        self._jobs.put(marker)
        return marker

    def demand(self, marker: Marker) -> None:
        """Somebody waits for it: do not linger."""
        with self._counting:
            if not (marker.done.is_set() or marker.demanded):
                marker.demanded = True
                self._demands += 1
                self._hurried.set()

    def end(self) -> None:
        self.mark().wait()
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        torch.set_num_threads(1)
        while (job := self._jobs.get()) is not None:
            if isinstance(job, Marker):
                self._reach(job)
                continue
            self._hurried.wait(self._delay_s())
            began_s = time.perf_counter()
            if self.takes_s:
                time.sleep(self.takes_s)
            try:
                job()
            except BaseException as error:
                self.failure = self.failure or error
            if self.records:
                name = getattr(job, "name", "")
                self.busy.append((began_s, time.perf_counter(), name))
            self._done += 1
            del job

    def _delay_s(self) -> float:
        if self._manner == "late":
            return LATE_S
        if self._manner == "eager" or self._chance.random() < 0.7:
            return 0.0
        return self._chance.random() * LAG_S

    def _reach(self, marker: Marker) -> None:
        with self._counting:
            marker.reached_s = time.perf_counter()
            marker.failure = self.failure
            marker.done.set()
            if marker.demanded:
                self._demands -= 1
                if not self._demands:
                    self._hurried.clear()


class Lines:
    """The streams that there are; a seed decides how each of them lags."""

    def __init__(self) -> None:
        self._all: dict[int, Line] = {}
        self._numbers = itertools.count(1)
        self._opening = threading.Lock()
        self.seed = "0"
        self.manners: dict[int, str] = {}
        """By number, of the next ones: eager, lag, late; any: drawn from the seed."""
        self.takes_s: dict[int, float] = {}
        """By number, of the next ones whose jobs take a known time, and are recorded."""
        self.host_waits: list[tuple[str, str]] = []
        """Threads that have waited for the device, and for what."""

    def number(self) -> int:
        with self._opening:
            return next(self._numbers)

    def __getitem__(self, number: int) -> Line:
        with self._opening:
            if number not in self._all:
                manner = self.manners.get(number, self.manners.get(-1, "any"))
                line = Line(number, self.seed, manner)
                line.takes_s = self.takes_s.get(number, 0.0)
                line.records = number in self.takes_s
                self._all[number] = line
            return self._all[number]

    def all(self) -> list[Line]:
        with self._opening:
            return list(self._all.values())

    def drain(self) -> None:
        """Do all that there is to do; raises what has failed."""
        for line in self.all():
            line.mark().wait()

    def end(self) -> None:
        """After this there are no threads, and numbers begin anew."""
        failures = []
        for line in self.all():
            try:
                line.end()
            except DeviceError as error:
                line._jobs.put(None)
                line._thread.join()
                failures.append(error)
        with self._opening:
            self._all.clear()
            self._numbers = itertools.count(1)
        if failures:
            raise failures[0]

    def waited(self, what: str) -> None:
        self.host_waits.append((threading.current_thread().name, what))


LINES = Lines()
_here = threading.local()


class Stream(torch.Stream):
    """As ``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, *, number: int | None = None) -> Any:
        number = LINES.number() if number is None else number
        made: Any = super().__new__(cls, stream_id=number, device_index=0, device_type=20)
        return made

    @property
    def line(self) -> Line:
        return LINES[self.stream_id]

    def wait_stream(self, other: Any) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        LINES.waited("stream.synchronize")
        self.line.mark().wait()

    def query(self) -> bool:
        """Whether all is done; raises what a job has failed with. Who asks waits in his way."""
        marker = self.line.mark()
        self.line.demand(marker)
        if self.line.failure is not None:
            raise DeviceError(f"a job has failed: {self.line.failure!r}")
        return self.line.is_idle()


class Event:
    """As ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._marker: Marker | None = None
        self._synchronizing = "event.synchronize" + " (blocking)" * blocking

    def record(self, stream: Any = None) -> None:
        self._marker = LINES[(stream or current_stream()).stream_id].mark()

    def wait(self, stream: Any = None) -> None:
        if (marker := self._marker) is not None:
            LINES[(stream or current_stream()).stream_id].put(marker.wait)

    def synchronize(self) -> None:
        LINES.waited(self._synchronizing)
        if self._marker is not None:
            self._marker.wait()

    def query(self) -> bool:
        return self._marker is None or self._marker.done.is_set()

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds."""
        if self._marker is None or later._marker is None:
            raise DeviceError("an event has not been recorded")
        return (later._marker.reached_s - self._marker.reached_s) * 1e3


def current_stream(device: Any = None) -> Stream:
    """This thread's; 0 where none has been set."""
    found: Stream = getattr(_here, "stream", None) or Stream(number=0)
    return found


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[Any]:
    before = getattr(_here, "stream", None)
    _here.stream = stream
    try:
        yield stream
    finally:
        _here.stream = before


def synchronize(device: Any = None) -> None:
    LINES.waited("synchronize")
    LINES.drain()
