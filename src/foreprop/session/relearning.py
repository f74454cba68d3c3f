"""Whether the order of first use has changed for good: rank 0 looks at a step now and then."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from foreprop.core.frames import PACE_STEPS
from foreprop.core.useorder import OrderWatch
from foreprop.hooks.modelhooks import OwnHook, before_forward
from foreprop.servers.served import ServedBackend

if TYPE_CHECKING:
    from foreprop.path.managedparameter import ManagedParameter
    from foreprop.session.training import Training
    from foreprop.stragglers.pace import PaceKeeper


def look_at_order(training: Training) -> None:
    """Rank 0, after a step: begin to look at the next one, or see what this one has shown.

    Only where servers have all parameters, and ranks tell their pace, which carries the order. A
    remote table has no first use to be seen: its rows are looked up.
    """
    backend = training.backends.all[0]
    keeper = backend.pace if isinstance(backend, ServedBackend) else None
    if keeper is None or len(training.backends.all) > 1 or training.remote is not None:
        return
    if training.uses is None or training.uses.keeper is not keeper:
        training.uses = UseWatch(training, keeper)
        training.life.add_undo(training.uses.look_away)
    if training.completed % PACE_STEPS == 0:
        training.uses.begin(training)
    else:
        training.uses.end()


class UseWatch:
    """Notes in which order one step's forward pass uses pending parameters. Training thread."""

    def __init__(self, training: Training, keeper: PaceKeeper) -> None:
        self.keeper = keeper
        self._used: list[int] = []
        self._in_forward = False
        self._undo: list[Callable[[], object]] = []
        seen = training.first.use_order
        rest = [p.index for p in training.parameters if p.index not in set(seen)]
        self._watch = OrderWatch([*dict.fromkeys(seen), *rest])

    def begin(self, training: Training) -> None:
        self.end()
        self._undo.append(before_forward(training.user.model, ForwardBegins(self)).remove)
        if (averaging := training.averaging) is not None:
            averaging.watches_uses = True
            self._undo.append(lambda: setattr(averaging, "watches_uses", False))
        for parameter in training.parameters:
            self._undo.append(self._note_uses(parameter))

    def forward_begins(self) -> None:
        """What was used before (a checkpoint, a print) says nothing about the order."""
        self._in_forward = True

    def _note_uses(self, parameter: ManagedParameter) -> Callable[[], object]:
        """Until the returned function is called."""
        usual: Callable[..., bool] = cast("Any", parameter).before_use

        def before_use(*args: Any, **kwargs: Any) -> bool:
            if self._in_forward:
                self._used.append(parameter.index)
            return usual(*args, **kwargs)

        vars(parameter)["before_use"] = before_use
        return lambda: vars(parameter).pop("before_use", None)

    def look_away(self) -> None:
        """Leave the model and its parameters as they were."""
        while self._undo:
            self._undo.pop()()

    def end(self) -> None:
        """What the step has shown goes to everybody with the next pace, if it is to count."""
        self.look_away()
        order = self._watch.observe(self._used)
        self._used, self._in_forward = [], False
        if order is not None:
            self.keeper.order = order


class ForwardBegins(OwnHook):
    def __init__(self, watch: UseWatch | None = None) -> None:
        self._watch = None if watch is None else weakref.ref(watch)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        watch = self._watch() if self._watch is not None else None
        if watch is not None and torch.is_grad_enabled():
            watch.forward_begins()
