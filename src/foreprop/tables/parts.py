"""How rows travel: row numbers, then the rows' elements, in parts of bounded size."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from foreprop.core.slicing import Shard
from foreprop.errors import RemoteProtocolError
from foreprop.path.tensors import bytes_of

_COUNT = struct.Struct("!Q")
_ALIGN_BYTES = 8
"""Elements of any type begin at a multiple of this, as torch wants them."""


class RowPart(NamedTuple):
    """``numbers``: int64, ascending, the rows' numbers in their shard; ``rows``: one each."""

    numbers: torch.Tensor
    rows: torch.Tensor


def part_rows(row_elems: int, part_elems: int) -> int:
    """Rows in one part of about ``part_elems`` elements."""
    return max(1, part_elems // max(1, row_elems))


def numbers_bytes(rows: int) -> int:
    """What the row numbers of a part take, with their count."""
    return _COUNT.size + -(-4 * rows // _ALIGN_BYTES) * _ALIGN_BYTES


def encode_numbers(numbers: torch.Tensor) -> bytes:
    narrow = numbers.to(torch.int32)
    padding = bytes(numbers_bytes(len(numbers)) - _COUNT.size - 4 * len(numbers))
    return b"".join([_COUNT.pack(len(numbers)), bytes_of(narrow), padding])


def encode_part(part: RowPart) -> bytes:
    return b"".join([encode_numbers(part.numbers), bytes_of(part.rows.contiguous())])


def decode_numbers(data: memoryview, shard: Shard) -> tuple[torch.Tensor, memoryview]:
    """The row numbers, and what follows them; raises `RemoteProtocolError`."""
    count = _COUNT.unpack_from(data)[0] if len(data) >= _COUNT.size else -1
    if not 0 <= count <= shard.rows or len(data) < numbers_bytes(count):
        raise RemoteProtocolError(f"{count} rows in {len(data)} bytes, of {shard.rows} rows")
    rest = data[numbers_bytes(count) :]
    if not count:
        return torch.empty(0, dtype=torch.int64), rest
    numbers = torch.frombuffer(data, dtype=torch.int32, count=count, offset=_COUNT.size)
    ascending = bool((numbers[1:] > numbers[:-1]).all())
    if not ascending or numbers[0] < 0 or numbers[-1] >= shard.rows:
        raise RemoteProtocolError(
            f"rows {int(numbers[0])} to {int(numbers[-1])} of {shard.rows}; they must be there and"
            " ascend"
        )
    return numbers.to(torch.int64), rest


def decode_part(data: memoryview, shard: Shard, dtype: torch.dtype) -> RowPart:
    """Its rows share memory with ``data``; raises `RemoteProtocolError`."""
    numbers, rest = decode_numbers(data, shard)
    wanted = len(numbers) * shard.row_elems * dtype.itemsize
    if len(rest) != wanted:
        raise RemoteProtocolError(
            f"{len(numbers)} rows of {shard.row_elems} elements in {len(rest)} bytes, not {wanted}"
        )
    if not wanted:
        return RowPart(numbers, torch.empty(len(numbers), shard.row_elems, dtype=dtype))
    flat = torch.frombuffer(rest, dtype=dtype)
    return RowPart(numbers, flat.view(len(numbers), shard.row_elems))


def sum_parts(parts: Sequence[RowPart], row_elems: int, dtype: torch.dtype) -> RowPart:
    """Each touched row once, added up in ``dtype`` in the order of the parts."""
    if not parts:
        return RowPart(torch.empty(0, dtype=torch.int64), torch.empty(0, row_elems, dtype=dtype))
    numbers = torch.cat([part.numbers for part in parts])
    touched, places = torch.unique(numbers, return_inverse=True)
    total = torch.zeros(len(touched), row_elems, dtype=dtype)
    start = 0
    for part in parts:
        stop = start + len(part.numbers)
        # a part has each row once, so that this adds in one order only
        total.index_add_(0, places[start:stop], part.rows.to(dtype))
        start = stop
    return RowPart(touched, total)


def encode_pull(shard: int, numbers: torch.Tensor) -> bytes:
    """A pull's payload: which rows of which shard."""
    return b"".join([_COUNT.pack(shard), encode_numbers(numbers)])


def pulled_shard(data: memoryview) -> int:
    """The shard that a pull is about, or -1."""
    return int(_COUNT.unpack_from(data)[0]) if len(data) >= _COUNT.size else -1


def decode_pull(data: memoryview, shard: Shard) -> torch.Tensor:
    """The row numbers of a pull of this shard; raises `RemoteProtocolError`."""
    numbers, rest = decode_numbers(data[_COUNT.size :], shard)
    if rest:
        raise RemoteProtocolError(f"{len(rest)} bytes too many after a pull")
    return numbers


def part_limit_bytes(shard: Shard, itemsize: int) -> int:
    """The most that a part, or a pull, can have: the whole shard."""
    return _COUNT.size + numbers_bytes(shard.rows) + shard.rows * shard.row_elems * itemsize
