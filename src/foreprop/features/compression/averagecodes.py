"""Codes of averages, where workers update: each is made once, and all decode the same bytes.

What an average's code leaves out the server keeps, as workers keep what their pushes leave out
(`compression.residuals`). So the sum of what has been answered is that of all averages, but for the
last residuals.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from foreprop.core.codec import Place
from foreprop.core.collect import NEVER
from foreprop.core.frames import SendFrame
from foreprop.core.manifest import ParameterInfo
from foreprop.core.wire import Flag, Header, Kind
from foreprop.engine.memory import bytes_of
from foreprop.engine.plane import Plane
from foreprop.features.compression.choosing import SliceCodec
from foreprop.features.compression.residuals import PlaneResiduals, Residuals, round_of


class _Average:
    """One slice's average in the latest round, and its code, if that is made before it is sent."""

    __slots__ = ("builds_on", "coded", "data", "lock", "push", "round")

    def __init__(self, coded: SliceCodec) -> None:
        self.coded = coded
        self.lock = threading.Lock()
        self.round = NEVER
        self.push = Header(Kind.PUSH, 0, 0, 0, 0, 0, 0)  # the first of the round
        self.builds_on = False
        self.data: memoryview | None = None


class AverageCodes:
    """The codes of averages of one server's slices, for threads that receive, send and average.

    ``scale_at`` gives the loss's scale in the step before, as workers have said by then. With a
    ``plane`` it encodes, and its residuals are there.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        slices: Mapping[int, SliceCodec],
        server: int,
        scale_at: Callable[[int], float],
        plane: Plane | None = None,
    ) -> None:
        kept = None if plane is None else PlaneResiduals(plane, server, slices)
        about = (parameters, slices)
        told = None if plane is None else scale_at
        self.residuals = Residuals(*about, rank=server, averages=True, kept=kept, told=told)
        self._server = server
        self._scale_at = scale_at
        self._averages: dict[int, _Average] = {}
        self.adopt(slices)

    def adopt(self, slices: Mapping[int, SliceCodec]) -> None:
        """Have these slices' averages encoded, too; their residuals begin empty."""
        self._averages |= {
            number: _Average(coded)
            for number, coded in slices.items()
            if coded.average_codec is not None
        }

    def note(self, push: Header) -> None:
        """Note a push, with a gradient or without; that of a new round ends the last one."""
        average = self._averages.get(push.slice)
        if average is None:
            return
        with average.lock:
            if average.round != round_of(push):
                if average.round != NEVER:
                    self._follow(average)
                average.round, average.push, average.builds_on = round_of(push), push, False
                average.data = None
            average.builds_on |= bool(push.flags & Flag.BUILDS_ON)

    def _follow(self, average: _Average) -> None:
        step = average.round[0]
        self.residuals.announce(step, self._scale_at(step))
        number, builds_on = average.push.slice, average.builds_on
        self.residuals.follow(number, average.round, builds_on=builds_on)

    def code(self, number: int, raw: memoryview) -> memoryview:
        """The code of the round's average, or ``raw`` if that is to go as it is."""
        average = self._averages.get(number)
        if average is None:
            return raw
        with average.lock:
            data, average.data = average.data, None
            return self._encode(average, raw) if data is None else data

    def _encode(self, average: _Average, raw: memoryview) -> memoryview:
        self._follow(average)
        _, flags, _, step, slice_, priority, _ = average.push
        frame = SendFrame(self._server, Kind.PUSH, step, slice_, priority, flags, 0)
        return self.residuals.encoded(frame, raw)

    def as_answered(self, number: int, values: torch.Tensor) -> torch.Tensor:
        """The round's average as workers will decode it: its norm is theirs."""
        average = self._averages.get(number)
        codec = None if average is None else average.coded.average_codec
        if average is None or codec is None or codec.exact:
            return values
        with average.lock:
            data = average.data = self._encode(average, bytes_of(values))
        if len(data) == average.coded.raw_bytes:
            return values
        shown = torch.empty_like(values)
        codec.decode(data, shown, Place(average.push.step, number, self._server))
        return shown
