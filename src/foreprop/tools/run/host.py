"""What runs on a host: ``python -m foreprop.tools.run.host`` starts the agent and sees it off.

Started by ``foreprop run``, over ssh or directly, never by hand; `records` says what comes in on
standard input and goes out on standard output. Whatever happens to the launcher, to the connection
or to the agent, no process that the agent has started stays behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
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

from foreprop.config.launchers import ELASTIC, SERVERS_FILE
from foreprop.tools.run import processes
from foreprop.tools.run.records import (
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

_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LEAST_PORT, _TRIES = 10_000, 100
_POLL_S = 0.1
_MARGIN_S = 2.0
"""How long after the grace the agent may still kill its workers itself."""
_IDLE_GRACE_S = 1.0
"""How long an agent that has no workers (any more) may take to end."""


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
            patience_s = max(0.0, self._heard_at + SILENCE_S - time.monotonic())
            for key, _ in self._selector.select(min(timeout_s, patience_s)):
                if key.fd == 0:
                    self._read_commands()
                elif set(os.read(self._signals, 4096)) - {signal.SIGCHLD}:
                    self._lines.append(END)
            if time.monotonic() >= self._heard_at + SILENCE_S:
                self._heard_at = float("inf")
                self._lines.append(END)
        return self._lines.pop(0) if self._lines else None

    def next_line(self) -> bytes:
        """The next command, however long it takes to come."""
        while (line := self.next(SILENCE_S)) is None:
            pass
        return line

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
        agent = [sys.executable, "-P", "-m", "foreprop.tools.run.agent", str(task.grace_s)]
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
        """Watch until no process is left; the agent's exit code (negative: a signal killed it)."""
        while self._code is None or processes.descendants():
            command = self._inbox.next(_POLL_S if self._kill_at is not None else SILENCE_S)
            if command == KILL:
                self._kill_at = time.monotonic()
            elif command == END and self._code is None:
                if self._ending_at is None:
                    self._ending_at = time.monotonic()
                    self._kill_at = self._ending_at + self._grace_s + _MARGIN_S
                    self._process.terminate()
            elif command == SERVERS:
                _send(Serving(addresses=addresses_in(self._servers_file)))
            ended = processes.collect_ended()
            code: int | None = ended.get(self._process.pid, self._process.returncode)
            if code is not None and self._code is None:
                self._code = self._process.returncode = code
                now = time.monotonic()
                if self._code < 0:  # killed: nobody else ends its workers
                    self._kill_at = now
                elif self._kill_at is None:  # the rest (a server that says goodbye) ends by itself
                    self._kill_at = now + self._grace_s
            now = time.monotonic()
            is_late = self._ending_at is not None and now >= self._ending_at + _IDLE_GRACE_S
            if self._kill_at is not None and now >= self._kill_at:
                processes.kill_descendants()
            elif is_late and self._code is None and not processes.has_children(self._process.pid):
                self._process.kill()  # it is in a call of torch's that no signal interrupts
        return self._code


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
    """The path of a file with the secret: in memory, of mode 600, and gone with this process."""
    descriptor = os.memfd_create("foreprop-secret")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, secret)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def decode_task(line: bytes) -> Task:
    """The launcher's task; raises ValueError if it speaks another version's protocol."""
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
    """Raise ValueError if this host has not the directory in which workers are to start."""
    if not os.path.isdir(task.directory):
        raise ValueError(
            f"there is no directory {task.directory} on {task.host}; workers start in the directory"
            " that `foreprop run` is called in: make it there, or give --directory"
        )


def free_port() -> int:
    """A port that is free, and that nobody is given by chance before its listener comes.

    Who connects, or asks for any port, is given one of the system's range: this is one below it.
    """
    try:
        above = int(_GIVEN_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        above = 32_768
    for _ in range(_TRIES):
        port = _LEAST_PORT + secrets.randbelow(max(1, above - _LEAST_PORT))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _send(news: News) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, encode_news(news))


if __name__ == "__main__":
    sys.exit(main())
