"""A relay's codecs: the sum of a node's gradients is encoded as it leaves the node.

Inside the node nothing is: its workers' gradients come as they are, so a gradient loses something
once, and processors work once. A server's answer is not touched: all workers get its code and move
their images by it. What sums lose is kept here (`compression.residuals`); the node's first worker
asks for it when it saves a checkpoint, and brings it back.
"""

from __future__ import annotations

from foreprop.compression.choosing import check_code, coded_slices
from foreprop.compression.residuals import Residuals
from foreprop.core.frames import SendFrame
from foreprop.core.manifest import SCALE, Manifest
from foreprop.core.shards import slice_names
from foreprop.core.wire import Flag, Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import Connection, FrameOwner
from foreprop.observe.trace import CodecStage
from foreprop.path.executor import Executor
from foreprop.path.slices import SettingsAt
from foreprop.path.tensors import decode_state, encode_state


class SumCodecs:
    """Stands in front of `nodesums.Sums`, ``inner``: owns a server's answers in its place."""

    kinds = frozenset({Kind.REPLY})

    def __init__(
        self, manifest: Manifest, executor: Executor, inner: FrameOwner, settings_at: SettingsAt
    ) -> None:
        self._inner = inner
        self._lock = executor.lock
        self._trace = executor.host.trace
        self._names = slice_names(manifest)
        self._settings_at = settings_at
        self._is_scaled = manifest.knobs.aggregation.skip_nonfinite
        own = (piece for piece in manifest.slices() if piece.server == executor.host.index)
        self._slices = coded_slices(manifest, own)
        rank = executor.peers.first_rank(0)
        self.residuals = Residuals(manifest.parameters, self._slices, rank=rank)

    # The sending threads.
    def encode(self, frame: SendFrame, raw: memoryview) -> memoryview:
        """Of a sum, its code."""
        if frame.slice not in self._slices or not len(raw):
            return raw
        started_ns = 0 if self._trace is None else self._trace.now_ns()
        if self._is_scaled:
            with self._lock:
                *_, scale = self._settings_at(frame.step)
            self.residuals.announce(frame.step, float(scale[SCALE]))  # type: ignore[arg-type]
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


class KeptResiduals:
    """Owns states in the place of `passing.PassedStates`, ``inner``: residuals end here."""

    kinds = frozenset({Kind.STATE, Kind.STATE_PULL})

    def __init__(self, residuals: Residuals, executor: Executor, inner: FrameOwner) -> None:
        self._residuals = residuals
        self._executor = executor
        self._inner = inner

    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.flags & Flag.RESIDUAL:
            self._elems(header)
        return self._inner.room(peer, header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        """The node's first worker is between two steps, so no sum of its node is on its way."""
        number, residuals = header.slice, self._residuals
        if not header.flags & Flag.RESIDUAL:
            self._inner.on_frame(peer, header, payload)
        elif peer.number != 0:
            raise RemoteProtocolError(f"rank {peer.rank} is not its node's first, and asks for it")
        elif header.kind == Kind.STATE_PULL:
            data = encode_state(residuals.get(number))
            self._executor.answer(peer.number, Kind.STATE_REPLY, header, data)
        else:
            residuals.put(number, decode_state(payload, elems=self._elems(header)))

    def _elems(self, header: Header) -> int:
        elems = self._residuals.elems(header.slice)
        if elems is None:
            raise RemoteProtocolError(f"no codec of this relay is for slice {header.slice}")
        return elems
