"""How rows travel, in parts of bounded size: pushed, pulled, and all that a server keeps of them.

A part of a push, or of an answer, has row numbers, then the rows' elements. For checkpoints of a
remote table a server gives all that it keeps: the rows that have values of their own (the others
are made again, `tables.rowtable`). Such a part has the rows' numbers, and for each row its values,
its optimizer state and its moving average.

A ``decode_`` raises `RemoteProtocolError` for bytes that are no such message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from foreprop.core.codec import EXACT, NONE, Place, codec_of
from foreprop.core.manifest import Manifest
from foreprop.core.slicing import Shard, numbers_bytes, part_rows
from foreprop.engine.memory import bytes_of
from foreprop.engine.tensors import decode_state, encode_state, is_array, state_limit_bytes
from foreprop.errors import RemoteProtocolError
from foreprop.features.compression.lossless import Lossless

_COUNT = struct.Struct("!Q")

VALUES, STATE = "values", "state."
"""Names of a kept part's entries, beside `tensors.AVERAGE`: the values, and what the names of the
optimizer's state begin with.
"""
REQUESTS = 2**32
"""How many numbers there are for requests of rows, before they begin again."""
END = -1
_KEPT_ELEMS = 1 << 20
_FOLLOWING = struct.Struct("!q")
KEPT_PULL_BYTES = _FOLLOWING.size
_NOWHERE = Place(0, 0, 0)  # this codec draws nothing by the place


class RowPart(NamedTuple):
    """Rows with their numbers, which are int64 and ascend."""

    numbers: torch.Tensor
    rows: torch.Tensor


def encode_numbers(numbers: torch.Tensor) -> bytes:
    narrow = numbers.to(torch.int32)
    padding = bytes(numbers_bytes(len(numbers)) - _COUNT.size - 4 * len(numbers))
    return b"".join([_COUNT.pack(len(numbers)), bytes_of(narrow), padding])


def encode_part(part: RowPart, code: memoryview | None = None) -> bytes:
    """The bytes of a part, with the rows as they are or with their ``code``."""
    rows = bytes_of(part.rows.contiguous()) if code is None else code
    return b"".join([encode_numbers(part.numbers), rows])


def decode_numbers(data: memoryview, shard: Shard) -> tuple[torch.Tensor, memoryview]:
    """The row numbers, and the bytes that follow them; raises `RemoteProtocolError`."""
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
    """The part in these bytes, with which its rows share memory unless they come as a code.

    Raises `RemoteProtocolError`.
    """
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
    """Each touched row once, its gradients added up in ``dtype`` in the order of the parts."""
    if not parts:
        return RowPart(torch.empty(0, dtype=torch.int64), torch.empty(0, row_elems, dtype=dtype))
    numbers = torch.cat([part.numbers for part in parts])
    touched, places = torch.unique(numbers, return_inverse=True)
    total = torch.zeros(len(touched), row_elems, dtype=dtype)
    start = 0
    for part in parts:
        stop = start + len(part.numbers)
        # a part has each row once, so there is only one order of adding
        total.index_add_(0, places[start:stop], part.rows.to(dtype))
        start = stop
    return RowPart(touched, total)


def encode_pull(shard: int, numbers: torch.Tensor) -> bytes:
    return b"".join([_COUNT.pack(shard), encode_numbers(numbers)])


def pulled_shard(data: memoryview) -> int:
    """The number of the shard that a pull is about, or -1."""
    return int(_COUNT.unpack_from(data)[0]) if len(data) >= _COUNT.size else -1


def decode_pull(data: memoryview, shard: Shard) -> torch.Tensor:
    numbers, rest = decode_numbers(data[_COUNT.size :], shard)
    if rest:
        raise RemoteProtocolError(f"{len(rest)} bytes too many after a pull")
    return numbers


def part_limit_bytes(shard: Shard, itemsize: int) -> int:
    """The size of the largest part, or pull: the whole shard."""
    return _COUNT.size + numbers_bytes(shard.rows) + shard.rows * shard.row_elems * itemsize


class RowCodecs:
    """The codecs of a session's tables, by their parameters' numbers. Any thread.

    Rows, pushed or answered, have the exact codec or none. A payload as long as the rows is the
    rows, as of slices; a shorter one is a code. Values go as they are, not as differences: workers
    keep no image of rows that they do not use. ``inside_node``: between workers and their relay
    nothing is encoded.
    """

    def __init__(self, manifest: Manifest, *, inside_node: bool = False) -> None:
        choices = () if inside_node else manifest.knobs.compression
        self._coded = {
            number
            for number, info in enumerate(manifest.parameters)
            if info.rows and codec_of(info.name, choices) in EXACT - {NONE}
        }
        self._codec = Lossless() if self._coded else None

    def __contains__(self, parameter: int) -> bool:
        return parameter in self._coded

    def encoded(self, parameter: int, rows: torch.Tensor) -> memoryview:
        """The rows' code, or their bytes if the code is no shorter."""
        flat = rows.contiguous().view(-1)
        raw = bytes_of(flat)
        if self._codec is None or parameter not in self._coded or not len(raw):
            return raw
        data = self._codec.encode(flat, {}, _NOWHERE)
        return data if len(data) < len(raw) else raw

    def is_code(self, parameter: int, size_bytes: int, rows_bytes: int) -> bool:
        """Whether rows that take ``rows_bytes`` have come as a code of that size."""
        return parameter in self._coded and size_bytes < rows_bytes

    def decode(self, data: memoryview, out: torch.Tensor) -> None:
        """Fill contiguous rows; raises `RemoteProtocolError` for what is no code."""
        if self._codec is not None:
            self._codec.decode(data, out.view(-1), _NOWHERE)


# All that a server keeps.
class KeptRows(NamedTuple):
    """A part of a remote table: rows with numbers in the shard or in the table, which ascend.

    ``entries`` are arrays of (len(numbers), row_elems), and plain numbers of the whole shard, as
    "step". ``following`` is the place where the next part begins, by the server's count.
    """

    numbers: torch.Tensor
    entries: Mapping[str, Any]
    following: int = END


def rows_at_once(shard: Shard) -> int:
    return part_rows(shard.row_elems, _KEPT_ELEMS)


def kept_limit_bytes(shard: Shard) -> int:
    rows = min(rows_at_once(shard), shard.rows)
    return _FOLLOWING.size + numbers_bytes(rows) + state_limit_bytes(rows * shard.row_elems)


def encode_kept_pull(first: int) -> bytes:
    """The payload that asks for the part that begins at a place, 0 for the first."""
    return _FOLLOWING.pack(first)


def decode_kept_pull(data: memoryview, shard: Shard) -> int:
    first = int(_FOLLOWING.unpack(data)[0])
    if not 0 <= first <= shard.rows:
        raise RemoteProtocolError(f"kept rows from place {first} on, of {shard.rows} rows")
    return first


def encode_kept(part: KeptRows) -> bytes:
    head = _FOLLOWING.pack(part.following)
    return b"".join([head, encode_numbers(part.numbers), encode_state(part.entries)])


def decode_kept(data: memoryview, shard: Shard) -> KeptRows:
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
    """A table's part cut by shards, with the shards' numbers, and in small parts."""
    for shard in shards:
        places = (part.numbers % servers == shard.server).nonzero()[:, 0]
        for some in torch.split(places, rows_at_once(shard)):  # also without rows: it has numbers
            entries = {
                key: v.index_select(0, some) if is_array(v) else v
                for key, v in part.entries.items()
            }
            yield shard, KeptRows(part.numbers[some] // servers, entries)
