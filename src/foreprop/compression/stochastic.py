"""Codecs that are right on average, and so keep no error: QSGD and TernGrad.

What they draw depends on step, slice and rank, and on nothing else.
"""

from __future__ import annotations

import numpy as np
import torch

from foreprop.compression.blockwise import BlockQuantiser, Floats, largest_of
from foreprop.compression.payloads import AT_ONCE_ELEMS

QSGD_BLOCK_ELEMS = 512
"""The bucket of the paper's experiments with few bits."""
CLIP_SIGMAS = 2.5


def qsgd(levels: str = "127") -> BlockQuantiser:
    """Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding.

    Section 3.1, in buckets as in section 4: norm2 * sgn(x) * l / s, where l is s * |x| / norm2
    rounded stochastically. The variance is at most min(d / s^2, sqrt(d) / s) * norm2^2, with
    d = 512. ``levels`` is s: up to 127 in 8 bits, up to 7 in 4 bits, 1 in 2 bits.
    Raises ValueError.
    """
    count = int(levels)
    if not 1 <= count <= 127:
        raise ValueError(levels)
    return BlockQuantiser(f"qsgd:{count}", count, QSGD_BLOCK_ELEMS, _norm2, stochastic=True)


def terngrad() -> BlockQuantiser:
    """Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning.

    Section 3: s * sgn(x) * b with s = max|x| and b = 1 with probability |x| / s, after clipping at
    2.5 sigma (section 3.3). Sigma is that about zero, the mean of the paper's Gaussian: about its
    own mean a constant gradient would be clipped to nothing. A scaler for 30,720 elements or the
    slice.
    """
    return BlockQuantiser("terngrad", 1, AT_ONCE_ELEMS, _clipped, stochastic=True)


def _norm2(rows: Floats) -> Floats:
    """In float64, where squares of float32 neither overflow nor vanish."""
    wide = torch.linalg.vector_norm(torch.from_numpy(rows), dim=1, dtype=torch.float64)
    found: Floats = wide.to(torch.float32).numpy()
    return found


def _clipped(rows: Floats) -> Floats:
    sigmas = np.float32(CLIP_SIGMAS / rows.shape[1] ** 0.5)
    clipped: Floats = np.minimum(largest_of(rows), sigmas * _norm2(rows))
    return clipped
