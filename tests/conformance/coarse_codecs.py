"""Lossy codecs that are as simple as can be: what is said of all must hold of these."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import torch

from foreprop.compression.codecs import make
from foreprop.core.codec import Codec, Place

_SCALE = struct.Struct("<f")


class Coarse:
    """Whole numbers of -127 to 127, of the largest element's size; what is left waits."""

    name = "coarse"
    exact = False

    def most_bytes(self, elems: int) -> int:
        return _SCALE.size + elems

    def new_state(self, elems: int) -> Mapping[str, torch.Tensor]:
        return {"residual": torch.zeros(elems)}

    def encode(
        self, values: torch.Tensor, state: Mapping[str, torch.Tensor], place: Place
    ) -> memoryview:
        total = values + state.get("residual", torch.zeros(1))
        scale = float(total.abs().max()) / 127 or 1.0
        head = _SCALE.pack(scale)
        (scale,) = _SCALE.unpack(head)
        whole = (total / scale).round()
        if state:
            state["residual"].copy_(total - whole * scale)
        return memoryview(bytearray(head) + whole.to(torch.int8).numpy().tobytes())

    def decode(self, data: memoryview, out: torch.Tensor, place: Place) -> None:
        (scale,) = _SCALE.unpack_from(data)
        out.copy_(torch.frombuffer(data[_SCALE.size :], dtype=torch.int8).float() * scale)


class Drawn:
    """Half of the elements, drawn by place: both sides must draw the same."""

    name = "drawn"
    exact = False

    def most_bytes(self, elems: int) -> int:
        return 4 * (elems // 2)

    def new_state(self, elems: int) -> Mapping[str, torch.Tensor]:
        return {"residual": torch.zeros(elems)}

    def encode(
        self, values: torch.Tensor, state: Mapping[str, torch.Tensor], place: Place
    ) -> memoryview:
        total = values + state.get("residual", torch.zeros(1))
        chosen = _draw(values.numel(), place)
        sent = total[chosen].contiguous()
        total[chosen] = 0
        if state:
            state["residual"].copy_(total)
        return memoryview(bytearray(sent.numpy().tobytes()))

    def decode(self, data: memoryview, out: torch.Tensor, place: Place) -> None:
        out.zero_()
        if out.numel() < 2:
            return
        out[_draw(out.numel(), place)] = torch.frombuffer(data, dtype=torch.float32)


def _draw(elems: int, place: Place) -> torch.Tensor:
    seed = place.step * 1_000_003 + place.slice * 1009 + place.rank
    order = torch.randperm(elems, generator=torch.Generator().manual_seed(seed))
    return order[: elems // 2]


def make_any(name: str) -> Codec[torch.Tensor]:
    """As `foreprop.compression.codecs.make`, with these."""
    for codec in (Coarse, Drawn):
        if codec.name == name:
            return codec()
    return make(name)


def make_any_for_replies(name: str, world_size: int) -> Codec[torch.Tensor]:
    """As `foreprop.compression.codecs.make_for_replies`."""
    return make_any(name)
