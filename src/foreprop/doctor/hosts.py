"""Probes on the hosts of a resource file, started as ``foreprop run`` starts its host programs."""

from __future__ import annotations

import contextlib
import queue
import sys
import time
from collections.abc import Mapping
from functools import partial

import msgspec

from foreprop.doctor.probe import PROGRAM
from foreprop.doctor.records import PROTOCOL, Answer, Command, Failure, Hello, decode_answer
from foreprop.run.plan import Plan
from foreprop.run.processes import PipedProcess
from foreprop.run.records import ALIVE, BEAT_S, MARK
from foreprop.version import __version__

_NOT_FOUND, _SSH_FAILED = 127, 255
_END_S = 3.0


_Event = tuple[int, Answer | int]
"""What a host has said, or the code that its probe has ended with."""


class HostsPanel:
    """A context manager: leaving it ends every probe. Raises nothing for hosts that fail."""

    def __init__(self, plan: Plan) -> None:
        self.failures: dict[int, Failure] = {}
        self._plan = plan
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._probes: dict[int, PipedProcess] = {}
        self._last_words: dict[int, str] = {}
        """The last line of each one's standard error: a traceback's has the reason."""
        self._greeted: set[int] = set()
        for host in range(len(plan.hosts)):
            command = plan.command(host, PROGRAM)
            try:
                self._probes[host] = PipedProcess(
                    command,
                    said=partial(self._hear, host),
                    complained=partial(self._note, host),
                    ended=partial(self._note_end, host),
                    limit_bytes=sys.maxsize,
                )
            except OSError as error:
                text = f"{command[0]} cannot be started: {error.strerror}"
                self.failures[host] = Failure(kind="no_python", text=text)

    def _hear(self, host: int, lines: list[bytes]) -> None:
        for line in lines:
            _, mark, body = line.partition(MARK)
            if mark:
                with contextlib.suppress(msgspec.MsgspecError):
                    self._events.put((host, decode_answer(body)))

    def _note_end(self, host: int, code: int) -> None:
        self._events.put((host, code))

    def _note(self, host: int, lines: list[bytes]) -> None:
        for line in lines:
            if text := line.decode(errors="replace").strip():
                self._last_words[host] = text

    def __enter__(self) -> HostsPanel:
        return self

    def __exit__(self, *_: object) -> None:
        deadline_s = time.monotonic() + _END_S
        for probe in self._probes.values():
            probe.close_input()
        for probe in self._probes.values():
            probe.kill_after(max(0.0, deadline_s - time.monotonic()))
            probe.close()

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

    def _handle(self, event: _Event, answers: dict[int, Answer]) -> None:
        host, said = event
        if host in self.failures:
            return
        if isinstance(said, int):
            self._explain_end(host, said)
        elif not isinstance(said, Hello):
            answers[host] = said
        elif said.protocol == PROTOCOL:
            self._greeted.add(host)
        else:
            text = f"its foreprop is {said.foreprop}, this one {__version__}: they do not"
            self._fail(host, "other_version", f"{text} understand each other")

    def _explain_end(self, host: int, code: int) -> None:
        last_words = self._last_words.get(host, "")
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        over_ssh = not self._plan.is_here(host)
        if host in self._greeted:
            self._fail(host, "ended", f"its probe ended with {how}; last words: {last_words!r}")
        elif over_ssh and code == _SSH_FAILED:
            self._fail(host, "unreachable", last_words or how)
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
