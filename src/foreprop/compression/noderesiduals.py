"""Residuals that are kept elsewhere, as a worker asks for them when it saves a checkpoint.

With local aggregation relays encode: workers' gradients come to them as they are, and what a sum
has lost stays there. What averages have lost, where workers update, stays at the servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from foreprop.compression.choosing import SliceCodec
from foreprop.compression.residuals import OF_AVERAGES, Arrays, Residuals
from foreprop.core.collect import Round
from foreprop.core.frames import SendFrame
from foreprop.core.wire import Flag
from foreprop.path.memory import bytes_of
from foreprop.path.tensors import decode_state, encode_state
from foreprop.path.worker import WorkerEngine


class _Elsewhere:
    """Training thread."""

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
        """On their way."""
        self._slices = slices
        self._flags = flags

    def _kept(self) -> Sequence[int]:
        """The slices of which there may be any that are this worker's to save."""
        raise NotImplementedError

    def whole(self, step: int) -> dict[str, dict[str, torch.Tensor]]:
        """As `Residuals.whole`."""
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
        """As `Residuals.replace`: they are there before the next push."""
        taken = self._copies.replace(whole)
        for number in self._kept():
            data = encode_state(self._copies.get(number, 0))
            self._engine.requests.send_state(number, 0, data, flags=self._flags)
        self._copies.replace({})
        return taken


class NodeResiduals(_Elsewhere):
    """A relay's, as a worker sees them; only a node's first one has any to save."""

    def __init__(self, engine: WorkerEngine, slices: Mapping[int, SliceCodec]) -> None:
        peers = engine.manifest.peers()
        own = (ranks for ranks in peers.ranks if ranks.start == engine.rank)
        self.ranks = next(own, range(0))
        """Whose residuals it loads: all of the node, or nobody's."""
        copies = Residuals(engine.parameters, slices, rank=engine.rank)
        super().__init__(engine, copies, slices, flags=Flag.RESIDUAL)
        kept = [number for number, coded in slices.items() if coded.codec.new_state(1)]
        self._numbers = kept if self.ranks else []
        self.announce = copies.announce

    def _kept(self) -> Sequence[int]:
        return self._numbers

    def follow(self, slice_: int, round_: Round, *, builds_on: bool = False) -> None:
        """As `Residuals.follow`: the relay does."""

    def decayed(self, frame: SendFrame, raw: memoryview, image: torch.Tensor) -> memoryview:
        """A worker's gradient with its weight decay, for the relay's sum. Sending threads."""
        values = self._slices[frame.slice].tensor_of(raw)
        return bytes_of(self._copies.with_decay(frame, values, image))


class ServersResiduals(_Elsewhere):
    """Of averages; rank 0 saves them all."""

    def __init__(
        self,
        engine: WorkerEngine,
        slices: Mapping[int, SliceCodec],
        averaged: Mapping[int, bool],
    ) -> None:
        """``averaged``: by slice, whether its answers are averages, as far as is known."""
        self.ranks = range(engine.rank == 0)
        copies = Residuals(engine.parameters, slices, rank=engine.rank, averages=True)
        super().__init__(engine, copies, slices, flags=Flag.RESIDUAL | Flag.AVERAGES)
        self._averaged = averaged
        self._brought: set[int] = set()

    def _kept(self) -> Sequence[int]:
        own = self._slices if self.ranks else ()
        there = [number for number in own if self._averaged.get(number)]
        return sorted(self._brought.union(filter(self._has_state, there)))

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
                self._brought.add(number)
        return {(name, OF_AVERAGES + key) for name, key in super().replace(own)}
