"""``check_replicas``: a parameter that is not the same on all ranks ends the run with its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.errors import ConfigError, ForepropError, TrainingLoopError
from tests.cluster import run_cluster
from tests.conformance.parity import make_batches, servers_only

pytestmark = pytest.mark.timeout(120)
WINDOW = 8


class Odd(nn.Module):
    """Parameters of several types, layouts and odd sizes; some are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.last = nn.Linear(7, 3)
        self.frozen = nn.Parameter(torch.arange(13.0), requires_grad=False)
        self.in_bf16 = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.in_float64 = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.numbers = nn.Parameter(torch.arange(11, dtype=torch.int16), requires_grad=False)
        self.across = nn.Parameter(torch.ones(6, 5).t())
        self.apart = nn.Parameter(torch.ones(6, 6)[:, ::2], requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = self.in_bf16.sum() + self.in_float64.sum() + self.across.sum()
        out: torch.Tensor = self.last(torch.tanh(self.first(x))) * more.float()
        return out


def train(
    change: Callable[[nn.Module, int, int], None], *, steps: int, ranks: int = 2, **about: Any
) -> list[BaseException | None]:
    """``change(model, rank, step)`` before each step; what each rank was told."""

    def work(world: Any) -> BaseException | None:
        model = Odd()
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.01)
        batches = make_batches(steps, seed=world.rank + 1)
        try:
            with foreprop.parallelize(
                model,
                optimizer,
                world=world,
                step_timeout_s=30,
                **{"check_replicas": WINDOW, **about},
            ):
                for step, (x, y) in enumerate(batches, start=1):
                    change(model, world.rank, step)
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
        except ForepropError as error:
            return error
        return None

    return run_cluster(ranks, work)


def flip(name: str, *, at: int, of: int = 1, bit: int = 5) -> Callable[[nn.Module, int, int], None]:
    """One bit of a parameter's last element, on one rank, before step ``at``.

    Not the last bit, whose difference the next updates may round away.
    """

    def change(model: nn.Module, rank: int, step: int) -> None:
        if (rank, step) == (of, at):
            parameter = dict(model.named_parameters())[name]
            with torch.no_grad():
                element = parameter[(-1,) * parameter.dim()].clone().view(1)
                element.view(torch.uint8)[0] ^= 1 << bit
                parameter[(-1,) * parameter.dim()] = element[0]

    return change


NAMES = [name for name, _ in Odd().named_parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_one_bit_of_one_parameter(name: str) -> None:
    told = train(flip(name, at=4), steps=3 * WINDOW)
    for error in told:
        assert isinstance(error, TrainingLoopError)
        assert "is not the same on rank 0 and rank 1, as compared in steps " in str(error)
    if name in ("frozen", "numbers", "apart"):  # nothing else comes of it
        assert all(f"parameter {name} is not the same" in str(error) for error in told)


def test_what_is_wrong_from_the_start_is_told_in_the_first_steps() -> None:
    for error in train(flip("frozen", at=1), steps=6, check_replicas=100):
        assert isinstance(error, TrainingLoopError)
        assert "parameter frozen is not the same" in str(error)
        assert "as compared in step 1 (1 of" in str(error)


@servers_only
def test_the_rank_that_differs_is_named() -> None:
    told = train(flip("frozen", at=3, of=2), steps=3 * WINDOW, ranks=3)
    assert all("on rank 0 and rank 2" in str(error) for error in told)


@servers_only
def test_where_servers_update_too() -> None:
    told = train(flip("frozen", at=3), steps=3 * WINDOW, update="servers")
    assert all("parameter frozen is not the same" in str(error) for error in told)


@pytest.mark.parametrize("about", [{}, {"update": "servers"}], ids=str)
def test_nothing_is_told_of_ranks_that_are_alike(about: dict[str, Any]) -> None:
    assert train(lambda *_: None, steps=5 * WINDOW, **about) == [None, None]


def test_it_can_be_left_out() -> None:
    assert train(flip("frozen", at=3), steps=3 * WINDOW, check_replicas=None) == [None, None]


def test_scalers_that_differ() -> None:
    def work(world: Any) -> str:
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0 * (1 + world.rank))
        try:
            with foreprop.parallelize(model, optimizer, world=world, step_timeout_s=30):
                for x, y in make_batches(8, seed=world.rank + 1):
                    optimizer.zero_grad()
                    scaler.scale(F.cross_entropy(model(x), y)).backward()
                    scaler.step(optimizer)
                    scaler.update()
        except TrainingLoopError as error:
            return str(error)
        return "nothing"

    for text in run_cluster(2, work):
        assert "the loss is scaled by 1024.0 on rank 0 and by 2048.0 on rank 1" in text


@pytest.mark.parametrize("steps", [-1, 3])
def test_a_window_that_cannot_be(steps: int) -> None:
    with pytest.raises(ConfigError, match="check_replicas"):
        foreprop.Config.resolve(check_replicas=steps)
