"""The order in which a forward pass uses parameters first, which is the order of priorities.

The first step shows it, and rank 0's becomes everybody's (`FirstStep`). Later rank 0 looks at a
step now and then, and takes another order over if it has changed for good (`look_at_order`). What
uses a parameter before the forward pass (a copy, a checkpoint, a print) says nothing about it.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from foreprop.backends.composedworker import ServedBackend
from foreprop.core.frames import PACE_STEPS
from foreprop.engine.rendezvous import decode_order
from foreprop.params.modelhooks import CallingHook, FirstForward, before_forward
from foreprop.params.parameter import Parameter
from foreprop.params.waiting import is_differentiable
from foreprop.session.backends import is_served
from foreprop.session.training import Training


class FirstStep:
    """The time from a connection to the first gradient that leaves: it shows the order of use.

    Training thread.
    """

    def __init__(self, training: Training) -> None:
        self.is_over = False
        self.use_order: list[int] = []
        self._training = training
        self.in_forward = False
        self._hook: RemovableHandle | None = None

    def begin(self, model: torch.nn.Module) -> None:
        """Watch for the model's first forward pass, and for first uses."""
        for parameter in self._training.parameters:
            parameter.watch()
        self._hook = before_forward(model, FirstForward(self._training.forward_started))

    def unwatch(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def forward_started(self) -> None:
        if not self.in_forward:
            self.in_forward = True
            self.use_order.clear()
            for parameter in self._training.parameters:
                parameter.watch()

    def is_use(self, parameter: Parameter, result: Any) -> bool:
        """Whether an operation with this result is the parameter's first use; if so, note it."""
        if not self.in_forward and not is_differentiable(result):
            return False
        if self._training.probe is not None:
            self._training.probe.used(parameter)
        self.use_order.append(parameter.index)
        return True

    def end(self) -> None:
        """Make rank 0's order everybody's priorities, before the first gradient leaves."""
        if self.is_over:
            return
        self.is_over = True
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
            what = "rank 0's first step (its forward pass gives the priorities)"
            order = decode_order(board.lookup("order", what), len(training.parameters), what)
        if not is_served(training.config):
            # a collective would wait for whoever makes no step at all
            board.exchange("begun", "", "first optimizer.step()")
        training.backends.learn_priorities(order)


_SAMES = 3
"""So many steps that are looked at must show the same new order until it is taken over."""


class OrderWatch:
    """Decides when the order has changed for good, from that of the first step on.

    A step may use some parameters only: those come first then, and the others keep their order.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order = tuple(order)
        self._last: tuple[int, ...] = ()
        self._seen = 0

    def observe(self, used: Sequence[int]) -> tuple[int, ...] | None:
        """Take in a step's uses in their order; returns the new order if it is to be taken over.

        No uses say nothing: something else has used all parameters before.
        """
        seen = tuple(dict.fromkeys(used))
        if not seen:
            return None
        places = set(seen)
        agrees = tuple(each for each in self._order if each in places) == seen
        self._seen = 0 if agrees else self._seen + 1 if seen == self._last else 1
        self._last = seen
        if self._seen < _SAMES:
            return None
        self._order = (*seen, *(each for each in self._order if each not in places))
        self._seen = 0
        return self._order


def look_at_order(training: Training) -> None:
    """Begin on rank 0, after a step, to look at the next one, or see what this one has shown.

    This is done only where servers have all parameters, and ranks tell their pace, which carries
    the order. A remote table has no first use to be seen: its rows are looked up.
    """
    backend = training.backends.all[0]
    if not isinstance(backend, ServedBackend) or backend.pace is None:
        return
    if len(training.backends.all) > 1 or training.remote is not None:
        return
    uses = training.composition.uses
    if uses is None or uses.backend is not backend:
        training.composition.uses = uses = UseWatch(training, backend)
        training.life.add_undo(uses.look_away)
    if training.completed % PACE_STEPS == 0:
        uses.begin(training)
    else:
        uses.end()


class UseWatch:
    """Notes in which order one step's forward pass uses pending parameters. Training thread."""

    def __init__(self, training: Training, backend: ServedBackend) -> None:
        self.backend = backend
        self._used: list[int] = []
        self._in_forward = False
        self._undo: list[Callable[[], object]] = []
        seen = training.first.use_order
        rest = [p.index for p in training.parameters if p.index not in set(seen)]
        self._watch = OrderWatch([*dict.fromkeys(seen), *rest])

    def begin(self, training: Training) -> None:
        self.end()
        mine = weakref.ref(self)

        def forward_begins(*_: Any) -> None:
            if (found := mine()) is not None and torch.is_grad_enabled():
                found._in_forward = True

        self._undo.append(before_forward(training.user.model, CallingHook(forward_begins)).remove)
        if (averaging := training.averaging) is not None:
            averaging.watches_uses = True
            self._undo.append(lambda: setattr(averaging, "watches_uses", False))

        def note(parameter: int) -> None:
            if self._in_forward:
                self._used.append(parameter)

        training.note_use = note
        self._undo.append(lambda: setattr(training, "note_use", None))

    def look_away(self) -> None:
        """Take the watch off the model and its session."""
        while self._undo:
            self._undo.pop()()

    def end(self) -> None:
        """Give what the step has shown to everybody with the next pace, if it is to count."""
        self.look_away()
        order = self._watch.observe(self._used)
        self._used, self._in_forward = [], False
        if order is not None and self.backend.pace is not None:
            self.backend.pace.order = order
