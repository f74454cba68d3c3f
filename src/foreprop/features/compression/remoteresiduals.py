"""Residuals that servers and relays keep, and how a worker fetches them and brings them back.

With local aggregation relays encode: workers' gradients come to them as they are, and what a sum
has lost stays there. What averages have lost, where workers update, stays at the servers. A worker
asks for both when it saves a checkpoint, and has them back in place before the next push when it
loads one. It does so between two steps, so nothing of its node is under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from foreprop.core.frames import Round, SendFrame
from foreprop.core.wire import Flag, Header, Kind
from foreprop.engine.connection import Connection, Service
from foreprop.engine.executor import Executor
from foreprop.engine.memory import bytes_of
from foreprop.engine.tensors import decode_state, encode_state
from foreprop.engine.worker import WorkerEngine
from foreprop.errors import RemoteProtocolError
from foreprop.features.compression.choosing import SliceCodec
from foreprop.features.compression.residuals import OF_AVERAGES, Arrays, Residuals


class KeptResiduals:
    """Answers questions about a relay's residuals, or a server's of ``averages``.

    Other questions about states go on to ``inner``.
    """

    kinds = frozenset({Kind.STATE, Kind.STATE_PULL})

    def __init__(
        self, residuals: Residuals, executor: Executor, inner: Service, *, averages: bool = False
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


class _RemoteResiduals:
    """Residuals of these slices that others keep. Training thread.

    ``copies`` has the arrays only while they are fetched or sent.
    """

    def __init__(
        self,
        engine: WorkerEngine,
        copies: Residuals,
        slices: Mapping[int, SliceCodec],
        *,
        flags: int,
    ) -> None:
        self._engine = engine
        self._copies = copies
        self._slices = slices
        self._flags = flags

    def _kept(self) -> Sequence[int]:
        """The slices that may have residuals which this worker saves."""
        raise NotImplementedError

    def whole(self, step: int) -> dict[str, dict[str, torch.Tensor]]:
        if not (kept := self._kept()):
            return {}
        answers = self._engine.requests.fetch_states(kept, step, flags=self._flags)
        for number, data in answers.items():
            state = decode_state(memoryview(data), elems=self._slices[number].elems)
            if state:
                self._copies.put(number, state)
        found = self._copies.whole(step)
        self._copies.replace({})
        return found

    def replace(self, whole: Mapping[str, Arrays]) -> set[tuple[str, str]]:
        taken = self._copies.replace(whole)
        for number in self._kept():
            data = encode_state(self._copies.get(number, 0))
            self._engine.requests.send_state(number, 0, data, flags=self._flags)
        self._copies.replace({})
        return taken


class NodeResiduals(_RemoteResiduals):
    """A relay's residuals, as a worker sees them; the first worker of a node saves them."""

    def __init__(self, engine: WorkerEngine, slices: Mapping[int, SliceCodec]) -> None:
        peers = engine.manifest.peers()
        own = (ranks for ranks in peers.ranks if ranks.start == engine.rank)
        self.ranks = next(own, range(0))
        """The ranks whose residuals it loads: all of the node, or none."""
        copies = Residuals(engine.parameters, slices, rank=engine.rank)
        super().__init__(engine, copies, slices, flags=Flag.RESIDUAL)
        kept = [number for number, coded in slices.items() if coded.codec.new_state(1)]
        self._numbers = kept if self.ranks else []
        self.announce = copies.announce

    def _kept(self) -> Sequence[int]:
        return self._numbers

    def follow(self, slice_: int, round_: Round, *, builds_on: bool = False) -> None:
        """Do nothing: the relay follows."""

    def may_not_count(self, flags: int) -> bool:
        return False

    def give_up(self, slice_: int) -> None:
        """Do nothing: all pushes of relays count."""

    def decayed(self, frame: SendFrame, raw: memoryview, image: torch.Tensor) -> memoryview:
        """A worker's gradient with its weight decay, for the relay's sum. Sending threads."""
        values = self._slices[frame.slice].tensor_of(raw)
        return bytes_of(self._copies.with_decay(frame, values, image))


class ServersResiduals(_RemoteResiduals):
    """Servers' residuals of averages; rank 0 saves them all.

    ``averaged`` says by slice whether its answers are averages, as far as is known.
    """

    def __init__(
        self, engine: WorkerEngine, slices: Mapping[int, SliceCodec], averaged: Mapping[int, bool]
    ) -> None:
        self.ranks = range(engine.rank == 0)
        copies = Residuals(engine.parameters, slices, rank=engine.rank, averages=True)
        super().__init__(engine, copies, slices, flags=Flag.RESIDUAL | Flag.AVERAGES)
        self._averaged = averaged
        self._loaded: set[int] = set()

    def _kept(self) -> Sequence[int]:
        own = self._slices if self.ranks else ()
        averaged = [number for number in own if self._averaged.get(number)]
        return sorted(self._loaded.union(filter(self._has_state, averaged)))

    def _has_state(self, number: int) -> bool:
        codec = self._slices[number].average_codec
        return codec is not None and bool(codec.new_state(1))

    def whole(self, step: int) -> dict[str, dict[str, torch.Tensor]]:
        found = super().whole(step)
        return {
            name: {OF_AVERAGES + key: array for key, array in arrays.items()}
            for name, arrays in found.items()
        }

    def replace(self, whole: Mapping[str, Arrays]) -> set[tuple[str, str]]:
        own = {
            name: {
                key.removeprefix(OF_AVERAGES): array
                for key, array in arrays.items()
                if key.startswith(OF_AVERAGES)
            }
            for name, arrays in whole.items()
        }
        names = [info.name for info in self._engine.parameters]
        for number in self._slices if self.ranks else ():
            if own.get(names[self._slices[number].piece.parameter]) and self._has_state(number):
                self._loaded.add(number)
        return {(name, OF_AVERAGES + key) for name, key in super().replace(own)}
