"""Addresses that are announced to other machines."""

from __future__ import annotations

from foreprop.errors import ConfigError, TransportError
from foreprop.link.stream import is_loopback


def check_reachable(address: str, rendezvous_host: str) -> None:
    """Refuse to announce a loopback address to other machines.

    It happens where the rendezvous host's own name stands for 127.0.1.1 on itself. Whoever names
    a loopback address as the rendezvous means one machine, and is not refused.
    """
    if is_loopback(rendezvous_host):
        return
    if is_loopback(address):
        raise ConfigError(
            f"interface: the rendezvous host {rendezvous_host!r} is {address} on this machine,"
            " which others cannot reach. Set FOREPROP_INTERFACE to the interface or address to use"
        )


def out_of_reach(server: int, address: str, rank: int, own: str) -> TransportError:
    """What ``rank``, at ``own``, says of a server that announced a loopback address."""
    return TransportError(
        f"server {server} listens on {address}, where only its own machine can reach it; rank"
        f" {rank} is at {own}. Set interface (or FOREPROP_INTERFACE) on that machine, or give"
        " torchrun a rendezvous address that is not a loopback one"
    )
