"""A stream to a server that may be lost, and goes on to a substitute.

Until a server has answered, what was sent to it may be lost with it. So the frames that are to be
answered are kept, as they were sent: a header and a view of the gradient's own memory, which is not
written to before the answer is there (`path.servedgradient`). Nothing is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from foreprop.core.takeover import pushed_again
from foreprop.core.wire import Header, Kind, decode_header
from foreprop.errors import TransportError
from foreprop.link.stream import Stream

_ASKED_BY: dict[int, tuple[Kind, ...]] = {
    Kind.REPLY: (Kind.PUSH, Kind.VALUE),
    Kind.STATE_REPLY: (Kind.STATE_PULL,),
    Kind.BLOB_REPLY: (Kind.BLOB_PULL,),
}
_ANSWERED = frozenset(kind for kinds in _ASKED_BY.values() for kind in kinds)
_NUMBERS_KEPT = 4
"""As many announcements of the optimizer's numbers as servers look back."""
_LATER = frozenset({Kind.STATE, Kind.FAILURE})
"""Of frames that nobody answers, those that a substitute has to know of if they were not taken."""


class SentFrame(NamedTuple):
    header: bytes
    payload: memoryview


class ReplaceableStream:
    """A `Stream` to one server after another. One thread receives; any thread sends."""

    def __init__(self, stream: Stream) -> None:
        self.checksum = stream.checksum  # a substitute's connection has the same
        self._stream = stream
        self._lock = threading.RLock()
        self._lost = False
        self._unanswered: dict[tuple[int, int], SentFrame] = {}  # by kind and slice
        self._blobs: dict[int, SentFrame] = {}
        self._numbers: list[SentFrame] = []
        self._untaken: list[SentFrame] = []  # what was to be sent since the loss
        self._goodbye: list[SentFrame] = []  # none, or one that every server is to have
        self.closed = False
        """By this side, for good."""

    # As a stream.
    def send(self, header: bytes, payload: memoryview) -> None:
        """After a loss nothing is sent, and that is no error: `resume` does."""
        with self._lock:
            self._keep(decode_header(header), SentFrame(header, payload))
            if self._lost:
                return
            try:
                self._stream.send(header, payload)
            except TransportError:
                self._stream.close()  # so that the receiving thread learns of it, too
                self._lost = True

    def _keep(self, told: Header, frame: SentFrame) -> None:
        if told.kind == Kind.VALUE and told.step == 0:
            return  # the first values: a server that has not got them is missed by all
        if told.kind in _ANSWERED:
            self._unanswered[told.kind, told.slice] = frame
        elif told.kind == Kind.HYPERPARAMETERS:
            self._numbers.append(frame)
            del self._numbers[:-_NUMBERS_KEPT]
        elif told.kind == Kind.BLOB and not told.step:  # those of others are for newcomers
            self._blobs[told.slice] = frame
        elif told.kind == Kind.BYE:
            self._goodbye = [frame]
        elif self._lost and told.kind in _LATER:
            self._untaken.append(frame)

    def bound(self, window_bytes: int) -> None:
        self._stream.bound(window_bytes)

    def receive_into(self, view: memoryview) -> int:
        return self._stream.receive_into(view)

    def close(self) -> None:
        self.closed = True
        self._stream.close()

    # What is answered.
    def answered(self, kind: int, slice_: int) -> None:
        """Of a frame of this kind, about this slice."""
        for asked in _ASKED_BY[kind]:
            self._unanswered.pop((asked, slice_), None)

    def has_pushed(self, slice_: int) -> bool:
        """Whether a push of the slice is to be answered."""
        return (Kind.PUSH, slice_) in self._unanswered

    # A loss.
    def lose(self) -> None:
        """From now on nothing is sent. Wakes who is sending."""
        self._stream.close()
        with self._lock:
            self._lost = True

    def receive_from(self, stream: Stream) -> None:
        """The substitute's, to which others do not send yet; its receiver starts anew."""
        self._stream = stream
        if self.closed:  # meanwhile
            stream.close()

    def resume(self, first: Iterator[SentFrame], settled: Mapping[int, int]) -> int:
        """Send these frames first, then all that is lost; others follow.

        ``settled``: by slice the step that it goes on from. Returns how many pushes were sent
        again. Raises `TransportError`, and `RemoteProtocolError` for what cannot be followed.
        """
        with self._lock:
            kept = dict(self._unanswered)
            pushes = {
                slice_: decode_header(frame.header)
                for (kind, slice_), frame in kept.items()
                if kind == Kind.PUSH
            }
            steps = {slice_: header.step for slice_, header in pushes.items()}
            again = set(pushed_again(steps, settled))
            for frame in [*self._numbers, *self._blobs.values(), *first]:
                self._stream.send(*frame)
            urgent = sorted(again, key=lambda each: (steps[each], pushes[each].priority, each))
            for slice_ in urgent:
                for kind in (Kind.VALUE, Kind.PUSH):
                    if (kind, slice_) in kept:
                        self._stream.send(*kept[kind, slice_])
            for (asked, _), frame in kept.items():
                if asked not in (Kind.VALUE, Kind.PUSH):
                    self._stream.send(*frame)
            for frame in [*self._untaken, *self._goodbye]:
                self._stream.send(*frame)
            self._untaken.clear()
            self._lost = False
        return len(again)
