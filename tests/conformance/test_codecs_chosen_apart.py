"""``compression="auto"`` where ranks may be in different steps, or not all of them stay.

Codecs are decided beforehand here; what is tried is that all go on with them, and with their bits.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foreprop
from foreprop.backends.elastic import ask
from foreprop.config import Config
from foreprop.engine.world import World
from foreprop.errors import StepTimeout
from foreprop.plan import planning
from foreprop.plan.planning import MEASURED_STEPS
from foreprop.session import automatic
from tests import matrix as exact
from tests.cluster import run_cluster
from tests.conformance.counting_runs import Died, by_arithmetic
from tests.conformance.growing_runs import Grown
from tests.conformance.node_losses import BESIDE, lose_node
from tests.conformance.parity import check_same_bits, servers_only, snapshot
from tests.conformance.plans import use_plan
from tests.tiers import long_cases

pytestmark = [
    servers_only,  # each test names the architecture that it needs
    pytest.mark.usefixtures("told_links"),
]

AUTO: dict[str, Any] = {"architecture": "p2p", "compression": "auto", "step_timeout_s": 30.0}
STEPS = MEASURED_STEPS + 4
Trained = tuple[dict[str, torch.Tensor], dict[str, Any]]


def batches_of(rank: int) -> list[exact.Batch]:
    return (exact.batches_of(rank) * 2)[:STEPS]


def run(
    ranks: int,
    between: Callable[[Any, int], object] = lambda session, step: None,
    *,
    alike: bool = False,
    **settings: Any,
) -> list[Trained | None]:
    """Values and figures by rank; ``between`` is called before each step, and may kill."""

    def work(world: World) -> Trained | None:
        model, optimizer = exact.make()
        about = {**AUTO, **settings, "world": world}
        with contextlib.suppress(Died):
            with foreprop.parallelize(model, optimizer, **about) as session:
                for step, batch in enumerate(batches_of(0 if alike else world.rank), 1):
                    between(session, step)
                    optimizer.zero_grad()
                    model(*batch).backward()
                    optimizer.step()
                session.flush()
                found = snapshot(model.state_dict())
            return found, session.stats()
        return None

    return run_cluster(ranks, work)


def by_hand(ranks: int) -> dict[str, torch.Tensor]:
    model, optimizer = exact.make()
    for batches in zip(*map(batches_of, range(ranks)), strict=True):
        optimizer.zero_grad()
        for batch in batches:
            (model(*batch) / ranks).backward()
        optimizer.step()
    return snapshot(model.state_dict())


def slow_down(session: Any, step: int) -> None:
    time.sleep(0.05 * session.rank)


def check(trained: Sequence[Trained | None], wanted: Any, *, coded: bool = True) -> None:
    for each in filter(None, trained):
        check_same_bits(each[0], wanted)
        assert ("raw_pushed_bytes" in each[1]) == coded
        assert each[1]["steps"] == STEPS


@pytest.mark.parametrize("staleness", [2, "async"])
def test_workers_in_different_steps_choose_together(
    staleness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = use_plan(monkeypatch, compression="*=lossless")
    check(run(2, slow_down, staleness=staleness), by_hand(2))
    assert [setting.raw_answers for setting in asked] == [True]


@pytest.mark.parametrize("staleness", [2, *long_cases("async")])
def test_lossy_updates_are_those_of_pushes_in_step(
    staleness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent depends on a rank's own gradients, and all sums are exact."""
    use_plan(monkeypatch, compression="*=topk:0.3")
    in_step = run(2, update="servers")[0]
    assert in_step is not None
    check(run(2, slow_down, staleness=staleness), in_step[0])
    whole = by_hand(2)
    assert any(not torch.equal(value, whole[name]) for name, value in in_step[0].items())


def test_who_is_late_chooses_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is counted has the same data."""
    asked = use_plan(monkeypatch, compression="*=lossless")
    check(run(3, slow_down, alike=True, backup_workers=1), by_hand(1))
    assert [setting.raw_answers for setting in asked] == [True]


def test_codecs_are_chosen_later_where_some_have_come_to_flush(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 flushes before it has measured enough; rank 0 tries again after each of its steps."""
    asked = use_plan(monkeypatch, compression="*=lossless")
    at = {0: MEASURED_STEPS + 2, 1: MEASURED_STEPS}
    chosen: dict[int, int] = {}

    def between(session: Any, step: int) -> None:
        if step == at[session.rank]:
            session.flush()
        if not session.planning:
            chosen.setdefault(session.rank, step)

    check(run(2, between, staleness="async"), by_hand(2))
    assert len(asked) == 1
    assert chosen == {0: MEASURED_STEPS + 3, 1: MEASURED_STEPS + 1}


def test_who_closes_before_leaves_the_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = use_plan(monkeypatch, compression="*=lossless")

    def work(world: World) -> dict[str, torch.Tensor]:
        model, optimizer = exact.make()
        about: Any = {**AUTO, "staleness": "async", "world": world}
        with foreprop.parallelize(model, optimizer, **about) as session:
            for batch in batches_of(world.rank)[: STEPS if world.rank else 2]:
                optimizer.zero_grad()
                model(*batch).backward()
                optimizer.step()
        assert session.planning
        return snapshot(model.state_dict())

    first, second = run_cluster(2, work)
    check_same_bits(first, second)
    assert not asked


# Elastic.
def killing(step: int) -> Callable[[Any, int], None]:
    def between(session: Any, now: int) -> None:
        if now == step and session.rank == 2:
            session.flush()  # all servers have its pushes of this step
            lose_node(session)

    return between


@pytest.mark.parametrize("step", [0, MEASURED_STEPS + 2], ids=["all live", "one dies"])
@pytest.mark.parametrize("codec", ["lossless", "int8"])
def test_an_elastic_session_goes_on_with_what_is_chosen(
    codec: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = use_plan(monkeypatch, compression=f"*={codec}")
    found = run(3, killing(step), alike=True, **BESIDE)
    assert (found[2] is None) == bool(step)
    first = found[0]
    assert first is not None
    check(found, by_hand(1) if codec == "lossless" else first[0])
    assert [setting.raw_answers for setting in asked] == [False]
    left = first[1]["left"]
    assert [each["step"] for each in left.values()] == ([step - 1] if step else [])


@pytest.mark.parametrize("rank", [0, *long_cases(2)])
def test_nothing_is_chosen_after_a_death_and_that_is_said(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = use_plan(monkeypatch, compression="*=lossless")

    def between(session: Any, now: int) -> None:
        if now == 2 and session.rank == rank:
            lose_node(session)

    with caplog.at_level(logging.INFO, "foreprop"):
        found = run(3, between, alike=True, **BESIDE)
    check(found, by_hand(1), coded=False)
    assert not asked
    told = f"compression: none; rank {rank} was lost before codecs were chosen"
    assert caplog.text.count(told) == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_a_death_while_they_choose_ends_that_for_all(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others have come together, and links are being measured."""
    asked = use_plan(monkeypatch, compression="*=lossless")
    sessions: dict[int, Any] = {}
    told = planning.exchange_reports

    def measure(board: Any, *, node: int, **about: Any) -> Any:
        if node == rank:
            lose_node(sessions[rank])
        return told(board, node=node, **about)

    monkeypatch.setattr(planning, "exchange_reports", measure)
    with caplog.at_level(logging.INFO, "foreprop"):
        found = run(3, lambda one, _: sessions.update({one.rank: one}), alike=True, **BESIDE)
    assert found[rank] is None
    check(found, by_hand(1), coded=False)
    assert not asked
    assert f"compression: none; rank {rank} was lost before codecs were chosen" in caplog.text


def test_a_death_while_all_connect_anew_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at its start."""
    use_plan(monkeypatch, compression="*=lossless")
    connect_anew = automatic.reconnect

    def die_or_connect(training: Any, row_wise: Any) -> None:
        if training.world.rank == 2:
            lose_node(SimpleNamespace(_training=training))
        connect_anew(training, row_wise)

    monkeypatch.setattr(automatic, "reconnect", die_or_connect)
    with pytest.raises(StepTimeout, match=r"waited 3 s \(join_timeout_s\) for server 2"):
        run(3, alike=True, join_timeout_s=3.0, **BESIDE)


def test_newcomers_wait_until_codecs_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    use_plan(monkeypatch, compression=None)
    said: list[tuple[bool, list[str]]] = []

    def between(session: Any, step: int) -> None:
        if session.rank == 0:
            directory = session._training.backends.all[0].members.directory
            place = directory.places[0]
            found = ask(place.host, place.port, 2, Config())
            waits = found.chooses or not found.places  # not even the list has come there yet
            said.append((waits, session.stats()["servers"]))

    check(run(2, between, alike=True, max_workers=3, **BESIDE), by_hand(1), coded=False)
    waits = [each for each, _ in said]
    assert waits[0]
    assert not waits[-1]
    assert [not servers for _, servers in said] == [n < MEASURED_STEPS for n in range(STEPS)]


class AllFrom:
    """Counts each rank from its first step on."""

    def __init__(self, began: dict[int, int]) -> None:
        self.began = began

    def at(self, slice_: int, step: int) -> tuple[int, ...]:
        return tuple(rank for rank in sorted(self.began) if self.began[rank] <= step)


@pytest.mark.parametrize("codecs", ["*=lossless", *long_cases(None)])
def test_newcomers_are_told_what_was_chosen_and_where_they_are(
    codecs: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Steps are those since the session's start, and its checkpoints go on."""
    use_plan(monkeypatch, compression=codecs)
    grown = Grown(2, {2: 8}, beside=True, steps=20, compression="auto")
    heard: set[int] = set()

    def begin(session: Any) -> Callable[[], object]:
        loop = foreprop.checkpoint(tmp_path / "checkpoints", every=5, session=session)

        def end_step() -> None:
            loop.end_step()
            if not session.planning and session.rank not in heard:
                heard.add(session.rank)
                grown.servers[:] = session.stats()["servers"]
                grown._listen(session)
            assert loop.step == session.stats()["steps"]

        return end_step

    grown.begin = begin
    grown.run(tmp_path)
    assert grown.began[2] > 8
    assert {stats["steps"] for stats in grown.stats.values()} == {20}
    assert grown.stats[0]["joined"] == {2: grown.began[2]}
    counted: Any = [AllFrom(grown.began)] * 2
    wanted = by_arithmetic(grown.build, grown.by_rank, grown.pieces, counted)
    for rank in range(3):
        check_same_bits(grown.found[rank], wanted)
        assert ("raw_pushed_bytes" in grown.stats[rank]) == (codecs is not None)
