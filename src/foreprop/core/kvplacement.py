"""How KVStore places arrays (MXNet; P3 section 4.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foreprop.core.slicing import CutPiece, Partition

_KVSTORE_PRIME = 9973


def place_kvstore(
    pieces: Sequence[CutPiece], partition: Partition
) -> Iterator[tuple[CutPiece, int]]:
    """KVStore's rule: large arrays in equal parts over all servers, others whole, to one that a
    hash of the array's number chooses (MXNet's own hash; "randomly" in P3 section 4.1).
    """
    servers = partition.servers
    for piece in pieces:
        elems = piece.stop_elems - piece.start_elems
        if elems <= partition.big_array_elems:
            yield piece, (piece.parameter * _KVSTORE_PRIME + partition.seed) % servers
            continue
        itemsize = piece.size_bytes // elems
        for server in range(servers):
            start = piece.start_elems + elems * server // servers
            stop = piece.start_elems + elems * (server + 1) // servers
            if stop > start:
                yield CutPiece(piece.parameter, start, stop, (stop - start) * itemsize), server
