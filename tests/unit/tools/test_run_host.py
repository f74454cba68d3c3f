"""A host sees its agent off, whatever happens when."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from foreprop.tools.run.host import Watch
from foreprop.tools.run.records import END, Task


class LateEnd:
    """The end is asked for when the agent has ended and nobody has been told."""

    def __init__(self, agent: subprocess.Popen[bytes]) -> None:
        self._agent = agent
        self._asked = 0

    def next(self, timeout_s: float) -> bytes | None:
        self._asked += 1
        if self._asked == 1:
            os.waitid(os.P_PID, self._agent.pid, os.WEXITED | os.WNOWAIT)
            return END
        assert self._asked < 20, "the host never learns that its agent has ended"
        return None


def test_an_agent_that_ends_just_before_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Popen` looks whether its process runs before it sends a signal, and so collects it."""
    start = subprocess.Popen

    def start_another(*_: Any, **__: Any) -> subprocess.Popen[bytes]:
        return start([sys.executable, "-S", "-c", "raise SystemExit(3)"])

    monkeypatch.setattr(subprocess, "Popen", start_another)
    task = Task(host="a", directory=".", environment={}, arguments=[], port=None, grace_s=0.1)
    child = os.fork()  # a host waits for all of its children, and kills what is left
    if not child:
        try:
            watch = Watch(task, 1, b"secret", None, None)  # type: ignore[arg-type]
            watch._inbox = LateEnd(watch._process)  # type: ignore[assignment]
            os._exit(watch.run())
        except BaseException as error:
            os.write(2, f"{error}\n".encode())
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
