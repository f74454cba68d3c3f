"""Connections inside one process: for a world of one, and for the tests."""

from __future__ import annotations

import socket

from foreprop.link.stream import SocketStream


def connected_pair(left: str = "left", right: str = "right") -> tuple[SocketStream, SocketStream]:
    """Two ends of one connection, named after what each end talks to."""
    ours, theirs = socket.socketpair()
    return SocketStream(ours, right), SocketStream(theirs, left)
