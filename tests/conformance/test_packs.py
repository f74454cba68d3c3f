"""Parameters that share a slice have the bits of those that go alone, whatever a loop does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import foreprop
from tests.cluster import worlds
from tests.conformance.averaging_by_hand import (
    Average,
    ReadingLoop,
    check_alike,
    check_contract,
    run_averaged,
)
from tests.conformance.parity import (
    Batch,
    Build,
    batches_of,
    build_seeded,
    servers_only,
    with_sgd,
)

pytestmark = [servers_only, pytest.mark.timeout(300)]

ALONE: dict[str, Any] = {"slice_elems": 3}
"""So small that no parameter shares a slice."""
LAYERS = 6
SHARED: dict[str, Any] = {"slice_elems": 120}
"""Two packs."""
SUMMED: dict[str, Any] = {"architecture": "ring", "chunk_elems": 120}
"""The same two, which are summed by collectives."""


class Layers(nn.Module):
    """Each pass uses some of them only; two have another type."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(LAYERS))
        self.layers[3].to(dtype)
        self.used: Sequence[int] = range(LAYERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.used:
            layer: Any = self.layers[number]
            x = torch.tanh(layer(x.to(layer.weight.dtype))).to(x.dtype)
        return x


def build(dtype: torch.dtype = torch.float32) -> Build:
    return with_sgd(lambda: Layers(dtype))


def packs_of(session: Any) -> Sequence[Sequence[int]]:
    packs: Sequence[Sequence[int]] = session._training.backends.packs
    return packs


class Pass(NamedTuple):
    used: tuple[tuple[int, ...], ...]
    """Layers, by rank."""
    reads: int | None
    """The layer whose gradient is looked at after the pass, on every rank."""


class Step(NamedTuple):
    passes: tuple[Pass, ...]
    reads_in_hooks: bool
    """Each gradient, as soon as it is there."""
    clips: bool
    skips: bool
    zeroes: str
    turns: int | None
    """The layer that is frozen, or unfrozen, before the step."""


LAYER = st.integers(0, LAYERS - 1)
SOME = st.one_of(
    st.just(tuple(range(LAYERS))), st.sets(LAYER).map(lambda some: tuple(sorted({0, *some})))
)
"""With the first, which is never frozen: so all ranks have as many passes."""
READS = st.none() | LAYER
ALIKE = st.builds(Pass, SOME.map(lambda used: (used, used)), READS)
UNLIKE = st.builds(Pass, st.tuples(SOME, SOME), READS)
STEPS = st.builds(
    Step,
    passes=st.lists(ALIKE, min_size=1, max_size=2).map(tuple),
    reads_in_hooks=st.sampled_from([False, False, False, True]),
    clips=st.booleans(),
    skips=st.sampled_from([False, False, False, True]),
    zeroes=st.sampled_from(["to none", "to none", "in place"]),
    turns=st.none() | st.none() | st.integers(1, LAYERS - 1),
)
UNLIKE_STEPS = st.builds(
    Step,
    passes=st.lists(UNLIKE, min_size=1, max_size=2).map(tuple),
    reads_in_hooks=st.just(False),
    clips=st.just(False),
    skips=st.just(False),
    zeroes=st.just("to none"),
    turns=st.none(),
)


def _read(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:
        float(parameter.grad.sum())


def loop_of(steps: Sequence[Step]) -> ReadingLoop:
    def loop(model: Any, optimizer: Any, batches: Sequence[Batch], average: Average) -> Any:
        rank = int(batches[0][1][0])
        left = iter(batches)
        for step in steps:
            if step.turns is not None:
                layer = model.layers[step.turns]
                layer.requires_grad_(not layer.weight.requires_grad)
            hooks = []
            if step.reads_in_hooks:
                trained = (p for p in model.parameters() if p.requires_grad)
                hooks = [p.register_post_accumulate_grad_hook(_read) for p in trained]
            for number, each in enumerate(step.passes):
                model.used = each.used[rank]
                x, _ = next(left)
                model(x).square().sum().backward()
                # one that is read between passes is an average for the next one, as in DDP
                if each.reads is not None and number == len(step.passes) - 1:
                    _read(model.layers[each.reads].weight)
            for hook in hooks:
                hook.remove()
            average(model)
            if step.clips:
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
            if not step.skips:
                optimizer.step()
            optimizer.zero_grad(set_to_none=step.zeroes == "to none")
        return None

    return loop


def check_steps(steps: Sequence[Step], dtype: torch.dtype = torch.float32) -> None:
    """Packed and alone; ranks have the numbers of their batches."""
    count = sum(len(step.passes) for step in steps)
    by_rank = [
        [(x, torch.full_like(y, rank)) for x, y in batches]
        for rank, batches in enumerate(batches_of(2, count=count))
    ]
    loop = loop_of(steps)
    alone = run_averaged(build(dtype), loop, by_rank, **ALONE)
    for about in (SHARED, SUMMED, {}):
        packed = run_averaged(build(dtype), loop, by_rank, **about)
        for ours, theirs in zip(packed, alone, strict=True):
            check_alike(ours.model, theirs.model, 0.0)
            check_alike(ours.optimizer, theirs.optimizer, 0.0)


def test_there_are_packs() -> None:
    for about, count in ((SHARED, 2), (SUMMED, 2), ({}, 1), (ALONE, 0)):
        model, optimizer = build_seeded(build())
        with foreprop.parallelize(model, optimizer, world=worlds(1)[0], **about) as session:
            assert len(packs_of(session)) == count
    model, optimizer = build_seeded(build(torch.bfloat16))
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]) as session:
        assert packs_of(session) == [[0, 1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11]]


@settings(max_examples=15)
@given(st.lists(STEPS, min_size=2, max_size=5), st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_loop_has_the_same_bits(steps: Sequence[Step], dtype: torch.dtype) -> None:
    check_steps(steps, dtype)


def test_a_pack_may_leave_twice_for_who_waits() -> None:
    """A frozen layer's zeros come unasked for, so it leaves before the last ones are in."""
    every = tuple(range(LAYERS))
    whole, first = Pass((every, every), None), Pass(((0,), (0,)), None)
    plain = Step((whole,), False, False, False, "to none", None)
    zeroed = plain._replace(passes=(whole, whole), zeroes="in place")
    check_steps([plain, zeroed, plain._replace(passes=(whole, first), clips=True, turns=1)])


@settings(max_examples=10)
@given(st.lists(UNLIKE_STEPS, min_size=2, max_size=5))
def test_ranks_that_use_other_layers_have_the_same_bits(steps: Sequence[Step]) -> None:
    check_steps(steps)


def test_a_pack_may_leave_more_often_than_a_step_has_rounds() -> None:
    """Each gradient is read as soon as it is there: so often has a pack to leave."""

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))

    def loop(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> None:
        hooks = [p.register_post_accumulate_grad_hook(_read) for p in model.parameters()]
        for number, (x, _) in enumerate(batches):
            if number == 2:
                for hook in hooks:
                    hook.remove()
            optimizer.zero_grad()
            model(x[:, :2]).square().sum().backward()
            average(model)
            optimizer.step()

    check_contract(with_sgd(make, lr=0.01), loop)
