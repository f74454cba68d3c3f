"""Every element-wise optimizer, schedulers, and what is refused (issue point 4)."""

# ruff: noqa: PT012 - it is a loop that goes wrong, with a message of its own
from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import foreprop
from foreprop.engine.optimizer import ELEMENTWISE_OPTIMIZERS
from foreprop.errors import ConfigError, TrainingLoopError
from tests.cluster import run_cluster, worlds
from tests.conformance.matrices import few
from tests.conformance.parity import (
    Batch,
    batches_of,
    build_seeded,
    by_servers,
    check_same_bits,
    check_world_of_one,
    check_world_of_two,
    make_batches,
    run_plain,
    servers_only,
    small_model,
    train_classifier,
    with_sgd,
)
from tests.leaks import Snapshot, find_leaks
from tests.tiers import long_cases

Variant = tuple[str, dict[str, Any]]
VARIANTS: list[Variant] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.01, "momentum": 0.5, "maximize": True}),
    ("SGD", {"lr": torch.tensor(0.1), "momentum": 0.9}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01, "betas": (0.8, 0.95)}),
    ("Adam", {"lr": 0.01, "foreach": True}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.01, "decoupled_weight_decay": True}),
    ("RAdam", {"lr": 0.01, "weight_decay": 0.01}),
    ("Adamax", {"lr": 0.01, "weight_decay": 0.01}),
    ("Adagrad", {"lr": 0.05, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    ("Adadelta", {"lr": 0.5, "rho": 0.8, "weight_decay": 0.01}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.9, "weight_decay": 0.01}),
    ("Rprop", {"lr": 0.01, "etas": (0.4, 1.3), "step_sizes": (1e-5, 10)}),
    ("ASGD", {"lr": 0.05, "t0": 2, "weight_decay": 0.01}),
]
OTHERS: list[Variant] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "foreach": False}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": torch.tensor(0.01)}),
    ("Adam", {"lr": 0.01, "maximize": True}),
    ("AdamW", {"lr": 0.01, "amsgrad": True}),
    ("NAdam", {"lr": 0.01, "momentum_decay": 0.01}),
    ("Adagrad", {"lr": 0.05, "weight_decay": 0.01}),
    ("RMSprop", {"lr": 0.01}),
]


def _named(variant: Variant) -> str:
    return "-".join([variant[0], *(f"{k}={v}" for k, v in variant[1].items())])


def _with(cls: Callable[..., torch.optim.Optimizer], **options: Any) -> Any:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model()
        return model, cls(model.parameters(), **options)

    return build


@pytest.mark.parametrize("variant", [*VARIANTS, *long_cases(*OTHERS)], ids=_named)
def test_bit_identical_to_plain_pytorch(variant: Variant) -> None:
    name, options = variant
    build = _with(getattr(torch.optim, name), **options)
    check_world_of_one(build, train_classifier, make_batches(5), slice_elems=9)


def test_no_class_is_left_out() -> None:
    assert {name for name, _ in VARIANTS} == set(ELEMENTWISE_OPTIMIZERS)


TWO = ["Adam", "Adagrad", "ASGD"]


@pytest.mark.parametrize("name", [*TWO, *long_cases(*sorted({*ELEMENTWISE_OPTIMIZERS} - {*TWO}))])
def test_two_workers(name: str) -> None:
    build = _with(getattr(torch.optim, name), lr=0.01)
    # Rprop goes by signs, which a difference in the last bit may turn
    check_world_of_two(build, train_classifier, batches_of(2, count=3))


@servers_only
@by_servers
def test_fused_as_given_by_the_user() -> None:
    """Servers use the plain loop, whose last bit may differ from the fused kernel's."""
    build = _with(torch.optim.Adam, lr=0.01, fused=True)
    batches = make_batches(4)
    plain = run_plain(_with(torch.optim.Adam, lr=0.01), train_classifier, batches)
    model, optimizer = build_seeded(build)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        train_classifier(model, optimizer, batches)
        check_same_bits(model.state_dict(), plain.model)
        assert optimizer.state_dict()["param_groups"][0]["fused"] is True


def _two_groups() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small_model()
    first, rest = list(model[0].parameters()), list(model[1:].parameters())
    groups = [
        {"params": rest, "lr": 0.05, "momentum": 0.5},
        {"params": first, "weight_decay": 0.1, "nesterov": True},
    ]
    return model, torch.optim.SGD(groups, lr=0.2, momentum=0.9)


def test_parameter_groups() -> None:
    check_world_of_one(_two_groups, train_classifier, make_batches(4))
    check_world_of_two(_two_groups, train_classifier, batches_of(2))


# Schedulers. Warnings are errors in this suite, so none may be given.
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (epoch + 1)),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)],
        milestones=[2],
    ),
}


def _train_scheduled(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    batches: Sequence[Batch],
) -> list[float]:
    rates = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)  # never gets better
        else:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize(
    ("name", "when", "optimizer_name"), few(SCHEDULERS, ["before", "after"], ["SGD", "Adam"])
)
def test_scheduler(name: str, when: str, optimizer_name: str) -> None:
    build = with_sgd() if optimizer_name == "SGD" else _with(torch.optim.Adam, lr=0.01)
    batches = make_batches(6)
    model, optimizer = build_seeded(build)
    wanted_rates = _train_scheduled(model, optimizer, SCHEDULERS[name](optimizer), batches)
    wanted = copy.deepcopy(model.state_dict())

    model, optimizer = build_seeded(build)
    if when == "before":
        scheduler = SCHEDULERS[name](optimizer)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        if when == "after":
            scheduler = SCHEDULERS[name](optimizer)
        rates = _train_scheduled(model, optimizer, scheduler, batches)
        check_same_bits(model.state_dict(), wanted)
    assert rates == wanted_rates
    assert len(set(rates)) > 2


def test_scheduler_on_two_workers() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        _train_scheduled(model, optimizer, SCHEDULERS["OneCycleLR"](optimizer), batches)

    check_world_of_two(with_sgd(), loop, batches_of(2))


# The optimizer's own interface.
def test_closure_and_its_loss() -> None:
    def loop(
        model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
    ) -> list[float]:
        losses = []
        for x, y in batches:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return losses

    check_world_of_one(with_sgd(), loop, make_batches())


def test_step_hooks_run() -> None:
    def loop(
        model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
    ) -> list[str]:
        seen: list[str] = []
        handles = [
            optimizer.register_step_pre_hook(lambda o, a, k: seen.append("pre")),
            optimizer.register_step_post_hook(lambda o, a, k: seen.append("post")),
        ]
        train_classifier(model, optimizer, batches)
        for handle in handles:
            handle.remove()
        return seen

    ours = check_world_of_one(with_sgd(), loop, make_batches(2))
    assert ours.result == ["pre", "post"] * 2


def test_gradients_set_by_hand_without_backward() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for x, _ in batches:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(x.mean()))
            optimizer.step()

    check_world_of_one(with_sgd(), loop, make_batches())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_optimizer(set_to_none: bool) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)  # at once, while gradients are sent

    check_world_of_one(with_sgd(), loop, make_batches(6))
    check_world_of_two(with_sgd(), loop, batches_of(2, count=6))


def test_never_zeroing_accumulates_over_steps() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    check_world_of_one(with_sgd(lr=0.01), loop, make_batches(5))
    check_world_of_two(with_sgd(lr=0.01), loop, batches_of(2))


# Refusals.
class _OwnSGD(torch.optim.SGD):
    pass


def _impostor() -> type[torch.optim.Optimizer]:
    """Has an allowed name, and does something else."""
    return type("SGD", (torch.optim.SGD,), {})


REFUSED: dict[str, tuple[Callable[..., torch.optim.Optimizer], str]] = {
    "LBFGS": (torch.optim.LBFGS, "several times"),
    "Adafactor": (torch.optim.Adafactor, "row and column"),
    "SparseAdam": (torch.optim.SparseAdam, "sparse"),
    "own": (_OwnSGD, "from its name"),
    "impostor": (_impostor(), "from its name"),
}


@servers_only
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str) -> None:
    cls, reason = REFUSED[name]
    model = small_model()
    _check_refused(model, cls(model.parameters(), lr=0.1), reason, update="servers")


@servers_only
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_is_refused() -> None:
    model = nn.Linear(4, 3, bias=False)
    muon = torch.optim.Muon(model.parameters(), lr=0.1)
    _check_refused(model, muon, "whole matrices", update="servers")


@by_servers
def test_differentiable_is_refused() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True)
    _check_refused(model, optimizer, "differentiable")


@pytest.mark.parametrize("lr", [float("nan"), float("inf")])
@by_servers
def test_a_rate_that_is_no_number_is_refused(lr: float) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = lr
    _check_refused(model, optimizer, "finite")


def test_an_uninitialised_parameter_is_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.LazyLinear(3))
    _check_refused(model, torch.optim.SGD(model.parameters(), lr=0.1), "lazy")


def test_a_complex_parameter_is_refused() -> None:
    model = nn.Linear(3, 2, dtype=torch.complex64)
    _check_refused(model, torch.optim.SGD(model.parameters(), lr=0.1), "complex64")


def test_a_parameter_of_another_session_is_refused() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        again = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="another open session"):
            foreprop.parallelize(model, again, world=worlds(1)[0])
        train_classifier(model, optimizer, make_batches(2))
    with foreprop.parallelize(model, again, world=worlds(1)[0]):
        train_classifier(model, again, make_batches(2))


def _is_lazy(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.lazy.LazyModuleMixin)


def _check_refused(
    model: nn.Module, optimizer: torch.optim.Optimizer, reason: str, **settings: Any
) -> None:
    before = Snapshot.take()
    with pytest.raises(ConfigError, match=reason):
        foreprop.parallelize(model, optimizer, world=worlds(1)[0], **settings)
    assert not find_leaks(before)
    assert all(
        type(p) in (nn.Parameter, nn.parameter.UninitializedParameter) for p in model.parameters()
    )
    assert not any(module._forward_pre_hooks for module in model.modules() if not _is_lazy(module))
    assert "zero_grad" not in vars(optimizer)


# Changes at the wrong time.
@by_servers
def test_add_param_group_after_parallelize() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model[:2].parameters(), lr=0.1)
    with (
        pytest.raises(TrainingLoopError, match="add_param_group"),
        foreprop.parallelize(model, optimizer, world=worlds(1)[0]),
    ):
        train_classifier(model, optimizer, make_batches(2))
        optimizer.add_param_group({"params": list(model[2:].parameters())})


@pytest.mark.parametrize("setting", ["lr", "momentum"])
@by_servers
def test_settings_changed_between_backward_and_step(setting: str) -> None:
    model, optimizer = build_seeded(with_sgd())
    with (
        pytest.raises(TrainingLoopError, match="between backward"),
        foreprop.parallelize(model, optimizer, world=worlds(1)[0]),
    ):
        train_classifier(model, optimizer, make_batches(2))
        (x, y), *_ = make_batches(1)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.param_groups[0][setting] = 0.5
        optimizer.step()


def test_settings_changed_before_backward_count_at_once() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for number, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            loss.backward()
            optimizer.step()

    check_world_of_one(with_sgd(), loop, make_batches())


@by_servers
def test_different_rates_on_ranks() -> None:
    def work(world: Any) -> None:
        model, optimizer = build_seeded(with_sgd(lr=0.1))
        with foreprop.parallelize(model, optimizer, world=world, step_timeout_s=10):
            train_classifier(model, optimizer, make_batches(2))
            optimizer.param_groups[0]["lr"] = 0.1 + world.rank
            train_classifier(model, optimizer, make_batches(2))
            model(torch.zeros(1, 5))

    with pytest.raises(TrainingLoopError, match=r"lr of parameter group 0 is 0\.1 .* 1\.1 on rank"):
        run_cluster(2, work)
