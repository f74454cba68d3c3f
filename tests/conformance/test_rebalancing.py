"""Slices that move while training goes on change no bits: values, optimizer state and averages."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import foreprop
from foreprop.core.frames import PACE_STEPS
from foreprop.core.lateness import Straggler
from foreprop.core.wire import Header
from foreprop.engine.connection import Connection
from foreprop.engine.world import World
from foreprop.features.uneven.arrivals import ArrivalReports
from foreprop.features.uneven.pace import PaceKeeper
from foreprop.plan.linkprobe import Report, exchange_reports
from foreprop.session import rebalancing
from tests.cluster import run_cluster
from tests.conformance.counting_runs import Died, make_step
from tests.conformance.growing_runs import Grown
from tests.conformance.node_losses import BESIDE, lose_node
from tests.conformance.parity import (
    Build,
    Trained,
    batches_of,
    check_same_bits,
    check_same_optimizer_state,
    run_foreprop,
    servers_only,
    small_model,
    snapshot,
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
    to_next = [
        min(rate, node_rates[(node + 1) % len(node_rates)])
        for node, rate in zip(nodes, node_rates, strict=True)
    ]
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
        {"staleness": 2},
        *long_cases(
            {"staleness": 9}, {"compression": "int8"}, {"compression": "int8", "update": "servers"}
        ),
    ],
    ids=str,
)
def test_each_push_is_applied_once_and_what_codecs_keep_back_moves_along(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sums that are exact: servers' values and what all ranks keep are what was pushed."""
    lr = 2.0**-9
    steps = 2 * BACK if settings.get("staleness") == 9 else BACK

    def work(world: World) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        model, _ = make()
        optimizer = torch.optim.SGD(model.parameters(), lr)
        about: dict[str, Any] = {"reduction": "sum", "rebalance_s": 0.1, **settings}
        with foreprop.parallelize(model, optimizer, world=world, **SETTINGS, **about) as session:
            for batch in itertools.islice(itertools.cycle(batches_of_sums(world.rank)), steps):
                optimizer.zero_grad()
                model(*batch).backward()
                optimizer.step()
            session.flush()
            return session.master_state_dict(), session.state_dict()["residuals"]

    asked = has_slow_link(monkeypatch, measured(1, 0.5, 1), measured(1, 1, 1))
    found = run_cluster(RANKS, work)
    assert asked[0] >= 2
    wanted, _ = make()
    optimizer = torch.optim.SGD(wanted.parameters(), lr)
    for step in range(steps):
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


@pytest.mark.parametrize("early", ["flush", *long_cases("close")])
def test_ranks_that_meet_elsewhere_leave_a_move_out(
    early: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 meets the others a step before them, and they come to measure their links."""
    first = 6 * PACE_STEPS  # told with the fifth window's pace
    lr, last = 2.0**-9, first if early == "close" else 3 * first

    def work(world: World) -> dict[str, torch.Tensor]:
        model, _ = make()
        optimizer = torch.optim.SGD(model.parameters(), lr)
        about: dict[str, Any] = {"staleness": 2, "reduction": "sum", "rebalance_s": 0.1}
        about |= {**SETTINGS, "step_timeout_s": 20.0}
        batch = batches_of_sums(0)[0]
        with foreprop.parallelize(model, optimizer, world=world, **about) as session:
            for step in range(1, last + 1 - (early == "close" and world.rank == 1)):
                optimizer.zero_grad()
                model(*batch).backward()
                optimizer.step()
                if early == "flush" and step == first - (world.rank == 1):
                    session.flush()
            session.flush()
            return {name: value.clone() for name, value in model.state_dict().items()}

    asked = has_slow_link(monkeypatch, measured(1, 0.5, 1))
    found = run_cluster(RANKS, work)
    assert bool(asked) == (early == "flush"), "later ones take place"
    wanted, _ = make()
    before = {name: value.clone() for name, value in wanted.state_dict().items()}
    wanted(*batches_of_sums(0)[0]).backward()
    updates = RANKS * last - (early == "close")
    for values in found:
        for name, parameter in wanted.named_parameters():
            value = before[name] - lr * updates * parameter.grad
            torch.testing.assert_close(values[name], value, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (with_adam, {"ema": 0.9}),
        (with_sgd(), {"wire_dtype": "bfloat16", "compression": "lossless"}),
        (with_adam, {"wire_dtype": "bfloat16", "update": "servers"}),
        pytest.param(with_adam, {"compression": "lossless"}, marks=pytest.mark.long),
        pytest.param(with_sgd(), {}, marks=pytest.mark.long),
        pytest.param(with_sgd(), {"link_rate_bits_per_s": 1e9}, marks=pytest.mark.long),
        pytest.param(with_sgd(with_batch_norm), {}, marks=pytest.mark.long),
    ],
    ids=["adamw", "cast", "cast by servers", "lossless", "sgd", "paced", "batch norm"],
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


def has_links(monkeypatch: pytest.MonkeyPatch, *reports: Sequence[Report]) -> Counter[int]:
    """The same of an elastic session, where links are measured by the clock."""
    asked: Counter[int] = Counter()

    def exchange(board: Any, *, node: int, nodes: int, **_: Any) -> Sequence[Report]:
        number = asked[node]
        asked[node] += 1
        return reports[min(number, len(reports) - 1)][:nodes]

    monkeypatch.setattr(rebalancing, "exchange_reports", exchange)
    monkeypatch.setattr(rebalancing, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    return asked


@pytest.mark.long
def test_nodes_of_two_workers_move_slices_in_place(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    batches = batches_of(2 * RANKS, count=56)
    about = {**SETTINGS, "elastic": True, "local_size": 2}
    stayed = run_foreprop(with_adam, train_classifier, batches, **about)
    slow = measured(1, 0.5, 1)
    asked = has_links(monkeypatch, slow, slow, measured(1, 1, 1))
    moved = run_foreprop(with_adam, train_classifier, batches, rebalance_s=0.1, **about)
    check_same(moved, stayed)
    assert asked == dict.fromkeys(range(RANKS), asked[0])
    assert "server 1 owns 0% instead of" in capfd.readouterr().err


def test_what_one_measurement_alone_has_found_moves_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    one, other = measured(1, 0.5, 1), measured(0.5, 1, 1)
    asked = has_links(monkeypatch, one, other, one, other)
    train(with_sgd(), THERE + PACE_STEPS, rebalance_s=0.1, elastic=True)
    assert asked[0] >= 3
    assert "owns" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "settings", [{}, *long_cases({"compression": "lossless"}, {"clip_grad_norm": 0.1})], ids=str
)
def test_moving_there_and_back_in_place_changes_no_bits(
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings = {"elastic": True, **settings}
    stayed = train(with_adam, BACK, **settings)
    slow = measured(1, 0.5, 1)
    asked = has_links(monkeypatch, slow, slow, measured(1, 1, 1))
    moved = train(with_adam, BACK, rebalance_s=0.1, **settings)
    check_same(moved, stayed)
    assert asked[0] == asked[1] == asked[2] >= 3
    told = capfd.readouterr().err
    assert "from step 49 server 1 owns 0% instead of 31%: its link has 0.5 of the fastest" in told
    assert "from step 65 server 1 owns 34% instead of 0%: its link is as fast as any" in told


DEATHS: list[tuple[Sequence[int], int]] = [((0,), 41), ((1,), 49), ((2,), 49)]
"""Who dies, and within which step: 25 and 41 are the first ones before which links are measured, 49
before which slices move, in one or two steps; 65 before which they move back."""
MORE_DEATHS: list[tuple[Sequence[int], int]] = [
    *(((rank,), step) for rank in range(4) for step in (40, 48, 50, 65, 66)),
    *[((0, 1), 49), ((1, 2), 49), ((0, 3), 50), ((1, 2), 66)],
]


@pytest.mark.parametrize(
    ("dying", "step"),
    [*DEATHS, *[pytest.param(*each, marks=pytest.mark.long) for each in MORE_DEATHS]],
    ids=str,
)
def test_slices_move_whoever_dies(
    dying: Sequence[int], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have the same data, so whoever counts the values are right. Rank 0 measures and plans."""
    slow = measured(1, 0.5, 1, 1)
    asked = has_links(monkeypatch, slow, slow, measured(1, 1, 1, 1))
    lr, steps, ranks = 2.0**-9, 72, 4

    def work(world: World) -> dict[str, torch.Tensor] | None:
        model, _ = make()
        optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.5)
        about: dict[str, Any] = {**BESIDE, "rebalance_s": 0.1}
        with (
            contextlib.suppress(Died),
            foreprop.parallelize(model, optimizer, world=world, **about) as session,
        ):
            for number, batch in enumerate(itertools.islice(batches(), steps), 1):
                if number == step and world.rank in dying:
                    weight: Any = model.first.weight
                    weight.register_hook(lambda _: lose_node(session))
                optimizer.zero_grad()
                model(*batch).backward()
                optimizer.step()
            session.flush()
            return {name: value.clone() for name, value in model.state_dict().items()}
        return None

    def batches() -> Iterator[Any]:
        return itertools.cycle(batches_of_sums(0))

    found = run_cluster(ranks, work)
    assert [rank for rank, values in enumerate(found) if values is None] == list(dying)
    assert asked
    wanted, _ = make()
    optimizer = torch.optim.SGD(wanted.parameters(), lr, momentum=0.5)
    for batch in itertools.islice(batches(), steps):
        optimizer.zero_grad()
        wanted(*batch).backward()
        optimizer.step()
    for values in filter(None, found):
        check_same_bits(values, wanted.state_dict())


@pytest.mark.parametrize(
    ("comes", "deaths"),
    [
        ({3: 43, 4: 50}, {}),
        *[pytest.param({3: at, 4: at + 3}, {}, marks=pytest.mark.long) for at in (36, 46, 48)],
        # both have ended their first steps, before which a loss is their end (docs/elastic.md)
        pytest.param({3: 44, 4: 47}, {1: 54}, marks=pytest.mark.long),
        pytest.param({3: 50}, {0: 62}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_newcomers_know_where_slices_are(
    comes: dict[int, int],
    deaths: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """They come before slices move, and after that; the log says whom each round has counted."""
    slow = measured(1, 0.5, 1)
    asked = has_links(monkeypatch, slow, slow, measured(1, 1, 1))
    grown = Grown(3, comes, deaths=deaths, beside=True, steps=72, rebalance_s=0.1)
    grown.run(tmp_path)
    assert asked[2] >= 1
    grown.check(tmp_path)


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


def test_a_server_without_slices_hears_from_a_rank_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """No push of the others waits for it, and still none tells it of one window too many."""
    has_slow_link(monkeypatch, measured(1, 0.5, 1))
    heard: list[int] = []
    hear = ArrivalReports.on_frame

    def on_frame(self: ArrivalReports, peer: Connection, header: Header, payload: Any) -> None:
        if peer.number == 1 and not self._slices._machine.priorities():
            heard.append(header.step)
            time.sleep(0.3)
        hear(self, peer, header, payload)

    monkeypatch.setattr(ArrivalReports, "on_frame", on_frame)
    train(with_sgd(), BACK, rebalance_s=0.1)
    assert len(heard) > 2


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


@pytest.mark.parametrize("dies", [True, *long_cases(False)])
def test_links_of_an_elastic_session_are_really_measured(
    dies: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On loopback. Where rank 0 dies meanwhile, slices stay, and the others go on at once."""
    sessions: dict[int, Any] = {}
    measured_by: list[int] = []

    def exchange(board: Any, *, node: int, **about: Any) -> Sequence[Report]:
        measured_by.append(node)
        if dies and not node:
            lose_node(sessions[node])
        return exchange_reports(board, node=node, **about)

    monkeypatch.setattr(rebalancing, "exchange_reports", exchange)
    monkeypatch.setattr(rebalancing, "time", SimpleNamespace(monotonic=itertools.count().__next__))

    def work(world: World) -> Any:
        model, optimizer = with_adam()
        about: dict[str, Any] = {**BESIDE, "node_rates": "2:0.5", "rebalance_s": 0.1}
        with (
            contextlib.suppress(Died),
            foreprop.parallelize(model, optimizer, world=world, **about) as session,
        ):
            sessions[world.rank] = session
            for batch in batches_of(1, count=36)[0]:
                make_step(model, optimizer, batch)
            return snapshot(model.state_dict())
        return None

    found = [values for values in run_cluster(4, work) if values is not None]
    assert len(found) == 4 - dies
    for values in found[1:]:
        check_same_bits(values, found[0])
    assert sorted(measured_by[:4]) == [0, 1, 2, 3]
    told = capfd.readouterr().err
    assert ("slices stay where they are: a node was lost meanwhile" in told) == dies


@pytest.mark.parametrize(
    ("ranks", "local_size", "elastic", "told"),
    [
        (2, 1, False, "of 2 nodes no server can own what spares a link"),
        (2, 1, True, "of 2 nodes no server can own what spares a link"),
        pytest.param(
            *(6, 2, False, "local aggregation do not show whose link"), marks=pytest.mark.long
        ),
    ],
)
def test_where_nothing_can_move_that_is_told(
    ranks: int, local_size: int, elastic: bool, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    batches = batches_of(ranks, count=PACE_STEPS)
    settings = {**SETTINGS, "rebalance_s": 0.1, "elastic": elastic}
    run_foreprop(with_sgd(), train_classifier, batches, local_size=local_size, **settings)
    lines = capfd.readouterr().err
    assert lines.count("rebalance_s does nothing here") == 1
    assert told in lines
