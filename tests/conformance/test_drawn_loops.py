"""Loops that do something else in every step, drawn at random: DDP's contract has no first step.

Each rank has the bits that averaging by hand gives, whatever came before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from foreprop.errors import TrainingLoopError
from tests.conformance.averaging_by_hand import Average, ReadingLoop, check_contract
from tests.conformance.parity import Batch, in_a_ring, once, seeded, small_model

pytestmark = pytest.mark.timeout(900)
MOST_PASSES = 3

Optimizer = torch.optim.Optimizer


def _scale(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def _scale_as_a_list(model: nn.Module, step: int) -> None:
    torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 0.5)


def _add_noise(model: nn.Module, step: int) -> None:
    numbers = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad += torch.randn(parameter.shape, generator=numbers) / 100


def _clip_values(model: nn.Module, step: int) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.05)


def _clip_by_own_norm(model: nn.Module, step: int) -> None:
    """Not by torch's, whose last bits are a float32 sum's: see test_gradient_contract."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5
    for gradient in gradients:
        gradient.mul_(min(1.0, 0.1 / (norm + 1e-6)))


def _replace(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.sign() / 10


def _read(model: nn.Module, step: int) -> None:
    assert all(float(p.grad.abs().max()) >= 0 for p in model.parameters() if p.grad is not None)


def _drop_one(model: nn.Module, step: int) -> None:
    next(model.parameters()).grad = None


def _evaluate(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        model(torch.ones(2, 5))


EDITS: dict[str, Callable[[nn.Module, int], None]] = {
    "nothing": lambda model, step: None,
    "scale": _scale,
    "scale as a list": _scale_as_a_list,
    "noise": _add_noise,
    "clip values": _clip_values,
    "clip by a norm": _clip_by_own_norm,
    "replace": _replace,
    "read": _read,
    "drop one": _drop_one,
    "evaluate": _evaluate,
}
MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}
FIRST, FROZEN_LATER = 0, 2
"""Layers of the model: the one that may be frozen at the start, and one that may be later."""


def _give(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Those that it does not have."""
    has = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := [p for p in parameters if id(p) not in has]:
        optimizer.add_param_group({"params": missing})


def _unfreeze(model: Any, optimizer: Optimizer) -> None:
    model.requires_grad_(True)
    _give(optimizer, model.parameters())


def _freeze(model: Any, optimizer: Optimizer) -> None:
    model[FROZEN_LATER].requires_grad_(False)


def _grow(model: Any, optimizer: Optimizer) -> None:
    with seeded(len(model)):
        model.append(nn.Linear(3, 3))
    _give(optimizer, model[-1].parameters())


CHANGES: dict[str, Callable[[Any, Optimizer], None]] = {
    "unfreeze": _unfreeze,
    "freeze": _freeze,
    "grow": _grow,
}
STARTS = ["as usual", "frozen", "frozen, and not in the optimizer"]


class Step(NamedTuple):
    """What a loop does in one step; its passes take as many batches."""

    passes: int
    edit: str
    skips: bool
    """There is no `step()`; ``zeroes`` says what becomes of the gradients."""
    zeroes: str
    lr: float | None
    new_optimizer: str | None
    changes_by_hand: bool
    change: str | None = None
    """Of what is trained, before the passes."""
    leaves_out: bool = False
    """Its passes do without the last layers."""
    holds: bool = False
    """One rank keeps its gradients for itself: whether they are still there decides nothing."""


def is_refused(step: Step) -> bool:
    """A factor would be lost: see `test_a_factor_before_another_pass`."""
    kept = step.zeroes == "not at all" and step.edit.startswith("scale")
    return step.skips and (kept or step.zeroes == "halved")


STEPS = st.builds(
    Step,
    passes=st.integers(1, MOST_PASSES),
    edit=st.sampled_from(sorted(EDITS)),
    skips=st.sampled_from([False, False, False, True]),
    zeroes=st.sampled_from(["optimizer", "in place", "model", "not at all", "halved"]),
    lr=st.sampled_from([None, None, 0.05]),
    new_optimizer=st.sampled_from([None, None, None, None, *MAKERS]),
    changes_by_hand=st.sampled_from([False, False, False, True]),
    change=st.sampled_from([*[None] * 9, *CHANGES]),
    leaves_out=st.sampled_from([False, False, False, True]),
    holds=st.booleans(),
).filter(lambda step: not is_refused(step))


def _without_the_last(model: Any) -> nn.Module:
    """As long as it can be trained: both of its layers may be frozen."""
    head: nn.Module = model[: FROZEN_LATER + 1]
    return head if any(p.requires_grad for p in head.parameters()) else model


def loop_of(steps: Sequence[Step]) -> ReadingLoop:
    def loop(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> Any:
        left, held = iter(batches), []
        for number, step in enumerate(steps):
            if step.new_optimizer is not None:
                optimizer = MAKERS[step.new_optimizer](model.parameters())
            if step.change is not None:
                CHANGES[step.change](model, optimizer)
            for _ in range(step.passes):
                x, y = next(left)
                used = _without_the_last(model) if step.leaves_out else model
                (F.cross_entropy(used(x), y) / step.passes).backward()
            if step.holds and threading.current_thread().name == "rank-0":
                held.append([parameter.grad for parameter in model.parameters()])
            average(model)
            EDITS[step.edit](model, number)
            if step.lr is not None:
                optimizer.param_groups[0]["lr"] = step.lr
            if not step.skips:
                optimizer.step()
            if step.changes_by_hand:
                with torch.no_grad():
                    next(model.parameters()).mul_(0.99)
            if step.zeroes == "model":
                model.zero_grad()
            elif step.zeroes == "halved":
                _scale_as_a_list(model, number)
            elif step.zeroes != "not at all":
                optimizer.zero_grad(set_to_none=step.zeroes == "optimizer")
        return None

    return loop


def check_loop(maker: str, steps: Sequence[Step], start: str = STARTS[0], **about: Any) -> None:
    def build() -> tuple[nn.Module, Optimizer]:
        model = small_model()
        model[FIRST].requires_grad_(start == STARTS[0])
        left_out = start == STARTS[2]
        trained = [p for p in model.parameters() if p.requires_grad or not left_out]
        return model, MAKERS[maker](trained)

    # what is added to gradients that no step has used: by hand they are averages by then, and
    # sums of averages are averages of sums, but for last bits
    added_to = any(step.skips and step.zeroes == "not at all" for step in steps[:-1])
    rtol = 1e-4 if added_to else 0.0
    passes = sum(step.passes for step in steps)
    check_contract(build, loop_of(steps), steps=passes, rtol=rtol, check_replicas=8, **about)


@pytest.mark.parametrize("architecture", ["p2p", "ring"])
def test_what_was_averaged_stays_so_in_a_round_that_it_has_no_part_in(architecture: str) -> None:
    """Layers that two steps leave out keep their gradients, which clipping scales each time."""
    as_usual = Step(1, "clip by a norm", False, "not at all", None, None, False)
    left_out = as_usual._replace(skips=True, change="unfreeze", leaves_out=True)
    last = as_usual._replace(zeroes="optimizer", leaves_out=True)
    check_loop("adam", [as_usual, left_out, last], STARTS[2], architecture=architecture)


LOOPS = st.lists(STEPS, min_size=2, max_size=7)
IN_PIECES = {"slice_elems": 7, "chunk_elems": 7}


@once
@settings(max_examples=200)
@given(
    st.sampled_from(sorted(MAKERS)),
    LOOPS,
    st.sampled_from(STARTS),
    st.sampled_from(["p2p", "ring"]),
)
def test_any_loop_has_the_bits_of_averages_by_hand(
    maker: str, steps: list[Step], start: str, architecture: str
) -> None:
    check_loop(maker, steps, start, architecture=architecture)


def test_a_factor_before_another_pass() -> None:
    usual = Step(1, "nothing", False, "optimizer", None, None, False)
    scaled = usual._replace(edit="scale", skips=True, zeroes="not at all")
    with pytest.raises(TrainingLoopError, match=r"\.bias was multiplied after its backward pass"):
        check_loop("sgd", [usual, usual, scaled, usual])


@pytest.mark.parametrize("architecture", ["p2p", "ring"])
def test_a_factor_of_a_layer_that_no_pass_adds_to(architecture: str) -> None:
    """A frozen layer's own gradient stays, and is halved: a round is closed by the others'."""
    usual = Step(1, "clip by a norm", False, "optimizer", None, None, False)
    replaced = usual._replace(edit="replace", zeroes="not at all")
    halved = Step(2, "drop one", False, "halved", None, "adam", False, "freeze")
    check_loop("adam", [replaced, halved, usual], "frozen", architecture=architecture)


def test_a_gradient_that_one_rank_holds_when_it_is_dropped() -> None:
    """It had not left in its pass, for another optimizer came with the step before."""
    usual = Step(1, "clip by a norm", False, "optimizer", None, None, False)
    kept = usual._replace(zeroes="not at all", new_optimizer="sgd", holds=True)
    dropped = usual._replace(edit="drop one")
    check_loop("adam", [usual, usual, kept, dropped], architecture="ring")


def test_a_frozen_layer_and_a_last_step_that_is_not_made() -> None:
    """The round is ended without it: a collective would wait for its gradient."""
    usual = Step(1, "nothing", False, "optimizer", None, None, False)
    last = [usual._replace(change="freeze"), usual._replace(skips=True)]
    check_loop("sgd", [usual, *last], architecture="ring")


@pytest.mark.long
@pytest.mark.parametrize("part", range(5))
def test_many_more_loops(part: int) -> None:
    """Five thousand in all, each part in its own order."""

    @seed(part)
    @settings(max_examples=1000, database=None)
    @given(
        st.sampled_from(sorted(MAKERS)),
        LOOPS,
        st.sampled_from(STARTS),
        st.sampled_from([{}, IN_PIECES, *([] if in_a_ring else [{"compression": "lossless"}])]),
    )
    def check(maker: str, steps: list[Step], start: str, about: dict[str, Any]) -> None:
        check_loop(maker, steps, start, **about)

    check()
