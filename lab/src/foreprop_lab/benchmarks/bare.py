"""The yardstick for the data plane: the same messages over a socket, with nothing around them."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import signal
import socket
import threading
import time
from typing import Any

import numpy as np
import psutil

from foreprop.core.wire import HEADER_BYTES
from foreprop.engine.stream import tune
from foreprop_lab.lab.cluster import children_start_undisturbed

_JOIN_S = 60.0


def cpu_seconds(*pids: int) -> float:
    """User and system seconds of these processes so far, this one included."""
    total = 0.0
    for process in [psutil.Process(), *(psutil.Process(pid) for pid in pids)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total


class BarePair:
    """This process sends messages to a second one, which answers each with one of equal size."""

    def __init__(self, message_bytes: int, messages: int, unsent_bytes: int) -> None:
        self._messages = messages
        self._unsent_bytes = unsent_bytes
        listener = socket.create_server(("127.0.0.1", 0))
        context = multiprocessing.get_context("spawn")
        self._peer = context.Process(
            target=_serve,
            args=(listener.getsockname()[1], message_bytes, messages, unsent_bytes),
        )
        with children_start_undisturbed():
            self._peer.start()
        self._sock, _ = listener.accept()
        listener.close()
        tune(self._sock, unsent_bytes=unsent_bytes, timeout_s=_JOIN_S)
        self._header = bytes(HEADER_BYTES)
        self._out = _memory(message_bytes * messages)
        self._in = _memory(message_bytes * messages)
        self._message_bytes = message_bytes

    @property
    def pid(self) -> int:
        return self._peer.pid or 0

    def step(self) -> float:
        """Send all messages and receive all answers; returns the seconds."""
        started = time.perf_counter()
        sender = threading.Thread(target=self._send_all)
        sender.start()
        head = memoryview(bytearray(HEADER_BYTES))
        size = self._message_bytes
        for i in range(self._messages):
            _receive_exactly(self._sock, head)
            _receive_exactly(self._sock, self._in[i * size : (i + 1) * size])
        sender.join()
        return time.perf_counter() - started

    def _send_all(self) -> None:
        size = self._message_bytes
        for i in range(self._messages):
            _send(self._sock, self._header, self._out[i * size : (i + 1) * size])

    def close(self) -> None:
        self._sock.close()
        self._peer.join(_JOIN_S)


def _memory(size_bytes: int) -> memoryview:
    array: Any = np.ones(size_bytes, np.uint8)  # ones: so that it is really there
    return memoryview(array)


def _send(sock: socket.socket, header: bytes, payload: memoryview) -> None:
    sent = sock.sendmsg((header, payload))
    if sent < len(header) + len(payload):
        sock.sendall(payload[sent - len(header) :])


def _receive_exactly(sock: socket.socket, view: memoryview) -> bool:
    try:
        return sock.recv_into(view, 0, socket.MSG_WAITALL) == len(view)
    except ConnectionError:
        return False


def _serve(port: int, message_bytes: int, messages: int, unsent_bytes: int) -> None:
    """Answer every message; receiving and sending run side by side.

    Like a server's parameters, every message and every answer has memory of its own.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when its peer does
    try:
        sock = socket.create_connection(("127.0.0.1", port))
    except ConnectionError:
        return  # whoever wanted it has ended
    tune(sock, unsent_bytes=unsent_bytes, timeout_s=_JOIN_S)
    arrived = threading.Semaphore(0)
    ended = threading.Event()
    answers = _memory(message_bytes * messages)

    def reply() -> None:
        header = bytes(HEADER_BYTES)
        while True:
            for start in range(0, len(answers), message_bytes):
                arrived.acquire()
                if ended.is_set():
                    return
                with contextlib.suppress(ConnectionError):
                    _send(sock, header, answers[start : start + message_bytes])

    sender = threading.Thread(target=reply)
    sender.start()
    head = memoryview(bytearray(HEADER_BYTES))
    payloads = _memory(message_bytes * messages)
    start = 0
    while _receive_exactly(sock, head):
        _receive_exactly(sock, payloads[start : start + message_bytes])
        start = (start + message_bytes) % len(payloads)
        arrived.release()
    ended.set()
    arrived.release()
    sender.join()
    sock.close()
