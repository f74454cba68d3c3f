"""Room for gradients: as much as is used at a time, and what is free goes to the system."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreprop.engine import sums
from foreprop.engine.memory import drop_pages
from foreprop.engine.sums import Buffers, Extent, GradientBuffer

FLOATS = torch.float32


def extent(lead_elems: int, elems: int = 50_000) -> Extent:
    return Extent(lead_elems, elems, -(-(lead_elems + elems) // 64) * 64)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200)), max_size=40))
def test_there_are_as_many_as_have_been_in_use_at_a_time(moves: list[tuple[int, int]]) -> None:
    """Of all extents together, and with zeros around the slice's own."""
    buffers = Buffers(0)
    used: list[GradientBuffer] = []
    most, memory = 0, set()
    for lead, which in moves:
        if used and which % 2:
            buffers.give(used.pop(which % len(used)))
            continue
        wanted = extent(16 * lead)
        buffer = buffers.take(wanted, FLOATS)
        assert buffer.extent == wanted
        assert not any(buffer is other for other in used)
        around = buffer.tensor[: 16 * lead].sum() + buffer.tensor[16 * lead + 50_000 :].sum()
        assert around == 0
        wanted.part(buffer.tensor).fill_(1.0)
        used.append(buffer)
        memory.add(buffer.memory.data_ptr())
        most = max(most, len(used))
    assert len(memory) == most


def test_another_type_or_size_has_memory_of_its_own() -> None:
    buffers = Buffers(0)
    first = buffers.take(extent(0), FLOATS)
    buffers.give(first)
    assert buffers.take(extent(0), torch.float64).memory.dtype == torch.float64
    assert buffers.take(extent(0, 9_000), FLOATS).memory.numel() < 10_000
    assert buffers.take(extent(0), FLOATS) is first


def test_what_is_free_beyond_a_share_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been given back last is taken first, and what has no pages last."""
    monkeypatch.setattr(sums, "_LEAST_SPARE_BYTES", 3 * 200_704)
    buffers = Buffers(0)
    used = [buffers.take(extent(0), FLOATS) for _ in range(6)]
    for buffer in used:
        buffer.memory.fill_(1.0)
        buffers.give(buffer)
    assert [buffer.is_empty for buffer in used] == 3 * [False] + 3 * [True]
    assert [resident_bytes(buffer.memory) > 100_000 for buffer in used] == 3 * [True] + 3 * [False]
    again = [buffers.take(extent(0), FLOATS) for _ in range(6)]
    assert again[:3] == used[2::-1]
    assert {id(buffer) for buffer in again} == {id(buffer) for buffer in used}
    assert not any(buffer.is_empty for buffer in again)
    assert all(buffer.memory.eq(0).sum() > 40_000 for buffer in again[3:])
    buffers.give(again[0])
    assert not again[0].is_empty


def test_little_is_not_given_to_the_system() -> None:
    little = torch.ones(1000)
    assert not drop_pages(little)
    assert little.sum() == 1000


def resident_bytes(tensor: torch.Tensor) -> int:
    """Of whole pages of the tensor's own."""
    page_bytes = 4096
    first, last = tensor.data_ptr() // page_bytes + 1, (tensor.data_ptr() + tensor.nbytes) // 4096
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * first)
        entries = torch.frombuffer(bytearray(pages.read(8 * (last - first))), dtype=torch.int64)
    return int((entries < 0).sum()) * page_bytes  # the highest bit says so
