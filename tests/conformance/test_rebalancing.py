"""Slices that move while training goes on change no bits: values, optimizer state and averages."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import foreprop
from foreprop.auto.linkprobe import Report, exchange_reports
from foreprop.cluster.world import World
from foreprop.core.frames import PACE_STEPS
from foreprop.core.lateness import Straggler
from foreprop.session import rebalancing
from foreprop.stragglers.pace import PaceKeeper
from tests.cluster import run_cluster
from tests.conformance.parity import (
    Build,
    Trained,
    batches_of,
    check_same_bits,
    check_same_optimizer_state,
    run_foreprop,
    servers_only,
    small_model,
    train_classifier,
    with_sgd,
)
from tests.matrix import batches_of as batches_of_sums
from tests.matrix import make
from tests.tiers import long_cases

pytestmark = servers_only  # each test names the architecture that it needs

RANKS = 3
THERE, BACK = 7 * PACE_STEPS, 10 * PACE_STEPS
"""Steps in which links are measured once, and twice."""
SETTINGS = {"architecture": "p2p", "slice_elems": 10}
SLOW = Straggler(rank=1, late_s=0.5, since_step=1, cause="link")


def with_adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small_model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def with_batch_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def measured(*node_rates: float, error: str | None = None) -> list[Report]:
    """What nodes would tell of links with these rates."""
    nodes = range(len(node_rates))
    to_next = [min(node_rates[node], node_rates[(node + 1) % RANKS]) for node in nodes]
    return [
        Report(
            sent_bits_per_s=1e9 * to_next[node],
            round_trip_s=1e-4,
            error=error,
            sent_back_bits_per_s=1e9 * to_next[node - 1],
        )
        for node in nodes
    ]


def has_slow_link(monkeypatch: pytest.MonkeyPatch, *reports: Sequence[Report]) -> Counter[int]:
    """Have rank 1's link be named, and each measurement find the next of these.

    The clock goes on by a second whenever it is looked at. Returns how often each has measured.
    """
    monkeypatch.setattr(PaceKeeper, "suspect", SLOW)
    asked: Counter[int] = Counter()

    def exchange(board: Any, *, node: int, **_: Any) -> Sequence[Report]:
        number = asked[node]
        asked[node] += 1
        return reports[min(number, len(reports) - 1)]

    monkeypatch.setattr(rebalancing, "exchange_reports", exchange)
    monkeypatch.setattr(rebalancing, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    return asked


def train(build: Build, steps: int = THERE, **settings: Any) -> list[Trained]:
    batches = batches_of(RANKS, count=steps)
    return run_foreprop(build, train_classifier, batches, **SETTINGS, **settings)


def check_same(moved: Sequence[Trained], stayed: Sequence[Trained]) -> None:
    for got, wanted in zip(moved, stayed, strict=True):
        check_same_bits(got.model, wanted.model)
        check_same_optimizer_state(got.optimizer, wanted.optimizer)
        assert got.stats["steps"] == wanted.stats["steps"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"compression": "topk:0.3"},
        {"staleness": "late"},
        *long_cases({"compression": "int8"}, {"compression": "int8", "update": "servers"}),
    ],
    ids=str,
)
def test_what_codecs_have_kept_back_moves_along(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sums that are exact: servers' values and what all ranks keep are what was pushed."""
    lr = 2.0**-9

    def work(world: World) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        model, _ = make()
        optimizer = torch.optim.SGD(model.parameters(), lr)
        about: dict[str, Any] = {"reduction": "sum", "rebalance_s": 0.1, **settings}
        with foreprop.parallelize(model, optimizer, world=world, **SETTINGS, **about) as session:
            for batch in itertools.islice(itertools.cycle(batches_of_sums(world.rank)), BACK):
                optimizer.zero_grad()
                model(*batch).backward()
                optimizer.step()
            return session.master_state_dict(), session.state_dict()["residuals"]

    asked = has_slow_link(monkeypatch, measured(1, 0.5, 1), measured(1, 1, 1))
    found = run_cluster(RANKS, work)
    assert asked[0] >= 2
    wanted, _ = make()
    optimizer = torch.optim.SGD(wanted.parameters(), lr)
    for step in range(BACK):
        optimizer.zero_grad()
        for rank in range(RANKS):
            batches = batches_of_sums(rank)
            wanted(*batches[step % len(batches)]).backward()
        optimizer.step()
    masters = found[0][0]
    for name, value in wanted.state_dict().items():
        arrays = [array for rank in found for array in rank[1].get(name, {}).values()]
        kept = sum(arrays, torch.zeros(()))  # rank 0 has those of averages, too
        off = 1e-5 if settings.get("compression") == "int8" else 0.0
        torch.testing.assert_close(masters[name] - lr * kept, value, rtol=0, atol=off)


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (with_adam, {"ema": 0.9}),
        (with_sgd(), {"wire_dtype": "bfloat16", "compression": "lossless"}),
        (with_adam, {"wire_dtype": "bfloat16", "update": "servers"}),
        pytest.param(with_adam, {"compression": "lossless"}, marks=pytest.mark.long),
        pytest.param(with_sgd(), {}, marks=pytest.mark.long),
        pytest.param(with_sgd(with_batch_norm), {}, marks=pytest.mark.long),
    ],
    ids=["adamw", "cast", "cast by servers", "lossless", "sgd", "batch norm"],
)
def test_moving_slices_there_and_back_changes_no_bits(
    build: Build,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stayed = train(build, BACK, **settings)
    asked = has_slow_link(monkeypatch, measured(1, 0.5, 1), measured(1, 1, 1))
    moved = train(build, BACK, rebalance_s=0.1, **settings)
    check_same(moved, stayed)
    assert asked[0] == asked[1] == asked[2] >= 2
    told = capfd.readouterr().err
    assert "node 1's server owns 0% instead of 33%: its link has 0.5 of the fastest" in told
    assert "node 1's server owns 33% instead of 0%: its link is as fast as any" in told


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [{"ema": 0.9}, {"update": "workers"}, {"clip_grad_norm": 0.1}, {"reply": "pull"}],
    ids=str,
)
def test_whoever_updates_and_however_bits_stay(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stayed = train(with_sgd(), **settings)
    asked = has_slow_link(monkeypatch, measured(1, 0.5, 1))
    moved = train(with_sgd(), rebalance_s=0.1, **settings)
    check_same(moved, stayed)
    assert asked[0] >= 1


def servers_of(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """By connection, as rank 0 makes them: how many slices each server owns."""
    owned: list[dict[int, int]] = []
    connect: Callable[..., None] = rebalancing.reconnect

    def reconnect(training: Any, row_wise: Any) -> None:
        connect(training, row_wise)
        if training.world.rank == 0:
            owned.append(Counter(s.server for s in training.backends.engines[0].slices))

    monkeypatch.setattr(rebalancing, "reconnect", reconnect)
    return owned


def test_a_slow_links_server_owns_less_and_the_others_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owned = servers_of(monkeypatch)
    has_slow_link(monkeypatch, measured(1, 0.5, 1))
    train(with_sgd(), BACK, rebalance_s=0.1)
    (slices,) = owned  # once: afterwards what is measured is what they have
    assert set(slices) == {0, 2}
    assert abs(slices[0] - slices[2]) <= 1


def test_links_that_could_not_be_measured_move_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    owned = servers_of(monkeypatch)
    asked = has_slow_link(monkeypatch, measured(1, 0.5, 1, error="no route"))
    train(with_sgd(), rebalance_s=0.1)
    assert asked[0] >= 1
    assert not owned
    told = capfd.readouterr().err
    assert "slices stay where they are: node 0 could not measure its links: no route" in told


def test_links_are_really_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, on loopback, where all are about as fast: whatever is found, the same bits."""
    measured_by: list[int] = []

    def exchange(board: Any, *, node: int, **about: Any) -> Sequence[Report]:
        measured_by.append(node)
        return exchange_reports(board, node=node, **about)

    monkeypatch.setattr(rebalancing, "exchange_reports", exchange)
    monkeypatch.setattr(rebalancing, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    batches = batches_of(RANKS, count=5 * PACE_STEPS)
    settings = {**SETTINGS, "node_rates": "2:0.5"}
    stayed, moved = (
        run_foreprop(with_sgd(), train_classifier, batches, **settings, **more)
        for more in ({}, {"rebalance_s": 0.1})
    )
    assert sorted(measured_by) == [*range(RANKS)]
    check_same(moved, stayed)


@pytest.mark.parametrize(
    ("ranks", "local_size", "told"),
    [
        (2, 1, "of 2 nodes no server can own what spares a link"),
        pytest.param(6, 2, "local aggregation do not show whose link", marks=pytest.mark.long),
    ],
)
def test_where_nothing_can_move_that_is_told(
    ranks: int, local_size: int, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    batches = batches_of(ranks, count=PACE_STEPS)
    settings = {**SETTINGS, "rebalance_s": 0.1}
    run_foreprop(with_sgd(), train_classifier, batches, local_size=local_size, **settings)
    lines = capfd.readouterr().err
    assert lines.count("rebalance_s does nothing here") == 1
    assert told in lines
