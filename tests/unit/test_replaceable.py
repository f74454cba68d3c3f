"""What was sent to a server that is lost goes to its substitute, once, and in order."""

from __future__ import annotations

import pytest

from foreprop.buddies.replaceable import ReplaceableStream, SentFrame
from foreprop.core.wire import Flag, Header, Kind, decode_header, encode_header
from foreprop.errors import RemoteProtocolError, TransportError


class Recorded:
    """A stream that keeps what is sent, or is broken."""

    def __init__(self) -> None:
        self.checksum = None
        self.sent: list[tuple[Header, bytes]] = []
        self.closed = self.broken = False

    def send(self, header: bytes, payload: memoryview) -> None:
        if self.broken:
            raise TransportError("broken")
        self.sent.append((decode_header(header), bytes(payload)))

    def bound(self, window_bytes: int) -> None: ...
    def receive_into(self, view: memoryview) -> int:
        return 0

    def close(self) -> None:
        self.closed = True

    def kinds(self) -> list[tuple[str, int, int]]:
        return [(Kind(each.kind).name, each.slice, each.step) for each, _ in self.sent]


def frame(kind: Kind, slice_: int, step: int, priority: int = 0, flags: int = 0) -> SentFrame:
    payload = memoryview(b"" if flags else f"{slice_} of {step}".encode())
    return SentFrame(encode_header(kind, flags, 0, step, slice_, priority, len(payload)), payload)


def lost(*frames: SentFrame) -> tuple[ReplaceableStream, Recorded]:
    """A stream that these have been sent over, and that then was lost; and the next one."""
    stream, following = ReplaceableStream(Recorded()), Recorded()
    for each in frames:
        stream.send(*each)
    stream.lose()
    stream.receive_from(following)
    return stream, following


def test_unanswered_pushes_of_the_next_step_are_sent_again_the_most_urgent_first() -> None:
    stream, following = lost(
        frame(Kind.PUSH, 0, 5, priority=9),
        frame(Kind.PUSH, 1, 5, priority=2),
        frame(Kind.PUSH, 2, 5, priority=1),
        frame(Kind.PUSH, 3, 4, priority=0),
    )
    stream.answered(Kind.REPLY, 2)
    brought = iter([frame(Kind.TAKEN_OVER, 0, 4)])
    assert stream.resume(brought, {0: 4, 1: 4, 2: 5, 3: 4}) == 2
    assert following.kinds() == [("TAKEN_OVER", 0, 4), ("PUSH", 1, 5), ("PUSH", 0, 5)]
    assert following.sent[-1][1] == b"0 of 5"


def test_what_is_sent_between_loss_and_resumption_is_not_lost_nor_sent_twice() -> None:
    stream, following = lost(frame(Kind.PUSH, 0, 5))
    stream.send(*frame(Kind.PUSH, 1, 5, flags=Flag.NO_GRADIENT))
    stream.send(*frame(Kind.BYE, 0, 0))
    assert following.sent == []
    assert stream.resume(iter(()), {0: 4, 1: 4}) == 2
    stream.send(*frame(Kind.PUSH, 2, 5))
    assert following.kinds() == [
        ("PUSH", 0, 5),
        ("PUSH", 1, 5),
        ("BYE", 0, 0),
        ("PUSH", 2, 5),
    ]


def test_numbers_and_questions_are_told_again() -> None:
    stream, following = lost(
        *(frame(Kind.HYPERPARAMETERS, 0, step) for step in range(1, 7)),
        frame(Kind.STATE_PULL, 3, 6),
        frame(Kind.VALUE, 0, 0),
        frame(Kind.VALUE, 0, 7),
        frame(Kind.PUSH, 0, 7),
        frame(Kind.PACE, 0, 7),
    )
    stream.resume(iter(()), {0: 6})
    assert following.kinds() == [
        *(("HYPERPARAMETERS", 0, step) for step in range(3, 7)),
        ("VALUE", 0, 7),
        ("PUSH", 0, 7),
        ("STATE_PULL", 3, 6),
    ]


def test_a_broken_stream_is_a_loss_and_no_error() -> None:
    broken = Recorded()
    stream = ReplaceableStream(broken)
    broken.broken = True
    stream.send(*frame(Kind.PUSH, 0, 1))
    assert broken.closed
    following = Recorded()
    stream.receive_from(following)
    assert stream.resume(iter(()), {0: 0}) == 1


def test_what_cannot_be_followed_is_refused() -> None:
    stream, _ = lost(frame(Kind.PUSH, 0, 5))
    with pytest.raises(RemoteProtocolError, match="goes on from step 2"):
        stream.resume(iter(()), {0: 2})
