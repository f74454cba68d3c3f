"""Cutting parameters into slices and giving each slice a server (P3 sections 4.1 and 4.2).

The rows of a table are dealt out instead: see `core.shards`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from foreprop.errors import ConfigError

Granularity = Literal["slice", "array"]
Placement = Literal["round_robin", "kvstore", "balanced", "strict_round_robin"]


class Slice(NamedTuple):
    """A contiguous run of a parameter's flattened elements: the unit of synchronisation."""

    number: int
    """Position in the session's list of slices; the slice's name on the wire."""
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


def usual_slice_elems(servers: int, *, uneven: bool = False) -> int:
    """P3's 50,000; with more than 8 servers fewer, so that a slice for each is as many bytes.

    What a link carries at once is a slice to or from every peer, so an urgent one is as late as all
    of these together are long. Below 12,500, frames cost more than is won. Where shares are
    ``uneven`` and few servers left, half as many suit models of few slices better.
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
    seed: int = 0
    shares: tuple[int, ...] = ()
    """By server, what it owns relative to the others (`core.linkshares`); empty: as much."""

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
    pieces = list(_cut(sizes_elems, itemsizes_bytes, partition))
    if partition.shares:
        from foreprop.core.linkshares import deal

        sizes = [piece.size_bytes for piece in pieces]
        placed = list(zip(pieces, deal(sizes, partition.shares), strict=True))
    elif partition.placement == "kvstore":
        from foreprop.core.kvplacement import place_kvstore

        placed = list(place_kvstore(pieces, partition))
    elif partition.placement == "strict_round_robin":  # P3 section 4.2, to the letter
        placed = [(piece, number % partition.servers) for number, piece in enumerate(pieces)]
    elif partition.placement == "balanced":
        placed = list(zip(pieces, _balanced_servers(pieces, partition.servers), strict=True))
    else:
        placed = list(zip(pieces, _dealt_servers(pieces, partition.servers), strict=True))
    return tuple(
        Slice(index, piece.parameter, piece.start_elems, piece.stop_elems, server)
        for index, (piece, server) in enumerate(placed)
    )


def _cut(
    sizes_elems: Sequence[int], itemsizes_bytes: Sequence[int], partition: Partition
) -> Iterator[CutPiece]:
    for parameter, (size, itemsize) in enumerate(zip(sizes_elems, itemsizes_bytes, strict=True)):
        step = partition.slice_elems if partition.granularity == "slice" else max(size, 1)
        for start in range(0, size, step):
            stop = min(start + step, size)
            yield CutPiece(parameter, start, stop, (stop - start) * itemsize)


def _dealt_servers(pieces: Sequence[CutPiece], servers: int) -> list[int]:
    """In turn, by bytes: each piece to the server with the fewest so far.

    Equal slices are dealt round robin (P3 section 4.2); counting small arrays like full slices
    would leave the servers, and so their links, with unequal shares.
    """
    return _least_loaded(pieces, range(len(pieces)), servers)


def _balanced_servers(pieces: Sequence[CutPiece], servers: int) -> list[int]:
    """Largest piece first, each to the server with the fewest bytes so far."""
    by_size = sorted(range(len(pieces)), key=lambda i: (-pieces[i].size_bytes, i))
    return _least_loaded(pieces, by_size, servers)


def _least_loaded(pieces: Sequence[CutPiece], order: Sequence[int], servers: int) -> list[int]:
    chosen = [0] * len(pieces)
    loads = [(0, server) for server in range(servers)]  # bytes and server: a heap
    for i in order:
        load_bytes, server = loads[0]
        chosen[i] = server
        heapq.heapreplace(loads, (load_bytes + pieces[i].size_bytes, server))
    return chosen
