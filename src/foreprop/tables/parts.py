"""How rows travel, in parts of bounded size: pushed, pulled, and all that a server keeps of them.

A part of a push, or of an answer, has row numbers, then the rows' elements. For checkpoints of a
remote table a server gives all that it keeps: the rows that have values of their own (the others
are made again, `tables.table`). Such a part has the rows' numbers, and for each row its values, its
optimizer state and its moving average.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from foreprop.core.shards import Shard, numbers_bytes, part_rows
from foreprop.errors import RemoteProtocolError
from foreprop.path.memory import bytes_of
from foreprop.path.tensors import decode_state, encode_state, is_array, state_limit_bytes

if TYPE_CHECKING:
    from foreprop.tables.rowcodecs import RowCodecs

_COUNT = struct.Struct("!Q")

VALUES, STATE = "values", "state."
"""Names of a part's entries, beside `tensors.AVERAGE`: the values, and how those of the
optimizer's state begin.
"""
REQUESTS = 2**32
"""How many numbers requests for rows have, before they begin again."""
END = -1
_KEPT_ELEMS = 1 << 20
_FOLLOWING = struct.Struct("!q")
KEPT_PULL_BYTES = _FOLLOWING.size


class RowPart(NamedTuple):
    """``numbers``: int64, ascending, the rows' numbers in their shard; ``rows``: one each."""

    numbers: torch.Tensor
    rows: torch.Tensor


def encode_numbers(numbers: torch.Tensor) -> bytes:
    narrow = numbers.to(torch.int32)
    padding = bytes(numbers_bytes(len(numbers)) - _COUNT.size - 4 * len(numbers))
    return b"".join([_COUNT.pack(len(numbers)), bytes_of(narrow), padding])


def encode_part(part: RowPart, code: memoryview | None = None) -> bytes:
    """With the rows as they are, or with their ``code``."""
    rows = bytes_of(part.rows.contiguous()) if code is None else code
    return b"".join([encode_numbers(part.numbers), rows])


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


def decode_part(
    data: memoryview, shard: Shard, dtype: torch.dtype, codecs: RowCodecs | None = None
) -> RowPart:
    """Rows as they are share memory with ``data``; raises `RemoteProtocolError`."""
    numbers, rest = decode_numbers(data, shard)
    wanted = len(numbers) * shard.row_elems * dtype.itemsize
    if codecs is not None and codecs.is_code(shard.parameter, len(rest), wanted):
        rows = torch.empty(len(numbers), shard.row_elems, dtype=dtype)
        codecs.decode(rest, rows)
        return RowPart(numbers, rows)
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


# All that is kept.
class KeptRows(NamedTuple):
    """``entries``: arrays of (len(numbers), row_elems), and numbers of the whole shard."""

    numbers: torch.Tensor
    """int64, ascending, in the shard or in the table."""
    entries: Mapping[str, Any]
    following: int = END
    """Where the next part begins, or `END`; a server's own way of counting."""


def rows_at_once(shard: Shard) -> int:
    return part_rows(shard.row_elems, _KEPT_ELEMS)


def kept_limit_bytes(shard: Shard) -> int:
    rows = min(rows_at_once(shard), shard.rows)
    return _FOLLOWING.size + numbers_bytes(rows) + state_limit_bytes(rows * shard.row_elems)


def encode_kept_pull(first: int) -> bytes:
    """A part is wanted: the first, 0, or the one that begins here."""
    return _FOLLOWING.pack(first)


def decode_kept_pull(data: memoryview, shard: Shard) -> int:
    """Raises `RemoteProtocolError`; the payload's size has been checked."""
    first = int(_FOLLOWING.unpack(data)[0])
    if not 0 <= first <= shard.rows:
        raise RemoteProtocolError(f"kept rows from place {first} on, of {shard.rows} rows")
    return first


def encode_kept(part: KeptRows) -> bytes:
    head = _FOLLOWING.pack(part.following)
    return b"".join([head, encode_numbers(part.numbers), encode_state(part.entries)])


def decode_kept(data: memoryview, shard: Shard) -> KeptRows:
    """Numbers are the shard's; raises `RemoteProtocolError`."""
    if len(data) < _FOLLOWING.size:
        raise RemoteProtocolError(f"{len(data)} bytes are no part of a table")
    following = int(_FOLLOWING.unpack_from(data)[0])
    numbers, rest = decode_numbers(data[_FOLLOWING.size :], shard)
    entries = decode_state(rest, elems=len(numbers) * shard.row_elems)
    shape = (len(numbers), shard.row_elems)
    shaped = {key: v.view(shape) if is_array(v) else v for key, v in entries.items()}
    return KeptRows(numbers, shaped, following)


def in_table(part: KeptRows, shard: Shard, servers: int) -> KeptRows:
    """A shard's part with the numbers that its rows have in the table."""
    return part._replace(numbers=part.numbers * servers + shard.server)


def cut_kept(
    part: KeptRows, shards: Sequence[Shard], servers: int
) -> Iterator[tuple[Shard, KeptRows]]:
    """What of a table's part belongs to which shard, in the shards' numbers and in small parts."""
    for shard in shards:
        places = (part.numbers % servers == shard.server).nonzero()[:, 0]
        for some in torch.split(places, rows_at_once(shard)):  # without rows it has numbers, too
            entries = {
                key: v.index_select(0, some) if is_array(v) else v
                for key, v in part.entries.items()
            }
            yield shard, KeptRows(part.numbers[some] // servers, entries)
