"""What a session's connections are tuned to, on both sides."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foreprop
from foreprop.backends import launch
from foreprop.config import Config
from foreprop.engine import server
from foreprop.engine.stream import tune
from tests.cluster import worlds

SendBuffers = list[tuple[int, int]]
"""Bytes before and after tuning, of each connection."""


def recording(buffers: SendBuffers) -> Any:
    def record(sock: socket.socket, **settings: Any) -> None:
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        tune(sock, **settings)
        buffers.append((before, sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)))

    return record


@pytest.mark.parametrize(
    ("push_window_bytes", "servers", "expected_bytes"),
    [
        (100_000, 1, 100_000),
        (100_000, 4, 25_000),
        (1_200_000, 64, 50_000),  # 12 of whom take turns, beside 12 workers
        (10_000, 4, 4096),  # the least that a connection gets
        (1, 1, 4096),
    ],
)
def test_the_push_window_is_divided_by_the_servers(
    push_window_bytes: int, servers: int, expected_bytes: int
) -> None:
    config = Config(push_window_bytes=push_window_bytes)
    connections: Any = SimpleNamespace(_config=config, servers=servers)
    assert launch.Connections._window_bytes(connections, ConnectedSocket("10.0.0.2")) == (
        expected_bytes
    )


def test_with_one_lane_the_kernel_chooses_as_for_p3_as_published() -> None:
    connections: Any = SimpleNamespace(_config=Config(lanes="one"), servers=4)
    assert launch.Connections._window_bytes(connections, ConnectedSocket("10.0.0.2")) is None


def test_within_a_machine_the_kernel_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window below one of loopback's segments would wait for delayed acknowledgements."""
    buffers: SendBuffers = []
    monkeypatch.setattr(launch, "tune", recording(buffers))
    monkeypatch.setattr(server, "tune", recording(buffers))
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"push_window_bytes": 10_000, "servers_per_node": 2}
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], **settings):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert len(buffers) == 4
    assert all(before == after for before, after in buffers)


class ConnectedSocket(socket.socket):
    """A socket that says that it is connected to this address, from 10.0.0.1."""

    def __init__(self, peer: str) -> None:
        super().__init__()
        self.close()
        self._peer = peer

    def getsockname(self) -> tuple[str, int]:
        return "10.0.0.1", 1

    def getpeername(self) -> tuple[str, int]:
        return self._peer, 2
