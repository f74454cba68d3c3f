"""All that a server keeps of a remote table's rows, in parts of bounded size, for checkpoints.

Kept are the rows that have values of their own; the others are made again (`tables.firstvalues`). A
part has the rows' numbers, and for each row its values, its optimizer state and its moving average.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from foreprop.core.slicing import Shard
from foreprop.errors import RemoteProtocolError
from foreprop.path.tensors import decode_state, encode_state, is_array, state_limit_bytes
from foreprop.tables.parts import decode_numbers, encode_numbers, numbers_bytes, part_rows

VALUES, STATE = "values", "state."
"""Names of a part's entries, beside `tensors.AVERAGE`: the values, and how those of the
optimizer's state begin.
"""
END = -1
_PART_ELEMS = 1 << 20
_FOLLOWING = struct.Struct("!q")
PULL_BYTES = _FOLLOWING.size


class KeptRows(NamedTuple):
    """``entries``: arrays of (len(numbers), row_elems), and numbers of the whole shard."""

    numbers: torch.Tensor
    """int64, ascending, in the shard or in the table."""
    entries: Mapping[str, Any]
    following: int = END
    """Where the next part begins, or `END`; a server's own way of counting."""


def rows_at_once(shard: Shard) -> int:
    return part_rows(shard.row_elems, _PART_ELEMS)


def limit_bytes(shard: Shard) -> int:
    rows = min(rows_at_once(shard), shard.rows)
    return _FOLLOWING.size + numbers_bytes(rows) + state_limit_bytes(rows * shard.row_elems)


def encode_pull(first: int) -> bytes:
    """A part is wanted: the first, 0, or the one that begins here."""
    return _FOLLOWING.pack(first)


def decode_pull(data: memoryview, shard: Shard) -> int:
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
        limit = rows_at_once(shard)
        for start in range(0, max(1, len(places)), limit):  # an empty one has numbers, too
            some = places[start : start + limit]
            entries = {
                key: v.index_select(0, some) if is_array(v) else v
                for key, v in part.entries.items()
            }
            yield shard, KeptRows(part.numbers[some] // servers, entries)
