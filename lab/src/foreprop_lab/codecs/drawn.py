"""Codecs that are right on average, and so keep no error: QSGD and TernGrad.

A block of float32 is sent as one scale, and for each element a whole number q of scales, drawn of
the two beside it. On the wire: float32 scales, one per block, then the codes q + L in 2, 4 or 8
bits each, the first one lowest.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

import foreprop

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]

_AT_ONCE_ELEMS = 30_720
"""torch divides longer work among threads, of which every thread here would get a team."""
_QSGD_BLOCK_ELEMS = 512
"""The bucket of the paper's experiments with few bits."""
_CLIP_SIGMAS = 2.5
_LEAST_SCALE = 2.0**-100
"""Blocks of smaller scales are sent as zeros: dividing by them would lose bits, or overflow."""
_LARGEST = np.float32(3.4e38)
"""Somewhat below the largest float32: a scale times L must not round to infinity."""


class _Drawn:
    """Whole numbers from ``-levels`` to ``levels`` of a scale. The last block may be shorter."""

    draws = True
    keeps_error = False

    def __init__(self, levels: int, block_elems: int) -> None:
        self._levels = levels
        self._block_elems = block_elems
        self._bits = 2 if levels == 1 else 4 if levels <= 7 else 8

    def limits_of(self, rows: Floats) -> Floats:
        """The value above which each row is clipped, L scales: (rows, elems) to (rows,)."""
        raise NotImplementedError

    def most_bytes(self, elems: int) -> int:
        return 4 * self._blocks(elems) + -(-elems * self._bits // 8)

    def encode(self, values: torch.Tensor, generator: torch.Generator) -> bytes:
        elems, levels = len(values), np.float32(self._levels)
        scales, codes = np.empty(self._blocks(elems), np.float32), np.empty(elems, np.uint8)
        with np.errstate(all="ignore"):
            for span, blocks in self._parts(elems):
                rows = values.numpy()[span].reshape(blocks.stop - blocks.start, -1)
                scales[blocks] = own = self._scales_of(self.limits_of(rows))
                q = rows / np.where(own > 0, own, np.float32(np.inf))[:, None]  # of a NaN: zeros
                q += levels
                q += torch.rand(q.shape, generator=generator).numpy()  # whole part: x on average
                np.maximum(q, np.float32(0), out=q)
                np.minimum(q, 2 * levels, out=q)
                np.copyto(codes[span], q.reshape(-1), casting="unsafe")
        return scales.tobytes() + self._packed(codes)

    def decode(self, data: memoryview, out: torch.Tensor) -> None:
        elems, levels = len(out), np.float32(self._levels)
        if len(data) != self.most_bytes(elems):
            raise ValueError(f"there must be {self.most_bytes(elems)}")
        scales = np.frombuffer(data, np.float32, self._blocks(elems))
        codes = self._unpacked(np.frombuffer(data, np.uint8, offset=scales.nbytes))
        with np.errstate(all="ignore"):
            if ((scales < 0) | (scales > _LARGEST / levels)).any():
                raise ValueError("a scale is negative or infinite")
            if codes[elems:].any() or codes.max(initial=0) > 2 * self._levels:
                raise ValueError("a code is none")
            for span, blocks in self._parts(elems):
                rows = out.numpy()[span].reshape(blocks.stop - blocks.start, -1)  # its memory
                np.subtract(codes[span].reshape(rows.shape), levels, out=rows)
                rows *= scales[blocks, None]

    def _blocks(self, elems: int) -> int:
        return -(-elems // self._block_elems)

    def _parts(self, elems: int) -> Iterator[tuple[slice, slice]]:
        """Elements and their blocks, of equal length in each pair."""
        whole = elems // self._block_elems * self._block_elems
        for start in range(0, whole, _AT_ONCE_ELEMS):
            stop = min(start + _AT_ONCE_ELEMS, whole)
            yield slice(start, stop), slice(start // self._block_elems, stop // self._block_elems)
        if whole < elems:
            last = self._blocks(elems)
            yield slice(whole, elems), slice(last - 1, last)

    def _scales_of(self, limits: Floats) -> Floats:
        """The blocks' scales; NaN for a block whose limit is not finite."""
        levels = np.float32(self._levels)
        scales: Floats = np.minimum(limits / levels, _LARGEST / levels)
        scales[scales < _LEAST_SCALE] = 0.0
        scales[~np.isfinite(limits)] = np.nan
        return scales

    def _packed(self, codes: Codes) -> bytes:
        per_byte = 8 // self._bits
        if per_byte == 1:
            return codes.tobytes()
        whole = np.zeros((-(-len(codes) // per_byte), per_byte), np.uint8)
        whole.reshape(-1)[: len(codes)] = codes
        packed = whole[:, 0].copy()
        for place in range(1, per_byte):
            packed |= whole[:, place] << (self._bits * place)
        return packed.tobytes()

    def _unpacked(self, packed: Codes) -> Codes:
        """The codes, and what fills the last byte."""
        if self._bits == 8:
            return packed
        shifts = np.arange(0, 8, self._bits, dtype=np.uint8)
        of_bytes = np.arange(256, dtype=np.uint8)[:, None] >> shifts & np.uint8(2**self._bits - 1)
        codes: Codes = np.take(of_bytes, packed, axis=0)
        return codes.reshape(-1)


@foreprop.register_codec
class Qsgd(_Drawn):
    """Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding.

    Section 3.1, in buckets as in section 4: norm2 * sgn(x) * l / s, where l is s * |x| / norm2
    rounded stochastically. The variance is at most min(d / s^2, sqrt(d) / s) * norm2^2, with
    d = 512. ``levels`` is s: up to 127 in 8 bits, up to 7 in 4 bits, 1 in 2 bits.
    """

    name = "qsgd"
    s_per_gb = (1.23, 0.18)

    def __init__(self, levels: str = "127") -> None:
        if not levels.isdecimal() or not 1 <= int(levels) <= 127:
            raise ValueError("it takes levels from 1 to 127, as in qsgd:7")
        super().__init__(int(levels), _QSGD_BLOCK_ELEMS)
        self.answer = "int4" if int(levels) <= 7 else "int8"

    def limits_of(self, rows: Floats) -> Floats:
        return _norm2(rows)


@foreprop.register_codec
class TernGrad(_Drawn):
    """Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning.

    Section 3: s * sgn(x) * b with s = max|x| and b = 1 with probability |x| / s, after clipping at
    2.5 sigma (section 3.3). Sigma is that about zero, the mean of the paper's Gaussian: about its
    own mean a constant gradient would be clipped to nothing. A scaler for 30,720 elements or the
    slice.
    """

    name = "terngrad"
    answer = "int2"
    s_per_gb = (1.29, 0.20)

    def __init__(self) -> None:
        super().__init__(1, _AT_ONCE_ELEMS)

    def limits_of(self, rows: Floats) -> Floats:
        sigmas = np.float32(_CLIP_SIGMAS / rows.shape[1] ** 0.5)
        clipped: Floats = np.minimum(np.abs(rows).max(axis=1), sigmas * _norm2(rows))
        return clipped


def _norm2(rows: Floats) -> Floats:
    """Norms, added up in float64: there squares of float32 neither overflow nor vanish."""
    wide = torch.linalg.vector_norm(torch.from_numpy(rows), dim=1, dtype=torch.float64)
    found: Floats = wide.to(torch.float32).numpy()
    return found
