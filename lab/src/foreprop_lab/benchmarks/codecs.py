"""What codecs cost: seconds of one core for encoding and decoding, and what they save."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from foreprop.core.codec import Place
from foreprop.features.compression.codecs import make

NAMES = (
    "lossless",
    "bf16",
    "fp16",
    "int8",
    "int4",
    "int2",
    "1bit",
    "efsign",
    "sign",
    "qsgd",
    "qsgd:7",
    "terngrad",
    "topk:0.01",
    "randomk:0.01",
    "dgc:0.001",
)
_MOST_SLICES = 64
"""The most slices: more than a core's cache holds, as in training, where each has a turn a step."""


class CodecCost(NamedTuple):
    name: str
    bytes_per_elem: float
    encode_s_per_gb: float
    """CPU seconds per 10^9 bytes of float32, all threads together, error feedback included."""
    decode_s_per_gb: float

    @property
    def worth_below_bits_per_s(self) -> float:
        """The link rate at which encoding, sending and decoding take as long as sending float32.

        They follow each other, each on one core; where they overlap, it pays up to a faster link.
        """
        saved_bits_per_elem = 8 * (4 - self.bytes_per_elem)
        return saved_bits_per_elem / (4e-9 * (self.encode_s_per_gb + self.decode_s_per_gb))


def measure_codecs(
    names: Sequence[str] = NAMES, *, slice_elems: int, slices: int, rounds: int
) -> list[CodecCost]:
    """Medians of so many rounds over so many slices, at most 64; the codecs alternate."""
    slices = min(slices, _MOST_SLICES)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((slices, slice_elems), generator=generator) * 1e-3
    trips = [Trip(name, list(values)) for name in names]
    for trip in trips:
        trip.go(0)  # what torch loads at first use, and memory
        trip.took_s.clear()
    for step in range(1, rounds + 1):
        for trip in trips:
            trip.go(step)
    return [trip.cost for trip in trips]


class Trip:
    """All slices, flat float32 arrays, from a worker to a server."""

    def __init__(self, name: str, values: Sequence[torch.Tensor]) -> None:
        self._name = name
        self._codec = make(name)
        self._values = values
        self._states = [self._codec.new_state(len(row)) for row in values]
        self._out = [torch.zeros_like(row) for row in values]
        self._sent_bytes = 0
        self.took_s: list[tuple[float, float]] = []
        """CPU seconds of encoding and of decoding, each time."""

    def go(self, step: int) -> None:
        sent: list[memoryview] = []

        def encode() -> None:
            for number, (row, state) in enumerate(zip(self._values, self._states, strict=True)):
                sent.append(self._codec.encode(row, state, Place(step, number, 0)))

        def decode() -> None:
            for number, (data, out) in enumerate(zip(sent, self._out, strict=True)):
                self._codec.decode(data, out, Place(step, number, 0))

        self.took_s.append((_cpu_s(encode), _cpu_s(decode)))
        self._sent_bytes = sum(map(len, sent))

    @property
    def cost(self) -> CodecCost:
        """The medians of all times, with the bytes of the last one."""
        elems = sum(map(len, self._values))
        encode_s, decode_s = (statistics.median(part) for part in zip(*self.took_s, strict=True))
        per_gb = 1e9 / (4 * elems)
        return CodecCost(self._name, self._sent_bytes / elems, encode_s * per_gb, decode_s * per_gb)


def _cpu_s(work: Callable[[], None]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s
