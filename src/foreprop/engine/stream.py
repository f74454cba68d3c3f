"""Streams of bytes: finding, opening and tuning TCP connections, and sending over any socket."""

from __future__ import annotations

import abc
import contextlib
import errno
import ipaddress
import select
import socket
import struct
import time
from collections.abc import Sequence
from functools import cache
from typing import cast

import psutil

from foreprop.core.sendqueue import SendBound
from foreprop.core.wire import Checksum
from foreprop.errors import ConfigError, TransportError

TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
TCP_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", 18)
_EMULATED_BUFFER_BYTES = 65_536
_INT_LIMIT = 2**31 - 1
TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_TCP_INFO_BYTES = 152
"""Linux's ``struct tcp_info``, as far as ``tcpi_min_rtt``; ``tcpi_rtt`` is at 68."""
_U32 = struct.Struct("=I")
_NO_ROUND_TRIP = 2**32 - 1
_REFUSED_S = 1.0


def local_address(rendezvous_host: str, interface: str | None = None) -> str:
    """The address that peers shall connect to.

    By default the one on the route to the rendezvous host; ``interface`` overrides it with an
    interface's name (``eth1``) or an address of this machine.
    """
    if interface is None:
        try:
            found = socket.getaddrinfo(rendezvous_host, 9, type=socket.SOCK_DGRAM)
            family, kind, _, _, target = found[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # sends nothing; the kernel picks the route
                return str(probe.getsockname()[0])
        except (OSError, UnicodeError) as error:
            raise TransportError(
                f"no route to the rendezvous host {rendezvous_host!r}: {error}"
            ) from error
    addresses = psutil.net_if_addrs()
    if interface in addresses:
        for entry in addresses[interface]:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                return str(entry.address)
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(interface.partition("%")[0])
        return interface
    raise ConfigError(
        f"interface is {interface!r}; it must be an address of this machine or one of"
        f" {', '.join(sorted(addresses))}"
    )


def is_loopback(text: str) -> bool:
    """Whether an address is this machine's own to itself, or a name says so."""
    try:
        return ipaddress.ip_address(text.partition("%")[0]).is_loopback
    except ValueError:
        return text == "localhost"


def check_reachable(address: str, rendezvous_host: str, interface: str | None) -> None:
    """Refuse to announce a loopback address to other machines.

    It happens where ``interface`` says so, or the rendezvous host's own name stands for 127.0.1.1
    on itself. Whoever names a loopback address as the rendezvous means one machine, and is not
    refused.
    """
    if is_loopback(rendezvous_host) or not is_loopback(address):
        return
    if interface is not None:
        raise ConfigError(
            f"interface is {interface!r} (or FOREPROP_INTERFACE), which is {address}: others cannot"
            f" reach that. Name one by which {rendezvous_host!r} is reached, or leave it out"
        )
    raise ConfigError(
        f"interface: the rendezvous host {rendezvous_host!r} is {address} on this machine,"
        " which others cannot reach. Set FOREPROP_INTERFACE to the interface or address to use"
    )


def listen(address: str, port_range: str | None = None) -> socket.socket:
    """A listening socket on a free port of this address, the first one of a range if there is one.

    Raises `TransportError` if none is free, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    ports: Sequence[int] = (0,)
    if port_range is not None:
        from foreprop.config.checks import parse_port_range

        ports = parse_port_range(port_range)
    for port in ports:
        try:
            return socket.create_server((address, port), family=family, backlog=1024)
        except (OSError, ValueError) as error:  # ValueError: of a name that cannot be one
            if port_range is None:
                raise TransportError(f"cannot listen on {address}: {error}") from error
            if getattr(error, "errno", None) != errno.EADDRINUSE:
                raise TransportError(f"cannot listen on {address} port {port}: {error}") from error
    raise TransportError(
        f"port_range is {port_range!r}, and all of its {len(ports)} ports are taken at {address}:"
        " a session takes one for each server of a machine, and one for each of its relays; widen"
        " it, or see with `ss -ltn` who has them"
    )


def connect(address: str, port: int, *, timeout_s: float) -> socket.socket:
    """Connect, trying again until ``timeout_s`` has passed."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            left_s = max(0.1, deadline - time.monotonic())
            sock = socket.create_connection((address, port), timeout=min(left_s, 10.0))
            if sock.getsockname() == sock.getpeername():
                sock.close()  # nobody listens, and the kernel has joined the port to itself
                raise ConnectionRefusedError("nobody listens")
        except (OSError, ValueError, OverflowError) as error:  # the others: of what is no address
            if time.monotonic() >= deadline or not isinstance(error, OSError):
                raise TransportError(
                    f"no connection to {address} port {port} within {timeout_s:g} s: {error}"
                ) from error
            time.sleep(0.05)
        else:
            sock.settimeout(None)
            return sock


def is_refused(address: str, port: int) -> bool:
    """Whether nobody listens there any more, as the kernel says: it may take a process a moment."""
    deadline = time.monotonic() + _REFUSED_S
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((address, port), timeout=left_s) as sock:
                if sock.getsockname() == sock.getpeername():
                    return True  # nobody listens, and the kernel has joined the port to itself
        except ConnectionRefusedError:
            return True
        except (OSError, ValueError, OverflowError):
            return False
        time.sleep(0.02)
    return False


def tune(
    sock: socket.socket,
    *,
    unsent_bytes: int | None,
    timeout_s: float,
    window_bytes: int | None = None,
    emulated: bool = False,
) -> None:
    """Bound the bytes that the kernel holds unsent, if so, so that priority is decided late.

    ``window_bytes``: see `bound_send_buffer`; by default the kernel chooses.
    A peer that acknowledges nothing for ``timeout_s`` breaks the connection, also one that nothing
    is being sent to. ``emulated``: the bytes pass an emulated link, which a large kernel buffer
    would bypass.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if window_bytes is not None:
        bound_send_buffer(sock, window_bytes)
    if emulated:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _EMULATED_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _EMULATED_BUFFER_BYTES)
    with contextlib.suppress(OSError):  # not every system has these
        unsent_bytes = _INT_LIMIT if unsent_bytes is None else min(unsent_bytes, _INT_LIMIT)
        sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, unsent_bytes)
        milliseconds = int(min(max(1000.0, timeout_s * 1000), _INT_LIMIT))
        sock.setsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT, milliseconds)
        keep_alive(sock, timeout_s)


def bound_send_buffer(sock: socket.socket, window_bytes: int) -> None:
    """Bound what the kernel holds that has not been acknowledged, its own bookkeeping included.

    The kernel doubles the number that it is given, and takes no less than about 4.5 KiB.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, min(window_bytes // 2, _INT_LIMIT))


def round_trips_us(sock: socket.socket) -> tuple[int, int] | None:
    """A connection's round trips, smoothed and shortest, in us; None if the kernel has none."""
    if TCP_INFO is None:
        return None
    info = sock.getsockopt(socket.IPPROTO_TCP, TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _TCP_INFO_BYTES:
        return None
    (smoothed_us,), (shortest_us,) = _U32.unpack_from(info, 68), _U32.unpack_from(info, 148)
    return (smoothed_us, shortest_us) if 0 < shortest_us < _NO_ROUND_TRIP else None


def stays_on_this_machine(sock: socket.socket) -> bool:
    """Whether both ends of a connection are here, so that it passes no link."""
    if sock.family == socket.AF_UNIX:
        return True
    return bool(sock.getsockname()[0] == sock.getpeername()[0])


def keep_alive(sock: socket.socket, timeout_s: float) -> None:
    """Ask an idle peer whether it is there, so that an unplugged one is missed in time."""
    idle_s = int(min(max(1.0, timeout_s / 2), 32_767))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, idle_s // 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


@cache
def load_checksum() -> Checksum:
    """CRC32C by the processor's own instructions, for frames.

    It takes memory as it lies, and gives the interpreter's lock away for more than 5 KiB. Raises
    `ConfigError` where the package that has it is missing.
    """
    try:
        from awscrt.checksums import crc32c
    except ImportError as error:
        raise ConfigError(
            f"awscrt cannot be imported ({error}). Frames between unencrypted ranks and servers are"
            " checked by its CRC32C: pip install awscrt on every machine"
        ) from error
    return cast(Checksum, crc32c)


class Stream(abc.ABC):
    """A reliable, ordered, full-duplex byte stream. One thread sends, one receives."""

    checksum: Checksum | None = None
    """What frames on it are checked by; None if nothing on the way can change them unseen."""

    @abc.abstractmethod
    def send(self, header: bytes, payload: memoryview) -> None:
        """Block until all bytes are with the kernel; raises `TransportError`."""

    def bound(self, window_bytes: int) -> None:  # noqa: B027 - some hold nothing
        """Hold no more than about so many unacknowledged from now on, and end `send` only when
        another third of them could be taken: what is sent has then mostly arrived.
        """

    def pace(self, egress: int, ingress: int, seconds_per_byte: float) -> bool:
        """Pass a node's emulated links (files of `engine.pacing.Link`) by itself, if it can."""
        return False

    @abc.abstractmethod
    def receive_into(self, view: memoryview) -> int:
        """Block for 1 to ``len(view)`` bytes; 0 at the end; raises `TransportError`."""

    @abc.abstractmethod
    def close(self) -> None:
        """End both directions; wakes threads blocked in it. Safe to call again."""


class SocketStream(Stream):
    """A `Stream` over a connected socket; bytes never pass through Python objects.

    ``bound``: what the kernel may hold unacknowledged is adapted to the path.
    """

    def __init__(self, sock: socket.socket, peer: str, bound: SendBound | None = None) -> None:
        self.checksum = load_checksum()
        self._sock = sock
        self._peer = peer
        self._bound = bound
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
            if self._room is not None or self._bound is not None:
                self.after_sending(payload)
        except OSError as error:
            raise TransportError(f"cannot send to {self._peer}: {error}") from error

    def after_sending(self, payload: memoryview) -> None:
        """Wait until there is room again, and adapt that, as `bound` or ``bound`` says."""
        if self._room is not None:
            self._room.poll()
        if (bound := self._bound) is not None and payload:
            times_us = round_trips_us(self._sock)
            if times_us is not None and bound.observe(*times_us):
                bound_send_buffer(self._sock, bound.bytes)

    def receive_into(self, view: memoryview) -> int:
        try:
            return self._sock.recv_into(view, 0, socket.MSG_WAITALL)
        except OSError as error:
            raise TransportError(f"cannot receive from {self._peer}: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
