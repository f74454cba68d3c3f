"""Moving averages of row-wise tables, against one process's that move every row in every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.engine.world import World
from tests.cluster import run_cluster, worlds
from tests.conformance import scaler_runs
from tests.conformance.aggregation_runs import check_each_step, train
from tests.conformance.average_runs import DECAY, alone, together
from tests.conformance.matrices import few
from tests.conformance.parity import (
    build_seeded,
    check_close,
    check_same_bits,
    merge,
    servers_only,
    train_classifier,
)
from tests.conformance.sparse_models import (
    SERVED,
    Bags,
    Pairs,
    Two,
    Words,
    ranks,
    with_optimizer,
    words_of,
)
from tests.tiers import long_cases

pytestmark = servers_only  # each test names the architecture that it needs


@pytest.mark.parametrize(
    ("make", "count", "architecture"), few([Words, Bags, Pairs], [1, 3], SERVED)
)
def test_averages_are_those_of_one_process(
    make: Callable[[], nn.Module], count: int, architecture: str
) -> None:
    build, by_rank = with_optimizer(make, torch.optim.Adagrad), ranks(count)
    wanted = alone(build, merge(by_rank))
    got = together(build, by_rank, architecture=architecture, servers_per_node=2)
    check_each_step(got, wanted)
    model, optimizer = build_seeded(build)
    with pytest.raises(AssertionError):  # they are not the parameters
        check_each_step(train(model, optimizer, merge(by_rank)), wanted)


@pytest.mark.parametrize("architecture", ["p2p", *long_cases("hybrid")])
def test_with_clipping_by_norm(architecture: str) -> None:
    by_rank = ranks(2)

    def edit(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    model, optimizer = build_seeded(with_optimizer(lambda: Words(sparse=False)))
    average, wanted = copy.deepcopy(model), []
    for words, labels in merge(by_rank):
        optimizer.zero_grad()
        F.cross_entropy(model(words), labels).backward()
        edit(model)
        optimizer.step()
        with torch.no_grad():
            for mine, value in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(value, 1 - DECAY)
        wanted.append(copy.deepcopy(average.state_dict()))
    settings = {"architecture": architecture, "clip_grad_norm": 0.1}
    check_each_step(together(with_optimizer(Words), by_rank, **settings), wanted)


def test_partitions_and_reading_leave_the_bits() -> None:
    """Asked for after every step, or only after the last one; on one server, or on several."""
    by_rank = ranks(2)
    build = with_optimizer(Words, torch.optim.Adagrad)
    wanted = together(build, by_rank)
    for settings in ({"servers_per_node": 3, "slice_elems": 7}, {"architecture": "hybrid"}):
        for ours, theirs in zip(together(build, by_rank, **settings), wanted, strict=True):
            check_same_bits(ours, theirs)

    def work(world: World) -> dict[str, Any]:
        model, optimizer = build_seeded(build, seed=world.rank)
        with foreprop.parallelize(model, optimizer, world=world, ema=DECAY) as session:
            train_classifier(model, optimizer, by_rank[world.rank])
            return session.ema_state_dict()

    for got in run_cluster(2, work):
        check_same_bits(got, wanted[-1])


@pytest.mark.parametrize("architecture", ["hybrid", *long_cases("p2p")])
def test_they_move_in_skipped_steps_and_of_rows_that_nobody_touches(architecture: str) -> None:
    model, optimizer = build_seeded(with_optimizer(Words))
    scaler, seen = scaler_runs.make_scaler(), []
    settings = {"architecture": architecture, "scaler": scaler, "ema": 0.5}
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], **settings) as session:
        for _ in range(2):
            bad_step = len(seen) - 1  # the second time
            scaler_runs.train(model, optimizer, scaler, words_of(0, 1), bad_step=bad_step)
            seen.append((copy.deepcopy(model.state_dict()), session.ema_state_dict()))
    (values, before), (again, after) = seen
    check_same_bits(again, values)
    assert not torch.equal(after["table.weight"], before["table.weight"])
    for name, average in after.items():
        assert torch.allclose(average, (before[name] + values[name]) / 2)


@pytest.mark.parametrize("architecture", ["p2p", *long_cases("hybrid")])
def test_a_table_that_is_changed_by_hand(architecture: str) -> None:
    """Until then the old values count, also of rows that were not touched for a while."""

    def loop(model: Any, optimizer: Any, after_step: Callable[[], object]) -> None:
        for number, batch in enumerate(words_of(0, 6)):
            if number == 3:
                with torch.no_grad():
                    model.table.weight.mul_(-2.0)
            train_classifier(model, optimizer, [batch])
            after_step()

    build = with_optimizer(Words, torch.optim.Adagrad)
    model, optimizer = build_seeded(build)
    average = copy.deepcopy(model)

    def move() -> None:
        with torch.no_grad():
            for mine, value in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(value, 1 - DECAY)

    loop(model, optimizer, move)
    model, optimizer = build_seeded(build)
    settings = {"architecture": architecture, "ema": DECAY}
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], **settings) as session:
        loop(model, optimizer, lambda: None)
        check_close(session.ema_state_dict(), average.state_dict())


@pytest.mark.parametrize(("loaded_at", "architecture"), few(["start", "later"], SERVED))
def test_a_resumed_run_goes_on_where_it_was(loaded_at: str, architecture: str) -> None:
    build = with_optimizer(Words, torch.optim.Adagrad)
    by_rank = [words_of(seed, 6) for seed in range(2)]
    wanted = together(build, by_rank, architecture=architecture)
    settings = {"architecture": architecture, "ema": DECAY}
    kept: dict[int, Any] = {}

    def first(world: World) -> None:
        model, optimizer = build_seeded(build)
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            train_classifier(model, optimizer, by_rank[world.rank][:3])
            parts = (session.ema_state_dict(), model.state_dict(), optimizer.state_dict())
            kept[world.rank] = copy.deepcopy(parts)

    def second(world: World) -> dict[str, Any]:
        model, optimizer = build_seeded(build, seed=9 + world.rank)
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            if loaded_at == "later":
                train_classifier(model, optimizer, words_of(77, 2))
            averages, parameters, state = kept[world.rank]
            model.load_state_dict(parameters)
            optimizer.load_state_dict(state)
            session.load_ema_state_dict(averages)
            check_same_bits(session.ema_state_dict(), averages)
            train_classifier(model, optimizer, by_rank[world.rank][3:])
            return session.ema_state_dict()

    run_cluster(2, first)
    for got in run_cluster(2, second):
        check_close(got, wanted[-1])  # moves in one go are rounded at other places


def test_of_halves_they_are_in_float32() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Pairs().bfloat16()
        return model, torch.optim.Adagrad(model.parameters(), lr=0.3)

    averages = together(build, ranks(2))[-1]["table.weight"]
    assert averages.dtype == torch.float32
    assert not torch.equal(averages, averages.bfloat16().float())


@pytest.mark.parametrize("architecture", ["hybrid", *long_cases("p2p")])
def test_before_the_first_step_they_are_the_parameters(architecture: str) -> None:
    def work(world: World) -> dict[str, Any]:
        model, optimizer = build_seeded(with_optimizer(Words), seed=world.rank)
        settings = {"architecture": architecture, "ema": DECAY}
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            return session.ema_state_dict()

    wanted = build_seeded(with_optimizer(Words))[0].state_dict()
    for got in run_cluster(2, work):
        check_same_bits(got, wanted)


@pytest.mark.usefixtures("told_links")
def test_auto_keeps_them_when_it_chooses() -> None:
    def make() -> nn.Module:
        model = Two(sparse=(False, True))
        model.norm = nn.Identity()  # so that one process with the whole batch can be compared
        return model

    build = with_optimizer(make, lr=0.05)
    by_rank = [words_of(seed, 6) for seed in range(2)]
    got = together(build, by_rank, architecture="auto")
    check_each_step(got, alone(build, merge(by_rank)))
