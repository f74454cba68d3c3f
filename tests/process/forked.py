"""Servers that are forked from a process with torch in it, instead of started as new programs.

`ProcessServer` starts an interpreter, and to import torch takes longer than all that a server of a
small session does. A program that calls `fork_servers`, while it has one thread only, forks
children that wait. The next servers that it starts are these: real processes, children of the same
one, with the descriptors, arguments and environment that new ones would have. `fork_ranks` does so
with ranks.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from foreprop.backends import processes
from foreprop.backends.main import main

_REQUEST_BYTES = 65_536
_MOST_DESCRIPTORS = 16
_POLL_S = 0.005


def fork_servers(count: int, before: Callable[[], object] = lambda: None) -> None:
    """The next ``count`` of this process; ``before`` is called in each as it becomes a server."""
    if not count:
        return
    assert threading.active_count() == 1, "a fork takes one thread along"
    waiting: list[tuple[int, socket.socket]] = []
    for _ in range(count):
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if pid := os.fork():
            its.close()
            waiting.append((pid, ours))
            continue
        for end in [ours, *(end for _, end in waiting)]:
            end.close()  # or it would not see how its parent ends
        _become_server(its, before)

    def start(command: Sequence[str], **about: Any) -> ForkedServer:
        return ForkedServer(*waiting.pop(0), command, **about)

    usual = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    setattr(processes, "subprocess", SimpleNamespace(Popen=start, **usual))  # noqa: B010


def _become_server(asked: socket.socket, before: Callable[[], object]) -> NoReturn:
    """Never returns: what called `fork_servers` goes on in the parent alone."""
    code = 1
    try:
        data, descriptors, *_ = socket.recv_fds(asked, _REQUEST_BYTES, _MOST_DESCRIPTORS)
        asked.close()
        if not data:
            os._exit(0)  # the parent has ended, and has started no server
        request = json.loads(data)
        os.setpgid(0, 0)  # not a session of its own: `Run.ours` finds it by its rank's
        os.environ.clear()
        os.environ.update(request["environment"])
        *sockets, lifeline = descriptors
        sys.argv = ["foreprop.backends", ",".join(map(str, sockets)), str(lifeline)]
        sys.argv += request["arguments"]
        before()
        code = main()
    except BaseException:
        traceback.print_exc()
    end_process(code)


def fork_ranks(count: int, servers: int) -> None:
    """Become ``count`` ranks of a machine: returns in each, and never in the process that was.

    For scripts that import for seconds: ranks, and servers of rank 0, share what this process has
    imported. Of no ranks: nothing happens.
    """
    if not count:
        return
    assert threading.active_count() == 1, "a fork takes one thread along"
    gc.freeze()  # or each would look through, and so copy, all of that
    pids: list[int] = []
    for rank in range(count):
        if not (pid := os.fork()):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            fork_servers(0 if rank else servers)
            return
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    end_process(int(any(codes)))


def end_process(code: int = 0) -> NoReturn:
    """End as an interpreter does, but for taking apart what it shares with what forked it.

    The kernel would have to copy all of that: a fifth of a second.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


class ForkedServer:
    """What `ProcessServer` needs of `subprocess.Popen`."""

    def __init__(
        self,
        pid: int,
        asked: socket.socket,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        **_: object,
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        # after PROGRAM and two arguments: descriptors and lifeline have other numbers there
        request = {"arguments": command[len(processes.PROGRAM) + 2 :], "environment": dict(env)}
        with asked:
            socket.send_fds(asked, [json.dumps(request).encode()], pass_fds)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked server", timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


if __name__ == "__main__":  # ``FORK_SERVERS``, a script that forks none itself, its arguments
    fork_servers(int(os.environ.pop("FORK_SERVERS")))
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
