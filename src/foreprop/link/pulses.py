"""Signs of life, on connections of their own: who is stopped or cut off falls silent.

Beside each connection to a server there is one on which both ends send a byte now and then, and
nothing else. A server sends from its main thread. A worker's own threads may wait for the
interpreter's lock for as long as the user's code likes; a process beside it sends for it
(`link.pulsing`), as long as it is not stopped. What is read late is heard all the same, so who is
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
from pathlib import Path

from foreprop.config import LOGGER, Config
from foreprop.core.silence import Silence
from foreprop.core.wire import Kind
from foreprop.link.connection import unencrypted
from foreprop.link.pulsing import PULSE_S

_MOST_READ_BYTES = 4096
_ABOUT_CHARACTERS = 100
_END_S = 1.0
_PROGRAM = str(Path(__file__).with_name("pulsing.py"))


def pulse_greeting(session_id: str, rank: int, about: str) -> bytes:
    """The first frame on such a connection; ``about``: where the rank is, for messages."""
    data = f"{session_id} {about[:_ABOUT_CHARACTERS]}".encode()
    return unencrypted(Kind.PULSE, rank, data)


def read_greeting(payload: memoryview) -> tuple[bytes, str]:
    """The session's id, and where the rank is: another process's words."""
    session_id, _, about = bytes(payload).partition(b" ")
    text = about.decode(errors="replace")
    return session_id, "".join(each for each in text if each.isprintable())


Lost = Callable[[int, str], object]
"""Told by whose number nothing was heard for too long, and that in words."""


class _Pulse:
    def __init__(self, sock: socket.socket, name: str, config: Config, lost: Lost) -> None:
        self.sock = sock
        self.name = name
        self.lost = lost
        self.silence = Silence(config.silence_report_s, config.silence_timeout_s)

    def hears(self) -> bool | None:
        """Whether something has come; None: the connection has ended."""
        heard = False
        with contextlib.suppress(BlockingIOError):
            while self.sock.recv(_MOST_READ_BYTES, socket.MSG_DONTWAIT):
                heard = True
            return None
        return heard

    def beat(self) -> None:
        """A full one has been told often enough; of a lost one its reader learns."""
        with contextlib.suppress(OSError):
            self.sock.send(b"\0", socket.MSG_DONTWAIT)


class Pulses:
    """A process's, by the number of who is at the other end. Any thread.

    ``own`` is its name in messages; ``beats``: it says itself that it is there. Whoever ends such
    a connection is not watched any more: if that is a loss, the connection beside it says so.
    """

    def __init__(self, own: str, config: Config, *, beats: bool) -> None:
        self._own = own
        self._config = config
        self._beats = beats
        self._beaten_at_s = 0.0
        self._lock = threading.Lock()
        self._pulses: dict[int, _Pulse] = {}

    def __len__(self) -> int:
        return len(self._pulses)

    def add(self, number: int, sock: socket.socket, name: str, lost: Lost) -> None:
        """In the place of the one before; ``lost`` is told if nothing is heard for too long."""
        with self._lock:
            before = self._pulses.pop(number, None)
            self._pulses[number] = _Pulse(sock, name, self._config, lost)
        if before is not None:
            before.sock.close()

    def sockets(self) -> list[socket.socket]:
        with self._lock:
            return [pulse.sock for pulse in self._pulses.values()]

    def drop(self, number: int) -> None:
        with self._lock:
            pulse = self._pulses.pop(number, None)
        if pulse is not None:
            pulse.sock.close()

    def look(self) -> None:
        """To be called twice a second."""
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
        try:
            heard = pulse.hears()
        except OSError:
            heard = None
        if heard is None:
            self.drop(number)
            return
        silent_s, limit_s = pulse.silence.silent_s, self._config.silence_timeout_s
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
            why = f"{self._own} has heard nothing of it for {limit_s:g} s (silence_timeout_s)"
            pulse.lost(number, f"{pulse.name} is gone: {why}")

    def close(self) -> None:
        with self._lock:
            pulses = list(self._pulses.values())
            self._pulses.clear()
        for pulse in pulses:
            pulse.sock.close()


class WorkerPulses:
    """A worker's: a thread that hears the servers, and a process that answers for this one.

    Both are there from the first connection on.
    """

    def __init__(self, rank: int, config: Config) -> None:
        self.heard = Pulses(f"rank {rank}", config, beats=False)
        self._listeners: list[Lost] = []
        self._losses: list[tuple[int, str]] = []
        self._rank = rank
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()

    def add(self, server: int, sock: socket.socket, name: str) -> None:
        """From now on this process is there for that server, and listens for it."""
        with self._lock:
            if self._control is None:
                self._process, self._control = _start()
                self._thread = threading.Thread(
                    target=self._listen, name="foreprop-pulses", daemon=True
                )
                self._thread.start()
            _hand_over(self._control, [sock])
            self.heard.add(server, sock, name, self._lose)

    def tell(self, lost: Lost) -> None:
        """Also of who has been lost before."""
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
            self._look_after_process()
            self.heard.look()

    def _look_after_process(self) -> None:
        """Others would take this rank for silent if it were killed alone."""
        with self._lock:
            if self._process is None or self._process.poll() is None or self._control is None:
                return
            LOGGER.warning(
                "rank %d: the process that says that it is there has ended (%s), and is started"
                " again",
                *(self._rank, self._process.returncode),
            )
            self._control.close()
            self._process, self._control = _start()
            _hand_over(self._control, self.heard.sockets())

    def close(self) -> None:
        """Whoever listens hears no more, and that the connection has ended."""
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
        """In a forked child: only the parent is there."""
        if self._control is not None:
            self._control.close()
        self.heard.close()


def _start() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process, and where it is told of connections; it ends when that is closed."""
    ours, its = socket.socketpair()
    with its:
        process = subprocess.Popen(
            (sys.executable, "-I", "-S", _PROGRAM, str(os.getpid())),
            stdin=its.fileno(),
            start_new_session=True,  # Ctrl-C is for the workers
        )
    return process, ours


def _hand_over(control: socket.socket, connections: Sequence[socket.socket]) -> None:
    with contextlib.suppress(OSError):  # it has ended, and is looked after
        for connection in connections:
            socket.send_fds(control, [b"\0"], [connection.fileno()])
