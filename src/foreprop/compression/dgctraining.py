"""What DGC must know of a session's training, and what it cannot go together with.

Lin et al., Deep Gradient Compression (2018), section 3.2 and algorithm 4: the worker has the
momentum, so the server's optimizer has none for these parameters; nor weight decay, which is in
the gradients that are accumulated.
"""

from __future__ import annotations

import math

from foreprop.compression.dgc import DgcTraining
from foreprop.config import Config
from foreprop.core.codec import codec_of, kind_of, takes
from foreprop.core.manifest import NO_GROUP, Hyperparameters, Manifest
from foreprop.core.slicing import Slice
from foreprop.errors import ConfigError, TrainingLoopError

_SETTLED = ("momentum", "nesterov", "dampening", "weight_decay", "maximize")
"""Numbers of SGD that must stay as they were when workers began to accumulate."""


def training_of(manifest: Manifest, piece: Slice) -> DgcTraining:
    """Of the optimizer's group that has the slice's parameter, if servers update it."""
    parameter, pushes = piece.parameter, manifest.peers().count
    clip_norm, clip_value = _clip_norm_of(manifest, piece), _clip_value_of(manifest, parameter)
    if manifest.parameters[parameter].group == NO_GROUP:
        return DgcTraining(clip_norm=clip_norm, clip_value=clip_value, pushes=pushes)
    group = manifest.optimizer.groups[manifest.parameters[parameter].group]
    return DgcTraining(
        momentum=_number(group, "momentum"),
        nesterov=bool(group.get("nesterov")),
        clip_norm=clip_norm,
        clip_value=clip_value,
        pushes=pushes,
        decay=_decay_of(manifest, group, parameter),
    )


def _clip_norm_of(manifest: Manifest, piece: Slice) -> float | None:
    """The slice's part of ``clip_grad_norm``, as a limit of the sum of the ranks' gradients.

    A slice leaves before the others' gradients are known, so each has the part of the square that
    its elements are of all that are accumulated: together they are within the limit. Of a mean
    the limit is that of the sum divided by the number of ranks, as in algorithm 4.
    """
    limit = manifest.knobs.aggregation.clip_grad_norm
    if limit is None:
        return None
    elems = sum(manifest.parameters[number].elems for number in dgc_parameters(manifest))
    if manifest.reductions()[piece.parameter] == "mean":
        limit *= manifest.world_size
    return limit * math.sqrt(piece.elems / elems)


def _clip_value_of(manifest: Manifest, parameter: int) -> float | None:
    """Of one push, so that what all of them make is within ``clip_grad_value``."""
    limit = manifest.knobs.aggregation.clip_grad_value
    if limit is None:
        return None
    if manifest.reductions()[parameter] == "mean":
        limit *= manifest.world_size
    return limit / manifest.peers().count


def _decay_of(manifest: Manifest, group: Hyperparameters, parameter: int) -> float:
    """Of one worker's gradient, so that what is made of all of them has the optimizer's."""
    decay = _number(group, "weight_decay")
    if manifest.reductions()[parameter] == "sum":
        decay /= manifest.world_size
    return -decay if group.get("maximize") else decay


def without_momentum(
    group: Hyperparameters, settled: Hyperparameters, name: str
) -> Hyperparameters:
    """The group as the server's update takes it, of a parameter whose workers have the momentum.

    ``settled`` is the group as it was at the start. Raises `TrainingLoopError` if a number has
    changed that workers accumulate with.
    """
    for key in _SETTLED:
        now, was = _number(group, key), _number(settled, key)
        if now != was:
            raise TrainingLoopError(
                f"{key} was {was} and is now {now}; workers accumulate the gradients of {name} with"
                f" the former, as its compression is dgc. Leave {key} as it is (OneCycleLR:"
                " cycle_momentum=False), or use another codec"
            )
    return {**group, **_numbers_like(group, momentum=0.0, weight_decay=0.0), "nesterov": False}


def check_dgc(config: Config, manifest: Manifest) -> None:
    """Raises `ConfigError`, with what to do about it."""
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
    """The numbers of those that are accumulated on workers."""
    choices = manifest.knobs.compression
    chosen = [codec_of(info.name, choices) for info in manifest.parameters]
    return [
        number
        for number, info in enumerate(manifest.parameters)
        if kind_of(chosen[number]) == "dgc" and takes(chosen[number], info.shape)
    ]


def _numbers_like(group: Hyperparameters, **numbers: float) -> Hyperparameters:
    """Under the names that the group has for them."""
    return {name: numbers[key] for name in group if (key := name.partition(" ")[0]) in numbers}


def _number(group: Hyperparameters, key: str) -> float:
    """``momentum float32`` if it was a tensor."""
    for name, value in group.items():
        if name.partition(" ")[0] == key and isinstance(value, (bool, int, float)):
            return float(value)
    return 0.0
