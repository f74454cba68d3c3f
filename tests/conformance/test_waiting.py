"""The waiting parameter is still the user's parameter (lab/docs/internals.md)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.engine.world import World
from foreprop.params.waiting import is_waiting
from tests.cluster import run_cluster, worlds
from tests.conformance.parity import (
    build_seeded,
    make_batches,
    run_plain,
    servers_only,
    train_classifier,
    with_sgd,
)


@pytest.fixture
def pending() -> Iterator[tuple[nn.Module, nn.Parameter, torch.Tensor]]:
    """A model right after a step, one of its waiting parameters, and the value that it gets.

    Its parameters go alone: slices and chunks are too small to be shared.
    """
    batches = make_batches(3)
    wanted = run_plain(with_sgd(), train_classifier, batches).model["0.weight"]
    model, optimizer = build_seeded(with_sgd())
    alone = {"slice_elems": 3, "chunk_elems": 3}
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], **alone):
        train_classifier(model, optimizer, batches)
        yield model, model[0].weight, wanted


WITHOUT_WAITING: dict[str, Callable[[Any], Any]] = {
    "shape": lambda p: p.shape == (7, 5),
    "dtype": lambda p: p.dtype == torch.float32,
    "device": lambda p: p.device.type == "cpu",
    "requires_grad": lambda p: p.requires_grad,
    "grad": lambda p: p.grad.shape == (7, 5),
    "is_leaf": lambda p: p.is_leaf,
    "numel": lambda p: p.numel() == 35,
    "size": lambda p: p.size() == (7, 5) and p.size(0) == 7,
    "dim": lambda p: p.dim() == p.ndim == 2,
    "stride": lambda p: p.stride() == (5, 1),
    "is_contiguous": lambda p: p.is_contiguous(),
    "element_size": lambda p: p.element_size() == p.itemsize == 4,
    "len": lambda p: len(p) == 7,
    "isinstance": lambda p: isinstance(p, nn.Parameter) and isinstance(p, torch.Tensor),
    "hash": lambda p: hash(p) == id(p),
    "in a list": lambda p: p in [p],
    "in a set": lambda p: p in {p},
    "is_floating_point": lambda p: p.is_floating_point(),
    "set grad": lambda p: setattr(p, "grad", p.grad) is None,
    "requires_grad_": lambda p: p.requires_grad_() is p,
}


@pytest.mark.parametrize("name", WITHOUT_WAITING)
def test_does_not_wait(name: str, pending: Any) -> None:
    _, parameter, _ = pending
    assert WITHOUT_WAITING[name](parameter)
    assert is_waiting(parameter)


WITH_WAITING: dict[str, Callable[[Any], Any]] = {
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "item": lambda p: torch.tensor([[x.item() for x in row] for row in p]),
    "index": lambda p: p[:],
    "deepcopy": copy.deepcopy,
    "cpu": lambda p: p.cpu(),
    "to": lambda p: p.to(torch.float64).float(),
    "stack of a list": lambda p: torch.stack([p, p])[0],
    "foreach": lambda p: torch._foreach_add([p], 0)[0],
    "keyword": lambda p: F.linear(torch.eye(5), weight=p).t(),
    "nested keyword": lambda p: torch.cat(tensors=[p]),
    "functional": lambda p: torch.func.functional_call(
        nn.Linear(5, 7, bias=False), {"weight": p}, (torch.eye(5),)
    ).t(),
    "view": lambda p: p.view(-1).view(7, 5),
    "unbind": lambda p: torch.stack(p.unbind()),
    "iter": lambda p: torch.stack(list(p)),
    "operator": lambda p: 0 + p,
    "data_ptr": lambda p: (p.data_ptr(), p)[1],
    "storage": lambda p: (p.untyped_storage(), p)[1],
    "equal": lambda p: (torch.equal(p, p), p)[1],
    "repr": lambda p: (repr(p), p)[1],
    "vector": lambda p: nn.utils.parameters_to_vector([p]).view(7, 5),
    "out": lambda p: torch.add(p, 0, out=torch.empty(7, 5)),
    "copy_": lambda p: torch.empty(7, 5).copy_(p),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "func.vmap": lambda p: torch.func.vmap(lambda row: row * 1)(p),
    "func.grad": lambda p: torch.func.grad(lambda q: (q * q / 2).sum())(p),
    "func.vjp": lambda p: torch.func.vjp(lambda q: q * 1, p)[0],
    "func.functionalize": lambda p: torch.func.functionalize(lambda q: q * 1)(p),
}


@pytest.mark.parametrize("name", WITH_WAITING)
def test_waits(name: str, pending: Any) -> None:
    _, parameter, wanted = pending
    assert is_waiting(parameter)
    with torch.no_grad():
        value = WITH_WAITING[name](parameter)
    assert torch.equal(value, wanted)
    assert not is_waiting(parameter)
    assert type(parameter) is nn.Parameter


def test_looks_like_a_parameter_when_printed(pending: Any) -> None:
    _, parameter, _ = pending
    assert repr(parameter).startswith("Parameter containing:")


def test_the_models_repr_and_names_do_not_wait(pending: Any) -> None:
    model, parameter, _ = pending
    repr(model)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) > 0
    assert is_waiting(parameter)


@servers_only
def test_what_is_used_waits_with_its_pack() -> None:
    model, optimizer = build_seeded(with_sgd())
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        train_classifier(model, optimizer, make_batches(3))
        assert all(map(is_waiting, model.parameters()))
        model[0](torch.zeros(1, 5))
        assert not any(map(is_waiting, model.parameters()))


def test_only_what_is_used_waits(pending: Any) -> None:
    model, _, _ = pending
    model[0](torch.zeros(1, 5))
    assert [is_waiting(p) for p in model.parameters()] == [False, False, True, True, True, True]


def test_a_class_of_the_users_own_is_given_back() -> None:
    class Own(nn.Parameter):
        pass

    model = nn.Linear(5, 3)
    model.weight = Own(model.weight.detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        train_classifier(model, optimizer, make_batches(2))
        assert isinstance(model.weight, Own)
        assert is_waiting(model.weight)
        model(torch.zeros(1, 5))
        assert type(model.weight) is Own
        train_classifier(model, optimizer, make_batches(1))
    assert type(model.weight) is Own


# The order of first use gives the priorities.
class _Backwards(nn.Module):
    """Registers its layers in another order than it uses them."""

    def __init__(self, order: tuple[str, ...] = ("c", "a", "b")) -> None:
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)))


FORWARD = ["a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "c.bias"]


def _priorities(session: foreprop.Session) -> list[str]:
    names = [info.name for info in session._training.infos]
    machine = session._training.backends.engines[0].machine
    return sorted(names, key=lambda name: machine.priority_of(names.index(name)))


def _copied(model: nn.Module) -> None:
    copy.deepcopy(model)


def _printed(model: nn.Module) -> None:
    repr(list(model.parameters()))


def _penalised(model: nn.Module) -> None:
    sum(p.square().sum() for p in model.parameters()).backward()
    model.zero_grad()


def _evaluated(model: nn.Module) -> None:
    with torch.no_grad():
        model.c(model.a(torch.zeros(1, 5)))


@servers_only
@pytest.mark.parametrize("before", [None, _copied, _printed, _penalised, _evaluated])
def test_priorities_are_the_order_of_first_use(before: Any) -> None:
    model, optimizer = build_seeded(with_sgd(_Backwards))
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]) as session:
        if before is not None:
            before(model)
        train_classifier(model, optimizer, make_batches(2))
        assert _priorities(session) == FORWARD


@servers_only
def test_never_used_parameters_come_last() -> None:
    model, optimizer = build_seeded(with_sgd(lambda: _Backwards(("unused", "c", "a", "b"))))
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]) as session:
        train_classifier(model, optimizer, make_batches(2))
        assert _priorities(session) == [*FORWARD, "unused.weight", "unused.bias"]


@servers_only
def test_priorities_come_from_rank_zero() -> None:
    """Rank 1's first forward pass goes another way."""

    def work(world: World) -> list[str]:
        model, optimizer = build_seeded(with_sgd(_Backwards))
        with foreprop.parallelize(model, optimizer, world=world) as session:
            if world.rank == 1:
                x, y = make_batches(1)[0]
                F.cross_entropy(model.a(model.b(model.c(x))), y).backward()
                optimizer.step()
            else:
                train_classifier(model, optimizer, make_batches(1))
            train_classifier(model, optimizer, make_batches(2))
            return _priorities(session)

    assert run_cluster(2, work) == [FORWARD, FORWARD]
