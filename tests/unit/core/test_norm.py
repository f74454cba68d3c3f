"""The sum of squares: the same bits from whatever parts, and as exact as a norm needs to be."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreprop.core.norm import ENCODED_BYTES, ZERO, SquareSum, decode_square_sum
from foreprop.engine.sums import square_sum
from foreprop.errors import RemoteProtocolError
from tests.tiers import long_cases

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def exact_norm(values: list[float]) -> float:
    return math.sqrt(sum((Fraction(value) ** 2 for value in values), Fraction()))


def added_up(parts: list[torch.Tensor]) -> SquareSum:
    total = ZERO
    for part in parts:
        total = total.plus(square_sum(part))
    return total


@given(st.lists(FLOATS, max_size=40), st.lists(st.integers(0, 40), max_size=5), st.randoms())
def test_any_parts_in_any_order_give_the_same_norm(
    values: list[float], cuts: list[int], chooser: random.Random
) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    places = sorted({0, len(values), *(min(cut, len(values)) for cut in cuts)})
    parts = [tensor[a:b] for a, b in pairwise(places)]
    chooser.shuffle(parts)
    assert added_up(parts).norm == square_sum(tensor).norm
    assert added_up(parts).norm == pytest.approx(exact_norm(values), rel=1e-12)


SCALES = {torch.float16: 1e-4, torch.bfloat16: 1e20, torch.float32: 1e-30, torch.float64: 1.0}


@pytest.mark.parametrize("dtype", SCALES, ids=str)
@pytest.mark.parametrize("scale", [None, *long_cases(*SCALES.values())])
def test_many_elements(dtype: torch.dtype, scale: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(200_003, generator=generator, dtype=torch.float64)
    tensor = (drawn * (scale or SCALES[dtype])).to(dtype)
    wide = tensor.double()
    finite = wide[wide.isfinite()]
    got = square_sum(finite)
    assert got.norm == pytest.approx(float(finite.norm()), rel=1e-12)
    for size in (1_000, 65_536, 77_777):
        assert added_up(list(finite.split(size))) == got


def test_a_plain_sum_in_float64_would_depend_on_the_parts() -> None:
    """This shows that the tests above can fail."""
    tensor = torch.randn(10_000, generator=torch.Generator().manual_seed(1)).double()
    sums = {
        sum(float(part.square().sum()) for part in tensor.split(size)) for size in (7, 100, 999)
    }
    assert len(sums) > 1


@pytest.mark.parametrize(
    ("values", "norm"),
    [
        ([], 0.0),
        ([0.0, -0.0], 0.0),
        ([1.0, math.inf], math.inf),
        ([-math.inf], math.inf),
        ([1.0, math.nan], math.nan),
        ([math.inf, math.nan], math.nan),
        ([3e38, 3e38], math.sqrt(2) * 3e38),
        ([1e-45], 1.401298464324817e-45),
    ],
)
def test_extremes(values: list[float], norm: float) -> None:
    got = square_sum(torch.tensor(values, dtype=torch.float32))
    assert got.plus(ZERO).norm == pytest.approx(norm, rel=1e-7, abs=0, nan_ok=True)
    again = decode_square_sum(got.encode())
    assert again.norm == pytest.approx(norm, rel=1e-7, abs=0, nan_ok=True)
    assert again.plus(square_sum(torch.ones(3))).norm == pytest.approx(
        math.hypot(norm, math.sqrt(3)), rel=1e-7, nan_ok=True
    )


def test_squares_beyond_float64_are_infinite() -> None:
    assert square_sum(torch.tensor([1e200], dtype=torch.float64)).norm == math.inf
    assert square_sum(torch.full((9,), 1.3e154, dtype=torch.float64)).norm == math.inf
    tiny = square_sum(torch.tensor([1e-160], dtype=torch.float64))
    assert 0 <= tiny.norm <= 1e-150


@given(st.binary(min_size=ENCODED_BYTES, max_size=ENCODED_BYTES))
def test_any_bytes_are_a_sum_or_an_error(data: bytes) -> None:
    try:
        decoded = decode_square_sum(memoryview(data))
    except RemoteProtocolError:
        return
    assert math.isnan(decoded.norm) or decoded.norm >= 0


def test_refuses_other_sizes() -> None:
    with pytest.raises(RemoteProtocolError, match="a sum of squares has"):
        decode_square_sum(ZERO.encode()[:-1])
