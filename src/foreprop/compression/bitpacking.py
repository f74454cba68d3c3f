"""Codes of 1, 2 or 4 bits in bytes: eight, four or two of them in each, the first one lowest."""

from __future__ import annotations

import functools

import torch

from foreprop.compression.payloads import AT_ONCE_ELEMS, spans
from foreprop.errors import RemoteProtocolError


def packed_bytes(elems: int, bits: int) -> int:
    return -(-elems * bits // 8)


def pack(codes: torch.Tensor, bits: int, packed: torch.Tensor) -> None:
    """``codes`` uint8 (elems,), each below ``2**bits``; ``packed`` uint8 (packed_bytes,)."""
    per_byte = 8 // bits
    whole = len(codes) // per_byte
    grid = codes[: whole * per_byte].view(whole, per_byte)
    for span in spans(whole):
        packed[span].copy_(grid[span, 0])
        for place in range(1, per_byte):
            packed[span].add_(grid[span, place], alpha=1 << place * bits)
    rest = codes[whole * per_byte :].tolist()
    if rest:
        packed[whole] = sum(code << place * bits for place, code in enumerate(rest))


def unpack(packed: torch.Tensor, bits: int, elems: int) -> torch.Tensor:
    """Codes uint8 (elems,). Raises `RemoteProtocolError` if a bit that is no code's is set."""
    if bits == 8:
        return packed
    table = _codes_of_bytes(bits)
    codes = torch.empty((len(packed), 8 // bits), dtype=torch.uint8)
    for span in spans(len(packed), AT_ONCE_ELEMS * bits // 8):
        torch.index_select(table, 0, packed[span].to(torch.int32), out=codes[span])
    flat = codes.view(-1)
    if bool(flat[elems:].any()):
        raise RemoteProtocolError("packed codes: bits are set after the last one")
    return flat[:elems]


@functools.cache
def _codes_of_bytes(bits: int) -> torch.Tensor:
    """What each byte holds: uint8 (256, codes per byte)."""
    shifts = torch.arange(0, 8, bits)
    return (torch.arange(256)[:, None] >> shifts & (1 << bits) - 1).to(torch.uint8)
