"""Whether a session's pushes pass a link, which alone can make a rank late."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foreprop
from foreprop.backends import launch
from foreprop.backends.composedworker import ServedBackend
from foreprop.engine.world import World
from foreprop.session.session import ConnectedSession
from tests.cluster import run_cluster
from tests.conformance.parity import once


def passes_links(world: World, rate: float | None = None) -> bool:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with foreprop.parallelize(model, optimizer, world=world, link_rate_bits_per_s=rate) as session:
        assert isinstance(session, ConnectedSession)
        (backend,) = session._training.backends.all
        assert isinstance(backend, ServedBackend)
        return backend.connections.pass_links


@once
def test_on_one_machine_there_are_none_but_emulated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_cluster(2, passes_links) == [False, False]
    assert run_cluster(2, lambda world: passes_links(world, 1e9)) == [True, True]
    monkeypatch.setattr(launch, "stays_on_this_machine", lambda _: False)
    assert run_cluster(2, passes_links) == [True, True]
