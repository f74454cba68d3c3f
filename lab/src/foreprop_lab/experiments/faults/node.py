"""One node of the lab whose worker and link can be made to fail."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from foreprop_lab.lab.network import shape_node
from foreprop_lab.setting.links import Network

_CUT_BITS_PER_S = 1000.0
"""The rate of a cut link: a packet in twelve seconds, and the sender gets no error."""
_CUT_BURST = 2000  # a packet's


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A request to start the worker."""

    command: Sequence[str]
    environment: dict[str, str]
    log: Path


@dataclass(frozen=True, slots=True)
class Signal:
    """A request to send a signal to the worker."""

    number: int


@dataclass(frozen=True, slots=True)
class LinkFactor:
    """A request to set the node's sending rate to so many times its usual rate; 0 cuts the link."""

    factor: float


class ExitCodeRequest:
    """A request for the worker's exit code, which is None while it runs."""


class EndWorker:
    """A request to end the worker."""


class _Node:
    def __init__(self, number: int, network: Network) -> None:
        self._number = number
        self._network = network
        self._worker: subprocess.Popen[bytes] | None = None

    def handle(self, request: object) -> int | None:
        if isinstance(request, ExitCodeRequest):
            return None if self._worker is None else self._worker.poll()
        if isinstance(request, Start):
            self.end()
            with request.log.open("ab") as log:
                self._worker = subprocess.Popen(
                    request.command,
                    env={**os.environ, **request.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        elif isinstance(request, LinkFactor):
            self._set_link(request.factor)
        elif isinstance(request, Signal) and self._worker is not None:
            self._worker.send_signal(request.number)
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
    """Handle requests until the other end closes the connection."""
    node = _Node(number, network)
    try:
        while True:
            connection.send(node.handle(connection.recv()))
    finally:
        node.end()
