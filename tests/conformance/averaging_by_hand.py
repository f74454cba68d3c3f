"""Compares training loops that use gradients with ranks that average gradients by hand.

``loop(model, optimizer, batches, average)`` is a user's training loop. It calls ``average(model)``
where its gradients are to be averages: with foreprop that does nothing, and in the reference it
adds up the ranks' gradients in rank order and divides by their number, without foreprop. So the
reference is what DDP would do, for loops that DDP cannot run, too.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.engine.world import World
from tests.cluster import run_cluster
from tests.conformance.parity import Batch, Build, batches_of, build_seeded, small_model

_OWN = ("prev_loss",)
"""What LBFGS keeps of a rank's own."""

Average = Callable[[nn.Module], None]
ReadingLoop = Callable[[nn.Module, Any, Sequence[Batch], Average], Any]


@dataclass
class Outcome:
    """What a rank has at the end."""

    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    result: Any


class ByHand:
    """Averages gradients of ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._meeting = threading.Barrier(ranks, timeout=60)
        self._gradients: list[Sequence[torch.Tensor | None]] = [()] * ranks

    def of(self, rank: int) -> Average:
        def average(model: nn.Module) -> None:
            own = [parameter.grad for parameter in model.parameters()]
            self._gradients[rank] = [None if g is None else g.clone() for g in own]
            self._meeting.wait()
            for parameter, parts in zip(
                model.parameters(), zip(*self._gradients, strict=True), strict=True
            ):
                self._show(parameter, [part for part in parts if part is not None])
            self._meeting.wait()

        return average

    def _show(self, parameter: nn.Parameter, parts: Sequence[torch.Tensor]) -> None:
        if parts:
            mean = parts[0].clone()
            for part in parts[1:]:
                mean += part
            mean /= self._ranks
            if parameter.grad is None:
                parameter.grad = mean
            else:
                parameter.grad.data.copy_(mean)


def run_by_hand(build: Build, loop: ReadingLoop, by_rank: Sequence[Sequence[Batch]]) -> list[Any]:
    hand = ByHand(len(by_rank))

    def work(world: World) -> Outcome:
        model, optimizer = build_seeded(build)
        result = loop(model, optimizer, by_rank[world.rank], hand.of(world.rank))
        return _outcome(model, optimizer, result)

    return run_cluster(len(by_rank), work)


def run_averaged(
    build: Build,
    loop: ReadingLoop,
    by_rank: Sequence[Sequence[Batch]],
    *,
    local_size: int = 1,
    given: bool = True,
    **settings: Any,
) -> list[Outcome]:
    """``given``: whether `parallelize` is told of the optimizer."""

    def work(world: World) -> Outcome:
        model, optimizer = build_seeded(build, seed=world.rank)
        mine = optimizer if given else None
        with foreprop.parallelize(model, mine, world=world, **settings) as session:
            result = loop(model, optimizer, by_rank[world.rank], lambda _: None)
            session.flush()
            return _outcome(model, optimizer, result)

    return run_cluster(len(by_rank), work, local_size=local_size)


def _outcome(model: nn.Module, optimizer: Any, result: Any) -> Outcome:
    state = optimizer.state_dict() if optimizer is not None else {}
    if "state" in state:  # in the order of the first updates, which is that of first uses here
        state = {**state, "state": dict(sorted(state["state"].items()))}
    return Outcome(copy.deepcopy(model.state_dict()), copy.deepcopy(state), result)


def check_contract(
    build: Build,
    loop: ReadingLoop,
    *,
    ranks: int = 2,
    rtol: float = 0.0,
    steps: int = 3,
    **settings: Any,
) -> list[Outcome]:
    """Ranks agree to the bit, and with averages by hand: to the bit for two ranks, if not told.

    ``rtol``: of what else may differ, because a norm is added up otherwise.
    """
    by_rank = batches_of(ranks, count=steps)
    wanted = run_by_hand(build, loop, by_rank)
    got = run_averaged(build, loop, by_rank, **settings)
    rtol = rtol if ranks == 2 else max(rtol, 1e-4)
    for other in got[1:]:
        check_alike(other.model, got[0].model, 0.0)
        check_alike(other.optimizer, got[0].optimizer, 0.0)
    for ours, plain in zip(got, wanted, strict=True):
        check_alike(ours.result, plain.result, rtol)
        check_alike(ours.model, plain.model, rtol)
        check_alike(ours.optimizer, plain.optimizer, rtol)
    return got


def check_alike(got: Any, wanted: Any, rtol: float, where: str = "") -> None:
    """Nested containers of tensors and numbers; ``rtol`` 0: the same bits."""
    assert type(got) is type(wanted), (where, type(got), type(wanted))
    if isinstance(wanted, Mapping):
        assert list(got) == list(wanted), where
        for key, value in wanted.items():
            if key in _OWN:
                continue
            check_alike(got[key], value, rtol, f"{where}[{key!r}]")
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted), where
        for number, pair in enumerate(zip(got, wanted, strict=True)):
            check_alike(*pair, rtol, f"{where}[{number}]")
    elif isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype, where
        torch.testing.assert_close(
            got, wanted, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda m: f"{where}: {m}"
        )
    elif isinstance(wanted, float):
        assert got == wanted or abs(got - wanted) <= rtol * max(1.0, abs(wanted)), (where, got)
    else:
        assert got == wanted, where


def backward(model: nn.Module, batch: Batch, scale: float = 1.0) -> None:
    x, y = batch
    (F.cross_entropy(model(x), y) * scale).backward()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def made_by(make: Callable[[Any], Any], model: Callable[[], nn.Module] = small_model) -> Build:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = model()
        return made, make(made.parameters())

    return build
