"""Signs of life, on connections of their own: a peer that is stopped or cut off falls silent.

Beside each connection to a server there is one on which both ends send a byte now and then, and
nothing else. A server sends from its main thread. A worker's own threads may wait for the
interpreter's lock for as long as the user's code likes; a process beside it sends for it
(`engine.pulsing`), as long as it is not stopped. What is read late is heard all the same, so who is
busy itself takes nobody for silent.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from foreprop.config import LOGGER, Config
from foreprop.core.wire import Kind
from foreprop.engine.connection import unencrypted

PULSE_S = 0.5
_MOST_READ_BYTES = 4096
_ABOUT_CHARACTERS = 100
_END_S = 1.0
_PROGRAM = str(Path(__file__).with_name("pulsing.py"))


def pulse_greeting(session_id: str, rank: int, about: str) -> bytes:
    """The first frame of a pulse; ``about`` says where the rank is, for messages."""
    data = f"{session_id} {about[:_ABOUT_CHARACTERS]}".encode()
    return unencrypted(Kind.PULSE, rank, data)


def read_greeting(payload: memoryview) -> tuple[bytes, str]:
    """The session's id and where the rank is, of a greeting that another process sent."""
    session_id, _, about = bytes(payload).partition(b" ")
    text = about.decode(errors="replace")
    return session_id, "".join(each for each in text if each.isprintable())


Lost = Callable[[int, str], object]
"""Told the number of a peer of whom nothing was heard for too long, and why in words."""


Verdict = Literal["", "told", "again", "lost"]
"""What to do: nothing, tell of the silence, tell that it is over, or give the peer up."""

LOOK_S = 1.0
"""The most that one look counts: who was stopped itself and looks late has seen nothing."""


class Silence:
    """How long nothing has been heard of a peer, which may first be starting. Not thread-safe."""

    def __init__(self, report_s: float, timeout_s: float, first_s: float) -> None:
        self.silent_s = 0.0
        self.limit_s = max(timeout_s, first_s)
        self._report_s, self._timeout_s = report_s, timeout_s
        self._looked_at_s: float | None = None
        self._told = False

    def look(self, now_s: float, *, heard: bool) -> Verdict:
        """Count the silence since the last look, unless something was ``heard`` in it."""
        before_s, self._looked_at_s = self._looked_at_s, now_s
        if heard:
            told, self._told, self.silent_s = self._told, False, 0.0
            self.limit_s = self._timeout_s
            return "again" if told else ""
        if before_s is not None:
            self.silent_s += min(now_s - before_s, LOOK_S)
        if self.silent_s >= self.limit_s:
            return "lost"
        if not self._told and self.silent_s >= self._report_s and self.limit_s == self._timeout_s:
            self._told = True
            return "told"
        return ""


@dataclass(slots=True, eq=False)
class _Pulse:
    sock: socket.socket
    name: str
    lost: Lost
    silence: Silence

    def hears(self) -> bool | None:
        """Whether something has come; None: the connection has ended."""
        heard = False
        with contextlib.suppress(OSError):
            try:
                while self.sock.recv(_MOST_READ_BYTES, socket.MSG_DONTWAIT):
                    heard = True
            except BlockingIOError:
                return heard
        return None

    def beat(self) -> None:
        """Send a byte; a full connection has been told often enough, a lost one its reader sees."""
        with contextlib.suppress(OSError):
            self.sock.send(b"\0", socket.MSG_DONTWAIT)


class Pulses:
    """A process's pulses, by the number of who is at the other end. Any thread.

    ``own`` is its name in messages; with ``beats`` it sends them itself. Who has said nothing yet
    may be starting, for ``first_s``. Whoever ends such a connection is not watched any more: if
    that is a loss, the connection beside it says so.
    """

    def __init__(self, own: str, config: Config, *, beats: bool, first_s: float = 0.0) -> None:
        self._own, self._config = own, config
        self._beats, self._first_s = beats, first_s
        self._beaten_at_s = 0.0
        self._lock = threading.Lock()
        self._pulses: dict[int, _Pulse] = {}

    def __len__(self) -> int:
        return len(self._pulses)

    def add(self, number: int, sock: socket.socket, name: str, lost: Lost) -> None:
        """Watch a peer, in the place of the one before, and tell ``lost`` of its silence."""
        config = self._config
        silence = Silence(config.silence_report_s, config.silence_timeout_s, self._first_s)
        with self._lock:
            before = self._pulses.pop(number, None)
            pulse = self._pulses[number] = _Pulse(sock, name, lost, silence)
        if self._beats:  # it has come: from now on its silence counts
            pulse.beat()
        if before is not None:
            before.sock.close()

    def sockets(self) -> list[socket.socket]:
        with self._lock:
            return [pulse.sock for pulse in self._pulses.values()]

    def watched(self) -> set[int]:
        """The numbers of peers whose pulses have not ended."""
        with self._lock:
            return set(self._pulses)

    def drop(self, number: int) -> None:
        with self._lock:
            pulse = self._pulses.pop(number, None)
        if pulse is not None:
            pulse.sock.close()

    def look(self) -> None:
        """Look who is silent; to be called twice a second."""
        now_s = time.monotonic()
        with self._lock:
            pulses = list(self._pulses.items())
        if self._beats and now_s >= self._beaten_at_s + PULSE_S:
            self._beaten_at_s = now_s
            for _, pulse in pulses:
                pulse.beat()
        for number, pulse in pulses:
            self._look_at(number, pulse, now_s)

    def _look_at(self, number: int, pulse: _Pulse, now_s: float) -> None:
        if (heard := pulse.hears()) is None:
            self.drop(number)
            return
        silent_s, limit_s = pulse.silence.silent_s, pulse.silence.limit_s
        verdict = pulse.silence.look(now_s, heard=heard)
        if verdict == "told":
            LOGGER.warning(
                "%s has heard nothing of %s for %g s (silence_report_s); after %g s"
                " (silence_timeout_s) it counts as lost",
                *(self._own, pulse.name, self._config.silence_report_s, limit_s),
            )
        elif verdict == "again":
            LOGGER.warning("%s hears of %s again, after %.0f s", self._own, pulse.name, silent_s)
        elif verdict == "lost":
            self.drop(number)
            name = "join" if limit_s > self._config.silence_timeout_s else "silence"
            why = f"{self._own} has heard nothing of it for {limit_s:g} s ({name}_timeout_s)"
            pulse.lost(number, f"{pulse.name} is gone: {why}")

    def close(self) -> None:
        for number in self.watched():
            self.drop(number)


class WorkerPulses:
    """A worker's pulses: a thread hears the servers, and a process answers for the worker.

    Both are there from the first connection on.
    """

    def __init__(self, rank: int, config: Config) -> None:
        self.heard = Pulses(f"rank {rank}", config, beats=False, first_s=config.join_timeout_s)
        self._listeners: list[Lost] = []
        self._losses: list[tuple[int, str]] = []
        self._answered: list[socket.socket] = []
        self._rank = rank
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()

    def add(self, server: int, sock: socket.socket, name: str) -> None:
        """Answer to a server from now on, and watch it."""
        with self._lock:
            _hand_over(self._started(), [sock])
            self.heard.add(server, sock, name, self._lose)

    def answer(self, sock: socket.socket) -> None:
        """Answer, too, on a connection to this process's own server."""
        with self._lock:
            self._answered.append(sock)
            _hand_over(self._started(), [sock])

    def _started(self) -> socket.socket:
        """The socket that commands the process, which is started if need be. With the lock held."""
        if self._control is None:
            self._process, self._control = _start()
            self._thread = threading.Thread(
                target=self._listen, name="foreprop-pulses", daemon=True
            )
            self._thread.start()
        return self._control

    def tell(self, lost: Lost) -> None:
        """Have a listener told of losses, also of those before."""
        with self._lock:
            before = list(self._losses)
            self._listeners.append(lost)
        for loss in before:
            lost(*loss)

    def _lose(self, server: int, why: str) -> None:
        with self._lock:
            self._losses.append((server, why))
            listeners = list(self._listeners)
        for lost in listeners:
            lost(server, why)

    def _listen(self) -> None:
        while not self._over.wait(PULSE_S):
            with self._lock:
                process, control = self._process, self._control
                if process is not None and process.poll() is not None and control is not None:
                    # others would take this rank for silent if it was killed alone
                    LOGGER.warning(
                        "rank %d: the process that says that it is there has ended (%s), and is"
                        " started again",
                        *(self._rank, process.returncode),
                    )
                    control.close()
                    self._process, self._control = _start()
                    answered = [sock for sock in self._answered if sock.fileno() >= 0]
                    _hand_over(self._control, [*self.heard.sockets(), *answered])
            self.heard.look()

    def close(self) -> None:
        """End the thread and the process; peers see that the connections have ended."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._control is not None:
            self._control.close()
        self.heard.close()
        if self._process is not None:
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:  # it is stopped itself
                self._process.kill()
                self._process.wait()

    def forget_in_child(self) -> None:
        """Close a forked child's copies: the parent alone answers."""
        if self._control is not None:
            self._control.close()
        self.heard.close()


def _start() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, its = socket.socketpair()
    with its:
        process = subprocess.Popen(
            (sys.executable, "-I", "-S", _PROGRAM, str(os.getpid()), str(PULSE_S)),
            stdin=its.fileno(),
            start_new_session=True,  # Ctrl-C is for the workers
        )
    return process, ours


def _hand_over(control: socket.socket, connections: Sequence[socket.socket]) -> None:
    with contextlib.suppress(OSError):  # it has ended, and is looked after
        for connection in connections:
            socket.send_fds(control, [b"\0"], [connection.fileno()])
