"""How large slices suit links whose rate is known."""

from __future__ import annotations

import math

from foreprop.core.slicing import LEAST_SLICE_ELEMS, usual_slice_elems

_SLICE_S = 0.7e-3
"""That a slice of float32 takes on the link."""
_MOST_TIMES = 4
"""As large as the usual ones, on fast links."""
_LEAST_EACH = 16
"""Larger ones than usual for each server."""
_FLOAT_BITS = 32


def slice_elems_at(
    rate_bits_per_s: float, *, servers: int, elems: int, uneven: bool = False
) -> int:
    """What the slowest link carries in about 0.7 ms; with up to 8 servers 12,500 to 200,000.

    A slice costs its hosts as long on all links, so small ones cost fast links more than is won. On
    slow ones large slices leave links idle (docs/notebook/full-size.md). A model of few ``elems``
    has no larger slices than usual, if there were fewer than 16 for each of the ``servers``.
    ``uneven``: as for `usual_slice_elems`.
    """
    usual = usual_slice_elems(servers)
    most = min(usual * _MOST_TIMES, max(usual, elems // (servers * _LEAST_EACH)))
    wanted = rate_bits_per_s * _SLICE_S / _FLOAT_BITS / LEAST_SLICE_ELEMS
    suited = min(LEAST_SLICE_ELEMS << round(math.log2(max(wanted, 1.0))), most)
    return max(LEAST_SLICE_ELEMS, suited // 2 if uneven else suited)
