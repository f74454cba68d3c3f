"""A server's arithmetic: the same bits whatever the slices, and states that survive the wire."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.config import Config
from foreprop.core.manifest import (
    NO_GROUP,
    Hyperparameters,
    Manifest,
    OptimizerInfo,
    ParameterInfo,
)
from foreprop.core.norm import ZERO, SquareSum
from foreprop.engine.memory import bytes_of
from foreprop.engine.optimizer import ELEMENTWISE_OPTIMIZERS
from foreprop.engine.slicestore import SliceStore
from foreprop.engine.sums import GradientBuffer
from foreprop.engine.tensors import DTYPES, GRADIENT, decode_state, encode_state, state_limit_bytes
from foreprop.errors import InternalError, RemoteProtocolError
from tests.tiers import long_cases

ELEMS = 71
SLICE_ELEMS = (1, 7, 50, 64, 1000)


@pytest.fixture(autouse=True)
def _no_autograd() -> Iterator[None]:
    """As in a server's threads; one thread, since these tensors are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


class Array:
    """One parameter in one store, as a server has it."""

    def __init__(
        self,
        values: torch.Tensor,
        *,
        slice_elems: int,
        workers: int = 1,
        optimizer: str = "SGD",
        group: Hyperparameters | None = None,
        readers: int | None = None,
        **settings: Any,
    ) -> None:
        """``readers``: the workers update, and so many are answered."""
        self.groups: Sequence[Hyperparameters] = (group or {"lr": 0.1},)
        dtype = str(values.dtype).removeprefix("torch.")
        self.manifest = Manifest(
            foreprop="",
            torch="",
            byteorder="little",
            session="",
            world_size=workers,
            knobs=Config(slice_elems=slice_elems, **settings).knobs(1),
            optimizer=OptimizerInfo(name=optimizer, groups=tuple(self.groups)),
            parameters=(
                ParameterInfo(
                    name="p",
                    shape=(len(values),),
                    dtype=dtype,
                    group=0 if readers is None else NO_GROUP,
                ),
            ),
            blob_bytes=(0, 0),
        )
        self.slices = self.manifest.slices()
        readers = None if self.manifest.outlives_servers else readers
        self.store = SliceStore(self.manifest, self.slices, 0, readers=readers)
        self.stage(values)
        for piece in self.slices:
            self.store.install_value(piece.number)
        self._dtype = values.dtype

    def stage(self, values: torch.Tensor) -> None:
        for piece in self.slices:
            buffer = self.store.take_buffer(piece.number, value=True)
            buffer.view[:] = bytes_of(values[piece.start_elems : piece.stop_elems])
            self.store.put_value(piece.number, buffer)

    def step(self, gradients: dict[int, torch.Tensor]) -> None:
        """Gradients by rank; they arrive in the order of the dictionary."""
        for piece in self.slices:
            for rank, gradient in gradients.items():
                buffer = self.store.take_buffer(piece.number)
                buffer.view[:] = bytes_of(gradient[piece.start_elems : piece.stop_elems])
                self.store.put_gradient(piece.number, rank, buffer)
            self.store.update(piece.number, sorted(gradients), self.groups)

    def aggregate(
        self, gradients: dict[int, torch.Tensor], *, measure: bool
    ) -> list[SquareSum | None]:
        """As `step`, where workers update; the squares of every slice."""
        squares: list[SquareSum | None] = []
        for piece in self.slices:
            for rank, gradient in gradients.items():
                buffer = self.store.take_buffer(piece.number)
                buffer.view[:] = bytes_of(gradient[piece.start_elems : piece.stop_elems])
                self.store.put_gradient(piece.number, rank, buffer)
            ranks = sorted(gradients)
            squares += self.store.aggregate_only(piece.number, ranks, measure=measure) or [None]
        return squares

    @property
    def values(self) -> torch.Tensor:
        data = b"".join(self.store.values(piece.number) for piece in self.slices)
        return torch.frombuffer(bytearray(data), dtype=self._dtype)


def noise(seed: int, dtype: torch.dtype = torch.float32, elems: int = ELEMS) -> torch.Tensor:
    return torch.randn(elems, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and bytes_of(a.contiguous()) == bytes_of(b.contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arrival", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1)])
def test_gradients_are_averaged_in_rank_order(dtype: str, arrival: tuple[int, ...]) -> None:
    """With lr = 1 and zeros as parameters the result is the mean itself, negated."""
    kind = DTYPES[dtype]
    gradients = [noise(rank, kind) * 10.0**rank for rank in arrival]
    by_rank = dict(zip(arrival, gradients, strict=True))
    wide = torch.float32 if kind.itemsize == 2 else kind
    total = by_rank[0].to(wide)
    for rank in range(1, 5):
        total = total + by_rank[rank].to(wide)
    expected = -(total / 5).to(kind)
    for slice_elems in SLICE_ELEMS:
        zeros = torch.zeros(ELEMS, dtype=kind)
        array = Array(zeros, slice_elems=slice_elems, workers=5, group={"lr": 1.0})
        array.step({rank: gradient.clone() for rank, gradient in by_rank.items()})
        assert torch.equal(array.values, expected), slice_elems


def test_halves_are_summed_in_float32() -> None:
    """In bfloat16 itself, 256 + 1 + 1 is 256; the mean of three of them tells."""
    zeros = torch.zeros(3, dtype=torch.bfloat16)
    array = Array(zeros, slice_elems=2, workers=3, group={"lr": 1.0})
    array.step({rank: zeros + value for rank, value in enumerate([256, 1, 1])})
    assert array.values.tolist() == [-86.0] * 3
    assert ((zeros + 256 + 1 + 1) / 3).tolist() != [86.0] * 3


HALVES = ("bfloat16", "float16")


def on_wire(array: Array, dtype: str) -> torch.Tensor:
    """What replies carry."""
    data = b"".join(array.store.values(piece.number) for piece in array.slices)
    return torch.frombuffer(bytearray(data), dtype=DTYPES[dtype])


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_cast_is_summed_in_float32_and_shown_rounded(dtype: str, workers: int) -> None:
    gradients = {rank: noise(rank, DTYPES[dtype]) for rank in range(workers)}
    group = {"lr": 0.1, "momentum": 0.9}
    for slice_elems in SLICE_ELEMS:
        array = Array(
            noise(9), slice_elems=slice_elems, workers=workers, group=group, wire_dtype=dtype
        )
        full = Array(noise(9), slice_elems=slice_elems, workers=workers, group=group)
        for _ in range(3):
            array.step(gradients)
            full.step({rank: gradient.float() for rank, gradient in gradients.items()})
            assert same_bits(on_wire(array, dtype), full.values.to(DTYPES[dtype]))


@pytest.mark.parametrize("dtype", HALVES)
def test_values_are_shown_in_full_until_the_first_update(dtype: str) -> None:
    array = Array(noise(9), slice_elems=50, wire_dtype=dtype)
    sizes = [(array.store.size_bytes(i), array.store.size_bytes(i, value=True)) for i in (0, 1)]
    assert sizes == [(100, 200), (42, 84)]
    assert same_bits(array.values, noise(9))
    array.step({})
    array.stage(noise(8))
    array.step({})
    assert same_bits(array.values, noise(8))
    array.step({0: torch.zeros(ELEMS, dtype=DTYPES[dtype])})
    assert same_bits(on_wire(array, dtype), noise(8).to(DTYPES[dtype]))
    array.stage(noise(7))
    array.step({})
    assert same_bits(on_wire(array, dtype), noise(7).to(DTYPES[dtype]))


@pytest.mark.parametrize("dtype", HALVES)
def test_elements_that_were_not_changed_by_hand_keep_what_was_rounded_off(dtype: str) -> None:
    array = Array(torch.ones(5), slice_elems=2, group={"lr": 1e-4}, wire_dtype=dtype)
    one = torch.ones(5, dtype=DTYPES[dtype])
    for _ in range(100):
        array.step({0: one})
        array.stage(on_wire(array, dtype).float())
    assert same_bits(on_wire(array, dtype), (one.float() * 0.99).to(DTYPES[dtype]))
    values = on_wire(array, dtype).float()
    values[1] = 0.5
    array.stage(values)
    for _ in range(50):
        array.step({0: one})
    wanted = torch.tensor([0.985, 0.495, 0.985, 0.985, 0.985])
    assert same_bits(on_wire(array, dtype), wanted.to(DTYPES[dtype]))


def test_missing_gradients_count_as_zeros() -> None:
    array = Array(torch.zeros(5), slice_elems=2, workers=4, group={"lr": 1.0})
    array.step({1: torch.ones(5), 3: torch.ones(5)})
    assert array.values.tolist() == [-0.5] * 5
    array.step({})
    assert array.values.tolist() == [-0.5] * 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_sum_made_ahead_gives_the_same_bits(dtype: str, workers: int) -> None:
    values, scale = noise(9, DTYPES[dtype]), 8.0
    gradients = {rank: noise(rank, DTYPES[dtype]) for rank in range(workers)}
    at_once = Array(values, slice_elems=50, workers=workers)
    at_once.step({rank: gradient.clone() for rank, gradient in gradients.items()})
    wide = torch.promote_types(DTYPES[dtype], torch.float32)
    mean = torch.stack([g.to(wide) for g in gradients.values()]).mean(0)
    for slice_elems in SLICE_ELEMS:
        array = Array(values, slice_elems=slice_elems, workers=workers)
        total = ZERO
        for piece in array.slices:
            for rank, gradient in gradients.items():
                buffer = array.store.take_buffer(piece.number)
                scaled = gradient[piece.start_elems : piece.stop_elems] * scale
                buffer.view[:] = bytes_of(scaled.to(DTYPES[dtype]))
                array.store.put_gradient(piece.number, rank, buffer)
            total = total.plus(array.store.aggregate(piece.number, sorted(gradients), scale))
        for piece in array.slices:
            array.store.update(piece.number, sorted(gradients), array.groups)
        assert same_bits(array.values, at_once.values)
        assert total.norm == pytest.approx(float(mean.double().norm()), rel=1e-5)


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, 1), (torch.bfloat16, 0)])
def test_a_sum_made_ahead_keeps_the_memory_of_one_gradient(dtype: torch.dtype, kept: int) -> None:
    """Of the first rank's; halves are summed in memory of their own."""
    array = Array(torch.zeros(5, dtype=dtype), slice_elems=5, workers=3)
    buffers = [array.store.take_buffer(0) for _ in range(3)]
    for rank, buffer in enumerate(buffers):
        array.store.put_gradient(0, rank, buffer)
    array.store.aggregate(0, (0, 1, 2))
    free = [array.store.take_buffer(0) for _ in range(3)]
    assert sum(buffer in free for buffer in buffers) == 3 - kept


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_aggregated_gradient_is_kept_until_the_next_update(
    dtype: torch.dtype, ahead: bool
) -> None:
    """In the first rank's buffer, unless that has gone back with a sum of a wider type."""
    array = Array(torch.zeros(5, dtype=dtype), slice_elems=5, workers=3)
    buffers: list[GradientBuffer] = []
    for step in (1, 2):
        buffers = [array.store.take_buffer(0) for _ in range(3)]
        for rank, buffer in enumerate(buffers):
            buffer.view[:] = bytes_of(torch.full((5,), float(step * rank), dtype=dtype))
            array.store.put_gradient(0, rank, buffer)
        if ahead:
            array.store.aggregate(0, (0, 1, 2))
        array.store.update(0, (0, 1, 2), array.groups)
        assert same_bits(aggregated(array), torch.full((5,), float(step), dtype=dtype))
    free = [array.store.take_buffer(0) for _ in range(3)]
    assert (buffers[0] in free) == (dtype == torch.bfloat16 and ahead)
    assert all(buffer in free for buffer in buffers[1:])
    assert same_bits(aggregated(array), torch.full((5,), 2.0, dtype=dtype))


def aggregated(array: Array) -> torch.Tensor:
    """The gradient of the last update of a store of one slice, as workers fetch it."""
    entries = decode_state(memoryview(array.store.export_gradient(0)), elems=5)
    gradient: torch.Tensor = entries[GRADIENT]
    return gradient


def test_no_gradient_is_kept_before_the_first_update() -> None:
    array = Array(torch.zeros(5), slice_elems=5)
    with pytest.raises(RemoteProtocolError, match="the gradient of slice 0 is not kept"):
        array.store.export_gradient(0)


@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_workers_apply_is_the_average_and_leaves_the_values(dtype: str, measure: bool) -> None:
    for slice_elems in SLICE_ELEMS:
        array = Array(noise(9, DTYPES[dtype]), slice_elems=slice_elems, workers=3)
        before = [array.store._slices[piece.number].parameter.clone() for piece in array.slices]
        for step in range(3):
            gradients = {rank: noise(3 * step + rank, DTYPES[dtype]) for rank in (0, 2)}
            squares = array.aggregate(gradients, measure=measure)
            wide = torch.promote_types(DTYPES[dtype], torch.float32)
            mean = ((gradients[0].to(wide) + gradients[2].to(wide)) / 3).to(DTYPES[dtype])
            assert same_bits(array.values, mean)
            if measure:
                norm = sum_of(squares).norm
                assert norm == pytest.approx(float(mean.double().norm()), rel=1e-6)
            else:
                assert squares == [None] * len(array.slices)
        after = [array.store._slices[piece.number].parameter for piece in array.slices]
        assert all(same_bits(a, b) for a, b in zip(after, before, strict=True))


def read_by_one(array: Array, slice_: int = 0) -> list[float]:
    """As a reply that leaves."""
    data, given = array.store.reading(slice_)
    assert given is not None
    numbers = torch.frombuffer(bytearray(data), dtype=torch.float32).tolist()
    array.store.was_read(slice_, given)
    return list(map(float, numbers))


def test_where_workers_update_nothing_stays_when_all_have_it() -> None:
    """Rank 0 has given the values; the averages are for all."""
    array = Array(torch.ones(5), slice_elems=5, workers=3, readers=3)
    memory = {array.store._slices[0].kept.memory.data_ptr()}  # type: ignore[union-attr]
    assert [read_by_one(array) for _ in range(2)] == 2 * [[1.0] * 5]
    assert array.store.reading(0)[1] is None
    for step in range(1, 4):
        assert len(array.store.values(0)) == 0
        array.aggregate({rank: torch.full((5,), float(step)) for rank in range(3)}, measure=False)
        memory.add(array.store._slices[0].kept.memory.data_ptr())  # type: ignore[union-attr]
        assert [read_by_one(array) for _ in range(3)] == 3 * [[float(step)] * 5]
    assert len(memory) <= 3
    assert array.store._slices[0].parameter.numel() == 0
    with pytest.raises(RemoteProtocolError, match="which the workers do"):
        array.step({0: torch.ones(5)})
    with pytest.raises(RemoteProtocolError, match="is not kept"):
        array.store.export_gradient(0)


def test_who_has_been_answered_late_leaves_the_next_average_alone() -> None:
    """Its thread goes on when the worker has its answer, and has pushed again."""
    array = Array(torch.ones(5), slice_elems=5, workers=2, readers=2)
    read_by_one(array)
    array.aggregate({0: torch.ones(5)}, measure=False)
    _, late = array.store.reading(0)
    read_by_one(array)
    array.aggregate({1: torch.full((5,), 4.0)}, measure=False)
    assert late is not None
    array.store.was_read(0, late)
    assert [read_by_one(array) for _ in range(2)] == 2 * [[2.0] * 5]


def test_where_a_server_may_be_lost_nothing_stays_when_all_are_answered() -> None:
    """Rank 2 falls behind: its answers stay as they are."""
    array = Array(torch.ones(5), slice_elems=5, workers=3, readers=3, elastic=True)
    late = []
    for step in range(4):
        if step:
            gradients = {rank: torch.full((5,), float(step)) for rank in range(3)}
            array.aggregate(gradients, measure=False)
        _, data, given = array.store.read(0, (1, 2))
        assert given is not None
        assert (array.store._slices[0].kept, len(array.store.values(0))) == (None, 0)
        array.store.was_read(0, given)
        free = array.store.take_buffer(0)
        assert free is not given
        array.store._buffers.give(free)
        if step < 2:
            array.store.was_read(0, given)
            assert array.store.take_buffer(0) is given
            array.store._buffers.give(given)
        else:
            late.append(torch.frombuffer(data, dtype=torch.float32))
    assert [values.tolist() for values in late] == [[2.0] * 5, [3.0] * 5]


def test_a_single_worker_s_values_are_handed_to_nobody() -> None:
    array = Array(torch.ones(5), slice_elems=5, readers=1)
    assert array.store.reading(0)[1] is None
    array.aggregate({0: torch.ones(5)}, measure=False)
    assert read_by_one(array) == [1.0] * 5


def test_no_rank_has_a_gradient_in_a_round() -> None:
    """What was averaged before stays, so that nothing is torn; its squares are none."""
    array = Array(torch.zeros(5), slice_elems=5, workers=2)
    array.aggregate({0: torch.ones(5)}, measure=True)
    assert array.aggregate({}, measure=True) == [ZERO]
    assert array.values.tolist() == [0.5] * 5


def sum_of(squares: Sequence[SquareSum | None]) -> SquareSum:
    total = ZERO
    for part in squares:
        assert part is not None
        total = total.plus(part)
    return total


def test_a_step_that_is_left_out_leaves_nothing_behind() -> None:
    array = Array(torch.ones(5), slice_elems=5, workers=2, group={"lr": 1.0})
    for infinite in (True, False):
        for rank in range(2):
            buffer = array.store.take_buffer(0)
            buffer.view[:] = bytes_of(torch.full((5,), torch.inf if infinite else 0.25))
            array.store.put_gradient(0, rank, buffer)
        norm = array.store.aggregate(0, (0, 1)).norm
        assert math.isinf(norm) == infinite
        array.store.update(0, () if infinite else (0, 1), array.groups)
        assert array.values.tolist() == [1.0 if infinite else 0.75] * 5


def test_a_coefficient_is_applied_to_the_aggregated_gradient() -> None:
    array = Array(torch.zeros(5), slice_elems=2, workers=1, group={"lr": 1.0})
    for piece in array.slices:
        buffer = array.store.take_buffer(piece.number)
        buffer.view[:] = bytes_of(torch.ones(piece.elems))
        array.store.put_gradient(piece.number, 0, buffer)
        array.store.update(piece.number, (0,), array.groups, 0.25)
    assert array.values.tolist() == [-0.25] * 5


def test_buffers_are_used_again_and_only_for_their_own_size() -> None:
    """Each update but the last gives its buffer back: the last one's gradient may be read."""
    array = Array(torch.zeros(70), slice_elems=60)  # 60 and 10 elements, padded alike
    rounds = [[array.store.take_buffer(i) for i in range(2)] for _ in range(2)]
    assert [len(buffer.view) for buffer in rounds[0]] == [240, 40]
    for buffers in rounds:
        for slice_, buffer in enumerate(buffers):
            array.store.put_gradient(slice_, 0, buffer)
            array.store.update(slice_, [0], array.groups)
    first, second = rounds[0]
    assert array.store.take_buffer(1) is second
    assert array.store.take_buffer(0) is first
    assert array.store.size_bytes(1) == 40
    new = [array.store.take_buffer(slice_) for slice_ in range(2)]
    assert not any(buffer in rounds[1] for buffer in new)


GROUPS: dict[str, list[Hyperparameters]] = {
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True},
        {"lr": 0.1, "momentum": 0.9, "fused": True},
    ],
    "Adam": [{"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}, {"lr": 0.01, "fused": True}],
    "AdamW": [{"lr": 0.01, "betas": [0.8, 0.99]}, {"lr": 0.01, "fused": True}],
    "Adagrad": [{"lr": 0.1, "lr_decay": 0.1}, {"lr": 0.1, "fused": True}],
    "RMSprop": [{"lr": 0.01, "centered": True, "momentum": 0.9}],
}
CASES = [
    (name, group) for name in ELEMENTWISE_OPTIMIZERS for group in GROUPS.get(name, [{"lr": 0.01}])
]


def run(name: str, group: Hyperparameters, slice_elems: int, dtype: torch.dtype) -> torch.Tensor:
    array = Array(noise(99, dtype), slice_elems=slice_elems, optimizer=name, group=group)
    for step in range(5):
        array.step({0: noise(step, dtype)})
    return array.values


@pytest.mark.parametrize(("name", "group"), CASES)
def test_optimizers_give_the_same_bits_on_slices_as_on_the_whole_array(
    name: str, group: Hyperparameters
) -> None:
    parameter = torch.nn.Parameter(noise(99))
    arguments: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in group.items()
    }
    optimizer = ELEMENTWISE_OPTIMIZERS[name]([parameter], **arguments)
    for step in range(5):
        parameter.grad = noise(step)
        optimizer.step()
    whole = run(name, group, 10**6, torch.float32)
    for slice_elems in SLICE_ELEMS:
        assert same_bits(run(name, group, slice_elems, torch.float32), whole), slice_elems
    if not group.get("fused"):
        assert same_bits(whole, parameter.detach())
    else:  # torch's own fused kernels round the elements after the last whole vector differently
        vectors = ELEMS - ELEMS % 64
        assert same_bits(whole[:vectors], parameter.detach()[:vectors])
        torch.testing.assert_close(whole, parameter.detach())


@pytest.mark.parametrize("dtype", ["bfloat16", *long_cases("float16", "float64")])
@pytest.mark.parametrize(
    ("name", "group"),
    [pytest.param(*case, marks=[pytest.mark.long] * ("fused" in case[1])) for case in CASES],
)
def test_no_type_s_bits_depend_on_where_a_slice_ends(
    name: str, group: Hyperparameters, dtype: str
) -> None:
    """torch rounds halves differently in whole vectors and in the rest; a server must not."""
    results = [run(name, group, slice_elems, DTYPES[dtype]) for slice_elems in SLICE_ELEMS]
    assert all(same_bits(result, results[0]) for result in results)


def test_hyperparameters_may_change_between_steps() -> None:
    array = Array(torch.zeros(3), slice_elems=2, group={"lr": 1.0})
    array.step({0: torch.ones(3)})
    array.groups = ({"lr": 0.25},)
    array.step({0: torch.ones(3)})
    assert array.values.tolist() == [-1.25] * 3


@pytest.mark.parametrize("name", ELEMENTWISE_OPTIMIZERS)
def test_a_state_can_be_taken_out_and_put_into_another_store(name: str) -> None:
    def make(values: torch.Tensor) -> Array:
        group: Hyperparameters = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {"lr": 0.1}
        return Array(values, slice_elems=7, optimizer=name, group=group)

    going_on = make(noise(99))
    for step in range(3):
        going_on.step({0: noise(step)})
    resumed = make(going_on.values)
    for piece in going_on.slices:
        data = going_on.store.export_state(piece.number)
        assert len(data) <= going_on.store.state_limit_bytes(piece.number)
        resumed.store.import_state(piece.number, memoryview(data))
        assert resumed.store.export_state(piece.number) == data
    for step in range(3, 6):
        for array in (going_on, resumed):
            array.step({0: noise(step)})
    assert same_bits(resumed.values, going_on.values)


def test_an_empty_state_starts_the_optimizer_anew() -> None:
    array = Array(torch.zeros(3), slice_elems=3, group={"lr": 1.0, "momentum": 0.5})
    empty = array.store.export_state(0)
    array.step({0: torch.ones(3)})
    array.store.import_state(0, memoryview(empty))
    assert array.store.export_state(0) == empty
    array.step({0: torch.ones(3)})
    assert array.values.tolist() == [-2.0] * 3  # with its momentum it would be -2.5


STATE: dict[str, Any] = {
    "step": torch.tensor(3.0),
    "momentum": torch.arange(5, dtype=torch.bfloat16),
    "counts": torch.arange(5),
    "mask": torch.tensor([True, False, True, True, False]),
    "eta": 0.1,
    "round": 7,
    "on": True,
    "nothing": None,
}


def test_states_round_trip() -> None:
    decoded = decode_state(memoryview(encode_state(STATE)), elems=5)
    assert list(decoded) == list(STATE)
    for key, value in STATE.items():
        if isinstance(value, torch.Tensor):
            assert decoded[key].shape == value.shape
            assert same_bits(decoded[key], value)
        else:
            assert (type(decoded[key]), decoded[key]) == (type(value), value)
    assert decode_state(memoryview(encode_state({})), elems=5) == {}


@given(st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_damaged_states_decode_or_raise_remote_protocol_error(seed: int) -> None:
    chance = random.Random(seed)
    data = bytearray(encode_state(STATE))
    for _ in range(chance.randint(1, 4)):
        data[chance.randrange(len(data))] = chance.choice(b'\0\1\7\xff0129-"[]{},:.entrul')
    del data[chance.choice([len(data), chance.randrange(len(data))]) :]
    try:
        state = decode_state(memoryview(data), elems=5)
    except RemoteProtocolError:
        return
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    assert all(tensor.numel() in (1, 5) for tensor in tensors)


@given(st.binary(max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_bytes_raise_remote_protocol_error(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not an optimizer state"):
        decode_state(memoryview(data), elems=5)


def state_of(*entries: dict[str, Any], payload: bytes = b"") -> memoryview:
    head = json.dumps(entries).encode()
    return memoryview(struct.pack("!I", len(head)) + head + payload)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (state_of({"key": "a", "dtype": "float32", "elems": 4}), "'a' has 4 elements of float32"),
        (state_of({"key": "a", "dtype": "float32", "elems": 5}, payload=bytes(19)), "'a' has 5"),
        (state_of({"key": "a", "dtype": "complex64", "elems": 5}, payload=bytes(40)), "complex64"),
        (state_of({"key": "a", "dtype": "float32", "elems": 5, "scalar": True}), "not 1"),
        (state_of({"key": "a", "number": 1}, payload=b"x"), "1 bytes too many"),
        (
            state_of(*({"key": str(i)} for i in range(17))),
            "optimizer state of 17 entries; at most 16",
        ),
        (memoryview(b"\0\0\0"), "not an optimizer state"),
        (memoryview(struct.pack("!I", 2**32 - 1) + b"[]x"), "not an optimizer state"),
        (memoryview(b""), "not an optimizer state"),
    ],
)
def test_a_wrong_state_is_told_apart(data: memoryview, message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        decode_state(data, elems=5)


def test_deep_nesting_is_refused() -> None:
    head = b'[{"key":"a","x":' + b"[" * 100_000
    with pytest.raises(RemoteProtocolError, match="not an optimizer state"):
        decode_state(memoryview(struct.pack("!I", len(head)) + head), elems=5)


def test_limits_allow_for_every_optimizer_and_grow_with_the_slice() -> None:
    assert state_limit_bytes(0) < state_limit_bytes(50_000) < 16 * 8 * 50_000 + 100_000


def test_only_contiguous_memory_is_viewed() -> None:
    tensor = torch.arange(4, dtype=torch.int16)
    bytes_of(tensor)[0:2] = b"\x05\x00"
    assert tensor.tolist() == [5, 1, 2, 3]
    assert len(bytes_of(torch.empty(0))) == 0
    with pytest.raises(InternalError, match="contiguous"):
        bytes_of(torch.zeros(4, 4).t())
    with pytest.raises(InternalError, match="contiguous"):
        bytes_of(torch.zeros(8)[::2])


def test_bytes_of_one_element_or_none_with_an_odd_stride() -> None:
    for elems in (0, 1):
        tensor = torch.arange(1, 4, dtype=torch.int32).as_strided((elems,), (0,), 1)
        assert bytes_of(tensor).tobytes() == (b"\2\0\0\0" if elems else b"")
