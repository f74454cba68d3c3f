"""The program on a host, from here: started over ssh or directly, heard, and what it prints."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from foreprop.run import records
from foreprop.run.plan import Plan
from foreprop.run.processes import PipedProcess

if TYPE_CHECKING:
    from foreprop.run.run import Launcher

Event = Callable[["Launcher"], None]
"""What the launcher is to do about something that has happened."""
Events = queue.SimpleQueue[Event]


class Printer:
    """Whole lines to standard output and error, from any thread, never mixed up."""

    def __init__(self, out: BinaryIO, err: BinaryIO, events: Events) -> None:
        self._streams = {"out": out, "err": err}
        self._events = events
        self._lock = threading.Lock()
        self._closed = False

    def write(self, stream: str, text: bytes) -> None:
        with self._lock:
            if self._closed or not text:
                return
            try:
                self._streams[stream].write(text)
                self._streams[stream].flush()
            except OSError:  # whoever read it has gone
                self._closed = True
                self._events.put(lambda launcher: launcher.end(128 + signal.SIGPIPE, None))


class HostProcess:
    """The program on one host: what it says becomes events, or is printed.

    ``joins_by``: an address by which its workers are to join a session that runs.
    """

    def __init__(
        self,
        plan: Plan,
        index: int,
        events: Events,
        printer: Printer,
        *,
        joins_by: str | None = None,
    ) -> None:
        self.plan = plan
        self.name = plan.hosts[index].name
        self.port: int | None = None
        self.code: int | None = None
        self.index = index
        self.joins = joins_by is not None
        self.started = False
        """Whether its workers have been."""
        self.asked_s = time.monotonic()
        self.refusal: str | None = None
        """Why it cannot start them."""
        self._events = events
        self._printer = printer
        self._prefix = b"[%s] " % self.name.encode()
        self.process = PipedProcess(
            plan.command(index),
            said=self._read,
            complained=lambda lines: printer.write("err", self._prefixed(lines)),
            ended=lambda code: events.put(lambda launcher: launcher.note_end(self, code)),
            limit_bytes=2 * records.LIMIT_BYTES,  # a record is a line and what is put before it
        )
        task = plan.task(index) if joins_by is None else plan.joining_task(index, joins_by)
        self.process.send(msgspec.json.encode(task))

    def _read(self, lines: list[bytes]) -> None:
        printed: dict[str, list[bytes]] = {"out": [], "err": []}
        for line in lines:
            record = records.decode(line)
            if isinstance(record, records.Output):
                printed[record.stream].append(b"[%d] %s\n" % (record.rank, record.text))
            elif record is None:
                printed["err"].append(self._prefixed([line]))
            else:
                self._events.put(partial(_hear, host=self, news=record))
        for stream, texts in printed.items():
            self._printer.write(stream, b"".join(texts))

    def _prefixed(self, lines: list[bytes]) -> bytes:
        return b"".join(self._prefix + line + b"\n" for line in lines)


def _hear(launcher: Launcher, host: HostProcess, news: records.News) -> None:
    launcher.hear(host, news)
