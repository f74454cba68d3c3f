"""Sessions measure the links between their nodes once, and cut slices that suit them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import foreprop
from foreprop.config import Config
from foreprop.core.slicing import SLICE_ELEMS
from foreprop.engine.world import World
from foreprop.errors import HandshakeError, TransportError
from foreprop.session import slicesize
from tests.cluster import run_cluster
from tests.conformance.parity import build_seeded, servers_only, with_sgd

pytestmark = servers_only

RANKS = 2


@pytest.fixture(autouse=True)
def links_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads, on addresses that count as different machines'."""
    monkeypatch.setattr(slicesize, "is_loopback", lambda _: False)


def slices_of(*settings: dict[str, Any]) -> list[int | str | None]:
    """By rank, after a step; ``settings``: by rank, or of all."""
    return [config.slice_elems for config in configs_of(*settings)]


def configs_of(*settings: dict[str, Any]) -> list[Config]:
    def work(world: World) -> Config:
        model, optimizer = build_seeded(with_sgd())
        own = {"architecture": "p2p"} | settings[world.rank % len(settings)]
        with foreprop.parallelize(model, optimizer, world=world, **own) as session:
            optimizer.zero_grad()
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            return session.config

    return run_cluster(RANKS, work)


def rate_is(bits_per_s: float) -> Any:
    return lambda *_, **__: bits_per_s


def test_all_ranks_cut_alike_as_their_links_suggest() -> None:
    here, there = slices_of({})
    assert here == there
    assert here in (12_500, 25_000, SLICE_ELEMS)  # the model is small


@pytest.mark.parametrize(("bits_per_s", "elems"), [(1e8, 12_500), (1e9, 25_000), (1e10, 50_000)])
def test_the_slowest_rate_says_what_all_cut(
    monkeypatch: pytest.MonkeyPatch, bits_per_s: float, elems: int
) -> None:
    monkeypatch.setattr(slicesize, "slowest_rate", rate_is(bits_per_s))
    assert slices_of({}) == [elems, elems]


@pytest.mark.parametrize(
    ("settings", "window_bytes"),
    [({}, 4 * Config().push_window_bytes), ({"push_window_bytes": 9 << 20}, 9 << 20)],
)
def test_as_many_large_slices_as_usual_may_be_under_way(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], window_bytes: int
) -> None:
    """But for a window that was asked for."""
    monkeypatch.setattr(slicesize, "slowest_rate", rate_is(1e10))
    monkeypatch.setattr(slicesize, "slice_elems_at", lambda *_, **__: 4 * SLICE_ELEMS)
    configs = configs_of(settings)
    assert [config.push_window_bytes for config in configs] == [window_bytes] * RANKS
    assert [config.slice_elems for config in configs] == [4 * SLICE_ELEMS] * RANKS


def test_links_that_cannot_be_measured_are_told_and_slices_as_usual(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> float:
        raise TransportError("node 1 could not measure its links: refused")

    monkeypatch.setattr(slicesize, "slowest_rate", fail)
    with caplog.at_level(logging.WARNING, logger="foreprop"):
        assert slices_of({}) == [None, None]
    assert "slices have the usual size: node 1 could not measure its links" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"architecture": "ring"},
        {"compression": "int8"},
        {"elastic": True},
        {"granularity": "array"},
        {"link_rate_bits_per_s": 1e9},
        {"slice_elems": 1000},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_nothing_is_measured_where_sizes_are_given_or_count(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    measured: list[object] = []
    monkeypatch.setattr(slicesize, "slowest_rate", lambda *_, **__: measured.append(None))
    given = settings.get("slice_elems")
    assert slices_of(settings) == [given, given]
    assert not measured


@pytest.mark.parametrize("settings", [({}, {"slice_elems": 7}), ({"slice_elems": 7}, {})])
def test_ranks_that_do_not_agree_are_told_so_at_once(settings: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(HandshakeError, match=r"do not agree: slice_elems: rank 0 has"):
        slices_of(*settings)
