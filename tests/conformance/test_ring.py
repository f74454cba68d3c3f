"""What only all-reduce does; the rest of this folder runs with it too (see the Makefile)."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.engine.world import World
from foreprop.errors import (
    ConfigError,
    ForepropError,
    HandshakeError,
    StepTimeout,
    TrainingLoopError,
)
from foreprop.features.collectives.engine import RingEngine
from tests.cluster import run_cluster, worlds
from tests.conformance.parity import (
    Build,
    batches_of,
    build_seeded,
    by_servers,
    check_close,
    check_same_bits,
    make_batches,
    merge,
    run_foreprop,
    run_plain,
    servers_only,
    small_model,
    train_classifier,
    with_sgd,
)
from tests.tiers import long_cases

pytestmark = servers_only  # each test names the architecture that it needs


class OwnSGD(torch.optim.Optimizer):
    """A user's own, which nobody could know."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.scale = 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["norm"] = parameter.grad.norm()  # not element by element
                parameter -= self.scale * group["lr"] * parameter.grad / (1 + state["norm"])


def build_with(cls: Any, make: Any = small_model, **options: Any) -> Build:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make()
        return model, cls(model.parameters(), **options)

    return build


def matrices() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))


OPTIMIZERS = {
    "own": build_with(OwnSGD, lr=0.1),
    "Adafactor": build_with(torch.optim.Adafactor, lr=0.1),
    "Muon": build_with(torch.optim.Muon, matrices, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_that_takes_each_parameter_by_itself(name: str) -> None:
    build, by_rank = OPTIMIZERS[name], batches_of(2)
    plain = run_plain(build, train_classifier, merge(by_rank))
    ones, others = run_foreprop(build, train_classifier, by_rank, architecture="ring")
    check_same_bits(ones.model, others.model)
    check_close(ones.model, plain.model)
    assert ones.optimizer["state"].keys() == plain.optimizer["state"].keys()


@pytest.mark.parametrize("chunk_elems", [7, 1000, *long_cases(1)])
def test_two_ranks_have_the_bits_of_a_server_whatever_the_chunks(chunk_elems: int) -> None:
    by_rank = batches_of(2, count=6)
    build = with_sgd(weight_decay=0.01)
    served = run_foreprop(build, train_classifier, by_rank, architecture="p2p")
    ring = run_foreprop(
        build, train_classifier, by_rank, architecture="ring", chunk_elems=chunk_elems
    )
    for got in ring:
        check_same_bits(got.model, served[0].model)


@pytest.mark.parametrize("chunks_in_flight", [4, *long_cases(1)])
def test_four_ranks_have_the_same_bits_and_train_like_the_whole_batch(
    chunks_in_flight: int,
) -> None:
    by_rank = batches_of(4, count=6)
    plain = run_plain(with_sgd(), train_classifier, merge(by_rank))
    settings = {"chunk_elems": 9, "chunks_in_flight": chunks_in_flight}
    ring = run_foreprop(with_sgd(), train_classifier, by_rank, architecture="ring", **settings)
    for got in ring:
        check_same_bits(got.model, ring[0].model)
        check_close(got.model, plain.model)


class Sometimes(nn.Module):
    """Of its small layers some have a gradient on some ranks only, in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for number, layer in enumerate(self.layers):
            if not number or (self.calls + int(x[0, 0] > 0) * number) % 3:
                x = x + layer(x)
        return x[:, :3]


@pytest.mark.parametrize("settings", [{}, {"wire_dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("update", ["servers", "workers"])
def test_small_parameters_together_have_the_bits_of_each_alone(
    settings: dict[str, Any], update: str
) -> None:
    """Also in steps in which some ranks have no gradient of some of them."""
    build, batches = with_sgd(Sometimes), batches_of(2, count=9)
    about = {"architecture": "ring", "update": update, **settings}
    alone = run_foreprop(build, train_classifier, batches, chunk_elems=8, **about)
    together = run_foreprop(build, train_classifier, batches, chunk_elems=10_000, **about)
    for one, other in zip(alone, together, strict=True):
        check_same_bits(one.model, other.model)


def test_all_ranks_learn_one_planned_order() -> None:
    def work(world: World) -> Any:
        model, optimizer = build_seeded(with_sgd())
        with foreprop.parallelize(
            model, optimizer, world=world, architecture="ring", chunk_elems=4
        ) as session:
            engine = session._training.backends.engines[0]
            assert isinstance(engine, RingEngine)
            train_classifier(model, optimizer, make_batches(3))
            before = engine.ordering.order
            train_classifier(model, optimizer, make_batches(7))
            return before, engine.ordering.order, len(engine.chunks)

    before, order, chunks = zip(*run_cluster(3, work), strict=True)
    assert before == (None, None, None)
    assert order[0] == order[1] == order[2]
    assert sorted(order[0]) == list(range(chunks[0]))


@by_servers
def test_a_rank_that_never_makes_its_step_is_named() -> None:
    done: list[int] = []

    def work(world: World) -> str:
        model, optimizer = build_seeded(with_sgd())
        try:
            with foreprop.parallelize(
                model, optimizer, world=world, architecture="ring", step_timeout_s=3
            ):
                train_classifier(model, optimizer, make_batches(1))
                if world.rank == 1:
                    while not done:
                        time.sleep(0.05)
                    raise KeyError("late")
                train_classifier(model, optimizer, make_batches(2))
        except StepTimeout as error:
            done.append(1)
            return str(error)
        except (KeyError, ForepropError) as error:
            return type(error).__name__
        return "nothing"

    told, _ = run_cluster(2, work)
    about = r"rank 0 waited \d\.\d s \(step_timeout_s\) for parameter 0\.weight, step 2"
    assert re.search(about, told)
    assert "rank 1 has not said what it waits for" in told


@by_servers
def test_a_change_by_hand_on_one_rank_only_is_an_error() -> None:
    def work(world: World) -> None:
        model, optimizer = build_seeded(with_sgd())
        with foreprop.parallelize(
            model, optimizer, world=world, architecture="ring", step_timeout_s=10
        ) as session:
            train_classifier(model, optimizer, make_batches(3))
            session.flush()
            if world.rank == 1:
                with torch.no_grad():
                    model[0].weight.mul_(2)
            train_classifier(model, optimizer, make_batches(2))

    with pytest.raises(TrainingLoopError, match=r"0\.weight was changed by hand .* on 1 of 2 rank"):
        run_cluster(2, work)


def test_ranks_with_other_models_are_told_both_sides() -> None:
    def work(world: World) -> None:
        model = nn.Linear(5, 3 + world.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with foreprop.parallelize(
            model, optimizer, world=world, architecture="ring", join_timeout_s=10
        ):
            pass

    with pytest.raises(HandshakeError, match=r"shape: rank 0 has \(3, 5\), rank 1 has \(4, 5\)"):
        run_cluster(2, work)


@pytest.mark.parametrize(
    ("lr", "settings", "text"),
    [
        ([0.1, 0.2], {}, r"settings\[0\]\.lr: rank 0 has 0\.1, rank 1 has 0\.2"),
        ([0.1, 0.1], {"chunk_elems": 9}, "chunk_elems: rank 0 has [0-9]+, rank 1 has 9"),
        ([0.1, 0.1], {"clip_grad_norm": 1.0}, r"clip_grad_norm: rank 0 has None, rank 1 has 1\.0"),
    ],
)
def test_ranks_with_other_settings_are_told_both_sides(
    lr: list[float], settings: dict[str, Any], text: str
) -> None:
    def work(world: World) -> None:
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr[world.rank])
        own = settings if world.rank else {}
        with foreprop.parallelize(
            model, optimizer, world=world, architecture="ring", join_timeout_s=10, **own
        ):
            pass

    with pytest.raises(HandshakeError, match=f"rank 0 and rank 1 do not agree: .*{text}"):
        run_cluster(2, work)


def test_ranks_with_other_architectures_are_told() -> None:
    def work(world: World) -> None:
        model, optimizer = build_seeded(with_sgd())
        architecture = ["ring", "p2p"][world.rank]
        with foreprop.parallelize(
            model, optimizer, world=world, architecture=architecture, join_timeout_s=10
        ):
            pass

    with pytest.raises(HandshakeError, match="architecture: rank 0 has ring, rank 1 has p2p"):
        run_cluster(2, work)


def test_an_error_in_one_ranks_loop_reaches_the_other() -> None:
    def work(world: World) -> str:
        model, optimizer = build_seeded(with_sgd())
        try:
            with foreprop.parallelize(
                model, optimizer, world=world, architecture="ring", stall_report_s=1
            ):
                train_classifier(model, optimizer, make_batches(2))
                if world.rank == 1:
                    raise KeyError("mine")
                train_classifier(model, optimizer, make_batches(2))
        except (KeyError, ForepropError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    theirs, mine = run_cluster(2, work)
    assert mine == "KeyError: 'mine'"
    assert theirs == "PeerLost: rank 1 ended: KeyError: 'mine'"


@pytest.mark.parametrize("cls", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_refuses_what_it_cannot_apply(cls: Any) -> None:
    model = small_model()
    optimizer = cls(model.parameters(), lr=0.1)
    settings = {"architecture": "ring", "update": "servers"}
    with pytest.raises(ConfigError, match=f"optimizer is {cls.__name__}, which .*; use another"):
        foreprop.parallelize(model, optimizer, world=worlds(1)[0], **settings)


def test_gradients_read_after_the_step_are_averages() -> None:
    batches_of_ranks = [make_batches(1, seed=7 + rank)[0] for rank in range(2)]

    def work(world: World) -> torch.Tensor:
        model, optimizer = build_seeded(with_sgd())
        batches = make_batches(4, seed=world.rank)
        with foreprop.parallelize(model, optimizer, world=world, architecture="ring") as session:
            train_classifier(model, optimizer, batches)
            session.flush()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            x, y = batches_of_ranks[world.rank]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            session.flush()
            copy, _ = build_seeded(with_sgd())
            for parameter, value in zip(copy.parameters(), before, strict=True):
                parameter.data = value
            for x, y in batches_of_ranks:
                (F.cross_entropy(copy(x), y) / 2).backward()
            for parameter, own in zip(model.parameters(), copy.parameters(), strict=True):
                assert parameter.grad is not None
                assert own.grad is not None
                torch.testing.assert_close(parameter.grad, own.grad)
            return model[0].weight.detach().clone()

    ones, others = run_cluster(2, work)
    assert torch.equal(ones, others)
