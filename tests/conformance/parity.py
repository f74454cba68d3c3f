"""Trains the same thing with foreprop and with plain PyTorch, and compares the bits.

``build()`` makes a model and its optimizer, ``loop(model, optimizer, batches)`` is a user's
training loop that knows nothing of foreprop. Every rank but 0 starts from other random weights, so
that each comparison also shows that rank 0's became everybody's.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.config import Config
from foreprop.engine.world import World
from tests.cluster import run_cluster, worlds

torch.set_num_threads(1)

in_a_ring = Config.resolve().architecture == "ring"
"""`make test-all` runs this folder once more, with FOREPROP_ARCHITECTURE=ring."""
servers_only = pytest.mark.skipif(in_a_ring, reason="about servers; this run is with a ring")
once = pytest.mark.skipif(in_a_ring, reason="names its architecture, and has run with it")

by_servers = pytest.mark.usefixtures("servers_update")
"""About servers that update: the test's sessions have ``update="servers"``, if they say nothing."""

Batch = tuple[torch.Tensor, ...]
Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
Loop = Callable[[nn.Module, torch.optim.Optimizer, Sequence[Batch]], Any]

_building = threading.Lock()  # torch's random numbers belong to the process, not to a rank


@dataclass
class Trained:
    """What a run has left: copies of the checkpoints, the loop's result, the session's totals."""

    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    result: Any
    stats: dict[str, Any]


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """What is drawn meanwhile is the same each time, also where ranks are threads."""
    with _building:
        torch.manual_seed(seed)
        yield


def build_seeded(build: Build, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    with seeded(seed):
        return build()


def make_batches(
    count: int = 4, size: int = 6, features: int = 5, classes: int = 3, seed: int = 1
) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, features, generator=generator),
            torch.randint(classes, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def batches_of(ranks: int, **options: Any) -> list[list[Batch]]:
    return [make_batches(seed=rank + 1, **options) for rank in range(ranks)]


def merge(by_rank: Sequence[Sequence[Batch]]) -> list[Batch]:
    """The N-fold batches that one process would train on."""
    return [
        tuple(torch.cat(parts) for parts in zip(*step, strict=True))
        for step in zip(*by_rank, strict=True)
    ]


def train_classifier(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 3))


def with_sgd(make: Callable[[], nn.Module] = small_model, **options: Any) -> Build:
    settings = {"lr": 0.1, "momentum": 0.9, **options}

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make()
        return model, torch.optim.SGD(model.parameters(), **settings)

    return build


def snapshot(values: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(dict(values))


def run_plain(build: Build, loop: Loop, batches: Sequence[Batch]) -> Trained:
    model, optimizer = build_seeded(build)
    result = loop(model, optimizer, batches)
    return Trained(snapshot(model.state_dict()), snapshot(optimizer.state_dict()), result, {})


def run_rank(
    world: World, build: Build, loop: Loop, batches: Sequence[Batch], **settings: Any
) -> Trained:
    model, optimizer = build_seeded(build, seed=world.rank)
    before = traces_of(model, optimizer)
    with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
        result = loop(model, optimizer, batches)
        trained = Trained(
            snapshot(model.state_dict()), snapshot(optimizer.state_dict()), result, session.stats()
        )
    after = traces_of(model, optimizer)
    assert after[:2] == before[:2]
    if world.size == 1:  # otherwise other ranks' sessions may still be open
        assert after[2] == before[2]
    else:
        assert after[2][:4] == before[2][:4]
    return trained


def run_foreprop(
    build: Build,
    loop: Loop,
    by_rank: Sequence[Sequence[Batch]],
    *,
    local_size: int = 1,
    **settings: Any,
) -> list[Trained]:
    """One run per rank; a world of one runs in the calling thread."""
    if len(by_rank) == 1:
        return [run_rank(worlds(1)[0], build, loop, by_rank[0], **settings)]
    return run_cluster(
        len(by_rank),
        lambda world: run_rank(world, build, loop, by_rank[world.rank], **settings),
        local_size=local_size,
    )


def traces_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All that a session changes on the user's objects, to be compared afterwards."""
    modules = [
        [
            len(hooks)
            for hooks in (
                module._forward_pre_hooks,
                module._forward_hooks,
                module._state_dict_pre_hooks,
                module._load_state_dict_pre_hooks,
            )
        ]
        for module in model.modules()
    ]
    parameters = [
        (name, type(p), len(p._post_accumulate_grad_hooks or ()))
        for name, p in model.named_parameters()
    ]
    hooks = [
        len(optimizer._optimizer_state_dict_pre_hooks),
        len(optimizer._optimizer_state_dict_post_hooks),
        len(optimizer._optimizer_load_state_dict_post_hooks),
        "zero_grad" in vars(optimizer),
        torch.autograd.backward,
        torch.autograd.grad,
    ]
    return [modules, parameters, hooks]


def check_same_bits(
    got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], *, skip: str = "\0"
) -> None:
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        if skip not in name:
            assert got[name].dtype == value.dtype, name
            assert got[name].shape == value.shape, name
            assert torch.equal(got[name], value), f"{name} differs: {got[name]} and {value}"


def check_close(
    got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], *, skip: str = "\0"
) -> None:
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        if skip not in name:
            torch.testing.assert_close(got[name], value, rtol=2e-4, atol=2e-5)


def check_same_optimizer_state(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Two optimizers' state_dict(): same keys, types, shapes, bits and parameter groups."""
    assert got["param_groups"] == wanted["param_groups"]
    assert got["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        ours = got["state"][index]
        assert ours.keys() == state.keys()
        for key, value in state.items():
            assert type(ours[key]) is type(value), (index, key)
            if isinstance(value, torch.Tensor):
                assert ours[key].dtype == value.dtype, (index, key)
                assert ours[key].shape == value.shape, (index, key)
                assert torch.equal(ours[key], value), (index, key)
            else:
                assert ours[key] == value, (index, key)


def check_world_of_one(
    build: Build, loop: Loop, batches: Sequence[Batch], **settings: Any
) -> Trained:
    """Bit-identical to plain PyTorch: parameters, buffers, optimizer state, the loop's result."""
    plain = run_plain(build, loop, batches)
    (ours,) = run_foreprop(build, loop, [batches], **settings)
    check_same_bits(ours.model, plain.model)
    check_same_optimizer_state(ours.optimizer, plain.optimizer)
    if plain.result is not None:
        assert ours.result == plain.result
    return ours


def check_world_of_two(
    build: Build,
    loop: Loop,
    by_rank: Sequence[Sequence[Batch]],
    *,
    skip: str = "\0",
    **settings: Any,
) -> list[Trained]:
    """All ranks end with the same bits, which are close to one process's with all the data."""
    plain = run_plain(build, loop, merge(by_rank))
    ours = run_foreprop(build, loop, by_rank, **settings)
    for other in ours[1:]:
        check_same_bits(other.model, ours[0].model)
    check_close(ours[0].model, plain.model, skip=skip)
    return ours


def check_both(
    build: Build, loop: Loop, by_rank: Sequence[Sequence[Batch]], *, skip: str = "\0"
) -> None:
    check_world_of_one(build, loop, by_rank[0])
    check_world_of_two(build, loop, by_rank, skip=skip)
