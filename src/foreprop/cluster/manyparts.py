"""Bytes of any number on a board, in several entries."""

from __future__ import annotations

from foreprop.cluster.entries import decode_parts
from foreprop.cluster.rendezvous import Board, Look

_VALUE_BYTES = 4_194_304
"""Of one entry: torch's store takes less than 8 MiB."""


def publish_bytes(board: Board, name: str, data: bytes) -> None:
    starts, key = range(0, len(data), _VALUE_BYTES), board.key_of(name)
    for number, start in enumerate(starts[:-1]):  # each call has a time of its own
        board.entries.set(f"{key}/{number}", data[start : start + _VALUE_BYTES])
    last = {f"{key}/{len(starts) - 1}": data[starts[-1] :]} if starts else {}
    board.entries.set_all({**last, key: str(len(starts))})


def lookup_bytes(board: Board, name: str, what: str, look: Look | None = None) -> memoryview:
    numbers = decode_parts(board.lookup(name, what, look), what)
    return memoryview(b"".join(board.wait_for(f"{name}/{n}", what, look) for n in numbers))


def forget_bytes(board: Board, name: str) -> None:
    """Remove them, if there are such."""
    if (count := board.peek(name)) is not None:
        key = board.key_of(name)
        numbers = decode_parts(count.decode(), name)
        board.entries.delete(key, *(f"{key}/{number}" for number in numbers))
