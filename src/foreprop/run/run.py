"""Starting the hosts' programs, passing on what their workers print, and ending all together."""

from __future__ import annotations

import contextlib
import queue
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from foreprop.link.secret import read_secret
from foreprop.run import records
from foreprop.run.hostprocess import Events, HostProcess, Printer
from foreprop.run.plan import Plan
from foreprop.run.rejoins import Rejoins

_ASK_AGAIN_S = 1.0
_ANSWER_S = 60.0
"""A host that has not answered by then is given up."""
_MARGIN_S = 10.0
"""After the grace, for a host to end by itself and for the news of it to arrive."""
_KILL_S = 3.0
_CAUSE_S = 3.0
"""For a worker that has failed first, to end after those that have lost it."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOT_FOUND, _SSH_FAILED = 127, 255


@dataclass(frozen=True, slots=True)
class WorkerError:
    """How the first worker that failed has ended: alike if a restart came to the same end."""

    code: int
    step: int | None
    """As far as `foreprop.checkpoint` counted; None if it had not begun."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The exit code, and what went wrong first, if anything did."""

    code: int
    failure: str | None = None
    absent: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Hosts that did not answer, and why; the others have, and may do without them."""
    worker_error: WorkerError | None = field(default=None, compare=False)
    """If a script ended by itself, and not by a signal."""
    interrupted: bool = field(default=False, compare=False)
    """Somebody has ended the command."""
    started: bool = field(default=True, compare=False)
    """Whether all hosts had answered, and workers were started."""


class Launcher:
    """Runs a plan once, in the main thread."""

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
        """So many hosts may fail to answer: then all is ended, and the outcome names them.

        ``say`` is told of each host that an elastic run goes on without. ``rejoins`` says which are
        tried again.
        """
        self._plan = plan
        self._spare_hosts = spare_hosts
        self._say = say
        self._lost: dict[HostProcess, Outcome] = {}
        """Of an elastic run: what would have ended another one."""
        self._rejoins = rejoins
        self._ask_s = 0.0
        """When hosts may be asked again where a worker can join."""
        self._told: dict[str, str] = {}
        """By host that is out: what was said last of why it is."""
        self._over = False
        """Whether a host's workers have come to the end: nobody joins any more."""
        self._absent: dict[str, str] = {}
        self._secret = _secret_of(plan)
        self._events: Events = Events()
        self._printer = Printer(out, err, self._events)
        self._hosts: list[HostProcess] = []
        self._outcome: Outcome | None = None
        self._consequence: tuple[Outcome, float] | None = None
        """Of a worker that has lost another one, and until when that is waited for."""
        self._followers: set[int] = set()
        """The hosts of such workers."""
        self._interrupted = False
        self._started = False
        self._deadline = time.monotonic() + _ANSWER_S

    def run(self) -> Outcome:
        """Until every host's program has ended. The first failure decides the outcome."""
        with _signals_as_events(self._events):
            try:
                self._start()
                while self._running():
                    self._look_at_the_clock()
                    with contextlib.suppress(queue.Empty):
                        self._events.get(timeout=self._patience_s())(self)
            finally:
                for host in self._hosts:
                    if host.code is None:
                        host.process.kill()
                    host.process.close()
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

    def _patience_s(self) -> float:
        if self._started and self._outcome is None:
            if self._consequence is not None:
                return 0.1
            due_s = None if self._rejoins is None else self._rejoins.next_due_s()
            if due_s is None:
                return records.BEAT_S
            return min(records.BEAT_S, max(0.0, max(due_s, self._ask_s) - time.monotonic()))
        return min(records.BEAT_S, max(0.1, self._deadline - time.monotonic()))

    def _look_at_the_clock(self) -> None:
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
            self._miss_again(host)
        elif code and not self._started:
            self._miss([host], self._why_ended(host))
        elif code and host.index not in self._followers:
            self._lose(host, Outcome(1, self._why_ended(host)))
        elif not code and self._started:
            self._over = True
        if host in self._lost:
            self._leave(host)
        if self._over and not any(each.started for each in self._running()):
            for each in self._running():  # whom they would join has gone
                each.process.send(records.END)

    def hear(self, host: HostProcess, news: records.News) -> None:
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
                self._follow(host, Outcome(code, f"{text}, for it had lost {news.lost}"))
            else:
                self._lose(host, Outcome(code, text, worker_error=error))

    def _lose(self, host: HostProcess, outcome: Outcome) -> None:
        """A host's workers have failed: that ends all, or else is told, if others may go on."""
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

    def _follow(self, host: HostProcess, outcome: Outcome) -> None:
        """Another worker has failed before this one, and may take longer to end."""
        self._followers.add(host.index)
        if self._consequence is None:
            self._consequence = outcome, time.monotonic() + _CAUSE_S

    def _left(self) -> int:
        """Hosts whose workers run, or have come to the end."""
        return sum(host.started and host not in self._lost for host in self._hosts)

    def _of(self) -> int:
        return len(self._plan.hosts) if self._rejoins is None else self._rejoins.places

    # Hosts that are out.
    def _try_hosts_again(self) -> None:
        """If the time of one has come: first ask the others where it can join."""
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

    def _miss_again(self, host: HostProcess) -> None:
        """It has ended before its workers were started."""
        self._forget(host)
        if self._rejoins is None or self._outcome or self._over:
            return
        self._rejoins.miss(host.name, host.index, time.monotonic())
        why = host.refusal or self._why_ended(host)
        if self._told.get(host.name) != why:
            self._told[host.name] = why
            self._say(f"{why}; it is tried again")

    def _leave(self, host: HostProcess) -> None:
        """Its workers have failed, and its program has ended."""
        if self._rejoins is None:
            return
        self._forget(host)
        gone_s = 0.0
        if self._is_unreached(host):  # its workers may run until it hears nothing any more
            gone_s = records.SILENCE_S + self._plan.grace_s
        self._rejoins.leave(host.name, host.index, time.monotonic(), gone_s=gone_s)

    def _forget(self, host: HostProcess) -> None:
        self._hosts.remove(host)
        host.process.close()

    def _miss(self, hosts: Sequence[HostProcess], reason: str) -> None:
        """They will not take part; that ends all, but not before the others have answered."""
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
            self._begin()

    def _begin(self) -> None:
        self._started = True
        for host in self._hosts:
            self._start_workers(host, self._hosts[0].port or 0)

    def _start_workers(self, host: HostProcess, port: int) -> None:
        host.started = True
        host.process.send(records.START + b" %d %s" % (port, self._secret.hex().encode()))
        self._told.pop(host.name, None)
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
        """Somebody wants it, and no restart."""
        self._interrupted = True
        self.fail(code, why)

    def fail(self, code: int, failure: str | None, **more: Any) -> None:
        """The first call decides the outcome and ends all. ``more``: of the `Outcome`."""
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


def _secret_of(plan: Plan) -> bytes:
    """Of the file that is set here, which what is started beside the run may have; else a new one.

    Raises `ConfigError` for a file that cannot be used.
    """
    path = plan.environment.get("FOREPROP_SECRET_FILE", "")
    return read_secret(path) if path.lower() not in ("", "none") else secrets.token_bytes(32)


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


@contextlib.contextmanager
def _signals_as_events(events: Events) -> Iterator[None]:
    """`SimpleQueue.put` may be called from a signal's handler, whatever the thread was doing."""

    def note(number: int, _: object) -> None:
        events.put(lambda launcher: launcher.interrupt(number))

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
