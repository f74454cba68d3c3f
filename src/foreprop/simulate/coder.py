"""When a process has encoded what it sends, and decoded what it has received.

A slice is encoded when its turn has come, by the thread that sends to its peer, which sends nothing
meanwhile. A server encodes a reply once, for all workers. What comes from a peer is decoded by the
thread that receives from it, one frame after the other. Each thread has a core to itself.

Where a relay adds up a node's gradients, these come to it as they are. It encodes the sum, and
hands answers on in their code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from foreprop.core.codecfacts import Coded
from foreprop.core.frames import SendFrame
from foreprop.core.wire import Flag, Kind

if TYPE_CHECKING:
    from foreprop.simulate.served import Agreement


def of_workers(agreement: Agreement) -> Agreement:
    """What a relay's workers send and get: gradients as they are, and answers in their code."""
    coded = [
        each._replace(push_bytes=piece.elems * agreement.bytes_per_elem, encode_s=0.0)
        for each, piece in zip(agreement.coded or (), agreement.slices, strict=False)
    ]
    return replace(agreement, coded=coded or None)


def of_relays(agreement: Agreement) -> Agreement:
    """Nothing is decoded."""
    coded = [each._replace(decode_s=0.0) for each in agreement.coded or ()]
    return replace(agreement, coded=coded or None)


class Coder:
    """A process's. ``coded``: by slice; ``shared``: it encodes answers, for all peers at once.

    Otherwise it encodes pushes.
    """

    def __init__(self, coded: Sequence[Coded], *, shared: bool) -> None:
        self._coded = coded
        self._shared = shared
        self._encodes = Kind.REPLY if shared else Kind.PUSH
        self._encoded: dict[int, tuple[int, float]] = {}  # by slice: of which step, and when
        self._decoded_s: dict[int, float] = {}  # by peer: until when its thread is busy

    def encoded_s(self, frame: SendFrame, now_s: float) -> float:
        """When it can be sent, if its turn is now."""
        if frame.kind != self._encodes or not _has_payload(frame):
            return now_s
        ends_s = now_s + self._coded[frame.slice].encode_s
        if not self._shared:
            return ends_s
        step, encoded_s = self._encoded.get(frame.slice, (-1, 0.0))
        if step != frame.step:
            encoded_s = ends_s
            self._encoded[frame.slice] = frame.step, encoded_s
        return max(now_s, encoded_s)

    def decoded_s(self, peer: int, frame: SendFrame, at_s: float) -> float:
        """When the frame is there, if its bytes are at ``at_s``; all of a peer's wait in line."""
        ends_s = max(at_s, self._decoded_s.get(peer, 0.0))
        if _has_payload(frame):
            ends_s += self._coded[frame.slice].decode_s
        self._decoded_s[peer] = ends_s
        return ends_s


def _has_payload(frame: SendFrame) -> bool:
    is_empty = frame.flags & (Flag.NO_GRADIENT | Flag.UNCHANGED)
    return not is_empty and frame.kind in (Kind.PUSH, Kind.REPLY)
