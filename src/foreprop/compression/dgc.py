"""Deep Gradient Compression: top-k with momentum that is corrected on the worker.

Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
Training (2018), sections 3.1 to 3.3 and algorithm 4. The server's optimizer must have no momentum
for these parameters, and weight decay has to be in the gradients. `core.codec.takes` says
which parameters it is not for, `compression.codecs.make_for_replies` what answers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from foreprop.compression.payloads import all_finite, copy_parts, spans, zeros
from foreprop.compression.sparse import (
    SentShare,
    TopK,
    decode_sparse,
    encode_sparse,
    largest,
    parse_share,
    sparse_bytes,
)
from foreprop.core.codec import Place


class DgcTraining(NamedTuple):
    """What DGC must know of a training."""

    momentum: float = 0.0
    """m; the server's optimizer has none then."""
    nesterov: bool = False
    clip_norm: float | None = None
    """The limit of the norm of the summed gradient, here of each slice."""
    clip_value: float | None = None
    """The limit of an element's magnitude in one push."""
    pushes: int = 1
    """N: each pusher clips at ``clip_norm / sqrt(N)``, for N independent gradients sum to that."""
    warmup_steps: int = 0
    """Steps of each stage of the warm-up, an epoch in the paper; 0: none."""
    decay: float = 0.0
    """Weight decay of one worker's gradient; whoever calls the codec adds it, it has no values."""


@dataclass(slots=True)
class Dgc:
    """Sends the largest elements of v; what is sent leaves v, and u as well (factor masking).

    u = m * u + g and v = v + u; Nesterov: u = m * (u + g) and v = v + u + g. Without momentum it
    is top-k with error feedback. With an empty state it is top-k alone.

    A gradient that is not finite leaves the state as it was; what is sent of it is NaN.
    """

    name: str
    share: SentShare
    training: DgcTraining
    exact: bool = field(default=False, init=False)

    def most_bytes(self, elems: int) -> int:
        return sparse_bytes(elems, self.share.pairs(elems, 0))

    def new_state(self, elems: int) -> Mapping[str, torch.Tensor]:
        return {"momentum": zeros(elems), "accumulated": zeros(elems)}

    def encode(
        self, values: torch.Tensor, state: Mapping[str, torch.Tensor], place: Place
    ) -> memoryview:
        count = self.share.pairs(len(values), place.step)
        if not state:
            return encode_sparse(values, largest(values, count))
        u, v = self._accumulate(values, state, place.scale)
        # a clamped infinity would be a number
        is_clamped = self.training.clip_value is not None
        if not all_finite(v) or (is_clamped and not all_finite(values)):
            return encode_sparse(torch.full_like(values, torch.nan), torch.arange(count))
        indices = largest(v, count)
        data = encode_sparse(v, indices)
        u.index_fill_(0, indices, 0.0)
        v.index_fill_(0, indices, 0.0)
        copy_parts(state["momentum"], u)
        copy_parts(state["accumulated"], v)
        return data

    def decode(self, data: memoryview, out: torch.Tensor, place: Place) -> None:
        decode_sparse(self.name, data, out, self.share.pairs(len(out), place.step))

    def _accumulate(
        self, values: torch.Tensor, state: Mapping[str, torch.Tensor], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next u and v, in memory of their own."""
        momentum, nesterov = self.training.momentum, self.training.nesterov
        factor, limit = self._clip_factor(values, scale), self.training.clip_value
        u, v = torch.empty_like(values), torch.empty_like(values)
        for span in spans(len(values)):
            gradient = values[span] if factor == 1.0 else values[span] * factor
            if limit is not None:
                gradient = gradient.clamp(-limit * scale, limit * scale)
            if nesterov:
                torch.add(state["momentum"][span], gradient, out=u[span]).mul_(momentum)
                torch.add(state["accumulated"][span], u[span], out=v[span]).add_(gradient)
            else:
                torch.add(gradient, state["momentum"][span], alpha=momentum, out=u[span])
                torch.add(state["accumulated"][span], u[span], out=v[span])
        return u, v

    def _clip_factor(self, values: torch.Tensor, scale: float) -> float:
        """Section 3.2: before the accumulation, at N^(-1/2) of the limit."""
        if self.training.clip_norm is None:
            return 1.0
        limit = scale * self.training.clip_norm / self.training.pushes**0.5
        squares = (
            float(torch.linalg.vector_norm(values[span], dtype=torch.float64)) ** 2
            for span in spans(len(values))
        )
        norm = sum(squares) ** 0.5
        return limit / norm if norm > limit else 1.0


def dgc(given: str = "0.001", training: DgcTraining | None = None) -> Dgc:
    """``given`` is a share, or a share and the steps of a stage of its warm-up: ``0.001:500``.

    Raises ValueError for what is neither.
    """
    training = training or DgcTraining()
    return Dgc(f"dgc:{given}", _sent_share(given, training), training)


def dgc_replies(given: str, pushes: int, training: DgcTraining | None = None) -> TopK:
    """The largest differences, as many as all pushes to a slice have elements."""
    sent = _sent_share(given, training or DgcTraining())
    return TopK(f"dgc:{given}", SentShare(sent.share, sent.warmup_steps, pushes))


def _sent_share(given: str, training: DgcTraining) -> SentShare:
    share, colon, steps = given.partition(":")
    warmup_steps = int(steps) if colon else training.warmup_steps
    if warmup_steps < 0:
        raise ValueError(given)
    return SentShare(parse_share(share), warmup_steps)
