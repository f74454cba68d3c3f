"""Giving each server its rows of a table.

Row r lies on server r mod S, as its row r div S. Word numbers often go by frequency, and so every
server gets its share of the frequent ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from foreprop.core.manifest import Manifest
    from foreprop.core.slicing import Slice


class Shard(NamedTuple):
    """One server's rows of one table. Shards are numbered after the slices."""

    number: int
    parameter: int
    server: int
    rows: int
    row_elems: int
    remote: bool = False
    """Nobody sends its values: the server makes them."""

    @property
    def elems(self) -> int:
        return self.rows * self.row_elems


def slice_names(manifest: Manifest) -> list[str]:
    """The parameters' names, by number of the slice or shard."""
    slices = manifest.slices()
    pieces: list[Slice | Shard] = [*slices, *manifest.shards(len(slices))]
    return [manifest.parameters[piece.parameter].name for piece in pieces]


COUNT_BYTES = 8
"""Before row numbers: how many there are. In a pull also the shard's number."""
_NUMBER_BYTES = 4
_ALIGN_BYTES = 8
"""Elements of any type begin at a multiple of this, as torch wants them."""


def part_rows(row_elems: int, part_elems: int) -> int:
    """Rows in one part, of a push or of a pull, of about ``part_elems`` elements."""
    return max(1, part_elems // max(1, row_elems))


def numbers_bytes(rows: int) -> int:
    """What the row numbers of a part take, with their count."""
    return COUNT_BYTES + -(-_NUMBER_BYTES * rows // _ALIGN_BYTES) * _ALIGN_BYTES


def rows_of(server: int, rows: int, servers: int) -> int:
    """How many of a table's rows a server holds."""
    return (rows - server + servers - 1) // servers


def plan_shards(
    shapes: Sequence[tuple[int, int, int]],
    *,
    servers: int,
    first_number: int,
    remote: Collection[int] = (),
) -> tuple[Shard, ...]:
    """A shard on every server for each (parameter, rows, elements per row), in order.

    ``remote``: the parameters whose rows the servers make.
    """
    numbered = ((shape, server) for shape in shapes for server in range(servers))
    return tuple(
        Shard(number, parameter, server, rows_of(server, rows, servers), elems, parameter in remote)
        for number, ((parameter, rows, elems), server) in enumerate(numbered, first_number)
    )
