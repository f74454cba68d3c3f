"""What all kernels do with bytes: take arrays from them, and work in parts that stay in the cache.

Bytes to decode come from the network, so their length is checked before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from foreprop.core.codec import Place
from foreprop.errors import RemoteProtocolError
from foreprop.numerics.finite import is_finite

AT_ONCE_ELEMS = 30_720
"""torch divides longer work among threads, of which every thread here would get a team.

A multiple of every block.
"""
_MIX = 0x9E37_79B9_7F4A_7C15
_WORD = (1 << 64) - 1


class Stateless:
    """A lossy codec that remembers nothing by itself."""

    __slots__ = ()
    exact = False

    def new_state(self, elems: int) -> Mapping[str, torch.Tensor]:
        return {}


def spans(elems: int, at_once: int = AT_ONCE_ELEMS) -> Iterator[slice]:
    for start in range(0, elems, at_once):
        yield slice(start, min(start + at_once, elems))


def zeros(elems: int) -> torch.Tensor:
    return torch.from_numpy(np.zeros(elems, np.float32))


def copy_parts(target: torch.Tensor, source: torch.Tensor) -> None:
    """With the cast that it takes."""
    for span in spans(len(target)):
        target[span].copy_(source[span])


def all_finite(values: torch.Tensor) -> bool:
    return all(is_finite(values[span]) for span in spans(len(values)))


def check_size(name: str, data: memoryview, elems: int, size_bytes: int) -> None:
    """Raises `RemoteProtocolError` for bytes of another length."""
    if data.nbytes != size_bytes:
        raise RemoteProtocolError(
            f"{name}: {data.nbytes} bytes for {elems} elements; there must be {size_bytes}"
        )


def array_of(data: memoryview, dtype: torch.dtype, start_bytes: int, elems: int) -> torch.Tensor:
    """``elems`` elements that lie at ``start_bytes``; not to be written to."""
    if not elems:
        return torch.empty(0, dtype=dtype)
    # torch warns of memory that must not be written
    source = bytearray(data) if data.readonly else data
    return torch.frombuffer(source, dtype=dtype, count=elems, offset=start_bytes)


def generator_of(place: Place, *, of_rank: bool) -> torch.Generator:
    """The same numbers for the same place, on every machine; ``of_rank``: others on each rank."""
    mixed = 0
    for number in (place.step, place.slice, place.rank if of_rank else -1):
        mixed = ((mixed ^ (number & _WORD)) + 1) * _MIX & _WORD
        mixed ^= mixed >> 32
    return torch.Generator().manual_seed(mixed & 0xFFFF_FFFF)
