"""On a host: ``python -m foreprop.run.host`` starts the agent and sees it off.

Started by ``foreprop run``, over ssh or directly, never by hand; `records` says what comes in on
standard input and goes out on standard output. Whatever happens to the launcher, to the connection
or to the agent, no process that the agent has started stays behind.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from foreprop.config.otherhosts import ELASTIC, SERVERS_FILE
from foreprop.run import processes
from foreprop.run.records import (
    END,
    KILL,
    PROTOCOL,
    SERVERS,
    SILENCE_S,
    START,
    LineSplitter,
    News,
    Ready,
    Refused,
    Serving,
    Task,
    encode_news,
)

_POLL_S = 0.1
_MARGIN_S = 2.0
"""After the grace, for the agent to kill its workers itself."""
_IDLE_GRACE_S = 1.0
"""For an agent that has no workers (any more)."""


class Inbox:
    """Commands from the launcher and signals, waited for together."""

    def __init__(self) -> None:
        self._splitter = LineSplitter()
        self._lines: list[bytes] = []
        self._heard_at = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._signals, wake = os.pipe()
        os.set_blocking(self._signals, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        self._selector.register(self._signals, selectors.EVENT_READ)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: None)

    def next(self, timeout_s: float) -> bytes | None:
        """The next command; `END` if the launcher or a signal wants an end; None if nothing."""
        if not self._lines:
            self._wait(timeout_s)
        return self._lines.pop(0) if self._lines else None

    def next_line(self) -> bytes:
        """Waits as long as it takes."""
        while (line := self.next(SILENCE_S)) is None:
            pass
        return line

    def _wait(self, timeout_s: float) -> None:
        patience_s = max(0.0, self._heard_at + SILENCE_S - time.monotonic())
        for key, _ in self._selector.select(min(timeout_s, patience_s)):
            if key.fd == 0:
                self._read_commands()
            elif set(os.read(self._signals, 4096)) - {signal.SIGCHLD}:
                self._lines.append(END)
        if time.monotonic() >= self._heard_at + SILENCE_S:
            self._heard_at = float("inf")
            self._lines.append(END)

    def _read_commands(self) -> None:
        data = os.read(0, 65536)
        if data:
            self._heard_at = time.monotonic()
            self._lines += self._splitter.feed(data)
        else:
            self._heard_at = float("inf")
            self._selector.unregister(0)
            self._lines.append(END)


class Watch:
    """The agent's process, and all that descend from it."""

    def __init__(
        self, task: Task, port: int, secret: bytes, inbox: Inbox, servers_file: str | None
    ) -> None:
        self._inbox = inbox
        self._servers_file = servers_file
        self._grace_s = task.grace_s
        self._kill_at: float | None = None
        self._ending_at: float | None = None
        self._code: int | None = None
        # without ``-P`` Python would look for modules in the directory
        agent = [sys.executable, "-P", "-m", "foreprop.run.agent", str(task.grace_s)]
        agent.append(msgspec.json.encode(task.place).decode())
        self._process = subprocess.Popen(
            [*agent, "--master-port", str(port), *task.arguments],
            cwd=task.directory,
            env=os.environ
            | task.environment
            | {"FOREPROP_SECRET_FILE": keep_secret(secret)}
            | ({} if servers_file is None else {SERVERS_FILE: servers_file}),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def run(self) -> int:
        """Until nothing is left; the agent's exit code (negative: the signal that killed it)."""
        while self._code is None or processes.descendants():
            command = self._inbox.next(_POLL_S if self._kill_at is not None else SILENCE_S)
            if command == KILL:
                self._kill_at = time.monotonic()
            elif command == END and self._code is None:
                self._end()
            elif command == SERVERS:
                _send(Serving(addresses=addresses_in(self._servers_file)))
            self._collect()
            self._kill_if_late()
        return self._code

    def _end(self) -> None:
        if self._ending_at is None:
            self._ending_at = time.monotonic()
            self._kill_at = self._ending_at + self._grace_s + _MARGIN_S
            self._process.terminate()

    def _collect(self) -> None:
        # Popen itself collects an agent that ended just before a signal was to be sent to it
        ended = processes.collect_ended()
        code: int | None = ended.get(self._process.pid, self._process.returncode)
        if code is not None and self._code is None:
            self._code = self._process.returncode = code
            now = time.monotonic()
            if self._code < 0:  # killed: nobody else ends its workers
                self._kill_at = now
            elif self._kill_at is None:  # the rest (a server that says goodbye) ends by itself
                self._kill_at = now + self._grace_s

    def _kill_if_late(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            processes.kill_descendants()
        elif self._is_idle(now):
            self._process.kill()  # it is in a call of torch's that no signal interrupts

    def _is_idle(self, now: float) -> bool:
        """Whether the agent should have ended by now and has no workers to wait for."""
        late = self._ending_at is not None and now >= self._ending_at + _IDLE_GRACE_S
        return late and self._code is None and not processes.has_children(self._process.pid)


def main() -> int:
    processes.adopt_orphans()
    inbox = Inbox()
    line = inbox.next_line()
    if line == END:
        return 1
    try:
        task = decode_task(line)
        check_directory(task)
        _send(Ready(port=task.port or free_port()))
    except ValueError as error:
        _send(Refused(reason=str(error)))
        return 1
    while not (line := inbox.next_line()).startswith(START):
        if line in (END, KILL):
            return 1
    _, port, secret = line.split()
    with servers_file(task) as file:
        code = Watch(task, int(port), bytes.fromhex(secret.decode()), inbox, file).run()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def servers_file(task: Task) -> Iterator[str | None]:
    """A path at which elastic workers can write where their servers are; None for others."""
    if task.environment.get(ELASTIC) != str(True):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="foreprop-") as folder:
        yield os.path.join(folder, "servers")


def addresses_in(file: str | None) -> list[str]:
    """The lines of a file that need not be there."""
    with contextlib.suppress(OSError):
        return [] if file is None else Path(file).read_text().split()
    return []


def keep_secret(secret: bytes) -> str:
    """A file with it, of mode 600, that is in memory and there only as long as this process."""
    descriptor = os.memfd_create("foreprop-secret")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, secret)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def decode_task(line: bytes) -> Task:
    """Raises ValueError."""
    try:
        protocol = msgspec.json.decode(line).get("protocol")
        if protocol == PROTOCOL:
            return msgspec.json.decode(line, type=Task)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the launcher's task cannot be read: {error}") from error
    raise ValueError(
        f"its foreprop speaks protocol {PROTOCOL}, the launcher's {protocol}; install the same"
        " version on all hosts"
    )


def check_directory(task: Task) -> None:
    """Raises ValueError."""
    if not os.path.isdir(task.directory):
        raise ValueError(
            f"there is no directory {task.directory} on {task.host}; workers start in the directory"
            " that `foreprop run` is called in: make it there, or give --directory"
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _send(news: News) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, encode_news(news))


if __name__ == "__main__":
    sys.exit(main())
