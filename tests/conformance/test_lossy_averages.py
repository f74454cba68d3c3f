"""Lossy codecs where workers update: DDP's contract, and no gradient that counts is lost."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.core.codec import Place
from foreprop.engine.native import maybe_library
from foreprop.engine.world import World
from foreprop.errors import ConfigError
from foreprop.features.compression.codecs import make, maybe_for_averages
from tests.cluster import run_cluster
from tests.conformance.aggregation_runs import Values, values_of
from tests.conformance.averaging_by_hand import backward, gradients
from tests.conformance.parity import (
    Batch,
    batches_of,
    build_seeded,
    check_same_bits,
    servers_only,
    small_model,
    with_sgd,
)
from tests.conformance.scaler_runs import make_scaler
from tests.tiers import long_cases

pytestmark = [servers_only, pytest.mark.timeout(600)]
_WORKERS: Any = {"update": "workers"}
"""With codecs that would have servers update, too: foreprop-lab's tests have some."""

_LONG_WITH_FEEDBACK = ["int4", "topk:0.3", "randomk:0.3"]
_LONG = [*_LONG_WITH_FEEDBACK, "fp16"]
WITH_FEEDBACK = ["int8", "int2", "topk:0.2", *long_cases(*_LONG_WITH_FEEDBACK)]
CODECS = ["int8", "int2", "topk:0.2", "bf16", *long_cases(*_LONG)]
NOWHERE = Place(0, 0, 0)


# The contract: every rank has the same bits.
class Seen(NamedTuple):
    values: Values
    gradients: Values


def every_kind_of_step(
    model: Any, optimizer: Any, batches: Sequence[Batch], rank: int, seen: Seen
) -> None:
    """Clipping, accumulation, a skipped step, a rank without a gradient, and one that is read."""
    left = iter(batches)

    def end_step(*, skips: bool = False) -> None:
        if not skips:
            optimizer.step()
        own = {name: p.grad for name, p in model.named_parameters()}
        seen.gradients.append({n: g.clone() for n, g in own.items() if g is not None})
        optimizer.zero_grad()
        seen.values.append(values_of(model))

    for number in range(3):  # the usual step, and others once gradients leave early
        backward(model, next(left))
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        end_step()
        for _ in range(number + 1):
            backward(model, next(left), 1 / (number + 1))
        end_step()
        backward(model, next(left))
        end_step(skips=True)
        x, y = next(left)
        hidden = model[:2](x)
        F.cross_entropy(model[2:](hidden.detach() if rank else hidden), y).backward()
        end_step()
        backward(model, next(left))
        assert all(bool(gradient.isfinite().all()) for gradient in gradients(model))
        end_step()


@pytest.mark.parametrize("about", [{}, *long_cases({"slice_elems": 7, "servers_per_node": 2})])
@pytest.mark.parametrize("codec", [*CODECS, "lossless"])
def test_every_rank_has_the_same_bits(codec: str, about: dict[str, Any]) -> None:
    def work(world: World) -> Seen:
        model, optimizer = build_seeded(with_sgd(), seed=world.rank)
        seen, batches = Seen([], []), batches_of(2, count=18)[world.rank]
        with foreprop.parallelize(
            model, optimizer, world=world, compression=codec, **_WORKERS, **about
        ):
            every_kind_of_step(model, optimizer, batches, world.rank, seen)
        return seen

    first, second = run_cluster(2, work)
    for ours, theirs in zip(first.values, second.values, strict=True):
        check_same_bits(ours, theirs)
    for ours, theirs in zip(first.gradients, second.gradients, strict=True):
        check_same_bits({name: ours[name] for name in theirs}, theirs)  # or it has none


@pytest.mark.parametrize("local_size", [1, *long_cases(2)])
@pytest.mark.parametrize("codec", ["int8", "topk:0.2", *long_cases("int2", "bf16", *_LONG)])
def test_a_scaler_of_the_loop_leaves_out_the_same_steps(codec: str, local_size: int) -> None:
    ranks = local_size + 1

    def work(world: World) -> tuple[list[float], Values]:
        model, optimizer = build_seeded(with_sgd(), seed=world.rank)
        scaler, scales, values = make_scaler(), [], []
        with foreprop.parallelize(model, optimizer, world=world, compression=codec, **_WORKERS):
            for step, batch in enumerate(batches_of(ranks, count=10)[world.rank]):
                factor = torch.inf if step in (3, 4) and world.rank == 1 else 1.0
                optimizer.zero_grad()
                backward(model, batch, scaler.get_scale() * factor)
                scaler.scale(torch.zeros(()))  # makes its tensors
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
                values.append(values_of(model))
        return scales, values

    first, *others = run_cluster(ranks, work, local_size=local_size)
    assert first[0][3] == first[0][2] / 2
    check_same_bits(first[1][4], first[1][2])
    for scales, values in others:
        assert scales == first[0]
        for ours, theirs in zip(values, first[1], strict=True):
            check_same_bits(ours, theirs)


# What is left out comes later.
class Weighed(nn.Module):
    """Its gradients do not depend on its values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 30), nn.Linear(20, 10)

    def forward(self, batch: Sequence[torch.Tensor], *, both: bool = True) -> torch.Tensor:
        x, z, weights, others = batch
        first: torch.Tensor = (self.first(x) * weights).sum()
        return first + (self.second(z) * others).sum() if both else first


def drawn(rank: int, count: int) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(rank + 1)
    shapes = (4, 40), (4, 20), (4, 30), (4, 10)
    return [
        tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(count)
    ]


def one_step_each(model: Any, optimizer: Any, rank: int) -> None:
    for batch in drawn(rank, 12):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()


def skips_and_accumulates(model: Any, optimizer: Any, rank: int) -> None:
    for number, batch in enumerate(drawn(rank, 24)):
        model(batch, both=number % 5 != 1 or rank == 0).backward()
        if number % 3 == 1:  # somebody looks, and does not make the step
            assert all(bool(gradient.isfinite().all()) for gradient in gradients(model))
            optimizer.zero_grad()
        elif number % 4:
            optimizer.step()
            optimizer.zero_grad()


def accumulates_what_was_read(model: Any, optimizer: Any, rank: int) -> None:
    for number, batch in enumerate(drawn(rank, 12)):
        model(batch).backward()
        assert all(bool(gradient.isfinite().all()) for gradient in gradients(model))
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def has_a_scaler(model: Any, optimizer: Any, rank: int) -> None:
    scaler = make_scaler(growth_interval=2)
    for number, batch in enumerate(drawn(rank, 14)):
        optimizer.zero_grad()
        loss = model(batch)
        scaler.scale(loss * torch.inf if number == 7 and rank else loss).backward()
        scaler.step(optimizer)
        scaler.update()


def clips(model: Any, optimizer: Any, rank: int) -> None:
    """Servers may tell the norm of what workers will have."""
    for batch in drawn(rank, 12):
        optimizer.zero_grad()
        model(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        optimizer.step()


Loop = Callable[[Any, Any, int], None]
LOOPS: list[Loop]
LOOPS = [one_step_each, skips_and_accumulates, accumulates_what_was_read, has_a_scaler]


def trained(
    codec: str | None,
    loop: Loop,
    *,
    ranks: int = 2,
    local_size: int = 1,
    planes: Sequence[str] | None = None,
    **about: Any,
) -> list[tuple[dict[str, torch.Tensor], Mapping[str, Any]]]:
    """By rank: values, and what has been kept back; ``planes``: by rank, of as many."""
    ranks = ranks if planes is None else len(planes)

    def work(world: World) -> Any:
        model, optimizer = build_seeded(with_sgd(Weighed, lr=1.0, momentum=0.0))
        about_it: Any = {"world": world, "compression": codec, **_WORKERS, **about}
        if planes is not None:
            about_it["plane"] = planes[world.rank]
        with foreprop.parallelize(model, optimizer, **about_it) as session:
            loop(model, optimizer, world.rank)
            return values_of(model), session.state_dict()["residuals"]

    return run_cluster(ranks, work, local_size=local_size)


def check_nothing_is_lost(codec: str, loop: Loop, **about: Any) -> None:
    """Of all that counted, only what is kept back is not in the values."""
    exact = trained(None, loop, **about)[0][0]
    found = trained(codec, loop, **about)
    for name, value in exact.items():
        kept = [residuals.get(name, {}) for _, residuals in found]
        pushes: Any = sum(own["error"] for own in kept if "error" in own)
        left = pushes / len(found) + kept[0].get("average's error", 0.0)
        assert left.any(), name
        torch.testing.assert_close(found[0][0][name] - left, value, rtol=1e-4, atol=2e-4)
        assert float((found[0][0][name] - value).norm()) > 0


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("codec", WITH_FEEDBACK)
def test_nothing_is_lost(codec: str, loop: Loop) -> None:
    check_nothing_is_lost(codec, loop)


@pytest.mark.skipif(maybe_library() is None, reason="the plane was not built")
@pytest.mark.parametrize("loop", [*LOOPS, clips])
@pytest.mark.parametrize("codec", ["int8", *long_cases("int4", "bf16", "fp16")])
def test_either_plane_has_the_same_bits(codec: str, loop: Loop) -> None:
    """And so have both in one session: values, and what is kept back."""
    wanted = trained(codec, loop, planes=["python", "python", "python"])
    for planes in (["native"] * 3, ["native", "python", "native"], ["python", "native", "python"]):
        found = trained(codec, loop, planes=planes)
        for (ours, kept), (theirs, their_kept) in zip(found, wanted, strict=True):
            check_same_bits(ours, theirs)
            assert kept.keys() == their_kept.keys()
            assert bool(kept) == (codec in WITH_FEEDBACK or codec == "int4")
            for name, arrays in kept.items():
                check_same_bits(arrays, their_kept[name])


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("codec", ["int8", *long_cases("topk:0.2", "int2")])
def test_nothing_is_lost_by_relays(codec: str, loop: Loop) -> None:
    check_nothing_is_lost(codec, loop, ranks=3, local_size=2)


def test_nothing_is_lost_of_what_is_measured() -> None:
    """Servers tell norms before averages are sent: of what workers will have."""

    def loop(model: Any, optimizer: Any, rank: int) -> None:
        for batch in drawn(rank, 30):
            optimizer.zero_grad()
            model(batch).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            total = torch.cat([gradient.flatten() for gradient in gradients(model)]).norm()
            torch.testing.assert_close(norm, total, rtol=1e-4, atol=0)
            optimizer.step()

    check_nothing_is_lost("topk:0.2", loop)
    check_nothing_is_lost("int2", loop)


def test_without_an_optimizer_what_is_read_counts() -> None:
    def total_of(codec: str | None) -> dict[str, torch.Tensor]:
        def work(world: World) -> dict[str, torch.Tensor]:
            model = build_seeded(with_sgd(Weighed))[0]
            with foreprop.parallelize(model, None, world=world, compression=codec):
                totals = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
                for batch in drawn(world.rank, 80):
                    model.zero_grad()
                    model(batch).backward()
                    for name, parameter in model.named_parameters():
                        assert parameter.grad is not None
                        totals[name] += parameter.grad
            return totals

        return run_cluster(2, work)[0]

    wanted, found = total_of(None), total_of("int2")
    for name, total in wanted.items():
        assert float((found[name] - total).norm() / total.norm()) < 0.35


class HalfOfIt:
    """A user's: what is below the mean magnitude is left out."""

    name = "half-of-it"

    def most_bytes(self, elems: int) -> int:
        return 2 * elems

    def encode(self, values: torch.Tensor) -> bytes:
        kept = torch.where(values.abs() < values.abs().mean(), torch.zeros(()), values)
        return bytes(kept.to(torch.bfloat16).view(torch.uint8).numpy())

    def decode(self, data: memoryview, out: torch.Tensor) -> None:
        out.copy_(torch.frombuffer(bytearray(data), dtype=torch.bfloat16))


def test_nothing_is_lost_of_a_users_codec() -> None:
    foreprop.register_codec(HalfOfIt)
    check_nothing_is_lost("half-of-it", one_step_each)


# To the bit: the codec in a loop that averages by hand.
class Step(NamedTuple):
    passes: int
    reads_between: bool
    """The averages of all passes but the last one, too."""
    clips: bool
    skips: bool
    zeroes: str
    lacks: str
    """Who has no gradient of the first layer."""


def is_comparable(step: Step) -> bool:
    """What has been clipped looks zeroed to the next pass; only others see what a rank lacks."""
    kept = step.zeroes == "not at all"
    if step.lacks == "rank 1" and (kept or step.clips or step.reads_between):
        return False
    return not (kept and step.skips and step.clips)


STEPS = st.builds(
    Step,
    passes=st.integers(1, 3),
    reads_between=st.booleans(),
    clips=st.booleans(),
    skips=st.sampled_from([False, False, True]),
    zeroes=st.sampled_from(["optimizer", "optimizer", "not at all"]),
    lacks=st.sampled_from(["nobody", "nobody", "rank 1", "all"]),
).filter(is_comparable)
Average = Callable[[nn.Module, bool], None]


class ByHand:
    """Averages gradients of ranks that are threads, with codes both ways."""

    def __init__(self, name: str, ranks: int) -> None:
        self._codec, self._answers = make(name), maybe_for_averages(name, ranks)
        self._ranks = ranks
        self._meeting = threading.Barrier(ranks, timeout=60)
        self._gradients: list[list[torch.Tensor | None]] = [[]] * ranks
        self._kept: dict[tuple[int, int], list[Any]] = {}
        self._shown: list[torch.Tensor | None] = []

    def of(self, rank: int) -> Average:
        def average(model: nn.Module, counted: bool) -> None:
            self._gradients[rank] = [p.grad for p in model.parameters()]
            self._meeting.wait()
            if rank == 0:
                places = enumerate(zip(*self._gradients, strict=True))
                self._shown = [self._average(place, own, counted) for place, own in places]
            self._meeting.wait()
            for parameter, shown in zip(model.parameters(), self._shown, strict=True):
                if shown is not None:
                    parameter.grad = shown.clone()
            self._meeting.wait()

        return average

    def _average(
        self, place: int, own: Sequence[torch.Tensor | None], counted: bool
    ) -> torch.Tensor | None:
        pushed = [
            self._sent(self._codec, (place, rank), gradient, counted)
            for rank, gradient in enumerate(own)
        ]
        there = [gradient for gradient in pushed if gradient is not None]
        mean = sum(there[1:], there[0]) / self._ranks if there else None
        return self._sent(self._answers, (place, self._ranks), mean, counted)

    def _sent(
        self, codec: Any, key: tuple[int, int], values: torch.Tensor | None, counted: bool
    ) -> torch.Tensor | None:
        elems = 1 if values is None else values.numel()
        kept = self._kept.get(key)
        if kept is not None:
            if counted and kept[1] is not None:
                kept[0] = kept[1]
            kept[1] = None
        if values is None:
            return None
        if self._codec.most_bytes(elems) >= 4 * elems:
            return values
        if kept is None:
            kept = self._kept[key] = [codec.new_state(elems), None]
        state = {name: array.clone() for name, array in kept[0].items()}
        data = codec.encode(values.flatten(), state, NOWHERE)
        if len(data) >= 4 * elems:
            return values
        kept[1], out = state, torch.empty(elems)
        codec.decode(data, out, NOWHERE)
        return out.view(values.shape)


def loop_of(steps: Sequence[Step]) -> Callable[..., Values]:
    def loop(model: Any, optimizer: Any, rank: int, average: Average) -> Values:
        left: Iterator[Batch] = iter(batches_of(2, count=3 * len(steps))[rank])
        counted, is_empty, values = False, True, []
        for step in steps:
            lacks = is_empty and (step.lacks == "all" or (step.lacks == "rank 1" and rank == 1))
            for number in range(step.passes):
                x, y = next(left)
                hidden = model[:2](x)
                hidden = hidden.detach() if lacks else hidden
                F.cross_entropy(model[2:](hidden), y).backward()
                if step.reads_between and number + 1 < step.passes:
                    average(model, counted)
                    counted = True  # it stays in what is averaged again
                    gradients(model)
            average(model, counted)
            gradients(model)
            if step.clips:
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
            if not step.skips:
                optimizer.step()
            is_empty = step.zeroes == "optimizer"
            if is_empty:
                optimizer.zero_grad()
            counted = not step.skips or not is_empty
            values.append(values_of(model))
        return values

    return loop


def check_loop(codec: str, steps: Sequence[Step]) -> None:
    hand, loop = ByHand(codec, 2), loop_of(steps)

    def by_hand(world: World) -> Values:
        found: Values = loop(*build_seeded(with_sgd()), world.rank, hand.of(world.rank))
        return found

    def work(world: World) -> Values:
        model, optimizer = build_seeded(with_sgd(), seed=world.rank)
        with foreprop.parallelize(model, optimizer, world=world, compression=codec, **_WORKERS):
            found: Values = loop(model, optimizer, world.rank, lambda *_: None)
        return found

    wanted = run_cluster(2, by_hand)
    for found in run_cluster(2, work):
        for ours, theirs in zip(found, wanted[0], strict=True):
            check_same_bits(ours, theirs)


USUAL = Step(1, False, False, False, "optimizer", "nobody")
SKIPPED = USUAL._replace(skips=True)


@pytest.mark.parametrize(
    "steps",
    [
        [USUAL] * 4,
        [USUAL, SKIPPED, SKIPPED, USUAL, USUAL],
        [USUAL, USUAL._replace(passes=3), USUAL._replace(passes=2), USUAL],
        [USUAL, USUAL._replace(passes=3, reads_between=True), USUAL, USUAL],
        [USUAL, SKIPPED._replace(zeroes="not at all"), USUAL, USUAL],
        [USUAL, USUAL._replace(lacks="rank 1"), USUAL._replace(lacks="all"), USUAL, USUAL],
    ],
    ids=str,
)
@pytest.mark.parametrize("codec", ["int4", *long_cases("topk:0.2")])
def test_a_loop_has_the_bits_of_the_codec_by_hand(codec: str, steps: list[Step]) -> None:
    check_loop(codec, steps)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["int8", "int2", "topk:0.3"]), st.lists(STEPS, max_size=6))
def test_any_loop_has_the_bits_of_the_codec_by_hand(codec: str, steps: list[Step]) -> None:
    check_loop(codec, [USUAL, *steps, USUAL])


def test_a_skipped_step_leaves_no_trace() -> None:
    def values_with(skipped: int) -> list[dict[str, torch.Tensor]]:
        def work(world: World) -> dict[str, torch.Tensor]:
            model, optimizer = build_seeded(with_sgd())
            batches = batches_of(2, count=6)[world.rank]
            with foreprop.parallelize(model, optimizer, world=world, compression="int2"):
                for number, batch in enumerate(batches):
                    for _ in range(skipped if number % 2 else 0):
                        backward(model, batches[0], 3.0)
                        optimizer.zero_grad()
                    backward(model, batch)
                    optimizer.step()
                    optimizer.zero_grad()
                return values_of(model)

        return run_cluster(2, work)

    wanted = values_with(0)
    for skipped in (1, 3):
        for found in values_with(skipped):
            check_same_bits(found, wanted[0])


# Checkpoints.
@pytest.mark.parametrize("local_size", [1, *long_cases(2)])
@pytest.mark.parametrize("codec", ["int2", *long_cases("int4", "topk:0.2")])
def test_a_checkpoint_goes_on_with_the_same_bits(codec: str, local_size: int) -> None:
    """Also of one that is made between a backward pass and its step."""
    ranks = local_size + 1

    def work(world: World, saved: Any = None) -> Any:
        model, optimizer = build_seeded(with_sgd())
        batches = batches_of(ranks, count=8)[world.rank]
        with foreprop.parallelize(
            model, optimizer, world=world, compression=codec, **_WORKERS
        ) as session:
            if saved is not None:
                model.load_state_dict(saved[world.rank][0])
                optimizer.load_state_dict(saved[world.rank][1])
                session.load_state_dict([each[2] for each in saved])
                batches = batches[4:]
            states = []
            for batch in batches:
                backward(model, batch)
                optimizer.step()
                optimizer.zero_grad()
                kept = copy.deepcopy(optimizer.state_dict())
                state = values_of(model), kept, session.state_dict()
                states.append(state)
            return states

    whole = run_cluster(ranks, work, local_size=local_size)
    saved = [states[3] for states in whole]
    second = run_cluster(ranks, lambda world: work(world, saved), local_size=local_size)
    for ours, theirs in zip(second, whole, strict=True):
        check_same_bits(ours[-1][0], theirs[-1][0])
        assert ours[-1][2]["residuals"].keys() == theirs[-1][2]["residuals"].keys()
        for name, arrays in ours[-1][2]["residuals"].items():
            check_same_bits(arrays, theirs[-1][2]["residuals"][name])


# What is said and refused.
def test_who_updates() -> None:
    def said(**about: Any) -> str:
        model, optimizer = build_seeded(with_sgd(small_model, momentum=0.0))

        def work(world: World) -> str:
            with foreprop.parallelize(model, optimizer, world=world, **about) as session:
                return str(session._training.by_workers)

        return run_cluster(1, work)[0]

    assert said(compression="int8") == said(compression="topk:0.1", update="workers") == "True"
    assert said(compression="dgc:0.1") == said(compression="int8", update="servers") == "False"
    assert said(compression="int8", preset="kvstore") == "False"
    with pytest.raises(ConfigError, match="dgc accumulates the optimizer's momentum"):
        said(compression="dgc:0.1", update="workers")
