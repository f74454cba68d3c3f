"""bfloat16 and float16: half the bytes, by a cast to the nearest, ties to even."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from foreprop.compression.payloads import Stateless, array_of, check_size, copy_parts
from foreprop.core.codec import Place
from foreprop.path.memory import bytes_of


@dataclass(slots=True)
class SixteenBit(Stateless):
    """What is beyond the range of float16 becomes infinite, as torch's cast does."""

    name: str
    dtype: torch.dtype

    def most_bytes(self, elems: int) -> int:
        return 2 * elems

    def encode(
        self, values: torch.Tensor, state: Mapping[str, torch.Tensor], place: Place
    ) -> memoryview:
        narrow = torch.empty(len(values), dtype=self.dtype)
        copy_parts(narrow, values)
        return bytes_of(narrow)

    def decode(self, data: memoryview, out: torch.Tensor, place: Place) -> None:
        check_size(self.name, data, len(out), self.most_bytes(len(out)))
        copy_parts(out, array_of(data, self.dtype, 0, len(out)))


def bf16() -> SixteenBit:
    return SixteenBit("bf16", torch.bfloat16)


def fp16() -> SixteenBit:
    return SixteenBit("fp16", torch.float16)
