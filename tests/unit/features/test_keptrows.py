"""Parts of what servers keep of a table's rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreprop.core.slicing import Shard, plan_shards
from foreprop.errors import RemoteProtocolError
from foreprop.features.tables import parts
from foreprop.features.tables.parts import (
    KeptRows,
    cut_kept,
    decode_kept,
    decode_kept_pull,
    encode_kept,
    encode_kept_pull,
    in_table,
    kept_limit_bytes,
)

SHARD = Shard(3, 0, 1, 6, 2, True)


def part_of(numbers: list[int], row_elems: int, following: int = parts.END) -> KeptRows:
    rows = torch.tensor(numbers, dtype=torch.int64)[:, None] * torch.arange(1.0, row_elems + 1)
    entries = {"values": rows, "state.step": 3, "state.sum": rows * 2}
    return KeptRows(torch.tensor(numbers, dtype=torch.int64), entries, following)


def check_same(got: KeptRows, wanted: KeptRows) -> None:
    assert torch.equal(got.numbers, wanted.numbers)
    assert got.following == wanted.following
    assert got.entries.keys() == wanted.entries.keys()
    for key, value in wanted.entries.items():
        assert torch.equal(torch.as_tensor(got.entries[key]), torch.as_tensor(value))


@given(st.sets(st.integers(0, 5)), st.integers(-1, 6))
def test_parts_arrive_as_they_left(numbers: set[int], following: int) -> None:
    part = part_of(sorted(numbers), 2, following)
    data = encode_kept(part)
    assert len(data) <= kept_limit_bytes(SHARD)
    check_same(decode_kept(memoryview(bytearray(data)), SHARD), part)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_part_or_an_error(data: bytes) -> None:
    try:
        part = decode_kept(memoryview(bytearray(data)), SHARD)
    except RemoteProtocolError:
        return
    assert all(0 <= number < SHARD.rows for number in part.numbers.tolist())


def test_the_length_must_fit() -> None:
    data = bytearray(encode_kept(part_of([0, 4], 2)))
    for wrong in (data[:-1], data + b"\0", data[:12], b"", data[:8]):
        with pytest.raises(RemoteProtocolError):
            decode_kept(memoryview(bytearray(wrong)), SHARD)


def test_pulls() -> None:
    for first in (0, 6):
        assert decode_kept_pull(memoryview(encode_kept_pull(first)), SHARD) == first
    for wrong in (-1, 7):
        with pytest.raises(RemoteProtocolError, match=f"rows from place {wrong} on, of 6 rows"):
            decode_kept_pull(memoryview(encode_kept_pull(wrong)), SHARD)


@given(st.sets(st.integers(0, 19)), st.integers(1, 4), st.integers(1, 6))
def test_a_part_is_cut_for_its_shards_and_put_together_again(
    numbers: set[int], servers: int, at_once: int
) -> None:
    shards = plan_shards([(0, 20, 3)], servers=servers, first_number=0, remote={0})
    whole = part_of(sorted(numbers), 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "_KEPT_ELEMS", 3 * at_once)
        cut = list(cut_kept(whole, shards, servers))
    assert {shard.number for shard, _ in cut} == set(range(servers))  # numbers are for all
    seen: dict[int, Any] = {}
    for shard, part in cut:
        assert len(part.numbers) <= at_once
        assert part.entries["state.step"] == 3
        back = in_table(part, shard, servers)
        for number, row in zip(back.numbers.tolist(), part.entries["values"].tolist(), strict=True):
            assert number not in seen
            seen[number] = row
    assert seen.keys() == numbers
    assert [seen[number] for number in sorted(numbers)] == whole.entries["values"].tolist()
