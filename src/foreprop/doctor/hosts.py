"""Probes on the hosts of a resource file, started as ``foreprop run`` starts its host programs."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import IO, NamedTuple

import msgspec

from foreprop.doctor.probe import PROGRAM
from foreprop.doctor.records import (
    PROTOCOL,
    Answer,
    Command,
    Failure,
    Hello,
    decode_answer,
)
from foreprop.run.plan import Plan
from foreprop.run.records import ALIVE, BEAT_S, MARK
from foreprop.version import __version__

_NOT_FOUND, _SSH_FAILED = 127, 255
_END_S = 3.0
_LAST_WORDS_S = 1.0
_KEPT_LINES = 20


class _Said(NamedTuple):
    host: int
    answer: Answer


class _Ended(NamedTuple):
    host: int
    code: int


_Events = queue.SimpleQueue[_Said | _Ended]


class ProbeProcess:
    """A probe's process here (ssh, or the probe itself), and threads that read what it says."""

    def __init__(self, command: list[str], host: int, events: _Events) -> None:
        self.command = command
        self._host = host
        self._events = events
        self._errors: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the doctor, which then ends all
        )
        self._readers = [
            threading.Thread(target=self._read_errors, daemon=True),
            threading.Thread(target=self._read_answers, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def last_words(self) -> str:
        """The last line of its standard error: a traceback's has the reason."""
        return self._errors[-1] if self._errors else ""

    def send(self, line: bytes) -> None:
        """Nothing happens if it has ended."""
        with contextlib.suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.write(line + b"\n")
                self._process.stdin.flush()

    def close_input(self) -> None:
        """It ends when its input does."""
        with contextlib.suppress(OSError):
            _close(self._process.stdin)

    def close(self, deadline_s: float) -> None:
        """At the deadline it is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        self._process.kill()
        self._process.wait()
        pipes = (self._process.stderr, self._process.stdout)
        for reader, pipe in zip(self._readers, pipes, strict=True):
            reader.join(_LAST_WORDS_S)
            if not reader.is_alive():  # else somebody else holds its pipe: not ours to wait for
                _close(pipe)

    def _read_errors(self) -> None:
        for line in _lines(self._process.stderr):
            text = line.decode(errors="replace").strip()
            if text:
                self._errors.append(text)

    def _read_answers(self) -> None:
        for line in _lines(self._process.stdout):
            _, mark, body = line.partition(MARK)
            if mark:
                with contextlib.suppress(msgspec.MsgspecError):
                    self._events.put(_Said(self._host, decode_answer(body)))
        code = self._process.wait()
        self._readers[0].join(_LAST_WORDS_S)  # why is on standard error
        self._events.put(_Ended(self._host, code))


def _lines(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise ValueError("the probe's output is a pipe")
    return pipe


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        pipe.close()


class HostsPanel:
    """A context manager: leaving it ends every probe. Raises nothing for hosts that fail."""

    def __init__(self, plan: Plan) -> None:
        self.failures: dict[int, Failure] = {}
        self._plan = plan
        self._events: _Events = queue.SimpleQueue()
        self._probes: dict[int, ProbeProcess] = {}
        self._greeted: set[int] = set()
        for host in range(len(plan.hosts)):
            command = plan.command(host, PROGRAM)
            try:
                self._probes[host] = ProbeProcess(command, host, self._events)
            except OSError as error:
                text = f"{command[0]} cannot be started: {error.strerror}"
                self.failures[host] = Failure(kind="no_python", text=text)

    def __enter__(self) -> HostsPanel:
        return self

    def __exit__(self, *_: object) -> None:
        deadline_s = time.monotonic() + _END_S
        for probe in self._probes.values():
            probe.close_input()
        for probe in self._probes.values():
            probe.close(deadline_s)

    def ask(self, commands: Mapping[int, Command], *, within_s: float) -> dict[int, Answer]:
        for host, command in commands.items():
            self._probes[host].send(msgspec.json.encode(command))
        answers: dict[int, Answer] = {}
        deadline_s = time.monotonic() + within_s
        beat_s = time.monotonic() + BEAT_S
        while waiting := commands.keys() - answers.keys() - self.failures.keys():
            now_s = time.monotonic()
            if now_s >= deadline_s:
                for host in waiting:
                    self._fail(host, "silent", f"no answer within {within_s:g} s")
                break
            if now_s >= beat_s:
                beat_s = now_s + BEAT_S
                for probe in self._probes.values():
                    probe.send(ALIVE)
            with contextlib.suppress(queue.Empty):
                self._handle(self._events.get(timeout=min(deadline_s, beat_s) - now_s), answers)
        return answers

    def _handle(self, event: _Said | _Ended, answers: dict[int, Answer]) -> None:
        if event.host in self.failures:
            return
        if isinstance(event, _Ended):
            self._explain_end(event.host, event.code)
        elif isinstance(event.answer, Hello):
            self._greeted.add(event.host)
            self._check_version(event.host, event.answer)
        else:
            answers[event.host] = event.answer

    def _check_version(self, host: int, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            text = (
                f"its foreprop is {hello.foreprop}, this one {__version__}: they do not understand"
                " each other"
            )
            self._fail(host, "other_version", text)

    def _explain_end(self, host: int, code: int) -> None:
        last_words = self._probes[host].last_words
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        over_ssh = not self._plan.is_here(host)
        if over_ssh and code == _SSH_FAILED and host not in self._greeted:
            self._fail(host, "unreachable", last_words or how)
        elif host in self._greeted:
            self._fail(host, "ended", f"its probe ended with {how}; last words: {last_words!r}")
        elif code == _NOT_FOUND:
            self._fail(host, "no_python", f"it has no {self._plan.python}")
        elif "No module named" in last_words and "foreprop" in last_words:
            self._fail(host, "no_foreprop", last_words)
        else:
            self._fail(host, "ended", f"its probe ended with {how}; last words: {last_words!r}")

    def _fail(self, host: int, kind: str, text: str) -> None:
        words = self._probes[host].command
        hand = words if self._plan.is_here(host) else [*words[:-1], "true"]
        self.failures[host] = Failure(
            kind=kind,  # type: ignore[arg-type]
            text=text,
            command=" ".join(hand),
        )
