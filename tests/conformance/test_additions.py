"""Parameters that come after `parallelize`: averaged from their first gradient on, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.errors import ForepropError, TrainingLoopError
from tests.cluster import run_cluster
from tests.conformance.averaging_by_hand import Average, backward, check_contract
from tests.conformance.parity import Batch, make_batches, once, seeded, servers_only, small_model

pytestmark = pytest.mark.timeout(120)
Optimizer = torch.optim.Optimizer
CHANGES_AT = 2


class Net(nn.Module):
    """Two layers, and room for more."""

    def __init__(self, *, frozen: bool, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.first.requires_grad_(not frozen)
        self.norm: nn.Module = nn.BatchNorm1d(7) if norm else nn.Identity()
        self.last = nn.Linear(7, 3)
        self.more = nn.ModuleList()
        self.scale: nn.Parameter | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(x)))
        out = self.last(hidden) + sum(part(hidden) for part in self.more)
        return out if self.scale is None else out * self.scale


def _sgd(parameters: Any, **options: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **options)


def build_frozen() -> tuple[nn.Module, Optimizer]:
    model = Net(frozen=True)
    return model, _sgd(model.last.parameters())


def build_left_out() -> tuple[nn.Module, Optimizer]:
    model = Net(frozen=False)
    return model, _sgd(model.last.parameters())


def build_whole() -> tuple[nn.Module, Optimizer]:
    model = Net(frozen=False)
    return model, _sgd(model.parameters())


Change = Callable[[Any, Any], Any]


def _unfreeze(model: Any, optimizer: Any) -> Any:
    model.first.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.01})


def _add_group(model: Any, optimizer: Any) -> Any:
    optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.01})


def _put_into_group(model: Any, optimizer: Any) -> Any:
    optimizer.param_groups[0]["params"] += list(model.first.parameters())


def _second_optimizer(model: Any, optimizer: Any) -> Any:
    model.first.requires_grad_(True)
    return _Both(optimizer, torch.optim.Adam(model.first.parameters(), lr=0.01))


def _adapter(model: Any, optimizer: Any) -> Any:
    with seeded(8):
        model.more.append(nn.Linear(7, 3, bias=False))
    model.last.requires_grad_(False)
    return _sgd(model.more.parameters())


def _replaced(model: Any, optimizer: Any) -> Any:
    with seeded(9):
        model.last = nn.Linear(7, 3)
    return _sgd(model.parameters())


def _new_group(model: Any, optimizer: Any) -> Any:
    with seeded(10):
        model.more.append(nn.Linear(7, 3))
    optimizer.add_param_group({"params": model.more.parameters()})


def _lazy(model: Any, optimizer: Any) -> Any:
    model.more.append(nn.LazyLinear(3))
    with seeded(12), torch.no_grad():
        model(torch.ones(2, 5))
    optimizer.add_param_group({"params": model.more.parameters()})


def _bare_parameter(model: Any, optimizer: Any) -> Any:
    model.scale = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [model.scale]})


def _assigned(model: Any, optimizer: Any) -> Any:
    numbers = torch.Generator().manual_seed(11)
    values = {n: torch.randn(v.shape, generator=numbers) for n, v in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    return _sgd(model.parameters())


def _parametrized(model: Any, optimizer: Any) -> Any:
    nn.utils.parametrizations.weight_norm(model.first)
    return _sgd(model.parameters())


def _normalised(model: Any, optimizer: Any) -> Any:
    model.norm = nn.BatchNorm1d(7)
    optimizer.add_param_group({"params": model.norm.parameters()})


class _Both:
    """Two optimizers in one loop."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()


CHANGES: dict[str, tuple[Any, Change]] = {
    "unfrozen, in a new group": (build_frozen, _unfreeze),
    "unfrozen, with an optimizer of its own": (build_frozen, _second_optimizer),
    "not in the optimizer at first": (build_left_out, _add_group),
    "put into a group by hand": (build_left_out, _put_into_group),
    "an adapter, and an optimizer for it": (build_whole, _adapter),
    "a replaced layer, and another optimizer": (build_whole, _replaced),
    "a new layer in a new group": (build_whole, _new_group),
    "a lazy layer": (build_whole, _lazy),
    "a bare parameter": (build_whole, _bare_parameter),
    "load_state_dict(assign=True)": (build_whole, _assigned),
    "a parametrization": (build_whole, _parametrized),
}


def loop_with(change: Change, *, reads: bool = False) -> Any:
    def loop(model: Any, optimizer: Any, batches: Sequence[Batch], average: Average) -> Any:
        norms = []
        for number, batch in enumerate(batches):
            if number == CHANGES_AT:
                optimizer = change(model, optimizer) or optimizer
            model.zero_grad()
            optimizer.zero_grad()
            backward(model, batch)
            average(model)
            if reads:
                norms += [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
            optimizer.step()
        return norms

    return loop


def check(build: Any, change: Change, *, reads: bool = False, **about: Any) -> None:
    def compared() -> tuple[nn.Module, Any]:
        return build()

    check_contract(compared, loop_with(change, reads=reads), steps=5, **about)


@pytest.mark.parametrize("what", CHANGES)
def test_it_is_averaged_from_its_first_gradient_on(what: str) -> None:
    build, change = CHANGES[what]
    check(build, change)


@pytest.mark.parametrize("what", ["unfrozen, in a new group", "a new layer in a new group"])
def test_who_reads_its_gradient_finds_the_average(what: str) -> None:
    build, change = CHANGES[what]
    check(build, change, reads=True, rtol=1e-6)


@once
@pytest.mark.parametrize(
    "about",
    [
        {"architecture": "ring"},
        {"slice_elems": 7},
        {"ranks": 4, "local_size": 2, "local_aggregation": "on"},
        {"compression": "lossless"},
        {"wait": "modules"},
        {"check_stale": True},
    ],
    ids=str,
)
def test_whatever_the_settings_are(about: dict[str, Any]) -> None:
    check(build_frozen, _unfreeze, **about)


@servers_only
def test_a_layer_with_the_first_buffers_shows_rank_0s() -> None:
    def work(world: Any) -> Any:
        model, optimizer = build_whole()
        batches = make_batches(4, seed=world.rank + 1)
        with foreprop.parallelize(model, optimizer, world=world):
            loop_with(_normalised)(model, optimizer, batches, lambda _: None)
            model.eval()
            shown = model.norm.running_mean.clone()
            model(batches[0][0])
            return shown, model.norm.running_mean.clone(), model.state_dict()["norm.running_mean"]

    (own, zero, _), (other, evaluated, saved) = run_cluster(2, work)
    assert torch.equal(own, zero)
    assert not torch.equal(own, other)
    assert torch.equal(evaluated, zero)
    assert torch.equal(saved, zero)


def _change_between_passes(change: Change) -> Any:
    def loop(model: Any, optimizer: Any, batches: Sequence[Batch], average: Average) -> Any:
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            model.zero_grad()
            backward(model, batch)
            if number == CHANGES_AT:
                optimizer = change(model, optimizer) or optimizer
            x, y = batch
            F.cross_entropy(model(x * 2), y).backward()
            average(model)
            optimizer.step()

    return loop


@pytest.mark.parametrize("what", ["unfrozen, in a new group", "a new layer in a new group"])
def test_a_change_between_two_passes_of_a_step(what: str) -> None:
    build, change = CHANGES[what]
    check_contract(build, _change_between_passes(change), steps=5)


def test_layers_are_unfrozen_one_after_the_other() -> None:
    def build() -> tuple[nn.Module, Optimizer]:
        model = small_model()
        model.requires_grad_(False)
        model[4].requires_grad_(True)
        return model, _sgd(model[4].parameters())

    def loop(model: Any, optimizer: Any, batches: Sequence[Batch], average: Average) -> Any:
        for number, batch in enumerate(batches):
            if number in (1, 3):
                layer = model[{1: 2, 3: 0}[number]]
                layer.requires_grad_(True)
                optimizer.add_param_group({"params": layer.parameters()})
            if number == 5:
                model[4].requires_grad_(False)
            optimizer.zero_grad()
            backward(model, batch)
            average(model)
            optimizer.step()

    check_contract(build, loop, steps=7)


def _errors_of(work: Callable[[Any], Any], ranks: int = 2) -> list[BaseException]:
    def caught(world: Any) -> BaseException | None:
        try:
            work(world)
        except ForepropError as error:
            return error
        return None

    return [error for error in run_cluster(ranks, caught) if error is not None]


@pytest.mark.parametrize("what", ["unfrozen, in a new group", "a new layer in a new group"])
@pytest.mark.parametrize("odd", [0, 1])
def test_on_one_rank_only_it_is_an_error_on_all(what: str, odd: int) -> None:
    build, change = CHANGES[what]

    def work(world: Any) -> None:
        model, optimizer = build()
        mine: Change = change if world.rank == odd else lambda model, optimizer: None
        batches = make_batches(5, seed=world.rank + 1)
        with foreprop.parallelize(
            model, optimizer, world=world, stall_report_s=0.4, step_timeout_s=30
        ):
            loop_with(mine)(model, optimizer, batches, lambda _: None)

    told = _errors_of(work)
    assert len(told) == 2
    for error in told:
        assert isinstance(error, TrainingLoopError)
        assert f"rank {odd} trains " in str(error)
        assert "on every rank alike" in str(error)


def _check_refused_by_servers(build: Any, change: Change, wanted: str) -> None:
    def work(world: Any) -> None:
        model, optimizer = build()
        batches = make_batches(5, seed=world.rank + 1)
        with foreprop.parallelize(model, optimizer, world=world, update="servers"):
            loop_with(change)(model, optimizer, batches, lambda _: None)

    told = _errors_of(work)
    assert len(told) == 2
    assert all(wanted in str(error) for error in told)


@servers_only
@pytest.mark.parametrize("what", ["unfrozen, in a new group", "a new layer in a new group"])
def test_where_servers_update_the_line_raises(what: str) -> None:
    _check_refused_by_servers(*CHANGES[what], "add_param_group() was called after parallelize()")


@servers_only
def test_where_servers_update_its_first_gradient_raises() -> None:
    wanted = "first.weight, first.bias did not require a gradient at parallelize(), and servers"
    _check_refused_by_servers(build_frozen, _second_optimizer, wanted)


def test_what_was_registered_and_taken_out_again_changes_nothing() -> None:
    def loop(model: Any, optimizer: Any, batches: Sequence[Batch], average: Average) -> Any:
        for batch in batches:
            model.scale = nn.Parameter(torch.ones(3))
            model.scale = None
            optimizer.zero_grad()
            backward(model, batch)
            average(model)
            optimizer.step()

    check_contract(build_whole, loop, steps=3)


def test_nothing_is_left_behind() -> None:
    model, optimizer = build_frozen()
    hooks = torch.nn.modules.module._global_parameter_registration_hooks
    before = len(hooks)

    def work(world: Any) -> None:
        mine = (model, optimizer) if world.rank == 0 else build_frozen()
        batches = make_batches(5, seed=world.rank + 1)
        with foreprop.parallelize(*mine, world=world):
            loop_with(_unfreeze)(*mine, batches, lambda _: None)

    run_cluster(2, work)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not {"step", "zero_grad", "add_param_group"} & vars(optimizer).keys()
    assert len(hooks) == before
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
