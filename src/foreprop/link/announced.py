"""Addresses that are announced to other machines."""

from __future__ import annotations

from foreprop.errors import ConfigError, TransportError
from foreprop.link.stream import is_loopback


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


def unreachable(server: int, address: str, rank: int, own_address: str) -> TransportError:
    """What to raise for a server that has announced a loopback address of another machine."""
    return TransportError(
        f"server {server} listens on {address}, where only its own machine can reach it; rank"
        f" {rank} is at {own_address}. Set interface (or FOREPROP_INTERFACE) on that machine, or"
        " give torchrun a rendezvous address that is not a loopback one"
    )
