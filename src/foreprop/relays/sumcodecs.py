"""A relay's codecs: the sum of a node's gradients is encoded as it leaves the node.

Inside the node nothing is: its workers' gradients come as they are, so a gradient loses something
once, and processors work once. A server's answer is not touched: all workers get its code and move
their images by it. What sums lose is kept here (`compression.residuals`); the node's first worker
asks for it when it saves a checkpoint, and brings it back.
"""

from __future__ import annotations

from collections.abc import Callable

from foreprop.compression.choosing import check_code, coded_slices
from foreprop.compression.residuals import Residuals, round_of
from foreprop.core.frames import SendFrame
from foreprop.core.manifest import Manifest
from foreprop.core.shards import slice_names
from foreprop.core.wire import Flag, Header, Kind
from foreprop.link.connection import Connection, FrameOwner
from foreprop.observe.trace import CodecStage
from foreprop.path.executor import Executor


class SumCodecs:
    """Stands in front of `nodesums.Sums`, ``inner``: owns a server's answers in its place."""

    kinds = frozenset({Kind.REPLY})

    def __init__(
        self,
        manifest: Manifest,
        executor: Executor,
        inner: FrameOwner,
        scale_at: Callable[[int], float],
    ) -> None:
        self._inner = inner
        self._trace = executor.host.trace
        self._names = slice_names(manifest)
        self._scale_at = scale_at
        own = (piece for piece in manifest.slices() if piece.server == executor.host.index)
        self._slices = coded_slices(manifest, own)
        rank = executor.peers.first_rank(0)
        self.residuals = Residuals(manifest.parameters, self._slices, rank=rank)

    # The sending threads.
    def encode(self, frame: SendFrame, raw: memoryview) -> memoryview:
        """Of a sum, its code."""
        coded = self._slices.get(frame.slice)
        if coded is None:
            return raw
        self.residuals.announce(frame.step, self._scale_at(frame.step))
        in_round = frame.flags & Flag.GRADIENT
        if in_round:
            builds_on = bool(frame.flags & Flag.BUILDS_ON)
            self.residuals.follow(frame.slice, round_of(frame), builds_on=builds_on)
        if not len(raw) or (in_round and coded.average_codec is None):
            return raw
        started_ns = 0 if self._trace is None else self._trace.now_ns()
        data = self.residuals.encoded(frame, raw)
        if self._trace is not None:
            about = {"step": frame.step, "slice_": frame.slice, "priority": frame.priority}
            name, stage = self._names[frame.slice], CodecStage.ENCODED.value
            self._trace.span(stage, name, started_ns, size_bytes=len(data), **about)
        return data

    # The server's thread.
    def room(self, peer: Connection, header: Header) -> memoryview:
        coded = self._slices.get(header.slice)
        is_raw = header.step == 0 or header.flags & Flag.UNCHANGED
        if coded is None or is_raw or header.payload_bytes >= coded.raw_bytes:
            return self._inner.room(peer, header)
        check_code(header, coded)
        whole = header._replace(payload_bytes=coded.raw_bytes)
        return self._inner.room(peer, whole)[: header.payload_bytes]

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        self._inner.on_frame(peer, header, payload)
