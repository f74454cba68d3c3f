"""What happens to the aggregated gradients, against one process with the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.config import Config
from foreprop.engine.world import World
from foreprop.errors import ForepropError, HandshakeError
from tests.cluster import run_cluster
from tests.conformance.aggregation_runs import (
    LIMIT,
    MODELS,
    PARTITIONS,
    Values,
    alone,
    check_each_step,
    data_of,
    scaled_to,
    together,
    wait_for,
)
from tests.conformance.matrices import PROTOCOLS, few
from tests.conformance.parity import (
    Batch,
    batches_of,
    build_seeded,
    by_servers,
    check_same_bits,
    run_foreprop,
    servers_only,
    train_classifier,
    with_sgd,
)
from tests.tiers import long_cases


def differ(a: Values, b: Values) -> bool:
    """So that a setting is known to have had an effect."""
    return any(not torch.allclose(a[-1][name], b[-1][name], rtol=0.01) for name in a[-1])


def clamp(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.02)


@pytest.mark.parametrize(("model", "ranks"), few(MODELS, [1, 2, 3]))
def test_clip_by_value(model: str, ranks: int) -> None:
    build, by_rank = data_of(model, ranks)
    wanted = alone(build, by_rank, clamp)
    assert differ(wanted, alone(build, by_rank, lambda _: None))
    check_each_step(together(build, by_rank, clip_grad_value=0.02), wanted)


@pytest.mark.parametrize(("model", "ranks"), few(MODELS, [1, 2, 3]))
def test_clip_by_norm(model: str, ranks: int) -> None:
    build, by_rank = data_of(model, ranks)
    norms: list[float] = []
    wanted = alone(build, by_rank, scaled_to(LIMIT, norms))
    assert max(norms) > 1.1 * LIMIT
    with pytest.raises(AssertionError):  # it has an effect
        check_each_step(alone(build, by_rank, lambda _: None), wanted)
    check_each_step(together(build, by_rank, clip_grad_norm=LIMIT), wanted)


@pytest.mark.parametrize("model", ["tied attention", *long_cases("mlp", "cnn", "lstm")])
def test_clip_by_norm_without_waiting_after_each_step(model: str) -> None:
    """Gradients and replies overlap with computation, as in a real loop."""
    build, by_rank = data_of(model, 2)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for x, y in list(batches) * 3:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    wanted = alone(build, [list(batches) * 3 for batches in by_rank], scaled_to(LIMIT))
    for got in run_foreprop(build, loop, by_rank, clip_grad_norm=LIMIT):
        check_each_step([got.model], wanted[-1:])


@servers_only
@pytest.mark.parametrize(("servers", "preset"), few([1, 3], PROTOCOLS))
def test_clip_by_norm_with_every_protocol(servers: int, preset: str) -> None:
    build, by_rank = data_of("lstm", 2)
    wanted = alone(build, by_rank, scaled_to(LIMIT))
    settings = {"preset": preset, "servers_per_node": servers, "slice_elems": 40}
    got = together(build, by_rank, clip_grad_norm=LIMIT, **settings)
    check_each_step(got, wanted)


@pytest.mark.parametrize("chunk_elems", [10, *long_cases(1)])
def test_clip_by_norm_in_a_ring_has_the_bits_of_servers(chunk_elems: int) -> None:
    build, by_rank = data_of("lstm", 2)
    served = together(build, by_rank, clip_grad_norm=LIMIT, architecture="p2p")
    ring = together(
        build, by_rank, clip_grad_norm=LIMIT, architecture="ring", chunk_elems=chunk_elems
    )
    for ours, theirs in zip(ring, served, strict=True):
        check_same_bits(ours, theirs)


def test_parameters_that_are_unused_or_frozen_do_not_hold_up_the_norm() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.unused = (nn.Linear(5, 5) for _ in range(3))
            self.sometimes, self.last = nn.Linear(5, 5), nn.Linear(5, 3)
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.frozen(torch.tanh(self.used(x)))
            return self.last(self.sometimes(x) if x[0, 0] > 0 else x)

    build, by_rank = with_sgd(Partly, lr=0.3), batches_of(2, count=5)
    ones, others = run_foreprop(build, train_classifier, by_rank, clip_grad_norm=LIMIT)
    check_same_bits(others.model, ones.model)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_norm_of_the_last_step_can_be_asked_for(ranks: int) -> None:
    build, by_rank = data_of("mlp", ranks)
    wanted: list[float] = []
    alone(build, by_rank, scaled_to(LIMIT, wanted))

    def work(world: World) -> list[float | None]:
        model, optimizer = build_seeded(build, seed=world.rank)
        with foreprop.parallelize(model, optimizer, world=world, clip_grad_norm=LIMIT) as session:
            norms = [session.grad_norm]
            for batch in by_rank[world.rank]:
                train_classifier(model, optimizer, [batch])
                norms.append(session.grad_norm)
        return norms

    for norms in run_cluster(ranks, work):
        assert norms[0] is None
        assert norms[1:] == pytest.approx(wanted, rel=1e-4)


def test_without_clipping_no_norm_is_known() -> None:
    def work(world: World) -> float | None:
        model, optimizer = build_seeded(with_sgd())
        with foreprop.parallelize(model, optimizer, world=world) as session:
            train_classifier(model, optimizer, batches_of(1)[0])
            return session.grad_norm

    assert run_cluster(1, work) == [None]


@pytest.mark.parametrize("model", ["tied attention", *long_cases("mlp", "cnn", "lstm")])
def test_the_sum_of_gradients_is_that_of_a_loss_which_is_a_sum(model: str) -> None:
    build, by_rank = data_of(model, 3)
    build = with_sgd(MODELS[model][0], lr=0.01)
    wanted = alone(build, by_rank, lambda _: None, reduction="sum")
    check_each_step(together(build, by_rank, loss="sum", reduction="sum"), wanted)
    assert differ(wanted, together(build, by_rank, loss="sum"))


def same_everywhere(variants: Sequence[dict[str, Any]], **settings: Any) -> None:
    by_rank = batches_of(2, count=3)
    wanted = together(with_sgd(), by_rank, **settings)
    for variant in variants:
        got = together(with_sgd(), by_rank, **settings, **variant)
        for ours, theirs in zip(got, wanted, strict=True):
            check_same_bits(ours, theirs)


@servers_only
@by_servers
def test_who_holds_up_the_norm_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """The last layer's server has all pushes, and waits for the server of the first one."""
    told: list[str] = []

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 3, bias=False))

    def work(world: World) -> None:
        model, optimizer = build_seeded(with_sgd(make))
        settings = {"clip_grad_norm": 1.0, "step_timeout_s": 3.0, "stall_report_s": 1.0}
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            batches = batches_of(1)[0]
            train_classifier(model, optimizer, batches[:2])
            session.flush()
            if world.rank == 1:
                hook = model[0].weight.register_hook(lambda _: wait_for(told))
                try:
                    train_classifier(model, optimizer, batches[2:3])
                finally:
                    hook.remove()
                return
            x, y = batches[2]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            try:
                str(model[1].weight)
            except ForepropError as error:
                told.append(str(error))
                raise

    with pytest.raises(ForepropError):
        run_cluster(2, work)
    assert "parameter 1.weight, step 3" in told[0]
    assert "server 0 says: 0.weight waits for the push of rank 1" in told[0]
    assert "server 1 says: 1.weight is summed and waits for the global gradient norm" in told[0]
    capfd.readouterr()


@servers_only
@pytest.mark.parametrize("name", ["clip_grad_norm", *long_cases("clip_grad_value")])
def test_clipping_has_the_same_bits_for_every_partition(name: str) -> None:
    same_everywhere(PARTITIONS, **{name: 0.02})


SETTINGS = [
    {"reduction": "sum"},
    {"sparse_reduction": "sum"},
    {"clip_grad_value": 0.5},
    {"clip_grad_norm": 0.5},
    {"ema": 0.9},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: next(iter(setting)))
def test_ranks_that_disagree_are_told_both_values(setting: dict[str, Any]) -> None:
    def work(world: World) -> None:
        model, optimizer = build_seeded(with_sgd())
        settings = setting if world.rank else {}
        with foreprop.parallelize(model, optimizer, world=world, join_timeout_s=10, **settings):
            train_classifier(model, optimizer, batches_of(1)[0])

    ((name, value),) = setting.items()
    default = getattr(Config(), name)
    with pytest.raises(HandshakeError, match=rf"aggregation\.{name}: .*{default!r}.*{value!r}"):
        run_cluster(2, work)


@servers_only
@pytest.mark.parametrize("local_size", [1, 2])
def test_servers_tell_the_norm_between_machines_only(local_size: int) -> None:
    """Within one there is no link to hide averages behind; the bits are the same."""

    def work(world: World) -> tuple[bool, Values]:
        model, optimizer = build_seeded(with_sgd())
        with foreprop.parallelize(model, optimizer, world=world) as session:
            for x, y in batches_of(2, count=20)[world.rank]:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
            told = session._training.backends.measures_norm
            return told, [{name: p.detach().clone() for name, p in model.named_parameters()}]

    (told, values), _ = run_cluster(2, work, local_size=local_size)
    assert told == (local_size == 1)
    (_, elsewhere), _ = run_cluster(2, work, local_size=3 - local_size)
    check_same_bits(values[0], elsewhere[0])
