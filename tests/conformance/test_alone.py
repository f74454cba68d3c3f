"""A world of one is plain PyTorch: the same bits, and nothing that plain PyTorch does not have."""

from __future__ import annotations

import copy
import inspect
import json
import os
import socket
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

import foreprop
from foreprop.errors import ConfigError
from foreprop.session.alone import LoneSession
from foreprop.session.session import ConnectedSession
from tests.cluster import worlds
from tests.conformance.parity import (
    Batch,
    build_seeded,
    check_same_bits,
    make_batches,
    servers_only,
    small_model,
    traces_of,
    train_classifier,
    with_sgd,
)
from tests.leaks import Snapshot, find_leaks

Trainer = Callable[[nn.Module, Any, Sequence[Batch]], Any]

IMPLEMENTATIONS: list[dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}]
OPTIMIZERS = [
    cls
    for cls in vars(torch.optim).values()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)
    if cls is not torch.optim.Optimizer
]


class Halving(torch.optim.SGD):
    """Calls its base class's step, whose hooks torch then runs as well as its own."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(closure)


class Whole(torch.optim.Optimizer):
    """Somebody's own: no update of an element without all others, and state in its group."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["seen"] += 1
            length = torch.nn.utils.get_total_norm([p.grad for p in group["params"]])
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / length * group["lr"] / group["seen"])
        return loss


def matrices() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 3, bias=False))


class Words(nn.Module):
    def __init__(self, *, dense: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 3, sparse=True)
        self.out = nn.Linear(3, 3).requires_grad_(dense)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.table((x[:, :2].abs() * 5).long().clamp(max=10)).sum(1))


def sparse_only() -> nn.Module:
    return Words(dense=False)


def with_optimizer(cls: Any, options: dict[str, Any]) -> Any:
    makers = {"Muon": matrices, "SparseAdam": sparse_only}
    lr = 1.0 if cls is torch.optim.LBFGS else 0.01

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = makers.get(cls.__name__, small_model)()
        parameters = [p for p in model.parameters() if p.requires_grad]
        return model, cls(parameters, lr=lr, **options)

    return build


def train_with_closure(model: nn.Module, optimizer: Any, batches: Sequence[Batch]) -> list[float]:
    losses = []
    for x, y in batches:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        losses.append(float(optimizer.step(closure)))
    return losses


def check_as_plain(build: Any, train: Trainer, **settings: Any) -> None:
    """The same bits of parameters, optimizer state and results; and the objects are left alone."""
    batches = make_batches(5)
    plain, plain_optimizer = build_seeded(build)
    wanted = train(plain, plain_optimizer, batches)
    model, optimizer = build_seeded(build)
    before, attributes = traces_of(model, optimizer), set(vars(optimizer))
    with foreprop.parallelize(model, optimizer, **settings) as session:
        assert isinstance(session, LoneSession)
        assert traces_of(model, optimizer) == before
        assert train(model, optimizer, batches) == wanted
    check_same_bits(model.state_dict(), plain.state_dict())
    check_same_values(optimizer.state_dict(), plain_optimizer.state_dict())
    assert set(vars(optimizer)) - attributes <= set(vars(plain_optimizer))


def check_same_values(got: Any, wanted: Any) -> None:
    """Of nested states: LBFGS has lists of tensors."""
    ours, shape = tree_flatten(got)
    theirs, wanted_shape = tree_flatten(wanted)
    assert shape == wanted_shape
    for mine, other in zip(ours, theirs, strict=True):
        assert type(mine) is type(other)
        assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other


def implementations(cls: Any) -> list[dict[str, Any]]:
    known = inspect.signature(cls.__init__).parameters
    return [options for options in IMPLEMENTATIONS if not set(options) - set(known)]


def variants() -> Iterator[Any]:
    """Of each class's implementations `make test` has one, of the next class the next one."""
    for number, cls in enumerate([*OPTIMIZERS, Halving, Whole]):
        options = implementations(cls)
        for place, own in enumerate(options):
            is_long = place != number % len(options)
            yield pytest.param(cls, own, marks=[pytest.mark.long] if is_long else [])


@pytest.mark.parametrize(("cls", "options"), [*variants()])
def test_every_optimizer_is_as_in_plain_pytorch(cls: Any, options: dict[str, Any]) -> None:
    train: Trainer = train_with_closure if cls is torch.optim.LBFGS else train_classifier
    check_as_plain(with_optimizer(cls, options), train)


def test_no_optimizer_of_torchs_is_missing() -> None:
    names = {cls.__name__ for cls in OPTIMIZERS}
    assert {"SGD", "AdamW", "LBFGS", "SparseAdam", "Adafactor"} <= names


@pytest.mark.parametrize(
    "settings",
    [{"preset": preset} for preset in foreprop.PRESETS]
    + [
        {"architecture": "ring"},
        {"architecture": "auto", "slice_elems": "auto"},
        {"wire_dtype": "bfloat16"},
        {"reduction": "sum", "sparse_reduction": "mean"},
        {"backward_passes": 3},
        {"local_aggregation": "on"},
        {"sparse_parameters": "table.weight", "dense_parameters": "other"},
    ],
)
@servers_only
def test_settings_of_how_things_are_sent_change_no_bit(settings: dict[str, Any]) -> None:
    check_as_plain(with_sgd(Words, momentum=0.0), train_classifier, **settings)


def edit_everything(model: nn.Module, optimizer: Any, batches: Sequence[Batch]) -> list[float]:
    """What loops do to gradients, parameters and optimizers between steps."""
    seen = []
    for number, (x, y) in enumerate(batches):
        for _ in range(number + 1):  # accumulation, of more passes each time
            (F.cross_entropy(model(x), y) / (number + 1)).backward()
        if number == 1:
            continue  # no step: the gradients stay for the next one
        seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.mul_(0.9)
        optimizer.param_groups[0]["lr"] *= 0.7
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        model[0].weight.data.clamp_(-0.5, 0.5)  # type: ignore[index, union-attr]
        optimizer.state[model[2].bias].clear()  # type: ignore[index]
        if number == 2:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.5})
    return seen


def test_gradients_parameters_and_optimizer_may_be_edited_at_will() -> None:
    check_as_plain(with_sgd(), edit_everything)


# Nothing beside it.
@pytest.mark.parametrize("launched", [False, True], ids=["plainly", "by torchrun"])
def test_no_process_thread_or_socket_is_made(
    launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launched:  # the port is one that nobody can listen at
        variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    made: list[str] = []
    for owner, name in (
        (socket.socket, "__init__"),
        (threading.Thread, "start"),
        (subprocess.Popen, "__init__"),
        (os, "fork"),
    ):
        monkeypatch.setattr(owner, name, lambda *_, name=name, **__: made.append(name))
    model, optimizer = build_seeded(with_sgd())
    train_classifier(model, optimizer, make_batches(1))
    before = Snapshot.take()
    loader = [(x, y) for x, y in make_batches()]
    with foreprop.parallelize(model, optimizer, clip_grad_norm=1.0, ema=0.5) as session:
        data: Any = torch.utils.data.DataLoader(torch.ones(4, 2))  # type: ignore[arg-type]
        assert foreprop.shard(data) is data
        train_classifier(model, optimizer, loader)
        session.ema_state_dict()
        assert session.grad_norm is not None
        assert not find_leaks(before)
    assert made == []


def test_the_optimizers_state_is_still_there_afterwards() -> None:
    model, optimizer = build_seeded(with_sgd())
    session = foreprop.parallelize(model, optimizer)
    train_classifier(model, optimizer, make_batches(1))
    session.close()
    session.close()
    assert all("momentum_buffer" in optimizer.state[p] for p in model.parameters())
    assert copy.deepcopy(optimizer).state_dict()["state"]


# Settings that mean something.
def clipping_by_hand(limit: float) -> Trainer:
    def train(model: nn.Module, optimizer: Any, batches: Sequence[Batch]) -> list[float]:
        norms = []
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
            optimizer.step()
        return norms

    return train


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adafactor, Halving])
def test_clip_grad_norm_is_as_torchs(cls: Any) -> None:
    build, batches = with_optimizer(cls, {}), make_batches(5)
    plain, plain_optimizer = build_seeded(build)
    wanted = clipping_by_hand(0.05)(plain, plain_optimizer, batches)
    model, optimizer = build_seeded(build)
    norms = []
    with foreprop.parallelize(model, optimizer, clip_grad_norm=0.05) as session:
        assert session.grad_norm is None
        for batch in batches:
            train_classifier(model, optimizer, [batch])
            norms.append(session.grad_norm)
    assert norms == wanted
    assert min(wanted) > 0.05
    check_same_bits(model.state_dict(), plain.state_dict())
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize("by_name", [False, True])
def test_the_gradients_that_a_closure_makes_are_clipped(by_name: bool) -> None:
    def train(clip: bool) -> nn.Module:
        model, optimizer = build_seeded(with_optimizer(torch.optim.LBFGS, {"max_iter": 4}))
        ((x, y),) = make_batches(1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if not clip:
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            return loss.detach()

        settings = {"clip_grad_value": 0.01} if clip else {}
        with foreprop.parallelize(model, optimizer, **settings):
            for _ in range(3):
                optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        return model

    check_same_bits(train(True).state_dict(), train(False).state_dict())


@pytest.mark.parametrize("settings", [{"clip_grad_norm": 0.1}, {"clip_grad_value": 0.02}])
def test_clipping_is_as_with_servers_with_sparse_gradients_too(settings: dict[str, Any]) -> None:
    found = []
    for world in (None, worlds(1)[0]):
        model, optimizer = build_seeded(with_sgd(Words, momentum=0.0))
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            train_classifier(model, optimizer, make_batches())
            session.flush()
            norm = session.grad_norm
            found.append((copy.deepcopy(model.state_dict()), norm))
    (alone, mine), (served, theirs) = found
    for name, value in served.items():
        torch.testing.assert_close(alone[name], value, rtol=1e-5, atol=1e-7)
    assert mine == (theirs and pytest.approx(theirs, rel=1e-5))


@pytest.mark.parametrize("make", [small_model, lambda: small_model().bfloat16()])
def test_moving_averages_have_the_bits_that_servers_make(make: Any) -> None:
    found = []
    for world in (None, worlds(1)[0]):
        model, optimizer = build_seeded(with_sgd(make, momentum=0.0))
        dtype = next(model.parameters()).dtype
        batches = [(x.to(dtype), y) for x, y in make_batches(6)]
        with foreprop.parallelize(model, optimizer, world=world, ema=0.7) as session:
            train_classifier(model, optimizer, batches[:3])
            kept = session.ema_state_dict()
            train_classifier(model, optimizer, batches[3:])
            last = session.ema_state_dict()
            session.load_ema_state_dict(kept)
            train_classifier(model, optimizer, batches[:1])
            found.append((kept, last, session.ema_state_dict()))
    for mine, theirs in zip(*found, strict=True):
        check_same_bits(mine, theirs)
    assert not torch.equal(next(iter(found[0][0].values())), next(iter(found[0][1].values())))


def test_moving_averages_of_tables_are_those_of_servers() -> None:
    """But for rounding: servers move a row's averages when somebody asks, by all steps at once."""
    found = []
    for world in (None, worlds(1)[0]):
        model, optimizer = build_seeded(with_sgd(Words, momentum=0.0))
        with foreprop.parallelize(model, optimizer, world=world, ema=0.7) as session:
            train_classifier(model, optimizer, make_batches(6))
            found.append(session.ema_state_dict())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


def test_moving_averages_move_once_in_a_step_that_calls_its_base_classs() -> None:
    Halving(small_model().parameters(), lr=1.0)  # so that torch gives both classes hooks
    torch.optim.SGD(small_model().parameters(), lr=1.0)
    model, optimizer = build_seeded(with_optimizer(Halving, {}))
    before = copy.deepcopy(model.state_dict())
    with foreprop.parallelize(model, optimizer, ema=0.5) as session:
        train_classifier(model, optimizer, make_batches(1))
        averages = session.ema_state_dict()
        assert session.stats()["steps"] == 1
    for name, value in model.state_dict().items():
        torch.testing.assert_close(averages[name], (before[name] + value) / 2)


def test_parameters_that_come_later_are_averaged_and_clipped_too() -> None:
    model = nn.ParameterDict({"a": torch.ones(2), "b": torch.full((2,), 4.0)})
    optimizer = torch.optim.SGD([model["a"]], lr=1.0)
    with foreprop.parallelize(model, optimizer, ema=0.5, clip_grad_value=1.0) as session:
        model["a"].sum().backward()
        optimizer.step()
        optimizer.add_param_group({"params": [model["b"]]})
        (5 * model["b"]).sum().backward()
        optimizer.step()
        averages = session.ema_state_dict()
    assert model["b"].tolist() == [3.0, 3.0]
    assert averages["b"].tolist() == [3.5, 3.5]
    assert averages["a"].tolist() == [-0.25, -0.25]  # 1, 0.5 + 0, 0.25 + -0.5


def train_scaled(
    model: nn.Module, optimizer: Any, limit: float | None
) -> tuple[list[float], list[float]]:
    """Returns the scales after each step, and the norms that torch found."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    settings = {"clip_grad_norm": 0.05} if limit is None else {}
    session = foreprop.parallelize(model, optimizer, scaler=scaler, **settings)
    scales, norms = [], []
    with session:
        for step, (x, y) in enumerate(make_batches(5)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) * (torch.inf if step == 3 else 1)
            scaler.scale(loss).backward()
            if limit is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            scaler.step(optimizer)
            if limit is None:
                norms.append(session.grad_norm)
            scaler.update()
            scales.append(scaler.get_scale())
    assert "step" not in vars(scaler)
    assert "step" not in vars(optimizer)
    return scales, norms


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_unscales_before_the_gradients_are_clipped(fused: bool) -> None:
    """A fused optimizer unscales within its step, and leaves the step out there, too."""
    build = with_optimizer(torch.optim.SGD, {"fused": fused})
    plain, plain_optimizer = build_seeded(build)
    wanted, _ = train_scaled(plain, plain_optimizer, 0.05)
    model, optimizer = build_seeded(build)
    scales, norms = train_scaled(model, optimizer, None)
    assert scales == wanted == [256, 512, 512, 256, 256]
    assert [norm < 10 for norm in norms] == [True, True, True, False, True]
    assert min(norms) > 0.05
    check_same_bits(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_leaves_out_is_a_step_of_the_averages(fused: bool) -> None:
    model, optimizer = build_seeded(with_optimizer(torch.optim.SGD, {"fused": fused}))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    before = copy.deepcopy(model.state_dict())
    with foreprop.parallelize(model, optimizer, scaler=scaler, ema=0.5) as session:
        with torch.no_grad():
            model[0].weight.add_(1.0)  # type: ignore[index, union-attr]
        (x, y), *_ = make_batches(1)
        scaler.scale(F.cross_entropy(model(x), y) * torch.inf).backward()
        scaler.step(optimizer)
        scaler.update()
        average = session.ema_state_dict()["0.weight"]
        assert session.stats()["steps"] == 1
    torch.testing.assert_close(average, before["0.weight"] + 0.5)


def test_a_scheduler_made_meanwhile_goes_on_afterwards() -> None:
    model, optimizer = build_seeded(with_sgd())
    session = foreprop.parallelize(model, optimizer, clip_grad_value=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        train_classifier(model, optimizer, make_batches(1))
        scheduler.step()
        session.close()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 8.0)
        optimizer.step()
        scheduler.step()
    assert model[0].weight.grad[0, 0] == 8.0  # type: ignore[index, union-attr]
    assert session.stats()["steps"] == 1


def test_a_trace_shows_when_layers_compute(tmp_path: Path) -> None:
    model, optimizer = build_seeded(with_sgd())
    before = traces_of(model, optimizer)
    with foreprop.parallelize(model, optimizer, trace=str(tmp_path)):
        train_classifier(model, optimizer, make_batches(2))
    (file,) = tmp_path.glob("worker-0.*.trace.json")
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    spans = {(e["cat"], e["name"], e["args"]["step"]) for e in events}
    layers, steps = ("0", "2", "4"), (1, 2)
    assert spans == {(k, n, s) for k in ("forward", "backward") for n in layers for s in steps}
    assert traces_of(model, optimizer) == before


def test_without_an_optimizer_gradients_are_the_users(tmp_path: Path) -> None:
    model, _ = build_seeded(with_sgd())
    with foreprop.parallelize(model, trace=str(tmp_path)) as session:
        assert isinstance(session, LoneSession)
        F.cross_entropy(model(make_batches(1)[0][0]), make_batches(1)[0][1]).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
        assert session.rows("0.weight", torch.tensor([2])).equal(model[0].weight[2:3])  # type: ignore[index, union-attr]
        assert session.grad_norm is None
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["clip_grad_norm", "clip_grad_value", "ema"])
def test_without_an_optimizer_there_is_no_step_to_be_part_of(name: str) -> None:
    with pytest.raises(ConfigError, match=f"given no optimizer, and {name} is 0.5: that is part"):
        foreprop.parallelize(small_model(), **{name: 0.5})


# One type, whoever takes part.
def test_both_kinds_of_session_are_foreprops() -> None:
    for world, cls in ((None, LoneSession), (worlds(1)[0], ConnectedSession)):
        model, optimizer = build_seeded(with_sgd())
        with foreprop.parallelize(model, optimizer, world=world) as session:
            assert isinstance(session, foreprop.Session)
            assert type(session) is cls
            assert (session.rank, session.world_size, session.planning) == (0, 1, False)
            assert repr(session).startswith("<foreprop.Session rank 0 of 1")
            assert ("without servers" in session.describe()) is (cls is LoneSession)


def test_they_answer_alike() -> None:
    numbers = torch.tensor([[0, 3], [3, 1]])
    answers = []
    for world in (None, worlds(1)[0]):
        model, optimizer = build_seeded(with_sgd())
        with foreprop.parallelize(model, optimizer, world=world) as session:
            train_classifier(model, optimizer, make_batches())
            session.flush()
            texts = []
            for ask in (
                lambda s=session: s.rows("nobody", numbers),
                lambda s=session: s.set_rows("0.weight", numbers, numbers),
                lambda s=session: s.save_tables("nowhere"),
                lambda s=session: s.load_tables("nowhere"),
                lambda s=session: s.ema_state_dict(),
                lambda s=session: s.load_ema_state_dict({}),
            ):
                with pytest.raises(ConfigError) as told:
                    ask()
                texts.append(str(told.value))
            with pytest.raises(IndexError):
                session.rows("0.weight", torch.tensor([7]))
            rows = session.rows("0.weight", numbers)
            state = {"rows": rows, **session.master_state_dict()}
            answers.append((texts, state, set(session.stats()), session.grad_norm))
    (texts, state, keys, norm), (other_texts, other_state, other_keys, other_norm) = answers
    assert texts == other_texts
    check_same_bits(state, other_state)
    assert (keys, norm) == (other_keys, other_norm)


@servers_only
def test_remote_tables_have_servers() -> None:
    with torch.device("meta"):
        table = nn.Embedding(10, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with foreprop.parallelize(table, optimizer, whole_tables="none") as session:
        assert isinstance(session, ConnectedSession)
        assert "1 server" in session.describe()
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        assert session.rows("weight", torch.tensor([1])).shape == (1, 2)


def test_what_else_is_on_the_meta_device_is_refused() -> None:
    model = nn.Linear(2, 2, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="weight, parameter bias are on the meta device"):
        foreprop.parallelize(model, optimizer)


@servers_only
def test_dedicated_servers_are_met() -> None:
    model, optimizer = build_seeded(with_sgd())
    with pytest.raises(ConfigError, match=r"dedicated_servers is 1, .* with torchrun"):
        foreprop.parallelize(model, optimizer, dedicated_servers=1)
