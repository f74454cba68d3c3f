"""A `torch.amp.GradScaler`, against one process with the whole batch: scales, skips, parameters."""

# ruff: noqa: PT012 - it is a loop that goes wrong, with a message of its own
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.engine.world import World
from foreprop.errors import ConfigError, ForepropError, HandshakeError, TrainingLoopError
from tests.cluster import run_cluster, worlds
from tests.conformance.aggregation_runs import LIMIT, MODELS, check_each_step, data_of, values_of
from tests.conformance.matrices import PROTOCOLS, few
from tests.conformance.parity import (
    batches_of,
    build_seeded,
    by_servers,
    check_close,
    check_same_bits,
    make_batches,
    servers_only,
    train_classifier,
    with_sgd,
)
from tests.conformance.scaler_runs import BAD_STEP, alone, make_scaler, together, train
from tests.tiers import long_cases


@pytest.mark.parametrize(("model", "ranks"), few(MODELS, [1, 2, 3]))
def test_a_step_that_is_bad_on_one_rank_is_skipped_on_all(model: str, ranks: int) -> None:
    build, by_rank = data_of(model, ranks)
    values, scales, states = alone(build, by_rank, bad_step=BAD_STEP)
    assert scales == [256, 256, 512, 256, 256]  # grown once, then backed off
    got = together(build, by_rank, bad_rank=ranks - 1)
    check_each_step(got[0], values)
    assert got[1] == scales
    check_same_bits(got[0][BAD_STEP], got[0][BAD_STEP - 1])
    for ours, theirs in zip(got[2], states, strict=True):
        for index, state in theirs.items():
            mine, wanted = ours[index]["momentum_buffer"], state["momentum_buffer"]
            assert torch.allclose(mine, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("model", ["lstm", *long_cases("mlp", "cnn", "tied attention")])
def test_with_clipping_by_norm(model: str) -> None:
    build, by_rank = data_of(model, 2)
    values, scales, _ = alone(build, by_rank, bad_step=BAD_STEP, clip=LIMIT)
    got = together(build, by_rank, bad_rank=0, clip_grad_norm=LIMIT)
    check_each_step(got[0], values)
    assert got[1] == scales


@servers_only
@pytest.mark.parametrize("preset", PROTOCOLS)
def test_every_preset(preset: str) -> None:
    build, by_rank = data_of("lstm", 2)
    values, scales, _ = alone(build, by_rank, bad_step=BAD_STEP)
    got = together(build, by_rank, bad_rank=1, preset=preset, servers_per_node=2)
    check_each_step(got[0], values)
    assert got[1] == scales


def test_averages_move_in_skipped_steps_too() -> None:
    """As they do in a loop that moves them after each scaler.update()."""
    model, optimizer = build_seeded(with_sgd())
    scaler, seen = make_scaler(), []
    with foreprop.parallelize(
        model, optimizer, world=worlds(1)[0], scaler=scaler, ema=0.5
    ) as session:
        for _ in range(2):
            bad_step = len(seen) - 1  # the second time
            train(model, optimizer, scaler, make_batches(1), bad_step=bad_step)
            seen.append((values_of(model), session.ema_state_dict()))
    (values, before), (again, after) = seen
    check_same_bits(again, values)
    for name, average in after.items():
        assert torch.allclose(average, (before[name] + values[name]) / 2)
        assert not torch.equal(average, before[name])


def test_the_norm_is_of_unscaled_gradients() -> None:
    build, norms = with_sgd(), []
    model, optimizer = build_seeded(build)
    F.cross_entropy(model(make_batches(1)[0][0]), make_batches(1)[0][1]).backward()
    wanted = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    model, optimizer = build_seeded(build)
    scaler = make_scaler()
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], scaler=scaler) as session:
        train(model, optimizer, scaler, make_batches(1))
        norms.append(session.grad_norm)
    assert norms == pytest.approx([float(wanted)], rel=1e-5)


def test_one_scaler_for_two_models() -> None:
    batches = make_batches(4)

    def loop(pairs: Any, scaler: torch.amp.GradScaler) -> list[float]:
        scales = []
        for step, (x, y) in enumerate(batches):
            for number, (model, optimizer) in enumerate(pairs):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                bad = (step, number) == (BAD_STEP, 1)
                scaler.scale(loss * torch.inf if bad else loss).backward()
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    plain = [build_seeded(with_sgd(), seed=seed) for seed in range(2)]
    wanted = loop(plain, make_scaler())
    ours, scaler = [build_seeded(with_sgd(), seed=seed) for seed in range(2)], make_scaler()
    world = worlds(1)[0]
    sessions = [foreprop.parallelize(*pair, world=world, scaler=scaler) for pair in ours]
    assert loop(ours, scaler) == wanted
    for session in sessions:  # the first one is closed before the one that came after it
        session.close()
    for (mine, _), (theirs, _) in zip(ours, plain, strict=True):
        check_close(mine.state_dict(), theirs.state_dict())


def test_autocast_to_float16() -> None:
    """The real use: a scale under which float16 overflows is found out on all ranks."""
    by_rank = batches_of(2, count=5)

    def work(world: World) -> tuple[list[float], dict[str, torch.Tensor]]:
        model, optimizer = build_seeded(with_sgd())
        scaler, scales = make_scaler(init_scale=2.0**24), []
        with foreprop.parallelize(model, optimizer, world=world, scaler=scaler):
            for x, y in by_rank[world.rank]:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = F.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            return scales, values_of(model)

    (scales, ours), (others, theirs) = run_cluster(2, work)
    assert scales == others
    assert scales[0] < 2.0**24  # it was skipped
    check_same_bits(ours, theirs)
    assert all(value.isfinite().all() for value in ours.values())


def test_a_scaler_that_is_disabled_changes_nothing() -> None:
    build, by_rank = with_sgd(), make_batches()
    results = []
    for scaler in (torch.amp.GradScaler("cpu", enabled=False), None):
        model, optimizer = build_seeded(build)
        with foreprop.parallelize(model, optimizer, world=worlds(1)[0], scaler=scaler) as session:
            if scaler is None:
                train_classifier(model, optimizer, by_rank)
            else:
                train(model, optimizer, scaler, by_rank)
            assert session.grad_norm is None
            results.append(values_of(model))
    check_same_bits(*results)


# What goes wrong.
@pytest.mark.parametrize("steps", [0, 3])
@by_servers
def test_unscaling_by_hand_is_told_what_to_do(steps: int) -> None:
    model, optimizer = build_seeded(with_sgd())
    scaler = make_scaler()
    with (
        pytest.raises(TrainingLoopError, match="clip_grad_norm=") as told,
        foreprop.parallelize(model, optimizer, world=worlds(1)[0], scaler=scaler),
    ):
        train(model, optimizer, scaler, make_batches(steps))
        train(model, optimizer, scaler, make_batches(1), clip=1.0)
    assert "Leave scaler= out" in str(told.value)


@by_servers
def test_a_scaler_that_was_not_given_to_parallelize() -> None:
    """And that the first step did not use: otherwise workers update."""
    model, optimizer = build_seeded(with_sgd())
    scaler = make_scaler()
    with (
        pytest.raises(TrainingLoopError, match="update='workers'"),
        foreprop.parallelize(model, optimizer, world=worlds(1)[0]),
    ):
        train_classifier(model, optimizer, make_batches(3))
        train(model, optimizer, scaler, make_batches(1))
    assert not {"grad_scale", "found_inf", "_step_supports_amp_scaling"} & set(vars(optimizer))


@by_servers
def test_nor_may_it_unscale() -> None:
    model, optimizer = build_seeded(with_sgd(nesterov=True, fused=True))
    scaler = make_scaler()
    with (
        pytest.raises(TrainingLoopError, match=r"parallelize\(\.\.\., scaler=scaler\)|edited"),
        foreprop.parallelize(model, optimizer, world=worlds(1)[0]),
    ):
        train_classifier(model, optimizer, make_batches(3))
        x, y = make_batches(1)[0]
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    assert vars(optimizer)["_step_supports_amp_scaling"] is True  # of a fused optimizer


@by_servers
def test_a_step_past_the_scaler() -> None:
    model, optimizer = build_seeded(with_sgd())
    with (
        pytest.raises(TrainingLoopError, match=r"call scaler\.step\(optimizer\)"),
        foreprop.parallelize(model, optimizer, world=worlds(1)[0], scaler=make_scaler()),
    ):
        train_classifier(model, optimizer, make_batches(1))


def test_two_steps_without_an_update() -> None:
    model, optimizer = build_seeded(with_sgd())
    scaler = make_scaler()
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], scaler=scaler):
        train(model, optimizer, scaler, make_batches(1))
        x, y = make_batches(1)[0]
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"already been called since the last update"):
            scaler.step(optimizer)
        scaler.update()


def test_something_else_than_a_scaler() -> None:
    model, optimizer = build_seeded(with_sgd())
    with pytest.raises(ConfigError, match=r"scaler is a float; it must be a torch\.amp\.Grad"):
        foreprop.parallelize(model, optimizer, world=worlds(1)[0], scaler=2.0)  # type: ignore[arg-type]


@by_servers
def test_a_scaler_on_one_rank_only() -> None:
    def work(world: World) -> None:
        model, optimizer = build_seeded(with_sgd())
        scaler = make_scaler() if world.rank else None
        with foreprop.parallelize(model, optimizer, world=world, scaler=scaler, join_timeout_s=10):
            pass

    with pytest.raises(HandshakeError, match="skip_nonfinite: rank 0 has False, rank 1 has True"):
        run_cluster(2, work)


@by_servers
def test_ranks_with_other_scales() -> None:
    def work(world: World) -> str:
        model, optimizer = build_seeded(with_sgd())
        scaler = make_scaler(init_scale=2.0 ** (3 + world.rank))
        try:
            with foreprop.parallelize(
                model, optimizer, world=world, scaler=scaler, join_timeout_s=10
            ):
                train(model, optimizer, scaler, make_batches(2))
        except ForepropError as error:
            return str(error)
        return "nothing"

    for told in run_cluster(2, work):
        assert "grad_scale" in told
        assert "8.0" in told
        assert "16.0" in told
