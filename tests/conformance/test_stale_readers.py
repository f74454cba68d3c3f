"""Readers that torch does not tell about: C++ and aliases. `wait`, `check_stale`."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from foreprop.config import Config
from foreprop.engine.world import World
from foreprop.errors import LocalProtocolError, TrainingLoopError
from foreprop.params.stalereaders import StaleReaders
from foreprop.session.composition import connect
from foreprop.session.session import ConnectedSession
from tests.cluster import run_cluster, worlds
from tests.conformance.matrices import few
from tests.conformance.parity import (
    Batch,
    batches_of,
    build_seeded,
    check_close,
    check_same_bits,
    make_batches,
    merge,
    servers_only,
    small_model,
    train_classifier,
    with_sgd,
)
from tests.tiers import long_cases

RING = Config.resolve().architecture == "ring"
SLOW: dict[str, Any] = {} if RING else {"link_rate_bits_per_s": 20_000}
UPDATES = ["servers"] if RING else ["servers", "workers"]


@pytest.fixture(scope="session")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A C++ extension of few headers; `torch.utils.cpp_extension` takes three times as long."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    cpp_extension: Any = pytest.importorskip("torch.utils.cpp_extension")
    libraries = Path(torch.__file__).parent / "lib"
    built = tmp_path_factory.mktemp("extension") / "stale_reader.so"
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    subprocess.run(
        [
            *(compiler, "-std=c++20", "-O0", "-shared", "-fPIC", "-o", built),
            *(f"-I{folder}" for folder in includes),
            str(Path(__file__).with_name("stale_reader.cpp")),
            *(f"-L{libraries}", "-ltorch_python", "-ltorch_cpu", "-lc10"),
        ],
        check=True,
        timeout=240,
    )
    spec = importlib.util.spec_from_file_location("stale_reader", built)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Unseen:
    """The same in Python: torch tells our parameters of nothing."""

    @staticmethod
    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return F.linear(x, weight)

    @staticmethod
    def total(weight: torch.Tensor) -> float:
        with torch._C.DisableTorchFunctionSubclass():
            place, count = weight.data_ptr(), weight.numel()
        return sum((ctypes.c_float * count).from_address(place))


@pytest.fixture(params=["Python", *long_cases("C++")])
def reader(request: pytest.FixtureRequest) -> Any:
    """With functions that read parameters without their knowledge; C++ takes 12 s to compile."""
    return _Unseen if request.param == "Python" else request.getfixturevalue("extension")


class _Reading(nn.Module):
    def __init__(self, linear: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 5) / 3)
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x, self.weight)


def _with(linear: Callable[..., torch.Tensor]) -> Any:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(_Reading(linear), nn.Tanh(), nn.Linear(24, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    return build


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
) -> list[float]:
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _receive_late(session: ConnectedSession) -> None:
    """Whoever reads without waiting does so before a value can have come."""

    def delay(stream: Any) -> None:
        receive_into = stream.receive_into

        def receive_late(buffer: memoryview) -> int:
            time.sleep(0.1)
            received: int = receive_into(buffer)
            return received

        stream.receive_into = receive_late

    for stream in session._training.backends.engines[0]._streams:  # type: ignore[attr-defined]
        delay(stream)


def _open(
    build: Any, world: World | None = None, **settings: Any
) -> tuple[Any, torch.optim.Optimizer, ConnectedSession]:
    world = world or worlds(1)[0]
    model, optimizer = build_seeded(build, seed=world.rank)
    return (
        model,
        optimizer,
        connect(model, optimizer, Config.resolve(**SLOW, **settings), world=world),
    )


# wait="modules"
@servers_only
@pytest.mark.timeout(300)
@pytest.mark.parametrize("update", UPDATES)
def test_a_layer_that_reads_unseen_has_the_bits_of_plain_pytorch(reader: Any, update: str) -> None:
    batches = make_batches(4)
    plain, plain_optimizer = build_seeded(_with(reader.linear))
    wanted = _train(plain, plain_optimizer, batches)
    model, optimizer, session = _open(_with(reader.linear), wait="modules", update=update)
    with session:
        assert _train(model, optimizer, batches) == wanted
        check_same_bits(model.state_dict(), plain.state_dict())


@pytest.mark.timeout(300)
@servers_only
def test_without_waiting_at_modules_it_reads_old_values(reader: Any) -> None:
    """What the setting is for; the links are slow enough to show it."""
    batches = make_batches(4)
    wanted = _train(*build_seeded(_with(reader.linear)), batches)
    model, optimizer, session = _open(_with(reader.linear), update="servers")
    # or the next gradient is there before the value that it should have come from
    with contextlib.suppress(LocalProtocolError, TrainingLoopError), session:
        _receive_late(session)
        assert _train(model, optimizer, batches) != wanted


@servers_only
@pytest.mark.timeout(300)
def test_such_a_layer_in_a_world_of_two(reader: Any) -> None:
    by_rank = batches_of(2, count=4)
    plain, plain_optimizer = build_seeded(_with(reader.linear))
    _train(plain, plain_optimizer, merge(by_rank))

    def work(world: World) -> dict[str, torch.Tensor]:
        model, optimizer, session = _open(_with(reader.linear), world, wait="modules")
        with session:
            _train(model, optimizer, by_rank[world.rank])
            return {name: value.clone() for name, value in model.state_dict().items()}

    first, second = run_cluster(2, work)
    check_same_bits(second, first)
    check_close(first, plain.state_dict())


# check_stale
@servers_only
@pytest.mark.timeout(300)
@pytest.mark.parametrize("update", UPDATES)
def test_such_a_layer_is_found_and_named(reader: Any, update: str) -> None:
    model, optimizer, session = _open(_with(reader.linear), check_stale=True, update=update)
    with session, pytest.raises(TrainingLoopError, match=r"aten[.:\w]+ reads .* of 0\.weight"):
        _train(model, optimizer, make_batches(4))


@pytest.mark.timeout(300)
@servers_only
@pytest.mark.parametrize("update", [UPDATES[0], *long_cases(*UPDATES[1:])])
def test_who_reads_past_aten_gets_no_number(reader: Any, update: str) -> None:
    build = _with(F.linear)
    model, optimizer, session = _open(build, check_stale=True, update=update)
    with session:
        _receive_late(session)
        _train(model, optimizer, make_batches(3))
        assert math.isnan(reader.total(model[0].weight))
        session.flush()
        assert math.isfinite(reader.total(model[0].weight))


ALIASES: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "view": lambda p: p.detach().view(-1)[3:5],
}


@pytest.mark.parametrize(("way", "update"), few(ALIASES, UPDATES))
def test_an_alias_that_was_taken_earlier_is_found(way: str, update: str) -> None:
    model, optimizer, session = _open(with_sgd(), check_stale=True, update=update)
    alias = ALIASES[way](model[0].weight)
    with session:
        train_classifier(model, optimizer, make_batches(3))
        with pytest.raises(TrainingLoopError, match=r"memory of 0\.weight"):
            alias.sum()
        session.flush()
        assert torch.equal(alias, ALIASES[way](model[0].weight))


@servers_only
@pytest.mark.parametrize("update", [UPDATES[0], *long_cases(*UPDATES[1:])])
def test_an_array_of_numpy_that_was_taken_earlier_is_not_a_number(update: str) -> None:
    model, optimizer, session = _open(with_sgd(), check_stale=True, update=update)
    array = model[0].weight.detach().numpy()
    with session:
        _receive_late(session)
        train_classifier(model, optimizer, make_batches(3))
        assert math.isnan(array.sum())
        session.flush()
        assert (array == model[0].weight.detach().numpy()).all()
        assert math.isfinite(array.sum())


def test_an_address_is_asked_for_anew() -> None:
    """`data_ptr()` waits; who keeps an address over steps has an alias."""
    batches = make_batches(3)
    plain, plain_optimizer = build_seeded(with_sgd())
    train_classifier(plain, plain_optimizer, batches)
    model, optimizer, session = _open(with_sgd(), update="servers")
    with session:
        train_classifier(model, optimizer, batches)
        model[0].weight.data_ptr()
        with torch._C.DisableTorchFunctionSubclass():
            now = model[0].weight.detach().clone()
        assert torch.equal(now, plain.state_dict()["0.weight"])


DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize(("dtype", "update"), few(DTYPES, UPDATES), ids=str)
def test_checking_changes_no_bits(dtype: torch.dtype, update: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model().to(dtype)
        for parameter in model.parameters():  # one in another layout, and one without gradients
            if parameter.ndim == 2 and dtype != torch.bfloat16:
                parameter.data = parameter.data.t().contiguous().t()
        model.unused = nn.Parameter(torch.ones(3, dtype=dtype))  # type: ignore[assignment]
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    batches = [(x.to(dtype), y) for x, y in make_batches(4)]
    plain, plain_optimizer = build_seeded(build)
    train_classifier(plain, plain_optimizer, batches)
    model, optimizer, session = _open(build, check_stale=True, update=update)
    with session:
        train_classifier(model, optimizer, batches[:2])
        session.flush()
        train_classifier(model, optimizer, batches[2:])
    check_same_bits(model.state_dict(), plain.state_dict())


def test_checking_with_changes_by_hand_in_a_world_of_two() -> None:
    def loop(
        model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], flush: Any
    ) -> None:
        for batch in batches:
            train_classifier(model, optimizer, [batch])
            flush()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)

    by_rank = batches_of(2, count=4)
    plain, plain_optimizer = build_seeded(with_sgd())
    loop(plain, plain_optimizer, merge(by_rank), lambda: None)

    def work(world: World) -> dict[str, torch.Tensor]:
        model, optimizer, session = _open(with_sgd(), world, check_stale=True)
        with session:
            loop(model, optimizer, by_rank[world.rank], session.flush)
        return model.state_dict()

    first, second = run_cluster(2, work)
    check_same_bits(second, first)
    check_close(first, plain.state_dict())


@servers_only
def test_what_servers_leave_unchanged_is_the_old_value() -> None:
    """No rank has a gradient: servers answer that everything stays, and send nothing."""
    model, optimizer, session = _open(with_sgd(), check_stale=True, update="servers")
    with session:
        train_classifier(model, optimizer, make_batches(3))
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.zero_grad()
        optimizer.step()
        check_same_bits(model.state_dict(), wanted)


def test_a_mode_of_somebody_else_above_ours() -> None:
    """The session ends while another mode is entered: ours does nothing from then on."""
    readers = StaleReaders()
    parameter = nn.Parameter(torch.ones(3))
    end = readers.watch()
    other = StaleReaders()
    with other:
        readers.pending("p", parameter, poisoned=True)
        assert torch.isnan(torch.tensor(0.0).new_tensor(float("nan")))
        end()
        assert parameter.sum() == 3
    readers.__exit__(None, None, None)
