"""Sessions that go on without a worker: `elastic`, `backup_workers`, and their replays."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foreprop.config import Config
from foreprop.engine.world import World
from foreprop.errors import ConfigError, ForepropError, PeerLost, TrainingLoopError
from tests import matrix as exact
from tests.cluster import run_cluster
from tests.conformance.counting_runs import (
    BACKUPS,
    ELASTIC,
    Died,
    by_arithmetic,
    counted_in,
    dedicated,
    die,
    late_run,
    lose_one,
    make_step,
    session_of,
    trained_by_arithmetic,
    wait_for,
)
from tests.conformance.parity import (
    batches_of,
    build_seeded,
    check_same_bits,
    run_foreprop,
    servers_only,
    small_model,
    snapshot,
    train_classifier,
    with_sgd,
)
from tests.tiers import long_cases

pytestmark = servers_only  # each test names the architecture that it needs


TWO_SERVERS: dict[str, Any] = {"local_size": 3, "servers_per_node": 2}
"""As many as the dedicated ones of a log, beside the workers."""


def replayed(folder: Path, build: Any, by_rank: Any, **settings: Any) -> list[Any]:
    """What each rank has when the log says who counts."""
    about: dict[str, Any] = {"architecture": "p2p", "slice_elems": 10, **settings}
    return run_foreprop(build, train_classifier, by_rank, counted_replay=str(folder), **about)


def with_adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small_model()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


# Deaths.
def test_without_a_death_elastic_changes_no_bit() -> None:
    by_rank = batches_of(3)
    usual = run_foreprop(with_sgd(), train_classifier, by_rank, architecture="p2p")

    def work(world: World) -> dict[str, torch.Tensor]:
        model, optimizer = build_seeded(with_sgd(), seed=world.rank)
        with dedicated(world), session_of(world, model, optimizer, **ELASTIC) as session:
            train_classifier(model, optimizer, by_rank[world.rank])
            found = snapshot(model.state_dict())
        assert session.stats()["members"] == [0, 1, 2]
        assert session.stats()["left"] == {}
        return found

    for found in run_cluster(3, work):
        check_same_bits(found, usual[0].model)


@pytest.mark.parametrize("victim", [1, *long_cases(0, 2)])
@pytest.mark.parametrize("layer", [2, None, *long_cases(0, 4)])
def test_survivors_have_the_bits_of_who_was_counted(
    tmp_path: Path, victim: int, layer: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a step, or between two: the log and plain arithmetic give the same bits."""
    with caplog.at_level(logging.WARNING, "foreprop"):
        found, stats, pieces = lose_one(tmp_path, victim, 3, layer)
    survivors = [rank for rank in range(3) if rank != victim]
    check_same_bits(found[survivors[0]], found[survivors[1]])
    counted = counted_in(tmp_path, 3, pieces)
    check_same_bits(
        found[survivors[0]], by_arithmetic(with_sgd(), batches_of(3, count=6), pieces, counted)
    )
    at = [[counted[p.server].at(p.number, step) for p in pieces] for step in range(1, 7)]
    everybody, rest = (0, 1, 2), tuple(survivors)
    assert set(at[0] + at[1]) == {everybody}
    assert set(at[3] + at[4] + at[5]) == {rest}
    assert set(at[2]) <= {everybody, rest}
    for rank in survivors:
        assert stats[rank]["members"] == survivors
        left = stats[rank]["left"][victim]
        assert left["slices"] == len(pieces)
        if left["step"] == 3:
            assert left["counted_slices"] == sum(each == everybody for each in at[2])
        else:
            assert (left["step"], at[2].count(rest)) == (2, len(pieces))
        assert f"rank {victim} is gone: its connection to server" in left["reason"]
    assert f"rank {victim} has left within step" in caplog.text
    assert "2 of 3 workers are left" in caplog.text


def test_a_replay_of_a_death_in_a_session_of_all(tmp_path: Path) -> None:
    """The log is of two dedicated servers, and the replay's are as many, beside the workers."""
    found, _, pieces = lose_one(tmp_path, 2, 3, 2, with_adam)
    again = replayed(tmp_path, with_adam, batches_of(3, count=6), **TWO_SERVERS)
    assert len({piece.server for piece in pieces}) == 2
    for rank in range(3):
        check_same_bits(again[rank].model, found[0])


@pytest.mark.long
def test_what_goes_together_with_a_death(tmp_path: Path) -> None:
    """Half the bytes, moving averages, clipped values, and a layer that is frozen."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = with_adam()
        model[0].bias.requires_grad_(False)  # type: ignore[union-attr]
        return model, optimizer

    about: dict[str, Any] = {"wire_dtype": "bfloat16", "ema": 0.9, "clip_grad_value": 0.1}
    found, stats, _ = lose_one(tmp_path, 1, 3, 2, build, **about)
    check_same_bits(found[0], found[2])
    assert stats[0]["members"] == [0, 2]


def test_who_fails_leaves_and_says_why() -> None:
    """An error of the loop ends one rank; the others go on, and know what it was."""
    by_rank = batches_of(3)
    stats: list[Any] = [None] * 3

    def work(world: World) -> Any:
        model, optimizer = build_seeded(with_sgd(), seed=world.rank)
        with dedicated(world):
            try:
                with session_of(world, model, optimizer, **ELASTIC) as session:
                    for number, batch in enumerate(by_rank[world.rank], 1):
                        if (world.rank, number) == (0, 3):
                            session.flush()  # what it has pushed has left
                            raise ValueError("the data are odd")
                        make_step(model, optimizer, batch)
                    found = snapshot(model.state_dict())
            except ValueError:
                return None
            stats[world.rank] = session.stats()
            return found

    _, one, other = run_cluster(3, work)
    check_same_bits(one, other)
    left = stats[1]["left"][0]
    assert left["reason"] == "rank 0 ended: ValueError: the data are odd"
    assert (left["step"], left["counted_slices"]) == (2, left["slices"])


@pytest.mark.long
@pytest.mark.alone
def test_who_is_silent_is_dropped_and_told_so() -> None:
    """Stopped for longer than the others wait: it comes back, and learns that they went on."""
    others_done = threading.Event()
    by_rank = batches_of(3)
    settings = {**ELASTIC, "step_timeout_s": 2.0, "stall_report_s": 0.4}

    def work(world: World) -> Any:
        model, optimizer = build_seeded(with_sgd(), seed=world.rank)
        with dedicated(world), session_of(world, model, optimizer, **settings):
            for number, batch in enumerate(by_rank[world.rank], 1):
                if (world.rank, number) == (2, 3):
                    wait_for(others_done)
                make_step(model, optimizer, batch)
            if world.rank == 1:
                others_done.set()
            return snapshot(model.state_dict())

    errors: list[BaseException] = []

    def guarded(world: World) -> Any:
        try:
            return work(world)
        except PeerLost as error:
            errors.append(error)
            return None

    one, other, lost = run_cluster(3, guarded)
    check_same_bits(one, other)
    assert lost is None
    (error,) = errors
    assert "rank 2 was dropped, and the others go on without it: rank 2 has pushed nothing" in str(
        error
    )


@pytest.mark.long
@pytest.mark.alone
def test_survivors_may_take_their_time() -> None:
    """One that has died is no reason to close: nobody waits for those who stay."""
    by_rank = batches_of(2)
    died = threading.Event()
    settings = {**ELASTIC, "step_timeout_s": 1.0, "stall_report_s": 0.4}

    def work(world: World) -> Any:
        model, optimizer = build_seeded(with_sgd(), seed=world.rank)
        with dedicated(world), session_of(world, model, optimizer, **settings) as session:
            for number, batch in enumerate(by_rank[world.rank], 1):
                make_step(model, optimizer, batch)
                session.flush()
                if (world.rank, number) == (1, 2):
                    died.set()
                    with pytest.raises(Died):
                        die(session)
                    return None
                if number == 2:
                    wait_for(died)
                    threading.Event().wait(2.0)  # longer than step_timeout_s
            return session.stats()["steps"]

    assert run_cluster(2, work)[0] == 4


def test_the_last_one_is_not_left_behind() -> None:
    """All others are dead, and the session goes on with one; when that dies, it is over."""
    by_rank = batches_of(2, count=6)

    def work(world: World) -> Any:
        model, optimizer = build_seeded(with_sgd(), seed=world.rank)
        with dedicated(world):
            try:
                with session_of(world, model, optimizer, **ELASTIC) as session:
                    for number, batch in enumerate(by_rank[world.rank], 1):
                        make_step(model, optimizer, batch)
                        if number == (2 if world.rank == 0 else 5):
                            session.flush()
                            die(session)
            except (Died, PeerLost):
                return number
        return None

    assert run_cluster(2, work) == [2, 5]


# Backup workers.


@pytest.mark.parametrize("wire_dtype", [None, *long_cases("bfloat16")])
def test_a_late_worker_holds_nobody_up(tmp_path: Path, wire_dtype: Any) -> None:
    found, stats, pieces = late_run(tmp_path, wire_dtype=wire_dtype)
    for other in found[1:]:
        check_same_bits(other, found[0])
    counted = counted_in(tmp_path, 3, pieces)
    at = [[counted[p.server].at(p.number, step) for p in pieces] for step in range(1, 9)]
    assert all(len(ranks) in (2, 3) for sets in at for ranks in sets)
    assert set(at[1] + at[2] + at[3]) == {(0, 1)}, "rank 2 was not late"
    assert stats[2]["late_slices"] > 0
    assert stats[2]["late_steps"] > 0
    for rank in range(3):  # on a busy machine another one may be late later
        left_out = sum(rank not in ranks for sets in at for ranks in sets)
        assert stats[rank]["late_slices"] <= left_out
    if wire_dtype is None:
        check_same_bits(
            found[0], by_arithmetic(with_sgd(), batches_of(3, count=8), pieces, counted)
        )
    again = replayed(
        tmp_path,
        with_sgd(),
        batches_of(3, count=8),
        wire_dtype=wire_dtype,
        update="auto" if wire_dtype is None else "servers",  # which round what they answer
    )
    for rank in range(3):
        check_same_bits(again[rank].model, found[0])


@pytest.mark.parametrize("backup_workers", [0, 1])
def test_the_norm_is_that_of_what_a_step_counts(tmp_path: Path, backup_workers: int) -> None:
    """Also the late one learns the norm of each of its steps; a replay may keep the setting."""
    norms: list[list[float]] = [[], [], []]
    found, stats, pieces = late_run(tmp_path, norms=norms, clip_grad_norm=0.3)
    assert stats[2]["late_steps"] > 0, "rank 2 was not late"
    assert norms[0] == norms[1] == norms[2]
    counted = counted_in(tmp_path, 3, pieces)
    by_hand: list[float] = []

    def clip(model: nn.Module) -> None:
        by_hand.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))

    about: Any = (with_sgd(), batches_of(3, count=8), pieces, counted)
    expected, _ = trained_by_arithmetic(*about, before_step=clip)
    assert max(by_hand) > 0.3, "nothing was clipped"
    assert norms[0] == pytest.approx(by_hand, rel=1e-5)
    again = replayed(
        tmp_path,
        with_sgd(),
        batches_of(3, count=8),
        update="auto" if backup_workers else "servers",
        clip_grad_norm=0.3,
        backup_workers=backup_workers,
    )
    for rank in range(3):
        check_same_bits(found[rank], found[0])
        check_same_bits(again[rank].model, found[0])
        for name, value in expected.items():
            torch.testing.assert_close(found[0][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("victim", [0, *long_cases(1, 2)])
def test_any_member_may_be_lost_where_servers_clip(tmp_path: Path, victim: int) -> None:
    about: dict[str, Any] = {"update": "servers", "clip_grad_norm": 0.3}
    found, stats, _ = lose_one(tmp_path, victim, 3, 2, **about)
    survivors = [rank for rank in range(3) if rank != victim]
    check_same_bits(found[survivors[0]], found[survivors[1]])
    assert stats[survivors[0]]["members"] == survivors
    again = replayed(tmp_path, with_sgd(), batches_of(3, count=6), **TWO_SERVERS, **about)
    check_same_bits(again[0].model, found[survivors[0]])


def test_a_scaler_leaves_out_a_step_if_what_counts_is_infinite() -> None:
    """In step 2 that is rank 2's alone, which is late then; in step 6 it is everybody's."""
    ahead = [threading.Event(), threading.Event()]
    batches = 2 * exact.batches_of(0)

    def make_scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)

    def step(model: Any, optimizer: Any, scaler: Any, number: int, *, broken: bool) -> None:
        optimizer.zero_grad()
        loss = model(*batches[number]) * (torch.inf if broken else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def work(world: World) -> tuple[dict[str, torch.Tensor], float]:
        (model, optimizer), scaler = exact.make(), make_scaler()
        with session_of(world, model, optimizer, scaler=scaler, **BACKUPS) as session:
            for number in range(1, len(batches)):
                if world.rank == 2 and number == 2:
                    for event in ahead:
                        wait_for(event)
                broken = number == 6 or (world.rank == 2 and number == 2)
                step(model, optimizer, scaler, number, broken=broken)
                if world.rank < 2 and number == 4:
                    ahead[world.rank].set()
            session.flush()
            return snapshot(model.state_dict()), scaler.get_scale()

    (model, optimizer), scaler = exact.make(), make_scaler()
    for number in range(1, len(batches)):
        step(model, optimizer, scaler, number, broken=number == 6)
    for found, scale in run_cluster(3, work):
        check_same_bits(found, model.state_dict())
        assert scale == scaler.get_scale()


# Tables that servers hold row by row.
def with_table() -> tuple[nn.Module, torch.optim.Optimizer]:
    table = nn.EmbeddingBag(15, 5, sparse=True)
    model = nn.Sequential(table, nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.3)


def numbers_of(ranks: int, count: int) -> list[list[Any]]:
    generator = torch.Generator().manual_seed(5)

    def draw(below: int, *shape: int) -> torch.Tensor:
        return torch.randint(below, shape, generator=generator)

    return [[(draw(15, 6, 2), draw(3, 6)) for _ in range(count)] for _ in range(ranks)]


@pytest.mark.parametrize("victim", [1, 0])
@pytest.mark.parametrize("layer", [0, 1, *long_cases(3, None)])
def test_survivors_have_the_rows_of_who_was_counted(
    tmp_path: Path, victim: int, layer: int | None
) -> None:
    """On dedicated servers: the rank dies before its rows leave, or its dense gradients."""
    by_rank = numbers_of(3, 6)
    found, stats, pieces = lose_one(tmp_path, victim, 3, layer, with_table, by_rank)
    one, other = (rank for rank in range(3) if rank != victim)
    check_same_bits(found[one], found[other])
    counted = counted_in(tmp_path, 3, pieces)
    check_same_bits(found[one], by_arithmetic(with_table, by_rank, pieces, counted))
    last = {counted[piece.server].at(piece.number, 6) for piece in pieces}
    assert last == {(one, other)}
    assert stats[one]["left"][victim]["slices"] == len(pieces)
    again = replayed(tmp_path, with_table, by_rank, **TWO_SERVERS)
    for each in again:
        check_same_bits(each.model, found[one])


def test_a_late_workers_rows_hold_nobody_up(tmp_path: Path) -> None:
    """What it has looked up is newer than its step, and so none of its gradients counts."""
    by_rank = numbers_of(3, 8)
    found, stats, pieces = late_run(tmp_path, with_table, by_rank)
    for other in found[1:]:
        check_same_bits(other, found[0])
    counted = counted_in(tmp_path, 3, pieces)
    at = [[counted[p.server].at(p.number, step) for p in pieces] for step in range(1, 9)]
    assert all(len(ranks) in (2, 3) for sets in at for ranks in sets)
    assert set(at[1] + at[2] + at[3]) == {(0, 1)}, "rank 2 was not late"
    assert stats[2]["late_steps"] > 0
    check_same_bits(found[0], by_arithmetic(with_table, by_rank, pieces, counted))


def test_ranks_meet_and_their_checkpoints_are_alike(tmp_path: Path) -> None:
    """Buffers are each rank's own until `flush()`, and rank 0's then."""
    by_rank = batches_of(3)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def work(world: World) -> Any:
        model, optimizer = build_seeded(build, seed=world.rank)
        with session_of(world, model, optimizer, **BACKUPS) as session:
            train_classifier(model, optimizer, by_rank[world.rank])
            session.flush()
            state = snapshot(optimizer.state_dict())["state"]
            session.flush()
            return snapshot(model.state_dict()), state

    (model, state), *others = run_cluster(3, work)
    for found, their_state in others:
        check_same_bits(found, model)
        for place, entries in state.items():
            for name, value in entries.items():
                assert torch.equal(
                    torch.as_tensor(their_state[place][name]), torch.as_tensor(value)
                )


def test_what_is_changed_by_hand_is_an_error() -> None:
    def work(world: World) -> None:
        model, optimizer = build_seeded(with_sgd(), seed=world.rank)
        with session_of(world, model, optimizer, **BACKUPS):
            for batch in batches_of(2)[world.rank]:
                make_step(model, optimizer, batch)
                with torch.no_grad():
                    model[0].weight.mul_(2)

    with pytest.raises(TrainingLoopError, match="changed by hand"):
        run_cluster(2, work)


# What there cannot be.
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"counted_replay": "/nowhere"}, "counted_replay is '/nowhere', which is no folder"),
        ({"backup_workers": -1}, "backup_workers is -1; it must be at least 0"),
        ({"elastic": "yes"}, "elastic is 'yes'; it must be"),
    ],
    ids=str,
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**settings)


@pytest.mark.parametrize(
    ("settings", "make", "message"),
    [
        ({"backup_workers": 2}, small_model, "must be below the number of workers, 2"),
    ],
)
def test_models_and_worlds_that_are_refused(
    settings: dict[str, Any], make: Any, message: str
) -> None:
    def work(world: World) -> None:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session_of(world, model, optimizer, **{**BACKUPS, **settings})

    with pytest.raises(ConfigError, match=message):
        run_cluster(2, work)


def test_an_optimizer_of_the_workers_is_refused() -> None:
    def work(world: World) -> None:
        model, _ = with_sgd()()
        lbfgs = torch.optim.LBFGS(model.parameters())
        with pytest.raises(ConfigError, match=r"workers update \(.*\), and backup_workers is 1"):
            session_of(world, model, lbfgs, **BACKUPS)

    run_cluster(2, work)


def test_a_log_that_is_of_another_session(tmp_path: Path) -> None:
    lines = "foreprop counted sets 1: 5 workers, 2 slices\n"
    for index in range(2):
        (tmp_path / f"server-{index}.x.counted").write_text(lines)
    settings = {"architecture": "p2p", "counted_replay": str(tmp_path)}

    def work(world: World) -> None:
        model, optimizer = with_sgd()()
        session_of(world, model, optimizer, **settings)

    with pytest.raises(ForepropError, match=r"counted_replay: the log begins with .*5 workers"):
        run_cluster(2, work)
