"""Probes on the hosts of a resource file, started as ``foreprop run`` starts its host programs."""

from __future__ import annotations

import contextlib
import queue
import sys
import time
from collections.abc import Mapping
from functools import partial

import msgspec

from foreprop.tools.doctor.examine import Panel
from foreprop.tools.doctor.probe import PROGRAM
from foreprop.tools.doctor.records import PROTOCOL, Answer, Command, Failure, Hello, decode_answer
from foreprop.tools.run.plan import Plan
from foreprop.tools.run.processes import PipedProcess
from foreprop.tools.run.records import ALIVE, BEAT_S, MARK
from foreprop.version import __version__

_NOT_FOUND, _SSH_FAILED = 127, 255
_END_S = 3.0

_Event = tuple[int, Answer | int]
"""A host, and its probe's answer or exit code."""


class HostsPanel(Panel):
    """A probe on each host of a plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._probes: dict[int, PipedProcess] = {}
        self._last_words: dict[int, str] = {}
        """The last line of each probe's standard error: a traceback's has the reason."""
        self._greeted: set[int] = set()
        for host in range(len(plan.hosts)):
            command = plan.command(host, PROGRAM)
            try:
                self._probes[host] = PipedProcess(
                    command,
                    on_output=partial(self._read_answers, host),
                    on_errors=partial(self._keep_last_words, host),
                    on_end=partial(self._note_end, host),
                    limit_bytes=sys.maxsize,
                )
            except OSError as error:
                text = f"{command[0]} cannot be started: {error.strerror}"
                self.failures[host] = Failure(kind="no_python", text=text)

    def _read_answers(self, host: int, lines: list[bytes]) -> None:
        for line in lines:
            _, mark, body = line.partition(MARK)
            if mark:
                with contextlib.suppress(msgspec.MsgspecError):
                    self._events.put((host, decode_answer(body)))

    def _note_end(self, host: int, code: int) -> None:
        self._events.put((host, code))

    def _keep_last_words(self, host: int, lines: list[bytes]) -> None:
        for line in lines:
            if text := line.decode(errors="replace").strip():
                self._last_words[host] = text

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
            last_words = self._last_words.get(host, "")
            how = f"exit code {said}" if said >= 0 else f"signal {-said}"
            over_ssh = not self._plan.is_here(host)
            if host in self._greeted:
                self._fail(host, "ended", f"its probe ended with {how}; last words: {last_words!r}")
            elif over_ssh and said == _SSH_FAILED:
                self._fail(host, "unreachable", last_words or how)
            elif said == _NOT_FOUND:
                self._fail(host, "no_python", f"it has no {self._plan.python}")
            elif "No module named" in last_words and "foreprop" in last_words:
                self._fail(host, "no_foreprop", last_words)
            else:
                self._fail(host, "ended", f"its probe ended with {how}; last words: {last_words!r}")
        elif not isinstance(said, Hello):
            answers[host] = said
        elif said.protocol == PROTOCOL:
            self._greeted.add(host)
        else:
            text = f"its foreprop is {said.foreprop}, this one {__version__}: they do not"
            self._fail(host, "other_version", f"{text} understand each other")

    def _fail(self, host: int, kind: str, text: str) -> None:
        words = self._probes[host].command
        hand = words if self._plan.is_here(host) else [*words[:-1], "true"]
        self.failures[host] = Failure(
            kind=kind,  # type: ignore[arg-type]
            text=text,
            command=" ".join(hand),
        )
