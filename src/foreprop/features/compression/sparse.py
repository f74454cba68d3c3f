"""Codecs that send a share of the elements: the largest (top-k), or random ones (random-k).

Stich et al., Sparsified SGD with Memory (2018): definition 2.2 and algorithm 1, whose memory is
error feedback. Both leave at most (1 - k / n) of the squared norm, random-k on average.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from foreprop.core.codec import Place
from foreprop.engine.memory import bytes_of
from foreprop.errors import RemoteProtocolError
from foreprop.features.compression.kernels import (
    AT_ONCE_ELEMS,
    ErrorFeedback,
    Stateless,
    all_finite,
    array_of,
    check_size,
    copy_parts,
    generator_of,
    spans,
)

_ROUNDING = 1e-9  # 0.07 * 100 is a little above 7, and would be rounded up to 8 elements
_MOST_ROWS = 64


@dataclass(frozen=True, slots=True)
class SentShare:
    """The share of a slice's elements that are sent, so many ``times``.

    In the stages of DGC's warm-up (section 3.3), of ``warmup_steps`` each, it is at least 25 %,
    6.25 %, 1.5625 % and so on.
    """

    share: float
    warmup_steps: int = 0
    times: int = 1

    def count(self, elems: int, step: int) -> int:
        share = self.share
        if self.warmup_steps:
            share = max(share, 0.25 ** (step // self.warmup_steps + 1))
        return min(elems, self.times * max(1, math.ceil(share * elems - _ROUNDING)))

    def pairs(self, elems: int, step: int) -> int:
        """The count if indices go with values: from half of the elements on, all are sent."""
        count = self.count(elems, step)
        return elems if 2 * count >= elems else count


def parse_share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise ValueError(text)
    return share


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the elements with the largest magnitudes, rising; int64 (count,). NaN is largest.

    Each of the largest elements lies in one of the ``count`` columns with the largest maxima, so
    only those are searched: one pass over the values, and few to sort.
    """
    if count == len(values):
        return torch.arange(count)
    magnitudes = torch.empty_like(values)
    for span in spans(len(values)):
        torch.abs(values[span], out=magnitudes[span])
    rows = min(_MOST_ROWS, math.isqrt(len(values) // max(1, count)))
    if rows < 3:
        return magnitudes.topk(count, sorted=False).indices.sort().values
    columns = len(values) // rows
    grid = magnitudes[: rows * columns].view(rows, columns)
    maxima = torch.cat([grid[:, part].amax(0) for part in spans(columns, AT_ONCE_ELEMS // rows)])
    chosen = maxima.topk(count, sorted=False).indices
    starts = torch.arange(0, rows * columns, columns)
    candidates = torch.cat(
        [(starts[:, None] + chosen).flatten(), torch.arange(rows * columns, len(values))]
    )
    found = magnitudes.index_select(0, candidates).topk(count, sorted=False).indices
    return candidates.index_select(0, found).sort().values


def sparse_bytes(elems: int, count: int) -> int:
    return 4 * elems if count == elems else 8 * count  # if all are sent, there are no indices


def encode_sparse(values: torch.Tensor, indices: torch.Tensor) -> memoryview:
    """int32 indices, rising, then the float32 values at them, both (count,)."""
    if len(indices) == len(values):
        whole = torch.empty_like(values)
        copy_parts(whole, values)
        return bytes_of(whole)
    data = torch.empty((2, len(indices)), dtype=torch.float32)
    data[0].view(torch.int32).copy_(indices)
    data[1].copy_(values.index_select(0, indices))
    return bytes_of(data)


def decode_sparse(name: str, data: memoryview, out: torch.Tensor, count: int) -> None:
    """Fill ``out``; raises `RemoteProtocolError` if the indices do not rise, or are not in it."""
    check_size(name, data, len(out), sparse_bytes(len(out), count))
    if count == len(out):
        copy_parts(out, array_of(data, torch.float32, 0, count))
        return
    indices = array_of(data, torch.int32, 0, count).to(torch.int64)
    if int(indices[0]) < 0 or int(indices[-1]) >= len(out):
        raise RemoteProtocolError(f"{name}: an index is not one of {len(out)} elements")
    if not bool((indices[1:] > indices[:-1]).all()):
        raise RemoteProtocolError(f"{name}: the indices do not rise")
    place_sparse(out, indices, array_of(data, torch.float32, 4 * count, count))


def place_sparse(out: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    for span in spans(len(out)):
        out[span].zero_()
    out.index_copy_(0, indices, values)


@dataclass(slots=True)
class TopK(Stateless):
    """Sends the elements with the largest magnitudes and their indices; the others are zero."""

    name: str
    share: SentShare

    def most_bytes(self, elems: int) -> int:
        return sparse_bytes(elems, self.share.pairs(elems, 0))

    def encode(
        self, values: torch.Tensor, state: Mapping[str, torch.Tensor], place: Place
    ) -> memoryview:
        return encode_sparse(values, largest(values, self.share.pairs(len(values), place.step)))

    def decode(self, data: memoryview, out: torch.Tensor, place: Place) -> None:
        decode_sparse(self.name, data, out, self.share.pairs(len(out), place.step))


@dataclass(slots=True)
class RandomK(Stateless):
    """Sends elements that step and slice determine, the same on all ranks, without indices.

    If an element is not finite, all that is sent is NaN: the chosen ones need not show it.
    """

    name: str
    share: SentShare

    def most_bytes(self, elems: int) -> int:
        return 4 * self.share.count(elems, 0)

    def indices(self, elems: int, place: Place) -> torch.Tensor:
        """The chosen indices, rising, int64 (count,); all subsets of that size are as likely."""
        count = self.share.count(elems, place.step)
        generator = generator_of(place, of_rank=False)
        if 16 * count > elems:
            keys = torch.rand(elems, generator=generator)
            return keys.topk(count, sorted=False).indices.sort().values
        draws, found = 2 * count + 16, torch.empty(0, dtype=torch.int64)
        while len(found) < count:
            drawn = torch.randint(elems, (draws,), generator=generator)
            found = torch.unique(torch.cat([found, drawn]))
        kept = torch.randperm(len(found), generator=generator)[:count]
        return found.index_select(0, kept.sort().values)

    def encode(
        self, values: torch.Tensor, state: Mapping[str, torch.Tensor], place: Place
    ) -> memoryview:
        chosen = values.index_select(0, self.indices(len(values), place))
        return bytes_of(chosen if all_finite(values) else chosen.fill_(torch.nan))

    def decode(self, data: memoryview, out: torch.Tensor, place: Place) -> None:
        count = self.share.count(len(out), place.step)
        check_size(self.name, data, len(out), 4 * count)
        values = array_of(data, torch.float32, 0, count)
        place_sparse(out, self.indices(len(out), place), values)


def top_k(share: str = "0.01") -> ErrorFeedback:
    return ErrorFeedback(TopK(f"topk:{share}", SentShare(parse_share(share))))


def random_k(share: str = "0.01") -> ErrorFeedback:
    return ErrorFeedback(RandomK(f"randomk:{share}", SentShare(parse_share(share))))
