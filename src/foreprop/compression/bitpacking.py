"""Codes of 1, 2 or 4 bits in bytes.

In byte ``j`` lie the codes ``j``, ``length + j``, ``2 * length + j``, ... of an array, the first
one lowest: so all work is on contiguous runs. ``length`` is that of the packed array.
"""

from __future__ import annotations

import torch

from foreprop.compression.payloads import spans
from foreprop.errors import RemoteProtocolError


def packed_bytes(elems: int, bits: int) -> int:
    return -(-elems * bits // 8)


def pack(codes: torch.Tensor, bits: int, packed: torch.Tensor) -> None:
    """``codes`` uint8 (elems,), each below ``2**bits``; ``packed`` uint8 (packed_bytes,)."""
    if bits == 8:
        packed.copy_(codes)
        return
    length = len(packed)
    packed.copy_(codes[:length])
    for plane in range(1, 8 // bits):
        of_plane = codes[plane * length : (plane + 1) * length]
        for span in spans(len(of_plane)):
            packed[span].bitwise_or_(of_plane[span] << plane * bits)


def unpack(packed: torch.Tensor, bits: int, elems: int) -> torch.Tensor:
    """Codes uint8 (elems,). Raises `RemoteProtocolError` if a bit that is no code's is set."""
    if bits == 8:
        return packed
    length, mask = len(packed), (1 << bits) - 1
    codes = torch.empty(elems, dtype=torch.uint8)
    for plane in range(8 // bits):
        of_plane = codes[plane * length : (plane + 1) * length]
        for span in spans(len(of_plane)):
            torch.bitwise_and(packed[span] >> plane * bits, mask, out=of_plane[span])
        if bool((packed[len(of_plane) :] >> plane * bits & mask).any()):
            raise RemoteProtocolError("packed codes: bits are set after the last one")
    return codes
