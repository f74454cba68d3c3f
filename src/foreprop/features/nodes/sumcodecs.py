"""A relay's codecs: the sum of a node's gradients is encoded as it leaves the node.

Inside the node nothing is encoded: its workers' gradients come as they are, so a gradient loses
something once, and processors work once. A server's answer is not touched: all workers get its code
and move their images by it. What sums lose is kept here (`compression.residuals`); the node's first
worker asks for it when it saves a checkpoint, and brings it back.
"""

from __future__ import annotations

from collections.abc import Callable

from foreprop.core.frames import SendFrame
from foreprop.core.manifest import Manifest
from foreprop.core.wire import Flag, Header, Kind
from foreprop.engine.connection import Connection, Receivers
from foreprop.engine.executor import Executor
from foreprop.engine.trace import CodecStage
from foreprop.features.compression.choosing import check_code, coded_slices
from foreprop.features.compression.remoteresiduals import KeptResiduals
from foreprop.features.compression.residuals import Residuals, round_of


class SumCodecs:
    """Receives a server's answers before `nodesums.NodeSums`, and encodes the sums.

    `KeptResiduals` stands before whatever has states, for questions about what sums lose.
    """

    kinds = frozenset({Kind.REPLY})

    def __init__(
        self,
        manifest: Manifest,
        executor: Executor,
        owners: Receivers,
        scale_at: Callable[[int], float],
    ) -> None:
        self._inner = owners[Kind.REPLY]
        self._trace = executor.host.trace
        self._names = manifest.slice_names()
        self._scale_at = scale_at
        own = (piece for piece in manifest.slices() if piece.server == executor.host.index)
        self._slices = coded_slices(manifest, own)
        rank = executor.peers.first_rank(0)
        self._residuals = Residuals(manifest.parameters, self._slices, rank=rank)
        owners.put_before(self)
        owners.put_before(KeptResiduals(self._residuals, executor, owners[Kind.STATE]))

    # The sending threads.
    def encode(self, frame: SendFrame, raw: memoryview) -> memoryview:
        coded = self._slices.get(frame.slice)
        if coded is None:
            return raw
        self._residuals.announce(frame.step, self._scale_at(frame.step))
        in_round = frame.flags & Flag.GRADIENT
        if in_round:
            builds_on = bool(frame.flags & Flag.BUILDS_ON)
            self._residuals.follow(frame.slice, round_of(frame), builds_on=builds_on)
        if not len(raw) or (in_round and coded.average_codec is None):
            return raw
        started_ns = 0 if self._trace is None else self._trace.now_ns()
        data = self._residuals.encoded(frame, raw)
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
