"""What a session's connections are tuned to, on both sides."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch

import foreprop
from foreprop.engine import launch, server
from foreprop.net.tcp import tune
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
        (20_000, 4, 8192),  # the least that a connection gets
        (1, 1, 8192),
    ],
)
def test_the_push_window_is_the_workers_and_divided_by_the_servers(
    monkeypatch: pytest.MonkeyPatch, push_window_bytes: int, servers: int, expected_bytes: int
) -> None:
    ours: SendBuffers = []
    theirs: SendBuffers = []
    monkeypatch.setattr(launch, "tune", recording(ours))
    monkeypatch.setattr(server, "tune", recording(theirs))
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {
        "push_window_bytes": push_window_bytes,
        "servers_per_node": servers,
    }
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], **settings):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert [after for _, after in ours] == [expected_bytes] * servers
    assert len(theirs) == servers
    assert all(before == after for before, after in theirs)  # the kernel chooses, and may grow it
