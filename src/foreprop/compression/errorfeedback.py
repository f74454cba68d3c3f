"""Error feedback: what a codec leaves out of a gradient is added to the next one.

Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
Training of Speech DNNs (2014), section 3.1; Karimireddy et al., Error Feedback Fixes SignSGD and
other Gradient Compression Schemes (2019), algorithm 2, with the learning rate on the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from foreprop.compression.payloads import all_finite, spans, zeros
from foreprop.core.codec import Codec, Place


@dataclass(slots=True)
class ErrorFeedback:
    """Around any codec that decodes finite values to finite ones.

    With v = g + e it sends Q(v) and keeps e = v - Q(v): sent in t steps is the sum of their
    gradients less the last e. With an empty state it is the codec alone.

    A gradient that is not finite leaves the state as it was. It is sent, and shows on all ranks;
    with a `GradScaler`, where such steps are skipped, nothing remains of it.
    """

    codec: Codec[torch.Tensor]
    encode_with: Callable[[torch.Tensor, torch.Tensor, Place], memoryview] | None = None
    """Of values and error: the codec's own way to all that `encode` does, with the same bits."""
    name: str = field(init=False)
    exact: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.name = self.codec.name

    def most_bytes(self, elems: int) -> int:
        return self.codec.most_bytes(elems)

    def new_state(self, elems: int) -> Mapping[str, torch.Tensor]:
        return {"error": zeros(elems)}

    def encode(
        self, values: torch.Tensor, state: Mapping[str, torch.Tensor], place: Place
    ) -> memoryview:
        if not state:
            return self.codec.encode(values, {}, place)
        error = state["error"]
        if self.encode_with is not None:
            return self.encode_with(values, error, place)
        compensated = torch.empty_like(values)
        for span in spans(len(values)):
            torch.add(values[span], error[span], out=compensated[span])
        data = self.codec.encode(compensated, {}, place)
        if all_finite(compensated):
            decoded = torch.empty_like(values)
            self.codec.decode(data, decoded, place)
            for span in spans(len(values)):
                torch.sub(compensated[span], decoded[span], out=error[span])
        return data

    def decode(self, data: memoryview, out: torch.Tensor, place: Place) -> None:
        self.codec.decode(data, out, place)
