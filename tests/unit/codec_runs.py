"""What the tests of codecs share: gradients, and one trip from a worker to a server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from foreprop.core.codec import Place

PLACE = Place(step=3, slice=5, rank=1)
SIZES = (1, 2, 7, 127, 128, 129, 513, 30_719, 30_720, 30_721, 50_003)
"""One element, beside blocks, and beside the parts that kernels work in."""


def noise(elems: int, seed: int = 0, scale: float = 1e-3) -> torch.Tensor:
    """As a gradient is: float32 (elems,), about normal."""
    return torch.randn(elems, generator=torch.Generator().manual_seed(seed)) * scale


def there_and_back(
    codec: Any,
    values: torch.Tensor,
    state: Mapping[str, torch.Tensor] | None = None,
    place: Place = PLACE,
) -> torch.Tensor:
    """What the receiver has; bytes that it was not given to fill would be NaN."""
    data = codec.encode(values, {} if state is None else state, place)
    assert len(data) <= codec.most_bytes(len(values))
    out = torch.full_like(values, math.nan)
    codec.decode(memoryview(bytes(data)), out, place)
    return out


def copied(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: array.clone() for name, array in state.items()}


def are_equal(state: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return state.keys() == other.keys() and all(
        torch.equal(array, other[name]) for name, array in state.items()
    )
