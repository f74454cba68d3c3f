"""One node of the lab whose processes and link are told to fail."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from foreprop.lab.network import shape_node
from foreprop.workload.network import Network

_CUT_BITS_PER_S = 1000.0
"""A packet in twelve seconds: nothing comes through, and nothing is told to who sends."""
_CUT_BURST = 2000  # a packet's


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Run a program under this name."""

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    log: Path


@dataclass(frozen=True, slots=True)
class Signal:
    """To the program of this name."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class LinkFactor:
    """What the node sends has so many times its usual rate; 0 cuts it."""

    factor: float


class Stopped:
    """End all of the node's programs."""


def serve_node(node: int, connection: Connection, network: Network) -> None:
    """Do what comes in, until the other end has closed."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        while True:
            order = connection.recv()
            _obey(order, node, network, running)
            connection.send(None)
    finally:
        _end(running)


def _obey(
    order: object, node: int, network: Network, running: dict[str, subprocess.Popen[bytes]]
) -> None:
    if isinstance(order, Start):
        with order.log.open("ab") as log:
            running[order.name] = subprocess.Popen(
                order.command,
                env={**os.environ, **order.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
    elif isinstance(order, Signal):
        running[order.name].send_signal(order.number)
    elif isinstance(order, LinkFactor):
        if order.factor:
            changed = replace(network, rate_bits_per_s=network.rate_of(node) * order.factor)
        else:
            changed = replace(network, rate_bits_per_s=_CUT_BITS_PER_S, burst_bytes=_CUT_BURST)
        shape_node(changed, node)
    else:
        _end(running)


def _end(running: dict[str, subprocess.Popen[bytes]]) -> None:
    for process in running.values():
        process.send_signal(signal.SIGCONT)
        process.kill()
    for process in running.values():
        process.wait()
    running.clear()
