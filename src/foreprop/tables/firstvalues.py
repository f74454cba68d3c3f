"""The first values of a remote table's rows: made from their numbers, not drawn one after another.

A counter goes through SplitMix64's mixing function (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014), and Box and Muller's transformation makes normal numbers of
the bits. Each number depends on its place alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from foreprop.core.manifest import RowInit

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_HALF = np.uint64(32)
_LOW = np.uint64(2**32 - 1)
_SCALE = 2.0**-32
_AT_ONCE_ELEMS = 65_536
"""Few enough for the cache; the numbers in between take eight times as much."""


def make_rows(
    init: RowInit, numbers: torch.Tensor, row_elems: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows ``numbers`` (int64, of the whole table) as they begin: (len(numbers), row_elems)."""
    made = torch.empty(len(numbers), row_elems, dtype=dtype)
    at_once = max(1, _AT_ONCE_ELEMS // max(1, row_elems))
    for start in range(0, len(numbers), at_once):
        some = numbers[start : start + at_once]
        values = torch.from_numpy(_values(init, some.numpy(), row_elems))
        made[start : start + at_once] = values
    if init.padding_row is not None:
        made[numbers == init.padding_row] = 0
    return made


def _values(init: RowInit, numbers: Any, row_elems: int) -> Any:
    if init.distribution == "constant":
        return np.full((len(numbers), row_elems), init.first)
    bits = _bits(init.key, numbers, row_elems)
    high, low = (bits >> _HALF) + 0.5, (bits & _LOW).astype(np.float64)
    if init.distribution == "uniform":
        return init.first + (init.second - init.first) * (high * _SCALE)
    normal = np.sqrt(-2 * np.log(high * _SCALE)) * np.cos(2 * np.pi * (low * _SCALE))
    return init.first + init.second * normal


def _bits(key: int, numbers: Any, row_elems: int) -> Any:
    """64 of them for each element."""
    places = numbers.astype(np.uint64)[:, None] * np.uint64(row_elems)
    mixed = (places + np.arange(row_elems, dtype=np.uint64)) * _GOLDEN + np.uint64(key)
    for shift, factor in zip(_SHIFTS, _MIX, strict=False):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed ^ (mixed >> _SHIFTS[-1])
