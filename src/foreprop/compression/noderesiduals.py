"""What a node's relays keep of sums that did not cross yet, as its first worker asks for it.

With local aggregation relays encode: workers' gradients come to them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from foreprop.compression.choosing import SliceCodec
from foreprop.compression.residuals import Arrays, Residuals
from foreprop.core.frames import SendFrame
from foreprop.core.wire import Flag
from foreprop.path.memory import bytes_of
from foreprop.path.tensors import decode_state, encode_state
from foreprop.path.worker import WorkerEngine


class NodeResiduals:
    """Of one worker; only a node's first one has any to save. Training thread, or as it says."""

    def __init__(self, engine: WorkerEngine, slices: Mapping[int, SliceCodec]) -> None:
        self._engine = engine
        self._slices = slices
        self._kept = [number for number, coded in slices.items() if coded.codec.new_state(1)]
        self._copies = Residuals(engine.parameters, slices, rank=engine.rank)
        """On their way to or from the relays; knows the loss's scale."""
        peers = engine.manifest.peers()
        own = (ranks for ranks in peers.ranks if ranks.start == engine.rank)
        self.ranks = next(own, range(0))
        """Whose residuals it loads: all of the node, or nobody's."""
        self.announce = self._copies.announce

    def decayed(self, frame: SendFrame, raw: memoryview, image: torch.Tensor) -> memoryview:
        """A worker's gradient with its weight decay, for the relay's sum. Sending threads."""
        values = self._slices[frame.slice].tensor_of(raw)
        return bytes_of(self._copies.with_decay(frame, values, image))

    def whole(self) -> dict[str, dict[str, torch.Tensor]]:
        """As `Residuals.whole`."""
        if not self.ranks or not self._kept:
            return {}
        answers = self._engine.requests.fetch_states(self._kept, 0, flags=Flag.RESIDUAL)
        for number, data in answers.items():
            state = decode_state(memoryview(data), elems=self._slices[number].elems)
            if state:
                self._copies.put(number, state)
        found = self._copies.whole()
        self._copies.replace({})
        return found

    def replace(self, whole: Mapping[str, Arrays]) -> set[tuple[str, str]]:
        """As `Residuals.replace`: the relays have them before the next push."""
        taken = self._copies.replace(whole)
        for number in self._kept if self.ranks else ():
            data = encode_state(self._copies.get(number))
            self._engine.requests.send_state(number, 0, data, flags=Flag.RESIDUAL)
        self._copies.replace({})
        return taken
