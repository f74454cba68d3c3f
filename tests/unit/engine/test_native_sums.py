"""Native sums and means against torch's, bit for bit."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable

import pytest
import torch

from foreprop.core.norm import SquareSum
from foreprop.engine.native import maybe_library
from foreprop.engine.sums import add_up, binned_square_sum, finish_sum, square_sum, sum_dtype
from tests.native.stepped import library

library()  # skips all of this where there is no compiler

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
HALVES = [torch.bfloat16, torch.float16]


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """What is no number is none in either; its bits differ between torch's own kernels."""
    nan = expected.isnan()
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.itemsize]
    equal = (found.view(whole) == expected.view(whole)) | (nan & found.isnan())
    return bool(equal.all())


def reduced(
    parts: list[torch.Tensor], *, mean: bool, workers: int, scale: float, in_place: bool
) -> torch.Tensor:
    first = parts[0]
    total = first if in_place else torch.empty_like(first)
    pointers = (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts))
    library().fp_reduce(
        DTYPES.index(first.dtype),
        ctypes.c_void_p(total.data_ptr()),
        pointers,
        len(parts),
        ctypes.c_int64(first.numel()),
        mean,
        workers,
        ctypes.c_double(scale),
    )
    return total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elems", [1, 63, 2048, 5001])
def test_a_mean_has_the_bits_of_torch(dtype: torch.dtype, elems: int) -> None:
    generator = torch.Generator().manual_seed(elems)
    for workers, mean, scale in (
        (2, True, 1.0),
        (3, True, 1024.0),
        (5, False, 3.0),
        (7, True, 0.1),
    ):
        parts = [
            (torch.randn(elems, generator=generator) * 10.0 ** (rank - 3)).to(dtype)
            for rank in range(workers)
        ]
        expected = add_up([part.clone() for part in parts], sum_dtype(dtype, workers=workers))
        finish_sum(expected, "mean" if mean else "sum", workers=workers, scale=scale, out=expected)
        expected = expected.to(dtype)
        for in_place in (False, True):
            found = reduced(parts, mean=mean, workers=workers, scale=scale, in_place=in_place)
            assert same_bits(found, expected)


def test_special_numbers_are_added_as_torch_does() -> None:
    special = torch.tensor(
        [0.0, -0.0, 1e-45, -1e-40, 3e38, float("inf"), -float("inf"), float("nan")]
    )
    first, second = (each.reshape(-1) for each in torch.meshgrid(special, special, indexing="ij"))
    first, second = first.contiguous(), second.contiguous()
    expected = (first + second) / 2
    found = reduced([first, second], mean=True, workers=2, scale=1.0, in_place=False)
    assert same_bits(found, expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_all_halves_with_zero_and_with_themselves(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for other in (torch.zeros_like(every), every.clone(), every.flip(0).clone()):
        expected = ((every.float() + other.float()) / 2).to(dtype)
        found = reduced([every, other], mean=True, workers=2, scale=1.0, in_place=False)
        assert same_bits(found, expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounding_to_halves_is_that_of_torch(dtype: torch.dtype) -> None:
    """Around every half: itself, the middle to the next one, and what is just beside either."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    bits = every.view(torch.int32)
    middle = 1 << (15 if dtype == torch.bfloat16 else 12)
    values = torch.cat([bits + d for d in (0, -1, 1, middle, middle - 1, middle + 1)])
    drawn = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(1))
    floats = torch.cat([values, drawn.to(torch.int32)]).view(torch.float32)
    found = torch.empty(floats.numel(), dtype=dtype)
    size = ctypes.c_int64(floats.numel())
    pointers = ctypes.c_void_p(found.data_ptr()), ctypes.c_void_p(floats.data_ptr())
    library().fp_narrow(DTYPES.index(dtype), *pointers, size)
    assert same_bits(found, floats.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elems", [1, 7, 64, 2049, 140_000])
def test_squares_add_up_to_the_same_bits(dtype: torch.dtype, elems: int) -> None:
    """Of numbers of one size and of many, near the largest and the least that there are."""
    assert maybe_library() is not None
    generator = torch.Generator().manual_seed(elems)
    drawn = torch.randn(elems, generator=generator, dtype=torch.float64)
    spread = torch.randint(-40, 40, (elems,), generator=generator)
    about = torch.finfo(dtype)
    for numbers in (
        drawn,
        drawn * 2.0**spread,
        drawn * 1e-3,
        torch.full((elems,), math.sqrt(about.max) / 2, dtype=torch.float64),
        torch.full((elems,), about.tiny, dtype=torch.float64),
        torch.full((elems,), about.smallest_normal * about.eps, dtype=torch.float64),
        torch.zeros(elems),
    ):
        tensor = numbers.to(dtype)
        tensor = torch.where(tensor.isfinite(), tensor, 1.0)
        assert square_sum(tensor) == binned_square_sum(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan, -math.nan])
def test_what_is_not_finite_is_told_of_squares(dtype: torch.dtype, odd: float) -> None:
    tensor = torch.ones(5000).to(dtype)
    tensor[4321] = odd
    found, expected = square_sum(tensor), binned_square_sum(tensor)
    assert str(found.norm) == str(expected.norm) == str(abs(odd))


def test_squares_are_added_up_in_less_time_than_by_torch() -> None:
    """On any processor: what a compiler does not vectorise for one took three times as long."""
    tensor = torch.randn(200_000)

    def least_s(add: Callable[[torch.Tensor], SquareSum]) -> float:
        took = []
        for _ in range(7):
            started = time.thread_time()
            add(tensor)
            took.append(time.thread_time() - started)
        return min(took)

    assert least_s(square_sum) < least_s(binned_square_sum)


def test_a_square_beyond_all_numbers_is_infinite() -> None:
    tensor = torch.tensor([1.0, 1e200, -3e300], dtype=torch.float64)
    assert square_sum(tensor).beyond == binned_square_sum(tensor).beyond == math.inf
