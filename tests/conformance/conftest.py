"""What files of this folder share as fixtures."""

from __future__ import annotations

import pytest

from foreprop.plan import planning
from foreprop.plan.linkprobe import Report


@pytest.fixture
def told_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned sessions are told of fast links, which to measure takes all cores for a second."""
    report = Report(sent_bits_per_s=1e10, round_trip_s=1e-4, error=None, sent_back_bits_per_s=1e10)
    monkeypatch.setattr(planning, "exchange_reports", lambda _, nodes, **__: [report] * nodes)


@pytest.fixture
def servers_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREPROP_UPDATE", "servers")
