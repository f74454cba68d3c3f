"""Moving averages kept where the parameters are updated, against those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import foreprop
from foreprop.engine.world import World
from foreprop.errors import ConfigError
from tests.cluster import run_cluster, worlds
from tests.conformance.aggregation_runs import MODELS, PARTITIONS, check_each_step, data_of, train
from tests.conformance.average_runs import DECAY, alone, together
from tests.conformance.matrices import PROTOCOLS, few
from tests.conformance.parity import (
    batches_of,
    build_seeded,
    check_same_bits,
    make_batches,
    merge,
    servers_only,
    small_model,
    train_classifier,
    with_sgd,
)


@pytest.mark.parametrize(("model", "ranks"), few(MODELS, [1, 3]))
def test_averages_are_those_of_one_process(model: str, ranks: int) -> None:
    build, by_rank = data_of(model, ranks)
    wanted = alone(build, merge(by_rank))
    check_each_step(together(build, by_rank), wanted)
    model_, optimizer = build_seeded(build)
    with pytest.raises(AssertionError):  # they are not the parameters
        check_each_step(train(model_, optimizer, merge(by_rank)), wanted)


class Partly(nn.Module):
    """With a buffer, and parameters that are frozen, unused, or used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.frozen, self.unused = (nn.Linear(5, 5) for _ in range(3))
        self.sometimes, self.last = nn.Linear(5, 5), nn.Linear(5, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.frozen(torch.tanh(self.used(x)))
        return self.last(self.sometimes(x) if int(self.calls) == 2 else x)


def test_averages_move_in_every_step_also_of_what_is_not_updated() -> None:
    build, by_rank = with_sgd(Partly), batches_of(2)
    check_each_step(together(build, by_rank), alone(build, merge(by_rank)))


@servers_only
def test_averages_have_the_same_bits_for_every_partition() -> None:
    by_rank = batches_of(2, count=3)
    wanted = together(with_sgd(), by_rank)
    for partition in PARTITIONS:
        for ours, theirs in zip(together(with_sgd(), by_rank, **partition), wanted, strict=True):
            check_same_bits(ours, theirs)


def test_a_ring_has_the_averages_of_servers() -> None:
    by_rank = batches_of(2, count=3)
    served = together(with_sgd(), by_rank, architecture="p2p", clip_grad_norm=0.1)
    ring = together(with_sgd(), by_rank, architecture="ring", clip_grad_norm=0.1)
    for ours, theirs in zip(ring, served, strict=True):
        check_same_bits(ours, theirs)


@pytest.mark.parametrize("preset", PROTOCOLS)
def test_every_preset(preset: str) -> None:
    build, by_rank = data_of("tied attention", 2)
    check_each_step(together(build, by_rank, preset=preset), alone(build, merge(by_rank)))


def test_averages_of_halves_are_in_float32() -> None:
    def make() -> nn.Module:
        return small_model().bfloat16()

    def loop(model: Any, optimizer: Any) -> None:
        train_classifier(model, optimizer, [(x.bfloat16(), y) for x, y in make_batches()])

    model, optimizer = build_seeded(with_sgd(make))
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], ema=DECAY) as session:
        before = session.ema_state_dict()
        loop(model, optimizer)
        averages = session.ema_state_dict()
    assert {value.dtype for value in averages.values()} == {torch.float32}
    assert all(torch.equal(value, before[name].to(value)) for name, value in before.items())
    fine = averages["0.weight"]
    assert not torch.equal(fine, fine.bfloat16().float())


def test_before_the_first_step_they_are_the_parameters_and_the_copy_is_ones_own() -> None:
    model, optimizer = build_seeded(with_sgd())
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], ema=DECAY) as session:
        averages = session.ema_state_dict()
        check_same_bits(averages, model.state_dict())
        for value in averages.values():
            value.zero_()
        assert session.ema_state_dict()["0.weight"].any()
        assert model[0].weight.any()


@pytest.mark.parametrize("loaded_at", ["start", "later"])
def test_a_resumed_run_goes_on_as_if_never_interrupted(loaded_at: str) -> None:
    build = with_sgd()
    by_rank = batches_of(2, count=6)
    wanted = together(build, by_rank)
    kept: dict[int, Any] = {}

    def first(world: World) -> None:
        model, optimizer = build_seeded(build)
        with foreprop.parallelize(model, optimizer, world=world, ema=DECAY) as session:
            train_classifier(model, optimizer, by_rank[world.rank][:3])
            parts = (session.ema_state_dict(), model.state_dict(), optimizer.state_dict())
            kept[world.rank] = copy.deepcopy(parts)

    def second(world: World) -> dict[str, Any]:
        model, optimizer = build_seeded(build, seed=9 + world.rank)
        with foreprop.parallelize(model, optimizer, world=world, ema=DECAY) as session:
            if loaded_at == "later":
                train_classifier(model, optimizer, make_batches(2))
            averages, parameters, state = kept[world.rank]
            model.load_state_dict(parameters)
            optimizer.load_state_dict(state)
            session.load_ema_state_dict(averages)
            check_same_bits(session.ema_state_dict(), averages)
            train_classifier(model, optimizer, by_rank[world.rank][3:])
            return session.ema_state_dict()

    run_cluster(2, first)
    for got in run_cluster(2, second):
        check_same_bits(got, wanted[-1])


def test_what_does_not_fit_is_refused() -> None:
    model, optimizer = build_seeded(with_sgd())
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], ema=DECAY) as session:
        averages = session.ema_state_dict()
        with pytest.raises(ConfigError, match=r"averages have None for 0\.weight"):
            session.load_ema_state_dict({})
        averages["2.bias"] = torch.zeros(2)
        with pytest.raises(ConfigError, match=r"have \(2,\) for 2\.bias; .* of shape \(4,\)"):
            session.load_ema_state_dict(averages)


def test_without_the_setting_there_are_none() -> None:
    model, optimizer = build_seeded(with_sgd())
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]) as session:
        with pytest.raises(ConfigError, match="set their decay"):
            session.ema_state_dict()
        with pytest.raises(ConfigError, match="set their decay"):
            session.load_ema_state_dict({})


def test_the_optimizers_checkpoint_does_not_have_them() -> None:
    states = []
    for settings in ({}, {"ema": DECAY}):
        model, optimizer = build_seeded(with_sgd())
        with foreprop.parallelize(model, optimizer, world=worlds(1)[0], **settings):
            train_classifier(model, optimizer, make_batches())
            states.append(optimizer.state_dict()["state"])
    assert [set(state[0]) for state in states] == [{"momentum_buffer"}] * 2
