"""The memory in which gradients are summed, with what is counted beside them."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from foreprop.cluster.rendezvous import Board
from foreprop.collectives.gpu import DeviceWork
from foreprop.collectives.group import Group
from foreprop.core.agreement import describe_groups
from foreprop.core.manifest import (
    ITEMSIZE_BYTES,
    ParameterInfo,
    Reduction,
    WireDtype,
    wire_dtype_of,
)
from foreprop.core.order import Chunk, Piece, cut_chunks
from foreprop.core.wire import Flag
from foreprop.errors import StepTimeout, TrainingLoopError
from foreprop.numerics.finite import check_finite
from foreprop.path.samebatch import SameBatch
from foreprop.path.sums import add_up, finish_sum
from foreprop.path.tensors import DTYPES
from foreprop.servers.setup import Setup

_DIGEST_BITS = 18
_OTHERS_S = 5.0
_KEPT = 3
"""In one step settings may be told of it and of the next, while sums of the one before are made."""
MARKS = 2 + _DIGEST_BITS
"""Elements behind a parameter's: how many ranks had a gradient, how many had changed it by hand,
and for each bit of the settings' digest, how many ranks have it. None exceeds the number of ranks.
"""
MOST_RANKS = {torch.bfloat16: 2**8, torch.float16: 2**11}
"""By type: up to these counts are exact, in whatever order they are added up."""


class _Settings(NamedTuple):
    since: int
    text: str
    """JSON."""
    digest: int
    scale: float
    """Of the loss."""


class StepSettings:
    """The optimizer's settings by step: every rank's are compared while gradients are summed.

    One rank's, of the last steps at which they changed. Any thread.
    """

    def __init__(self, board: Board, *, ranks: int) -> None:
        self._board = board
        self._ranks = ranks
        self._kept = [_Settings(0, "", 0, 1.0)]

    def announce(self, step: int, text: str, scale: float = 1.0) -> None:
        """From ``step`` on the optimizer has these settings."""
        before = [settings for settings in self._kept if settings.since != step]
        now = _Settings(step, text, zlib.crc32(text.encode()), scale)
        self._kept = [*before[1 - _KEPT :], now]

    def _at(self, step: int) -> _Settings:
        return next(settings for settings in reversed(self._kept) if settings.since <= step)

    def scale_at(self, step: int) -> float:
        return self._at(step).scale

    def digest_at(self, step: int, alike: int) -> list[int]:
        """Bits that can be summed: of equal ones each gives nothing or the number of ranks.

        ``alike``: what else must be the same on every rank.
        """
        digest = self._at(step).digest ^ (zlib.crc32(str(alike).encode()) if alike else 0)
        return [digest >> bit & 1 for bit in range(_DIGEST_BITS)]

    def how_they_differ(self, step: int) -> TrainingLoopError:
        """Every rank comes to this, and publishes what it has."""
        self._board.publish(f"settings/{self._board.rank}", self._at(step).text)
        found: list[Any] = []
        # but not of what another rank publishes meanwhile, nor of what is no JSON
        with contextlib.suppress(StepTimeout, ValueError):
            for rank in range(self._ranks):
                text = self._board.lookup(f"settings/{rank}", "its settings", timeout_s=_OTHERS_S)
                found.append(json.loads(text or "[{}]"))  # or it has announced nothing
        for rank, groups in enumerate(found):
            if groups != found[0]:
                return TrainingLoopError(describe_groups(step, (0, rank), found[0], groups))
        return TrainingLoopError(
            f"step {step}: the ranks use their gradients differently: the optimizer's settings"
            " differ, or some have run other backward passes, or read or edited gradients, and"
            " others have not"
        )


class GradientSums:
    """One rank's. A parameter's sum is touched by one thread at a time."""

    def __init__(
        self, setup: Setup, settings: StepSettings, group: Group, device: DeviceWork
    ) -> None:
        config, parameters = setup.config, setup.infos
        self.flags = [0] * len(parameters)
        """With which each gradient was pushed."""
        self._parameters = parameters
        self._memory = setup.memory
        self._settings = settings
        self._aggregation = setup.aggregation
        self.device = device
        self._rank = group.rank
        self._ranks = group.size
        self._dtypes = [_sum_dtype(info.dtype, config.wire_dtype) for info in parameters]
        sizes = [info.elems for info in parameters]
        self.chunks = cut_chunks(sizes, config.chunk_elems, kinds=self._dtypes)
        self._sums: dict[int, torch.Tensor] = {}
        """With the marks behind them; those of a family lie one behind the other."""
        self._families = _families(self.chunks)
        # not on a device, which would have to wait for the answer
        looks = group.rank == 0 and group.size > 1 and device.device.type == "cpu"
        self._same_batch = SameBatch("rank 0") if looks else None
        of_many = (number for number, elems in enumerate(sizes) if elems > 1)
        self._compared = next(of_many, None)
        """The parameter whose gradients tell whether all ranks have the same batch."""
        self._own = torch.empty(0)

    def size_bytes(self, piece: Piece) -> int:
        return (piece[2] - piece[1]) * self._dtypes[piece[0]].itemsize

    def chunk_sizes_bytes(self) -> list[int]:
        dtypes = [self._dtypes[chunk.pieces[0].parameter] for chunk in self.chunks]
        return [
            chunk.elems * dtype.itemsize for chunk, dtype in zip(self.chunks, dtypes, strict=True)
        ]

    # Before the sum.
    def fill(self, chunk: int, step: int) -> torch.Tensor:
        """This rank's part of a sum, to be replaced by it."""
        pieces = self.chunks[chunk].pieces
        for piece in pieces:
            self._fill(piece, step)
        (first, start, _), (last, _, stop) = pieces[0], pieces[-1]
        begin, total = self._sum_of(first), self._sum_of(last)
        begin_elems = begin.storage_offset() + start
        if stop == self._parameters[last].elems:
            stop += MARKS
        elems = total.storage_offset() + stop - begin_elems
        return begin.as_strided((elems,), (1,), begin_elems)

    def _sum_of(self, parameter: int) -> torch.Tensor:
        """Made when it is first needed."""
        if parameter not in self._sums:
            self._make_sums(self._families[parameter])
        return self._sums[parameter]

    def _make_sums(self, family: Sequence[int]) -> None:
        ends = list(accumulate(self._parameters[p].elems + MARKS for p in family))
        dtype = self._dtypes[family[0]]
        memory = torch.empty(ends[-1], dtype=dtype, device=self.device.device)
        for parameter, run in zip(family, pairwise([0, *ends]), strict=True):
            self._sums[parameter] = memory[slice(*run)]

    def _fill(self, piece: Piece, step: int) -> None:
        parameter, start, stop = piece
        total = self._sum_of(parameter)
        info = self._parameters[parameter]
        flags = self.flags[parameter]
        if flags & Flag.NO_GRADIENT:
            total[start:stop] = 0
        else:
            itemsize = ITEMSIZE_BYTES[info.dtype]
            part = self._memory[parameter].take_gradient(start * itemsize, stop * itemsize)
            total[start:stop] = self.device.flat(part, DTYPES[info.dtype])
            if self._aggregation.reports_nonfinite:
                check_finite(total[start:stop], f"rank {self._rank}", info.name, step)
        if self._same_batch is not None and parameter == self._compared:
            self._keep_own(total, start, stop)
        if stop == info.elems:
            marks = (
                not flags & Flag.NO_GRADIENT,
                bool(flags & Flag.VALUE_CHANGED),
                *self._digest(parameter, step),
            )
            total[stop:] = torch.tensor(marks, dtype=total.dtype, device=total.device)

    def _digest(self, parameter: int, step: int) -> list[int]:
        """What must be alike on every rank: the settings, who updates, and which round it is."""
        alike = self.flags[parameter] & ~(Flag.NO_GRADIENT | Flag.VALUE_CHANGED)
        return self._settings.digest_at(step, alike)

    # After the sum.
    def maybe_aggregate(self, parameter: int, step: int) -> torch.Tensor | None:
        """The aggregated gradient, flat, if any rank had one; raises if the ranks do not agree."""
        info = self._parameters[parameter]
        total = self._sum_of(parameter)
        with_gradient, changed, *digests = (round(mark) for mark in total[info.elems :].tolist())
        if 0 < changed < self._ranks:
            raise TrainingLoopError(
                f"{info.name} was changed by hand before step {step} on {changed} of"
                f" {self._ranks} ranks; with architecture='ring' change it on every rank alike"
            )
        if digests != [self._ranks * bit for bit in self._digest(parameter, step)]:
            raise self._settings.how_they_differ(step)
        if not with_gradient:
            return None
        total = total[: info.elems]
        if self._same_batch is not None and parameter == self._compared:
            self._compare(self._same_batch, total)
        # what follows is as if it had not been cast
        gradient = total.to(torch.promote_types(total.dtype, torch.float32))
        scale = self._settings.scale_at(step)
        finish_sum(gradient, self._reduction(info), workers=self._ranks, scale=scale)
        return gradient

    def _keep_own(self, total: torch.Tensor, start: int, stop: int) -> None:
        if len(self._own) != len(total):
            self._own = torch.zeros_like(total)
        self._own[start:stop] = total[start:stop]

    def _compare(self, same_batch: SameBatch, total: torch.Tensor) -> None:
        """Of equal gradients the sum is what this rank's own gives, added up for each of them."""
        own = self._own[: len(total)]
        same = add_up([own.clone(), *[own] * (self._ranks - 1)], total.dtype)
        same_batch.look(0, [same, total], many=self._ranks)
        if not same_batch.watching:
            self._same_batch, self._own = None, torch.empty(0)

    def aggregated(self, parameter: int) -> torch.Tensor:
        """The aggregated gradient of the parameter's last update, flat. Training thread."""
        info = self._parameters[parameter]
        total = self._sum_of(parameter)[: info.elems]
        if total.dtype == torch.float32 or total.dtype == torch.float64:
            return total  # finished in place
        total = total.float()
        finish_sum(total, self._reduction(info), workers=self._ranks)
        return total

    def _reduction(self, info: ParameterInfo) -> Reduction:
        return self._aggregation.reduction_of(sparse=info.sparse)


def _sum_dtype(dtype: str, wire_dtype: WireDtype | None) -> torch.dtype:
    """What a parameter's gradients are summed in, which is also what they travel in.

    Of half-precision parameters float32: summing in half precision would lose small gradients. With
    a wire type that is what is asked for.
    """
    on_wire = DTYPES[wire_dtype_of(dtype, wire_dtype)]
    return on_wire if dtype == "float32" else torch.promote_types(on_wire, torch.float32)


def _families(chunks: Sequence[Chunk]) -> dict[int, list[int]]:
    """By parameter: those that are connected to it by chunks that they share, in order."""
    families: dict[int, list[int]] = {}
    for chunk in chunks:
        family = families.setdefault(chunk.parameters[0], [chunk.parameters[0]])
        for parameter in chunk.parameters[1:]:
            family.append(parameter)
            families[parameter] = family
    return families
