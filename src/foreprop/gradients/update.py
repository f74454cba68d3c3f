"""Who updates the parameters: servers, as long as the loop lets them, or every worker by itself.

With ``update="auto"`` the first step decides, in which no gradient leaves before it is asked for:
what it shows that servers cannot do (a gradient that is read or edited between `backward()` and
`step()`, say) makes all ranks update by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from foreprop.cluster.rendezvous import Board
from foreprop.config import Config
from foreprop.errors import ConfigError
from foreprop.path.optimizer import check_groups, hyperparameters, why_not_elementwise


class Needs(msgspec.Struct, frozen=True):
    """What one rank's first step has shown."""

    reason: str | None = None
    """Why workers must update, in words; None if servers can."""
    norm: bool = False
    """Whether the norm of gradients is asked for, as ``clip_grad_norm_`` does."""


class UpdateChoice(msgspec.Struct, frozen=True):
    """What all ranks go on with."""

    by_workers: bool
    text: str
    norm: bool = False
    """Servers are to tell sums of squares in every round."""


_NEEDS = msgspec.json.Decoder(Needs)


def settled_beforehand(
    config: Config,
    optimizer: torch.optim.Optimizer | None,
    *,
    scaler: bool,
    dense: bool,
    collectives: bool,
) -> UpdateChoice | None:
    """What is known at `parallelize`; None if the first step is to show it.

    ``dense``: whether the optimizer has other parameters than tables by rows, which only servers
    update. ``collectives``: make the sums, and each rank's engine updates, as servers do
    otherwise, but parameter by parameter. Raises `ConfigError` for settings that the workers
    cannot apply.
    """
    asked = [name for name in _ON_SERVERS if getattr(config, name) is not None]
    if scaler:
        asked.append("scaler")
    if optimizer is None:
        _check_none(asked, config, "parallelize() was given no optimizer")
        if config.update == "servers":
            raise ConfigError(
                "update is 'servers', but parallelize() was given no optimizer to update with: give"
                " it the optimizer, or leave update out"
            )
        return UpdateChoice(True, "update=workers: there is no optimizer, gradients are averaged")
    if not dense:
        return UpdateChoice(False, "update=servers: of tables by rows")
    why = _why_not_alone(optimizer) if collectives else _why_not_served(optimizer)
    if config.update == "servers" or (
        config.update == "auto" and asked and (collectives or why is None)
    ):
        return UpdateChoice(False, "update=servers")
    if config.update == "workers" or why is not None:
        _check_none(asked, config, why)
        return UpdateChoice(True, f"update=workers{f': {why}' if why else ''}")
    return None


_ON_SERVERS = ("clip_grad_norm", "clip_grad_value", "ema")


def _check_none(asked: Sequence[str], config: Config, why: str | None) -> None:
    if not asked:
        return
    because = why or "update is 'workers'"
    instead = {
        "clip_grad_norm": "call torch.nn.utils.clip_grad_norm_ before step()",
        "clip_grad_value": "call torch.nn.utils.clip_grad_value_ before step()",
        "ema": "average the parameters with torch.optim.swa_utils.AveragedModel",
        "scaler": "use the scaler as in a script without foreprop, and leave it out here",
    }
    value = getattr(config, asked[0], None)
    given = f"{asked[0]} is {value!r}" if value is not None else f"a {asked[0]} was given"
    raise ConfigError(
        f"{given}, which is done where servers update; here the workers do ({because}):"
        f" {instead[asked[0]]}"
    )


def _why_not_alone(optimizer: torch.optim.Optimizer) -> str | None:
    from foreprop.gradients.localstep import treats_each_alone  # collectives ask

    if treats_each_alone(optimizer):
        check_groups(optimizer)
        return None
    name = type(optimizer).__name__
    return f"{name} may not treat each parameter by itself, as torch.optim's do"


def _why_not_served(optimizer: torch.optim.Optimizer) -> str | None:
    reason = why_not_elementwise(optimizer)
    if reason is not None:
        return f"servers cannot apply {type(optimizer).__name__}: {reason}"
    check_groups(optimizer)
    hyperparameters(optimizer)
    return None


class SettingsMark:
    """By which it is known whether an optimizer's settings have been set, be it to what they were.

    A loop that sets ``lr`` between `backward()` and `step()` may begin with the value that is
    there. So each number is replaced by an equal object, which nobody else has.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._marked: list[tuple[dict[str, Any], str, Any, int]] = []
        for group in optimizer.param_groups:
            for name, value in group.items():
                if type(value) is float:
                    group[name] = own = value * 1.0
                    self._marked.append((group, name, own, 0))
                elif isinstance(value, torch.Tensor):
                    self._marked.append((group, name, value, value._version))

    def is_set(self) -> bool:
        """Whether any of them has been set since."""
        return any(
            group.get(name) is not own
            or (isinstance(own, torch.Tensor) and own._version != version)
            for group, name, own, version in self._marked
        )


def agree(board: Board, mine: Needs, settled: UpdateChoice | None) -> UpdateChoice:
    """Every rank's first step: if one of them needs it, all workers update.

    ``settled``: that they do for other reasons.
    """
    said = board.exchange("needs", msgspec.json.encode(mine).decode(), "first optimizer.step()")
    needs = [_NEEDS.decode(text.encode()) for text in said]
    norm = any(need.norm for need in needs)
    if settled is not None:
        return UpdateChoice(settled.by_workers, settled.text, norm)
    for rank, need in enumerate(needs):
        if need.reason is not None:
            text = f"update=workers: {need.reason} (rank {rank}, first step)"
            return UpdateChoice(True, text, norm)
    return UpdateChoice(False, "update=servers: the loop leaves gradients alone")
