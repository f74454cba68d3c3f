"""What the first step shows: the order of first uses, and who can update.

Servers update, as long as the loop lets them, or every worker by itself. With ``update="auto"`` the
first step decides, in which no gradient leaves before it is asked for: what it shows that servers
cannot do (a gradient that is read or edited between `backward()` and `step()`, say) makes all ranks
update by themselves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.utils.hooks import RemovableHandle

from foreprop.cluster.rendezvous import Board
from foreprop.config import Config
from foreprop.errors import ConfigError, RemoteProtocolError
from foreprop.hooks.modelhooks import FirstForward, before_forward
from foreprop.path.optimizer import check_groups, hyperparameters, why_not_elementwise
from foreprop.path.parameter import SynchronisedParameter
from foreprop.path.waiting import is_differentiable

if TYPE_CHECKING:
    from foreprop.gradients.averaged import AveragedParameter
    from foreprop.path.managedparameter import Watched
    from foreprop.session.training import Training


# Who updates.
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
    update. ``collectives``: each rank's engine updates, as servers do otherwise, but parameter by
    parameter. Raises `ConfigError` for settings that the workers cannot apply.
    """
    asked = [name for name in _ON_SERVERS if getattr(config, name) is not None]
    if scaler:
        asked.append("scaler")
    for name in ("staleness", "elastic", "backup_workers", "counted_replay"):
        asked += [name] * bool(getattr(config, name))
    if isinstance(config.compression, str):
        from foreprop.core.codec import may_be_lossy

        asked += ["compression"] * may_be_lossy(config.compression)
    if optimizer is None:
        _check_applied(asked, config, "parallelize() was given no optimizer")
        if config.update == "servers":
            raise ConfigError(
                "update is 'servers', but parallelize() was given no optimizer to update with: give"
                " it the optimizer, or leave update out"
            )
        return UpdateChoice(True, "update=workers: there is no optimizer, gradients are averaged")
    if not dense:
        return UpdateChoice(False, "update=servers: of tables by rows")
    if collectives:
        from foreprop.gradients.localstep import why_not_alone as why_not
    else:
        why_not = _why_not_served
    why = why_not(optimizer)
    if config.update == "servers" or (
        config.update == "auto" and asked and (collectives or why is None)
    ):
        return UpdateChoice(False, "update=servers")
    if config.update == "workers" or why is not None:
        _check_applied(asked, config, why)
        return UpdateChoice(True, f"update=workers{f': {why}' if why else ''}")
    return None


_ON_SERVERS = ("clip_grad_norm", "clip_grad_value", "ema")


def _check_applied(asked: Sequence[str], config: Config, why: str | None) -> None:
    """Raise `ConfigError` for settings that the workers cannot apply."""
    if asked:
        from foreprop.session.unapplied import not_applied

        raise not_applied(asked[0], config, why)


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
    """If any rank's first step needs it all workers update; ``settled``: for other reasons."""
    said = board.exchange("needs", msgspec.json.encode(mine).decode(), "first optimizer.step()")
    try:
        needs = [_NEEDS.decode(text.encode()) for text in said]
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"the store has {said} for ranks' first steps") from error
    norm = any(need.norm for need in needs)
    if settled is not None:
        return UpdateChoice(settled.by_workers, settled.text, norm)
    for rank, need in enumerate(needs):
        if need.reason is not None:
            text = f"update=workers: {need.reason} (rank {rank}, first step)"
            return UpdateChoice(True, text, norm)
    return UpdateChoice(False, "update=servers: the loop leaves gradients alone")


# The step itself.
class FirstStep:
    """From a backend's connection to the first gradient that leaves. Training thread."""

    def __init__(self, training: Training, needs: Needs) -> None:
        """``needs``: what earlier backends' first steps have shown."""
        self.is_over = False
        self.needs = needs
        self.use_order: list[int] = []
        self._training = training
        self._in_forward = False
        self._hook: RemovableHandle | None = None
        self._settings: SettingsMark | None = None  # when the first gradient came

    def begin(self, model: torch.nn.Module) -> None:
        """Be told of the model's first forward pass, and of first uses."""
        for parameter in self._training.parameters:
            parameter.watch()
        self._hook = before_forward(model, FirstForward(self._training))

    def unwatch(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def forward_started(self) -> None:
        """What was used before the model's first forward pass (a copy, a print) does not count."""
        if not self._in_forward:
            self._in_forward = True
            self.use_order.clear()
            for parameter in self._training.parameters:
                parameter.watch()

    def is_use(self, parameter: Watched, result: Any) -> bool:
        """Whether an operation's result makes this the parameter's first use; notes the order."""
        if not self._in_forward and not is_differentiable(result):
            return False
        if self._training.probe is not None:
            self._training.probe.used(parameter)
        self.use_order.append(parameter.index)
        return True

    def mark_settings(self) -> None:
        """Autograd has computed a gradient: from now on settings are not to be set."""
        if self._settings is None:
            self._settings = SettingsMark(self._training.user.optimizer)

    def need(self, reason: str, *, norm: bool = False) -> None:
        """The first step shows something that servers cannot do."""
        if self.needs.reason is None:
            self.needs = Needs(reason, norm)

    def end(self) -> None:
        """Before the first gradient leaves: who updates, and the priorities."""
        if self.is_over:
            return
        self.is_over = True
        training = self._training
        if training.choice is None or training.by_workers:
            self._choose()
        self._learn_priorities()

    def _choose(self) -> None:
        """What the first step has shown, on whatever rank, decides."""
        training = self._training
        self._look()
        training.state.take()
        choice = agree(training.board("update"), self.needs, training.choice)
        training.choose(choice)
        training.report(choice.text)
        if choice.by_workers:
            if training.averaging is not None:
                training.averaging.measures = choice.norm and training.backends.can_measure
            with training.state.quietly():
                training.backends.leave_updates()
            training.state.end()
            return
        self._let_servers_update()
        if training.planning:
            training.begin_planning()

    def _let_servers_update(self) -> None:
        training, averaging = self._training, self._training.averaging
        if averaging is None:
            return
        for averaged in [p for p in averaging.parameters if p.index < training.user.optimized]:
            averaging.parameters.remove(averaged)
            training.parameters[averaged.index] = _served_instead(training, averaged)
        if len(training.parameters) == training.user.optimized:
            training.averaging = None  # others, also those given away, go by its rounds

    def _look(self) -> None:
        """What leaves no other trace."""
        averaging = self._training.averaging
        averaged = [] if averaging is None else averaging.parameters
        replaced = [parameter.name for parameter in averaged if parameter.is_replaced]
        if replaced:
            self.need(f"the gradient of {replaced[0]} is replaced after backward()")
        several = [p.passes for p in averaged if p.passes - p.discards > 1]
        if several and self._training.fixed_passes is None:
            self.need(f"{max(several)} backward passes make the first step, and may vary")
        if self._settings is not None and self._settings.is_set():
            self.need("the optimizer's settings (lr, ...) change between backward() and step()")

    def _learn_priorities(self) -> None:
        """Rank 0's order of first use becomes everybody's priorities."""
        training = self._training
        board = training.board("priorities")
        for parameter in training.parameters:
            parameter.unwatch()
        self.unwatch()
        if training.world.rank == 0:
            used = set(self.use_order)
            rest = [i for i in range(len(training.parameters)) if i not in used]
            order = self.use_order + rest
            board.publish("order", json.dumps(order))
        else:
            from foreprop.cluster.entries import decode_order

            what = "rank 0's first step (its forward pass gives the priorities)"
            order = decode_order(board.lookup("order", what), len(training.parameters), what)
        training.backends.learn_priorities(order)


def _served_instead(training: Training, averaged: AveragedParameter) -> SynchronisedParameter:
    """In the first step, when it is known that servers update: with what it has shown so far."""
    averaged.detach()
    served = SynchronisedParameter(averaged.index, averaged.name, averaged.parameter, training)
    passes, discards = averaged.passes - averaged.discards, averaged.discards
    served.take_over(averaged.gradient, averaged.start, passes=passes, discards=discards)
    return served
