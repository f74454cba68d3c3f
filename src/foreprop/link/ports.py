"""Listening within the ports that a firewall leaves open: the setting ``port_range``."""

from __future__ import annotations

import errno
import socket

from foreprop.config.checks import parse_port_range
from foreprop.errors import TransportError


def listen_within(address: str, port_range: str) -> socket.socket:
    """A listening socket on the first port of the range that is free at this address.

    Raises `TransportError` if none is, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    ports = parse_port_range(port_range)
    for port in ports:
        try:
            return socket.create_server((address, port), family=family, backlog=1024)
        except (OSError, ValueError) as error:  # ValueError: of a name that cannot be one
            if getattr(error, "errno", None) != errno.EADDRINUSE:
                raise TransportError(f"cannot listen on {address} port {port}: {error}") from error
    raise TransportError(
        f"port_range is {port_range!r}, and all of its {len(ports)} ports are taken at {address}:"
        " a session takes one for each server of a machine, and one for each of its relays; widen"
        " it, or see with `ss -ltn` who has them"
    )
