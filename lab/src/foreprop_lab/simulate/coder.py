"""When a process has encoded what it sends, and decoded what it has received.

A slice is encoded when its turn has come, by the thread that sends to its peer, which sends nothing
meanwhile. A server encodes a reply once, for all workers. What comes from a peer is decoded by the
thread that receives from it, one frame after the other. Each thread has a core to itself, where
there are no more than `core.justenough.MOST_CORES`; others share those.

Where a relay adds up a node's gradients, these come to it as they are. It encodes the sum, and
hands answers on in their code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from foreprop.core.codecfacts import Coded
from foreprop.core.frames import SendFrame
from foreprop.core.justenough import MOST_CORES
from foreprop.core.wire import Flag, Kind

if TYPE_CHECKING:
    from foreprop_lab.simulate.served import Agreement


def between_workers_and_relays(agreement: Agreement) -> Agreement:
    """The agreement where gradients are sent as they are, and answers in their code."""
    coded = [
        each._replace(push_bytes=piece.elems * agreement.bytes_per_elem, encode_s=0.0)
        for each, piece in zip(agreement.coded or (), agreement.slices, strict=False)
    ]
    return replace(agreement, coded=coded or None)


def at_relays(agreement: Agreement) -> Agreement:
    """The agreement of those who decode nothing."""
    coded = [each._replace(decode_s=0.0) for each in agreement.coded or ()]
    return replace(agreement, coded=coded or None)


class Coder:
    """The encoding and decoding of one process; ``coded`` is by slice.

    If it is ``shared`` it encodes answers, once for all peers; otherwise it encodes pushes.
    """

    def __init__(self, coded: Sequence[Coded], *, shared: bool) -> None:
        self._coded = coded
        self._shared = shared
        self._encodes = Kind.REPLY if shared else Kind.PUSH
        self._encoded: dict[int, tuple[int, float]] = {}  # by slice: of which step, and when
        self._encoding_s = [0.0] * MOST_CORES  # by core: until when it is busy
        self._decoding_s = [0.0] * MOST_CORES

    def encoded_s(self, frame: SendFrame, now_s: float) -> float:
        """When a frame whose turn is now can be sent."""
        if frame.kind != self._encodes or not _has_payload(frame):
            return now_s
        if not self._shared:
            return self._encode(frame, now_s)
        step, encoded_s = self._encoded.get(frame.slice, (-1, 0.0))
        if step != frame.step:
            encoded_s = self._encode(frame, now_s)
            self._encoded[frame.slice] = frame.step, encoded_s
        return max(now_s, encoded_s)

    def _encode(self, frame: SendFrame, now_s: float) -> float:
        core = frame.peer % MOST_CORES
        ends_s = max(now_s, self._encoding_s[core]) + self._coded[frame.slice].encode_s
        self._encoding_s[core] = ends_s
        return ends_s

    def decoded_s(self, peer: int, frame: SendFrame, at_s: float, copies: int = 1) -> float:
        """When a frame is decoded whose bytes are there at ``at_s``, after its peer's others.

        It has come in ``copies`` times, from as many peers.
        """
        core = peer % MOST_CORES
        ends_s = max(at_s, self._decoding_s[core])
        if _has_payload(frame):
            ends_s += self._coded[frame.slice].decode_s * max(1.0, copies / MOST_CORES)
        self._decoding_s[core] = ends_s
        return ends_s


def _has_payload(frame: SendFrame) -> bool:
    is_empty = frame.flags & (Flag.NO_GRADIENT | Flag.UNCHANGED)
    return not is_empty and frame.kind in (Kind.PUSH, Kind.REPLY)
