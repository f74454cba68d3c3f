"""Checkpoints are ordinary PyTorch (issue point 7)."""

# ruff: noqa: PT012 - it is a loop that goes wrong, with a message of its own
from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import foreprop
from foreprop.engine.world import World
from foreprop.errors import TrainingLoopError
from tests.cluster import run_cluster, worlds
from tests.conformance.matrices import few
from tests.conformance.parity import (
    Batch,
    Build,
    batches_of,
    build_seeded,
    by_servers,
    check_same_bits,
    check_same_optimizer_state,
    make_batches,
    run_foreprop,
    run_plain,
    servers_only,
    small_model,
    train_classifier,
    with_sgd,
)
from tests.tiers import long_cases


def _with(cls: Callable[..., torch.optim.Optimizer], **options: Any) -> Build:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model()
        groups = [
            {"params": list(model[:2].parameters()), "lr": 0.03},
            {"params": list(model[2:].parameters())},
        ]
        return model, cls(groups, **options)

    return build


BUILDS: dict[str, Build] = {
    "momentum": _with(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd": _with(torch.optim.SGD, lr=0.1),
    "adam": _with(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adagrad": _with(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "asgd": _with(torch.optim.ASGD, lr=0.05, t0=1),
}
every_build = pytest.mark.parametrize("name", BUILDS)


@pytest.mark.parametrize(("steps", "flush", "name"), few([0, 1, 3], [False, True], BUILDS))
def test_both_state_dicts_are_plain_pytorchs(steps: int, flush: bool, name: str) -> None:
    batches = make_batches(steps)
    plain = run_plain(BUILDS[name], train_classifier, batches)
    model, optimizer = build_seeded(BUILDS[name])
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], slice_elems=9) as session:
        train_classifier(model, optimizer, batches)
        if flush:
            session.flush()
        check_same_bits(model.state_dict(), plain.model)
        check_same_optimizer_state(optimizer.state_dict(), plain.optimizer)
        check_same_optimizer_state(optimizer.state_dict(), plain.optimizer)
        train_classifier(model, optimizer, make_batches(1))


@every_build
def test_alike_on_every_rank(name: str) -> None:
    first, second = run_foreprop(BUILDS[name], train_classifier, batches_of(2), slice_elems=9)
    check_same_bits(second.model, first.model)
    check_same_optimizer_state(second.optimizer, first.optimizer)


def _save(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return file.getvalue()


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, data: bytes) -> None:
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def _resume(
    build: Build, saved: bytes, size: int, when: str, batches: Sequence[Batch], **settings: Any
) -> list[dict[str, torch.Tensor]]:
    """Every rank trains on the same batches, so the world's size does not matter (see the test)."""

    def work(world: World) -> dict[str, torch.Tensor]:
        model, optimizer = build_seeded(build, seed=world.rank + 10)
        if when == "before":
            _load(model, optimizer, saved)
        with foreprop.parallelize(model, optimizer, world=world, **settings):
            if when == "after":
                _load(model, optimizer, saved)
            if when == "pending":
                train_classifier(model, optimizer, make_batches(2, seed=8))
                _load(model, optimizer, saved)
            train_classifier(model, optimizer, batches)
            return copy.deepcopy(dict(model.state_dict()))

    return run_cluster(size, work)


@pytest.mark.parametrize(
    ("size", "when", "name"),
    few(
        [2, *long_cases(1)],
        ["before", "after", "pending"],
        ["momentum", "adam", "adagrad", *long_cases("sgd", "asgd")],
    ),
)
def test_loads_back_with_any_world_size(size: int, when: str, name: str) -> None:
    """Saved by plain PyTorch or by two workers, resumed by one or two.

    Two workers with equal gradients g make (g + g) / 2 = g exactly, so all must end with the same
    bits as plain PyTorch.
    """
    batches = make_batches(6)
    wanted = run_plain(BUILDS[name], train_classifier, batches).model
    model, optimizer = build_seeded(BUILDS[name])
    train_classifier(model, optimizer, batches[:3])
    by_plain = _save(model, optimizer)

    def save(world: World) -> bytes:
        model, optimizer = build_seeded(BUILDS[name])
        with foreprop.parallelize(model, optimizer, world=world, slice_elems=11):
            train_classifier(model, optimizer, batches[:3])
            return _save(model, optimizer)

    by_two = run_cluster(2, save)
    for saved in (by_plain, by_two[1]):
        for got in _resume(BUILDS[name], saved, size, when, batches[3:], slice_elems=7):
            check_same_bits(got, wanted)


def test_plain_pytorch_goes_on_from_a_checkpoint_of_two_workers() -> None:
    batches = make_batches(6)
    build = BUILDS["adam"]

    def save(world: World) -> bytes:
        model, optimizer = build_seeded(build)
        with foreprop.parallelize(model, optimizer, world=world):
            train_classifier(model, optimizer, batches[:3])
            return _save(model, optimizer)

    saved = run_cluster(2, save)[0]
    model, optimizer = build_seeded(build, seed=5)
    _load(model, optimizer, saved)
    train_classifier(model, optimizer, batches[3:])
    check_same_bits(model.state_dict(), run_plain(build, train_classifier, batches).model)


@pytest.mark.parametrize("world_size", [2, *long_cases(1)])
def test_a_resumed_run_is_bit_identical(world_size: int) -> None:
    """Model, optimizer, scheduler and the loader's epoch; real shares of a data set."""
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(
        torch.randn(24, 5, generator=generator), torch.randint(3, (24,), generator=generator)
    )

    def train(world: World, epochs: range, saved: bytes | None) -> tuple[Any, bytes]:
        model, optimizer = build_seeded(BUILDS["adam"], seed=world.rank + 3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        with foreprop.parallelize(model, optimizer, world=world):
            shuffle = world_size > 1  # in a world of one the loader is the user's own
            loader = foreprop.shard(DataLoader(data, batch_size=4, shuffle=shuffle), world=world)
            if saved is not None:
                loaded = torch.load(io.BytesIO(saved), weights_only=True)
                model.load_state_dict(loaded["model"])
                optimizer.load_state_dict(loaded["optimizer"])
                scheduler.load_state_dict(loaded["scheduler"])
                if world_size > 1:
                    loader.set_epoch(loaded["epoch"])
            for _ in epochs:
                train_classifier(model, optimizer, list(loader))
                scheduler.step()
            file = io.BytesIO()
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "epoch": epochs.stop,
                },
                file,
            )
            return copy.deepcopy(dict(model.state_dict())), file.getvalue()

    whole = run_cluster(world_size, lambda world: train(world, range(4), None))
    half = run_cluster(world_size, lambda world: train(world, range(2), None))
    saved = half[-1][1]
    resumed = run_cluster(world_size, lambda world: train(world, range(2, 4), saved))
    for (got, _), (wanted, _) in zip(resumed, whole, strict=True):
        check_same_bits(got, wanted)


def test_loading_an_empty_state_starts_afresh() -> None:
    """As in plain PyTorch: the momentum is gone."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        fresh = copy.deepcopy(optimizer.state_dict())
        train_classifier(model, optimizer, batches[:2])
        optimizer.load_state_dict(fresh)
        train_classifier(model, optimizer, batches[2:])

    batches = make_batches(5)
    for name in ("momentum", "adam", "adagrad"):
        plain = run_plain(BUILDS[name], loop, batches)
        (ours,) = run_foreprop(BUILDS[name], loop, [batches])
        check_same_bits(ours.model, plain.model)
        check_same_optimizer_state(ours.optimizer, plain.optimizer)


def test_loading_changes_the_settings_too() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["lr"] = 0.5
        train_classifier(model, optimizer, batches[:2])
        optimizer.load_state_dict(saved)
        train_classifier(model, optimizer, batches[2:])

    batches = make_batches(5)
    plain = run_plain(BUILDS["momentum"], loop, batches)
    (ours,) = run_foreprop(BUILDS["momentum"], loop, [batches])
    check_same_bits(ours.model, plain.model)


# Copies of everything while updates are pending.
COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "torch.save": lambda model: torch.load(_saved(model), weights_only=False),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize(("steps", "way"), few([0, 1, 3], COPIES))
def test_copies_of_the_model_while_pending(steps: int, way: str) -> None:
    batches = make_batches(steps + 2)
    model, optimizer = build_seeded(with_sgd())
    wanted = run_plain(with_sgd(), train_classifier, batches[:steps]).model
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        train_classifier(model, optimizer, batches[:steps])
        duplicate = COPIES[way](model)
        train_classifier(model, optimizer, batches[steps:])
        check_same_bits(duplicate.state_dict(), wanted)
        assert all(type(p) is nn.Parameter for p in duplicate.parameters())
        assert all(not p._post_accumulate_grad_hooks for p in duplicate.parameters())
        # the copy is an ordinary model: it trains by itself and disturbs nobody
        own = torch.optim.SGD(duplicate.parameters(), lr=0.1, momentum=0.9)
        duplicate.zero_grad()
        train_classifier(duplicate, own, batches[:1])
        duplicate.eval()
        duplicate(batches[0][0])
        everything = run_plain(with_sgd(), train_classifier, batches).model
        check_same_bits(model.state_dict(), everything)


def test_one_parameter_is_saved_while_pending() -> None:
    batches = make_batches(3)
    model, optimizer = build_seeded(with_sgd())
    wanted = run_plain(with_sgd(), train_classifier, batches).model["0.weight"]
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        train_classifier(model, optimizer, batches)
        loaded = torch.load(_saved(model[0].weight), weights_only=True)
        assert type(loaded) is nn.Parameter
        assert torch.equal(loaded, wanted)


def test_state_dict_with_keep_vars() -> None:
    model, optimizer = build_seeded(with_sgd())
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        train_classifier(model, optimizer, make_batches(2))
        kept = model.state_dict(keep_vars=True)
        assert kept["0.weight"] is model[0].weight


@servers_only
@by_servers
def test_the_optimizers_state_is_not_kept_twice() -> None:
    """It lives on the servers; here it is only while state_dict() is made."""
    model, optimizer = build_seeded(BUILDS["adam"])
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        train_classifier(model, optimizer, make_batches(2))
        assert optimizer.state_dict()["state"]
        assert not dict.__len__(optimizer.state)  # len() would have it fetched


@servers_only
def test_what_was_loaded_is_not_kept_when_servers_have_it() -> None:
    model, optimizer = build_seeded(BUILDS["adam"])
    with foreprop.parallelize(
        model, optimizer, world=worlds(1)[0], ema=0.9, update="servers"
    ) as session:
        train_classifier(model, optimizer, make_batches(2))
        saved = copy.deepcopy(optimizer.state_dict())
        averages = session.ema_state_dict()
        loaded = weakref.ref(saved["state"][0]["exp_avg"])
        optimizer.load_state_dict(saved)
        session.load_ema_state_dict(averages)
        check_same_optimizer_state(optimizer.state_dict(), saved)
        del saved
        train_classifier(model, optimizer, make_batches(1))
        gc.collect()
        assert loaded() is None
        assert optimizer.state_dict()["state"][0]["step"] == 3


@pytest.mark.parametrize("what", ["model", "optimizer", "both"])
@by_servers
def test_loading_between_backward_and_step_is_an_error(what: str) -> None:
    model, optimizer = build_seeded(BUILDS["adam"])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with (
        pytest.raises(TrainingLoopError, match=r"Call optimizer.step\(\) first"),
        foreprop.parallelize(model, optimizer, world=worlds(1)[0]),
    ):
        train_classifier(model, optimizer, make_batches(2))
        optimizer.zero_grad()
        model(torch.ones(1, 5)).sum().backward()
        if what != "optimizer":
            model.load_state_dict(saved[0])
        if what != "model":
            optimizer.load_state_dict(saved[1])


@by_servers
def test_loaded_state_is_there_on_every_rank_at_once() -> None:
    """Also while rank 0's is still on its way to the servers."""
    model, optimizer = build_seeded(BUILDS["adagrad"])
    train_classifier(model, optimizer, make_batches(3))
    wanted = copy.deepcopy(optimizer.state_dict())

    def work(world: World) -> list[Any]:
        model, optimizer = build_seeded(BUILDS["adagrad"])
        if world.rank == 0:
            optimizer.load_state_dict(wanted)
        seen = []
        with foreprop.parallelize(model, optimizer, world=world):
            seen.append(copy.deepcopy(optimizer.state_dict()))
            train_classifier(model, optimizer, make_batches(2))
            optimizer.load_state_dict(wanted)
            seen.append(copy.deepcopy(optimizer.state_dict()))
        return seen

    for seen in run_cluster(2, work):
        for state in seen:
            check_same_optimizer_state({**state, "param_groups": wanted["param_groups"]}, wanted)
