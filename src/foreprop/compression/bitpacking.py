"""Codes of 1, 2 or 4 bits in bytes: eight, four or two of them in each, the first one lowest.

Codes of a byte lie in the bytes of one little-endian word, so all words are shifted together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foreprop.errors import RemoteProtocolError

Bytes = npt.NDArray[np.uint8]

_LOWEST = {2: 0x0303_0303, 4: 0x0F0F}
"""In a word, the bits of codes of so many bits, one in each byte."""


def packed_bytes(elems: int, bits: int) -> int:
    return -(-elems * bits // 8)


def pack(codes: Bytes, bits: int, packed: Bytes) -> None:
    """``codes`` (elems,), each below ``2**bits``; ``packed`` (packed_bytes,)."""
    if bits == 8:
        packed[:] = codes
        return
    if bits == 1:
        packed[:] = np.packbits(codes, bitorder="little")
        return
    per_byte = 8 // bits
    if missing := -len(codes) % per_byte:
        codes = np.append(codes, np.zeros(missing, np.uint8))
    words = codes.view(f"<u{per_byte}")
    mixed = words | words >> (8 - bits)
    for place in range(2, per_byte):
        mixed |= words >> place * (8 - bits)
    np.copyto(packed, mixed, casting="unsafe")  # the lowest byte


def unpack(packed: Bytes, bits: int, elems: int) -> Bytes:
    """Codes (elems,). Raises `RemoteProtocolError` if a bit that is no code's is set."""
    if bits == 8:
        return packed
    if bits == 1:
        codes = np.unpackbits(packed, bitorder="little")
    else:
        per_byte = 8 // bits
        words = packed.astype(f"<u{per_byte}")
        spread = words | words << (8 - bits)
        for place in range(2, per_byte):
            spread |= words << place * (8 - bits)
        spread &= _LOWEST[bits]
        codes = spread.view(np.uint8)
    if codes[elems:].any():
        raise RemoteProtocolError("packed codes: bits are set after the last one")
    return codes[:elems]
