"""The user's own optimizer steps on averaged gradients, whatever class it has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.errors import ConfigError, TrainingLoopError
from tests.cluster import worlds
from tests.conformance.averaging_by_hand import (
    Average,
    ReadingLoop,
    backward,
    check_contract,
    made_by,
)
from tests.conformance.matrices import few
from tests.conformance.parity import Batch, small_model, with_sgd
from tests.tiers import long_cases

WORKERS: dict[str, dict[str, Any]] = {
    "auto": {},
    "workers": {"update": "workers"},
    "ring": {"update": "workers", "architecture": "ring"},
}


STATES: dict[str, dict[str, Any]] = {
    "servers": {"update": "servers"},
    "workers": WORKERS["workers"],
    "ring": WORKERS["ring"],
    "ring's own": {"architecture": "ring", "update": "servers"},
    "hybrid": {"architecture": "hybrid"},
}


def plainly(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> None:
    for batch in batches:
        optimizer.zero_grad()
        backward(model, batch)
        average(model)
        optimizer.step()


class Lion(torch.optim.Optimizer):
    """A third party's, of its own class."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                update = mean.mul(0.9).add(parameter.grad, alpha=0.1).sign_()
                parameter.add_(update, alpha=-group["lr"])
                mean.mul_(0.99).add_(parameter.grad, alpha=0.01)


class WholeNorm(torch.optim.SGD):
    """A subclass of torch.optim's whose step regards all gradients at once."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        largest = max(float(p.grad.abs().max()) for p in parameters if p.grad is not None)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(1 + largest)
        super().step()


class ScheduleFree(torch.optim.Optimizer):
    """Keeps what belongs to all parameters in its group, as schedule-free optimizers do."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["k"] ** 0.5
            share = group["k"] ** 0.5 / group["weight_sum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                z = self.state[parameter].setdefault("z", parameter.clone())
                z.sub_(parameter.grad, alpha=group["lr"])
                parameter.lerp_(z, share)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "Adam_foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "Adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "Adam_capturable": lambda p: torch.optim.Adam(p, lr=0.01, maximize=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Lion": Lion,
    "WholeNorm": lambda p: WholeNorm(p, lr=0.1, momentum=0.9),
    "ScheduleFree": ScheduleFree,
}


# torch's own are in test_alone and test_optimizers: here one of each way to keep state
KINDS = ["Adafactor", "Adam_fused", "SGD", "Lion", "WholeNorm", "ScheduleFree"]


@pytest.mark.parametrize(
    ("name", "setting"),
    few([*KINDS, *long_cases(*sorted({*OPTIMIZERS} - {*KINDS}))], ["workers", "ring"]),
)
def test_every_optimizer(name: str, setting: str) -> None:
    check_contract(made_by(OPTIMIZERS[name]), plainly, steps=4, **WORKERS[setting])


@pytest.mark.parametrize(
    "name", ["Lion", "Adam_fused", *long_cases("WholeNorm", "ScheduleFree", "Adafactor")]
)
def test_what_servers_cannot_apply_is_told_by_itself(name: str) -> None:
    exact = name != "Adam_fused"  # servers use the plain loop
    check_contract(made_by(OPTIMIZERS[name]), plainly, steps=4, rtol=0.0 if exact else 1e-5)


def _matrices() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 3, bias=False))


@pytest.mark.parametrize("setting", ["auto", *long_cases("workers", "ring")])
def test_muon(setting: str) -> None:
    build = made_by(lambda p: torch.optim.Muon(p, lr=0.02), _matrices)
    check_contract(build, plainly, **WORKERS[setting])


def _closing(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> Any:
    losses = []
    for x, y in batches:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            average(model)
            return loss

        losses.append(float(optimizer.step(closure).detach()))
    return losses


@pytest.mark.parametrize("setting", ["auto", "ring", *long_cases("workers")])
def test_lbfgs_calls_its_closure_often(setting: str) -> None:
    """Without a line search: its tests are of this rank's own loss."""
    build = made_by(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3))
    check_contract(build, _closing, **WORKERS[setting])


@pytest.mark.parametrize("setting", WORKERS)
def test_a_closure_of_an_optimizer_that_steps_by_itself(setting: str) -> None:
    check_contract(with_sgd(), _closing, **WORKERS[setting])


def _sam(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> None:
    for batch in batches:
        optimizer.zero_grad()
        backward(model, batch)
        average(model)
        with torch.no_grad():
            moved = [0.05 * p.grad.sign() for p in model.parameters() if p.grad is not None]
            for parameter, by in zip(model.parameters(), moved, strict=True):
                parameter.add_(by)
        optimizer.zero_grad()
        backward(model, batch)
        average(model)
        with torch.no_grad():
            for parameter, by in zip(model.parameters(), moved, strict=True):
                parameter.sub_(by)
        optimizer.step()


@pytest.mark.parametrize("setting", ["workers", "ring", *long_cases("auto")])
def test_sharpness_aware(setting: str) -> None:
    check_contract(with_sgd(), _sam, **WORKERS[setting])


def _by_hand(model: nn.Module, _: Any, batches: Sequence[Batch], average: Average) -> None:
    for batch in batches:
        model.zero_grad()
        backward(model, batch)
        average(model)
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad


@pytest.mark.parametrize(
    ("loop", "settings"),
    few(
        [_by_hand, plainly],
        [{}, {"architecture": "ring"}, {"preset": "tensorflow", "update": "workers"}],
    ),
)
def test_without_an_optimizer_gradients_are_averaged(
    loop: ReadingLoop, settings: dict[str, Any]
) -> None:
    """An optimizer that `parallelize` does not know of reads gradients like anybody."""
    check_contract(with_sgd(), loop, given=False, **settings)


def _two_halves(model: Any, optimizer: Any, batches: Sequence[Batch], average: Average) -> None:
    other = torch.optim.Adam(model[2:].parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        other.zero_grad()
        backward(model, batch)
        average(model)
        other.step()
        optimizer.step()


@pytest.mark.parametrize("setting", ["auto", "workers"])
def test_only_one_of_two_optimizers_is_given(setting: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model()
        return model, torch.optim.SGD(model[:2].parameters(), lr=0.1, momentum=0.9)

    check_contract(build, _two_halves, **WORKERS[setting])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"clip_grad_norm": 1.0}, "given no optimizer, and clip_grad_norm is 1.0: that is part"),
        ({"ema": 0.9}, "given no optimizer, and ema is 0.9: that is part"),
        ({"update": "servers"}, "given no optimizer, and update is 'servers': that is part"),
        (
            {"scaler": torch.amp.GradScaler("cpu")},
            "given no optimizer, and a scaler was given",
        ),
    ],
)
def test_what_needs_the_optimizer_is_refused_without_one(settings: Any, told: str) -> None:
    model, _ = with_sgd()()
    with pytest.raises(ConfigError, match=told):
        foreprop.parallelize(model, world=worlds(1)[0], **settings)


def _made_anew(model: nn.Module, _: Any, batches: Sequence[Batch], average: Average) -> None:
    plainly(model, torch.optim.Adam(model.parameters(), lr=0.01), batches, average)


@pytest.mark.parametrize("setting", WORKERS)
def test_an_optimizer_that_is_made_anew(setting: str) -> None:
    check_contract(with_sgd(), _made_anew, **WORKERS[setting])


def _looked_at(model: Any, optimizer: Any, batches: Sequence[Batch], average: Average) -> Any:
    seen = []
    for batch in batches:
        optimizer.zero_grad()
        backward(model, batch)
        average(model)
        optimizer.step()
        for parameter in model.parameters():
            state = optimizer.state[parameter]
            seen.append({k: torch.as_tensor(v).clone() for k, v in state.items()})
    return seen


@pytest.mark.parametrize(
    "setting", ["servers", "ring's own", *long_cases("workers", "ring", "hybrid")]
)
def test_the_optimizer_s_state_is_there_after_step(setting: str) -> None:
    check_contract(made_by(OPTIMIZERS["Adam"]), _looked_at, **STATES[setting])


def _reset(model: Any, optimizer: Any, batches: Sequence[Batch], average: Average) -> None:
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        backward(model, batch)
        average(model)
        optimizer.step()
        if number == 1:
            for parameter in model.parameters():
                optimizer.state[parameter]["exp_avg"].zero_()
        if number == 2:
            optimizer.state.clear()
        if number == 3:
            optimizer.load_state_dict(optimizer.state_dict())
        if number == 4:
            optimizer.state = defaultdict(dict)
        if number == 5:
            assert optimizer.state[parameter]  # and another look, with a state_dict in between
            optimizer.state_dict()
            optimizer.state[parameter]["exp_avg"].mul_(0.5)


@pytest.mark.parametrize("setting", STATES)
def test_the_optimizer_s_state_may_be_reset(setting: str) -> None:
    check_contract(made_by(OPTIMIZERS["Adam"]), _reset, steps=7, **STATES[setting])


def _cleared(optimizer: Any) -> None:
    if len(optimizer.state):
        optimizer.state.clear()


def _assigned(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


@pytest.mark.parametrize(
    ("edit", "told"),
    [(_cleared, "state is used between backward"), (_assigned, "state was changed between")],
)
def test_the_optimizer_s_state_may_be_reset_just_before_step(edit: Any, told: str) -> None:
    def loop(model: Any, optimizer: Any, batches: Sequence[Batch], average: Average) -> None:
        for batch in batches:
            optimizer.zero_grad()
            backward(model, batch)
            average(model)
            edit(optimizer)
            optimizer.step()

    build = made_by(OPTIMIZERS["Adam"])
    check_contract(build, loop, steps=5, **WORKERS["workers"])
    with pytest.raises(TrainingLoopError, match=told):
        check_contract(build, loop, steps=5, update="servers")
