"""A worker's casts: which slices, to the nearest, and in memory that is used again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from foreprop.config import Config
from foreprop.core.manifest import Manifest, OptimizerInfo, ParameterInfo
from foreprop.engine.memory import WireCasts, bytes_of
from foreprop.engine.tensors import DTYPES

ELEMS = 100_000
"""More than torch gives to one thread at a time."""


def make(wire_dtype: str | None, *sizes: int, dtype: str = "float32", **knobs: int) -> WireCasts:
    manifest = Manifest(
        foreprop="",
        torch="",
        byteorder="little",
        session="",
        world_size=1,
        knobs=Config(wire_dtype=wire_dtype, slice_elems=ELEMS).knobs(knobs.get("servers", 1)),  # type: ignore[arg-type]
        optimizer=OptimizerInfo(name="SGD", groups=({"lr": 0.1},)),
        parameters=tuple(
            ParameterInfo(name="p", shape=(size,), dtype=dtype, group=0) for size in sizes
        ),
        blob_bytes=(0,),
    )
    return WireCasts(manifest, manifest.slices())


def noise(elems: int = ELEMS) -> torch.Tensor:
    return torch.randn(elems, generator=torch.Generator().manual_seed(1)) * 1e3


@pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])
def test_there_and_back_is_a_cast_to_the_nearest(wire_dtype: str) -> None:
    casts, gradient, dtype = make(wire_dtype, ELEMS), noise(), DTYPES[wire_dtype]
    sent = casts.narrow(0, bytes_of(gradient))
    assert len(sent) == casts.size_bytes(0) == 2 * ELEMS
    assert sent == bytes_of(gradient.to(dtype))
    casts.destination(0)[:] = sent
    values = torch.zeros(ELEMS)
    casts.widen(0, bytes_of(values))
    assert torch.equal(values, gradient.to(dtype).float())


@pytest.mark.parametrize(
    ("wire_dtype", "dtype"), [(None, "float32"), ("float16", "float64"), ("float16", "bfloat16")]
)
def test_what_is_not_cast(wire_dtype: str | None, dtype: str) -> None:
    assert 0 not in make(wire_dtype, 5, dtype=dtype)
    assert 0 in make("float16", 5)


def test_beyond_the_range_of_float16_is_infinite() -> None:
    gradient = torch.tensor([65_504.0, 1e5, -1e5, 1e-9, torch.nan])
    sent = torch.frombuffer(make("float16", 5).narrow(0, bytes_of(gradient)), dtype=torch.float16)
    assert sent[:4].tolist() == [65_504.0, torch.inf, -torch.inf, 0.0]
    assert sent[4].isnan()


def test_each_thread_and_direction_has_its_own_memory_which_is_used_again() -> None:
    """Whichever server a slice belongs to: that may change."""
    casts = make("float16", 7, 7, 3)
    ones, twos = torch.ones(7), torch.full((7,), 2.0)
    first = casts.narrow(0, bytes_of(ones))
    with ThreadPoolExecutor(1) as other:
        second = other.submit(casts.narrow, 1, bytes_of(twos)).result()
        arriving = casts.destination(0)
        arriving[:] = bytes(14)
        assert (first, second) == (bytes_of(ones.half()), bytes_of(twos.half()))
    again = casts.narrow(2, bytes_of(twos[:3]))
    assert len(again) == 6
    assert first[:6] == again
    assert first[6:] == bytes_of(ones.half())[6:]
