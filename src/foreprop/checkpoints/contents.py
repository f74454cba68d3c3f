"""What a checkpoint's files hold: plain data, which may come from anywhere.

Sums say that a file is what was written, not who wrote it. So each is held to its form when it is
read, before anything goes on from it.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
import torch

from foreprop.checkpoints.randomstates import check_generators, check_random_states

_MOST = 2**53
Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]


class Draws(TypedDict):
    """What random numbers come next."""

    random: dict[str, Any]
    generators: list[torch.Tensor]
    epoch: Count | None


class Beginning(TypedDict, total=False):
    """The same of a pass's start; empty between two passes."""

    random: dict[str, Any]
    generators: list[torch.Tensor]
    epoch: Count | None


class Position(TypedDict):
    """Of `checkpoints.position.LoaderPosition`."""

    epoch: Count
    batches: Count
    begun: bool
    beginning: Beginning
    now: Draws
    loader: dict[Any, Any]
    parts: NotRequired[list[str]]
    before: NotRequired[Count]
    deal: NotRequired[str | None]


class OwnSession(TypedDict):
    """What is a rank's alone."""

    buffers: dict[str, torch.Tensor]
    residuals: dict[str, Any]


class OwnPart(TypedDict):
    """A rank's file."""

    sessions: list[OwnSession]
    objects: dict[str, Any]
    position: Position


class OptimizerState(TypedDict):
    """As every `torch.optim.Optimizer` has it."""

    state: dict[int, dict[str, Any]]
    param_groups: list[dict[str, Any]]


class SharedSession(TypedDict):
    """What is alike on all ranks."""

    model: dict[str, Any]
    optimizer: OptimizerState
    masters: NotRequired[dict[str, torch.Tensor]]
    ema: NotRequired[dict[str, Any]]


class SharedPart(TypedDict):
    """The file of the lowest rank."""

    step: Count
    sessions: list[SharedSession]


class LeftState(TypedDict):
    """What members leave for who joins (`checkpoints.loopstates`)."""

    before: Count
    numbers: list[list[dict[str, Any]]]
    objects: dict[str, Any]
    position: Position


def check_form(found: Any, form: Any) -> None:
    """Raise ValueError that says what is not of this form, and where."""
    try:
        msgspec.convert(found, type=form)
    except Exception as error:  # msgspec's own, or of a tensor in a mapping's place
        raise ValueError(str(error)) from error
    if isinstance(found, dict) and "position" in found:
        _check_position(found["position"])


def _check_position(position: Any) -> None:
    beginning = position["beginning"]
    if beginning and beginning.keys() != position["now"].keys():
        raise ValueError("the beginning of the pass is not whole - at `$.position.beginning`")
    if position["begun"] and not position["loader"] and not beginning:
        raise ValueError("a pass has begun, and nothing says how - at `$.position`")
    for name in ("now", "beginning"):
        if draws := position[name]:
            try:
                check_random_states(draws["random"])
                check_generators(draws["generators"])
            except Exception as error:  # whatever torch, numpy and Python make of it
                raise ValueError(
                    f"no random numbers ({error!r}) - at `$.position.{name}`"
                ) from error
