"""Sessions with staleness: what workers read, who waits for whom, and what there cannot be."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.config import Config
from foreprop.engine.slicestore import SliceStore
from foreprop.engine.world import World
from foreprop.errors import ConfigError, ForepropError, HandshakeError, TrainingLoopError
from tests import matrix as exact
from tests.cluster import run_cluster
from tests.conformance.counting_runs import pieces_of
from tests.conformance.parity import (
    batches_of,
    build_seeded,
    check_same_bits,
    merge,
    run_plain,
    run_rank,
    servers_only,
    small_model,
    snapshot,
    train_classifier,
    with_sgd,
)

pytestmark = servers_only  # each test names the architecture that it needs
torch.sparse.check_sparse_tensor_invariants.disable()  # torch's Adagrad warns until one chooses

APART: dict[str, Any] = {"architecture": "p2p", "step_timeout_s": 20.0}
LONG = pytest.mark.long


class Counting(nn.Module):
    """Row r of its weight is how many updates by rank r it has: SGD with lr 1 adds one each."""

    def __init__(self, ranks: int, elems: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ranks, elems))

    def forward(self, rank: int) -> torch.Tensor:
        return -self.weight.shape[0] * self.weight[rank].sum()


class CountingRows(nn.Module):
    """The same, by look-ups of a table that servers hold row by row."""

    def __init__(self, ranks: int, elems: int) -> None:
        super().__init__()
        self.table = nn.Embedding(ranks, elems, sparse=True)
        nn.init.zeros_(self.table.weight)

    @property
    def weight(self) -> torch.Tensor:
        return self.table.weight

    def forward(self, rank: int) -> torch.Tensor:
        return -self.table.num_embeddings * self.table(torch.tensor([rank])).sum()


def count(
    world: World,
    steps: int,
    staleness: Any,
    before: Callable[[int], None],
    kind: type[Counting | CountingRows] = Counting,
    **settings: Any,
) -> list[torch.Tensor]:
    """What a rank reads in each step, and at last after `flush`."""
    model = kind(world.size, settings.pop("elems", 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    about = {**APART, "staleness": staleness, **settings}
    reads = []
    with foreprop.parallelize(model, optimizer, world=world, **about) as session:
        for step in range(1, steps + 1):
            before(step)
            optimizer.zero_grad()
            loss = model(world.rank)
            reads.append(model.weight.detach().clone())
            loss.backward()
            optimizer.step()
        session.flush()
        reads.append(model.weight.detach().clone())
    return reads


def rows(value: torch.Tensor) -> list[int]:
    """Each row is one number, or updates were seen by halves."""
    assert (value == value[:, :1]).all(), "a torn slice"
    return [int(number) for number in value[:, 0]]


@pytest.mark.parametrize("staleness", [1, pytest.param(3, marks=LONG), "async"])
@pytest.mark.parametrize("preset", ["p3", pytest.param("wfbp", marks=LONG)])
@pytest.mark.parametrize("kind", [Counting, CountingRows])
def test_reads_are_fresh_enough_and_have_the_own_updates(
    kind: Any, staleness: Any, preset: str
) -> None:
    ranks, steps = 3, 8

    def work(world: World) -> list[torch.Tensor]:
        rng = random.Random(world.rank)
        pace_s = 0.01 * world.rank
        return count(
            world,
            steps,
            staleness,
            lambda step: time.sleep(pace_s * rng.random()),
            kind,
            preset=preset,
            elems=30_000,
            slice_elems=90_000,
        )

    by_rank = run_cluster(ranks, work)
    for rank, reads in enumerate(by_rank):
        for step, read in enumerate(reads[:-1], 1):
            counts = rows(read)
            assert counts[rank] == step - 1
            if staleness != "async":
                assert min(counts) >= step - 1 - staleness
        assert rows(reads[-1]) == [steps] * ranks


@pytest.mark.parametrize("staleness", [1, "async"])
@pytest.mark.parametrize("kind", [Counting, CountingRows])
def test_a_rank_that_is_held_up_holds_up_others_as_far_as_it_may(kind: Any, staleness: Any) -> None:
    """By events, not by time: rank 1 goes on when rank 0 has made what it may make alone."""
    alone = 11 if staleness == "async" else staleness + 1
    made, released = threading.Event(), threading.Event()

    def work(world: World) -> list[torch.Tensor]:
        def before(step: int) -> None:
            if world.rank == 1 and step == 1:
                assert made.wait(60), "rank 0 waits for it"
                released.set()
            if world.rank == 0 and step == alone + 1:
                made.set()

        return count(world, 12, staleness, before, kind)

    first, _ = run_cluster(2, work)
    assert released.is_set()
    assert [rows(read)[1] for read in first[:alone]] == [0] * alone
    if staleness != "async":
        assert all(step - 1 - rows(read)[1] <= staleness for step, read in enumerate(first[:-1], 1))


def test_staleness_0_has_the_bits_of_one_process() -> None:
    by_rank = batches_of(2)
    build = with_sgd()
    plain = run_plain(build, train_classifier, merge(by_rank))
    found = run_cluster(
        2,
        lambda world: run_rank(
            world, build, train_classifier, by_rank[world.rank], **APART, staleness=0
        ),
    )
    usual = run_cluster(
        2, lambda world: run_rank(world, build, train_classifier, by_rank[world.rank], **APART)
    )
    for one, other in zip(found, usual, strict=True):
        for name, value in one.model.items():
            assert torch.equal(value, other.model[name])
            assert torch.allclose(value, plain.model[name], atol=1e-5)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_one_worker_alone_has_the_bits_of_plain_pytorch(kind: Any) -> None:
    """Each of its pushes is an update by itself, of the whole gradient."""
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model()
        return model, kind(model.parameters(), lr=0.05, weight_decay=0.01, **settings)

    (batches,) = batches_of(1)
    plain = run_plain(build, train_classifier, batches)
    (found,) = run_cluster(
        1,
        lambda world: run_rank(
            world, build, train_classifier, batches, **APART, staleness="async", slice_elems=13
        ),
    )
    for name, value in plain.model.items():
        assert torch.equal(value, found.model[name])
    assert found.optimizer["state"].keys() == plain.optimizer["state"].keys()


def delayed(strength: float | None, *, scaled: bool = False) -> torch.Tensor:
    """Rank 1 computes from the first values, and pushes when rank 0's update is in."""
    computed, updated = threading.Event(), threading.Event()
    x = torch.tensor([[1.0, 2.0, -0.5], [0.3, -1.0, 2.0]])

    def work(world: World) -> torch.Tensor:
        model, optimizer = build_seeded(linear, seed=7)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scaled)
        settings: dict[str, Any] = {"staleness": "async", "delay_compensation": strength, **APART}
        settings["scaler"] = scaler if scaled else None
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            loss = scaler.scale(model(x[world.rank]).pow(2).sum())
            if world.rank == 1:
                computed.set()
            assert (updated if world.rank else computed).wait(60)
            loss.backward()
            scaler.step(optimizer)
            scaler.update()
            if world.rank == 0:
                model.weight.sum()  # waits for its own update
                updated.set()
            session.flush()
            return model.weight.detach().clone()

    both = run_cluster(2, work)
    assert torch.equal(*both)
    return both[0]


def linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 1, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("strength", [None, 0.0, 0.5])
def test_delay_compensation_has_the_bits_of_a_computation_by_hand(strength: float | None) -> None:
    """DC-ASGD (Zheng et al. 2017): g + lambda g g (w - w_bak), each worker's share of the mean."""
    model, optimizer = build_seeded(linear, seed=7)
    x = torch.tensor([[1.0, 2.0, -0.5], [0.3, -1.0, 2.0]])
    gradients = []
    for row in x:
        optimizer.zero_grad()
        model(row).pow(2).sum().backward()
        gradients.append(model.weight.grad.clone())
    before = model.weight.detach().clone()
    for gradient in gradients:
        now = model.weight.detach()
        if strength and gradient is gradients[1]:
            gradient = gradient + gradient * gradient * (now - before) * strength
        model.weight.grad = gradient / 2
        optimizer.step()
    found = delayed(strength)
    assert torch.equal(found, model.weight)
    assert torch.equal(found, delayed(None)) == (not strength)
    assert torch.equal(found, delayed(strength, scaled=True))


# Tables that servers hold row by row.
RANKS, ROWS = 3, 12
"""The first `RANKS` rows are in no batch, one on each server."""


class Bag(nn.Module):
    has_pushed = False

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4, sparse=True, device=device)
        self.last = nn.Linear(4, 1)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return (self.last(self.table(numbers)) - 1).pow(2).sum()


def bag(device: str = "cpu") -> tuple[Bag, torch.optim.Optimizer]:
    model = Bag(device)
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1, foreach=False)


def drawn_turns(steps: int, apart: float) -> list[int]:
    """Whose turn it is: to look up, then to push, and so on."""
    found = [0, 0]  # whose first step tells the others the priorities
    rng, turns = random.Random(3), [2, *[0] * (RANKS - 1)]
    while min(turns) < 2 * steps:
        pushed = min(turns) // 2
        ahead = [(turn + 1) // 2 - pushed <= apart for turn in turns]
        may = [r for r in range(RANKS) if turns[r] < 2 * steps and ahead[r]]
        found.append(rng.choice(may))
        turns[found[-1]] += 1
    return found


def looked_up(rank: int, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(RANKS, ROWS, (5,), generator=generator) for _ in range(steps)]


def replayed(
    turns: Sequence[int], steps: int, begun: dict[str, torch.Tensor], decay: float
) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, torch.Tensor]]:
    """In one process: each rank's gradient is of what it has read, and an update by itself.

    It reads rows when it looks them up (rank 0 has all at the start), and the rest with the answer
    to its last push.
    """
    model, optimizer = bag()
    model.load_state_dict(begun)
    copies = [bag()[0] for _ in range(RANKS)]
    for copied in copies:
        copied.load_state_dict(begun)
    batches = [iter(looked_up(rank, steps)) for rank in range(RANKS)]
    losses: list[torch.Tensor | None] = [None] * RANKS
    averages = snapshot(begun)
    for rank in turns:
        copied, loss = copies[rank], losses[rank]
        if loss is None:
            if copied.has_pushed or rank:
                copied.table.load_state_dict(model.table.state_dict())
            losses[rank] = copied(next(batches[rank]))
            continue
        losses[rank], copied.has_pushed = None, True
        copied.zero_grad()
        loss.backward()
        for own, its in zip(model.parameters(), copied.parameters(), strict=True):
            assert its.grad is not None
            own.grad = its.grad.coalesce() / RANKS if its.grad.is_sparse else its.grad / RANKS
        optimizer.step()
        copied.last.load_state_dict(model.last.state_dict())
        for name, value in model.state_dict().items():
            averages[name].lerp_(value, 1 - decay ** (1 / RANKS))
    return model.state_dict(), optimizer.state_dict(), averages


@pytest.mark.parametrize("staleness", [2, "async"])
def test_rows_are_updated_by_each_push_in_the_order_of_arrival(staleness: Any) -> None:
    """To the bit as one process that has the same gradients of what was read, one by one."""
    steps, decay = 4, 0.7
    turns = drawn_turns(steps, 6.0 if staleness == "async" else staleness)
    model, _ = build_seeded(bag, seed=0)
    expected = replayed(turns, steps, snapshot(model.state_dict()), decay)
    whose = iter([*turns, -1])
    turn, passed = [next(whose)], threading.Condition()
    begun = threading.Barrier(RANKS, timeout=60)

    def work(world: World) -> list[dict[str, Any]]:
        model, optimizer = build_seeded(bag, seed=world.rank)
        about = {**APART, "staleness": staleness, "ema": decay, "world": world}
        with foreprop.parallelize(model, optimizer, **about) as session:
            begun.wait()  # with the same values: who comes later has those of then
            batches, loss = iter(looked_up(world.rank, steps)), None
            for _ in range(2 * steps):
                with passed:
                    assert passed.wait_for(lambda: turn[0] == world.rank, 60)
                if loss is None:
                    optimizer.zero_grad()
                    loss = model(next(batches))
                else:
                    loss.backward()
                    optimizer.step()
                    loss = None
                    model.table(torch.arange(RANKS))  # waits for its own update, on all servers
                    [parameter.sum() for parameter in model.last.parameters()]
                with passed:
                    turn[0] = next(whose)
                    passed.notify_all()
            session.flush()
            found = [model.state_dict(), optimizer.state_dict(), session.ema_state_dict()]
            found = [snapshot(each) for each in found]
            session.flush()
        return found

    for found in run_cluster(RANKS, work):
        check_same_bits(found[0], expected[0])
        for number, state in expected[1]["state"].items():
            check_same_bits(found[1]["state"][number], state)
        for name, value in expected[2].items():
            torch.testing.assert_close(found[2][name], value)


def test_all_ranks_show_the_same_remote_rows_after_a_meeting() -> None:
    def work(world: World) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model, optimizer = build_seeded(lambda: bag("meta"), seed=world.rank)
        about = {**APART, "staleness": "async", "whole_tables": "all", "world": world}
        with foreprop.parallelize(model, optimizer, **about) as session:
            for numbers in looked_up(world.rank, 5):
                optimizer.zero_grad()
                model(numbers).backward()
                optimizer.step()
            session.flush()
            every = torch.arange(ROWS)
            met = model.table(every).detach()
            session.set_rows("table.weight", every, torch.ones(ROWS, 4))
            assert torch.equal(model.table(every), torch.ones(ROWS, 4))
            return met, snapshot(model.state_dict())

    (first, _), *others = run_cluster(RANKS, work)
    for met, _ in others:
        assert torch.equal(met, first)


# One step late.
@pytest.mark.parametrize("settings", [{}, {"compression": "lossless"}], ids=["plain", "encoded"])
def test_a_use_that_would_wait_is_one_step_late_and_never_more(settings: dict[str, Any]) -> None:
    """Rank 1 pushes step 2 when rank 0 has begun step 3: with no late use both would wait."""
    begun = threading.Event()
    stats: list[dict[str, Any]] = []

    def work(world: World) -> list[torch.Tensor]:
        def before(step: int) -> None:
            if world.rank == 1 and step == 2:
                assert begun.wait(60), "rank 0 waits for it"
            if world.rank == 0 and step == 4:
                stats.append(sessions[0].stats())

        model = Counting(2, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        reads = []
        with foreprop.parallelize(
            model, optimizer, world=world, **APART, staleness="late", **settings
        ) as session:
            if world.rank == 0:
                sessions.append(session)
            for step in range(1, 7):
                before(step)
                optimizer.zero_grad()
                loss = model(world.rank)
                with torch._C.DisableTorchFunctionSubclass():
                    reads.append(model.weight.detach().clone())
                if world.rank == 0 and step == 3:
                    begun.set()
                loss.backward()
                optimizer.step()
            assert rows(model.weight.detach().clone()) == [6, 6]  # not in a forward pass: waits
        assert rows(model.weight.detach()) == [6, 6]
        return reads

    sessions: list[Any] = []
    for reads in run_cluster(2, work):
        for step, read in enumerate(reads, 1):
            counts = rows(read)
            assert counts[0] == counts[1] in (step - 1, step - 2)
    assert stats[0]["late_uses"] >= 1


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_gan_uses_what_is_late_in_the_generators_pass(set_to_none: bool) -> None:
    """It adds to the critic's gradients while they are sent; whoever shows the critic waits."""
    generated = threading.Event()

    def work(world: World) -> list[dict[str, Any]]:
        critic, generator = Counting(2, 5), Counting(2, 5)
        first = torch.optim.SGD(critic.parameters(), lr=1.0)
        second = torch.optim.SGD(generator.parameters(), lr=1.0)
        about: dict[str, Any] = {"world": world, **APART, "staleness": "late"}
        with (
            foreprop.parallelize(critic, first, **about) as session,
            foreprop.parallelize(generator, second, **about) as other,
        ):
            for step in range(1, 6):
                first.zero_grad(set_to_none)
                loss = critic(world.rank)
                if world.rank == 1 and step == 3:
                    assert generated.wait(60), "rank 0 waits for it"
                loss.backward()
                first.step()
                second.zero_grad(set_to_none)
                (critic(world.rank) + generator(world.rank)).backward()
                if world.rank == 0 and step == 3:
                    with torch._C.DisableTorchFunctionSubclass():
                        assert rows(critic.weight.detach()) == [2, 2]
                    generated.set()
                second.step()
                assert rows(critic.weight.detach().clone()) == [step, step]
                assert rows(generator.weight.detach().clone()) == [step, step]
        return [session.stats(), other.stats()]

    (about_critic, _), _ = run_cluster(2, work)
    assert about_critic["late_uses"] >= 1


def test_a_frozen_parameter_is_never_late() -> None:
    """No backward pass would tell when its old values have been used for the last time."""
    begun = threading.Event()

    def work(world: World) -> None:
        model = Counting(2, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        frozen = begun if world.rank == 0 else threading.Event()
        model.register_forward_pre_hook(
            lambda *_: None if model.weight.requires_grad else frozen.set()
        )
        with foreprop.parallelize(model, optimizer, world=world, **APART, staleness="late"):
            for step in range(1, 4):
                model.requires_grad_(True)
                optimizer.zero_grad()
                loss = model(world.rank)
                if world.rank == 1 and step == 3:
                    assert begun.wait(60), "rank 0 waits for it"
                loss.backward()
                optimizer.step()
                if step == 3:
                    model.requires_grad_(False)
                    model(world.rank)
                    with torch._C.DisableTorchFunctionSubclass():
                        assert rows(model.weight) == [3, 3]

    run_cluster(2, work)


@pytest.mark.parametrize("settings", [{}, {"compression": "int8"}], ids=["plain", "encoded"])
def test_all_backward_passes_of_a_step_have_the_same_late_values(settings: dict[str, Any]) -> None:
    """Rank 0 keeps the gradients of step 3, and rank 1 pushes them when step 4 has begun."""
    begun = threading.Event()
    (x, _), *_ = batches_of(1)[0]

    def work(world: World) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        model, optimizer = build_seeded(with_sgd(), seed=world.rank)
        with foreprop.parallelize(
            model, optimizer, world=world, **APART, staleness="late", **settings
        ) as session:
            for step in range(1, 6):
                kept = [parameter.grad for parameter in model.parameters()]
                optimizer.zero_grad()
                losses = [model(x).pow(2).mean(), model(x + 1).pow(2).mean()]
                if world.rank == 1 and step == 3:
                    assert begun.wait(60), "rank 0 waits for it"
                if world.rank == 0 and step == 4:
                    begun.set()
                for loss in losses:
                    loss.backward()
                optimizer.step()
                del kept
        return snapshot(model.state_dict()), session.stats()

    (one, stats), (other, _) = run_cluster(2, work)
    assert stats["late_uses"] >= 1
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_value_that_is_late_is_not_changed_by_hand() -> None:
    """The answer would overwrite the change."""
    changed = threading.Event()

    def work(world: World) -> str:
        model = Counting(2, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with foreprop.parallelize(
            model, optimizer, world=world, **APART, staleness="late"
        ) as session:
            for step in range(1, 4):
                if world.rank == 1 and step == 2:
                    assert changed.wait(60)
                optimizer.zero_grad()
                loss = model(world.rank)
                if world.rank == 0 and step == 3:
                    with torch.no_grad():
                        model.weight += 1
                    changed.set()
                loss.backward()
                optimizer.step()
            session.flush()
        return "nothing"

    with pytest.raises(TrainingLoopError, match="is changed by hand while its update is pending"):
        run_cluster(2, work)


def test_without_a_late_use_the_bits_are_those_of_training_in_step() -> None:
    by_rank = batches_of(2)

    def trained(**settings: Any) -> list[dict[str, torch.Tensor]]:
        def work(world: World) -> dict[str, torch.Tensor]:
            model, optimizer = build_seeded(with_sgd(), seed=world.rank)
            about = {**APART, "update": "servers", **settings}
            with foreprop.parallelize(model, optimizer, world=world, **about) as session:
                for batch in by_rank[world.rank]:
                    train_classifier(model, optimizer, [batch])
                    session.flush()
                assert not session.stats().get("late_uses")
            return snapshot(model.state_dict())

        return run_cluster(2, work)

    for one, other in zip(trained(staleness="late"), trained(), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


OTHERWISE: list[dict[str, Any]] = [
    {"preset": "slicing"},
    {"granularity": "array"},
    {"lanes": "one"},
    {"servers_per_node": 2},
    {"node_rates": "1:0.5"},
    {"reduction": "sum"},
    {"check_stale": True},
    {"staleness": "late", "wire_dtype": "bfloat16"},
    {"staleness": "late", "clip_grad_norm": 1.0, "preset": "kvstore"},
    {"staleness": "late"},
    {"backward_passes": 2},
]


@pytest.mark.parametrize(
    "settings", [OTHERWISE[-1], *(pytest.param(s, marks=LONG) for s in OTHERWISE[:-1])]
)
def test_all_ranks_end_with_the_same_values(settings: dict[str, Any]) -> None:
    """With passes that are accumulated, a schedule of the learning rate, and frozen layers."""
    by_rank = batches_of(3, count=6)
    passes = settings.get("backward_passes", 1)

    def work(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
        model, optimizer = build_seeded(with_sgd(momentum=0.0, lr=0.02), seed=world.rank)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        about = {**APART, "staleness": 2, **settings}
        with foreprop.parallelize(model, optimizer, world=world, **about) as session:
            for step, (x, y) in enumerate(by_rank[world.rank]):
                model[0].requires_grad_(step % 3 != 1)
                optimizer.zero_grad()
                for _ in range(passes):
                    (F.cross_entropy(model(x), y) / passes).backward()
                optimizer.step()
                schedule.step()
                with torch.no_grad():
                    model(x)
            session.flush()
            met = snapshot(model.state_dict())
        return met, snapshot(model.state_dict())

    (expected, _), *_ = found = run_cluster(3, work)
    assert not torch.equal(expected["0.weight"], build_seeded(with_sgd())[0][0].weight)
    for states in found:
        for state in states:
            assert all(torch.equal(value, state[name]) for name, value in expected.items())


def convolutions() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def images(rank: int, count: int, size: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Four kinds of bars in noise."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(count):
        x = torch.randn(size, 1, 8, 8, generator=generator) * 0.5
        y = torch.randint(4, (size,), generator=generator)
        for image, kind in zip(x, y.tolist(), strict=True):
            place = slice(2, 4) if kind % 2 else slice(5, 7)
            (image[0, place] if kind < 2 else image[0].T[place]).add_(1.0)
        found.append((x, y))
    return found


@LONG
def test_a_small_network_learns_as_far_when_workers_are_apart() -> None:
    """40 steps of three workers, of which one is slower: the loss of images that none has seen."""
    unseen = images(99, 1, size=200)[0]

    def learned(staleness: Any) -> float:
        def work(world: World) -> float:
            model, optimizer = build_seeded(convolutions, seed=world.rank)
            about = {**APART, "staleness": staleness}
            with foreprop.parallelize(model, optimizer, world=world, **about) as session:
                for x, y in images(world.rank, 40):
                    if world.rank == 2:
                        time.sleep(0.002)
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                session.flush()
                with torch.no_grad():
                    return float(F.cross_entropy(model(unseen[0]), unseen[1]))

        losses = run_cluster(3, work)
        assert len(set(losses)) == 1
        return losses[0]

    at_first = 1.386  # of four kinds, by chance
    losses = {staleness: learned(staleness) for staleness in (0, 2, "async", "late")}
    assert max(losses.values()) < 0.5 * at_first, losses
    assert max(losses.values()) - min(losses.values()) < 0.2 * at_first, losses


def test_the_pushes_of_a_step_move_averages_as_far_as_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plain loop over all updates, in the order in which the servers have made them."""
    ranks, decay, order = 3, 0.7, list[tuple[int, int, int]]()
    plain_update = SliceStore.update

    def update(self: SliceStore, slice_: int, *about: Any, **more: Any) -> None:
        plain_update(self, slice_, *about, **more)
        order.append((slice_, *more["counted"], more["step"]))

    monkeypatch.setattr(SliceStore, "update", update)

    def work(world: World) -> tuple[list[Any], dict[str, torch.Tensor]]:
        model, optimizer = exact.make()
        settings = {**APART, "staleness": 2, "ema": decay}
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            for batch in exact.batches_of(world.rank):
                time.sleep(0.003 * world.rank)
                optimizer.zero_grad()
                model(*batch).backward()
                optimizer.step()
            session.flush()
            found = session.ema_state_dict()
            session.flush()
            return pieces_of(session), found

    (pieces, first), *others = run_cluster(ranks, work)
    assert len(order) == len(pieces) * ranks * exact.STEPS
    model, _ = exact.make()
    average, _ = exact.make()
    parameters, averages = list(model.parameters()), list(average.parameters())
    with torch.no_grad():
        for slice_, rank, step in order:
            number = pieces[slice_].parameter
            with torch.enable_grad():
                gradients = torch.autograd.grad(
                    model(*exact.batches_of(rank)[step - 1]), parameters
                )
            parameters[number].sub_(gradients[number] / ranks, alpha=exact.LR)
            averages[number].lerp_(parameters[number], 1 - decay ** (1 / ranks))
    check_same_bits(first, average.state_dict())
    for other in others:
        check_same_bits(other[1], first)


def test_bf16_on_the_wire_lands_as_it_is_cast() -> None:
    reads = run_cluster(
        2, lambda world: count(world, 4, 1, lambda step: None, wire_dtype="bfloat16")
    )
    for each in reads:
        assert rows(each[-1]) == [4, 4]


def normed() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_buffers_are_each_ranks_own_between_meetings_and_rank_0s_after() -> None:
    by_rank = batches_of(2)

    def work(world: World) -> list[dict[str, torch.Tensor]]:
        model, optimizer = build_seeded(normed, seed=world.rank)
        with foreprop.parallelize(
            model, optimizer, world=world, **APART, staleness="async"
        ) as session:
            train_classifier(model, optimizer, by_rank[world.rank])
            own = snapshot(model.state_dict())
            session.flush()
            met = snapshot(model.state_dict())
            train_classifier(model, optimizer, by_rank[world.rank])
        return [own, met, snapshot(model.state_dict())]

    first, second = run_cluster(2, work)
    assert not torch.equal(first[0]["1.running_mean"], second[0]["1.running_mean"])
    assert torch.equal(first[0]["1.running_mean"], first[1]["1.running_mean"])
    for at in (1, 2):
        for name, value in first[at].items():
            assert torch.equal(value, second[at][name]), name


def test_optimizer_state_is_saved_between_meetings_and_loaded() -> None:
    (batches,) = batches_of(1)

    def work(world: World) -> tuple[Any, Any]:
        model, optimizer = build_seeded(with_sgd(), seed=world.rank)
        settings = {**APART, "staleness": 2}
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            train_classifier(model, optimizer, batches)
            session.flush()
            saved = snapshot(optimizer.state_dict()), snapshot(model.state_dict())
            session.flush()
        model, optimizer = build_seeded(with_sgd(), seed=world.rank + 5)
        optimizer.load_state_dict(saved[0])
        model.load_state_dict(saved[1])
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            session.flush()
            return saved, (snapshot(optimizer.state_dict()), snapshot(model.state_dict()))

    for saved, loaded in run_cluster(2, work):
        for number, state in saved[0]["state"].items():
            buffer = loaded[0]["state"][number]["momentum_buffer"]
            assert torch.equal(state["momentum_buffer"], buffer)
        assert all(torch.equal(value, loaded[1][name]) for name, value in saved[1].items())


def test_sessions_say_what_they_are(caplog: pytest.LogCaptureFixture) -> None:
    def work(world: World) -> str:
        model, _ = build_seeded(with_sgd(), seed=world.rank)
        optimizer = torch.optim.Adam(model.parameters())
        settings = {**APART, "staleness": 4, "delay_compensation": 0.1}
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            return session.describe()

    caplog.set_level("INFO", logger="foreprop")
    text = run_cluster(2, work)[0]
    assert "staleness=4 delay_compensation=0.1 (not exact: results depend on timing)" in text
    assert text in caplog.text
    assert "each step is 2 updates" in caplog.text
    assert "Adam's updates are not as small as a share of the gradient" in caplog.text


# What goes wrong.
def errors_of(loop: Callable[..., Any], *, ranks: int = 2, **settings: Any) -> list[ForepropError]:
    """Of each rank, when this is its loop: ``loop(session, model, optimizer, step, rank)``."""
    (batches,) = batches_of(1, count=6)
    ended = threading.Barrier(ranks)

    def work(world: World) -> ForepropError | None:
        model, optimizer = build_seeded(with_sgd(), seed=world.rank)
        about = {**APART, "staleness": "async", **settings}

        def step() -> None:
            for x, y in batches[:1]:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        try:  # who begins late may find that the other one has failed
            with foreprop.parallelize(model, optimizer, world=world, **about) as session:
                loop(session, model, optimizer, step, world.rank)
        except ForepropError as error:
            return error
        finally:
            ended.wait(60)
        return None

    found = run_cluster(ranks, work)
    return [error for error in found if error is not None]


def test_ranks_that_are_too_far_apart_cannot_meet() -> None:
    def loop(session: Any, model: Any, optimizer: Any, step: Any, rank: int) -> None:
        for _ in range(2 - 2 * rank):
            step()
        session.flush()

    errors = errors_of(loop, staleness=1)
    assert len(errors) == 2
    assert "flush(): rank 0 has made 2 steps and rank 1 0; with staleness=1 they may be 1" in str(
        errors[0]
    )
    assert errors_of(loop, staleness=2) == []
    assert errors_of(loop, staleness="async") == []


def test_one_rank_cannot_close_while_another_one_flushes() -> None:
    def loop(session: Any, model: Any, optimizer: Any, step: Any, rank: int) -> None:
        step()
        if rank == 0:
            session.flush()

    errors = errors_of(loop)
    assert "rank 1 has called close() and rank 0 flush()" in str(errors[0])
    assert len(errors) == 2


def changed_by_hand(session: Any, model: Any, optimizer: Any, step: Any, rank: int) -> None:
    step()
    session.flush()
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    step()
    step()


def read_after_step(session: Any, model: Any, optimizer: Any, step: Any, rank: int) -> None:
    step()
    step()
    model[0].weight.grad.sum()


def other_rate(session: Any, model: Any, optimizer: Any, step: Any, rank: int) -> None:
    step()
    optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    step()
    step()


@pytest.mark.parametrize(
    ("loop", "told"),
    [
        (changed_by_hand, "was changed by hand by rank"),
        pytest.param(read_after_step, "with staleness there is none; read each rank's", marks=LONG),
        (other_rate, "step 2: lr of parameter group 0 is 0.1 on rank 0 and 0.2 on rank 1"),
    ],
)
def test_a_loop_that_means_all_ranks_together_is_told(loop: Any, told: str) -> None:
    errors = errors_of(loop)
    assert errors
    assert all(isinstance(error, TrainingLoopError) for error in errors)
    assert told in str(errors[0])


def loaded_on_rank_0(session: Any, model: Any, optimizer: Any, step: Any, rank: int) -> None:
    step()
    if rank == 0:
        model.load_state_dict(model.state_dict())
        session.master_state_dict()


def test_a_rank_may_load_and_save_by_itself() -> None:
    assert errors_of(loaded_on_rank_0) == []


def exposed(session: Any, model: Any, optimizer: Any, step: Any, rank: int) -> None:
    for _ in range(3):
        step()
        _ = model[0].weight.data.sum()


def test_values_may_be_looked_at_through_data() -> None:
    assert errors_of(exposed, staleness=1) == []


def edited_through_data(session: Any, model: Any, optimizer: Any, step: Any, rank: int) -> None:
    step()
    model[0].weight.data.mul_(0.5)
    step()
    step()


def test_an_edit_through_data_is_found_on_rank_0() -> None:
    errors = errors_of(edited_through_data)
    assert errors
    assert "0.weight was changed by hand by rank 0 (step 2)" in str(errors[0])


def test_a_rank_that_fails_tells_the_others() -> None:
    def loop(session: Any, model: Any, optimizer: Any, step: Any, rank: int) -> None:
        step()
        if rank == 1:
            raise ForepropError("the disk is full")
        session.flush()

    errors = errors_of(loop)
    assert [("the disk is full" in str(error)) for error in errors] == [True, True]


def test_a_gradient_that_is_not_finite_is_named() -> None:
    def loop(session: Any, model: Any, optimizer: Any, step: Any, rank: int) -> None:
        step()
        if rank == 1:
            model[0].bias.register_hook(lambda gradient: gradient * float("nan"))
        step()
        step()

    errors = errors_of(loop, check_finite=True)
    assert errors
    assert "rank 1" in str(errors[0])
    assert "0.bias" in str(errors[0])


def test_ranks_that_want_different_staleness_do_not_meet() -> None:
    def work(world: World) -> None:
        model, optimizer = build_seeded(with_sgd())
        foreprop.parallelize(model, optimizer, world=world, **APART, staleness=world.rank + 1)

    with pytest.raises(HandshakeError, match=r"knobs.staleness: rank \d has \d, rank \d has"):
        run_cluster(2, work)


# What is refused.


@pytest.mark.parametrize("settings", [{}, {"compression": "lossless"}], ids=["plain", "encoded"])
def test_a_scaler_leaves_out_the_same_steps_with_late_values(settings: dict[str, Any]) -> None:
    """The sums are exact, so a value that is late changes no gradient."""
    broken, steps = {3, 10}, 4 * exact.STEPS

    def loop(model: nn.Module, optimizer: Any, scaler: Any, ranks: Sequence[int]) -> None:
        by_rank = [4 * exact.batches_of(rank) for rank in ranks]
        for step in range(steps):
            optimizer.zero_grad()
            for rank, batches in zip(ranks, by_rank, strict=True):
                factor = torch.inf if step in broken and rank == 0 else 1.0
                loss = model(*batches[step]) * (factor / len(ranks))
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    def make_scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=5)

    def work(world: World) -> tuple[dict[str, torch.Tensor], float]:
        (model, optimizer), scaler = exact.make(), make_scaler()
        about: dict[str, Any] = {**APART, "staleness": "late", "scaler": scaler, **settings}
        with foreprop.parallelize(model, optimizer, world=world, **about):
            loop(model, optimizer, scaler, [world.rank])
            return snapshot(model.state_dict()), scaler.get_scale()

    (model, optimizer), scaler = exact.make(), make_scaler()
    loop(model, optimizer, scaler, [0, 1])
    for found, scale in run_cluster(2, work):
        check_same_bits(found, model.state_dict())
        assert scale == scaler.get_scale()


@pytest.mark.parametrize(
    "settings",
    [
        {"staleness": 2},
        {"staleness": "async", "sparse_parameters": "table.weight"},
        pytest.param({"staleness": 1, "wire_dtype": "bfloat16"}, marks=LONG),
        pytest.param({"staleness": 1, "servers_per_node": 2, "slice_elems": 5}, marks=LONG),
    ],
    ids=str,
)
def test_a_scaler_leaves_out_a_rank_s_own_pushes(settings: dict[str, Any]) -> None:
    """The sums are exact, so who was first changes no bit; each rank has a scale of its own."""
    broken = [{3}, {5, 10}]

    def make_scaler(rank: int) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 - rank), growth_interval=4)

    def step(
        model: Any, optimizer: Any, scaler: Any, batch: exact.Batch, *, is_broken: bool
    ) -> None:
        optimizer.zero_grad()
        scaler.scale(model(*batch) * (torch.inf if is_broken else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()

    def work(world: World) -> tuple[dict[str, torch.Tensor], float]:
        rank = world.rank
        (model, optimizer), scaler = exact.make(), make_scaler(rank)
        about: dict[str, Any] = {**APART, "scaler": scaler, **settings}
        with foreprop.parallelize(model, optimizer, world=world, **about) as session:
            for number, batch in enumerate(2 * exact.batches_of(rank), 1):
                time.sleep(0.004 * rank)
                is_broken = number in broken[rank]
                step(model, optimizer, scaler, batch, is_broken=is_broken)
                norm = session.grad_norm
                assert norm is not None
                assert math.isfinite(norm) != is_broken
            session.flush()
            found = snapshot(model.state_dict())
            session.flush()
            return found, scaler.get_scale()

    wanted, _ = exact.make()
    for rank, (found, scale) in enumerate(both := run_cluster(2, work)):
        check_same_bits(found, both[0][0])
        (model, optimizer), scaler = exact.make(), make_scaler(rank)
        for number, batch in enumerate(2 * exact.batches_of(rank), 1):
            step(model, optimizer, scaler, batch, is_broken=number in broken[rank])
        assert scale == scaler.get_scale()
        with torch.no_grad():
            for value, own, begun in zip(
                wanted.parameters(), model.parameters(), exact.make()[0].parameters(), strict=True
            ):
                value += (own - begun) / 2
    check_same_bits(both[0][0], wanted.state_dict())


@pytest.mark.parametrize("value", ["never", -1, 1.5, True, None])
def test_values_of_staleness_that_cannot_be(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"staleness is {value!r}; it must be"):
        Config(staleness=value)


def test_compensation_needs_a_delay() -> None:
    with pytest.raises(ConfigError, match=r"delay_compensation is 0.1, and staleness is 0"):
        Config(delay_compensation=0.1)


def test_what_an_optimizer_needs_together_is_refused() -> None:
    def work(world: World) -> str:
        model = small_model()
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError) as raised:
            foreprop.parallelize(model, optimizer, world=world, **APART, staleness=1)
        return str(raised.value)

    texts: Sequence[str] = run_cluster(1, work)
    assert "the workers update (servers cannot apply" in texts[0]
    assert "staleness is 1" in texts[0]
