"""Exact compression: the bytes of floats in planes, each compressed if that shortens it.

Theory of operation. In a gradient mantissas are noise, but exponents are few and alike. So bytes of
one significance are laid side by side, as HDF5's shuffle filter and Blosc do, and each such plane
becomes a Zstandard frame of level 1 (RFC 8878), or is left as it is. Before that the upper 16 bits
are rotated by one: then one plane has the whole exponent of a float32 or bfloat16, and the sign is
with the mantissa's noise. In a difference of bits (exclusive or) of two close values the upper
planes are nearly all zero.

Layout: for each plane its encoding (1 byte) and length (4 bytes, little-endian), exponents first,
then the planes in that order. numpy and Zstandard release the interpreter's lock meanwhile.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from foreprop.core.codec import Place
from foreprop.errors import RemoteProtocolError

Bytes = npt.NDArray[np.uint8]

_RAW, _ZSTD = 0, 1
_PLANE = struct.Struct("<BI")
_FLOAT32_BYTES = 4
_LEVEL = 1
_PROBE_BYTES = 4096
_WORTH = 0.97
"""A plane is noise if a probe of it does not shrink below this share."""
_WORDS: dict[int, tuple[torch.dtype, type[np.unsignedinteger[Any]]]] = {  # by size in bytes
    2: (torch.int16, np.uint16),
    4: (torch.int32, np.uint32),
    8: (torch.int64, np.uint64),
}


class Lossless:
    """The exact codec: NaN payloads, signed zeros and denormals come back as they were, too."""

    name = "lossless"
    exact = True

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def most_bytes(self, elems: int) -> int:
        return _FLOAT32_BYTES * (elems + _PLANE.size)

    def new_state(self, elems: int) -> Mapping[str, torch.Tensor]:
        return {}

    def encode(
        self, values: torch.Tensor, state: Mapping[str, torch.Tensor], place: Place
    ) -> memoryview:
        """Encode floats of 2, 4 or 8 bytes: flat and contiguous. The result is the caller's own."""
        elems, itemsize = values.numel(), values.element_size()
        out = np.empty(itemsize * (elems + _PLANE.size), np.uint8)
        place_bytes = itemsize * _PLANE.size
        for number, plane in enumerate(_planes(values)):
            target = out[place_bytes : place_bytes + elems]
            target[...] = plane
            packed = self._shortened(target)
            if packed is None:
                how, length = _RAW, elems
            else:
                how, length = _ZSTD, len(packed)
                target[:length] = np.frombuffer(packed, np.uint8)
            _PLANE.pack_into(out.data, number * _PLANE.size, how, length)
            place_bytes += length
        return out[:place_bytes].data

    def decode(self, data: memoryview, out: torch.Tensor, place: Place) -> None:
        elems, itemsize = out.numel(), out.element_size()
        start = itemsize * _PLANE.size
        if len(data) < start:
            raise RemoteProtocolError(f"lossless: {len(data)} bytes; the planes' lengths take more")
        planes = []
        for number in range(itemsize):
            how, length = _PLANE.unpack_from(data, number * _PLANE.size)
            packed = data[start : start + length]
            start += length
            planes.append(self._plane(how, packed, length=length, elems=elems))
        if start != len(data):
            raise RemoteProtocolError(f"lossless: {len(data)} bytes where planes take {start}")
        _join(planes, out)

    # One plane.
    def _shortened(self, plane: Bytes) -> bytes | None:
        """The plane as a frame; None if that is no shorter."""
        compressor = getattr(self._of_thread, "compressor", None)  # for one thread at a time
        if compressor is None:
            compressor = self._of_thread.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        compress = compressor.compress
        if len(plane) > 2 * _PROBE_BYTES:
            middle = len(plane) // 2
            probe = plane[middle : middle + _PROBE_BYTES]
            if len(compress(probe.data)) > _WORTH * _PROBE_BYTES:
                return None
        packed: bytes = compress(plane.data)
        return packed if len(packed) < len(plane) else None

    def _plane(self, how: int, packed: memoryview, *, length: int, elems: int) -> Bytes:
        fits = length == elems if how == _RAW else how == _ZSTD and length < elems
        if not fits or len(packed) != length:
            raise RemoteProtocolError(
                f"lossless: a plane of {elems} elements has encoding {how}, {length} bytes"
            )
        if how == _RAW:
            return np.frombuffer(packed, np.uint8)
        try:
            # before anything is decompressed: it might take any amount of memory
            if zstandard.frame_content_size(packed) != elems:
                raise RemoteProtocolError(f"lossless: a plane has not {elems} elements")
            decompressor = getattr(self._of_thread, "decompressor", None)
            if decompressor is None:
                decompressor = self._of_thread.decompressor = zstandard.ZstdDecompressor()
            plain = decompressor.decompress(packed, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise RemoteProtocolError(f"lossless: a plane is no Zstandard frame: {error}") from None
        if len(plain) != elems:
            raise RemoteProtocolError(f"lossless: a plane has {len(plain)} elements, not {elems}")
        return np.frombuffer(plain, np.uint8)


def _planes(values: torch.Tensor) -> Iterator[Bytes]:
    """An array's planes, those of the most significant bytes first."""
    words, bits = _words(values)
    upper = (words >> (bits - 16)).astype(np.uint16)
    rotated = (upper << 1) | (upper >> 15)
    yield (rotated >> 8).astype(np.uint8)
    yield rotated.astype(np.uint8)
    for shift in range(bits - 24, -1, -8):
        yield (words >> shift).astype(np.uint8)


def _join(planes: Sequence[Bytes], out: torch.Tensor) -> None:
    words, bits = _words(out)
    rotated = planes[0].astype(np.uint16) << 8
    rotated |= planes[1]
    upper = (rotated >> 1) | (rotated << 15)
    np.left_shift(upper, bits - 16, out=words, dtype=words.dtype)
    for plane, shift in zip(planes[2:], range(bits - 24, -1, -8), strict=True):
        words |= plane.astype(words.dtype) << shift if shift else plane


def _words(tensor: torch.Tensor) -> tuple[npt.NDArray[Any], int]:
    """The elements as whole numbers in the same memory, and how many bits each has."""
    signed, unsigned = _WORDS[tensor.element_size()]
    return tensor.view(signed).numpy().view(unsigned), 8 * tensor.element_size()
