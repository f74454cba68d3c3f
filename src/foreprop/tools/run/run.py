"""Starting the hosts' programs, passing on what their workers print, and ending all together.

A `Launcher` runs a `Plan` once. Every host's program answers first; only when all have does any
worker start. Threads read what hosts say and put it, like signals, as events into one queue; the
main thread handles them one after the other, so the launcher's state needs no lock. The first
failure decides the outcome and ends all hosts.

An elastic run goes on with the other hosts. What would have ended it is kept: if nobody is left,
the first of those failures is the outcome. With ``--nodes``, `Rejoins` says which hosts are tried
again; the hosts at work are asked first where their servers are, for that is where workers join.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import shlex
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, BinaryIO

import msgspec

from foreprop.engine.secret import read_secret
from foreprop.tools.run import records
from foreprop.tools.run.plan import Plan
from foreprop.tools.run.processes import PipedProcess
from foreprop.tools.run.rejoins import Rejoins

_ASK_AGAIN_S = 1.0
_ANSWER_S = 60.0
"""How long a host may take to answer before it is given up."""
_MARGIN_S = 10.0
"""How long after the grace a host may take to end by itself and to say so."""
_KILL_S = 3.0
_CAUSE_S = 3.0
"""How much later a worker that failed first may end than those that have lost it."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOT_FOUND, _SSH_FAILED = 127, 255


@dataclass(frozen=True, slots=True)
class WorkerError:
    """How the first worker that failed has ended; equal ones make a restart useless."""

    code: int
    step: int | None
    """The step that `foreprop.checkpoint` had counted to; None if it had not begun."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The exit code, and what went wrong first, if anything did."""

    code: int
    failure: str | None = None
    absent: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Hosts that did not answer, and why; all others have, and may do without them."""
    worker_error: WorkerError | None = field(default=None, compare=False)
    """How a script ended by itself; None if a signal ended it."""
    interrupted: bool = field(default=False, compare=False)
    """Whether somebody has ended the command."""
    started: bool = field(default=True, compare=False)
    """Whether all hosts had answered, and workers were started."""


Event = Callable[["Launcher"], None]
"""What the launcher is to do about something that has happened."""
Events = queue.SimpleQueue[Event]


class Printer:
    """Writes whole lines to standard output and error, from any thread, never mixed up."""

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
            except OSError:  # the reader of the pipe has ended
                self._closed = True
                self._events.put(lambda launcher: launcher.end(128 + signal.SIGPIPE, None))


class HostProcess:
    """The program on one host, over ssh or here: what it says becomes events, or is printed.

    If its workers are to join a running session, ``joins_by`` is the address where they do.
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
        """Whether its workers have been started."""
        self.asked_s = time.monotonic()
        self.refusal: str | None = None
        """Why it cannot start its workers."""
        self._events = events
        self._printer = printer
        self._prefix = b"[%s] " % self.name.encode()
        self.process = PipedProcess(
            plan.command(index),
            on_output=self._read,
            on_errors=lambda lines: printer.write("err", self._prefixed(lines)),
            on_end=lambda code: events.put(lambda launcher: launcher.note_end(self, code)),
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
                self._events.put(partial(Launcher.handle, host=self, news=record))
        for stream, texts in printed.items():
            self._printer.write(stream, b"".join(texts))

    def _prefixed(self, lines: list[bytes]) -> bytes:
        return b"".join(self._prefix + line + b"\n" for line in lines)


class Launcher:
    """Runs a plan once, in the main thread.

    Up to ``spare_hosts`` hosts may fail to answer: then all is ended, and the outcome names them.
    ``say`` gets a line for each host that an elastic run goes on without.
    """

    def __init__(
        self,
        plan: Plan,
        out: BinaryIO,
        err: BinaryIO,
        *,
        spare_hosts: int = 0,
        say: Callable[[str], object] = lambda text: None,
        rejoins: Rejoins | None = None,
    ) -> None:
        self._plan = plan
        self._spare_hosts = spare_hosts
        self._say = say
        self._lost: dict[HostProcess, Outcome] = {}
        """Hosts whose workers have failed in an elastic run, and what would have ended another."""
        self._rejoins = rejoins
        self._ask_s = 0.0
        """When hosts may be asked again where a worker can join."""
        self._last_reasons: dict[str, str] = {}
        """The last message that says why a host is out; the same is not printed again."""
        self._over = False
        """Whether a host's workers have finished the training: nobody joins any more."""
        self._absent: dict[str, str] = {}
        # Programs that are started beside the run can read the secret from the file set here.
        path = plan.environment.get("FOREPROP_SECRET_FILE", "")
        is_given = path.lower() not in ("", "none")
        self._secret = read_secret(path) if is_given else secrets.token_bytes(32)
        self._events: Events = Events()
        self._printer = Printer(out, err, self._events)
        self._hosts: list[HostProcess] = []
        self._outcome: Outcome | None = None
        self._consequence: tuple[Outcome, float] | None = None
        """The end of a worker that has lost another one, and until when that one is waited for."""
        self._followers: set[int] = set()
        """The hosts whose workers have lost another one."""
        self._interrupted = False
        self._started = False
        self._deadline = time.monotonic() + _ANSWER_S

    def run(self) -> Outcome:
        """Run until every host's program has ended."""

        def on_signal(number: int, _: object) -> None:
            self._events.put(lambda launcher: launcher.interrupt(number))

        before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
        try:
            self._start()
            while self._running():
                self._check_times()
                with contextlib.suppress(queue.Empty):
                    self._events.get(timeout=self._next_check_s())(self)
        finally:
            for host in self._hosts:
                if host.code is None:
                    host.process.kill()
                host.process.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        consequence, _ = self._consequence or (None, 0.0)
        outcome = self._outcome or consequence or Outcome(0)
        return replace(outcome, interrupted=self._interrupted, started=self._started)

    def _start(self) -> None:
        for index in range(len(self._plan.hosts)):
            try:
                host = HostProcess(self._plan, index, self._events, self._printer)
            except OSError as error:
                command = self._plan.command(index)[0]
                self.fail(1, f"{command} cannot be started: {error.strerror}")
                return
            self._hosts.append(host)

    def _running(self) -> list[HostProcess]:
        return [host for host in self._hosts if host.code is None]

    def _next_check_s(self) -> float:
        if self._started and self._outcome is None:
            if self._consequence is not None:
                return 0.1
            due_s = None if self._rejoins is None else self._rejoins.next_due_s()
            if due_s is None:
                return records.BEAT_S
            return min(records.BEAT_S, max(0.0, max(due_s, self._ask_s) - time.monotonic()))
        return min(records.BEAT_S, max(0.1, self._deadline - time.monotonic()))

    def _check_times(self) -> None:
        for host in self._running():
            host.process.send(records.ALIVE)
        self._try_hosts_again()
        if self._consequence is not None and time.monotonic() >= self._consequence[1]:
            self._finish(self._consequence[0])
        if time.monotonic() < self._deadline:
            return
        if self._outcome is not None and time.monotonic() < self._deadline + _KILL_S:
            for host in self._running():
                host.process.kill()
        elif self._outcome is not None:
            for host in self._running():
                host.code = -signal.SIGKILL  # who else holds its pipes is not ours to wait for
        elif not self._started:
            silent = [host for host in self._hosts if host.port is None]
            names = ", ".join(host.name for host in silent)
            self._miss(silent, f"no answer from {names} within {_ANSWER_S:g} s")

    def note_end(self, host: HostProcess, code: int) -> None:
        host.code = code
        if host.joins and not host.started:
            self._forget(host)
            if self._rejoins is not None and not self._outcome and not self._over:
                self._rejoins.miss(host.name, host.index, time.monotonic())
                why = host.refusal or self._why_ended(host)
                if self._last_reasons.get(host.name) != why:
                    self._last_reasons[host.name] = why
                    self._say(f"{why}; it is tried again")
        elif code and not self._started:
            self._miss([host], self._why_ended(host))
        elif code and host.index not in self._followers:
            self._lose(host, Outcome(1, self._why_ended(host)))
        elif not code and self._started:
            self._over = True
        if host in self._lost and self._rejoins is not None:  # its place is free
            self._forget(host)
            gone_s = 0.0
            if self._is_unreached(host):  # its workers may run until it hears nothing any more
                gone_s = records.SILENCE_S + self._plan.grace_s
            self._rejoins.leave(host.name, host.index, time.monotonic(), gone_s=gone_s)
        if self._over and not any(each.started for each in self._running()):
            for each in self._running():  # whom they would join has gone
                each.process.send(records.END)

    def handle(self, host: HostProcess, news: records.News) -> None:
        if isinstance(news, records.Ready):
            host.port = news.port
            if not host.joins:
                self._begin_if_all_answered()
            elif self._outcome is None and not self._over:
                self._start_workers(host, host.port)
                ranks = ", ".join(map(str, host.plan.ranks(host.index)))
                self._say(f"{host.name} starts as rank {ranks}; now {self._left()} of {self._of()}")
        elif isinstance(news, records.Refused):
            host.refusal = f"{host.name}: {news.reason}"
            if not host.joins:
                self._miss([host], host.refusal)
        elif isinstance(news, records.Serving):
            self._start_those_due(",".join(news.addresses))
        elif isinstance(news, records.WorkerFailed):
            code = news.code if news.code > 0 else 128 - news.code
            text = f"rank {news.rank} on {host.name} {_ending(news.code)}"
            error = WorkerError(news.code, news.step) if news.code > 0 else None
            if news.lost and not self._plan.elastic:
                # Another worker has failed before this one, and may take longer to end.
                self._followers.add(host.index)
                if self._consequence is None:
                    outcome = Outcome(code, f"{text}, for it had lost {news.lost}")
                    self._consequence = outcome, time.monotonic() + _CAUSE_S
            else:
                self._lose(host, Outcome(code, text, worker_error=error))

    def _lose(self, host: HostProcess, outcome: Outcome) -> None:
        """A host's workers have failed: that ends all hosts, or an elastic run goes on without."""
        if not self._plan.elastic:
            self._finish(outcome)
        elif self._outcome is None and host not in self._lost:
            self._lost[host] = outcome
            left, more = self._left(), ""
            if self._rejoins is not None:
                least = self._rejoins.nodes.least
                if left < least:
                    why = f"{outcome.failure}; {left} of {self._of()} hosts are left, and --nodes"
                    how = f"says {least} at least: start again with those that answer, or fewer"
                    self._finish(replace(outcome, failure=f"{why} {how}"))
                    return
                more = "" if self._over else f"; {self._rejoins.after_failure(host.name)}"
            if left:
                self._say(f"{outcome.failure}; goes on with {left} of {self._of()}{more}")
            else:  # the first failure counts
                self._finish(next(iter(self._lost.values())))

    def _left(self) -> int:
        return sum(host.started and host not in self._lost for host in self._hosts)

    def _of(self) -> int:
        return len(self._plan.hosts) if self._rejoins is None else self._rejoins.places

    def _try_hosts_again(self) -> None:
        now_s = time.monotonic()
        if self._rejoins is None or not self._started or self._outcome or self._over:
            return
        for host in self._running():  # a connection that hangs
            if host.joins and not host.started and now_s > host.asked_s + _ANSWER_S:
                host.refusal = f"no answer from {host.name} within {_ANSWER_S:g} s"
                host.process.kill()
        due_s = self._rejoins.next_due_s()
        if due_s is not None and now_s >= max(due_s, self._ask_s):
            self._ask_s = now_s + _ASK_AGAIN_S
            for host in self._running():
                if host.started and host not in self._lost:
                    host.process.send(records.SERVERS)

    def _start_those_due(self, addresses: str) -> None:
        now_s = time.monotonic()
        if self._rejoins is None or self._outcome or self._over or not addresses:
            return
        while found := self._rejoins.next_start(now_s):
            name, place = found[0].name, found[1]
            plan = self._plan.with_host(place, found[0])
            try:
                host = HostProcess(plan, place, self._events, self._printer, joins_by=addresses)
            except OSError as error:
                self._say(f"{plan.command(place)[0]} cannot be started: {error.strerror}")
                self._rejoins.miss(name, place, now_s)
            else:
                self._plan = plan
                self._hosts.append(host)

    def _forget(self, host: HostProcess) -> None:
        self._hosts.remove(host)
        host.process.close()

    def _miss(self, hosts: Sequence[HostProcess], reason: str) -> None:
        """Hosts will not take part; that ends the run, but not before the others have answered."""
        if self._outcome is not None:
            return
        for host in hosts:
            self._absent.setdefault(host.name, reason)
        if len(self._absent) > self._spare_hosts:
            self.fail(1, next(iter(self._absent.values())))
        else:
            self._begin_if_all_answered()

    def _begin_if_all_answered(self) -> None:
        names = {host.name for host in self._hosts if host.port is None}
        if names - self._absent.keys():
            return
        if self._absent:
            self.fail(1, next(iter(self._absent.values())), absent=dict(self._absent))
        elif not self._started:
            self._started = True
            for host in self._hosts:
                self._start_workers(host, self._hosts[0].port or 0)

    def _start_workers(self, host: HostProcess, port: int) -> None:
        host.started = True
        host.process.send(records.START + b" %d %s" % (port, self._secret.hex().encode()))
        self._last_reasons.pop(host.name, None)
        if self._rejoins is not None:
            self._rejoins.start(host.name, time.monotonic())

    def interrupt(self, number: int) -> None:
        if not self._interrupted and (self._outcome is None or self._outcome.absent):
            self._outcome = None
            self.end(128 + number, f"ended by {signal.Signals(number).name}")
            return
        self._interrupted = True
        self._deadline = min(self._deadline, time.monotonic() + _KILL_S)
        for host in self._running():
            host.process.send(records.KILL)

    def end(self, code: int, why: str | None) -> None:
        self._interrupted = True
        self.fail(code, why)

    def fail(self, code: int, failure: str | None, **more: Any) -> None:
        """End all hosts; the first call decides the outcome, ``more`` of which are its fields."""
        self._finish(Outcome(code, failure, **more))

    def _finish(self, outcome: Outcome) -> None:
        if self._outcome is not None:
            return
        self._outcome = outcome
        self._deadline = time.monotonic() + self._plan.grace_s + _MARGIN_S
        for host in self._running():
            host.process.send(records.END)

    def _why_ended(self, host: HostProcess) -> str:
        how = _ending(host.code or 0)
        if self._is_unreached(host) and host.port is not None:
            return f"the connection to {host.name} was lost"
        if self._is_unreached(host):
            test = shlex.join([*host.process.command[:-1], "true"])
            return f"{host.name} cannot be reached; try `{test}`"
        if host.port is not None:
            return f"torchrun on {host.name} {how} before its workers; see what it said"
        if host.code == _NOT_FOUND:
            return f"{host.name} has no {self._plan.python}; give --python"
        command = shlex.join(host.process.command)
        return f"`{command}` {how}; is this version of foreprop installed for Python there?"

    def _is_unreached(self, host: HostProcess) -> bool:
        return host.code == _SSH_FAILED and not host.plan.is_here(host.index)


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
