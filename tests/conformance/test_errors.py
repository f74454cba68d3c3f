"""What would silently go wrong is an error that says what to do (issue point 6)."""

# ruff: noqa: PT012 - it is a loop that goes wrong, with a message of its own
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.config import Config
from foreprop.engine.world import World
from foreprop.errors import ConfigError, TrainingLoopError
from foreprop.session.training import Training
from tests.cluster import run_cluster, worlds
from tests.conformance.matrices import few
from tests.conformance.parity import (
    batches_of,
    build_seeded,
    by_servers,
    check_close,
    check_same_bits,
    check_world_of_one,
    check_world_of_two,
    make_batches,
    merge,
    run_plain,
    servers_only,
    small_model,
    train_classifier,
    with_sgd,
)
from tests.leaks import Snapshot, wait_for_leaks


@contextlib.contextmanager
def _session(steps: int, **settings: Any) -> Iterator[tuple[Any, Any, foreprop.Session]]:
    """A model that has made some steps. Leaves nothing behind, whatever is raised inside."""
    before = Snapshot.take()
    model, optimizer = build_seeded(with_sgd())
    session = foreprop.parallelize(model, optimizer, world=worlds(1)[0], **settings)
    try:
        train_classifier(model, optimizer, make_batches(steps))
        yield model, optimizer, session
    finally:
        with contextlib.suppress(foreprop.ForepropError):
            session.close()
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert not wait_for_leaks(before, 2.0)


def _backward(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 5) -> None:
    ((x, y),) = make_batches(1, seed=seed)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()


STEPS = [0, 1, 3]  # before which gradients are sent at step(), after which in the backward pass


# Gradients between backward() and step().
def _clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def _clip_values(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.001)


def _scale(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def _replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter.grad)


@pytest.mark.parametrize(("edit", "steps"), few([_clip, _clip_values, _scale, _replace], [1, 3]))
@by_servers
def test_an_edit_that_the_first_step_did_not_make(
    edit: Callable[[nn.Module], None], steps: int
) -> None:
    with (
        _session(steps) as (model, optimizer, _),
        pytest.raises(TrainingLoopError, match="update='workers'"),
    ):
        _backward(model, optimizer)
        edit(model)
        optimizer.step()


@pytest.mark.parametrize("way", ["optimizer", "model", "by hand", "in place"])
@by_servers
def test_a_discarded_gradient(way: str) -> None:
    with (
        _session(3) as (model, optimizer, session),
        pytest.raises(TrainingLoopError, match=r"discarded or replaced|edited|being sent"),
    ):
        _backward(model, optimizer)
        if way == "optimizer":
            optimizer.zero_grad()
        elif way == "model":
            model.zero_grad()
        elif way == "in place":
            model.zero_grad(set_to_none=False)
        else:
            model[0].weight.grad = None
        optimizer.step()
        session.flush()


@pytest.mark.parametrize("zero", [True, False])
@by_servers
def test_a_skipped_step(zero: bool) -> None:
    with (
        _session(3) as (model, optimizer, _),
        pytest.raises(TrainingLoopError, match=r"Call optimizer.step\(\) first.*update='workers'"),
    ):
        _backward(model, optimizer)
        if zero:
            optimizer.zero_grad()
        _backward(model, optimizer)


@pytest.mark.parametrize("discard", [False, True])
@by_servers
def test_a_second_graph_after_the_push(discard: bool) -> None:
    """Both graphs were built before the first backward pass, so no parameter is used again."""
    model, optimizer = build_seeded(with_sgd(lambda: nn.Linear(5, 3)))
    wanted = ("then discarded, .*" if discard else "another gradient .*") + "update='workers'"
    with (
        pytest.raises(TrainingLoopError, match=wanted),
        foreprop.parallelize(model, optimizer, world=worlds(1)[0]),
    ):
        train_classifier(model, optimizer, make_batches(3))
        (x, y), (x2, y2) = make_batches(2)
        optimizer.zero_grad()
        first, second = F.cross_entropy(model(x), y), F.cross_entropy(model(x2), y2)
        first.backward()
        if discard:
            optimizer.zero_grad()
        second.backward()


@by_servers
def test_a_second_graph_that_needs_the_old_values() -> None:
    with _session(3) as (model, optimizer, _), pytest.raises(RuntimeError) as caught:
        (x, y), (x2, y2) = make_batches(2)
        optimizer.zero_grad()
        first, second = F.cross_entropy(model(x), y), F.cross_entropy(model(x2), y2)
        first.backward()
        second.backward()
    assert "update='workers'" in "".join(caught.value.__notes__)


USES: dict[str, Callable[[Any], Any]] = {
    "forward": lambda model: model(torch.zeros(1, 5)),
    "norm": lambda model: model[0].weight.norm(),
    "state_dict": lambda model: model.state_dict(),
    "data": lambda model: model[0].weight.data,
    "print": lambda model: repr(model[0].weight),
    "add_": lambda model: model[0].weight.detach().add_(1),
}


@pytest.mark.parametrize("name", USES)
@by_servers
def test_a_use_between_backward_and_step(name: str) -> None:
    with (
        _session(3) as (model, optimizer, _),
        pytest.raises(TrainingLoopError, match=r"between backward\(\) and optimizer"),
    ):
        _backward(model, optimizer)
        USES[name](model)


# Changes by hand.
def _foreach(parameter: nn.Parameter) -> None:
    torch._foreach_mul_([parameter], 0.5)


def _out(parameter: nn.Parameter) -> None:
    torch.add(torch.ones(7, 5), 1, out=parameter)


def _data(parameter: nn.Parameter) -> None:
    parameter.data = torch.ones(7, 5)


def _item(parameter: nn.Parameter) -> None:
    parameter[0] = 1


def _augmented(parameter: nn.Parameter) -> None:
    parameter += 1


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "add_": lambda p: p.add_(1),
    "copy_": lambda p: p.copy_(torch.ones(7, 5)),
    "init": lambda p: nn.init.constant_(p, 0.3),
    "augmented": _augmented,
    "item": _item,
    "data": _data,
    "foreach": _foreach,
    "out": _out,
}


@pytest.mark.parametrize(("name", "steps"), few(CHANGES, STEPS[1:]))
@by_servers
def test_a_parameter_changed_while_pending(name: str, steps: int) -> None:
    with (
        _session(steps) as (model, _, _),
        torch.no_grad(),
        pytest.raises(TrainingLoopError, match=r"Call session.flush\(\) after.*update='workers'"),
    ):
        CHANGES[name](model[0].weight)


def _load(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    model.load_state_dict(
        {k: torch.randn(v.shape, generator=generator) for k, v in model.state_dict().items()}
    )


def _load_part(model: Any) -> None:
    model[2].load_state_dict({"weight": torch.ones(4, 7), "bias": torch.zeros(4)})


def _change_each(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.detach().mul_(1)  # waits
        for change in CHANGES.values():
            change(model[0].weight)


def _through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def _swap_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        value = parameter.detach().clone()
        parameter.data = value * 0.5


HAND = [_load, _load_part, _change_each, _through_data, _swap_data]


@pytest.mark.parametrize("change", HAND)
def test_a_change_on_all_ranks_counts_as_in_plain_pytorch(change: Callable[..., None]) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        for number, batch in enumerate(batches):
            train_classifier(model, optimizer, [batch])
            if number in {0, 2}:
                change(model)

    check_world_of_one(with_sgd(), loop, make_batches(5), slice_elems=9)
    by_rank = batches_of(2, count=5)
    plain = run_plain(with_sgd(), loop, merge(by_rank))

    def work(world: World) -> dict[str, torch.Tensor]:
        model, optimizer = build_seeded(with_sgd(), world.rank)
        with foreprop.parallelize(model, optimizer, world=world):
            loop(model, optimizer, by_rank[world.rank])
            return {k: v.clone() for k, v in model.state_dict().items()}

    first, second = run_cluster(2, work)
    check_same_bits(second, first)
    check_close(first, plain.model)


def test_a_change_before_the_first_step_counts() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        train_classifier(model, optimizer, batches)

    check_world_of_one(with_sgd(), loop, make_batches())
    check_world_of_two(with_sgd(), loop, batches_of(2))


@servers_only
@pytest.mark.parametrize(("culprit", "preset"), few([0, 1], ["p3", "kvstore", "tensorflow"]))
@by_servers
def test_a_change_on_one_rank_only(culprit: int, preset: str) -> None:
    def work(world: World) -> None:
        model, optimizer = build_seeded(with_sgd())
        batches = make_batches(3)
        with foreprop.parallelize(
            model, optimizer, world=world, preset=preset, step_timeout_s=10
        ) as session:
            train_classifier(model, optimizer, batches[:2])
            session.flush()
            if world.rank == culprit:
                with torch.no_grad():
                    model[0].weight.mul_(0.5)
            train_classifier(model, optimizer, batches[2:])
            session.flush()

    wanted = rf"0.weight was changed by hand .* on ranks \[{culprit}\] but not on ranks"
    with pytest.raises(TrainingLoopError, match=wanted):
        run_cluster(2, work)


def test_a_change_of_type_or_shape() -> None:
    with _session(2) as (model, optimizer, session), pytest.raises(ConfigError, match="float64"):
        session.flush()
        model.double()
        x, y = make_batches(1)[0]
        optimizer.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        optimizer.step()


def test_buffers_that_change_their_size() -> None:
    def work(world: World) -> None:
        model = nn.Linear(5, 3)
        model.register_buffer("extra", torch.zeros(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with foreprop.parallelize(model, optimizer, world=world, step_timeout_s=10):
            model.extra = torch.zeros(4)
            train_classifier(model, optimizer, make_batches(2))

    with pytest.raises(ConfigError, match="their shapes and types must stay"):
        run_cluster(2, work)


# A backward pass that needs a value which a reply has replaced.
def test_a_second_backward_pass_after_the_step() -> None:
    with _session(1) as (model, optimizer, _), pytest.raises(RuntimeError) as caught:
        x, y = make_batches(1)[0]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        optimizer.step()
        loss.backward()
    assert "modified by an inplace operation" in str(caught.value)
    assert "forward pass of its own" in "".join(caught.value.__notes__)
    assert len(caught.value.__notes__) == 1


@by_servers
def test_a_use_through_detach() -> None:
    """Autograd does not know that the detached value must outlive the parameter's gradient."""
    with _session(1) as (model, optimizer, _), pytest.raises(RuntimeError) as caught:
        x, y = make_batches(1)[0]
        x = x.clone().requires_grad_()
        for _ in range(2):
            optimizer.zero_grad()
            early = torch.tanh(x @ model[0].weight.detach().t())
            F.cross_entropy(model[1:](model[0](early @ torch.ones(7, 5))), y).backward()
            optimizer.step()
    assert "parameter.detach().clone()" in "".join(caught.value.__notes__)


def test_a_copy_of_the_detached_value_is_the_way_out() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        for x, y in batches:
            x = x.clone().requires_grad_()
            optimizer.zero_grad()
            early = torch.tanh(x @ model[0].weight.detach().clone().t())
            F.cross_entropy(model[1:](model[0](early @ torch.ones(7, 5))), y).backward()
            optimizer.step()

    check_world_of_one(with_sgd(), loop, make_batches())


def test_grad_gives_advice_too() -> None:
    with _session(1) as (model, optimizer, _), pytest.raises(RuntimeError) as caught:
        x, y = make_batches(1)[0]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        optimizer.step()
        torch.autograd.grad(loss, list(model.parameters()))
    assert caught.value.__notes__


def test_other_errors_of_autograd_get_no_advice() -> None:
    with _session(1) as (model, _, _), pytest.raises(RuntimeError) as caught:
        loss = model(torch.zeros(1, 5)).sum()
        loss.backward()
        loss.backward()
    assert not getattr(caught.value, "__notes__", ())


def test_autograd_is_given_back() -> None:
    before = torch.autograd.backward, torch.autograd.grad
    with _session(1):
        assert torch.autograd.backward is not before[0]
    assert (torch.autograd.backward, torch.autograd.grad) == before


# The model's own zero_grad.
@by_servers
def test_zero_grad_of_the_model_in_place_right_after_the_step_is_an_error() -> None:
    """It writes zeros into gradients that may be on their way; the optimizer's own is right."""
    with (
        pytest.raises(TrainingLoopError, match=r"Use optimizer.zero_grad\(\)"),
        _session(0) as (model, optimizer, _),
    ):
        _zeroing(model, optimizer, make_batches(2))


def _zeroing(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for x, y in batches:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.zero_grad(set_to_none=False)


def test_zero_grad_of_the_model_in_place_before_the_forward_pass_is_right() -> None:
    """All has been sent once the evaluation has used the parameters."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            model.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()

    check_world_of_one(with_sgd(), loop, make_batches(5))


@servers_only
@by_servers
def test_zero_grad_in_place_while_a_link_is_slow_is_an_error() -> None:
    def work(world: World) -> None:
        model = nn.Sequential(nn.Linear(5, 400), nn.Linear(400, 400), nn.Linear(400, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with foreprop.parallelize(model, optimizer, world=world, link_rate_bits_per_s=2e7):
            _zeroing(model, optimizer, make_batches(3))

    with pytest.raises(TrainingLoopError, match="changed while it was being sent"):
        run_cluster(2, work)


@servers_only
def test_zero_grad_of_the_optimizer_in_place_while_a_link_is_slow_is_right() -> None:
    def work(world: World) -> dict[str, torch.Tensor]:
        model, optimizer = build_seeded(with_sgd(_wide))
        with foreprop.parallelize(model, optimizer, world=world, link_rate_bits_per_s=4e7):
            for x, y in make_batches(3):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            return {k: v.clone() for k, v in model.state_dict().items()}

    first, second = run_cluster(2, work)
    check_same_bits(second, first)
    plain = run_plain(with_sgd(_wide), train_classifier, make_batches(3))
    check_close(first, plain.model)


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 300), nn.Linear(300, 300), nn.Linear(300, 3))


# Closed sessions.
@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("raises", [False, True])
def test_a_rank_that_ends_before_its_first_step_is_named_at_once(leaver: int, raises: bool) -> None:
    errors: dict[int, BaseException] = {}

    def work(world: World) -> None:
        model, optimizer = build_seeded(with_sgd())
        try:
            with foreprop.parallelize(model, optimizer, world=world, step_timeout_s=60):
                if world.rank != leaver:
                    train_classifier(model, optimizer, make_batches(2))
                elif raises:
                    raise LookupError("no data here")
        except (LookupError, foreprop.ForepropError) as error:
            errors[world.rank] = error

    run_cluster(2, work)
    told = errors[1 - leaver]
    if raises:
        assert isinstance(told, foreprop.PeerLost)
        assert f"rank {leaver} ended: LookupError: no data here" in str(told)
    elif leaver and Config.resolve().architecture != "ring":
        assert isinstance(told, foreprop.PeerLost)
        assert "rank 1 has left the session, but ranks [0] are at step 1" in str(told)
    else:
        assert isinstance(told, TrainingLoopError)
        assert f"rank {leaver}: the session was closed before its first step" in str(told)


@pytest.mark.parametrize("architecture", ["p2p", "ring"])
def test_who_fails_in_close_is_not_waited_for(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an error of anybody's: the others waited for its part until `step_timeout_s`."""
    by_rank, settle_all = batches_of(2), Training.settle_all
    trained = threading.Barrier(2, timeout=60)  # or who is late would not come to close()

    def fail(training: Training) -> None:
        if training.world.rank == 0:
            raise ArithmeticError("in an optimizer's last update")
        settle_all(training)

    def work(world: World) -> None:
        model, optimizer = build_seeded(with_sgd())
        session = foreprop.parallelize(model, optimizer, world=world, architecture=architecture)
        train_classifier(model, optimizer, by_rank[world.rank])
        trained.wait()
        monkeypatch.setattr(Training, "settle_all", fail)
        session.close()

    before = Snapshot.take()
    with pytest.raises(ArithmeticError, match="last update"):
        run_cluster(2, work)
    assert not wait_for_leaks(before, 2.0)


def test_nothing_is_left_after_an_error_in_the_users_loop() -> None:
    before = Snapshot.take()
    model, optimizer = build_seeded(with_sgd(small_model))
    with (
        pytest.raises(ZeroDivisionError),
        foreprop.parallelize(model, optimizer, world=worlds(1)[0]),
    ):
        train_classifier(model, optimizer, make_batches(2))
        _backward(model, optimizer)
        _ = 1 / 0
    assert not wait_for_leaks(before, 2.0)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    _backward(model, optimizer)
    optimizer.step()


# Whose step() it was.
@servers_only
@pytest.mark.parametrize("begins", [0, 2])
def test_an_optimizer_that_parallelize_was_not_given_is_named(begins: int) -> None:
    with _session(begins, update="servers") as (model, _, _):
        other = torch.optim.Adam(model.parameters())
        with pytest.raises(TrainingLoopError) as caught:
            train_classifier(model, other, make_batches(4))
        told = "step the one that parallelize() was given (SGD), or give it the other."
        assert f"Another optimizer has {_named(caught)}, too (Adam)" in str(caught.value)
        assert told in str(caught.value)


def _named(caught: pytest.ExceptionInfo[TrainingLoopError]) -> str:
    return next(name for name in str(caught.value).split() if name.endswith((".weight", ".bias")))


@by_servers
@servers_only
def test_no_other_optimizer_is_named_where_there_is_none() -> None:
    with _session(3) as (model, optimizer, _):
        _backward(model, optimizer)
        with pytest.raises(TrainingLoopError, match="is used between backward") as caught:
            model(torch.randn(2, 5))
        assert "nother optimizer" not in str(caught.value)
        told = "Call optimizer.step() first, of the SGD that parallelize() was given."
        assert told in str(caught.value)


@servers_only
def test_where_the_step_was_of_another_model_s_optimizer_its_own_is_named() -> None:
    """As in a GAN, whose discriminator's was meant for the generator."""
    with _session(3, update="servers") as (model, optimizer, _):
        other = nn.Linear(2, 2)
        stepped = torch.optim.Adam(other.parameters())
        _backward(model, optimizer)
        other(torch.ones(1, 2)).sum().backward()
        stepped.step()
        with pytest.raises(TrainingLoopError) as caught:
            model(torch.randn(2, 5))
        assert "first, of the SGD that parallelize() was given." in str(caught.value)
        assert "nother optimizer" not in str(caught.value)
