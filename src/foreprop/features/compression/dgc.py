"""Deep Gradient Compression: top-k with momentum that is corrected on the worker.

Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
Training (2018), sections 3.1 to 3.3 and algorithm 4. The worker has the momentum, so the server's
optimizer has none for these parameters; nor weight decay, which is in the gradients that are
accumulated. `core.codec.takes` says which parameters it is not for,
`compression.codecs.make_for_replies` what answers it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from foreprop.config import Config
from foreprop.core.codec import Place, codec_of, kind_of, takes
from foreprop.core.manifest import NO_GROUP, Hyperparameters, Manifest
from foreprop.core.slicing import Slice
from foreprop.errors import ConfigError, TrainingLoopError
from foreprop.features.compression.kernels import all_finite, copy_parts, spans, zeros
from foreprop.features.compression.sparse import (
    SentShare,
    TopK,
    decode_sparse,
    encode_sparse,
    largest,
    parse_share,
    sparse_bytes,
)

_SETTLED = ("momentum", "nesterov", "dampening", "weight_decay", "maximize")
"""Settings of SGD that must stay as they were when workers began to accumulate."""


class DgcTraining(NamedTuple):
    """What DGC must know of a training."""

    momentum: float = 0.0
    """m; the server's optimizer has none then."""
    nesterov: bool = False
    clip_norm: float | None = None
    """The limit of the norm of the summed gradient, for each slice."""
    clip_value: float | None = None
    """The limit of an element's magnitude in one push."""
    pushes: int = 1
    """N: each pusher clips at ``clip_norm / sqrt(N)``, for N independent gradients sum to that."""
    warmup_steps: int = 0
    """The steps of each stage of the warm-up, an epoch in the paper; 0: none."""
    decay: float = 0.0
    """The weight decay of one worker's gradient. The codec has no values: its caller adds it."""


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
        is_clamped = self.training.clip_value is not None  # a clamped infinity would be a number
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
        """What the gradient is clipped by before it is accumulated, as in section 3.2."""
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
    """DGC by a share, or by a share and the steps of a stage of its warm-up: ``0.001:500``.

    Raises ValueError for what is neither.
    """
    training = training or DgcTraining()
    return Dgc(f"dgc:{given}", _sent_share(given, training), training)


def dgc_replies(given: str, pushes: int, training: DgcTraining | None = None) -> TopK:
    """The codec of replies: the largest differences, as many as all pushes to a slice have."""
    sent = _sent_share(given, training or DgcTraining())
    return TopK(f"dgc:{given}", SentShare(sent.share, sent.warmup_steps, pushes))


def _sent_share(given: str, training: DgcTraining) -> SentShare:
    share, colon, steps = given.partition(":")
    warmup_steps = int(steps) if colon else training.warmup_steps
    if warmup_steps < 0:
        raise ValueError(given)
    return SentShare(parse_share(share), warmup_steps)


# In a session.
def training_of(manifest: Manifest, piece: Slice) -> DgcTraining:
    """What DGC must know of the training of a slice, from its parameter's group if it has one."""
    parameter, pushes = piece.parameter, manifest.peers().count
    clip_norm, clip_value = _clip_norm_of(manifest, piece), _clip_value_of(manifest, parameter)
    if manifest.parameters[parameter].group == NO_GROUP:
        return DgcTraining(clip_norm=clip_norm, clip_value=clip_value, pushes=pushes)
    group = manifest.optimizer.groups[manifest.parameters[parameter].group]
    decay = _number(group, "weight_decay")
    if manifest.reductions()[parameter] == "sum":
        decay /= manifest.world_size  # so that all workers' gradients together have the optimizer's
    return DgcTraining(
        momentum=_number(group, "momentum"),
        nesterov=bool(group.get("nesterov")),
        clip_norm=clip_norm,
        clip_value=clip_value,
        pushes=pushes,
        decay=-decay if group.get("maximize") else decay,
    )


def _clip_norm_of(manifest: Manifest, piece: Slice) -> float | None:
    """The slice's part of ``clip_grad_norm``, as a limit of the sum of the ranks' gradients.

    A slice leaves before the others' gradients are known. So each has that part of the limit's
    square that its elements are of all that are accumulated: together they are within the limit. If
    the gradient is a mean, its sum may be as many times larger as there are ranks (algorithm 4).
    """
    limit = manifest.knobs.aggregation.clip_grad_norm
    if limit is None:
        return None
    elems = sum(manifest.parameters[number].elems for number in dgc_parameters(manifest))
    if manifest.reductions()[piece.parameter] == "mean":
        limit *= manifest.world_size
    return limit * math.sqrt(piece.elems / elems)


def _clip_value_of(manifest: Manifest, parameter: int) -> float | None:
    """The limit of one push, so that the gradient of all is within ``clip_grad_value``."""
    limit = manifest.knobs.aggregation.clip_grad_value
    if limit is None:
        return None
    if manifest.reductions()[parameter] == "mean":
        limit *= manifest.world_size
    return limit / manifest.peers().count


def without_momentum(
    group: Hyperparameters, settled: Hyperparameters, name: str
) -> Hyperparameters:
    """The group for the server's update of a parameter whose workers have the momentum.

    ``settled`` is the group as it was at the start. Raises `TrainingLoopError` if a setting has
    changed with which workers accumulate.
    """
    for key in _SETTLED:
        now, was = _number(group, key), _number(settled, key)
        if now != was:
            raise TrainingLoopError(
                f"{key} was {was} and is now {now}; workers accumulate the gradients of {name} with"
                f" the former, as its compression is dgc. Leave {key} as it is (OneCycleLR:"
                " cycle_momentum=False), or use another codec"
            )
    zero = {name: 0.0 for name in group if name.partition(" ")[0] in ("momentum", "weight_decay")}
    return {**group, **zero, "nesterov": False}


def check_dgc(config: Config, manifest: Manifest) -> None:
    """Raise `ConfigError` for an optimizer whose momentum workers cannot accumulate."""
    optimizer = manifest.optimizer
    if optimizer.name != "SGD":
        raise ConfigError(
            f"compression is {config.compression!r} and the optimizer is {optimizer.name}; dgc"
            " accumulates SGD's momentum on workers: use torch.optim.SGD, or topk instead of dgc"
        )
    for number in dgc_parameters(manifest):
        info = manifest.parameters[number]
        group = {} if info.group == NO_GROUP else optimizer.groups[info.group]
        if (dampening := _number(group, "dampening")) != 0:
            raise ConfigError(
                f"compression: dgc is chosen for {info.name}, whose parameter group has"
                f" dampening={dampening}; dgc needs 0. Put it into a group without, or leave it"
                f" out, before the patterns that match it: {{{info.name!r}: 'none', ...}}"
            )


def dgc_parameters(manifest: Manifest) -> list[int]:
    """The numbers of the parameters that are accumulated on workers."""
    choices = manifest.knobs.compression
    chosen = [codec_of(info.name, choices) for info in manifest.parameters]
    return [
        number
        for number, info in enumerate(manifest.parameters)
        if kind_of(chosen[number]) == "dgc" and takes(chosen[number], info.shape)
    ]


def _number(group: Hyperparameters, key: str) -> float:
    for name, value in group.items():  # the name is "momentum float32" if it was a tensor
        if name.partition(" ")[0] == key and isinstance(value, (bool, int, float)):
            return float(value)
    return 0.0
