"""Ranks that do not agree are refused at once, on every rank, with both sides' values."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import foreprop
from foreprop.backends.composedworker import ServedBackend
from foreprop.core.manifest import Manifest
from foreprop.core.wire import Kind
from foreprop.engine import joining
from foreprop.engine.world import World
from foreprop.errors import ForepropError, HandshakeError
from tests.cluster import run_cluster
from tests.faults import wire_peers
from tests.faults.lost_peers import Soon
from tests.tiers import long_cases

TOLD_WITHIN_S = 8.0  # of 120, join_timeout_s, for which `run_cluster` does not wait


def model_of(width: int = 4, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width, bias=bias), nn.Linear(width, 2))


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(4, 2)


def join(world: World, make_model: Callable[[], nn.Module], **more: Any) -> ForepropError | None:
    """What parallelize() raises on this rank."""
    torch.manual_seed(0)
    model = make_model()
    make = more.pop("optimizer", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    try:
        session = foreprop.parallelize(model, make(model.parameters()), world=world, **more)
    except ForepropError as error:
        return error
    session.close()
    return None


def check_refused(differing: Callable[[World], dict[str, Any]], *texts: str, odd: int = 1) -> float:
    """Seconds that it took."""

    def work(world: World) -> ForepropError | None:
        more = differing(world) if world.rank == odd else {}
        return join(world, more.pop("model", model_of), **more)

    started_s = time.monotonic()
    errors = run_cluster(3, work)
    took_s = time.monotonic() - started_s
    for rank, error in enumerate(errors):
        assert isinstance(error, HandshakeError), (rank, error)
        for text in texts:
            assert re.search(text, str(error)), (rank, str(error))
    return took_s


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def slower(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("odd", [1, *long_cases(0)])
def test_another_shape(odd: int, soon: Soon) -> None:
    texts = (
        r"parameters\[0\] \(0.weight\).shape",
        r"\(4, 3\)",
        r"\(5, 3\)",
        "rank 0",
        r"rank [12]",
    )
    took_s = check_refused(lambda _: {"model": lambda: model_of(width=5)}, *texts, odd=odd)
    assert soon(took_s, TOLD_WITHIN_S)


@pytest.mark.long
def test_another_number_of_parameters() -> None:
    more = {"model": lambda: model_of(bias=False)}
    check_refused(lambda _: dict(more), "number of parameters: rank 0 has 4, rank 1 has 3")


@pytest.mark.long
def test_another_name() -> None:
    check_refused(
        lambda _: {"model": Renamed}, r"name: rank 0 has '0.weight', rank 1 has 'a.weight'"
    )


@pytest.mark.long
def test_another_optimizer() -> None:
    check_refused(
        lambda _: {"optimizer": adam}, "optimizer.name: rank 0 has 'SGD', rank 1 has 'Adam'"
    )


@pytest.mark.long
def test_another_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREPROP_UPDATE", "servers")
    check_refused(lambda _: {"optimizer": slower}, r"\.lr: rank 0 has 0.1, rank 1 has 0.05")


SETTINGS: dict[str, tuple[Any, str]] = {
    # servers refuse the first, the store the second
    "preset": ("kvstore", "reply: rank 0 has 'broadcast', rank 1 has 'notify'"),
    "servers_per_node": (2, "servers_per_node: rank 0 has 1, rank 1 has 2"),
    "slice_elems": (7, "slice_elems: rank 0 has 50000, rank 1 has 7"),
    "order": ("fifo", "order: rank 0 has 'priority', rank 1 has 'fifo'"),
    "workers_per_node": (3, "workers_per_node: rank 0 has 1, rank 1 has 3"),
    "dedicated_servers": (2, "dedicated_servers: rank 0 has 0, rank 1 has 2"),
}


@pytest.mark.parametrize("name", [*list(SETTINGS)[:2], *long_cases(*list(SETTINGS)[2:])])
def test_another_setting(name: str) -> None:
    value, text = SETTINGS[name]
    check_refused(lambda _: {name: value}, text)


@pytest.mark.parametrize("odd", [1, *long_cases(0)])
def test_another_world_size(odd: int) -> None:
    def grow(world: World) -> dict[str, Any]:
        world.size = 5
        return {}

    values = {
        0: "world size: rank 0 has 5, rank [12] has 3",
        1: "world size: rank 0 has 3, rank 1 has 5",
    }
    check_refused(grow, values[odd], odd=odd)


@pytest.mark.parametrize("field", ["torch", *long_cases("foreprop")])
def test_another_version(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    make = ServedBackend._manifest

    def manifest(self: ServedBackend) -> Manifest:
        made, rank = make(self), self._setup.world.rank
        return msgspec.structs.replace(made, **{field: "0.0.1"}) if rank == 1 else made

    monkeypatch.setattr(ServedBackend, "_manifest", manifest)
    check_refused(lambda _: {}, f"{field}: rank 0 has '.*', rank 1 has '0.0.1'")


def test_a_server_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dedicated one may come from another installation."""
    monkeypatch.setattr(joining, "__version__", "0.0.1")
    check_refused(lambda _: {}, r"foreprop: rank 0 has '.*', server \d '?0.0.1")


def test_a_rank_that_fails_before_it_meets_a_server_is_heard_of() -> None:
    """Here: an interface that rank 2 does not have."""

    def work(world: World) -> ForepropError | None:
        more = {"interface": "127.0.0.1" if world.rank < 2 else "192.0.2.1"}
        return join(world, model_of, **more)

    errors = run_cluster(3, work)  # waits for less than join_timeout_s
    for error in errors:
        assert "cannot listen on 192.0.2.1" in str(error), errors
    assert "rank 2" in str(errors[0])


def test_a_rank_that_never_comes_is_named() -> None:
    def work(world: World) -> ForepropError | None:
        return None if world.rank == 1 else join(world, model_of, join_timeout_s=3.0)

    errors = run_cluster(3, work, local_size=3)
    for rank in (0, 2):
        assert isinstance(errors[rank], foreprop.StepTimeout)
        assert re.search("join_timeout_s", str(errors[rank])), errors
    assert any("rank 1" in str(error) for error in errors), errors


class _SlowToGoOn:
    """A lock whose holder is held up when it lets go, as by another process."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        time.sleep(0.05)


def test_who_says_hello_at_one_time_is_welcomed_once() -> None:
    with wire_peers.session(joined=False, world_size=3) as made:
        workers = [made.stranger(rank) for rank in range(3)]
        while len(made.server._entrance) < 3:
            time.sleep(0.01)
        made.server.lock = _SlowToGoOn(made.server.lock)
        for worker in workers:
            worker.hello(wire_peers.manifest_of(3))
        for worker in workers:
            worker.expect(Kind.WELCOME)
            worker.send(Kind.BYE)
        for worker in workers:
            frame = worker.receive()
            assert frame is None, Kind(frame[0].kind).name
        made.wait()
        assert made.failure == [None]
