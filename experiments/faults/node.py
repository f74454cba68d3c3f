"""One node of the lab whose worker and link are told to fail."""

from __future__ import annotations

import os
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
    """Run the worker."""

    command: Sequence[str]
    environment: dict[str, str]
    log: Path


@dataclass(frozen=True, slots=True)
class Signal:
    """To the worker."""

    number: int


@dataclass(frozen=True, slots=True)
class LinkFactor:
    """What the node sends has so many times its usual rate; 0 cuts it."""

    factor: float


class EndAsked:
    """Answer with the worker's exit code, or None while it runs."""


class Stopped:
    """End the worker."""


class _Node:
    def __init__(self, number: int, network: Network) -> None:
        self._number = number
        self._network = network
        self._worker: subprocess.Popen[bytes] | None = None

    def obey(self, order: object) -> int | None:
        if isinstance(order, EndAsked):
            return None if self._worker is None else self._worker.poll()
        if isinstance(order, Start):
            self.end()
            with order.log.open("ab") as log:
                self._worker = subprocess.Popen(
                    order.command,
                    env={**os.environ, **order.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        elif isinstance(order, LinkFactor):
            self._set_link(order.factor)
        elif isinstance(order, Signal) and self._worker is not None:
            self._worker.send_signal(order.number)
        else:
            self.end()
        return None

    def _set_link(self, factor: float) -> None:
        if factor:
            rate = self._network.rate_of(self._number) * factor
            changed = replace(self._network, rate_bits_per_s=rate)
        else:
            changed = replace(
                self._network, rate_bits_per_s=_CUT_BITS_PER_S, burst_bytes=_CUT_BURST
            )
        shape_node(changed, self._number)

    def end(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait()


def serve_node(number: int, connection: Connection, network: Network) -> None:
    """Do what comes in, until the other end has closed."""
    node = _Node(number, network)
    try:
        while True:
            connection.send(node.obey(connection.recv()))
    finally:
        node.end()
