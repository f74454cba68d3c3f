"""Residuals that a relay or a server keeps, as a worker asks for them and brings them back."""

from __future__ import annotations

from foreprop.compression.residuals import Residuals
from foreprop.core.wire import Flag, Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import Connection, FrameOwner
from foreprop.path.executor import Executor
from foreprop.path.tensors import decode_state, encode_state


class KeptResiduals:
    """Owns states in the place of ``inner``: what is about these residuals ends here.

    ``averages``: they are a server's. A relay's are of its node's sums.
    """

    kinds = frozenset({Kind.STATE, Kind.STATE_PULL})

    def __init__(
        self, residuals: Residuals, executor: Executor, inner: FrameOwner, *, averages: bool = False
    ) -> None:
        self._residuals = residuals
        self._executor = executor
        self._inner = inner
        self._flags = Flag.RESIDUAL | (Flag.AVERAGES if averages else 0)

    def _is_about_these(self, header: Header) -> bool:
        return header.flags & (Flag.RESIDUAL | Flag.AVERAGES) == self._flags

    def room(self, peer: Connection, header: Header) -> memoryview:
        if self._is_about_these(header):
            self._elems(header)
        return self._inner.room(peer, header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        """The first worker is between two steps, so nothing of its node is on its way."""
        number, residuals = header.slice, self._residuals
        if not self._is_about_these(header):
            self._inner.on_frame(peer, header, payload)
        elif peer.number != 0:
            raise RemoteProtocolError(f"rank {peer.rank} is not its node's first, and asks for it")
        elif header.kind == Kind.STATE_PULL:
            data = encode_state(residuals.get(number, header.step))
            self._executor.answer(peer.number, Kind.STATE_REPLY, header, data)
        else:
            residuals.put(number, decode_state(payload, elems=self._elems(header)))

    def _elems(self, header: Header) -> int:
        elems = self._residuals.elems(header.slice)
        if elems is None:
            raise RemoteProtocolError(f"no codec is for slice {header.slice} here")
        return elems
