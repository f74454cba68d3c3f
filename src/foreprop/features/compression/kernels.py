"""What all kernels share: arrays of bytes, work in parts that stay in the cache, error feedback.

Bytes to decode come from the network, so their length is checked before anything is read. torch
divides work on more than `AT_ONCE_ELEMS` among threads, of which every thread here would get a
team; so arrays are worked on in parts.

Error feedback adds what a codec leaves out of a gradient to the next one. Seide et al., 1-Bit
Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech DNNs
(2014), section 3.1; Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression
Schemes (2019), algorithm 2, with the learning rate on the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from foreprop.core.codec import Codec, Place
from foreprop.errors import RemoteProtocolError

AT_ONCE_ELEMS = 30_720  # a multiple of every block
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
    """Copy part by part, with the cast that it takes."""
    for span in spans(len(target)):
        target[span].copy_(source[span])


def all_finite(values: torch.Tensor) -> bool:
    return bool(np.isfinite(values.numpy()).all())


def check_size(name: str, data: memoryview, elems: int, size_bytes: int) -> None:
    """Raise `RemoteProtocolError` for bytes of another length."""
    if data.nbytes != size_bytes:
        raise RemoteProtocolError(
            f"{name}: {data.nbytes} bytes for {elems} elements; there must be {size_bytes}"
        )


def array_of(data: memoryview, dtype: torch.dtype, start_bytes: int, elems: int) -> torch.Tensor:
    """``elems`` elements from ``start_bytes`` on; not to be written to."""
    if not elems:
        return torch.empty(0, dtype=dtype)
    source = bytearray(data) if data.readonly else data  # torch warns of read-only memory
    return torch.frombuffer(source, dtype=dtype, count=elems, offset=start_bytes)


def generator_of(place: Place, *, of_rank: bool) -> torch.Generator:
    """A generator that a place determines, on every machine; ``of_rank``: other for each rank."""
    mixed = 0
    for number in (place.step, place.slice, place.rank if of_rank else -1):
        mixed = ((mixed ^ (number & _WORD)) + 1) * _MIX & _WORD
        mixed ^= mixed >> 32
    return torch.Generator().manual_seed(mixed & 0xFFFF_FFFF)


@dataclass(slots=True)
class ErrorFeedback:
    """A codec with error feedback; it must decode finite values to finite ones.

    With v = g + e it sends Q(v) and keeps e = v - Q(v): what is sent in t steps is the sum of their
    gradients less the last e. With an empty state it is the codec alone.

    A gradient that is not finite leaves the state as it was. It is sent, and shows on all ranks;
    with a `GradScaler`, where such steps are skipped, nothing remains of it.
    """

    codec: Codec[torch.Tensor]
    encode_with: Callable[[torch.Tensor, torch.Tensor, Place], memoryview] | None = None
    """The codec's own, faster way to do what `encode` does with an error, to the same bits."""
    name: str = field(init=False)
    exact: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.name = self.codec.name

    def most_bytes(self, elems: int) -> int:
        return self.codec.most_bytes(elems)

    def new_state(self, elems: int) -> Mapping[str, torch.Tensor]:
        return {"error": zeros(elems)}

    def encode(
        self, values: torch.Tensor, state: Mapping[str, torch.Tensor], place: Place
    ) -> memoryview:
        if not state:
            return self.codec.encode(values, {}, place)
        error = state["error"]
        if self.encode_with is not None:
            return self.encode_with(values, error, place)
        with np.errstate(all="ignore"):
            compensated = torch.from_numpy(values.numpy() + error.numpy())
        data = self.codec.encode(compensated, {}, place)
        if all_finite(compensated):
            self.codec.decode(data, error, place)
            np.subtract(compensated.numpy(), error.numpy(), out=error.numpy())
        return data

    def decode(self, data: memoryview, out: torch.Tensor, place: Place) -> None:
        self.codec.decode(data, out, place)
