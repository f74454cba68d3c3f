"""The global gradient norm of dense and row-wise parameters together: clipping and GradScaler.

Against one process with the whole batch, and with dense gradients where torch clips no sparse ones.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.engine.world import World
from foreprop.errors import ForepropError
from tests.cluster import run_cluster, worlds
from tests.conformance import scaler_runs
from tests.conformance.aggregation_runs import (
    Values,
    alone,
    check_each_step,
    scaled_to,
    together,
    wait_for,
)
from tests.conformance.matrices import few
from tests.conformance.parity import (
    Batch,
    build_seeded,
    check_close,
    check_same_bits,
    merge,
    run_foreprop,
    servers_only,
    train_classifier,
)
from tests.conformance.scaler_runs import BAD_STEP
from tests.conformance.sparse_models import (
    ROWS,
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

LIMIT = 0.1
"""For the norm; below what the models here begin with."""
Make = Callable[..., nn.Module]


def clipped_alone(make: Make, cls: Any, by_rank: Sequence[Sequence[Batch]]) -> Values:
    return alone(with_optimizer(lambda: make(sparse=False), cls), by_rank, scaled_to(LIMIT))


@pytest.mark.parametrize(
    ("make", "cls", "count", "architecture"),
    few([Words, Bags, Pairs], [torch.optim.SGD, torch.optim.Adagrad], [1, 3], SERVED),
)
def test_clip_by_norm(make: Make, cls: Any, count: int, architecture: str) -> None:
    by_rank = ranks(count)
    wanted = clipped_alone(make, cls, by_rank)
    if cls is torch.optim.SGD:  # to Adagrad's first step a factor means nothing
        with pytest.raises(AssertionError):
            check_each_step(alone(with_optimizer(make), by_rank, lambda _: None), wanted)
    build = with_optimizer(make, cls)
    got = together(build, by_rank, clip_grad_norm=LIMIT, architecture=architecture)
    check_each_step(got, wanted)


@pytest.mark.parametrize("architecture", ["hybrid", *long_cases("p2p")])
def test_without_waiting_after_each_step(architecture: str) -> None:
    """Gradients, rows and replies overlap with computation, as in a real loop."""
    by_rank = [words_of(seed, 12) for seed in range(2)]
    wanted = clipped_alone(Words, torch.optim.SGD, by_rank)
    settings = {"architecture": architecture, "clip_grad_norm": LIMIT}
    for got in run_foreprop(with_optimizer(Words), train_classifier, by_rank, **settings):
        check_each_step([got.model], wanted[-1:])


@pytest.mark.parametrize(
    "settings",
    [
        {"architecture": "hybrid", "chunk_elems": 10, "servers_per_node": 3, "slice_elems": 7},
        *long_cases({"servers_per_node": 3, "slice_elems": 7}),
        *long_cases({"servers_per_node": 2, "slice_elems": 10_000}),
        *long_cases({"architecture": "hybrid", "chunk_elems": 1}),
        *long_cases(
            {"architecture": "hybrid", "chunk_elems": 10, "servers_per_node": 2, "slice_elems": 12}
        ),
    ],
    ids=str,
)
def test_partitions_and_architectures_have_the_same_bits(settings: dict[str, Any]) -> None:
    by_rank = ranks(2)
    build = with_optimizer(Words, torch.optim.Adagrad)
    wanted = together(build, by_rank, clip_grad_norm=LIMIT)
    got = together(build, by_rank, clip_grad_norm=LIMIT, **settings)
    for ours, theirs in zip(got, wanted, strict=True):
        check_same_bits(ours, theirs)


@pytest.mark.parametrize("preset", ["kvstore", "tensorflow", *long_cases("slicing", "wfbp")])
def test_every_preset(preset: str) -> None:
    by_rank = ranks(2)
    got = together(with_optimizer(Words), by_rank, clip_grad_norm=LIMIT, preset=preset)
    check_each_step(got, clipped_alone(Words, torch.optim.SGD, by_rank))


@pytest.mark.parametrize(
    "settings", [{"servers_per_node": 2}, *long_cases({}, {"architecture": "hybrid"})]
)
def test_the_norm_is_of_all_parameters_and_the_same_on_all_ranks(settings: dict[str, Any]) -> None:
    by_rank = ranks(3)
    wanted: list[float] = []
    dense = with_optimizer(lambda: Words(sparse=False))
    alone(dense, by_rank, scaled_to(LIMIT, wanted))

    def work(world: World) -> list[float | None]:
        model, optimizer = build_seeded(with_optimizer(Words), seed=world.rank)
        settings_ = {"clip_grad_norm": LIMIT, **settings}
        with foreprop.parallelize(model, optimizer, world=world, **settings_) as session:
            norms = [session.grad_norm]
            for batch in by_rank[world.rank]:
                train_classifier(model, optimizer, [batch])
                norms.append(session.grad_norm)
        return norms

    first, *others = run_cluster(3, work)
    assert others == [first, first]
    assert first[0] is None
    assert first[1:] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("architecture", ["hybrid", *long_cases("p2p")])
def test_tables_that_nobody_looks_into_do_not_hold_up_the_norm(architecture: str) -> None:
    """In one step on one rank, in another on none; and one that is never used, or frozen."""

    class Sometimes(nn.Module):
        def __init__(self, *, sparse: bool = True) -> None:
            super().__init__()
            self.words = Words(sparse=sparse)
            self.unused, self.frozen = (nn.Embedding(2, 2, sparse=sparse) for _ in range(2))
            self.frozen.weight.requires_grad_(False)

    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> Values:
        values = []
        for words, labels in batches:
            optimizer.zero_grad()
            if (words >= 0).all():
                F.cross_entropy(model.words(words), labels).backward()
            optimizer.step()
            values.append(copy.deepcopy(model.state_dict()))
        return values

    def halved(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> Values:
        values = []
        for number, (words, labels) in enumerate(batches):
            optimizer.zero_grad()
            share = (1.0, 0.5, 0.0, 1.0)[number]
            if share:
                rows = slice(None, 5) if share < 1 else slice(None)
                (share * F.cross_entropy(model.words(words[rows]), labels[rows])).backward()
                nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            values.append(copy.deepcopy(model.state_dict()))
        return values

    by_rank = ranks(2)
    nothing = torch.full((5, 4), -1)
    by_rank[1][1] = (nothing, by_rank[1][1][1])
    by_rank[0][2], by_rank[1][2] = ((nothing, by_rank[rank][2][1]) for rank in (0, 1))
    settings = {"clip_grad_norm": LIMIT, "architecture": architecture, "servers_per_node": 2}
    ones, others = run_foreprop(with_optimizer(Sometimes), loop, by_rank, **settings)
    model, optimizer = build_seeded(with_optimizer(lambda: Sometimes(sparse=False)))
    check_each_step(ones.result, halved(model, optimizer, merge(by_rank)))
    check_same_bits(others.model, ones.model)


@pytest.mark.parametrize("architecture", ["hybrid", *long_cases("p2p")])
def test_dense_parameters_without_elements(architecture: str) -> None:
    class Empty(Bags):
        def __init__(self, *, sparse: bool = True) -> None:
            super().__init__(sparse=sparse)
            self.nothing = nn.Parameter(torch.empty(0))

    wanted = clipped_alone(Empty, torch.optim.SGD, ranks(2))
    settings = {"clip_grad_norm": LIMIT, "architecture": architecture}
    check_each_step(together(with_optimizer(Empty), ranks(2), **settings), wanted)


@pytest.mark.parametrize("architecture", ["p2p", *long_cases("hybrid")])
def test_half_precision(architecture: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Words().bfloat16()
        return model, torch.optim.Adagrad(model.parameters(), lr=0.3)

    values = together(build, ranks(2), clip_grad_norm=LIMIT, architecture=architecture)
    assert values[-1]["table.weight"].isfinite().all()


@pytest.mark.parametrize(
    ("count", "make", "architecture"),
    few([1, 2], [Words, Pairs], SERVED),  # there is nothing else to wait for in Pairs
)
def test_the_optimizer_s_state_is_that_after_the_last_step(
    count: int, make: Make, architecture: str
) -> None:
    """Its rows have been updated when the norm is known, not when they have been pushed."""

    def states(
        model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], edit: Any
    ) -> list[dict[str, torch.Tensor]]:
        found = []
        for words, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(words), labels).backward()
            edit(model)
            optimizer.step()
            state = optimizer.state_dict()["state"][0]
            found.append({name: torch.as_tensor(state[name]).clone() for name in ("step", "sum")})
        return found

    def loop(model: Any, optimizer: Any, batches: Sequence[Batch]) -> Any:
        return states(model, optimizer, batches, lambda _: None)

    by_rank = ranks(count)
    model, optimizer = build_seeded(with_optimizer(lambda: make(sparse=False), torch.optim.Adagrad))
    wanted = states(model, optimizer, merge(by_rank), scaled_to(LIMIT))
    settings = {"clip_grad_norm": LIMIT, "architecture": architecture}
    build = with_optimizer(make, torch.optim.Adagrad)
    for trained in run_foreprop(build, loop, by_rank, **settings):
        for got, theirs in zip(trained.result, wanted, strict=True):
            check_close(got, theirs)


class Scaled(nn.Module):
    """In the backward pass the table's gradient is ready first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 3, sparse=True)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scale = self.scale.tanh()
        return (self.table(words) * scale).mean(1)


def told_while_waiting(
    make: Callable[[], nn.Module],
    late: Callable[[Any], torch.Tensor],
    use: Callable[[Any], object],
    **settings: Any,
) -> str:
    """The error of rank 0 that uses something while rank 1 does not get past ``late``."""
    told: list[str] = []

    def work(world: World) -> None:
        model, optimizer = build_seeded(with_optimizer(make))
        options = {"clip_grad_norm": 1.0, "step_timeout_s": 3.0, "stall_report_s": 1.0, **settings}
        with foreprop.parallelize(model, optimizer, world=world, **options) as session:
            train_classifier(model, optimizer, words_of(0, 2))
            session.flush()
            words, labels = words_of(0, 1)[0]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(words), labels)
            if world.rank == 1:
                late(model).register_hook(lambda _: wait_for(told))
            loss.backward()
            optimizer.step()
            try:
                use(model)
            except ForepropError as error:
                told.append(str(error))
                raise

    with pytest.raises(ForepropError):
        run_cluster(2, work)
    return told[0]


@pytest.fixture(autouse=True)
def _quiet(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Reports of stalls are expected."""
    yield
    capfd.readouterr()


def test_slices_that_wait_for_rows_say_so() -> None:
    told = told_while_waiting(
        Words, lambda model: model.table.weight, lambda model: str(model.out.weight)
    )
    assert "parameter out.weight, step 3" in told
    assert re.search(
        r"server \d says: out\.weight is summed and waits for .*: 1 of 2 are done;"
        r" the update of the rows of table\.weight waits for the push of rank 1",
        told,
    )


def test_rows_that_wait_for_slices_say_so() -> None:
    told = told_while_waiting(
        Scaled, lambda model: model.scale, lambda model: model.table(torch.tensor([0]))
    )
    assert "1 row of table.weight as of step 3" in told
    assert "server 0 says: the rows of table.weight are summed and wait for" in told
    assert "scale waits for the push of rank 1" in told


def test_rows_that_wait_for_a_collective_say_so() -> None:
    told = told_while_waiting(
        Scaled,
        lambda model: model.scale,
        lambda model: model.table(torch.tensor([0])),
        architecture="hybrid",
    )
    assert "wait for the global gradient norm of step 3, which rank 0 adds up" in told
    assert "the collective of scale, step 3 is under way" in told
    assert "rank 1 has not said what it waits for" in told


# A GradScaler.
@pytest.mark.parametrize(
    ("kind", "count", "architecture"),
    few(
        [
            (Words, torch.optim.Adagrad),
            (Pairs, torch.optim.SparseAdam),
            *long_cases((Words, torch.optim.SGD)),
        ],
        [3, 1],
        SERVED,
    ),
)
def test_a_step_that_is_bad_on_one_rank_is_skipped_on_all(
    kind: Any, count: int, architecture: str
) -> None:
    make, cls = kind
    build, by_rank = with_optimizer(make, cls), ranks(count)
    values, scales, states = scaler_runs.alone(build, by_rank, bad_step=BAD_STEP)
    got = scaler_runs.together(
        build, by_rank, bad_rank=count - 1, architecture=architecture, servers_per_node=2
    )
    check_each_step(got[0], values)
    assert got[1] == scales == [256, 256, 512, 256, 256]
    check_same_bits(got[0][BAD_STEP], got[0][BAD_STEP - 1])
    for ours, theirs in zip(got[2], states, strict=True):
        if cls is not torch.optim.SGD:
            assert ours[0]["step"] == theirs[0]["step"]


@pytest.mark.parametrize("architecture", ["hybrid", *long_cases("p2p")])
def test_with_clipping_by_norm(architecture: str) -> None:
    by_rank = ranks(2)
    dense = with_optimizer(lambda: Words(sparse=False))
    values, scales, _ = scaler_runs.alone(dense, by_rank, bad_step=BAD_STEP, clip=LIMIT)
    settings = {"clip_grad_norm": LIMIT, "architecture": architecture}
    got = scaler_runs.together(with_optimizer(Words), by_rank, bad_rank=0, **settings)
    check_each_step(got[0], values)
    assert got[1] == scales


# Chosen by measurement.
@pytest.mark.usefixtures("told_links")
def test_auto_clips_before_and_after_its_choice() -> None:
    by_rank = [words_of(seed, 8) for seed in range(2)]

    def make(*, sparse: bool = True) -> nn.Module:
        model = Two(sparse=(sparse, False))
        model.norm = nn.Identity()  # so that one process with the whole batch can be compared
        return model

    got = together(with_optimizer(make), by_rank, clip_grad_norm=LIMIT, architecture="auto")
    check_each_step(got, clipped_alone(make, torch.optim.SGD, by_rank))


@pytest.mark.usefixtures("told_links")
@pytest.mark.parametrize("bad_step", [2, 3])  # it chooses after the third
def test_auto_tells_the_scaler_of_the_step_after_which_it_chose(bad_step: int) -> None:
    by_rank = [words_of(seed, 6) for seed in range(2)]

    def make() -> nn.Module:
        model = Two(sparse=(False, False))
        model.norm = nn.Identity()
        return model

    build = with_optimizer(make)
    wanted = scaler_runs.alone(build, by_rank, bad_step=bad_step)

    def work(world: World) -> scaler_runs.Run:
        model, optimizer = build_seeded(build, seed=world.rank)
        scaler = scaler_runs.make_scaler()
        bad = bad_step if world.rank == 1 else -1
        batches = by_rank[world.rank]
        with foreprop.parallelize(
            model, optimizer, world=world, scaler=scaler, architecture="auto"
        ) as session:
            run = scaler_runs.train(model, optimizer, scaler, batches, bad_step=bad)
            assert any(info.rows for info in session._training.infos)
        return run

    for got in run_cluster(2, work):
        check_each_step(got[0], wanted[0])
        assert got[1] == wanted[1]


def test_a_world_of_one_is_as_alone() -> None:
    """With limits that are never reached the bits are those without a norm."""
    build, batches = with_optimizer(Words, torch.optim.Adagrad), words_of(0)
    wanted = run_foreprop(build, train_classifier, [batches])[0]
    for architecture in SERVED:
        model, optimizer = build_seeded(build)
        settings = {"clip_grad_norm": 1e9, "architecture": architecture}
        with foreprop.parallelize(model, optimizer, world=worlds(1)[0], **settings):
            train_classifier(model, optimizer, batches)
            check_same_bits(copy.deepcopy(model.state_dict()), wanted.model)
