"""What the engine needs of a connection, and the one implementation over any stream socket."""

from __future__ import annotations

import contextlib
import select
import socket
from typing import Protocol

from foreprop.errors import TransportError
from foreprop.link.tcp import bound_send_buffer, stays_on_this_machine


class Stream(Protocol):
    """A reliable, ordered, full-duplex byte stream. One thread sends, one receives."""

    def send(self, header: bytes, payload: memoryview) -> None:
        """Block until all bytes are with the kernel; raises `TransportError`."""

    def bound(self, window_bytes: int) -> None:
        """From now on hold no more than about so many unacknowledged, and end `send` only when
        another third of them could be taken: what is sent has then mostly arrived.
        """

    def receive_into(self, view: memoryview) -> int:
        """Block for 1 to ``len(view)`` bytes; 0 at the end; raises `TransportError`."""

    def close(self) -> None:
        """End both directions; wakes threads blocked in it. Safe to call again."""


class SocketStream:
    """A `Stream` over a connected socket; bytes never pass through Python objects."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._sock = sock
        self._peer = peer
        self._room: select.poll | None = None

    def bound(self, window_bytes: int) -> None:
        try:
            if stays_on_this_machine(self._sock):
                return
            bound_send_buffer(self._sock, window_bytes)
        except OSError:
            return  # it is lost; who sends or receives next says so
        self._room = select.poll()
        self._room.register(self._sock, select.POLLOUT)

    def send(self, header: bytes, payload: memoryview) -> None:
        try:
            sent = self._sock.sendmsg((header, payload))
            if sent < len(header):
                self._sock.sendall(header[sent:])
                sent = len(header)
            if sent < len(header) + len(payload):
                self._sock.sendall(payload[sent - len(header) :])
            if self._room is not None:
                self._room.poll()
        except OSError as error:
            raise TransportError(f"cannot send to {self._peer}: {error}") from error

    def receive_into(self, view: memoryview) -> int:
        try:
            return self._sock.recv_into(view, 0, socket.MSG_WAITALL)
        except OSError as error:
            raise TransportError(f"cannot receive from {self._peer}: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
