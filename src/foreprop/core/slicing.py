"""Parameters are cut into slices, and each slice gets a server (P3 sections 4.1 and 4.2).

Small parameters may share a slice, a *pack*. The rows of a table are dealt out instead: row r lies
on server r mod S, as its row r div S. Words are often numbered by frequency, and so every server
gets its share of the frequent ones.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from foreprop.errors import ConfigError

Granularity = Literal["slice", "array"]
Placement = Literal["round_robin", "kvstore", "balanced", "strict_round_robin"]


class Slice(NamedTuple):
    """A contiguous run of a parameter's flattened elements: the unit of synchronisation.

    Its ``number`` is the place in the session's list of slices, and its name on the wire.
    """

    number: int
    parameter: int
    start_elems: int
    stop_elems: int
    server: int

    @property
    def elems(self) -> int:
        return self.stop_elems - self.start_elems


SLICE_ELEMS = 50_000
"""P3's choice (section 5.7), which it made on four machines."""
LEAST_SLICE_ELEMS = 12_500
_MOST_SERVERS_WITH_FULL_SLICES = 8
BIG_ARRAY_ELEMS = 1_000_000
"""KVStore splits larger arrays over all servers."""
_KVSTORE_PRIME = 9973


def usual_slice_elems(servers: int, *, uneven: bool = False) -> int:
    """P3's 50,000; fewer with more than 8 servers, so that a slice to each is as much in all.

    A link carries a slice to or from every peer at once, so an urgent slice is as late as all of
    these together are long. Below 12,500, frames cost more than is won. Where shares are ``uneven``
    few servers are left, and half as many suit models of few slices better.
    """
    few = SLICE_ELEMS * _MOST_SERVERS_WITH_FULL_SLICES // servers
    usual = min(SLICE_ELEMS, few)
    return max(LEAST_SLICE_ELEMS, usual // 2 if uneven else usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """How parameters are cut and placed: the knobs that every process must agree on."""

    granularity: Granularity = "slice"
    placement: Placement = "round_robin"
    servers: int = 1
    slice_elems: int = SLICE_ELEMS
    big_array_elems: int = BIG_ARRAY_ELEMS
    shares: tuple[int, ...] = ()
    """How much each server owns, relatively (`core.linkshares`); empty: all the same."""

    def __post_init__(self) -> None:
        for field in ("servers", "slice_elems", "big_array_elems"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} is {getattr(self, field)}; it must be at least 1")


class CutPiece(NamedTuple):
    parameter: int
    start_elems: int
    stop_elems: int
    size_bytes: int


def plan_slices(
    sizes_elems: Sequence[int], itemsizes_bytes: Sequence[int], partition: Partition
) -> tuple[Slice, ...]:
    """Cut every parameter and place every piece; a pure function of its arguments.

    The slices of a parameter lie in order and cover each element once; an empty parameter has
    none. Every process calls this with the same arguments and so gets the same list.
    """
    pieces: list[CutPiece] = []
    for parameter, (size, itemsize) in enumerate(zip(sizes_elems, itemsizes_bytes, strict=True)):
        step = partition.slice_elems if partition.granularity == "slice" else max(size, 1)
        for start in range(0, size, step):
            stop = min(start + step, size)
            pieces.append(CutPiece(parameter, start, stop, (stop - start) * itemsize))
    if partition.shares:
        sizes = [piece.size_bytes for piece in pieces]
        placed = list(zip(pieces, deal(sizes, partition.shares), strict=True))
    elif partition.placement == "kvstore":
        placed = list(_place_kvstore(pieces, partition))
    elif partition.placement == "strict_round_robin":  # P3 section 4.2, to the letter
        placed = [(piece, number % partition.servers) for number, piece in enumerate(pieces)]
    elif partition.placement == "balanced":
        by_size = sorted(range(len(pieces)), key=lambda i: (-pieces[i].size_bytes, i))
        chosen = _least_loaded(pieces, by_size, partition.servers)
        placed = list(zip(pieces, chosen, strict=True))
    else:
        # equal slices are dealt round robin (P3 section 4.2); counting small arrays like full
        # slices would leave the servers, and so their links, with unequal shares
        chosen = _least_loaded(pieces, range(len(pieces)), partition.servers)
        placed = list(zip(pieces, chosen, strict=True))
    return tuple(
        Slice(index, piece.parameter, piece.start_elems, piece.stop_elems, server)
        for index, (piece, server) in enumerate(placed)
    )


def _least_loaded(pieces: Sequence[CutPiece], order: Sequence[int], servers: int) -> list[int]:
    """Each piece goes, in this order, to the server with the fewest bytes so far."""
    chosen = [0] * len(pieces)
    loads = [(0, server) for server in range(servers)]  # bytes and server: a heap
    for i in order:
        load_bytes, server = loads[0]
        chosen[i] = server
        heapq.heapreplace(loads, (load_bytes + pieces[i].size_bytes, server))
    return chosen


def deal(sizes_bytes: Sequence[int], shares: Sequence[int]) -> list[int]:
    """The server of each piece: always the one that is then least ahead of its share."""
    loads = [0] * len(shares)
    able = [server for server, share in enumerate(shares) if share > 0]
    chosen = []
    for size_bytes in sizes_bytes:
        server = min(able, key=lambda each: ((loads[each] + size_bytes) / shares[each], each))
        loads[server] += size_bytes
        chosen.append(server)
    return chosen


def _place_kvstore(
    pieces: Sequence[CutPiece], partition: Partition
) -> Iterator[tuple[CutPiece, int]]:
    """KVStore's rule: large arrays go in equal parts to all servers, others to one of them.

    A hash of the array's number chooses that (MXNet's own hash; "randomly" in P3 section 4.1).
    """
    servers = partition.servers
    for piece in pieces:
        elems = piece.stop_elems - piece.start_elems
        if elems <= partition.big_array_elems:
            yield piece, piece.parameter * _KVSTORE_PRIME % servers
            continue
        itemsize = piece.size_bytes // elems
        for server in range(servers):
            start = piece.start_elems + elems * server // servers
            stop = piece.start_elems + elems * (server + 1) // servers
            if stop > start:
                yield CutPiece(piece.parameter, start, stop, (stop - start) * itemsize), server


# Packs: small parameters that follow each other and travel as one slice.
#
# A frame costs as much for ten elements as for thousands, so small parameters share one. A pack has
# the number of its first parameter; the others have no slices of their own. Its elements are those
# of its parameters, one after the other, and behind them one *mark* for each parameter: 1 where a
# rank had a gradient, 0 where it had none. Servers sum and average marks like everything else, so
# they need not know of packs: who gets an average sees by its mark whether any rank had a gradient.
# Elements without a gradient are sent as -0.0, which added to a number changes no bit of it.
Packs = tuple[tuple[int, ...], ...]

_SHARE_OF_SLICE = 4  # a parameter of more than this part of a slice goes alone


def plan_packs(
    sizes_elems: Sequence[int],
    kinds: Sequence[Hashable | None],
    slice_elems: int,
    *,
    servers: int = 1,
) -> Packs:
    """The packs of neighbours of the same kind; a parameter of kind None goes alone.

    A pack is at most a slice, and at most one server's share of the model: otherwise some of the
    ``servers`` would have nothing.
    """
    most_elems = slice_elems // _SHARE_OF_SLICE
    whole = sum(size + 1 for size in sizes_elems)
    slice_elems = min(slice_elems, -(-whole // servers))
    packs: list[list[int]] = []
    pack: list[int] = []
    elems = 0
    for number, (size, kind) in enumerate(zip(sizes_elems, kinds, strict=True)):
        if kind is None or not 0 < size <= most_elems:
            pack = []
            continue
        if not pack or kind != kinds[pack[0]] or elems + size + 1 > slice_elems:
            pack, elems = [], 0
            packs.append(pack)
        pack.append(number)
        elems += size + 1
    return tuple(tuple(each) for each in packs if len(each) > 1)


def packed_elems(sizes_elems: Sequence[int], packs: Packs) -> list[int]:
    """How much is sent under each parameter's number: all of a pack, with marks, is the first's."""
    sizes = list(sizes_elems)
    for pack in packs:
        whole = sum(sizes[number] + 1 for number in pack)
        for number in pack:
            sizes[number] = 0
        sizes[pack[0]] = whole
    return sizes


def packed_order(order: Sequence[int], packs: Packs) -> list[int]:
    """The parameters by their first use: a pack's first stands where the first of them all does."""
    firsts = {number: pack[0] for pack in packs for number in pack}
    return list(dict.fromkeys([*(firsts.get(number, number) for number in order), *order]))


def places_in(sizes_elems: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where the elements of a pack's parameters begin and end in it."""
    yield from itertools.pairwise(itertools.accumulate(sizes_elems, initial=0))


# Rows of tables.
class Shard(NamedTuple):
    """One server's rows of one table; if it is ``remote``, the server makes their values.

    Shards are numbered after the slices.
    """

    number: int
    parameter: int
    server: int
    rows: int
    row_elems: int
    remote: bool = False

    @property
    def elems(self) -> int:
        return self.rows * self.row_elems


COUNT_BYTES = 8
"""The size of the number of rows that follow; in a pull the shard's number is there, too."""
_NUMBER_BYTES = 4
_ALIGN_BYTES = 8  # elements of any type begin at a multiple of this, as torch wants them


def part_rows(row_elems: int, part_elems: int) -> int:
    """How many rows one part of a push or a pull has, of about ``part_elems`` elements."""
    return max(1, part_elems // max(1, row_elems))


def numbers_bytes(rows: int) -> int:
    """The bytes of a part's row numbers, with their count."""
    return COUNT_BYTES + -(-_NUMBER_BYTES * rows // _ALIGN_BYTES) * _ALIGN_BYTES


def rows_of(server: int, rows: int, servers: int) -> int:
    return (rows - server + servers - 1) // servers


def plan_shards(
    shapes: Sequence[tuple[int, int, int]],
    *,
    servers: int,
    first_number: int,
    remote: Collection[int] = (),
) -> tuple[Shard, ...]:
    """A shard on every server for each (parameter, rows, elements per row), in order.

    Servers make the rows of ``remote`` parameters.
    """
    numbered = ((shape, server) for shape in shapes for server in range(servers))
    return tuple(
        Shard(number, parameter, server, rows_of(server, rows, servers), elems, parameter in remote)
        for number, ((parameter, rows, elems), server) in enumerate(numbered, first_number)
    )
