"""What codecs cost: seconds of one core for encoding and decoding, and what they save."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from foreprop.compression.codecs import make
from foreprop.core.codec import Codec, Place

NAMES = (
    "bf16",
    "fp16",
    "int8",
    "int4",
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
"""More than a core's cache holds, as in a training, where each slice's turn comes once a step."""


class CodecCost(NamedTuple):
    name: str
    bytes_per_elem: float
    encode_s_per_gb: float
    """CPU seconds per 10^9 bytes of float32, all threads together. With error feedback."""
    decode_s_per_gb: float

    @property
    def worth_below_bits_per_s(self) -> float:
        """The link rate at which encoding, sending and decoding take as long as sending float32.

        One after the other, on one core each. Where they overlap, it pays up to a faster link.
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
    trips = [_Trip(make(name), values) for name in names]
    for trip in trips:
        trip.go(0)  # what torch loads at first use, and memory
    seen = [[trip.go(step) for trip in trips] for step in range(1, rounds + 1)]
    gigabytes = values.nbytes / 1e9
    costs = []
    for name, trip, times in zip(names, trips, zip(*seen, strict=True), strict=True):
        encode_s, decode_s = (statistics.median(part) for part in zip(*times, strict=True))
        costs.append(
            CodecCost(name, trip.bytes_per_elem, encode_s / gigabytes, decode_s / gigabytes)
        )
    return costs


class _Trip:
    """All slices, from a worker to a server."""

    def __init__(self, codec: Codec[torch.Tensor], values: torch.Tensor) -> None:
        self._codec = codec
        self._values = values
        self._states = [codec.new_state(len(row)) for row in values]
        self._out = torch.zeros_like(values)
        self.bytes_per_elem = 0.0

    def go(self, step: int) -> tuple[float, float]:
        """CPU seconds of encoding and of decoding."""
        sent: list[memoryview] = []

        def encode() -> None:
            for number, (row, state) in enumerate(zip(self._values, self._states, strict=True)):
                sent.append(self._codec.encode(row, state, Place(step, number, 0)))

        def decode() -> None:
            for number, (data, out) in enumerate(zip(sent, self._out, strict=True)):
                self._codec.decode(data, out, Place(step, number, 0))

        took = _cpu_s(encode), _cpu_s(decode)
        self.bytes_per_elem = sum(map(len, sent)) / self._values.numel()
        return took


def _cpu_s(work: Callable[[], None]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s
